"""Every way in which the wire writes numbers, against the standard parser."""

import base64
import json
import tracemalloc
import weakref
from collections.abc import Iterator
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service import wire
from service.wire import Base64, LazyList, floats_base64, json_document, json_numbers, safetensors_chunks

BLOCKS = st.sampled_from([1, 4, 30, wire.BLOCK])
RANGES = {"weights": (0.0, 1.0), "vectors": (-1.0, 1.0), "wide": (-99.0, 99.0), "large": (-1e6, 1e6), "any": (-3e38, 3e38)}


def parsed(array: np.ndarray, decimals: int | None) -> np.ndarray:
    return np.array(json.loads(b"".join(json_numbers(array, decimals))), dtype=np.float64)


def floats(kind: str) -> st.SearchStrategy[np.ndarray]:
    low, high = RANGES[kind]
    numbers = st.floats(np.float32(low), np.float32(high), width=32)
    return arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6), elements=numbers)


@given(st.sampled_from(list(RANGES)).flatmap(floats), st.integers(1, 9), BLOCKS)
@settings(max_examples=500, deadline=None)
def test_rounded_half_to_even_from_the_exact_value(array, decimals, block):
    with patch.object(wire, "BLOCK", block):
        got = parsed(array, decimals)
    assert got.size == array.size
    if array.size:
        assert got.shape == array.shape
    with localcontext(prec=80):
        right = [float(Decimal(value).quantize(Decimal(10) ** -decimals, ROUND_HALF_EVEN)) for value in array.ravel().tolist()]
    assert got.ravel().tolist() == right


@given(st.sampled_from(list(RANGES)).flatmap(floats), BLOCKS)
@settings(max_examples=300, deadline=None)
def test_exact_is_exact(array, block):
    with patch.object(wire, "BLOCK", block):
        got = parsed(array, None).astype(np.float32).ravel()
    assert np.array_equal(got, array.ravel())
    assert np.array_equal(np.signbit(got), np.signbit(array.ravel()))


@pytest.mark.parametrize("decimals", range(1, 10))
def test_every_text_of_the_tables(decimals):
    step = 10.0**-decimals
    for size in (1, 9.4, 99.4):
        for array in (np.linspace(0, size, 60_001), np.linspace(-size, size, 60_001), np.arange(-20_000, 20_001) * step):
            floats = array.astype(np.float32)
            assert np.array_equal(parsed(floats, decimals), np.round(floats.astype(np.float64), decimals))


@pytest.mark.parametrize(("value", "text"), [(0.1, b"0.1"), (-0.0, b"-0.0"), (1e-45, b"1e-45"), (16777216.0, b"16777216.0")])
def test_exact_numbers_are_as_short_as_can_be(value, text):
    assert b"".join(json_numbers(np.array(value, np.float32), None)) == text
    assert b"".join(json_numbers(np.array([[value]], np.float32), None)) == b"[[" + text + b"]]"


@given(
    arrays.arrays(st.sampled_from([np.int32, np.int64, np.uint8, np.bool_]), arrays.array_shapes(min_dims=0, min_side=0, max_side=5)),
    BLOCKS,
)
@settings(max_examples=100, deadline=None)
def test_whole_numbers(array, block):
    with patch.object(wire, "BLOCK", block):
        got = b"".join(json_document({"n": array}, 6))
    assert json.loads(got) == {"n": array.tolist()}


@pytest.mark.parametrize("decimals", range(1, 10))
@pytest.mark.parametrize("scale", [1, -1, 30, 1000])
def test_large_arrays_of_every_depth(decimals, scale):
    array = np.random.default_rng(decimals).uniform(-0.2 if scale > 0 else 0, 1, (3, 2, 70, 90)).astype(np.float32) * np.float32(scale)
    for part in (array, array[0], array[0, 0], array[0, 0, 0], array[:, :, :, ::7]):
        got = parsed(part, decimals)
        assert got.shape == part.shape
        assert np.abs(got - part.astype(np.float64)).max() <= 0.5 * 10.0**-decimals + 1e-9 * abs(scale)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (1.0, 6, b"[1.000000]"),
        (0.99999997, 6, b"[1.000000]"),
        (9.4999, 3, b"[9.500]"),
        (9.96, 1, b"[10.0]"),
        (99.96, 1, b"[100.0]"),
        (-99.96, 1, b"[-100.0]"),
        (0.125, 2, b"[0.12]"),
        (0.0000005, 6, b"[0.000000]"),
        (0.375, 2, b"[0.38]"),
        (-0.0, 2, b"[0.00]"),
        (1e-45, 9, b"[0.000000000]"),
        (-5.25, 4, b"[-5.2500]"),
        (-15.25, 4, b"[-15.2500]"),
        (1e30, 4, b"[1.0000000150474662e+30]"),
    ],
)
def test_single_numbers(value, decimals, text):
    assert b"".join(json_numbers(np.array([value], np.float32), decimals)).replace(b" ", b"") == text


@pytest.mark.parametrize(("value", "text"), [(0.5, b"0.500"), (-0.5, b"-0.500"), (12.0, b"12.000"), (-0.0, b"0.000"), (200.0, b"200.0")])
def test_one_number_without_axes(value, text):
    assert b"".join(json_numbers(np.array(value, np.float32), 3)) == text


def test_no_negative_zero_beside_large_numbers():
    assert b"".join(json_numbers(np.array([-0.0, -0.001, 200.0], np.float32), 2)) == b"[0.0,0.0,200.0]"


def test_signs_stand_next_to_their_numbers():
    written = b"".join(json_numbers(np.array([[-0.5, 0.5], [12.0, -3.0]], np.float32), 1))
    assert json.loads(written) == [[-0.5, 0.5], [12.0, -3.0]]
    assert b"- " not in written


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("decimals", [6, None])
def test_what_is_not_finite_is_refused(bad, decimals):
    for array in (np.array([[0.1, bad]], np.float32), np.array(bad, np.float32), np.array([bad, 0.1], np.float64)):
        with pytest.raises(ValueError, match="not finite"):
            list(json_document([array], decimals))


@pytest.mark.parametrize("decimals", [0, 10, -1])
def test_other_decimals_are_refused(decimals):
    with pytest.raises(ValueError, match=f"1 to 9, or None, not {decimals}"):
        list(json_numbers(np.zeros(3, np.float32), decimals))


@pytest.mark.parametrize("document", [{1: 2}, {1: np.zeros(2, np.float32)}, [{"a": {1, 2}}], {"a": np.zeros(1), "b": object()}])
def test_what_is_no_json_is_refused(document):
    with pytest.raises(TypeError):
        list(json_document(document, 6))


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), st.text())
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)), max_leaves=12
)


@given(VALUES, st.lists(VALUES, max_size=3))
@settings(max_examples=200, deadline=None)
def test_documents(value, items):
    array = np.arange(6, dtype=np.float32).reshape(2, 3) / 8
    document = {
        "first": value,
        "numbers": array,
        "lazy": LazyList(iter(items)),
        "counts": np.arange(3),
        "bits": [Base64(array)],
        "last": "é\n\"'",
    }
    got = json.loads(b"".join(json_document(document, 3)))
    assert list(got) == list(document)
    data = got.pop("bits")[0]
    assert got == {"first": value, "numbers": array.tolist(), "lazy": items, "counts": [0, 1, 2], "last": "é\n\"'"}
    assert data["shape"] == [2, 3]
    assert np.array_equal(np.frombuffer(base64.b64decode(data["data"]), "<f4").reshape(2, 3), array)


def test_lazy_items_are_made_one_after_the_other():
    made: list[int] = []

    def items() -> Iterator[np.ndarray]:
        for i in range(3):
            made.append(i)
            yield np.full((300, 400), i / 4, np.float32)

    chunks = json_document(LazyList(items()), 6)
    next(chunks)
    assert made == [0]
    rest = b"".join(chunks)
    assert made == [0, 1, 2]
    assert rest.endswith(b"0.500000]]]")


def test_items_that_are_written_are_let_go():
    made: list[weakref.ref[np.ndarray]] = []

    def items() -> Iterator[dict[str, np.ndarray]]:
        for i in range(4):
            assert not any(ref() is not None for ref in made)
            item = {"a": np.full((300, 400), i / 4, np.float32)}
            made.append(weakref.ref(item["a"]))
            holder = [item]
            del item
            yield holder.pop()

    assert len(json.loads(b"".join(json_document({"results": LazyList(items())}, 2)))["results"]) == 4
    assert len(made) == 4


@pytest.mark.parametrize("shape", [(16, 256, 256), (2**20,), (2, 2**19), (2**19, 2)])
@pytest.mark.parametrize("decimals", [6, None])
def test_memory_and_chunks_are_bounded_whatever_the_shape(shape, decimals):
    array = np.random.default_rng(0).random(shape, dtype=np.float32)
    list(json_numbers(array.ravel()[:9], 6))  # the tables
    tracemalloc.start()
    sizes = [len(chunk) for chunk in json_document({"a": array}, decimals)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sizes) > 9_000_000
    assert min(sizes[:-1]) >= 2**16
    assert max(sizes) <= 2**20
    assert peak < 3_000_000


def test_small_documents_are_one_chunk():
    small = list(json_document({"a": np.zeros((2, 3), np.float32), "b": ["x"] * 20}, 6))
    assert len(small) == 1


def test_base64_of_openai():
    array = np.random.default_rng(1).random(384, dtype=np.float32)
    assert np.array_equal(np.frombuffer(base64.b64decode(floats_base64(array)), "<f4"), array)


def test_large_base64_is_one_string():
    array = np.random.default_rng(1).random((700, 900), dtype=np.float32)
    chunks = list(json_document(Base64(array), None))
    assert len(chunks) > 3
    assert max(map(len, chunks)) <= 2**20
    got = json.loads(b"".join(chunks))
    assert np.array_equal(np.frombuffer(base64.b64decode(got["data"]), "<f4").reshape(got["shape"]), array)


@given(st.lists(floats("vectors"), max_size=4), st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3))
@settings(max_examples=100, deadline=None)
def test_safetensors_open_with_both_loaders(values, metadata):
    tensors = {f"{i}.x": value for i, value in enumerate(values)}
    length, chunks = safetensors_chunks(tensors, metadata)
    raw = b"".join(chunks)
    assert len(raw) == length
    assert {name: value.tobytes() for name, value in safetensors.numpy.load(raw).items()} == {n: a.tobytes() for n, a in tensors.items()}
    for name, tensor in safetensors.torch.load(raw).items():
        assert tuple(tensor.shape) == tensors[name].shape
        assert np.array_equal(tensor.numpy(), tensors[name])
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == metadata
    assert list(header) == list(tensors)  # in the order of the data
    assert [entry["data_offsets"][1] for entry in header.values()] == np.cumsum([a.nbytes for a in tensors.values()]).tolist()


def test_whole_numbers_stay_whole_in_safetensors():
    tensors = {"n": np.array([2**25 + 1, -1]), "i": np.arange(3, dtype=np.int32), "b": np.array([True, False]), "x": np.ones(2)}
    loaded = safetensors.numpy.load(b"".join(safetensors_chunks(tensors, {})[1]))
    assert {name: (array.dtype.name, array.tolist()) for name, array in loaded.items()} == {
        "n": ("int64", [2**25 + 1, -1]),
        "i": ("int32", [0, 1, 2]),
        "b": ("bool", [True, False]),
        "x": ("float32", [1.0, 1.0]),
    }


def test_large_safetensors_come_in_chunks():
    array = np.arange(3 * 2**18 + 5, dtype=np.float32)
    length, chunks = safetensors_chunks({"a": array.reshape(1, -1), "b": array[::-1]}, {"k": "v"})
    parts = list(chunks)
    assert max(map(len, parts)) <= 2**20
    assert sum(map(len, parts)) == length
    assert np.array_equal(safetensors.numpy.load(b"".join(parts))["b"], array[::-1])


@pytest.mark.parametrize("value", [{}, {"a": np.ones((300, 400), np.float32)}, [np.ones(1, np.float32), "x" * wire.CHUNK]])
def test_a_line_ends_with_its_document_and_not_by_itself(value):
    chunks = list(json_document(value, 6, end=b"\n"))
    assert b"".join(chunks) == b"".join(json_document(value, 6)) + b"\n"
