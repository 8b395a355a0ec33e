"""The bridge's own parts: layouts, mask rules, and attention over variable lengths, with a stand-in for the CUDA kernel."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sliding_window_bidirectional_mask_function

from models import bridge
from models.attention import causal_mask, fused_attention, repeat_heads, window_mask
from models.bridge import JOINED, Allowed, BridgeError, Forward, Layout, Recording
from models.values import Probe

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(sorted)


@given(LENGTHS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_cut_into_runs_joins_again(lengths, packed):
    layout = Layout(tuple(lengths), packed)
    assert sum(run.count for run in layout.runs) == len(lengths)
    shape = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    x = torch.randn(*shape, 2, 3)  # [1, T, H, D] or [B, N, H, D]
    if not packed:
        for row, length in enumerate(lengths):
            x[row, length:] = 0
    parts = [layout.tokens_of(x, run) for run in layout.runs]
    assert torch.equal(layout.join(parts), x)
    for run, part in zip(layout.runs, parts, strict=True):
        assert torch.equal(layout.heads_of(x.transpose(1, 2), run), part.transpose(1, 2))


def allowed(rule, lengths: Sequence[int], packed: bool = True) -> list[Allowed]:
    forward = Forward(Layout(tuple(lengths), packed), {})
    number = forward.number(rule)
    return [forward.allowed(run, number, False, torch.device("cpu")) for run in forward.layout.runs]


def test_rules_that_torch_knows_make_no_mask():
    assert allowed(bidirectional_mask_function, [1, 4]) == [Allowed(None, False)] * 2
    assert allowed(causal_mask_function, [1, 4]) == [Allowed(None, False), Allowed(None, True)]


def test_a_window_is_a_mask_only_for_texts_that_are_longer():
    short, long = allowed(sliding_window_bidirectional_mask_function(3), [4, 8])
    assert short == Allowed(None, False)
    assert torch.equal(long.mask[0, 0], window_mask(8, 3))


@pytest.mark.parametrize("packed", [True, False])
def test_a_mask_of_the_whole_batch_is_cut(packed):
    forward = Forward(Layout((2, 3, 3), packed), {})
    total = 8 if packed else 3
    mask = torch.randn(1 if packed else 3, 1, total, total)
    cut = [forward.allowed(run, mask, False, torch.device("cpu")).mask for run in forward.layout.runs]
    assert [c.shape for c in cut] == [(1, 1, 2, 2), (2, 1, 3, 3)]
    assert torch.equal(cut[1][1, 0], mask[0, 0, 5:, 5:] if packed else mask[2, 0])


def reference(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: Tensor, *rest: object, scale: float, window_size: tuple[int, int]
) -> Tensor:
    """What torch's varlen_attn computes, text by text."""
    out = torch.empty_like(query)
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
        out[start:end] = fused_attention(q, k, v, scale=scale, causal=window_size == (-1, 0)).transpose(0, 1)
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_all_texts_in_one_kernel(monkeypatch, causal):
    monkeypatch.setattr(bridge, "varlen_attn", reference)
    assert bridge.one_kernel_works(torch.device("cpu"), torch.float32, 8)
    layout = Layout((1, 4, 4, 6), packed=True)
    query, key, value = torch.randn(1, 4, 15, 8), torch.randn(1, 2, 15, 8), torch.randn(1, 2, 15, 8)
    rule = causal_mask_function if causal else bidirectional_mask_function
    contexts = []
    for one_kernel in (False, True):
        forward = Forward(layout, {}, one_kernel=one_kernel)
        with bridge.running(forward):
            contexts.append(bridge.attention_function(torch.nn.Module(), query, key, value, forward.number(rule), scaling=0.3)[0])
    assert torch.allclose(*contexts, atol=1e-6)


def test_a_kernel_that_is_missing_or_wrong_is_not_used(monkeypatch):
    assert not bridge.one_kernel_works(torch.device("cpu"), torch.float32, 8)
    monkeypatch.setattr(bridge, "varlen_attn", lambda query, *rest, **options: query)
    assert not bridge.one_kernel_works(torch.device("cpu"), torch.float32, 8)


def test_what_would_be_left_out_is_refused():
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(BridgeError, match=r"within bridge\.running"):
        bridge.attention_function(torch.nn.Module(), q, q, q, None)
    with bridge.running(Forward(Layout((3,), packed=True), {})):
        with pytest.raises(BridgeError, match="block_indices"):
            bridge.attention_function(torch.nn.Module(), q, q, q, None, block_indices=q)
        with pytest.raises(BridgeError, match="position bias"):
            bridge.attention_function(torch.nn.Module(), q, q, q, None, position_bias=q)
        with pytest.raises(BridgeError, match="keys from elsewhere"):
            bridge.attention_function(torch.nn.Module(), q, torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), None)


def test_norms_by_hand():
    """The norm of each value after the head's part of W_O (Kobayashi et al. 2020)."""
    query, key, value = torch.randn(3, 2, 5, 4)
    output = torch.randn(6, 8)  # [d_model, H·D]
    recording = Recording(Probe(layers=(0,), heads=(1,), norms=True), num_heads=2, length=5)
    recording.look(0, query, key, value, scale=0.5, mask=causal_mask(5), softcap=None, sinks=None, output=output)
    expected = torch.stack([(output[:, 4:] @ value[1, j]).norm() for j in range(5)])
    assert torch.allclose(recording.value_norms[0, 0], expected, atol=1e-5)
    scores = (query[1] @ key[1].T * 0.5).masked_fill(~causal_mask(5), -torch.inf)
    assert torch.allclose(recording.weights[0, 0], scores.softmax(-1), atol=1e-6)


def test_repeated_heads_are_neighbours():
    assert repeat_heads(torch.tensor([[[[1.0]], [[2.0]]]]), 4).flatten().tolist() == [1, 1, 2, 2]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9).map(sorted), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_groups_are_all_runs_in_order(lengths, spare):
    layout = Layout(tuple(lengths), True, spare)
    assert tuple(run for group in layout.groups for run in group) == layout.runs
    for group in layout.groups:
        assert len(group) == 1 or group[-1].end - group[0].start <= JOINED
    for first, second in pairwise(layout.groups):  # as few as can be
        assert second[0].end - first[0].start > JOINED


@given(st.lists(st.integers(1, 150), min_size=1, max_size=9).map(sorted), st.integers(0, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_groups_of_a_packed_row_are_all_its_tokens(lengths, spare, joins):
    layout = Layout(tuple(lengths), True, spare)
    forward = Forward(layout, {})
    groups, masks = forward.groups(joins)
    assert groups[:, 0].sum() == sum(lengths) + spare
    short = [group for group in layout.groups if group[-1].end - group[0].start <= JOINED]
    joined = groups[groups[:, 1] == 0, 0]
    assert len(joined) == (len(short) if joins else 0)
    assert len(masks) == (joined**2).sum()
    assert forward.joined == (joins and any(sum(run.count for run in group) > 1 for group in short))


@pytest.mark.parametrize("rule", [bidirectional_mask_function, causal_mask_function, sliding_window_bidirectional_mask_function(3)])
@pytest.mark.parametrize("spare", [0, 3])
def test_joined_or_alone(rule, spare):
    """Grouped heads, causal masks and spare tokens too; what has a mask of its own is not joined."""
    layout = Layout((1, 4, 4, 60, 60, 61), packed=True, spare=spare)
    query, key, value = torch.randn(1, 4, 190 + spare, 8), torch.randn(1, 2, 190 + spare, 8), torch.randn(1, 2, 190 + spare, 8)
    contexts, joined = [], []
    for joins in (True, False):
        forward = Forward(layout, {}, joins=joins)
        with bridge.running(forward):
            contexts.append(bridge.attention_function(torch.nn.Module(), query, key, value, forward.number(rule), scaling=0.3)[0])
        joined.append(forward.joined)
    assert contexts[0].shape == (1, 190 + spare, 4, 8)
    assert torch.allclose(contexts[0][:, :190], contexts[1][:, :190], atol=1e-6)
    assert joined == [rule in (bidirectional_mask_function, causal_mask_function), False]
