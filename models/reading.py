"""From what is asked to a Probe, and from an Encoding to what is answered: focus, words, special tokens, spans, reductions.

A Question is what a request asks of every text; a Plan is the question put to one passage: which rows and columns the answer
has, and the Probe that makes the model compute just what is needed for them. `read` turns the encoding into the answer's arrays.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from models import reduce
from models.reduce import Ints
from models.values import Combine, Encoding, Floats, Passage, Probe, Token, Word

Unit = Literal["token", "word"]
SpecialTokens = Literal["keep", "drop"]


class QuestionError(ValueError):
    """A question cannot be put to this text or this model; `field` names what is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Place:
    """A place in a text: a string that occurs in it (`occurrence` counts from 0), or code points [start, end) of a segment."""

    text: str | None = None
    occurrence: int = 0
    start: int = 0
    end: int = 0
    segment: int | None = None


Target = Place | tuple[int, ...]
"""A place, or token indexes."""


AXES: dict[reduce.Name, tuple[str, ...]] = {
    "entropy": ("layer", "head", "query"),
    "distance": ("layer", "head", "query"),
    "rollout": ("query", "key"),
    "received": ("layer", "head", "key"),
    "top_k": ("layer", "head", "query", "rank"),
    "norms": ("layer", "head", "query", "key"),
    "kind": ("layer", "head"),
}


@dataclass(frozen=True)
class Reduction:
    """A figure that is asked for, of the attention of these layers (rollout: those it goes through, lowest first)."""

    name: reduce.Name
    layers: tuple[int, ...]
    k: int = 0


@dataclass(frozen=True)
class Question:
    """What a request asks; layers and heads as lists from 0, `heads` None for all."""

    pooled: bool = True
    embeddings: bool = True
    attention: bool = True
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    combine: Combine | None = None
    hidden_layers: tuple[int, ...] = ()
    focus: Target | None = None
    unit: Unit = "token"
    special_tokens: SpecialTokens = "keep"
    spans: tuple[Target, ...] = ()
    reductions: tuple[Reduction, ...] = ()

    def reduces(self, name: reduce.Name) -> bool:
        """Whether that reduction is asked for."""
        return any(reduction.name == name for reduction in self.reductions)

    @property
    def maps(self) -> bool:
        """Whether anything is made of the maps of `layers`: the answer's own, or a reduction other than rollout."""
        return self.attention or any(reduction.name != "rollout" for reduction in self.reductions)


@dataclass(frozen=True)
class Plan:
    """A question put to one passage.

    `queries` and `keys` are the answer's rows and columns: indexes of tokens, or of words (special tokens that are kept come
    after the words). `rows` and `columns` say which tokens each of them stands for, `special` which keys are special tokens.
    """

    question: Question
    probe: Probe
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    special: tuple[bool, ...]


@dataclass(frozen=True)
class Reduced:
    """A reduction's figures, with the axes of `AXES`; `more` are arrays that explain them: the keys of top_k, the rules of kind."""

    reduction: Reduction
    values: np.ndarray[Any, Any]
    more: Mapping[str, Floats | Ints] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The arrays of one text's answer; None for what was not asked.

    pooled [dim] · embeddings [query, d_model] · weights [layer, head, query, key] · hidden_states [layer, token, d_model]
    · spans [span, dim]
    """

    pooled: Floats | None
    embeddings: Floats | None
    weights: Floats | None
    hidden_states: Floats | None
    spans: Floats | None
    reductions: tuple[Reduced, ...] = ()


# ── Planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan(question: Question, passage: Passage, tokens: Sequence[Token], words: Sequence[Word]) -> Plan:
    """Put a question to a passage. Raises QuestionError when the passage does not have what it names."""
    groups = _groups(question, tokens, words)
    keys = tuple(sorted(groups))
    queries = keys
    if question.focus is not None:
        wanted = set(locate(question.focus, passage, tokens, "focus"))
        queries = tuple(index for index in keys if wanted & set(groups[index]))
        if not queries:
            raise QuestionError("focus", "focus names special tokens only, and special_tokens is drop")
    rows, columns = tuple(groups[index] for index in queries), tuple(groups[index] for index in keys)
    narrowed, known = _narrowed(rows, len(passage)), _narrowed(columns, len(passage))
    probe = Probe(
        pooled=question.pooled,
        embeddings=question.embeddings,
        rows=narrowed,
        layers=_layers(question),
        heads=question.heads,
        queries=known if question.reduces("rollout") else narrowed,  # from one layer to the next it needs all rows
        keys=known,
        combine=_combine_early(question),
        norms=question.reduces("norms"),
        hidden_layers=question.hidden_layers,
        spans=tuple(_span(target, passage, tokens) for target in question.spans),
    )
    return Plan(question, probe, queries, keys, rows, columns, tuple(tokens[column[0]].special for column in columns))


def _narrowed(groups: Sequence[tuple[int, ...]], count: int) -> tuple[int, ...] | None:
    """The tokens of the groups, in order; None for all `count` of them."""
    members = tuple(sorted(token for group in groups for token in group))
    return None if len(members) == count else members


def _layers(question: Question) -> tuple[int, ...]:
    """Whose weights are needed: the chosen layers first, when anything is made of them, then what rollout needs besides."""
    chosen = question.layers if question.maps else ()
    return tuple(dict.fromkeys([*chosen, *(layer for r in question.reductions if r.name == "rollout" for layer in r.layers)]))


def _combine_early(question: Question) -> Combine | None:
    """How heads can be combined as soon as they are computed; None when something needs each one's weights."""
    if question.reduces("norms"):
        return None
    if question.reduces("rollout"):
        return "mean" if question.combine == "mean" or not question.maps else None
    return question.combine


def weights_of(plan: Plan, passage: Passage, num_heads: int) -> int:
    """How many weights the model has to compute for a plan."""
    probe = plan.probe
    heads = num_heads if probe.heads is None else len(probe.heads)
    rows = len(passage) if probe.queries is None else len(probe.queries)
    return len(probe.layers) * heads * rows * len(passage)


def values_of(plan: Plan, num_heads: int) -> int:
    """How many numbers the answer has for attention and reductions."""
    question = plan.question
    heads = 1 if question.combine else num_heads if question.heads is None else len(question.heads)
    sizes = {"layer": len(question.layers), "head": heads, "query": len(plan.queries), "key": len(plan.keys)}
    count = prod(sizes.values()) if question.attention else 0
    for reduction in question.reductions:
        each = {"top_k": 2, "kind": len(reduce.KINDS)}.get(reduction.name, 1)
        count += each * prod({**sizes, "rank": min(reduction.k, len(plan.keys))}[axis] for axis in AXES[reduction.name])
    return count


def _groups(question: Question, tokens: Sequence[Token], words: Sequence[Word]) -> dict[int, tuple[int, ...]]:
    """Which tokens each row or column of the answer stands for, by its index."""
    keep = question.special_tokens == "keep"
    if question.unit == "token":
        return {i: (i,) for i, token in enumerate(tokens) if keep or not token.special}
    groups: dict[int, list[int]] = {}
    for i, token in enumerate(tokens):
        if token.word is not None:
            groups.setdefault(token.word, []).append(i)
    outside = [i for i, token in enumerate(tokens) if token.word is None] if keep else []
    groups |= {len(words) + k: [i] for k, i in enumerate(outside)}
    return {index: tuple(members) for index, members in groups.items()}


def locate(target: Target, passage: Passage, tokens: Sequence[Token], field: str) -> tuple[int, ...]:
    """The tokens that a target names: those that overlap the place, or the given indexes.

    A string is looked for as whole words first, then anywhere, as it is written. Raises QuestionError.
    """
    if isinstance(target, tuple):
        wrong = next((i for i in target if not 0 <= i < len(tokens)), None)
        if wrong is not None:
            raise QuestionError(field, f"the token {wrong} does not exist; the text has tokens 0 to {len(tokens) - 1}")
        return target
    segment, start, end = _find(target, passage, field) if target.text is not None else _check_range(target, passage, field)
    found = tuple(
        i
        for i, token in enumerate(tokens)
        if token.segment == segment and token.start is not None and token.end is not None and token.start < end and token.end > start
    )
    if not found:
        cut = " (what was cut off has none)" if passage.truncated else ""
        raise QuestionError(field, f"there are no tokens at {start} to {end}{cut}")
    return found


def _find(place: Place, passage: Passage, field: str) -> tuple[int, int, int]:
    """Where the string occurs: segment, start, end."""
    assert place.text is not None
    if not place.text.strip():
        raise QuestionError(field, "the string is empty")
    literal = re.escape(place.text)
    segments = [(s, text) for s, text in enumerate(passage.texts) if place.segment in (None, s)]
    whole = [(s, *m.span()) for s, text in segments for m in re.finditer(rf"(?<!\w){literal}(?!\w)", text)]
    every = [(s, *m.span()) for s, text in segments for m in re.finditer(literal, text)]
    known = set(whole)
    found = whole + [hit for hit in every if hit not in known]
    if not found:
        raise QuestionError(field, f"{place.text!r} does not occur in the text")
    if place.occurrence >= len(found):
        raise QuestionError(field, f"{place.text!r} occurs {len(found)} times; occurrence {place.occurrence} counts from 0")
    return found[place.occurrence]


def _check_range(place: Place, passage: Passage, field: str) -> tuple[int, int, int]:
    segment = place.segment or 0
    if segment >= len(passage.texts):
        raise QuestionError(field, f"segment {segment} does not exist; the text has {len(passage.texts)}")
    length = len(passage.texts[segment])
    if not 0 <= place.start < place.end <= length:
        raise QuestionError(field, f"start {place.start} and end {place.end} are no range in a text of {length} characters")
    return segment, place.start, place.end


def _span(target: Target, passage: Passage, tokens: Sequence[Token]) -> tuple[int, int]:
    """The first and last token of a span. A span that holds every token of the text takes its special tokens in as well."""
    found = sorted(set(locate(target, passage, tokens, "spans")))
    if not found:
        raise QuestionError("spans", "a span has at least one token")
    if found != list(range(found[0], found[-1] + 1)):
        raise QuestionError("spans", f"the tokens {found} are not next to each other")
    if len(found) == sum(not token.special for token in tokens) and not isinstance(target, tuple):
        return 0, len(tokens) - 1
    return found[0], found[-1]


# ── Reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(plan: Plan, encoding: Encoding) -> Answer:
    """The arrays that answer a plan: what the probe kept, in the plan's order, tokens merged into words where asked.

    Special tokens have been left out when the weights were kept; here heads are combined first, then tokens become words, and
    reductions are made of the maps that result. Rollout and norms are made of tokens, and become words at the end.
    """
    question, embeddings = plan.question, encoding.embeddings
    if embeddings is not None:
        embeddings = _mean_rows(embeddings, _positions(plan.rows, plan.probe.rows))
    if encoding.weights is None:
        return Answer(encoding.pooled, embeddings, None, encoding.hidden_states, encoding.spans)
    maps = encoding.weights[: len(question.layers) if question.maps else 0]
    maps = _merge(plan, _combine(plan, maps))
    reductions = tuple(_reduced(reduction, plan, encoding, maps) for reduction in question.reductions)
    return Answer(encoding.pooled, embeddings, maps if question.attention else None, encoding.hidden_states, encoding.spans, reductions)


def _reduced(reduction: Reduction, plan: Plan, encoding: Encoding, maps: Floats) -> Reduced:
    """One reduction of the chosen layers' maps [layer, head, query, key], as they are in the answer."""
    assert encoding.weights is not None
    match reduction.name:
        case "entropy":
            return Reduced(reduction, reduce.entropy(maps))
        case "distance":
            return Reduced(reduction, reduce.distance(maps, *_order(plan)))
        case "received":
            return Reduced(reduction, reduce.received(maps))
        case "top_k":
            picked, values = reduce.top_k(maps, reduction.k)
            return Reduced(reduction, values, {"keys": np.array(plan.keys, dtype=np.int32)[picked]})
        case "kind":
            return Reduced(reduction, *reduce.kind(maps, *_order(plan), np.array(plan.special, dtype=bool)))
        case "norms":
            assert encoding.value_norms is not None
            count, kept = len(reduction.layers), plan.probe.keys
            lengths = encoding.value_norms[:count] if kept is None else encoding.value_norms[:count, :, list(kept)]
            return Reduced(reduction, _merge(plan, _combine(plan, reduce.norms(encoding.weights[:count], lengths))))
        case "rollout":
            slots = [plan.probe.layers.index(layer) for layer in reduction.layers]
            rows = [tuple(row) for row in _positions(plan.rows, plan.probe.queries)]
            wanted = tuple(sorted(token for row in rows for token in row))
            flow = reduce.rollout(np.stack([encoding.weights[slot].mean(axis=0) for slot in slots]), wanted)  # [query, key]
            flow = _sum_columns(flow, _positions(plan.columns, plan.probe.keys))
            return Reduced(reduction, _mean_rows(flow, _positions(rows, wanted)))


def _combine(plan: Plan, maps: Floats) -> Floats:
    """One map a layer, where that is asked and has not been done when they were kept."""
    if plan.question.combine is None or plan.probe.combine is not None:
        return maps
    how = np.mean if plan.question.combine == "mean" else np.max
    combined: Floats = how(maps, axis=1, keepdims=True)
    return combined


def _merge(plan: Plan, maps: Floats) -> Floats:
    """Kept rows and columns → the answer's: [..., query, key] of tokens → of what the plan names."""
    columns, rows = _positions(plan.columns, plan.probe.keys), _positions(plan.rows, plan.probe.queries)
    return _mean_rows(_sum_columns(maps, columns), rows)


def _order(plan: Plan) -> tuple[Ints, Ints]:
    """Where queries and keys stand among all keys in the order of the text (by index, special tokens come after the words)."""
    ranks = np.empty(len(plan.columns), dtype=np.int32)
    ranks[np.argsort([column[0] for column in plan.columns], kind="stable")] = np.arange(len(plan.columns))
    place = dict(zip(plan.keys, ranks, strict=True))
    return np.array([place[query] for query in plan.queries], dtype=np.int32), ranks


def _positions(groups: Sequence[tuple[int, ...]], kept: tuple[int, ...] | None) -> list[list[int]]:
    """Token indexes → where these tokens are among those that were kept."""
    if kept is None:
        return [list(group) for group in groups]
    position = {token: i for i, token in enumerate(kept)}
    return [[position[token] for token in group] for group in groups]


def _sum_columns(weights: Floats, columns: Sequence[list[int]]) -> Floats:
    """Attention to a word is the sum over its tokens: [..., token] → [..., word]."""
    if all(len(members) == 1 for members in columns):
        return _take(weights, [members[0] for members in columns], axis=-1)
    belongs = np.zeros((weights.shape[-1], len(columns)), dtype=np.float32)  # [token, word]
    for word, members in enumerate(columns):
        belongs[members, word] = 1.0
    merged: Floats = weights @ belongs
    return merged


def _mean_rows(array: Floats, rows: Sequence[list[int]]) -> Floats:
    """From a word the mean over its tokens: [..., token, x] → [..., word, x]."""
    if all(len(members) == 1 for members in rows):
        return _take(array, [members[0] for members in rows], axis=-2)
    share = np.zeros((len(rows), array.shape[-2]), dtype=np.float32)  # [word, token]
    for word, members in enumerate(rows):
        share[word, members] = 1.0 / len(members)
    merged: Floats = share @ array
    return merged


def _take(array: Floats, indexes: list[int], axis: int) -> Floats:
    """Those rows or columns; the array itself when that is all of them in order."""
    return array if indexes == list(range(array.shape[axis])) else np.take(array, indexes, axis=axis)
