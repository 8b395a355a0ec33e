"""Figures that say in few numbers what attention weights look like. Pure functions of arrays.

Weights are [layer, head, query, key] unless a function says otherwise; a position is where a query or key stands in the
text, counted in tokens (in words, where words are the unit).
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from models.values import Floats

Ints = NDArray[np.int32]
Name = Literal["entropy", "distance", "rollout", "received", "top_k", "norms", "kind"]
KINDS = ("previous", "next", "same", "delimiter", "broad", "other")
POSITIONAL_MASS, DELIMITER_MASS = 0.5, 0.6
BROAD_ENTROPY, BROAD_KEYS = 3.8, 128


def entropy(weights: Floats) -> Floats:
    """How widely each query looks, in nats: H = −Σₖ aₖ ln aₖ, 0 for a single key and ln n for n keys alike (Shannon 1948).

    [..., key] → [...].
    """
    logs = np.log(weights, where=weights > 0, out=np.zeros_like(weights))  # 0 · ln 0 counts as 0
    nats: Floats = 0.0 - np.einsum("...k,...k->...", weights, logs)  # not "-x": that makes a -0.0
    return nats


def distance(weights: Floats, queries: Ints, keys: Ints) -> Floats:
    """How far each query looks: D = Σₖ aₖ |pos(q) − pos(k)| (Vig & Belinkov 2019, section 4.2, for a single query).

    [..., query, key] with the positions [query] and [key] → [..., query], in positions.
    """
    apart = np.abs(queries[:, None] - keys[None, :]).astype(np.float32)  # [query, key]
    far: Floats = np.einsum("...qk,qk->...q", weights, apart)
    return far


def received(weights: Floats) -> Floats:
    """The attention that each key gets: R = (1/Q) Σ_q a_qk, the mean over the Q queries. [..., query, key] → [..., key]."""
    mean: Floats = weights.sum(axis=-2) / np.float32(max(weights.shape[-2], 1))
    return mean


def top_k(weights: Floats, k: int) -> tuple[Ints, Floats]:
    """For each query the k strongest keys (all when there are fewer), strongest first, the earlier key first among equals that are kept.

    [..., key] → which of the keys and their weights, both [..., rank].
    """
    count = weights.shape[-1]
    k = min(k, count)
    split = np.argpartition(weights, count - k, axis=-1) if count else np.zeros(weights.shape, dtype=np.intp)
    best = np.sort(split[..., count - k :], axis=-1)  # in the order of keys
    values = np.take_along_axis(weights, best, axis=-1)
    order = np.argsort(-values, axis=-1, kind="stable")
    return np.take_along_axis(best, order, axis=-1).astype(np.int32), np.take_along_axis(values, order, axis=-1)


def rollout(maps: Floats, rows: Sequence[int] | None = None) -> Floats:
    """Attention followed down through the layers, the residual connection counted as attention to oneself.

    R = Ãₙ ⋯ Ã₂ Ã₁ with Ã = (A + I) / row sums (Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers", section 3).

    Args:
        maps: [layer, token, token], one map a layer, lowest first.
        rows: the queries that are wanted; None: all.

    Returns [query, token]: how much of each token, as it entered the lowest layer, is in each query after the highest. Rows sum to 1.
    """
    identity = np.eye(maps.shape[-1], dtype=np.float32)
    flow = identity if rows is None else identity[list(rows)]  # [query, token]
    for attention in maps[::-1]:
        mixed = attention + identity
        flow = flow @ (mixed / mixed.sum(axis=-1, keepdims=True))
    return flow


def norms(weights: Floats, value_norms: Floats) -> Floats:
    """What weights leave out, the length of what they weigh: ‖a·f(x)‖ = a ‖f(x)‖, f(x) = (x W_V + b_V) W_O of the head.

    Kobayashi et al. 2020, "Attention is Not Only a Weight", section 3. weights [..., query, key], value_norms ‖f(x)‖ [..., key]
    → [..., query, key], not scaled to any sum.
    """
    return weights * value_norms[..., None, :]


def kind(weights: Floats, queries: Ints, keys: Ints, special: NDArray[np.bool_]) -> tuple[NDArray[np.str_], dict[str, Floats]]:
    """What a head does most, after Clark et al. 2019, "What Does BERT Look At?", sections 3.1 to 3.3. The first that holds:

    - "previous", "next", "same": the greatest of the mean weights on the key one before, one after, at the query's own
      position, over the queries that have such a key, is above 0.5;
    - "delimiter": the mean weight on special tokens is above 0.6;
    - "broad": the mean entropy is above 3.8 nats. Their texts had 128 tokens; for fewer keys n, above 3.8 · ln n / ln 128;
    - "other".

    Args:
        weights: [layer, head, query, key].
        queries, keys: positions [query], [key].
        special: [key], which keys are special tokens.

    Returns kinds [layer, head] and the five figures by name, each [layer, head].
    """
    offset = keys[None, :] - queries[:, None]  # [query, key]
    figures = {name: _mean_at(weights, offset == step) for name, step in (("previous", -1), ("next", 1), ("same", 0))}
    figures["delimiter"] = received(weights)[..., special].sum(axis=-1)
    figures["entropy"] = received(entropy(weights)[..., None])[..., 0]
    places = np.stack([figures[name] for name in KINDS[:3]])  # [3, layer, head]
    share = min(1.0, math.log(max(len(keys), 1)) / math.log(BROAD_KEYS))
    kinds = np.select(
        [places.max(axis=0) > POSITIONAL_MASS, figures["delimiter"] > DELIMITER_MASS, figures["entropy"] > BROAD_ENTROPY * share],
        [np.array(KINDS)[places.argmax(axis=0)], "delimiter", "broad"],
        "other",
    )
    return kinds, figures


def _mean_at(weights: Floats, where: NDArray[np.bool_]) -> Floats:
    """The mean weight at the places [query, key], at most one a query. [..., query, key] → [...]; 0 when there is no such place."""
    query, key = np.nonzero(where)
    mean: Floats = weights[..., query, key].sum(axis=-1) / np.float32(max(len(query), 1))
    return mean
