"""Reductions: small cases by hand, each one against its definition, and as /attend answers them."""

import json
import math
import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from models import reduce
from tests import tiny
from tests.server import ROOT, Server, serving

SENTENCE = "Tom is going to fish at the river bank"
BANK, RIVER = 9, 8


def rows(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random weights whose rows sum to 1, some of them exactly 0."""
    draws = np.random.default_rng(seed)
    raw = np.exp(4 * draws.standard_normal(shape)) * (draws.random(shape) > 0.2)
    raw[..., 0] += 1e-6
    return (raw / raw.sum(-1, keepdims=True)).astype(np.float32)


# ── By hand ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_entropy_by_hand():
    assert reduce.entropy(np.full((1, 11), 1 / 11, dtype=np.float32)) == pytest.approx([2.3979], abs=1e-4)
    assert reduce.entropy(np.eye(4, dtype=np.float32)).tolist() == [0.0] * 4
    assert not np.signbit(reduce.entropy(np.eye(4, dtype=np.float32))).any()
    assert reduce.entropy(np.array([0.5, 0.25, 0.25, 0], dtype=np.float32)) == pytest.approx(1.5 * math.log(2))


def test_rollout_by_hand():
    maps = np.array([[[0.9, 0.1], [0.5, 0.5]], [[0.6, 0.4], [0.2, 0.8]]], dtype=np.float32)
    assert reduce.rollout(maps) == pytest.approx(np.array([[0.81, 0.19], [0.32, 0.68]]), abs=1e-6)
    assert reduce.rollout(maps[:1]) == pytest.approx(np.array([[0.95, 0.05], [0.25, 0.75]]), abs=1e-6)
    assert reduce.rollout(maps, [1]) == pytest.approx(np.array([[0.32, 0.68]]), abs=1e-6)


def test_distance_and_received_by_hand():
    weights = np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], dtype=np.float32)
    place = np.arange(3)
    assert reduce.distance(weights, place, place) == pytest.approx([0.5, 0.5, 2.0])
    assert reduce.received(weights) == pytest.approx([1.75 / 3, 1 / 3, 0.25 / 3])


def test_norms_by_hand():
    weights = np.array([[0.5, 0.5], [0.1, 0.9]], dtype=np.float32)
    assert reduce.norms(weights, np.array([4.0, 0.5], dtype=np.float32)) == pytest.approx(np.array([[2.0, 0.25], [0.4, 0.45]]))


def test_top_k_by_hand():
    weights = np.array([[0.1, 0.4, 0.1, 0.4], [0.7, 0.1, 0.1, 0.1]], dtype=np.float32)
    keys, values = reduce.top_k(weights, 2)
    assert keys[0].tolist() == [1, 3]
    assert keys[1, 0] == 0
    assert values == pytest.approx(np.array([[0.4, 0.4], [0.7, 0.1]]))
    keys, values = reduce.top_k(weights, 9)
    assert keys.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert values.sum(-1) == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("previous", np.eye(6, k=-1) + np.eye(6)[0] * np.eye(6, 1)),
        ("next", np.eye(6, k=1) + np.eye(6)[5] * np.eye(6, 1, k=-5)),
        ("same", 0.6 * np.eye(6) + 0.4 / 6),
        ("delimiter", np.tile([0.35, 0.1, 0.1, 0.1, 0.0, 0.35], (6, 1))),
        ("broad", np.full((6, 6), 1 / 6)),
        ("other", np.tile([0.0, 0.0, 0.55, 0.0, 0.45, 0.0], (6, 1))),
    ],
)
def test_kind_by_hand(name, weights):
    place, special = np.arange(6), np.array([True, False, False, False, False, True])
    kinds, figures = reduce.kind(weights[None, None].astype(np.float32), place, place, special)
    assert kinds.tolist() == [[name]]
    assert set(figures) == {"previous", "next", "same", "delimiter", "entropy"}
    if name in figures:
        assert figures[name][0, 0] > (0.6 if name == "delimiter" else 0.5)


def test_broad_is_relative_to_what_can_be_reached():
    """3.8 nats of ln 128 in a long text; the same share of ln n in a short one."""
    for keys, wide, broad in ((256, 50, True), (256, 40, False), (20, 11, True), (20, 10, False)):
        weights = np.zeros((1, 1, 8, keys), dtype=np.float32)
        weights[..., -wide:] = 1 / wide
        kinds, figures = reduce.kind(weights, np.arange(8), np.arange(keys), np.zeros(keys, dtype=bool))
        assert figures["entropy"][0, 0] == pytest.approx(math.log(wide), abs=1e-5)
        assert (kinds[0, 0] == "broad") is broad


# ── By definition ────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 10_000))
def test_each_is_its_definition(queries, keys, seed):
    weights = rows((2, 3, queries, keys), seed).astype(np.float64)
    places = np.random.default_rng(seed).permutation(max(queries, keys))
    q, k = places[:queries].astype(np.int32), places[:keys].astype(np.int32)
    got_entropy, got_distance = reduce.entropy(weights), reduce.distance(weights, q, k)
    got_received, lengths = reduce.received(weights), np.abs(rows((2, 3, 1, keys), seed + 1))[:, :, 0]
    got_norms = reduce.norms(weights, lengths)
    for layer, head in np.ndindex(2, 3):
        a = weights[layer, head]
        for i in range(queries):
            assert got_entropy[layer, head, i] == pytest.approx(-sum(x * math.log(x) for x in a[i] if x > 0), abs=1e-6)
            assert got_distance[layer, head, i] == pytest.approx(sum(a[i, j] * abs(int(q[i]) - int(k[j])) for j in range(keys)), abs=1e-5)
        for j in range(keys):
            assert got_received[layer, head, j] == pytest.approx(sum(a[:, j]) / queries, abs=1e-6)
            assert got_norms[layer, head, :, j] == pytest.approx(a[:, j] * lengths[layer, head, j], abs=1e-6)
    assert got_received.sum(-1) == pytest.approx(np.ones((2, 3)), abs=1e-5)
    assert (got_entropy <= math.log(keys) + 1e-6).all()


@given(arrays.arrays(np.float32, (3, 8), elements=st.sampled_from([0.0, 0.25, 0.5, 0.75])), st.integers(1, 10))
def test_top_k_are_the_strongest(weights, k):
    keys, values = reduce.top_k(weights, k)
    assert keys.shape == values.shape == (3, min(k, 8))
    for row, picked, strong in zip(weights, keys, values, strict=True):
        assert strong.tolist() == sorted(row.tolist(), reverse=True)[:k]
        assert row[picked].tolist() == strong.tolist()
        assert len(set(picked.tolist())) == len(picked)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 10_000))
def test_rollout_is_a_product_whose_rows_sum_to_1(count, layers, seed):
    maps = rows((layers, count, count), seed)
    flow = np.eye(count)
    for attention in maps:
        flow = (0.5 * attention + 0.5 * np.eye(count)) @ flow
    assert reduce.rollout(maps) == pytest.approx(flow, abs=1e-5)
    assert reduce.rollout(maps).sum(-1) == pytest.approx(np.ones(count), abs=1e-5)
    assert reduce.rollout(maps, [count - 1]) == pytest.approx(flow[-1:], abs=1e-5)


def test_nothing_left():
    """A text of which only special tokens came, without them."""
    empty = np.zeros((2, 3, 0, 0), dtype=np.float32)
    none = np.zeros(0, dtype=np.int32)
    assert reduce.entropy(empty).shape == reduce.distance(empty, none, none).shape == (2, 3, 0)
    assert reduce.received(empty).shape == (2, 3, 0)
    assert reduce.top_k(empty, 3)[0].shape == (2, 3, 0, 0)
    assert reduce.rollout(empty[:, 0]).shape == (0, 0)
    assert reduce.kind(empty, none, none, none.astype(bool))[0].tolist() == [["other"] * 3] * 2


# ── Over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────────

ALL = ["entropy", "distance", "rollout", "received", {"top_k": 3}, "norms", "kind"]
PER_MAP = ["entropy", "distance", "received"]


def full(server, text=SENTENCE, **fields) -> dict:
    return server.attend(text, layers="all", decimals=9, **fields)["results"][0]


def array(reduction: dict) -> np.ndarray:
    return np.array(reduction["values"])


def test_all_reductions_beside_the_weights(server):
    result = full(server, reduce=ALL)
    assert list(result)[-1] == "reductions"
    reductions, weights = result["reductions"], np.array(result["attention"]["weights"], dtype=np.float32)
    assert list(reductions) == ["entropy", "distance", "rollout", "received", "top_k", "norms", "kind"]
    place = np.arange(11)
    assert array(reductions["entropy"]) == pytest.approx(reduce.entropy(weights), abs=1e-5)
    of_heads = array(reductions["entropy"]).mean(-1)
    assert (of_heads.min(), of_heads.max()) == pytest.approx((0.0009, 2.111), abs=1e-3)
    assert array(reductions["distance"]) == pytest.approx(reduce.distance(weights, place, place), abs=1e-5)
    assert array(reductions["received"]) == pytest.approx(reduce.received(weights), abs=1e-6)
    assert array(reductions["rollout"]) == pytest.approx(reduce.rollout(weights.mean(1)), abs=1e-5)
    assert array(reductions["top_k"]).shape == (6, 12, 11, 3)
    assert array(reductions["norms"]).shape == weights.shape
    for name, reduction in reductions.items():
        assert reduction["layers"] == list(range(6))
        assert reduction["heads"] == list(range(12))
        assert reduction["axes"] == list(reduce_axes(name))
        sizes = {"layer": 6, "head": 12, "query": 11, "key": 11, "rank": 3}
        assert np.array(reduction["values"]).shape == tuple(sizes[axis] for axis in reduction["axes"])
        assert ("queries" in reduction) is ("query" in reduction["axes"])


def reduce_axes(name: str) -> tuple[str, ...]:
    per_query = ("layer", "head", "query")
    return {"rollout": ("query", "key"), "received": ("layer", "head", "key"), "kind": ("layer", "head")}.get(name) or {
        "top_k": (*per_query, "rank"),
        "norms": (*per_query, "key"),
    }.get(name, per_query)


def test_instead_of_the_weights(server):
    result = full(server, reduce=ALL, include=[])
    assert list(result) == ["tokens", "words", "truncated", "reductions"]
    assert result["reductions"] == full(server, reduce=ALL)["reductions"]
    assert "reductions" not in full(server, reduce=[])


def test_top_k_of_bank(server):
    asked = {"focus": "bank", "special_tokens": "drop", "combine_heads": "mean", "reduce": [{"top_k": 3}]}
    result = server.attend(SENTENCE, layers=[0], **asked)["results"][0]
    assert np.array(result["attention"]["weights"]).shape == (1, 1, 1, 9)
    top = result["reductions"]["top_k"]
    assert top["heads"] == ["mean"]
    assert top["queries"] == [BANK]
    assert [result["tokens"][i]["text"] for i in top["keys"][0][0][0]] == ["river", "bank", "fish"]
    assert top["values"][0][0][0] == sorted(result["attention"]["weights"][0][0][0], reverse=True)[:3]
    assert top["values"][0][0][0] == pytest.approx([0.3581, 0.1236, 0.0946], abs=1e-3)


@pytest.mark.parametrize("fields", [{}, {"special_tokens": "drop"}, {"unit": "word"}, {"unit": "word", "special_tokens": "drop"}])
@pytest.mark.parametrize("narrow", [{}, {"focus": "unbelievable"}, {"combine_heads": "mean"}, {"combine_heads": "max"}, {"heads": [7, 2]}])
def test_made_of_the_maps_of_the_answer(server, fields, narrow):
    text = "An unbelievable riverbank, they said"
    answer = full(server, text, reduce=[*PER_MAP, {"top_k": 2}], **fields, **narrow)
    attention, reductions = answer["attention"], answer["reductions"]
    weights = np.array(attention["weights"])
    in_text = sorted(attention["keys"], key=lambda i: order_of(answer, fields.get("unit", "token"), i))
    place = {index: rank for rank, index in enumerate(in_text)}
    queries, keys = (np.array([place[i] for i in attention[axis]]) for axis in ("queries", "keys"))
    assert array(reductions["entropy"]) == pytest.approx(reduce.entropy(weights), abs=1e-5)
    assert array(reductions["distance"]) == pytest.approx(reduce.distance(weights, queries, keys), abs=1e-4)
    assert array(reductions["received"]) == pytest.approx(reduce.received(weights), abs=1e-5)
    assert reductions["entropy"]["queries"] == attention["queries"]
    assert reductions["received"]["keys"] == attention["keys"]
    assert reductions["entropy"]["heads"] == attention["heads"]
    column = {index: i for i, index in enumerate(attention["keys"])}
    picked = np.vectorize(column.get)(np.array(reductions["top_k"]["keys"]))
    assert np.take_along_axis(weights, picked, -1) == pytest.approx(array(reductions["top_k"]), abs=1e-6)
    assert array(reductions["top_k"])[..., 0] == pytest.approx(weights.max(-1), abs=1e-6)


def order_of(answer: dict, unit: str, index: int) -> int:
    """The first token of a row or column."""
    if unit == "token":
        return index
    words = [i for i, token in enumerate(answer["tokens"]) if token["word"] == index]
    outside = [i for i, token in enumerate(answer["tokens"]) if token["word"] is None]
    return words[0] if words else outside[index - (max(t["word"] or 0 for t in answer["tokens"]) + 1)]


def test_rollout_from_a_layer(server):
    weights = np.array(full(server)["attention"]["weights"], dtype=np.float32).mean(1)
    by_layers = server.attend(SENTENCE, layers=[3, 2], reduce=["rollout"], include=[], decimals=9)["results"][0]["reductions"]["rollout"]
    assert by_layers["layers"] == [2, 3, 4, 5]
    assert by_layers["queries"] == by_layers["keys"] == list(range(11))
    assert array(by_layers) == pytest.approx(reduce.rollout(weights[2:]), abs=1e-5)
    beside = server.attend(SENTENCE, reduce=[{"rollout": 0}, "entropy"], focus="bank", decimals=9)["results"][0]
    assert beside["attention"]["layers"] == beside["reductions"]["entropy"]["layers"] == [5]
    assert beside["reductions"]["rollout"]["layers"] == list(range(6))
    assert array(beside["reductions"]["rollout"]) == pytest.approx(reduce.rollout(weights, [BANK]), abs=1e-5)
    assert np.array(beside["attention"]["weights"])[:, :, 0].mean(1)[0] == pytest.approx(weights[5, BANK], abs=1e-6)
    negative = server.attend(SENTENCE, reduce=[{"rollout": -2}], include=[], combine_heads="max")["results"][0]["reductions"]["rollout"]
    assert negative["layers"] == [4, 5]
    assert negative["heads"] == list(range(12))


def test_rollout_of_words_is_that_of_tokens_merged(server):
    text = "An unbelievable riverbank"
    tokens = full(server, text, reduce=["rollout"], special_tokens="drop", include=[])
    words = full(server, text, reduce=["rollout"], special_tokens="drop", include=[], unit="word")["reductions"]["rollout"]
    word = [token["word"] for token in tokens["tokens"] if not token["special"]]
    flow = array(tokens["reductions"]["rollout"])
    for i, j in np.ndindex(3, 3):
        inside = flow[[k for k, w in enumerate(word) if w == i]][:, [k for k, w in enumerate(word) if w == j]]
        assert array(words)[i, j] == pytest.approx(inside.sum(1).mean(), abs=1e-6)


def test_norms_turn_from_special_tokens(server):
    """Kobayashi et al.: with the values' lengths, special tokens get far less than their weights say."""
    result = full(server, reduce=["norms"])
    weights, norms = np.array(result["attention"]["weights"]), array(result["reductions"]["norms"])
    special = [0, 10]
    ratio, seen = norms / weights.clip(1e-9), weights > 1e-4
    lengths = np.broadcast_to(np.nanmean(np.where(seen, ratio, np.nan), axis=2, keepdims=True), ratio.shape)
    assert ratio[seen] == pytest.approx(lengths[seen], rel=1e-3)  # the length belongs to the key, not to the query
    share = norms[1:5, :, :, special].sum() / norms[1:5].sum()
    assert share < weights[1:5, :, :, special].sum() / weights[1:5].sum() - 0.1
    combined = full(server, reduce=["norms"], combine_heads="mean", special_tokens="drop")
    dropped = full(server, reduce=["norms"], special_tokens="drop")
    assert array(combined["reductions"]["norms"])[:, 0] == pytest.approx(array(dropped["reductions"]["norms"]).mean(1), abs=1e-5)
    assert np.array(combined["attention"]["weights"])[:, 0] == pytest.approx(np.array(dropped["attention"]["weights"]).mean(1), abs=1e-5)


def test_kinds_of_the_default_model(server):
    kinds = full(server, text=" ".join([SENTENCE] * 4), reduce=["kind"], include=[])["reductions"]["kind"]
    names = np.array(kinds["values"])
    assert names[0, 2] == "previous"  # the head with which bank looks at river
    assert set(names.ravel()) <= set(reduce.KINDS)
    figures = {name: np.array(values) for name, values in kinds["figures"].items()}
    assert figures["previous"][0, 2] > 0.9
    assert ((figures["delimiter"] > 0.6) >= (names == "delimiter")).all()
    assert (names[1:5] == "delimiter").mean() > 0.3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("entropy", "array"), (["flow"], "flow"), ([5], "item 0"), (["top_k"], "top_k"), ([{"top_k": 0}], "top_k"),
        ([{"top_k": True}], "top_k"), ([{"top_k": 2, "rollout": 1}], "item 0"), ([{"entropy": 1}], "entropy"),
        (["kind", "kind"], "twice"), ([{"rollout": "last"}], "layer"), ([{"rollout": 6}], "6"),
        ([{"rollout": -7}], "-7"), ([{}], "item 0"), ([None], "item 0"), ([{"top_k": 1}, {"top_k": 2}], "twice"),
    ],
)  # fmt: skip
def test_bad_reductions_name_the_field(server, value, said):
    response = server.client.post("/attend", json={"text": "a", "reduce": value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", "reduce")
    assert "reduce" in error["message"]
    assert said in error["message"]


DOCUMENTED = re.findall(r"```json\n(\{.*\})\n```\n```json\n(.*)\n```", (ROOT / "docs" / "attention.md").read_text())


def test_every_reduction_is_documented():
    assert {name for _, shown in DOCUMENTED for name in json.loads(f"{{{shown}}}")} == set(reduce_names())


def reduce_names() -> list[str]:
    return [next(iter(item)) if isinstance(item, dict) else item for item in ALL]


@pytest.mark.parametrize(("body", "shown"), DOCUMENTED)
def test_the_documentation_shows_what_is_answered(server, body, shown):
    answered = server.attend(**json.loads(body))["results"][0]["reductions"]
    agree(answered, json.loads(f"{{{shown}}}"))


def agree(one: object, other: object) -> None:
    """Equal, in the order of keys too, numbers but for the last digit shown."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            agree(left, right)
    else:
        assert one == (pytest.approx(other, abs=0.0015) if isinstance(one, float) else other)


# ── Models and limits ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of which transformers hands out the attention, but not what would give norms; few weights a request."""
    folder = tmp_path_factory.mktemp("small")
    with serving(folder / "log", "--model", str(tiny.save(folder / "tiny", "deberta-v2")), "--max-attention-values", "1200") as running:
        yield running


def test_norms_that_a_model_does_not_have(small):
    response = small.client.post("/attend", json={"text": "a", "reduce": ["norms"]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reduce"
    assert "norms" in response.json()["error"]["message"]
    result = small.attend("abc de", layers="all", reduce=["entropy", "rollout", "kind"])["results"][0]
    weights = np.array(result["attention"]["weights"], dtype=np.float32)
    assert array(result["reductions"]["entropy"]) == pytest.approx(reduce.entropy(weights), abs=1e-4)
    assert array(result["reductions"]["rollout"]) == pytest.approx(reduce.rollout(weights.mean(1)), abs=1e-5)


def test_what_has_to_be_computed_is_what_counts(small):
    """10 tokens, 3 layers of 4 heads: 400 weights a layer."""
    text = "abcdefgh"
    for body, weights in (
        ({"layers": "all", "reduce": ["entropy"]}, 1200),
        ({"layers": "all", "reduce": ["entropy"], "heads": [0]}, 300),
        ({"layers": [2], "reduce": ["entropy", {"rollout": 0}]}, 1200),
        ({"layers": "all", "reduce": [{"top_k": 1}], "focus": [3]}, 120),
    ):
        body = {"text": [text, text], "include": [], **body}
        response = small.client.post("/attend", json=body)
        if 2 * weights <= 1200:
            assert response.status_code == 200, response.text
        else:
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "answer_too_large"
            assert all(str(number) in response.json()["error"]["message"] for number in (2 * weights, 1200))
        assert small.client.post("/attend", json={**body, "text": text}).status_code == 200


def test_a_text_of_which_nothing_is_left(server: Server):
    result = server.attend(" ", special_tokens="drop", reduce=ALL, layers="all")["results"][0]
    assert result["reductions"]["entropy"]["values"] == [[[]] * 12] * 6
    assert result["reductions"]["rollout"]["values"] == []
    assert result["reductions"]["kind"]["values"] == [["other"] * 12] * 6
