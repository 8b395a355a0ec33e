"""nn.Linear with its weights laid out once for the processor's matrix products (oneDNN), and not at every call.

On a processor, `nn.Linear` in float32 goes to a general matrix product that takes the weights as they lie; for the few tokens
of a short text that takes up to three times as long as oneDNN's product with weights in blocks, and for many tokens a quarter
longer (docs/engine.md). The operators are those that torch's own compiler uses when it freezes a model. They are not of
torch's public interface, so they are tried before they are relied upon, and a model that they do not suit runs as it is.
"""

import logging

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class BlockedLinear(nn.Module):
    """x Wᵀ + b as the nn.Linear that it is made from, [..., in_features] → [..., out_features]; for inference on a processor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)  # [out_features, in_features], opaque

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

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
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children leaves out what has two names
            if type(child) is nn.Linear and owners[id(child.weight)] == 1 and child.weight.device.type == "cpu":
                made[child] = made.get(child) or _blocked(child)
                setattr(parent, name, made[child])
    return sum(isinstance(module, BlockedLinear) for module in made.values())


@torch.no_grad()
def unblock(model: nn.Module) -> None:
    """The opposite of `block`."""
    made: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # named_children leaves out what has two names
            if isinstance(child, BlockedLinear):
                made[child] = made.get(child) or child.plain()
                setattr(parent, name, made[child])


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
