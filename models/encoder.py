"""[Passage], [Probe] → [Encoding]: one forward of one checkpoint, and what is kept of it.

How a checkpoint is run is found out when it is loaded, with a few random tokens, and not from its name. In this order:
*packed* (our attention, texts end to end in one row), *padded* (our attention, one text a row), *eager* (the model's own
attention, read through `output_attentions`), and without attention at all. A way is taken when it gives the same as each
text alone, and weights whose rows sum to 1.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise, product
from typing import Any, Literal

import numpy as np
import torch
from sentence_transformers.sentence_transformer.modules import Normalize
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from models import bert, bridge, linear
from models.bridge import BridgeError, Forward, Layout, Recording
from models.checkpoint import Checkpoint, CheckpointError
from models.values import Encoding, Floats, Passage, Probe

log = logging.getLogger(__name__)
Path = Literal["packed", "padded", "eager", "none"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHOWN = 16 * 2**20
"""Bytes up to which a graph may show the query, key and value of every layer: three times as many as all hidden states."""


class NonfiniteOutput(Exception):
    """The model gave something that is not a number for this passage."""


@dataclass(frozen=True)
class Facts:
    """What is known of a served model."""

    name: str
    revision: str | None
    architecture: str
    num_layers: int
    num_heads: int
    d_model: int
    dim: int
    vocab_size: int
    max_length: int | None
    dtype: str
    device: str
    pooling: str
    path: Path
    norms: bool
    prompts: dict[str, str]
    default_prompt: str | None


def use_threads(count: int) -> None:
    """Let the calling thread compute with so many threads (OpenMP keeps the number for each thread that asks)."""
    torch.set_num_threads(count)


def choose_device(device: str) -> torch.device:
    """ "auto" is the GPU where there is one. Raises CheckpointError for a device that torch cannot use."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise CheckpointError(f"device {device}: {str(error).splitlines()[0]}") from error
    return chosen


class Encoder:
    """A checkpoint on a device. Not for several threads at once: one worker owns it.

    Args:
        checkpoint: what to run; it is moved to the device.
        device: "auto", "cpu", "cuda", "cuda:1" …
        max_length: tokens a text; None takes the checkpoint's own limit, never more than its positions.
        compile: let torch compile the model for forwards that record nothing.

    Raises CheckpointError.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", max_length: int | None = None, compile: bool = False) -> None:
        self.checkpoint = checkpoint
        self.device = choose_device(device)
        self._model: Any = checkpoint.transformer.to(self.device)
        self._architecture = type(self._model).__name__
        self._pipeline = checkpoint.pipeline.to(self.device)
        ends = list(checkpoint.pipeline)
        self._normalizes = bool(ends) and isinstance(ends[-1], Normalize)
        self._modules = ends[:-1] if self._normalizes else ends
        self._model.config.use_cache = False
        self._accepts = set(signature(self._model.forward).parameters)
        self._position_start = 0
        self._outputs: tuple[Tensor, ...] = ()
        self._one_kernel = self._blocked = False
        self._num_layers = self._num_heads = 0
        self.path: Path = "none"
        self._compiled: Any = None
        self._graph: bert.Graph | None = None
        self._showing_graph: bert.Graph | None = None
        self.sample = self._sample()[0]
        self._choose_path(block=self.device.type == "cpu" and not compile)
        self.checkpoint = replace(checkpoint, transformer=self._model)  # without what is no longer needed of it
        self._compiled = torch.compile(self._model, dynamic=True) if compile else None
        self.facts = self._facts(max_length)

    # ── Running ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.inference_mode()
    def encode(self, passages: Sequence[Passage], probes: Sequence[Probe]) -> list[Encoding | NonfiniteOutput]:
        """Run the passages through the model in one batch and keep what each one's probe asks for.

        The order of the answers is that of the passages; a passage whose numbers are not finite gets a NonfiniteOutput in
        place of an Encoding. Raises BridgeError when a probe asks for what the model's path cannot give.
        """
        if any(probe.layers for probe in probes) and self.path == "none":
            raise BridgeError("the attention of this model cannot be read")
        if any(probe.norms for probe in probes) and not self._outputs:
            raise BridgeError("the output projections of this model's attention were not found, so there are no norms")
        order = sorted(range(len(passages)), key=lambda i: len(passages[i]))
        answers: list[Encoding | NonfiniteOutput] = [NonfiniteOutput()] * len(order)
        for bucket in [order] if self.path == "packed" else _buckets(order, [len(passages[i]) for i in order]):
            try:
                encodings = self._encode([passages[i] for i in bucket], [probes[i] for i in bucket])
            except RuntimeError as error:
                raise _as_memory_error(error) from error
            for place, encoding in zip(bucket, encodings, strict=True):
                answers[place] = encoding
        return answers

    def _encode(self, batch: Sequence[Passage], probes: Sequence[Probe], joins: bool = True) -> list[Encoding | NonfiniteOutput]:
        """One forward; the batch is in order of length.

        Where texts were joined in their attention, one that is not finite spoils others: they are told apart by a second forward.
        """
        recordings = {
            i: Recording(probe, self._num_heads, len(passage))
            for i, (passage, probe) in enumerate(zip(batch, probes, strict=True))
            if probe.layers
        }
        layout = self._layout(tuple(map(len, batch)))
        forward = Forward(layout, recordings, self._outputs, self._one_kernel, joins and self._joins)
        hidden, states = self._run(batch, forward, any(probe.hidden_layers for probe in probes))
        answers = self._keep(batch, probes, layout, hidden, states, recordings)
        if forward.joined and any(isinstance(answer, NonfiniteOutput) for answer in answers):
            return self._encode(batch, probes, joins=False)
        return answers

    def _layout(self, lengths: tuple[int, ...]) -> Layout:
        """Rows are rounded up to a size that comes again: for each, oneDNN makes programs, one for each shape of weights.

        In float32 they cost as much as 15 tokens, which counts for a few short texts; in bfloat16 as much as 800.
        """
        packed, tokens = self.path == "packed", sum(lengths)
        if not packed or not self._blocked or (self._model.dtype == torch.float32 and tokens >= 64):
            return Layout(lengths, packed)
        step = max(4, 2 ** (tokens.bit_length() - 4))  # eight sizes, and then twice as many tokens
        return Layout(lengths, packed, spare=-tokens % step)

    def _run(self, batch: Sequence[Passage], forward: Forward, want_states: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """→ the last hidden state and all of them, [1, T, d_model] packed or [B, N, d_model]."""
        inputs = self._inputs(batch, forward.layout)
        graph = None if want_states else self._graph_for(forward)
        if graph is not None:
            types = inputs.get("token_type_ids", torch.zeros_like(inputs["input_ids"]))
            hidden, *shown = graph(inputs["input_ids"], inputs["position_ids"], types, *forward.groups(forward.joins))
            bridge.record(forward, shown)
            return hidden, ()
        if want_states:
            inputs["output_hidden_states"] = True
        if self.path in ("packed", "padded"):
            model = self._model if forward.recordings or want_states or self._compiled is None else self._compiled
            with bridge.running(forward):
                output = model(**inputs)
        else:
            if forward.recordings:
                inputs["output_attentions"] = True
            output = self._model(**inputs)
            if forward.recordings:
                self._read_attentions(output.attentions, forward.layout, forward.recordings)
        return output.last_hidden_state, tuple(output.hidden_states or ()) if want_states else ()

    def _graph_for(self, forward: Forward) -> bert.Graph | None:
        """The graph that gives what is recorded, or nothing of it; None where there is none, or showing all layers takes too much."""
        if not forward.recordings:
            return self._graph
        if self._showing_graph is None:
            return None
        width = self._num_heads * self._model.head_dim
        return self._showing_graph if 4 * 3 * self._num_layers * width * forward.layout.tokens <= SHOWN else None

    def _inputs(self, batch: Sequence[Passage], layout: Layout) -> dict[str, Any]:
        ids, types = [p.ids for p in batch], [p.type_ids for p in batch]
        if layout.packed:
            spare = [0] * layout.spare
            rows = [[i for row in ids for i in row] + [self.checkpoint.pad_id] * layout.spare]
            type_rows = [[i for row in types for i in row] + spare]
            positions = [[i + self._position_start for row in ids for i in range(len(row))] + [self._position_start] * layout.spare]
            inputs = {"position_ids": positions, "attention_mask": [[1] * len(rows[0])]}
        else:
            longest = max(layout.lengths)
            rows = [row + [self.checkpoint.pad_id] * (longest - len(row)) for row in ids]
            type_rows = [row + [0] * (longest - len(row)) for row in types]
            inputs = {"attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in ids]}
        inputs["input_ids"] = rows
        if self._has_types and any(any(row) for row in types):
            inputs["token_type_ids"] = type_rows
        return {name: torch.tensor(value, device=self.device) for name, value in inputs.items()}

    @property
    def _joins(self) -> bool:
        """Whether short texts may share their attention: it pays, as measured, for float32 on a processor."""
        return self.device.type == "cpu" and self._model.dtype == torch.float32

    @property
    def _has_types(self) -> bool:
        """Whether the model has embeddings for both segments of a pair: RoBERTa has one for all, GPT-2 takes word embeddings."""
        return "token_type_ids" in self._accepts and getattr(self._model.config, "type_vocab_size", 0) >= 2

    def _read_attentions(self, attentions: tuple[Tensor, ...], layout: Layout, recordings: dict[int, Recording]) -> None:
        for i, recording in recordings.items():
            length = layout.lengths[i]
            for layer in recording.probe.layers:
                recording.keep_rows_of(layer, attentions[layer][i, :, :length, :length])  # [H, length, length]

    # ── Keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _keep(
        self,
        batch: Sequence[Passage],
        probes: Sequence[Probe],
        layout: Layout,
        hidden: Tensor,
        states: tuple[Tensor, ...],
        recordings: dict[int, Recording],
    ) -> list[Encoding | NonfiniteOutput]:
        answers: list[Encoding | NonfiniteOutput] = []
        for run in layout.runs:
            vectors = layout.tokens_of(hidden, run).float()  # [count, length, d_model]
            members = range(run.first, run.first + run.count)
            pooled = self._pool(vectors, [batch[i] for i in members]) if any(probes[i].pooled for i in members) else None
            unit = nn.functional.normalize(pooled, dim=-1) if pooled is not None else None  # [count, dim], of length 1
            run_states = [layout.tokens_of(state, run) for state in states]
            for row, i in enumerate(members):
                probe, recording = probes[i], recordings.get(i)
                norms = recording.value_norms if recording else None
                states_of = [run_states[k][row] for k in probe.hidden_layers]
                of_length = unit if self._scales(probe) else pooled
                encoding = Encoding(
                    pooled=_leave(of_length[row]) if of_length is not None and probe.pooled else None,
                    embeddings=_leave(_rows(vectors[row], probe.rows)) if probe.embeddings else None,
                    weights=recording.weights.numpy() if recording else None,
                    value_norms=norms.numpy() if norms is not None else None,
                    hidden_states=_leave(torch.stack(states_of)) if states_of else None,
                    spans=_leave(self._pool_spans(vectors[row], probe.spans)) if probe.spans else None,
                )
                answers.append(encoding if _finite(encoding) else NonfiniteOutput())
        return answers

    def _pool(self, vectors: Tensor, batch: Sequence[Passage]) -> Tensor:
        """The checkpoint's own pipeline over texts of one length, [B, N, d_model] → [B, dim]; by prompt, where it counts.

        A Normalize at its end is left to `_keep`, since a probe may say otherwise.
        """
        pooled: list[Tensor] = []
        starts = [0, *(i for i in range(1, len(batch)) if batch[i].prompt_tokens != batch[i - 1].prompt_tokens), len(batch)]
        for first, end in pairwise(starts):
            features: dict[str, Any] = {"token_embeddings": vectors[first:end]}
            features["attention_mask"] = torch.ones(features["token_embeddings"].shape[:2], dtype=torch.long, device=self.device)
            if batch[first].prompt_tokens:
                features["prompt_length"] = batch[first].prompt_tokens
            for module in self._modules:
                features = module(features)
            pooled.append(features["sentence_embedding"])
        return torch.cat(pooled)

    def _scales(self, probe: Probe) -> bool:
        """Whether a pooled vector is scaled to length 1: as the probe says, or the checkpoint."""
        return self._normalizes if probe.normalize is None else probe.normalize

    def _pool_spans(self, vectors: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """The mean of each span's tokens, then what comes after pooling: [N, d_model] → [spans, dim]."""
        features = {"sentence_embedding": torch.stack([vectors[first : last + 1].mean(0) for first, last in spans])}
        for module in list(self._pipeline)[1:]:
            features = module(features)
        return features["sentence_embedding"]

    # ── Finding out ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _choose_path(self, block: bool) -> None:
        """Try the ways from the fastest on; keep the first that gives the same vectors as each text alone, and right weights.

        With `block`, lay the weights out for the processor's matrix products where that still gives the same.
        """
        texts = self._sample()
        eager = [self._alone(text) for text in texts]
        for path in self._candidates():
            self.path = path
            self._model.set_attn_implementation(bridge.NAME if path in ("packed", "padded") else "eager")
            starts = sorted({0, self.checkpoint.pad_id + 1}) if path == "packed" else [0]
            for self._position_start in starts:
                problem = self._problem(texts, eager)
                if problem is None:
                    self._outputs = self._find_outputs(texts[0])
                    self._one_kernel = path == "packed" and self.device.type != "cpu" and self._one_kernel_works()
                    if path == "packed":
                        self._straighten(texts, eager)
                    if block:
                        self._block(texts, eager)
                        self._trace(texts, eager)
                    return
                log.debug("%s, %s, positions from %d: %s", self.checkpoint.name, path, self._position_start, problem)
        self.path, self._position_start = "none", 0
        self._model.set_attn_implementation("eager")
        config = self._model.config.get_text_config()
        self._num_layers, self._num_heads = config.num_hidden_layers, getattr(config, "num_attention_heads", 0)

    def _straighten(self, texts: Sequence[Passage], eager: Sequence[Tensor]) -> None:
        """Put the model's parts in a straight line, where we know how, unless that gives something else."""
        loaded, found = self._model, (self._num_layers, self._num_heads)
        rebuilt = bert.rebuild(loaded)
        if rebuilt is None:
            return
        self._model = rebuilt.eval()
        problem = self._problem(texts, eager)
        if problem is not None:
            log.debug("%s, as a straight line: %s", self.checkpoint.name, problem)
            self._model, (self._num_layers, self._num_heads) = loaded, found

    def _block(self, texts: Sequence[Passage], eager: Sequence[Tensor]) -> None:
        """Lay the weights out for the processor, unless the model then gives something else, or nothing."""
        found = self._num_layers, self._num_heads
        self._blocked = bool(linear.block(self._model))
        if not self._blocked:
            return
        problem = self._problem(texts, eager)
        if problem is None and linear.take_in_activations(self._model, lambda: self.encode(texts[:1], [Probe(pooled=False)])):
            problem = self._problem(texts, eager)
        if problem is not None:
            log.debug("%s, weights in blocks: %s", self.checkpoint.name, problem)
            linear.unblock(self._model)
            self._blocked, (self._num_layers, self._num_heads) = False, found

    @torch.inference_mode()
    def _trace(self, texts: Sequence[Passage], eager: Sequence[Tensor]) -> None:
        """Let texts go through the model as a graph without Python, unless that cannot be made or gives something else, joined or not."""
        if not isinstance(self._model, bert.Bert):
            return
        problem = None
        try:
            everything = tuple(range(self._num_layers))
            recorded = [self._encode([text], [Probe(pooled=False, layers=everything)])[0] for text in texts]
            self._graph, self._showing_graph = (bert.trace(self._model, shows) for shows in (False, True))
            for joins, layers in product((True, False), ((), everything)):
                probes = [Probe(pooled=False, embeddings=True, layers=layers)] * len(texts)
                answers = self._encode(texts, probes, joins)
                problem = problem or self._difference(answers, eager) or (_other_weights(answers, recorded) if layers else None)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            log.debug("%s, as a graph: %s", self.checkpoint.name, problem)
            self._graph = self._showing_graph = None

    def _one_kernel_works(self) -> bool:
        config = self._model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // self._num_heads
        return bridge.one_kernel_works(self.device, self._model.dtype, head_dim)

    def _candidates(self) -> list[Path]:
        candidates: list[Path] = ["eager"]
        self._model.set_attn_implementation(bridge.NAME)
        if self._model.config._attn_implementation == bridge.NAME:
            candidates.insert(0, "padded")
            if "position_ids" in self._accepts:
                candidates.insert(0, "packed")
        self._model.set_attn_implementation("eager")
        return candidates

    def _sample(self) -> list[Passage]:
        """Three short texts of ordinary tokens, one length twice, the same in every process."""
        size = min(self.checkpoint.tokenizer.get_vocab_size(), self._model.get_input_embeddings().num_embeddings)
        special = {self.checkpoint.pad_id}
        ordinary = [i for i in range(size) if i not in special]
        draws = np.random.default_rng(0)
        return [_bare([ordinary[k] for k in draws.integers(len(ordinary), size=n)], second=n // 2) for n in (5, 9, 9)]

    @torch.inference_mode()
    def _alone(self, passage: Passage) -> Tensor:
        """The last hidden state [N, d_model] of a text alone in the model as transformers runs it."""
        inputs = self._inputs([passage], Layout((len(passage),), packed=False))
        return self._model(**inputs).last_hidden_state[0].float()

    def _problem(self, texts: Sequence[Passage], eager: Sequence[Tensor]) -> str | None:
        """Why the path that is set now does not serve; None when it does."""
        self._num_layers, self._num_heads = 0, 0
        try:
            if self.path == "eager":
                output = self._model(**self._inputs([texts[0]], Layout((len(texts[0]),), False)), output_attentions=True)
                self._num_layers, self._num_heads = len(output.attentions), output.attentions[0].shape[1]
            else:
                forward = Forward(self._layout((len(texts[0]),)), {}, joins=self._joins)
                with torch.inference_mode():
                    self._run(texts[:1], forward, want_states=False)
                self._num_layers, self._num_heads = forward.layer, forward.num_heads
            probe = Probe(pooled=False, embeddings=True, layers=tuple(range(self._num_layers)))
            together = self.encode(texts, [probe] * len(texts))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if not self._num_layers or not self._num_heads:
            return "its attention is not called"
        problem = self._difference(together, eager)
        if problem is None and not self._has_sinks:
            tolerance = 1e-4 if self._model.dtype == torch.float32 else 1e-2
            weights = [e.weights for e in together if isinstance(e, Encoding) and e.weights is not None]
            if len(weights) < len(texts) or any(np.abs(w.sum(-1) - 1).max() > tolerance for w in weights):
                problem = "rows of the attention do not sum to 1"
        return problem

    def _difference(self, together: Sequence[Encoding | NonfiniteOutput], eager: Sequence[Tensor]) -> str | None:
        """How the vectors of texts in a batch differ from those of each text alone; None when they are the same."""
        tolerance = 1e-4 if self._model.dtype == torch.float32 else 5e-2
        for encoding, alone in zip(together, eager, strict=True):
            if not isinstance(encoding, Encoding) or encoding.embeddings is None:
                return "its numbers are not finite"
            expected = alone.cpu().numpy()
            off = float(np.abs(encoding.embeddings - expected).max() / max(1.0, np.abs(expected).max()))
            if off > tolerance:
                return f"vectors are {off:.1e} away from the text alone"
        return None

    @property
    def _has_sinks(self) -> bool:
        """Whether attention may leave the text for learned sinks, so that rows sum to less than 1 (gpt-oss)."""
        return any(name.endswith("sinks") for name, _ in self._model.named_parameters())

    def _find_outputs(self, text: Passage) -> tuple[Tensor, ...]:
        """Each layer's W_O [d_model, H·D], found by what takes the attention's output as its input; () if any is not found."""
        if self.path not in ("packed", "padded"):
            return ()
        found: dict[int, Tensor] = {}
        forward = Forward(Layout((len(text),), self.path == "packed"), {})

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            context = forward.last_context
            if context is not None and inputs and isinstance(inputs[0], Tensor) and inputs[0].data_ptr() == context.data_ptr():
                weight = module.weight.T if isinstance(module, Conv1D) else module.weight
                assert isinstance(weight, Tensor)
                found.setdefault(forward.layer - 1, weight.detach())

        layers = [m for m in self._model.modules() if isinstance(m, (nn.Linear, Conv1D))]
        hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        try:
            with torch.inference_mode(), bridge.running(forward):
                self._model(**self._inputs([text], forward.layout))
        finally:
            for hook in hooks:
                hook.remove()
        return tuple(found[i] for i in range(self._num_layers)) if len(found) == self._num_layers else ()

    def _facts(self, max_length: int | None) -> Facts:
        checkpoint, config = self.checkpoint, self._model.config.get_text_config()
        positions = checkpoint.max_positions
        if positions is not None:
            positions -= self._learned_start()
        limits = [limit for limit in (max_length or checkpoint.max_length, positions) if limit]
        first = self.encode([self.sample], [Probe(embeddings=True)])[0]
        if not isinstance(first, Encoding) or first.pooled is None or first.embeddings is None:
            raise CheckpointError(f"{checkpoint.name}: its vectors are not finite in {self._model.dtype}")
        return Facts(
            name=checkpoint.name,
            revision=checkpoint.revision,
            architecture=self._architecture,
            num_layers=self._num_layers,
            num_heads=self._num_heads,
            d_model=first.embeddings.shape[-1],
            dim=first.pooled.shape[-1],
            vocab_size=config.vocab_size,
            max_length=min(limits) if limits else None,
            dtype=str(self._model.dtype).removeprefix("torch."),
            device=str(self.device),
            pooling=_pooling(self._pipeline),
            path=self.path,
            norms=bool(self._outputs),
            prompts=checkpoint.prompts,
            default_prompt=checkpoint.default_prompt,
        )

    def _learned_start(self) -> int:
        """How many of the learned positions come before a text's first (RoBERTa: pad id + 1)."""
        tables = [m for name, m in self._model.named_modules() if name.endswith("position_embeddings") and isinstance(m, nn.Embedding)]
        return self.checkpoint.pad_id + 1 if any(t.padding_idx is not None for t in tables) else 0


def _buckets(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Cut texts in order of length so that no row of a batch is padded by more than a quarter or 8 tokens, whichever is more."""
    buckets: list[list[int]] = []
    shortest = 0
    for i, length in zip(order, lengths, strict=True):
        if not buckets or length > max(shortest + 8, shortest * 1.25):
            buckets.append([])
            shortest = length
        buckets[-1].append(i)
    return buckets


def _as_memory_error(error: RuntimeError) -> Exception:
    """torch says that there is no memory in several ways; above this module there is one."""
    said = str(error)
    short = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in said or "out of memory" in said
    return MemoryError(said) if short else error


def _bare(ids: list[int], second: int) -> Passage:
    """Token ids without a text, the last `second` of them those of a pair's second segment."""
    count = len(ids)
    types = [0] * (count - second) + [1] * second
    return Passage(("",), ids, types, [(0, 0)] * count, [None] * count, [False] * count)


def _rows(vectors: Tensor, rows: tuple[int, ...] | None) -> Tensor:
    return vectors if rows is None else vectors[list(rows)]


def _other_weights(answers: Sequence[Encoding | NonfiniteOutput], expected: Sequence[Encoding | NonfiniteOutput]) -> str | None:
    """How weights [L, H, N, N] differ from those expected; None when they are the same."""
    for got, right in zip(answers, expected, strict=True):
        if not isinstance(got, Encoding) or not isinstance(right, Encoding) or got.weights is None or right.weights is None:
            return "its weights are not finite"
        off = float(np.abs(got.weights - right.weights).max())
        if off > 1e-4:
            return f"weights are {off:.1e} away"
    return None


def _leave(x: Tensor) -> Floats:
    """A copy of its own: a view of a batch's tensor would keep all of it alive."""
    return np.array(x.float().cpu().numpy(), copy=True, order="C")


def _finite(encoding: Encoding) -> bool:
    """Whether everything that is handed out is a number."""
    arrays = [array for array in vars(encoding).values() if array is not None]
    with np.errstate(all="ignore"):
        # a sum of numbers of which one is not finite is not finite; it takes a third of the time that looking at each takes
        return all(np.isfinite(array.sum()) or np.isfinite(array).all() for array in arrays)


def _pooling(pipeline: nn.ModuleList) -> str:
    modes = [getattr(module, "pooling_mode", None) for module in pipeline]
    mode = next((mode for mode in modes if mode), "none")
    return mode if isinstance(mode, str) else "+".join(mode)
