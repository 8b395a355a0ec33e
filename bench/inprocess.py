"""The bounds: what the model alone takes, without HTTP, in a process of its own.

Each line of standard input is `{"what": NAME, ...}`, the answer one line of JSON. Run by the benchmark as
`python -m bench.inprocess DTYPE`.
"""

import json
import sys
import time
from collections.abc import Callable
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

    def packed(self, texts: list[str]) -> float:
        """Seconds for these texts, in batches of the service's size."""
        batches: list[list[Passage]] = [[]]
        for passage in self.reader.read([(text,) for text in texts]):
            if sum(map(len, batches[-1])) + len(passage) > BATCH_TOKENS["cpu"]:
                batches.append([])
            batches[-1].append(passage)
        start = time.perf_counter()
        for batch in batches:
            self.encoder.encode(batch, [Probe()] * len(batch))
        return time.perf_counter() - start

    def lone(self, texts: list[str]) -> float:
        """Median seconds for one of these texts alone."""
        times = []
        for passage in self.reader.read([(text,) for text in texts]):
            start = time.perf_counter()
            self.encoder.encode([passage], [Probe()])
            times.append(time.perf_counter() - start)
        return median(times)

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

    def recording_code(self, texts: list[str]) -> dict[str, Any]:
        """Embeddings with the recording code in the attention and with it taken out: seconds of each, and whether all bits are equal.

        The bits are also compared with those that come while the same texts are recorded.
        """
        passages = self.reader.read([(text,) for text in texts])
        bare, recorded = [Probe(embeddings=True)] * len(texts), [Probe(embeddings=True, layers=(0, 5))] * len(texts)
        record, times, answers = bridge._record, {"present": [], "absent": []}, []
        for _ in range(7):
            for name in times:
                bridge._record = record if name == "present" else lambda *_, **__: None
                start = time.perf_counter()
                answers.append(self.encoder.encode(passages, bare))
                times[name].append(time.perf_counter() - start)
        bridge._record = record
        answers.append(self.encoder.encode(passages, recorded))
        same = all(np.array_equal(a.embeddings, b.embeddings) for other in answers for a, b in zip(answers[0], other, strict=True))
        return {"same": same, **{name: median(taken) for name, taken in times.items()}}

    def gflops(self) -> float:
        """What the processor's matrix products do on the model's shapes in this dtype, in GFLOP/s."""
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.encoder.facts.dtype]
        shapes = [(384, 384)] * 4 + [(384, 1536), (1536, 384)]
        operands = [(torch.randn(2048, a, dtype=dtype), torch.randn(b, a, dtype=dtype)) for a, b in shapes]

        def once() -> None:
            for x, w in operands:
                torch.nn.functional.linear(x, w)

        seconds = best(once, 20)
        return sum(2 * 2048 * a * b for a, b in shapes) / seconds / 1e9

    def wire(self, decimals: int) -> dict[str, float]:
        """Nanoseconds a number of JSON: ours, and orjson on the same array at the same rounding."""
        scores = np.random.default_rng(0).standard_normal((6, 12, 256, 256)).astype(np.float32) * 3
        weights = np.exp(scores)
        weights /= weights.sum(-1, keepdims=True)
        ours = best(lambda: sum(map(len, json_numbers(weights, decimals))), 3)
        theirs = best(lambda: orjson.dumps(np.round(weights, decimals), option=orjson.OPT_SERIALIZE_NUMPY), 3)
        return {"ours": 1e9 * ours / weights.size, "orjson": 1e9 * theirs / weights.size}


def best(work: Callable[[], object], times: int) -> float:
    """The least seconds of several tries."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def main(dtype: str) -> None:
    """Answer one line after another."""
    bounds = Bounds(dtype)
    print(json.dumps({"layers": bounds.encoder.facts.num_layers}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(bounds, asked.pop("what"))(**asked)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
