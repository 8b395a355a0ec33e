"""Values → bytes: JSON documents with large arrays in them, base64, and safetensors files, in chunks, as fast as memory allows.

Numbers with a given number of decimals are written as records of one width: the value is multiplied by 10^decimals and rounded
to an integer, the integer is cut into groups of digits, and each group is looked up in a table of ready-made text that is
written straight to its place in the output. A positive number in an array that has negative ones too begins with a space, and
the brackets of nested arrays stand in gaps of one width between rows, so that the same layout serves every row; white space is
allowed between the tokens of JSON (RFC 8259, section 2). Arrays with larger numbers, and shortest exact numbers, go through orjson.
"""

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Array = NDArray[Any]
CHUNK = 2**18
"""Bytes that pieces are joined up to: each chunk costs a change of threads, so there should be few, but not so few as to need memory."""
BLOCK = 16384
"""Numbers that are written at a time: what belongs to them fits into a core's own cache."""
_SLACK = 8
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


@dataclass(frozen=True)
class Base64:
    """In a document: this array as `{"shape", "dtype": "float32", "data"}`, little-endian, C order."""

    array: Array


@dataclass(frozen=True)
class LazyList:
    """In a document: an array whose items are made one by one, each when the ones before it have been written."""

    items: Iterable[Any]


# ── Documents ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def json_document(value: Any, decimals: int | None) -> Iterator[bytes]:
    """The JSON of a value, as UTF-8 in chunks: dicts, lists, strings, numbers, None, dataclasses, numpy arrays, Base64, LazyList.

    float32 arrays are written by `json_numbers` with `decimals`; the order of keys is kept.
    Raises ValueError for an array with numbers that are not finite, TypeError for any other type.
    """
    small: list[bytes] = []
    size = 0
    for piece in _pieces(value, decimals):
        small.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield b"".join(small)
            small, size = [], 0
    if small:
        yield b"".join(small)


def _pieces(value: Any, decimals: int | None) -> Iterator[bytes]:
    match value:
        case np.ndarray() if value.dtype == np.float32:
            yield from json_numbers(value, decimals)
        case np.ndarray():
            yield orjson.dumps(np.ascontiguousarray(value), option=_OPTIONS)
        case Base64(array):
            yield from json_base64(array)
        case LazyList(items):
            yield from _enclosed(b"[", (_pieces(item, decimals) for item in items), b"]")
        case dict() | list() | tuple():
            try:
                yield orjson.dumps(value)
            except TypeError:  # there is an array in it somewhere
                yield from _container(value, decimals)
        case _:
            yield orjson.dumps(value)


def _container(value: Any, decimals: int | None) -> Iterator[bytes]:
    if isinstance(value, dict):
        members = (_prefixed(orjson.dumps(key) + b":", _pieces(item, decimals)) for key, item in value.items())
        yield from _enclosed(b"{", members, b"}")
    else:
        yield from _enclosed(b"[", (_pieces(item, decimals) for item in value), b"]")


def _prefixed(prefix: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    yield prefix
    yield from pieces


def _enclosed(opening: bytes, members: Iterable[Iterator[bytes]], closing: bytes) -> Iterator[bytes]:
    separator = opening
    for member in members:
        yield separator
        yield from member
        separator = b","
    yield closing if separator == b"," else opening + closing


# ── Numbers as text ──────────────────────────────────────────────────────────────────────────────────────────────────────


def json_numbers(array: Array, decimals: int | None) -> Iterator[bytes]:
    """Nested JSON arrays of a float32 array of any shape, in chunks.

    decimals: 1 to 9 digits after the point, rounded half to even from the exact value, trailing zeros kept; −0 is written as 0.
    Numbers of 100 and more are written as the nearest double of the rounded value. None: the shortest text that gives the
    same float32 again. Raises ValueError for numbers that are not finite.
    """
    array = np.asarray(array, dtype=np.float32, order="C")
    if array.ndim == 0 or array.size == 0:
        yield _exact(array if decimals is None else np.round(array.astype(np.float64), decimals))
    elif decimals is None:
        yield from _shortest(array)
    else:
        yield from _fixed(array, decimals)


def _exact(array: Array) -> bytes:
    if not np.isfinite(array).all():
        raise ValueError("the array has numbers that are not finite")
    return orjson.dumps(array.item()) if array.ndim == 0 else orjson.dumps(np.ascontiguousarray(array), option=_OPTIONS)


def _shortest(array: Array) -> Iterator[bytes]:
    if array.size <= BLOCK or array.ndim == 1:
        yield _exact(array)
        return
    step = max(1, BLOCK // (array.size // len(array)))
    if step == 1:
        yield from _enclosed(b"[", (_shortest(part) for part in array), b"]")
        return
    parts = (iter([_exact(array[i : i + step])[1:-1]]) for i in range(0, len(array), step))
    yield from _enclosed(b"[", parts, b"]")


def _fixed(array: Array, decimals: int) -> Iterator[bytes]:
    rows = array.reshape(-1, array.shape[-1])  # [row, number]
    step = max(1, BLOCK // rows.shape[1])
    yield b"[" * (array.ndim - 1)
    for first in range(0, len(rows), step):
        block = rows[first : first + step]
        tails = _tails(array.shape, first, len(block))  # [row, byte]
        low, high = float(block.min()), float(block.max())
        if not max(-low, high) < 99.5:
            written = _by_orjson(block, tails, decimals)
        else:
            written = _by_tables(block, tails, decimals, signed=low < 0, wide=max(-low, high) >= 9.5)
        last = first + step >= len(rows)
        yield written[: len(written) - tails.shape[1]] + b"]" * array.ndim if last else written


def _tails(shape: tuple[int, ...], first: int, count: int) -> Array:
    """What stands between a row and the next, for `count` rows from `first` on: brackets that close, a comma, brackets that open.

    → bytes [count, 2 + 2m], m being how many arrays a row's own array lies in, less one; spaces where no bracket is needed.
    """
    outer = len(shape) - 2
    if outer <= 0:
        return np.broadcast_to(np.frombuffer(b"],", np.uint8), (count, 2))
    ends = np.arange(first + 1, first + count + 1)
    tails = np.full((count, 2 + 2 * outer), ord(" "), np.uint8)
    tails[:, 0], tails[:, outer + 1] = ord("]"), ord(",")
    rows = 1
    for level in range(outer):
        rows *= shape[-2 - level]
        here = ends % rows == 0
        tails[here, 1 + level], tails[here, -1 - level] = ord("]"), ord("[")
    return tails


def _by_orjson(block: Array, tails: Array, decimals: int) -> bytes:
    rounded = np.round(block.astype(np.float64), decimals)
    return b"".join(_exact(row)[:-1] + tail.tobytes() for row, tail in zip(rounded, tails, strict=True))


@dataclass(frozen=True)
class Layout:
    """How a number is cut: `head` decimals go with sign, integer part and point, `groups` of digits follow."""

    head: int
    groups: tuple[int, ...]


_LAYOUTS = {1: Layout(1, ()), 2: Layout(2, ()), 3: Layout(3, ()), 4: Layout(4, ()), 5: Layout(3, (2,)), 6: Layout(3, (3,)),
            7: Layout(3, (4,)), 8: Layout(3, (3, 2)), 9: Layout(3, (3, 3))}  # fmt: skip
_WIDE_LAYOUTS = {**_LAYOUTS, 4: Layout(2, (2,)), 5: Layout(2, (3,)), 6: Layout(2, (4,)), 7: Layout(2, (3, 2)), 8: Layout(2, (3, 3)),
                 9: Layout(2, (4, 3))}  # fmt: skip


@lru_cache(maxsize=64)
def _head_table(decimals: int, signed: bool, wide: bool) -> Array:
    """The beginnings of all records, ",0.12" and the like, 8 bytes each; those of negative numbers in the second half."""
    numbers = 10 ** (decimals + 1 + wide)
    texts = [f"{n / 10**decimals:{decimals + 2 + wide}.{decimals}f}" for n in range(numbers)]
    texts = [f",{sign}{text}" for sign in (" -" if signed else [""]) for text in texts]
    if wide and signed:  # the sign stands next to the number: ", -5.1", not ",- 5.1"
        texts = [text.replace("- ", " -") for text in texts]
    return np.frombuffer(b"".join(text.encode().ljust(8) for text in texts), dtype="<u8")


@lru_cache(maxsize=8)
def _digit_table(digits: int) -> Array:
    """All groups of 2, 3 or 4 digits. 3 digits take 4 bytes: the last is the comma of the next record, or is written over."""
    kind = {2: "<u2", 3: "<u4", 4: "<u4"}[digits]
    return np.frombuffer(b"".join(f"{n:0{digits}}".encode().ljust(np.dtype(kind).itemsize, b",") for n in range(10**digits)), dtype=kind)


def _by_tables(block: Array, tails: Array, decimals: int, *, signed: bool, wide: bool) -> bytes:
    """Rows of numbers below 10 (wide: 100) in records of one width, each row followed by its tail."""
    layout = (_WIDE_LAYOUTS if wide else _LAYOUTS)[decimals]
    count, numbers = block.shape
    head_width = 1 + signed + 1 + wide + 1 + layout.head
    width = head_width + sum(layout.groups)
    stride = numbers * width + tails.shape[1]
    out = np.empty(count * stride + _SLACK, np.uint8)

    scaled = np.multiply(block, 10.0**decimals, dtype=np.float64)  # exact: 24 bits times at most 21
    kind = np.int64 if decimals + 1 + wide > 9 else np.int32
    whole: Any = np.rint(scaled, out=scaled).astype(kind)
    negative = whole < 0 if signed else None
    if signed:
        np.abs(whole, out=whole)
    digits: list[Any] = []
    for group in reversed(layout.groups):
        rest = whole // kind(10**group)
        digits.insert(0, whole - rest * kind(10**group))
        whole = rest
    if negative is not None:
        whole += negative * kind(10 ** (layout.head + 1 + wide))

    # A record's 8 bytes may reach into what comes after it, which is written later: from left to right, heads before groups.
    _place(out, 0, stride, width, _head_table(layout.head, signed, wide), whole)
    offset = head_width
    for group, values in zip(layout.groups, digits, strict=True):
        _place(out, offset, stride, width, _digit_table(group), values)
        offset += group
    lines = out[: count * stride].reshape(count, stride)
    lines[:, 0] = ord("[")
    lines[:, numbers * width :] = tails
    return lines.tobytes()


def _place(out: Array, offset: int, stride: int, width: int, table: Array, index: Array) -> None:
    """Write table[index] at each record's `offset`."""
    target: Array = np.ndarray(index.shape, table.dtype, buffer=out, offset=offset, strides=(stride, width))
    target[...] = table.take(index, mode="clip")


# ── Numbers as they are ──────────────────────────────────────────────────────────────────────────────────────────────────


def floats_base64(array: Array) -> str:
    """Base64 of an array's numbers as little-endian float32, as OpenAI's `encoding_format: base64` has them."""
    return b2a_base64(np.ascontiguousarray(array, dtype="<f4").data, newline=False).decode()


def json_base64(array: Array) -> Iterator[bytes]:
    """`{"shape": […], "dtype": "float32", "data": "…"}`, in chunks."""
    yield orjson.dumps({"shape": list(array.shape), "dtype": "float32"})[:-1] + b',"data":"'
    for part in _raw(array, 3 * 2**18):  # whole groups of three bytes, so that the pieces' base64 can be joined
        yield b2a_base64(part, newline=False)
    yield b'"}'


def safetensors_chunks(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> tuple[int, Iterator[bytes]]:
    """A safetensors file of float32 tensors: its length in bytes, and its chunks.

    The format (github.com/huggingface/safetensors): 8 bytes of length, a JSON header padded with spaces to 8 bytes, the data.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + 4 * array.size
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [begin, end]}
    raw = orjson.dumps(header)
    raw += b" " * (-len(raw) % 8)
    head = len(raw).to_bytes(8, "little") + raw
    arrays = list(tensors.values())

    def chunks() -> Iterator[bytes]:
        yield head
        for i, array in enumerate(arrays):
            arrays[i] = np.empty(0, np.float32)  # what has been sent is let go
            yield from map(bytes, _raw(array, 2**20))

    return len(head) + end, chunks()


def _raw(array: Array, size: int) -> Iterator[memoryview]:
    data = np.ascontiguousarray(array, dtype="<f4").reshape(-1).data.cast("B")
    for start in range(0, len(data), size):
        yield data[start : start + size]
