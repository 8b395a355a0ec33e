"""Every way in which the wire writes numbers, against the standard parser."""

import base64
import json
import tracemalloc
from collections.abc import Iterator
from decimal import Decimal

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from service.wire import Base64, LazyList, floats_base64, json_document, json_numbers, safetensors_chunks

RANGES = {"weights": (0.0, 1.0), "vectors": (-1.0, 1.0), "wide": (-99.0, 99.0), "large": (-1e6, 1e6), "any": (-3e38, 3e38)}


def parsed(array: np.ndarray, decimals: int | None) -> np.ndarray:
    return np.array(json.loads(b"".join(json_numbers(array, decimals))), dtype=np.float64)


def floats(kind: str) -> st.SearchStrategy[np.ndarray]:
    low, high = RANGES[kind]
    numbers = st.floats(np.float32(low), np.float32(high), width=32)
    return arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6), elements=numbers)


@given(st.sampled_from(list(RANGES)).flatmap(floats), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_rounded_to_the_nearest(array, decimals):
    got = parsed(array, decimals)
    assert got.size == array.size
    if array.size:
        assert got.shape == array.shape
    unit = Decimal(10) ** -decimals
    for value, written in zip(array.ravel().tolist(), got.ravel().tolist(), strict=True):
        slack = abs(Decimal(value)) * Decimal(2) ** -52  # the parser's own double
        assert abs(Decimal(value) - Decimal(written)) <= unit / 2 + slack


@given(st.sampled_from(list(RANGES)).flatmap(floats))
@settings(max_examples=200, deadline=None)
def test_exact_is_exact(array):
    assert np.array_equal(parsed(array, None).astype(np.float32).ravel(), array.ravel())


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
        (0.125, 2, b"[0.12]"),
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


def test_signs_stand_next_to_their_numbers():
    written = b"".join(json_numbers(np.array([[-0.5, 0.5], [12.0, -3.0]], np.float32), 1))
    assert json.loads(written) == [[-0.5, 0.5], [12.0, -3.0]]
    assert b"- " not in written


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("decimals", [6, None])
def test_what_is_not_finite_is_refused(bad, decimals):
    with pytest.raises(ValueError, match="not finite"):
        list(json_numbers(np.array([[0.1, bad]], np.float32), decimals))


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


def test_memory_is_bounded_by_chunks():
    array = np.random.default_rng(0).random((16, 256, 256), dtype=np.float32)
    list(json_numbers(array[:1], 6))  # the tables
    tracemalloc.start()
    total = sum(map(len, json_numbers(array, 6)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total > 9_000_000
    assert peak < 1_500_000


def test_chunks_have_a_size_to_be_sent():
    sizes = [len(chunk) for chunk in json_document({"a": np.zeros((64, 256, 256), np.float32)}, 6)]
    assert max(sizes) < 400_000
    small = list(json_document({"a": np.zeros((2, 3), np.float32), "b": ["x"] * 20}, 6))
    assert len(small) == 1


def test_base64_of_openai():
    array = np.random.default_rng(1).random(384, dtype=np.float32)
    assert np.array_equal(np.frombuffer(base64.b64decode(floats_base64(array)), "<f4"), array)


def test_large_base64_is_one_string():
    array = np.random.default_rng(1).random((700, 900), dtype=np.float32)
    got = json.loads(b"".join(json_document(Base64(array), None)))
    assert np.array_equal(np.frombuffer(base64.b64decode(got["data"]), "<f4").reshape(got["shape"]), array)


@given(st.lists(floats("vectors"), max_size=4), st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3))
@settings(max_examples=100, deadline=None)
def test_safetensors_open_with_both_loaders(values, metadata):
    tensors = {f"{i}.x": value for i, value in enumerate(values)}
    length, chunks = safetensors_chunks(tensors, metadata)
    raw = b"".join(chunks)
    assert len(raw) == length
    for name, value in safetensors.numpy.load(raw).items():
        assert np.array_equal(value, tensors[name])
    assert {name: tuple(t.shape) for name, t in safetensors.torch.load(raw).items()} == {name: a.shape for name, a in tensors.items()}
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"] == metadata
