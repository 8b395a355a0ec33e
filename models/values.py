"""What travels: a Passage goes in with a Probe, an Encoding comes out. Small, frozen, free of torch."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Combine = Literal["mean", "max"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its id and readable piece, and its place [start, end) in code points of its segment's text.

    Special tokens have no place (start, end, word and segment are None). `word` indexes the passage's words.
    """

    id: int
    text: str
    start: int | None
    end: int | None
    word: int | None
    segment: int | None
    special: bool


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a text: what stands between white space, or one CJK character, or what a token joins of them."""

    text: str
    start: int
    end: int
    segment: int


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, or a pair of texts, ready for the model.

    ids and type_ids are what the model gets, special tokens included. For each token: its place in code points of its segment's
    text (before the text: the prompt), its segment (None for special tokens), and whether it is special. The first
    `prompt_tokens` of them are the prompt's, a special token before it included.
    """

    texts: tuple[str, ...]
    ids: list[int]
    type_ids: list[int]
    offsets: list[tuple[int, int]]
    segments: list[int | None]
    special: list[bool]
    truncated: bool = False
    prompt_tokens: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Probe:
    """What to keep of one forward. What is not named here is not computed, not copied.

    Args:
        pooled: the vector that the checkpoint's own pipeline gives.
        normalize: None leaves its length to the checkpoint; True makes it 1, False leaves out a Normalize at the pipeline's end.
        embeddings: the last layer's vectors of the tokens in `rows` (None: all).
        layers, heads, queries: whose attention weights; no layers, no weights. None: all.
        keys: the keys that are kept; the rest of each row is scaled to sum to 1 again, before heads are combined. None: all.
        combine: one map a layer, the mean or the maximum over the chosen heads.
        norms: also the norms of the transformed values of the chosen layers and heads.
        hidden_layers: hidden states, 0 = what enters the first layer.
        spans: runs of tokens [first, last], each to become a vector in its context.
    """

    pooled: bool = True
    normalize: bool | None = None
    embeddings: bool = False
    rows: tuple[int, ...] | None = None
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] | None = None
    queries: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    combine: Combine | None = None
    norms: bool = False
    hidden_layers: tuple[int, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Encoding:
    """What the model says of one passage; None for what its probe did not ask for.

    pooled [dim] · embeddings [token, d_model] · weights [layer, head, query, key] · value_norms [layer, head, key]
    · hidden_states [layer, token, d_model] · spans [span, dim]
    """

    pooled: Floats | None = None
    embeddings: Floats | None = None
    weights: Floats | None = None
    value_norms: Floats | None = None
    hidden_states: Floats | None = None
    spans: Floats | None = None
