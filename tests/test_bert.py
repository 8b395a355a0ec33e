"""BERT as a straight line: taken where it gives the same, with its attention joined and as a graph; everything else runs as it is."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertModel

from models import bert
from models.bridge import JOINED, Forward, Recording
from models.checkpoint import DEFAULT_MODEL, load
from models.encoder import Encoder, NonfiniteOutput
from models.values import Encoding, Passage, Probe
from tests import tiny
from tests.test_architectures import close, passages, run

STRAIGHT = ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"]
VECTORS = Probe(embeddings=True)
SHOWN = 512
"""Tokens that the showing graph takes in the tests."""


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    return Encoder(load(str(tiny.save(tmp_path))), device="cpu")


def the_model_says(name: str, passage: Passage, **changes: object) -> np.ndarray:
    """The last hidden state [N, d_model] of a text alone in the model as transformers runs it."""
    with torch.inference_mode():
        inputs = {"input_ids": torch.tensor([passage.ids])}
        if any(passage.type_ids):
            inputs["token_type_ids"] = torch.tensor([passage.type_ids])
        return tiny.model(name, **changes)(**inputs).last_hidden_state[0].numpy()


def sized(*lengths: int) -> list[Passage]:
    """Texts of these lengths, of ordinary tokens."""
    longest = max(passages(), key=len)
    ids = longest.ids * (max(lengths) // len(longest) + 1)
    return [
        replace(longest, ids=ids[:n], type_ids=[0] * n, offsets=[(0, 0)] * n, segments=[None] * n, special=[False] * n) for n in lengths
    ]


@pytest.mark.parametrize("name", STRAIGHT)
def test_models_that_are_built_like_bert_are_straightened(tmp_path, name):
    encoder = Encoder(load(str(tiny.save(tmp_path, name))), device="cpu")
    assert isinstance(encoder._model, bert.Bert)
    assert encoder._graph is not None
    assert encoder.facts.architecture == type(tiny.model(name)).__name__
    for passage, answer in zip(passages(), run(encoder, passages(), VECTORS), strict=True):
        assert close(answer.embeddings, the_model_says(name, passage), 1e-5)


def test_the_default_model_is_straightened():
    encoder = Encoder(load(DEFAULT_MODEL), "cpu")
    assert isinstance(encoder._model, bert.Bert)
    assert encoder._graph is not None


@pytest.mark.parametrize("name", ["bert", "roberta"])
@pytest.mark.parametrize("lengths", [(5,), (3, 9, 20), (1, *[120] * 10)])
def test_bfloat16_is_a_graph_too(tmp_path, name, lengths):
    """Rows are filled up with more tokens than a text may have positions; nothing is joined; recorded or not, the same bits."""
    folder, batch = str(tiny.save(tmp_path, name)), sized(*lengths)
    half, full = (Encoder(load(folder, dtype), "cpu") for dtype in ("bfloat16", "float32"))
    probe, runs = Probe(embeddings=True, layers=(0, 2)), []
    expected, bare = full.encode(batch, [probe] * len(batch)), half.encode(batch, [VECTORS] * len(batch))
    graph = half._showing_graph
    half._showing_graph = lambda *inputs: runs.append(inputs[3].tolist()) or graph(*inputs)
    for a, b, c in zip(half.encode(batch, [probe] * len(batch)), expected, bare, strict=True):
        assert close(a.embeddings, b.embeddings, 5e-2)
        assert close(a.weights, b.weights, 1e-2)
        assert np.array_equal(a.embeddings, c.embeddings)
    assert [all(texts for _, texts in groups) for groups in runs] == [True]


def test_rows_have_few_sizes_where_each_costs_a_program(encoder, monkeypatch):
    encoder._blocked = True
    assert {encoder._layout((n,)).tokens for n in range(1, 64)} == set(range(4, 65, 4))
    assert all(encoder._layout((n,)).spare == 0 for n in range(64, 3000))
    monkeypatch.setattr(type(encoder._model), "dtype", torch.bfloat16)
    assert {encoder._layout((n,)).tokens for n in range(1024, 2049)} == set(range(1024, 2049, 128))
    for n in range(1, 3000):
        assert encoder._layout((n,)).spare < max(4, n / 8 + 1)
    encoder._blocked = False
    assert encoder._layout((77,)).spare == 0


def test_a_decoder_stays_as_it_is(tmp_path):
    encoder = Encoder(load(str(tiny.save(tmp_path, is_decoder=True))), device="cpu")
    assert type(encoder._model) is BertModel
    assert encoder.path == "packed"
    for passage, answer in zip(passages(), run(encoder, passages(), VECTORS), strict=True):
        assert close(answer.embeddings, the_model_says("bert", passage, is_decoder=True), 1e-5)


@pytest.mark.parametrize(
    "lengths", [(5,), (3, 9, 20), (JOINED,), (JOINED - 1, 2), (1, 1, 2, 60, 60, 60, 100), (JOINED // 2,) * 5, (3, *[120] * 10)]
)
def test_joined_or_not_and_as_a_graph_or_not(encoder, lengths):
    graph, batch, runs = encoder._graph, sized(*lengths), []
    alone = [run(encoder, [text], VECTORS)[0] for text in batch]
    encoder._graph = lambda *inputs: runs.append(1) or graph(*inputs)
    together = run(encoder, batch, VECTORS)
    assert runs == [1]
    encoder._graph = None
    for a, b, c in zip(together, run(encoder, batch, VECTORS), alone, strict=True):
        assert np.array_equal(a.embeddings, b.embeddings)
        assert close(a.embeddings, c.embeddings, 1e-5)
        assert close(a.embeddings, the_model_says("bert", sized(len(a.embeddings))[0]), 1e-5)


@pytest.mark.parametrize(
    "lengths", [(5,), (3, 9, 20), (9, 9), (JOINED - 1, 2), (1, 60, 60, 100), (SHOWN // 8,) * 8, (1, *[SHOWN // 8] * 8)]
)
@pytest.mark.parametrize(
    "probe",
    [
        Probe(embeddings=True, layers=(1,)),
        Probe(layers=(0, 1), norms=True),
        Probe(layers=(1, 0), heads=(2, 0), queries=(0,)),
        Probe(layers=(0,), keys=(0,), combine="mean"),
    ],
    ids=["last", "norms", "focus", "combined"],
)
def test_recorded_from_a_graph_or_not(encoder, lengths, probe, monkeypatch):
    """The same bits, whichever of a batch's texts is recorded; a graph does not show more than it has memory for."""
    monkeypatch.setattr("models.encoder.SHOWN", SHOWN * tiny.LAYERS * 3 * tiny.WIDTH * 4)
    batch, runs, graph = sized(*lengths), [], encoder._showing_graph
    probes = [probe, *[VECTORS] * (len(batch) - 1)]
    encoder._showing_graph = lambda *inputs: runs.append(1) or graph(*inputs)
    shown = encoder.encode(batch, probes)
    assert runs == [1] * (sum(lengths) <= SHOWN)
    encoder._showing_graph = None
    for a, b in zip(shown, encoder.encode(batch, probes), strict=True):
        assert vars(a).keys() == vars(b).keys()
        for name, array in vars(a).items():
            assert (array is None) == (getattr(b, name) is None)
            assert array is None or np.array_equal(array, getattr(b, name)), name
    assert shown[0].weights is not None


@pytest.mark.parametrize("length", [20, 100])
def test_nothing_of_a_forward_is_kept(encoder, length, monkeypatch):
    """With and without a graph, what was recorded goes with the answers: all of a large batch's attention is 150 MB."""
    monkeypatch.setattr("models.encoder.SHOWN", 50 * tiny.LAYERS * 3 * tiny.WIDTH * 4)
    encoder.encode(sized(length), [Probe(layers=(0, 1))])
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) in (Forward, Recording)]


def test_pairs(encoder):
    pair = replace(sized(12)[0], type_ids=[0] * 5 + [1] * 7)
    batch = [sized(7)[0], pair, sized(9)[0]]
    for passage, answer in zip(batch, run(encoder, batch, VECTORS), strict=True):
        assert close(answer.embeddings, the_model_says("bert", passage), 1e-5)
    assert not close(run(encoder, [pair], VECTORS)[0].embeddings, the_model_says("bert", sized(12)[0]), 1e-2)


@pytest.mark.parametrize("as_graph", [True, False])
def test_a_text_that_is_not_finite_spoils_no_other(encoder, as_graph):
    bad = 7
    batch = [p for p in passages() if bad not in p.ids]
    expected = run(encoder, batch, VECTORS)
    encoder._model.word_embeddings.weight.data[bad] = torch.nan
    if not as_graph:
        encoder._graph = encoder._showing_graph = None
    poisoned = replace(sized(3)[0], ids=[4, bad, 5])
    answers = encoder.encode([batch[0], poisoned, *batch[1:]], [VECTORS] * (len(batch) + 1))
    assert [isinstance(a, NonfiniteOutput) for a in answers] == [False, True] + [False] * (len(batch) - 1)
    kept = [a for a in answers if isinstance(a, Encoding)]
    assert all(close(a.embeddings, b.embeddings, 1e-5) for a, b in zip(kept, expected, strict=True))


@pytest.mark.parametrize("fault", ["missing", "wrong", "fails", "shows something else"])
def test_a_graph_that_cannot_be_made_or_is_wrong_is_not_used(tmp_path, monkeypatch, fault):
    def broken(model: bert.Bert, shows: bool) -> object:
        if fault == "missing":
            raise RuntimeError("no graphs here")
        if fault == "shows something else" and shows:
            right = trace(model, shows)
            return lambda *inputs: (right(*inputs)[0], *(x + x for x in right(*inputs)[1:]))
        if fault == "shows something else":
            return trace(model, shows)
        return lambda ids, *_: (torch.zeros(*ids.shape, tiny.WIDTH),) if fault == "wrong" else torch.zeros(0).item()

    trace = bert.trace

    monkeypatch.setattr(bert, "trace", broken)
    encoder = Encoder(load(str(tiny.save(tmp_path))), device="cpu")
    assert encoder._graph is None
    assert encoder._showing_graph is None
    assert isinstance(encoder._model, bert.Bert)
    assert close(run(encoder, sized(9), VECTORS)[0].embeddings, the_model_says("bert", sized(9)[0]), 1e-5)


def test_a_straight_line_that_gives_something_else_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(
        bert.Layer, "forward", lambda self, x, attend: x + attend(*[x.unflatten(-1, (4, 8)).transpose(1, 2)] * 3).flatten(2)
    )
    encoder = Encoder(load(str(tiny.save(tmp_path))), device="cpu")
    assert type(encoder._model) is BertModel
    assert encoder.facts.num_heads == tiny.HEADS
    assert close(run(encoder, sized(9), VECTORS)[0].embeddings, the_model_says("bert", sized(9)[0]), 1e-5)
