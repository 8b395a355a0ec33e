"""Every architecture against transformers' own eager attention: the same hidden states, the same weights, alone and in a batch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from models.checkpoint import load
from models.encoder import Encoder
from models.values import Encoding, Passage, Probe
from tests import tiny

PATHS = {
    "bert": "packed", "roberta": "packed", "xlm-roberta": "packed", "camembert": "packed", "distilbert": "packed",
    "electra": "packed", "albert": "packed", "modernbert": "packed", "nomic_bert": "packed", "gpt2": "packed", "gpt_neox": "packed",
    "llama": "packed", "qwen3": "packed", "gemma3_text": "packed", "mistral": "packed", "gemma2": "packed", "eurobert": "packed",
    "gpt_oss": "packed",
    "t5": "padded", "mpnet": "eager", "deberta-v2": "eager",
}  # fmt: skip
LENGTHS = (1, 3, 17, 17, 40, 9)


def passages(seed: int = 0) -> list[Passage]:
    draws = np.random.default_rng(seed)
    return [
        Passage(("",), draws.integers(4, len(tiny.VOCABULARY), size=n).tolist(), [0] * n, [(0, 0)] * n, [None] * n, [False] * n)
        for n in LENGTHS
    ]


@pytest.fixture(scope="module", params=list(PATHS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Encoder]:
    name = request.param
    folder = tiny.save(tmp_path_factory.mktemp(name), name)
    return name, folder, Encoder(load(str(folder)), device="cpu")


@pytest.fixture(scope="module")
def expected(served: tuple[str, Path, Encoder]) -> list[dict[str, np.ndarray]]:
    """What the model itself says of each text alone."""
    model = tiny.model(served[0])
    with torch.inference_mode():
        outputs = [
            getattr(model, "encoder" if served[0] == "t5" else "forward")(
                input_ids=torch.tensor([p.ids]), output_attentions=True, output_hidden_states=True
            )
            for p in passages()
        ]
    return [
        {
            "last": o.last_hidden_state[0].numpy(),
            "weights": torch.stack([a[0] for a in o.attentions]).numpy(),
            "states": torch.stack([h[0] for h in o.hidden_states]).numpy(),
        }
        for o in outputs
    ]


def run(encoder: Encoder, batch: list[Passage], probe: Probe) -> list[Encoding]:
    answers = encoder.encode(batch, [probe] * len(batch))
    assert all(isinstance(a, Encoding) for a in answers)
    return answers  # type: ignore[return-value]


def close(a: np.ndarray | None, b: np.ndarray, tolerance: float) -> bool:
    assert a is not None
    assert a.shape == b.shape
    return bool(np.abs(a - b).max() <= tolerance * max(1.0, float(np.abs(b).max())))


def test_the_fastest_path_that_is_right_is_taken(served):
    assert served[2].path == PATHS[served[0]]
    assert served[2].facts.num_layers == tiny.LAYERS
    assert served[2].facts.num_heads == tiny.HEADS
    assert served[2].facts.norms == (served[2].path != "eager")


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "batch"])
def test_weights_and_hidden_states(served, expected, alone):
    encoder, batch = served[2], passages()
    probe = Probe(pooled=False, embeddings=True, layers=(0, 1, 2), hidden_layers=(0, 1, 2, 3))
    answers = [run(encoder, [p], probe)[0] for p in batch] if alone else run(encoder, batch, probe)
    for answer, right in zip(answers, expected, strict=True):
        assert close(answer.weights, right["weights"], 1e-6)
        assert close(answer.hidden_states, right["states"], 1e-5)
        assert close(answer.embeddings, right["last"], 1e-5)


def test_recording_changes_no_bit(served):
    encoder, batch = served[2], passages()
    bare, recorded = Probe(embeddings=True), Probe(embeddings=True, layers=(1,), heads=(0, 3))
    for a, b in zip(run(encoder, batch, bare), run(encoder, batch, recorded), strict=True):
        same = np.array_equal if encoder.path != "eager" else np.allclose
        assert same(a.pooled, b.pooled)
        assert same(a.embeddings, b.embeddings)


def test_alone_or_in_a_batch(served):
    encoder, batch = served[2], passages()
    probe = Probe(embeddings=True)
    for p, together in zip(batch, run(encoder, batch, probe), strict=True):
        alone = run(encoder, [p], probe)[0]
        assert close(together.embeddings, alone.embeddings, 1e-5)
        assert close(together.pooled, alone.pooled, 1e-5)


def test_chosen_layers_heads_queries_and_their_combination(served, expected):
    encoder, batch = served[2], passages()
    text, right = batch[2], expected[2]["weights"]
    chosen = run(encoder, [text], Probe(layers=(2, 0), heads=(3, 1), queries=(16, 0, 5)))[0].weights
    assert close(chosen, right[[2, 0]][:, [3, 1]][:, :, [16, 0, 5]], 1e-6)
    mean = run(encoder, [text], Probe(layers=(1,), heads=(0, 2), combine="mean"))[0].weights
    assert close(mean, right[[1]][:, [0, 2]].mean(1, keepdims=True), 1e-6)
    largest = run(encoder, [text], Probe(layers=(1,), combine="max"))[0].weights
    assert close(largest, right[[1]].max(1, keepdims=True), 1e-6)
