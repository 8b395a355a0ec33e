"""BERT and its like as one straight line: word embedding → attention → two linear layers, layer upon layer.

transformers' own models do the same steps with much between them that a service for embeddings never asks for (caches, decoders,
outputs to be captured); for a short text that takes as long as the arithmetic (docs/engine.md). The weights, the
normalizations and the activations are the loaded model's; queries, keys and values come out of one product. The encoder
takes this in place of the model where it gives the same vectors, and the model itself everywhere else.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertModel, CamembertModel, DistilBertModel, PreTrainedConfig, RobertaModel, XLMRobertaModel

from models import bridge
from models.attention import packed_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query, key, value [1, H, T, D] → context [1, T, H, D]."""

Graph = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""What `Packed.forward` takes → what it gives."""

SHARED = (BertModel, RobertaModel, XLMRobertaModel, CamembertModel)
"""Architectures whose layers have the same parts under the same names."""


@dataclass(frozen=True)
class Output:
    """As transformers' models answer: the last hidden state [1, T, d_model], and all of them from the embeddings on, if asked."""

    last_hidden_state: Tensor
    hidden_states: tuple[Tensor, ...] | None


class Layer(nn.Module):
    """Attention, then two linear layers at each position; what went in is added to each, and the sum normalized.

    Devlin et al. 2018, after Vaswani et al. 2017, section 3.1.
    """

    def __init__(
        self, heads: int, query: nn.Linear, key: nn.Linear, value: nn.Linear, output: nn.Linear, norm: nn.Module,
        up: nn.Linear, activation: Callable[[Tensor], Tensor], down: nn.Linear, last_norm: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_heads, self.head_dim = heads, query.out_features // heads
        self.query_key_value = _side_by_side(query, key, value)
        self.output, self.norm = output, norm
        self.up, self.activation, self.down, self.last_norm = up, activation, down, last_norm

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """x [1, T, d_model] → the same shape; T: all tokens of a packed row."""
        projected = self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1))  # [1, T, 3, H, D]
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind()  # [1, H, T, D] each
        context = attend(query, key, value).flatten(2)  # [1, T, H·D]
        x = self.norm(x + self.output(context))
        return self.last_norm(x + self.down(self.activation(self.up(x))))


class Bert(nn.Module):
    """The parts of a loaded model in their order. Its attention is bridge's, so it runs within `bridge.running()`."""

    def __init__(self, config: PreTrainedConfig, embeddings: Any, layers: list[Layer]) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings, self.position_embeddings = embeddings.word_embeddings, embeddings.position_embeddings
        self.token_type_embeddings = getattr(embeddings, "token_type_embeddings", None)
        self.norm = embeddings.LayerNorm
        self.layers = nn.ModuleList(layers)
        self.head_dim = layers[0].head_dim

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.norm.weight.dtype

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        token_type_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        attend: Attend = bridge.attend,
    ) -> Output:
        """ids, positions and types [1, T] of a packed row; in such a row there is no padding that a mask would have to hide."""
        x = self.word_embeddings(input_ids)  # [1, T, d_model]
        if self.token_type_embeddings is not None:
            x = x + (self.token_type_embeddings.weight[0] if token_type_ids is None else self.token_type_embeddings(token_type_ids))
        x = self.norm(x + self.position_embeddings(position_ids))
        states = [x] if output_hidden_states else None
        for layer in self.layers:
            x = layer(x, attend)
            if states is not None:
                states.append(x)
        return Output(x, None if states is None else tuple(states))


class Packed(nn.Module):
    """A Bert for packed rows, to be traced: its steps depend on no number in Python. With `shows`, it shows what attention is made of."""

    def __init__(self, bert: Bert, shows: bool) -> None:
        super().__init__()
        self.bert, self.shows, self.attention = bert, shows, torch.jit.script(packed_attention)

    def forward(self, input_ids: Tensor, position_ids: Tensor, token_type_ids: Tensor, groups: Tensor, masks: Tensor) -> tuple[Tensor, ...]:
        """ids, positions and types [1, T], groups and masks as `packed_attention` has them → the last hidden state [1, T, d_model].

        What is shown comes after it: query, key and value [1, H, T, D] of the first layer, of the second, and so on.
        """
        shown: list[Tensor] = []

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if self.shows:
                shown.extend((query, key, value))
            return self.attention(query[0], key[0], value[0], groups, masks, scale).unsqueeze(0)

        scale = self.bert.head_dim**-0.5
        return self.bert(input_ids, position_ids, token_type_ids, attend=attend).last_hidden_state, *shown


def trace(bert: Bert, shows: bool) -> Graph:
    """Packed(bert, shows) as a graph that runs without Python (torch.jit), with the same weights and the same bits.

    Between the steps of a short text Python takes as long as the steps, and the other threads of a server that want Python's lock
    (requests to be read, answers to be written) would hold the forward up.
    """
    ids = torch.zeros(1, 5, dtype=torch.long, device=bert.norm.weight.device)
    example = ids, torch.arange(5, device=ids.device)[None], ids, torch.tensor([[5, 1]]), torch.empty(0)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is no longer developed; it is tried before it is relied upon, as all here
        return torch.jit.trace(Packed(bert, shows).eval(), example, check_trace=False)


def rebuild(model: nn.Module) -> Bert | None:
    """The same model as a straight line, made of its parts; None for an architecture that is built in another way."""
    if isinstance(model, SHARED):
        return Bert(model.config, model.embeddings, [_shared(layer) for layer in model.encoder.layer])
    if isinstance(model, DistilBertModel):
        return Bert(model.config, model.embeddings, [_distilled(layer) for layer in model.transformer.layer])
    return None


def _shared(layer: Any) -> Layer:
    look, mixed, up, down = layer.attention.self, layer.attention.output, layer.intermediate, layer.output
    return Layer(
        look.num_attention_heads, look.query, look.key, look.value, mixed.dense, mixed.LayerNorm,
        up.dense, up.intermediate_act_fn, down.dense, down.LayerNorm,
    )  # fmt: skip


def _distilled(layer: Any) -> Layer:
    look, feed = layer.attention, layer.ffn
    return Layer(
        look.n_heads, look.q_lin, look.k_lin, look.v_lin, look.out_lin, layer.sa_layer_norm,
        feed.lin1, feed.activation, feed.lin2, layer.output_layer_norm,
    )  # fmt: skip


@torch.no_grad()
def _side_by_side(*linears: nn.Linear) -> nn.Linear:
    """One layer that gives what these give, one after the other: [..., in_features] → [..., all their out_features]."""
    weight = torch.cat([linear.weight for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined
