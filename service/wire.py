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
from functools import cache
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

Array = NDArray[Any]
CHUNK = 2**18
"""Bytes that pieces are joined up to: each chunk costs a change of threads, so there should be few, but not so few as to need memory."""
BLOCK = 32768
"""Numbers that are written at a time: enough for the calls on them not to count, few enough for the processor's cache."""
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


def json_document(value: Any, decimals: int | None, end: bytes = b"") -> Iterator[bytes]:
    """The JSON of a value and then `end`, as UTF-8 in chunks.

    A value: dicts, lists, strings, numbers, None, dataclasses, numpy arrays, Base64, LazyList.
    float32 arrays are written by `json_numbers` with `decimals`, arrays of other types as they are; the order of keys is kept.
    A Python float that is not finite becomes null. Raises ValueError for an array with numbers that are not finite, TypeError for
    any other type and for a key that is no string.
    """
    small: list[bytes] = []
    size = 0
    for piece in _pieces(value, decimals):
        small.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield b"".join(small)
            small, size = [], 0
    if small or end:
        yield b"".join([*small, end])


def _pieces(value: Any, decimals: int | None) -> Iterator[bytes]:
    match value:
        case np.ndarray() if value.dtype == np.float32:
            yield from json_numbers(value, decimals)
        case np.ndarray():
            yield from _exact(value)
        case Base64(array):
            yield from json_base64(array)
        case LazyList(items):
            yield from _enclosed(b"[", map(lambda item: _pieces(item, decimals), items), b"]")  # noqa: C417 - holds no item
        case dict() | list() | tuple():
            try:
                yield orjson.dumps(value)
            except TypeError:  # there is an array in it somewhere
                yield from _container(value, decimals)
        case _:
            yield orjson.dumps(value)


def _container(value: Any, decimals: int | None) -> Iterator[bytes]:
    if isinstance(value, dict):
        members = (_prefixed(_key(key) + b":", _pieces(item, decimals)) for key, item in value.items())
        yield from _enclosed(b"{", members, b"}")
    else:
        yield from _enclosed(b"[", (_pieces(item, decimals) for item in value), b"]")


def _key(key: Any) -> bytes:
    if not isinstance(key, str):
        raise TypeError(f"a key must be a string, not {type(key).__name__}")
    return orjson.dumps(key)


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
    """Nested JSON arrays of a float32 array of any shape, in chunks; one number for an array without axes.

    decimals: 1 to 9 digits after the point, rounded half to even from the exact value, trailing zeros kept; −0 is written as 0.
    A block of numbers that has one of 99.5 or more is written as the doubles nearest to the rounded values. None: the shortest
    text that gives the same float32 again. Raises ValueError for numbers that are not finite and for any other `decimals`.
    """
    array = np.asarray(array, dtype=np.float32, order="C")
    if decimals is not None and not 1 <= decimals <= 9:
        raise ValueError(f"decimals must be 1 to 9, or None, not {decimals}")
    if decimals is None or array.size == 0:
        yield from _exact(array)
    elif array.ndim == 0:
        yield b"".join(_fixed(array.reshape(1), decimals))[1:-1].lstrip()
    else:
        yield from _fixed(array, decimals)


def _exact(array: Array) -> Iterator[bytes]:
    """An array of any type as orjson writes it, at most BLOCK numbers at a time."""
    if array.ndim == 0:
        yield _by_orjson(array.reshape(1))[1:-1]
    elif array.size <= BLOCK:
        yield _by_orjson(array)
    elif (step := BLOCK * len(array) // array.size) > 0:
        yield from _enclosed(b"[", (iter([_by_orjson(array[i : i + step])[1:-1]]) for i in range(0, len(array), step)), b"]")
    else:
        yield from _enclosed(b"[", map(_exact, array), b"]")


def _by_orjson(array: Array) -> bytes:
    if not np.isfinite(array).all():
        raise ValueError("the array has numbers that are not finite")
    return orjson.dumps(np.ascontiguousarray(array), option=_OPTIONS)


def _fixed(array: Array, decimals: int) -> Iterator[bytes]:
    rows = array.reshape(-1, array.shape[-1])  # [row, number]
    count, length = rows.shape
    step = max(1, BLOCK // length)
    yield b"[" * (array.ndim - 1)
    for first in range(0, count, step):
        tails = _tails(array.shape, first, min(step, count - first))  # [row, byte]
        for start in range(0, length, BLOCK):  # more than once only in a row that is longer than a block
            block, ends = rows[first : first + step, start : start + BLOCK], start + BLOCK >= length
            written = _block(block, b"," if start else b"[", tails if ends else tails[:, :0], decimals)
            yield written[: -tails.shape[1]] + b"]" * array.ndim if ends and first + step >= count else written


def _tails(shape: tuple[int, ...], first: int, count: int) -> Array:
    """What stands between a row and the next, for `count` rows from `first` on: brackets that close, a comma, brackets that open.

    → bytes [count, 2 + 2m], m being how many arrays a row's own array lies in, less one; spaces where no bracket is needed.
    """
    outer = max(0, len(shape) - 2)
    tails = np.full((count, 2 + 2 * outer), ord(" "), np.uint8)
    tails[:, 0], tails[:, outer + 1] = ord("]"), ord(",")
    rows = 1
    for level in range(outer):
        rows *= shape[-2 - level]
        ends = slice(-(first + 1) % rows, None, rows)
        tails[ends, 1 + level], tails[ends, -1 - level] = ord("]"), ord("[")
    return tails


def _block(block: Array, opening: bytes, tails: Array, decimals: int) -> bytes:
    """Rows of numbers, each begun by `opening` and followed by its tail."""
    low, high = float(np.minimum.reduce(block, axis=None)), float(np.maximum.reduce(block, axis=None))
    size = max(-low, high)
    if size < 99.5:
        room = 2 if size >= 9.5 else 1 if low < 0 else 0
        return _by_tables(block, opening, tails, decimals, _form(decimals, room), signed=low < 0)
    rounded = np.round(block.astype(np.float64), decimals) + 0.0  # −0 becomes 0
    rows = _by_orjson(rounded)[2:-2].split(b"],[")
    return b"".join(opening + row + tail.tobytes() for row, tail in zip(rows, tails, strict=True))


@dataclass(frozen=True)
class Form:
    """Records of one width: ready-made beginnings (comma, sign, integer part, point, first decimals), then groups of digits.

    A group is its place in the record, ten to the power of its length, and the text of all its values.
    """

    width: int
    head: Array
    groups: tuple[tuple[int, np.signedinteger[Any], Array], ...]
    kind: type[np.signedinteger[Any]]


_CUTS = {1: (1,), 2: (2,), 3: (3,), 4: (4,), 5: (3, 2), 6: (3, 3), 7: (3, 4), 8: (4, 4), 9: (3, 3, 3)}
_WIDE_CUTS = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2), 5: (2, 3), 6: (2, 4), 7: (3, 4), 8: (2, 3, 3), 9: (2, 4, 3)}
"""How many decimals go into the head, and into each group: heads have at most 5 digits, so that their tables stay in the cache."""


@cache
def _form(decimals: int, room: int) -> Form:
    """`room`: how many places stand before the last digit of the integer part: 0 for 0.5, 1 for -0.5 as well, 2 for -10.5 too."""
    first, *rest = (_WIDE_CUTS if room == 2 else _CUTS)[decimals]
    head = _head_table(first, room)
    kind = np.int64 if decimals + max(1, room) > 9 else np.int32
    groups, end = [], room + 3 + first
    for digits in rest:
        groups.append((end, kind(10**digits), _digit_table(digits)))
        end += digits
    return Form(end, head, tuple(groups), kind)


def _digits(count: int) -> Array:
    """All numbers of `count` digits as text: bytes [10^count, count]."""
    return np.indices((10,) * count, np.uint8).reshape(count, -1).T + np.uint8(ord("0"))


def _head_table(decimals: int, room: int) -> Array:
    """The beginnings of all records, ",0.12" and the like, 8 bytes each; with room for signs, those of negative numbers follow."""
    whole = max(1, room)  # digits before the point
    digits = _digits(whole + decimals)
    text = np.full((2 if room else 1, len(digits), 8), ord(" "), np.uint8)  # [sign, number, byte]
    text[..., 0] = ord(",")
    text[1:, :, 1] = ord("-")
    text[..., room + 2 - whole : room + 2] = digits[:, :whole]
    text[..., room + 2] = ord(".")
    text[..., room + 3 : room + 3 + decimals] = digits[:, whole:]
    if room == 2:  # the sign stands next to the number: ", -5.1", not ",-05.1"
        short = text[:, : len(digits) // 10]
        short[..., 2] = short[..., 1]
        short[..., 1] = ord(" ")
    return text.view("<u8").ravel()


@cache
def _digit_table(count: int) -> Array:
    """All groups of 2, 3 or 4 digits. 3 digits take 4 bytes: the last is the comma of the next record, or is written over."""
    text = np.full((10**count, 2 if count == 2 else 4), ord(","), np.uint8)
    text[:, :count] = _digits(count)
    return text.view(f"<u{text.shape[1]}").ravel()


def _by_tables(block: Array, opening: bytes, tails: Array, decimals: int, form: Form, *, signed: bool) -> bytes:
    count, length = block.shape
    stride = length * form.width + tails.shape[1]
    out = np.empty(count * stride + _SLACK, np.uint8)

    scaled = np.multiply(block, 10.0**decimals, dtype=np.float64)  # exact: 24 bits times at most 21
    whole: Any = np.rint(scaled, out=scaled).astype(form.kind)
    signs = None
    if signed:  # where the heads of negative numbers begin in the table, or 0
        signs = (whole >> form.kind(8 * whole.itemsize - 1)) & form.kind(len(form.head) // 2)
        np.abs(whole, out=whole)
    groups = []
    for place, power, table in reversed(form.groups):
        rest = whole // power
        whole -= rest * power
        groups.append((place, table, whole))
        whole = rest
    if signs is not None:
        whole += signs

    # A table's text may reach into what comes after it, which is written later: heads first, then groups from left to right.
    for place, table, index in [(0, form.head, whole), *reversed(groups)]:
        target: Array = np.ndarray(index.shape, table.dtype, buffer=out, offset=place, strides=(stride, form.width))
        target[...] = table.take(index, mode="clip")
    lines = out[: count * stride].reshape(count, stride)
    lines[:, 0] = ord(opening)
    lines[:, length * form.width :] = tails
    return lines.tobytes()


# ── Numbers as they are ──────────────────────────────────────────────────────────────────────────────────────────────────


_DTYPES = {"<f4": "F32", "<i4": "I32", "<i8": "I64", "|u1": "U8", "|b1": "BOOL"}


def floats_base64(array: Array) -> str:
    """Base64 of an array's numbers as little-endian float32, as OpenAI's `encoding_format: base64` has them."""
    return b2a_base64(np.ascontiguousarray(array, dtype="<f4").data, newline=False).decode()


def json_base64(array: Array) -> Iterator[bytes]:
    """`{"shape": […], "dtype": "float32", "data": "…"}`, in chunks."""
    yield orjson.dumps({"shape": list(array.shape), "dtype": "float32"})[:-1] + b',"data":"'
    floats = np.asarray(array, dtype=np.float32)
    for part in _raw(floats, 3 * 2**17):  # whole groups of three bytes, so that the pieces' base64 can be joined
        yield b2a_base64(part, newline=False)
    yield b'"}'


def safetensors_chunks(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> tuple[int, Iterator[bytes]]:
    """A safetensors file: its length in bytes, and its chunks. Floats go as float32; int32, int64, uint8, bool as they are.

    The format (github.com/huggingface/safetensors): 8 bytes of length, a JSON header padded with spaces to 8 bytes, the data.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in tensors.items():
        kind = _stored(array)
        begin, end = end, end + kind.itemsize * array.size
        header[name] = {"dtype": _DTYPES[kind.str], "shape": list(array.shape), "data_offsets": [begin, end]}
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


def _stored(array: Array) -> np.dtype[Any]:
    return np.dtype("<f4") if array.dtype.kind == "f" else array.dtype.newbyteorder("<")


def _raw(array: Array, size: int) -> Iterator[memoryview]:
    data = np.ascontiguousarray(array, dtype=_stored(array)).reshape(-1).data.cast("B")
    for start in range(0, len(data), size):
        yield data[start : start + size]
