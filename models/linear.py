"""nn.Linear with its weights laid out once for the processor's matrix products (oneDNN), and not at every call.

On a processor, `nn.Linear` in float32 goes to a general matrix product that takes the weights as they lie; for the few tokens
of a short text that takes up to three times as long as oneDNN's product with weights in blocks, and for many tokens a quarter
longer (docs/engine.md). The operators are those that torch's own compiler uses when it freezes a model. They are not of
torch's public interface, so they are tried before they are relied upon, and a model that they do not suit runs as it is.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import List, Optional, Union  # noqa: UP035 - TorchScript's own way

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

log = logging.getLogger(__name__)


class BlockedLinear(nn.Module):
    """x Wᵀ + b as the nn.Linear that it is made from, [..., in_features] → [..., out_features]; for inference on a processor.

    With `activation` "gelu" the result goes through GELU (Hendrycks and Gimpel 2016) while it is still in the cache.
    """

    weight: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.activation = "none"
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.register_buffer("weight", weight, persistent=False)  # [out_features, in_features], opaque

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return _traceable()(x, self.weight, self.bias, self.activation)
        return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, self.activation, [], "none")

    def plain(self) -> nn.Linear:
        """The nn.Linear that it was made from, with the same weights."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)
        linear.bias = self.bias
        return linear


@torch.no_grad()
def block(model: nn.Module) -> int:
    """Replace each nn.Linear of a model by a BlockedLinear that gives the same, and say how many there were.

    One stays as it is where the operators are missing or give something else, where its weights are not in the processor's
    memory, and where another part of the model uses the same weights, since then there would be two copies of them.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1

    def blocked(module: nn.Module) -> nn.Module:
        suits = type(module) is nn.Linear and owners[id(module.weight)] == 1 and module.weight.device.type == "cpu"
        return _blocked(module) if suits and isinstance(module, nn.Linear) else module

    _replace(model, blocked)
    return sum(isinstance(module, BlockedLinear) for module in model.modules())


def take_in_activations(model: nn.Module, forward: Callable[[], object]) -> int:
    """Let each BlockedLinear whose output goes to a GELU do that too, and say how many there were.

    Which do, is seen in one `forward` of the model, and not known from names. A GELU that takes anything else stays.
    """
    made_by: dict[int, tuple[BlockedLinear, Tensor]] = {}
    source: dict[nn.Module, BlockedLinear | None] = {}

    def note_output(module: nn.Module, _: object, output: Tensor) -> None:
        assert isinstance(module, BlockedLinear)
        made_by[id(output)] = module, output  # kept, so that no other tensor takes its place

    def note_input(module: nn.Module, inputs: tuple[object, ...]) -> None:
        linear = made_by[id(inputs[0])][0] if id(inputs[0]) in made_by else None
        source[module] = linear if module not in source else None

    hooks = [m.register_forward_hook(note_output) for m in model.modules() if isinstance(m, BlockedLinear)]
    gelus = [m for m in model.modules() if isinstance(m, GELUActivation) or (isinstance(m, nn.GELU) and m.approximate == "none")]
    hooks += [gelu.register_forward_pre_hook(note_input) for gelu in gelus]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    linears = [linear for linear in source.values() if linear is not None]
    taken = {gelu: linear for gelu, linear in source.items() if linear is not None and linears.count(linear) == 1}
    for linear in taken.values():
        linear.activation = "gelu"
    _replace(model, lambda module: TakenIn(module) if module in taken else module)
    return len(taken)


class TakenIn(nn.Module):
    """Where an activation was that the layer before it does now; the activation is kept for the way back."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.kept = (activation,)  # no module of its own: it is not to be found in the model

    def forward(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


@torch.no_grad()
def unblock(model: nn.Module) -> None:
    """The opposite of `block` and of `take_in_activations`."""

    def before(module: nn.Module) -> nn.Module:
        if isinstance(module, BlockedLinear):
            return module.plain()
        return module.kept[0] if isinstance(module, TakenIn) else module

    _replace(model, before)


def _replace(model: nn.Module, by: Callable[[nn.Module], nn.Module]) -> None:
    """Put `by(module)` in the place of each module below the model; one that stands in several places stays one."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children leaves out what has two names
            if child is not None:
                if child not in made:
                    made[child] = by(child)
                if made[child] is not child:
                    setattr(parent, name, made[child])


@cache
def _traceable() -> Callable[[Tensor, Tensor, Tensor | None, str], Tensor]:
    """The same operator for torch.jit.trace, which cannot look through its empty list of numbers by itself."""

    def product(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: str) -> Tensor:  # noqa: UP045 - TorchScript's own way
        numbers = torch.jit.annotate(List[Optional[Union[int, float, complex]]], [])  # noqa: UP006, UP007, UP045
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, numbers, "none")

    return torch.jit.script(product)


def _blocked(linear: nn.Linear) -> nn.Module:
    x = torch.randn(1, 3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight.dtype)
    tolerance = 1e-5 if linear.weight.dtype == torch.float32 else 2e-2
    try:
        blocked = BlockedLinear(linear)
        expected, got = linear(x).float(), blocked(x).float()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        log.debug("%s stays as it is: %s", linear, str(error).splitlines()[0])
        return linear
    near = (got - expected).abs() <= tolerance * expected.abs().max().clamp(min=1.0)
    return blocked if near.all() else linear
