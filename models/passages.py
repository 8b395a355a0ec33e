"""Text → Passage: what the model gets, and where each token stands in the text.

The tokenizer is the raw one of `tokenizers`, shared by threads, with truncation and padding never set (setting them while
another thread encodes fails with "Already borrowed"); what is too long is cut here. Offsets are in Unicode code points of the
text as it was given, white space at the edges of a token left out.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from tokenizers import Encoding as RawEncoding
from tokenizers import Tokenizer

from models.values import Passage, Token, Word

Direction = Literal["left", "right"]

_CJK = (
    r"\u2e80-\u2fdf\u3001-\u30ff\u3190-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # Han, kana and their marks
    r"\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f"  # wide marks and half-width kana
    r"\U00020000-\U0003ffff"  # Han, the supplementary planes
)
UNIT = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")
"""What is a word before the tokenizer has its say: a run without white space, or one character of Chinese or Japanese."""


class TextError(ValueError):
    """A text cannot become a passage; the message says why, without the text, and `index` which one of several it is."""

    index: int | None = None


class TextTooLong(TextError):
    """A text has more tokens than the model takes."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the text has {tokens} tokens, special tokens included; the limit is {limit}")
        self.tokens, self.limit = tokens, limit


class Reader:
    """Makes the passages of one model: knows its tokenizer and how many tokens a text may have (None: any number)."""

    def __init__(self, tokenizer: Tokenizer, max_length: int | None) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length

    def read(
        self,
        items: Sequence[tuple[str, ...]],
        *,
        prompt: str = "",
        truncate: bool = False,
        direction: Direction = "right",
        special_tokens: bool = True,
        limited: bool = True,
    ) -> list[Passage]:
        """Passages of texts (a text) and (a text, its pair); `prompt` is put before each first text, without a space between.

        What is too long is cut at the `direction` end when `truncate`; of a pair always the longer one is cut. With `limited`
        off, any length will do (the model will not see it).
        Raises TextTooLong, and TextError for text that gives no tokens or is no Unicode (lone surrogates).
        """
        raw: list[str | tuple[str, str]] = [prompt + item[0] if len(item) == 1 else (prompt + item[0], item[1]) for item in items]
        try:
            encodings = self.tokenizer.encode_batch(raw, add_special_tokens=special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise TextError("the text holds half of a surrogate pair, which is no character") from error
        prompt_tokens = self._prompt_tokens(prompt) if prompt else 0
        passages = []
        for index, (item, encoding) in enumerate(zip(items, encodings, strict=True)):
            try:
                passages.append(
                    self._passage(item, encoding, len(prompt), prompt_tokens, truncate, direction, self.max_length if limited else None)
                )
            except TextError as error:
                error.index = index
                raise
        return passages

    def read_ids(self, ids: Sequence[int], *, truncate: bool = False, direction: Direction = "right") -> Passage:
        """A passage of token ids, given to the model as they are; they have no place in a text.

        What is too long is cut at the `direction` end when `truncate`.

        Raises TextError for ids that the vocabulary does not have, TextTooLong.
        """
        size = self.tokenizer.get_vocab_size()
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise TextError(f"the token id {wrong} is not in the vocabulary, which has ids 0 to {size - 1}")
        if not ids:
            raise TextError("there are no token ids")
        truncated = self.max_length is not None and len(ids) > self.max_length
        if self.max_length is not None and truncated:
            if not truncate:
                raise TextTooLong(len(ids), self.max_length)
            ids = ids[: self.max_length] if direction == "right" else ids[-self.max_length :]
        count = len(ids)
        return Passage(("",), list(ids), [0] * count, [(0, 0)] * count, [None] * count, [False] * count, truncated)

    def _prompt_tokens(self, prompt: str) -> int:
        """As sentence-transformers counts them: the tokens of the prompt alone, without the special token at its end."""
        mask = self.tokenizer.encode(prompt).special_tokens_mask
        return len(mask) - (mask[-1] if mask else 0)

    def _passage(
        self,
        item: tuple[str, ...],
        encoding: RawEncoding,
        shift: int,
        prompt_tokens: int,
        truncate: bool,
        direction: Direction,
        limit: int | None,
    ) -> Passage:
        if not encoding.ids:
            raise TextError("the text gives no tokens")
        ids, types, segments = encoding.ids, encoding.type_ids, encoding.sequence_ids
        offsets, special = encoding.offsets, encoding.special_tokens_mask
        if shift:
            offsets = [(a - shift, b - shift) if s == 0 else (a, b) for (a, b), s in zip(offsets, segments, strict=True)]
        truncated = limit is not None and len(ids) > limit
        if limit is not None and truncated:
            if not truncate:
                raise TextTooLong(len(ids), limit)
            kept = _cut(encoding, limit, direction)
            ids, types, special = [ids[i] for i in kept], [types[i] for i in kept], [special[i] for i in kept]
            offsets, segments = [offsets[i] for i in kept], [segments[i] for i in kept]
        return Passage(item, ids, types, offsets, segments, [bool(s) for s in special], truncated, min(prompt_tokens, len(ids)))

    def annotate(self, passage: Passage) -> tuple[list[Token], list[Word]]:
        """The tokens with their readable pieces, places and words, and the words that they belong to, in the text's order."""
        word_of, words = self._words(passage)
        tokens = [
            Token(i, self.piece(i), place[0] if place else None, place[1] if place else None, word, segment, special)
            for i, place, word, segment, special in zip(
                passage.ids, places(passage), word_of, passage.segments, passage.special, strict=True
            )
        ]
        return tokens, words

    def _words(self, passage: Passage) -> tuple[list[int | None], list[Word]]:
        """For each token the index of its word (None: it has none), and the words."""
        word_of: list[int | None] = [None] * len(passage)
        words: list[Word] = []
        where = places(passage)
        for segment, text in enumerate(passage.texts):
            mine = [(i, place) for i, (place, s) in enumerate(zip(where, passage.segments, strict=True)) if s == segment and place]
            spans = _join_units(text, [place for _, place in mine])
            numbers: dict[int, int] = {}
            for (i, _), (start, end) in zip(mine, spans, strict=True):
                if start not in numbers:
                    numbers[start] = len(words)
                    words.append(Word(text[start:end], start, end, segment))
                word_of[i] = numbers[start]
        return word_of, words

    def piece(self, token_id: int) -> str:
        """The piece of the vocabulary, readable: marks of byte-level BPE and SentencePiece undone, WordPiece's ## kept."""
        piece = self.tokenizer.id_to_token(token_id)
        if piece is None:
            return f"<{token_id}>"
        if "ByteLevel" in self._kinds:
            raw = [_BYTES.get(character) for character in piece]
            if None not in raw:
                try:
                    text = bytes(byte for byte in raw if byte is not None).decode()
                except UnicodeDecodeError:
                    return piece
                return text.strip(" ") or text
        return piece.removeprefix("▁") or piece

    @cached_property
    def _kinds(self) -> set[str]:
        """The types of the tokenizer's parts, as its file names them."""
        description = json.loads(self.tokenizer.to_str())
        return set(_types(description.get("pre_tokenizer"))) | set(_types(description.get("decoder")))


def places(passage: Passage) -> list[tuple[int, int] | None]:
    """For each token its place [start, end) in its segment's text without white space at the edges; None: it has none.

    Special tokens have none, nor have tokens of the prompt.
    """
    return [
        None if segment is None or (start < 0 and end <= 0) else _trim(passage.texts[segment], max(start, 0), end)
        for (start, end), segment in zip(passage.offsets, passage.segments, strict=True)
    ]


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    end = min(end, len(text))
    start = min(start, end)
    inner = text[start:end]
    if not inner or inner.isspace():
        return start, end
    return start + len(inner) - len(inner.lstrip()), end - len(inner) + len(inner.rstrip())


def _join_units(text: str, tokens: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each token (in order) the place of its word: units of the text, joined where one token covers several.

    A token that touches no unit (white space, or nothing at all) belongs to the unit after it, or else to the last one.
    """
    units = [match.span() for match in UNIT.finditer(text)] or [(0, len(text))]
    starts, ends = [start for start, _ in units], [end for _, end in units]
    reach: list[tuple[int, int]] = []
    joined = [False] * len(units)
    for start, end in tokens:
        first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
        first = min(first, len(units) - 1)
        last = max(first, last)
        for unit in range(first + 1, last + 1):
            joined[unit] = True
        reach.append((first, last))
    group_start, group_end = list(range(len(units))), list(range(len(units)))
    for unit in range(1, len(units)):
        if joined[unit]:
            group_start[unit] = group_start[unit - 1]
    for unit in reversed(range(len(units) - 1)):
        if joined[unit + 1]:
            group_end[unit] = group_end[unit + 1]
    return [(starts[group_start[first]], ends[group_end[last]]) for first, last in reach]


def _cut(encoding: RawEncoding, limit: int, direction: Direction) -> list[int]:
    """Which tokens stay: all special ones, and as many others as there is room for; of a pair the longer text is cut."""
    contents: dict[int, list[int]] = {}
    for i, (segment, special) in enumerate(zip(encoding.sequence_ids, encoding.special_tokens_mask, strict=True)):
        if not special:
            contents.setdefault(segment or 0, []).append(i)
    total = sum(map(len, contents.values()))
    room = max(limit - (len(encoding.ids) - total), 1)
    lengths = {segment: len(content) for segment, content in contents.items()}
    while sum(lengths.values()) > room:
        longest = max(lengths, key=lambda s: (lengths[s], s))
        others = [n for s, n in lengths.items() if s != longest]
        excess = sum(lengths.values()) - room
        lengths[longest] -= min(excess, max(1, lengths[longest] - max(others, default=0)))
    dropped: set[int] = set()
    for segment, content in contents.items():
        keep = lengths[segment]
        dropped |= set(content[keep:] if direction == "right" else content[: len(content) - keep])
    return [i for i in range(len(encoding.ids)) if i not in dropped]


def _types(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if "type" in part:
            yield str(part["type"])
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes with (Radford et al. 2019): printable ones stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    for extra, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        alphabet[chr(256 + extra)] = byte
    return alphabet


_BYTES = _byte_alphabet()
