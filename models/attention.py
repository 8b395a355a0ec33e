"""The mechanism: word vectors → query, key, value → scores → scale → mask → softmax → mix with the values → heads side by side.

Scaled dot-product attention as in Vaswani et al. 2017, "Attention is all you need", section 3.2:
`softmax(Q Kᵀ · scale + mask) V`, with `scale = 1/√head_dim` unless a model says otherwise. Everything that this project
calls attention goes through the functions here; `MultiHeadAttention` is the layer of the same paper, to be configured freely.

Shapes: B texts, H heads, N query positions, M key positions, D `head_dim`. True in a mask means "may attend".
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Positions = Literal["none", "sinusoidal", "rotary"]


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Key or value heads [B, H_kv, M, D], each shared by a group of query heads → [B, H, M, D] (Ainslie et al. 2023).

    The query heads of a group are neighbours: query head h reads key/value head h // (H / H_kv).
    """
    groups = num_heads // x.shape[-3]
    return x if groups == 1 else x.repeat_interleave(groups, dim=-3)


def attention_scores(query: Tensor, key: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """How well each query matches each key: Q Kᵀ · scale, as float32.

    query [B, H, N, D], key [B, H, M, D] → [B, H, N, M]. With `softcap` c the scores are squeezed into (−c, c) by
    c·tanh(scores/c) (Gemma 2).
    """
    scores = (query @ key.transpose(-2, -1)).float().mul_(scale)  # [B, H, N, M]
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def attention_weights(scores: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Softmax over the keys that each query may attend to, as float32; written to `out` where that takes no copy.

    scores [B, H, N, M]; mask: None, boolean (True: may attend) or a number to add, anything that broadcasts to the scores.
    A query that may attend to nothing gets a row of zeros. `sinks` [H] are scores of one key more for each head, that takes
    its share of the weight and has no value (gpt-oss). → [B, H, N, M]; rows sum to 1, or to less with sinks.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    if sinks is not None:
        column = sinks.float().reshape(-1, 1, 1).expand_as(scores[..., :1])  # [B, H, N, 1]
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
    if mask is not None:
        return torch.softmax(scores, dim=-1).nan_to_num(nan=0.0)
    return torch.softmax(scores, dim=-1) if out is None else torch.softmax(scores, dim=-1, out=out)


def mix(weights: Tensor, value: Tensor) -> Tensor:
    """The new vectors: for each query the values, averaged by its weights. [B, H, N, M], [B, H, M, D] → [B, H, N, D]."""
    return weights.to(value.dtype) @ value


def scale_rows(weights: Tensor) -> Tensor:
    """Each row [..., M] to the sum 1, for weights of which some keys were left out; a row without any weight stays zero."""
    return (weights / weights.sum(-1, keepdim=True)).nan_to_num(nan=0.0)


def fused_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """The same as scores → weights → mix without keeping the weights. → [B, H, N, D].

    One step of torch, but for small scores on a processor, where three small steps are up to twice as fast (docs/engine.md).
    key and value may have fewer heads than query. Torch's kernels give zeros to a query that may attend to nothing.
    """
    num_heads = query.shape[-3]
    key, value = repeat_heads(key, num_heads), repeat_heads(value, num_heads)  # [B, H, M, D]
    small = query.numel() // query.shape[-1] * key.shape[-2] <= 2**19  # scores that are still in the caches for the next step
    if mask is None and not causal and small and query.device.type == "cpu" and query.dtype == torch.float32:
        return mix(attention_weights(attention_scores(query, key, scale)), value)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)


def joined_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same for several texts that lie end to end in one row, at once: scores that cross from text to text are masked.

    query [H, T, D], key and value [H_kv, T, D], mask [T, T]: 0, or −∞ where a query may not attend. → [H, T, D]. A number that is
    not finite in one text gets into all of them, since 0 · NaN is NaN.
    """
    key, value = repeat_heads(key, query.shape[0]), repeat_heads(value, query.shape[0])  # [H, T, D]
    scores = torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)  # MatMul, Scale and Mask in one step: [H, T, T]
    return mix(attention_weights(scores), value)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, groups: Tensor, masks: Tensor, scale: float, causal: bool = False
) -> Tensor:
    """The same for texts that lie end to end in one row, each attending to itself alone, group after group of them.

    query [H, T, D], key and value [H_kv, T, D]. groups [G, 2], on the processor: the tokens of each group, and the number of its
    texts when they are of one length; 0 for texts of any lengths, to be joined, whose mask is the next in `masks`: the joined
    groups' masks, flat, one after the other, in which `causal` is said already. → [T, H, D]
    """
    parts: list[Tensor] = []
    start, mask_start = 0, 0
    sizes: list[list[int]] = groups.tolist()
    for tokens, texts in sizes:
        q, k, v = query[:, start : start + tokens], key[:, start : start + tokens], value[:, start : start + tokens]  # [H, t, D]
        if texts == 0:
            mask = masks[mask_start : mask_start + tokens * tokens].view(tokens, tokens)
            context = joined_attention(q, k, v, mask, scale).transpose(0, 1)  # [t, H, D]
            mask_start += tokens * tokens
        else:
            q, k, v = (x.unflatten(1, (texts, -1)).transpose(0, 1) for x in (q, k, v))  # [texts, H, length, D]
            context = fused_attention(q, k, v, scale, None, causal).transpose(1, 2).flatten(0, 1)  # [t, H, D]
        parts.append(context)
        start += tokens
    return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def text_mask(lengths: Sequence[int], causal: bool = False) -> Tensor:
    """[T, T] for `joined_attention`: 0 between the tokens of a text (with `causal`, from later to earlier ones), −∞ elsewhere."""
    text = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))  # [T]
    may = text[:, None] == text[None, :]
    return torch.zeros(may.shape).masked_fill_(~(may.tril_() if causal else may), -math.inf)


def causal_mask(length: int, device: torch.device | None = None) -> Tensor:
    """[N, N]: a query attends to itself and to what came before."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def window_mask(length: int, window: int, device: torch.device | None = None) -> Tensor:
    """[N, N]: a query attends to keys at most `window` positions away, on both sides: |q − k| ≤ window."""
    position = torch.arange(length, device=device)
    return (position[:, None] - position[None, :]).abs() <= window


def sinusoidal_positions(length: int, width: int, device: torch.device | None = None) -> Tensor:
    """[length, width]: sin at even and cos at odd dimensions, wavelengths from 2π to 10000·2π (Vaswani et al., section 3.5)."""
    position = torch.arange(length, device=device, dtype=torch.float32)[:, None]
    frequency = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10000.0) / width))
    table = torch.zeros(length, width, device=device)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)[:, : width // 2]
    return table


def rotate(x: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): turn each pair (i, i + D/2) of dimensions by position · 10000^(−2i/D).

    x [B, H, N, D], D even; the dot product of a rotated query and key depends on their distance only.
    """
    length, dim = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float32) / dim)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequency  # [N, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MultiHeadAttention(nn.Module):
    """The configurable layer: several heads attend side by side, their outputs are concatenated and projected.

    With `bias=True` and defaults otherwise it equals `torch.nn.MultiheadAttention(d_model, num_heads, batch_first=True)`
    with the same weights.

    Args:
        d_model: width of the vectors that go in and come out.
        num_heads: query heads; must divide d_model unless `head_dim` is given.
        num_kv_heads: key/value heads, each shared by num_heads / num_kv_heads query heads; num_heads unless given.
        head_dim: width of a head; d_model / num_heads unless given.
        bias: whether the four projections have one.
        causal: a query sees only itself and what came before.
        window: a query sees only keys at most this many positions away.
        scale: what the scores are multiplied by; 1/√head_dim unless given.
        positions: "sinusoidal" adds position vectors to the input, "rotary" turns query and key, "none" leaves order out.

    Raises ValueError for a configuration that cannot be.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        causal: bool = False,
        window: int | None = None,
        scale: float | None = None,
        positions: Positions = "none",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if d_model < 1 or num_heads < 1 or num_kv_heads < 1:
            raise ValueError(f"d_model, num_heads and num_kv_heads must be at least 1, not {d_model}, {num_heads}, {num_kv_heads}")
        if head_dim is None and d_model % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide d_model {d_model}; give head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        if self.head_dim < 1 or (positions == "rotary" and self.head_dim % 2):
            raise ValueError(f"head_dim must be at least 1, and even for rotary positions, not {self.head_dim}")
        if window is not None and window < 0:
            raise ValueError(f"window must be at least 0, not {window}")
        if positions not in ("none", "sinusoidal", "rotary"):
            raise ValueError(f"positions must be none, sinusoidal or rotary, not {positions!r}")
        self.causal, self.window, self.positions = causal, window, positions
        self.scale = self.head_dim**-0.5 if scale is None else scale
        width, kv_width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.query = nn.Linear(d_model, width, bias=bias, dtype=dtype, device=device)
        self.key = nn.Linear(d_model, kv_width, bias=bias, dtype=dtype, device=device)
        self.value = nn.Linear(d_model, kv_width, bias=bias, dtype=dtype, device=device)
        self.output = nn.Linear(width, d_model, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor, mask: Tensor | None = None, need_weights: bool = True) -> tuple[Tensor, Tensor | None]:
        """x [B, N, d_model], mask broadcastable to [B, H, N, N] (True: may attend) → new vectors [B, N, d_model], weights [B, H, N, N].

        Without `need_weights` the weights are None and torch's fused attention runs.
        """
        if self.positions == "sinusoidal":
            x = x + sinusoidal_positions(x.shape[1], self.d_model, x.device).to(x.dtype)
        query = self._split(self.query(x), self.num_heads)  # [B, H, N, D]
        key = self._split(self.key(x), self.num_kv_heads)  # [B, H_kv, N, D]
        value = self._split(self.value(x), self.num_kv_heads)  # [B, H_kv, N, D]
        if self.positions == "rotary":
            query, key = rotate(query), rotate(key)
        mask = self._mask(x.shape[1], mask, x.device)
        weights = None
        if need_weights:
            scores = attention_scores(query, repeat_heads(key, self.num_heads), self.scale)  # [B, H, N, N]
            weights = attention_weights(scores, mask)  # [B, H, N, N]
            context = mix(weights, repeat_heads(value, self.num_heads))  # [B, H, N, D]
        else:
            context = fused_attention(query, key, value, scale=self.scale, mask=mask)  # [B, H, N, D]
        return self.output(context.transpose(1, 2).flatten(2)), weights  # [B, N, H·D] → [B, N, d_model]

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)  # [B, N, heads·D] → [B, heads, N, D]

    def _mask(self, length: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        if self.causal:
            own = causal_mask(length, device)
            mask = own if mask is None else mask & own
        if self.window is not None:
            own = window_mask(length, self.window, device)
            mask = own if mask is None else mask & own
        return mask
