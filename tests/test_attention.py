"""The mechanism by hand, and MultiHeadAttention against torch's own."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models.attention import (
    MultiHeadAttention,
    attention_scores,
    attention_weights,
    causal_mask,
    fused_attention,
    joined_attention,
    mix,
    repeat_heads,
    rotate,
    scale_rows,
    sinusoidal_positions,
    text_mask,
    window_mask,
)


def test_softmax_by_hand():
    query, key = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    weights = attention_weights(attention_scores(query, key, scale=1 / math.sqrt(2)))
    assert weights[0, 0].tolist() == pytest.approx([0.66976, 0.33024], abs=1e-5)
    value = torch.tensor([[[10.0, 0.0], [0.0, 10.0]]])
    assert mix(weights, value)[0, 0].tolist() == pytest.approx([6.6976, 3.3024], abs=1e-4)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_rows_sum_to_one_and_masked_keys_get_exactly_nothing(length, window, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, length, length, generator=generator) * 20
    for mask in (causal_mask(length), window_mask(length, window), causal_mask(length) & window_mask(length, window)):
        weights = attention_weights(scores, mask)
        assert torch.allclose(weights.sum(-1), torch.ones(2, 3, length), atol=1e-6)
        assert (weights[..., ~mask] == 0).all()


def test_a_query_that_may_attend_to_nothing_gets_zeros():
    mask = torch.tensor([[True, True], [False, False]])
    weights = attention_weights(torch.randn(1, 1, 2, 2), mask)
    assert weights[0, 0, 1].tolist() == [0, 0]
    q = torch.randn(1, 2, 2, 4)
    assert fused_attention(q, q, q, scale=0.5, mask=mask)[0, :, 1].abs().max() == 0


def test_fused_is_the_same_as_step_by_step():
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    for mask, causal in ((None, False), (causal_mask(5), True), (window_mask(5, 1), False)):
        weights = attention_weights(attention_scores(query, repeat_heads(key, 4), 0.3), mask)
        expected = mix(weights, repeat_heads(value, 4))
        fused = fused_attention(query, key, value, scale=0.3, mask=None if causal else mask, causal=causal)
        assert torch.allclose(fused, expected, atol=1e-6)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_joined_texts_are_as_each_alone(lengths, causal):
    query, key, value = torch.randn(3, 2, sum(lengths), 4)
    joined = joined_attention(query, key, value, text_mask(lengths, causal), 0.3)
    texts = zip(*(x.split(lengths, dim=1) for x in (query, key, value)), strict=True)
    alone = [fused_attention(q[None], k[None], v[None], scale=0.3, causal=causal)[0] for q, k, v in texts]
    assert torch.allclose(joined, torch.cat(alone, dim=1), atol=1e-6)


def test_sinks_take_their_share():
    weights = attention_weights(torch.zeros(1, 2, 1, 3), None, sinks=torch.tensor([0.0, -math.inf]))
    assert weights[0, 0, 0].tolist() == pytest.approx([0.25] * 3)
    assert weights[0, 1, 0].tolist() == pytest.approx([1 / 3] * 3)


def test_softcap_bounds_the_scores():
    scores = attention_scores(torch.full((1, 1, 1, 4), 100.0), torch.full((1, 1, 1, 4), 100.0), scale=1.0, softcap=5.0)
    assert scores.item() == pytest.approx(5.0)


def test_scaled_rows():
    assert scale_rows(torch.tensor([[0.2, 0.6], [0.0, 0.0]])).tolist() == [pytest.approx([0.25, 0.75]), [0, 0]]


def pair(causal: bool = False, **options: object) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's with the same weights."""
    torch.manual_seed(3)
    bias = bool(options.get("bias", True))
    theirs = nn.MultiheadAttention(24, 4, bias=bias, batch_first=True).eval()
    ours = MultiHeadAttention(24, 4, causal=causal, **options)
    with torch.no_grad():
        for part, weight in zip((ours.query, ours.key, ours.value), theirs.in_proj_weight.chunk(3), strict=True):
            part.weight.copy_(weight)
        ours.output.weight.copy_(theirs.out_proj.weight)
        if bias:
            theirs.in_proj_bias.normal_()
            theirs.out_proj.bias.normal_()
            for part, piece in zip((ours.query, ours.key, ours.value), theirs.in_proj_bias.chunk(3), strict=True):
                part.bias.copy_(piece)
            ours.output.bias.copy_(theirs.out_proj.bias)
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_equals_torch(bias, causal, need_weights):
    ours, theirs = pair(causal, bias=bias)
    x = torch.randn(3, 7, 24)
    mask = ~causal_mask(7) if causal else None
    expected, expected_weights = theirs(x, x, x, attn_mask=mask, average_attn_weights=False)
    vectors, weights = ours(x, need_weights=need_weights)
    assert torch.allclose(vectors, expected, atol=1e-6)
    if need_weights:
        assert torch.allclose(weights, expected_weights, atol=1e-6)
    else:
        assert weights is None


def test_masks_of_the_layer():
    layer = MultiHeadAttention(8, 2, causal=True, window=2)
    _, weights = layer(torch.randn(1, 6, 8))
    allowed = causal_mask(6) & window_mask(6, 2)
    assert (weights[..., ~allowed] == 0).all()
    assert (weights[..., allowed] > 0).all()
    _, weights = MultiHeadAttention(8, 2)(torch.randn(2, 3, 8), mask=torch.tensor([[True, True, False]]))
    assert (weights[..., 2] == 0).all()


def test_grouped_heads_share_key_and_value():
    torch.manual_seed(0)
    grouped, full = MultiHeadAttention(16, 4, num_kv_heads=2), MultiHeadAttention(16, 4)
    with torch.no_grad():
        full.query.load_state_dict(grouped.query.state_dict())
        full.output.load_state_dict(grouped.output.state_dict())
        for name in ("key", "value"):
            few, many = getattr(grouped, name), getattr(full, name)
            many.weight.copy_(few.weight.view(2, 4, 16).repeat_interleave(2, 0).reshape(16, 16))
            many.bias.copy_(few.bias.view(2, 4).repeat_interleave(2, 0).reshape(16))
    x = torch.randn(2, 5, 16)
    for a, b in zip(grouped(x), full(x), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_rotary_scores_depend_on_distance_only():
    q, k = torch.randn(8), torch.randn(8)
    scores = rotate(q.expand(1, 1, 10, 8)) @ rotate(k.expand(1, 1, 10, 8)).transpose(-1, -2)
    for distance in range(-9, 10):
        diagonal = scores[0, 0].diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)
    assert torch.allclose(rotate(q.expand(1, 1, 10, 8)).norm(dim=-1), q.norm().expand(1, 1, 10), atol=1e-5)


def test_sinusoidal_positions_by_hand():
    table = sinusoidal_positions(3, 4)
    assert table[0].tolist() == [0, 1, 0, 1]
    assert table[2].tolist() == pytest.approx([math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)], abs=1e-6)
    assert sinusoidal_positions(2, 5).shape == (2, 5)


def test_order_matters_only_with_positions():
    x = torch.randn(1, 4, 8)
    for positions, same in (("none", True), ("sinusoidal", False), ("rotary", False)):
        layer = MultiHeadAttention(8, 2, positions=positions)
        forward, backward = layer(x)[0], layer(x.flip(1))[0].flip(1)
        assert torch.allclose(forward, backward, atol=1e-5) == same


def test_scale_head_dim_and_dtype():
    layer = MultiHeadAttention(10, 3, head_dim=6, scale=0.0, dtype=torch.float64)
    vectors, weights = layer(torch.randn(1, 4, 10, dtype=torch.float64))
    assert vectors.shape == (1, 4, 10)
    assert vectors.dtype == torch.float64
    assert torch.allclose(weights, torch.full((1, 3, 4, 4), 0.25))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"d_model": 10, "num_heads": 3}, "does not divide d_model 10"),
        ({"d_model": 8, "num_heads": 4, "num_kv_heads": 3}, "num_kv_heads 3 does not divide"),
        ({"d_model": 0, "num_heads": 1}, "at least 1"),
        ({"d_model": 9, "num_heads": 3, "positions": "rotary"}, "even for rotary"),
        ({"d_model": 8, "num_heads": 2, "window": -1}, "window must be at least 0"),
        ({"d_model": 8, "num_heads": 2, "positions": "learned"}, "'learned'"),
    ],
)
def test_configurations_that_cannot_be(arguments, said):
    with pytest.raises(ValueError, match=said):
        MultiHeadAttention(**arguments)
