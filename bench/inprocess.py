"""The bounds: what the model alone takes, without HTTP, in a process of its own.

Each line of standard input is `{"what": NAME, ...}`, the answer one line of JSON. Run by the benchmark as
`python -m bench.inprocess DTYPE`.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from service.machine import cores, prepare

prepare(cores())

import numpy as np  # noqa: E402
import orjson  # noqa: E402
import torch  # noqa: E402

from models import bridge, checkpoint  # noqa: E402
from models.encoder import Encoder, use_threads  # noqa: E402
from models.passages import Reader  # noqa: E402
from models.values import Encoding, Passage, Probe  # noqa: E402
from service.served import BATCH_TOKENS  # noqa: E402
from service.wire import json_numbers  # noqa: E402


class Bounds:
    """The default model in this process, and what is measured of it."""

    def __init__(self, dtype: str) -> None:
        use_threads(cores())
        self.encoder = Encoder(checkpoint.load(checkpoint.DEFAULT_MODEL, dtype), "cpu")
        self.reader = Reader(self.encoder.checkpoint.tokenizer, self.encoder.facts.max_length)

    def forward(self, texts: list[str], alone: bool) -> list[float]:
        """Seconds of each forward: one text at a time, or the texts as they come in batches of the service's size."""
        batches: list[list[Passage]] = [[]]
        for passage in self.reader.read([(text,) for text in texts]):
            if batches[-1] and (alone or sum(map(len, batches[-1])) + len(passage) > BATCH_TOKENS["cpu"]):
                batches.append([])
            batches[-1].append(passage)
        return [seconds(lambda batch=batch: self.encoder.encode(batch, [Probe()] * len(batch))) for batch in batches]

    def vectors(self, texts: list[str]) -> list[list[float]]:
        """The pooled vectors of these texts."""
        passages = self.reader.read([(text,) for text in texts])
        answers = self.encoder.encode(passages, [Probe()] * len(texts))
        return [a.pooled.tolist() for a in answers if isinstance(a, Encoding) and a.pooled is not None]

    def recorded(self, texts: list[str]) -> float:
        """Median seconds for one text with all its attention recorded, and one copy of the bytes."""
        probe = Probe(embeddings=True, layers=tuple(range(self.encoder.facts.num_layers)))
        times = []
        for passage in self.reader.read([(text,) for text in texts]):
            start = time.perf_counter()
            answer = self.encoder.encode([passage], [probe])[0]
            assert isinstance(answer, Encoding)
            b"".join(array.tobytes() for array in (answer.pooled, answer.embeddings, answer.weights) if array is not None)
            times.append(time.perf_counter() - start)
        return median(times)

    def recording(self, texts: list[str], times: int) -> dict[str, Any]:
        """Embeddings with the recording code in the attention and with it taken out, and with the last layer recorded: seconds of each,
        and whether all bits are equal.
        """
        passages = self.reader.read([(text,) for text in texts])
        bare = Probe(embeddings=True)
        probes = {"present": bare, "absent": bare, "last": replace(bare, layers=(self.encoder.facts.num_layers - 1,))}
        record, answers = bridge._record, []
        taken: dict[str, list[float]] = {name: [] for name in probes}
        for number in range(times + 1):
            for name, probe in probes.items():
                bridge._record = (lambda *_, **__: None) if name == "absent" else record
                start = time.perf_counter()
                encodings = self.encoder.encode(passages, [probe] * len(passages))
                taken[name] += [time.perf_counter() - start] if number else []
                answers.append([encoding.embeddings for encoding in encodings if isinstance(encoding, Encoding)])
        bridge._record = record
        same = all(np.array_equal(a, b) for other in answers for a, b in zip(answers[0], other, strict=True))
        return {"same": same, **{name: median(times) for name, times in taken.items()}}

    def ceiling(self, texts: list[str], times: int) -> dict[str, float]:
        """The least seconds of these texts in batches, and the most GFLOP/s of matrix products on the model's shapes, in turns."""
        shapes = [(384, 384)] * 4 + [(384, 1536), (1536, 384)]
        operands = [(torch.randn(2048, a), torch.randn(b, a)) for a, b in shapes]
        flops = sum(2 * 2048 * a * b for a, b in shapes)

        def products() -> None:
            for x, w in operands:
                torch.nn.functional.linear(x, w)

        pairs = [(sum(self.forward(texts, False)), min(seconds(products) for _ in range(8))) for _ in range(times)]
        forward, product = (min(column) for column in zip(*pairs, strict=True))
        return {"seconds": forward, "gflops": flops / product / 1e9}

    def numbers(self, text: str, decimals: int, times: int) -> dict[str, float]:
        """Nanoseconds a number of JSON, of all weights of a text: ours, orjson on the array rounded before, and the rounding."""
        probe = Probe(layers=tuple(range(self.encoder.facts.num_layers)))
        (encoding,) = self.encoder.encode(self.reader.read([(text,)]), [probe])
        assert isinstance(encoding, Encoding)
        assert encoding.weights is not None
        weights, rounded = encoding.weights, np.round(encoding.weights, decimals)
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda: sum(map(len, json_numbers(weights, decimals))),
            "orjson": lambda: orjson.dumps(rounded, option=orjson.OPT_SERIALIZE_NUMPY),
            "rounding": lambda: np.round(weights, decimals),
        }
        rounds = [{name: seconds(way) for name, way in ways.items()} for _ in range(times + 1)][1:]
        return {name: 1e9 * median(taken[name] for taken in rounds) / weights.size for name in ways}


def seconds(work: Callable[[], object]) -> float:
    """Seconds that this takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main(dtype: str) -> None:
    """Answer one line after another."""
    bounds = Bounds(dtype)
    print(json.dumps({"layers": bounds.encoder.facts.num_layers}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(bounds, asked.pop("what"))(**asked)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
