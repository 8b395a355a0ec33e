"""Weights in blocks: the same numbers, weights that are shared stay shared, and the way back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import GELUActivation

from models import linear
from models.checkpoint import DEFAULT_MODEL, load
from models.encoder import Encoder
from models.linear import BlockedLinear, block, take_in_activations, unblock


class Two(nn.Module):
    """A layer used under two names, one whose weights are those of the embedding, and one that is more than a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 16)
        self.first = self.again = nn.Linear(16, 16)
        self.out = nn.Linear(16, 7, bias=False)
        self.out.weight = self.words.weight
        self.special = nn.modules.linear.NonDynamicallyQuantizableLinear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.again(self.first(self.words(ids))))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_blocked_layer_gives_what_the_layer_gives(tokens, width, out, bias):
    torch.manual_seed(tokens)
    layer = nn.Linear(width, out, bias=bias)
    x = torch.randn(2, tokens, width)
    with torch.inference_mode():
        expected = layer(x)
        blocked = BlockedLinear(layer)
        assert torch.allclose(blocked(x), expected, atol=1e-5)
        wide = torch.randn(2, width, tokens).transpose(1, 2)  # not contiguous
        assert torch.allclose(blocked(wide), layer(wide), atol=1e-5)
        assert torch.equal(blocked.plain().weight, layer.weight)
        assert blocked.plain().bias is layer.bias


def test_shared_layers_stay_shared_and_shared_weights_stay_as_they_are():
    model, ids = Two().eval(), torch.tensor([[1, 2, 3]])
    expected = model(ids)
    assert block(model) == 1
    assert isinstance(model.first, BlockedLinear)
    assert model.first is model.again
    assert model.out.weight is model.words.weight
    assert not isinstance(model.special, BlockedLinear)
    assert torch.allclose(model(ids), expected, atol=1e-5)
    unblock(model)
    assert type(model.first) is nn.Linear
    assert model.first is model.again
    assert torch.equal(model(ids), expected)


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_without_the_operators_the_model_stays_as_it_is(monkeypatch, fault):
    def missing(self, x):
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear.BlockedLinear, "forward", missing if fault == "missing" else lambda self, x: torch.zeros(1, 3, 16))
    model = nn.Sequential(nn.Linear(16, 16))
    assert block(model) == 0
    assert type(model[0]) is nn.Linear


class Gelus(nn.Module):
    """Three GELUs: one after a layer, one after two layers by turns, one after something else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.more = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)
        self.after, self.twice, self.other, self.tanh = nn.GELU(), GELUActivation(), nn.GELU(), nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after(self.up(x))
        x = self.twice(self.down(x)) + self.twice(x[..., :16])
        return self.tanh(self.more(self.other(x * 2)))


def test_an_activation_after_a_layer_is_taken_in():
    model, x = Gelus().eval(), torch.randn(1, 5, 16)
    with torch.no_grad():
        expected = model(x)
        assert block(model) == 3
        assert take_in_activations(model, lambda: model(x)) == 1
        assert [model.up.activation, model.down.activation, model.more.activation] == ["gelu", "none", "none"]
        assert torch.allclose(model(x), expected, atol=1e-5)
        unblock(model)
        assert torch.equal(model(x), expected)
        assert isinstance(model.after, nn.GELU)


def blocked_layers(encoder: Encoder) -> int:
    return sum(isinstance(module, BlockedLinear) for module in encoder._model.modules())


def test_the_default_model_is_blocked_unless_it_is_compiled():
    blocked = Encoder(load(DEFAULT_MODEL), "cpu")
    assert blocked_layers(blocked) == 24  # of each layer: query, key and value in one, output, up, down
    assert sum(isinstance(m, BlockedLinear) and m.activation == "gelu" for m in blocked._model.modules()) == 6
    assert blocked_layers(Encoder(load(DEFAULT_MODEL), "cpu", compile=True)) == 0


def test_a_model_that_blocks_do_not_suit_runs_as_it_is(monkeypatch):
    right = BlockedLinear.forward
    monkeypatch.setattr(BlockedLinear, "forward", lambda self, x: right(self, x) * (1 if x.shape[1] == 3 else 1.01))
    encoder = Encoder(load(DEFAULT_MODEL), "cpu")
    assert blocked_layers(encoder) == 0
    assert sum(type(module) is nn.Linear for module in encoder._model.modules()) == 24
    assert sum(isinstance(module, GELUActivation) for module in encoder._model.modules()) == 6


def test_a_model_that_does_not_run_with_blocks_runs_as_it_is(monkeypatch):
    right = BlockedLinear.forward

    def sometimes(self, x):
        if x.shape[1] != 3:
            raise TypeError("cannot be")
        return right(self, x)

    monkeypatch.setattr(BlockedLinear, "forward", sometimes)
    encoder = Encoder(load(DEFAULT_MODEL), "cpu")
    assert blocked_layers(encoder) == 0
    assert (encoder.facts.path, encoder.facts.num_layers, encoder.facts.num_heads) == ("packed", 6, 12)
