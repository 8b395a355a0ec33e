"""Texts or token ids in, one vector each out: what the drop-in dialects have in common.

All of them give vectors of length 1, as the servers do that they stand in for; the same text gives the same bits in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from models.passages import Direction, TextError, TextTooLong
from models.values import Floats, Passage, Probe
from service import errors
from service.answers import Times, note_tokens, off_loop, read_passages, submitted
from service.served import Served
from service.state import State

Input = str | list[int]
"""A text, or its token ids, which go to the model as they are."""


@dataclass(frozen=True)
class Options:
    """How inputs are read and what is made of their vectors; `field` is what the dialect calls the inputs."""

    field: str = "input"
    prompt: str | None = None
    prompt_name: str | None = None
    truncate: bool = False
    direction: Direction = "right"
    dimensions: int | None = None
    normalize: bool = True


async def read(state: State, served: Served, times: Times, inputs: Sequence[Input], options: Options) -> list[Passage]:
    """The passages of texts and token ids, in order. Raises AttendError on the options' field."""
    prompt = prompt_of(state, served, options)
    texts = [(text,) for text in inputs if isinstance(text, str)]
    passages = iter(
        await read_passages(
            served, state.metrics, times, texts, options.field, prompt=prompt, truncate=options.truncate, direction=options.direction
        )
    )
    if len(texts) == len(inputs):
        return list(passages)
    start = perf_counter()

    def work() -> list[Passage]:
        return [next(passages) if isinstance(item, str) else read_ids(served, inputs, i, options) for i, item in enumerate(inputs)]

    out = await off_loop(sum(map(len, inputs)), work)
    note_tokens(served, state.metrics, times, out, times.tokenization + perf_counter() - start)
    return out


def read_ids(served: Served, inputs: Sequence[Input], i: int, options: Options) -> Passage:
    """The passage of input i, which is token ids. Raises AttendError that says which input it is."""
    where = f"{options.field}: item {i}" if len(inputs) > 1 else options.field
    try:
        return served.reader.read_ids([int(token) for token in inputs[i]], truncate=options.truncate, direction=options.direction)
    except TextTooLong as error:
        raise errors.text_too_long(f"{where}: {error}", options.field) from error
    except TextError as error:
        raise errors.invalid(f"{where}: {error}", options.field) from error


def prompt_of(state: State, served: Served, options: Options) -> str:
    """What is put before each text: the given prompt, the named one, or the default. Raises AttendError for an unknown name."""
    if options.prompt is not None:
        return options.prompt
    name = options.prompt_name or state.settings.default_prompt or served.facts.default_prompt
    if not name:
        return ""
    if name not in served.facts.prompts:
        known = ", ".join(served.facts.prompts) or "none"
        raise errors.invalid(f"prompt_name: there is no prompt {name!r}; the model has: {known}", "prompt_name")
    return served.facts.prompts[name]


def check_dimensions(served: Served, dimensions: int | None) -> None:
    """Raises AttendError when more dimensions are wanted than the model has."""
    if dimensions is not None and not 1 <= dimensions <= served.facts.dim:
        raise errors.invalid(f"dimensions: {dimensions} is not between 1 and {served.facts.dim}, the width of {served.name}", "dimensions")


async def embed(request: Request, state: State, served: Served, times: Times, inputs: Sequence[Input], options: Options) -> list[Floats]:
    """A vector for each input, in order: cut to `dimensions` and scaled back to length 1 (Kusupati et al. 2022).

    Raises AttendError.
    """
    check_dimensions(served, options.dimensions)
    passages = await read(state, served, times, inputs, options)
    return await pooled(request, state, served, times, passages, options)


async def pooled(
    request: Request, state: State, served: Served, times: Times, passages: Sequence[Passage], options: Options
) -> list[Floats]:
    """The vectors of passages that are read already."""
    probes = [Probe(normalize=options.normalize)] * len(passages)
    async with submitted(request, served, passages, probes, state.settings.request_timeout, times) as results:
        encodings = await results.all()
    vectors = [encoding.pooled for encoding in encodings if encoding.pooled is not None]
    return [shorten(vector, options) for vector in vectors] if options.dimensions else vectors


def shorten(vector: Floats, options: Options) -> Floats:
    """The first dimensions, scaled to length 1 again where the vector had it."""
    short = vector[: options.dimensions].copy()
    norm = float(np.linalg.norm(short))
    return np.divide(short, norm, dtype=np.float32) if options.normalize and norm > 0 else short


async def json_answer(state: State, served: Served, times: Times, value: object, numbers: int) -> Response:
    """An answer with float32 arrays in it, each number written as the shortest text that gives it again."""
    with state.metrics.stage(served.name, "encode"):
        body = await off_loop(numbers // 8, lambda: orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))
    return Response(body, media_type="application/json", headers=times.headers())
