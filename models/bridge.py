"""Lends the mechanism of attention.py to every checkpoint of transformers that goes through its attention interface.

transformers lets a program register an attention function under a name, and beside it the function that makes the masks.
Ours is called "attend". Three things happen in it that transformers' own do not do:

- the texts of a batch may lie end to end in one row (*packed*), each attends to itself alone;
- beside torch's fused attention, the weights of just those layers, heads and queries that a Probe names are computed and
  kept; what the model computes is the same to the bit with and without;
- layers are counted by calls, since some models share one module among all layers or do not number them.

A mask never becomes a tensor of the whole batch: transformers describes it by a rule `(batch, head, query, key) → bool`, and our
mask function hands the rule on under a number; attention evaluates it for one text at a time, and not at all for the two
rules that torch knows itself (everything, causal).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from models.attention import (
    attention_scores,
    attention_weights,
    causal_mask,
    fused_attention,
    mix,
    packed_attention,
    repeat_heads,
    scale_rows,
    text_mask,
)
from models.values import Probe

NAME = "attend"
MaskRule = Callable[[Any, Any, Any, Any], Tensor]

HARMLESS = frozenset(
    "position_ids cache_position sliding_window output_attentions output_hidden_states use_cache return_dict deterministic "
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k num_items_in_batch output_router_logits seq_idx".split()
)
"""Keyword arguments of attention functions that say nothing which the mask rule or the layout does not say already."""


JOINED = 128
"""Tokens of short texts whose attention is computed at once: all scores between them are fewer steps, and cheap while they are few."""


class BridgeError(Exception):
    """The model asks for something in its attention that this function would leave out; it must not run through it."""


@dataclass(frozen=True)
class Run:
    """Neighbouring texts of one length: texts `first` to `first + count`, whose tokens begin at `start` of a packed row."""

    first: int
    count: int
    length: int
    start: int

    @property
    def end(self) -> int:
        """Where the run's tokens end in a packed row."""
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Layout:
    """How the texts of a batch lie in its tensors: end to end in one row, or one a row with padding on the right.

    A packed row may have some `spare` tokens at its end, which belong to no text.
    """

    lengths: tuple[int, ...]
    packed: bool
    spare: int = 0
    runs: tuple[Run, ...] = field(init=False)
    groups: tuple[tuple[Run, ...], ...] = field(init=False)
    """Neighbouring runs of a packed row with JOINED tokens at most together; a longer run is a group by itself."""

    def __post_init__(self) -> None:
        runs, first, start = [], 0, 0
        for length, group in groupby(self.lengths):
            run = Run(first, len(list(group)), length, start)
            runs.append(run)
            first, start = first + run.count, run.end
        groups: list[tuple[Run, ...]] = []
        for run in runs:
            if groups and run.end - groups[-1][0].start <= JOINED:
                groups[-1] += (run,)
            else:
                groups.append((run,))
        object.__setattr__(self, "runs", tuple(runs))
        object.__setattr__(self, "groups", tuple(groups))

    @property
    def tokens(self) -> int:
        """All tokens of a packed row, spare ones too."""
        return self.runs[-1].end + self.spare

    def heads_of(self, x: Tensor, run: Run) -> Tensor:
        """A run's part of [1, H, T, D] (packed) or [B, H, N, D] → [count, H, length, D], a view."""
        if not self.packed:
            return x[run.first : run.first + run.count, :, : run.length]
        return x[0, :, run.start : run.start + run.count * run.length].unflatten(1, (run.count, run.length)).transpose(0, 1)

    def tokens_of(self, x: Tensor, run: Run) -> Tensor:
        """A run's part of [1, T, …] (packed) or [B, N, …] → [count, length, …], a view."""
        if not self.packed:
            return x[run.first : run.first + run.count, : run.length]
        return x[0, run.start : run.start + run.count * run.length].unflatten(0, (run.count, run.length))

    def join(self, parts: list[Tensor]) -> Tensor:
        """The runs' [count, length, …], in order, back into the batch's tensor; zeros where there is padding, or spare tokens."""
        if self.packed:
            rows = [part.flatten(0, 1).unsqueeze(0) for part in parts]  # [1, count·length, …]
            missing = self.tokens - sum(row.shape[1] for row in rows)
            if missing:
                rows.append(rows[0].new_zeros(1, missing, *rows[0].shape[2:]))
            return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        longest = max(self.lengths)
        return torch.cat([F.pad(part, [0, 0] * (part.dim() - 2) + [0, longest - part.shape[1]]) for part in parts])


@dataclass(frozen=True)
class Allowed:
    """Who may attend to whom in the texts of a run: a mask that broadcasts to [count, H, length, length], or torch's causal one."""

    mask: Tensor | None
    causal: bool

    def explicit(self, length: int, device: torch.device) -> Tensor | None:
        """As a mask in any case; None when everybody may attend to everybody."""
        return causal_mask(length, device) if self.causal else self.mask


class Recording:
    """What a forward keeps of one text's attention, as its probe asks: nothing is computed that is not kept.

    weights [L', H', Q', K'] and, with `probe.norms`, value_norms [L', H', length]: the chosen layers, heads, queries and keys.
    """

    def __init__(self, probe: Probe, num_heads: int, length: int) -> None:
        self.probe = probe
        self._slot = {layer: i for i, layer in enumerate(probe.layers)}
        self._heads = slice(None) if probe.heads is None else list(probe.heads)
        self._queries = slice(None) if probe.queries is None else list(probe.queries)
        rows = length if probe.queries is None else len(probe.queries)
        heads = num_heads if probe.heads is None else len(probe.heads)
        kept_heads = heads if probe.combine is None else 1
        self._keys = None if probe.keys is None else list(probe.keys)
        columns = length if self._keys is None else len(self._keys)
        self.weights = torch.empty(len(probe.layers), kept_heads, rows, columns)
        self.value_norms = torch.empty(len(probe.layers), heads, length) if probe.norms else None

    def wants(self, layer: int) -> bool:
        """Whether the probe asks for anything of this layer."""
        return layer in self._slot

    def keep(self, layer: int, weights: Tensor) -> None:
        """Keep weights [H', Q', length] of the chosen heads and queries: the chosen keys, combined over the heads if asked."""
        if self._keys is not None:
            weights = scale_rows(weights[..., self._keys])  # [H', Q', K']
        if self.probe.combine == "mean":
            weights = weights.mean(0, keepdim=True)
        elif self.probe.combine == "max":
            weights = weights.amax(0, keepdim=True)
        kept = self.weights[self._slot[layer]]
        if weights.data_ptr() != kept.data_ptr():
            kept.copy_(weights)

    def keep_rows_of(self, layer: int, weights: Tensor) -> None:
        """Keep the chosen part of all weights [H, length, length] of a layer."""
        self.keep(layer, weights[self._heads][:, self._queries].float())

    def look(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        mask: Tensor | None,
        softcap: float | None,
        sinks: Tensor | None,
        output: Tensor | None,
    ) -> None:
        """Compute and keep the chosen weights of a text from its query, key and value [H, length, D], all heads.

        mask broadcasts to [H, length, length]; `output` is the layer's W_O [d_model, H·D], needed for the norms.
        """
        scores = attention_scores(query[self._heads][:, self._queries], key[self._heads], scale, softcap)  # [H', Q', length]
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], key.shape[1])[self._heads][:, self._queries]
        kept = self.weights[self._slot[layer]]  # [H', Q', length], where nothing is left to be done with the weights
        out = kept if kept.shape == scores.shape and kept.device == scores.device and self._keys is None else None
        self.keep(layer, attention_weights(scores, mask, None if sinks is None else sinks[self._heads], out))
        if self.value_norms is not None:
            if output is None:
                raise BridgeError("the output projection of the attention was not found")
            shares = output.unflatten(1, (query.shape[0], -1)).permute(1, 2, 0)[self._heads]  # [H', D, d_model]
            self.value_norms[self._slot[layer]].copy_((value[self._heads] @ shares).float().norm(dim=-1))


class Forward:
    """One forward of one batch: its layout, what to record of which text, and which layer it has come to.

    Without `joins`, no text's numbers are in any step of another's attention, not even as what is masked.
    """

    def __init__(
        self,
        layout: Layout,
        recordings: dict[int, Recording],
        outputs: tuple[Tensor, ...] = (),
        one_kernel: bool = False,
        joins: bool = False,
    ) -> None:
        self.layout, self.recordings, self.outputs, self.one_kernel = layout, recordings, outputs, one_kernel
        self.joins, self.joined = joins, False
        self.layer = 0
        self.num_heads = 0
        self.last_context: Tensor | None = None
        self._ends: Tensor | None = None
        self._rules: list[MaskRule] = []
        self._masks: dict[tuple[int, int, int], Allowed] = {}
        self._groups: dict[tuple[bool, bool], tuple[Tensor, Tensor]] = {}

    def groups(self, joins: bool, causal: bool = False) -> tuple[Tensor, Tensor]:
        """The texts of a packed row as `packed_attention` wants them, joined or not: groups and masks, made once for all layers."""
        if (joins, causal) not in self._groups:
            layout, sizes, masks = self.layout, [], []
            for group in layout.groups if joins else [(run,) for run in layout.runs]:
                lengths = [run.length for run in group for _ in range(run.count)]
                spare = layout.spare if group[-1] is layout.runs[-1] else 0
                if joins and sum(lengths) <= JOINED:
                    self.joined = self.joined or len(lengths) > 1
                    sizes.append((sum(lengths) + spare, 0))
                    masks.append(text_mask(lengths + [spare] * (spare > 0), causal).flatten())
                else:
                    sizes += [(sum(lengths), len(lengths))] + [(spare, 1)] * (spare > 0)
            self._groups[joins, causal] = torch.tensor(sizes), torch.cat(masks) if masks else torch.empty(0)
        return self._groups[joins, causal]

    def number(self, rule: MaskRule) -> Tensor:
        """Take a mask rule and give the tensor that stands for it on its way through the model."""
        self._rules.append(rule)
        return torch.full((1, 1, 1, 1), len(self._rules) - 1)

    def ends(self, device: torch.device) -> Tensor:
        """Where each text of a packed row ends, from 0 on: [texts + 1], int32."""
        if self._ends is None:
            self._ends = torch.tensor([0, *accumulate(self.layout.lengths)], dtype=torch.int32, device=device)
        return self._ends

    def allowed(self, run: Run, mask: Tensor | None, causal: bool, device: torch.device) -> Allowed:
        """Who may attend to whom in a run, from what the model gave as its mask: nothing, a rule's number, or a tensor."""
        if mask is None:
            return Allowed(None, causal and run.length > 1)
        if mask.dtype != torch.long or mask.numel() != 1:
            return Allowed(self._cut(mask, run), causal=False)
        number = int(mask.item())
        place = (number, run.length, 0 if self.layout.packed else run.first)
        if place not in self._masks:
            self._masks[place] = self._evaluate(self._rules[number], run, device)
        return self._masks[place]

    def _evaluate(self, rule: MaskRule, run: Run, device: torch.device) -> Allowed:
        if rule is bidirectional_mask_function or rule is causal_mask_function:
            return Allowed(None, causal=rule is causal_mask_function and run.length > 1)
        position = torch.arange(run.length, device=device)
        texts = (
            torch.zeros(1, dtype=torch.long, device=device) if self.layout.packed else torch.arange(run.count, device=device) + run.first
        )
        may = rule(texts[:, None, None, None], position.new_zeros(1, 1, 1, 1), position[:, None], position[None, :])
        may = may.expand(len(texts), 1, run.length, run.length)
        if may.all():
            return Allowed(None, causal=False)
        causal = torch.equal(may, causal_mask(run.length, device).expand_as(may))
        return Allowed(None if causal else may, causal)

    def _cut(self, mask: Tensor, run: Run) -> Tensor:
        """A run's part of a whole-batch mask [B or 1, H or 1, N or 1, N] → [count, H or 1, length or 1, length]."""
        if not self.layout.packed:
            rows = mask if mask.shape[0] == 1 else mask[run.first : run.first + run.count]
            return rows[:, :, : run.length, : run.length]
        starts = [run.start + i * run.length for i in range(run.count)]
        queries = [slice(s, s + run.length) if mask.shape[2] > 1 else slice(None) for s in starts]
        return torch.cat([mask[:1, :, q, s : s + run.length] for q, s in zip(queries, starts, strict=True)])


_CURRENT: ContextVar[Forward | None] = ContextVar("attend_forward", default=None)


@contextmanager
def running(forward: Forward) -> Iterator[Forward]:
    """Within this, models whose attention implementation is "attend" run as `forward` says."""
    token = _CURRENT.set(forward)
    try:
        yield forward
    finally:
        _CURRENT.reset(token)


def _current() -> Forward:
    forward = _CURRENT.get()
    if forward is None:
        raise BridgeError('a model with the attention "attend" runs within bridge.running() only')
    return forward


def mask_function(*, mask_function: MaskRule, **_: object) -> Tensor:
    """What transformers calls to make a mask; the padding that it also hands over is known from the layout."""
    return _current().number(mask_function)


@torch.compiler.disable
def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers calls as attention: query [B, H, N, D], key and value [B, H_kv, N, D] → context [B, N, H, D], None.

    B and N are 1 and the sum of all lengths in a packed batch. Raises BridgeError for what it would have to leave out.
    """
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in HARMLESS)
    if unknown or key.shape[2] != query.shape[2]:
        raise BridgeError(f"the attention of {type(module).__name__} takes {', '.join(unknown) or 'keys from elsewhere'}")
    if position_bias is not None and _current().layout.packed:
        raise BridgeError(f"{type(module).__name__} makes its position bias for a whole row")
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    rules = {"scale": scaling, "position_bias": position_bias, "softcap": softcap, "sinks": s_aux}
    return attend(query, key, value, attention_mask, causal=causal, **rules), None


@torch.compiler.disable
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The next layer's attention in the forward that runs: query [B, H, N, D], key and value [B, H_kv, N, D] → context [B, N, H, D].

    B and N are 1 and the sum of all lengths in a packed batch. What a Probe asks for is recorded on the way.
    """
    forward = _current()
    layout = forward.layout
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    layer, forward.layer = forward.layer, forward.layer + 1
    forward.num_heads = query.shape[1]
    allowed = {run: forward.allowed(run, mask, causal, query.device) for run in layout.runs}
    if position_bias is not None:
        allowed = {run: Allowed(_with_bias(may, position_bias, run, query.device), False) for run, may in allowed.items()}
    if forward.recordings:
        for run, may in allowed.items():
            _record(forward, layer, run, query, key, value, may, scale=scale, softcap=softcap, sinks=sinks)
    causal_texts = {may.causal for run, may in allowed.items() if run.length > 1}
    alike = len(causal_texts) <= 1 and all(may.mask is None for may in allowed.values())
    if layout.packed and alike and softcap is None and sinks is None:
        attention = _in_one_kernel if forward.one_kernel else _packed
        whole = attention(forward, query[0], key[0], value[0], scale, causal_texts == {True}).unsqueeze(0)
    else:
        whole = layout.join([_alone(layout, run, query, key, value, may, scale, softcap, sinks) for run, may in allowed.items()])
    forward.last_context = whole
    return whole


def _packed(forward: Forward, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """All texts of a packed row: query [H, T, D], key and value [H_kv, T, D] → [T, H, D]."""
    return packed_attention(query, key, value, *forward.groups(forward.joins, causal), scale, causal)


def _alone(
    layout: Layout,
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    may: Allowed,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention of one run: context [count, length, H, D]."""
    q, k, v = (layout.heads_of(x, run) for x in (query, key, value))  # [count, H or H_kv, length, D]
    if softcap is None and sinks is None:
        context = fused_attention(q, k, v, scale=scale, mask=_for_fused(may.mask, q), causal=may.causal)
    else:
        scores = attention_scores(q, repeat_heads(k, q.shape[1]), scale, softcap)  # [count, H, length, length]
        weights = attention_weights(scores, may.explicit(run.length, query.device), sinks)
        context = mix(weights, repeat_heads(v, q.shape[1]))
    return context.transpose(1, 2).contiguous()


def _in_one_kernel(forward: Forward, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """The same as `_packed` by torch's attention over variable lengths (CUDA)."""
    q, k, v = (repeat_heads(x, query.shape[0]).transpose(0, 1).contiguous() for x in (query, key, value))  # [T, H, D]
    ends, longest = forward.ends(query.device), max(forward.layout.lengths)
    window = (-1, 0) if causal else (-1, -1)
    context = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=window)
    assert isinstance(context, Tensor)  # and not with the log-sum-exp, which was not asked for
    return context


def one_kernel_works(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether attention over variable lengths runs here and gives what attention text by text gives: tried, not looked up."""
    layout = Layout((3, 7), packed=True)
    draws = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 10, head_dim, generator=draws).to(device, dtype) for _ in range(3))
    try:
        for causal in (False, True):
            forward = Forward(layout, {})
            together = _in_one_kernel(forward, query, key, value, 0.3, causal)
            if not torch.allclose(together, _packed(forward, query, key, value, 0.3, causal), atol=2e-2):
                return False
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return False
    return True


def _for_fused(mask: Tensor | None, query: Tensor) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype)


def _with_bias(allowed: Allowed, bias: Tensor, run: Run, device: torch.device) -> Tensor:
    """A bias [B or 1, H, N, N] that is added to the scores, with −∞ where a query may not attend."""
    bias = bias[:1] if bias.shape[0] == 1 else bias[run.first : run.first + run.count]
    bias = bias[:, :, : run.length, : run.length]
    mask = allowed.explicit(run.length, device)
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


def record(forward: Forward, shown: Sequence[Tensor]) -> None:
    """Record after a forward what `attend` records within one, of a packed row in which all tokens of a text attend to each other.

    shown: query, key and value [1, H, T, D] of the first layer, of the second, and so on.
    """
    for layer in range(len(shown) // 3):
        query, key, value = shown[3 * layer : 3 * layer + 3]
        scale = query.shape[-1] ** -0.5
        for run in forward.layout.runs:
            _record(forward, layer, run, query, key, value, Allowed(None, False), scale=scale, softcap=None, sinks=None)


def _record(
    forward: Forward,
    layer: int,
    run: Run,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Allowed,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    wanted = [i for i in range(run.count) if run.first + i in forward.recordings and forward.recordings[run.first + i].wants(layer)]
    if not wanted:
        return
    query, key, value = (forward.layout.heads_of(x, run) for x in (query, key, value))  # [count, H or H_kv, length, D]
    for i in wanted:
        mask = allowed.explicit(run.length, query.device)
        if mask is not None and mask.dim() == 4:
            mask = mask[i if mask.shape[0] > 1 else 0]  # [H or 1, length or 1, length]
        num_heads = query.shape[1]
        forward.recordings[run.first + i].look(
            layer, query[i], repeat_heads(key[i], num_heads), repeat_heads(value[i], num_heads), scale=scale, mask=mask,
            softcap=softcap, sinks=sinks, output=forward.outputs[layer] if layer < len(forward.outputs) else None,
        )  # fmt: skip


AttentionInterface.register(NAME, attention_function)
AttentionMaskInterface.register(NAME, mask_function)
