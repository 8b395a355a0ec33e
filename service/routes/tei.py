"""TEI's native routes (text-embeddings-inference 1.9): its clients work with the base URL changed.

Two things are mended: offsets of /tokenize are code points, and a bad body gets TEI's JSON error shape.
"""

import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from models.passages import Direction, places
from models.values import Probe
from service import errors
from service.answers import Times, off_loop, parse, read_passages, submitted
from service.embed import Options, embed, json_answer, prompt_of, read
from service.openapi import body_of
from service.schemas.tei import DecodeRequest, EmbedAllRequest, EmbedRequest, Reading, SimilarityRequest, TokenizeRequest
from service.served import Served
from service.state import State, state_of

router = APIRouter(tags=["tei"])
SENTENCES = re.compile(rb'"source_sentence"\s*:')
"""The key that only /similarity has; within a text its quotes would be escaped, or no colon would follow."""


@router.post("/embed", summary="Vectors of texts", openapi_extra=body_of(EmbedRequest))
async def embed_route(request: Request) -> Response:
    """`[[number]]`: a vector for each text, of length 1 unless `normalize` is false."""
    state, times = state_of(request), Times()
    body = await parse(request, EmbedRequest)
    served = admitted(state, body.inputs)
    options = options_of(body, normalize=body.normalize, dimensions=body.dimensions)
    vectors = await embed(request, state, served, times, body.inputs, options)
    return await json_answer(state, served, times, vectors, len(vectors) * served.facts.dim)


@router.post(
    "/",
    summary="What Hugging Face's InferenceClient posts: /embed, or /similarity when the inputs are sentences to compare",
    openapi_extra=body_of(EmbedRequest),
)
async def root(request: Request) -> Response:
    """The route that fits the body."""
    return await (similarity if SENTENCES.search(await request.body()) else embed_route)(request)


@router.post("/embed_all", summary="Vectors of all tokens of texts", openapi_extra=body_of(EmbedAllRequest))
async def embed_all(request: Request) -> Response:
    """`[[[number]]]`: for each text the last layer's vector of each token, special tokens included."""
    state, times = state_of(request), Times()
    body = await parse(request, EmbedAllRequest)
    served = admitted(state, body.inputs)
    passages = await read(state, served, times, body.inputs, options_of(body))
    probes = [Probe(pooled=False, embeddings=True)] * len(passages)
    async with submitted(request, served, passages, probes, state.settings.request_timeout, times) as results:
        vectors = [encoding.embeddings for encoding in await results.all()]
    return await json_answer(state, served, times, vectors, times.tokens * served.facts.d_model)


@router.post("/similarity", summary="Cosines between a sentence and others", openapi_extra=body_of(SimilarityRequest))
async def similarity(request: Request) -> Response:
    """`[number]`: the cosine of the source sentence with each of the others."""
    state, times = state_of(request), Times()
    body = await parse(request, SimilarityRequest)
    served = admitted(state, body.inputs.sentences)
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    source, *others = await embed(request, state, served, times, texts, options_of(body.parameters or Reading()))
    cosines = np.stack(others) @ source
    return await json_answer(state, served, times, cosines, len(others))


@router.post("/tokenize", summary="The tokens of texts", openapi_extra=body_of(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """`[[{"id", "text", "special", "start", "stop"}]]`: what /embed gives to the model, uncut.

    start and stop are code points of the text as it was sent, and `text` is what stands there. Special tokens and those of a
    prompt have no place in it: null, and their piece of the vocabulary.
    """
    state, times = state_of(request), Times()
    body = await parse(request, TokenizeRequest)
    served = admitted(state, body.inputs)
    prompt = prompt_of(state, served, Options(prompt_name=body.prompt_name))
    texts = [(text,) for text in body.inputs]
    passages = await read_passages(
        served, state.metrics, times, texts, "inputs", prompt=prompt, special_tokens=body.add_special_tokens, limited=False
    )

    def described() -> list[list[dict[str, Any]]]:
        return [
            [token(i, special, place, text) for i, special, place in zip(passage.ids, passage.special, places(passage), strict=True)]
            for passage, text in zip(passages, body.inputs, strict=True)
        ]

    def token(i: int, special: bool, place: tuple[int, int] | None, text: str) -> dict[str, Any]:
        start, stop = place or (None, None)
        return {"id": i, "text": text[start:stop] if place else served.reader.piece(i), "special": special, "start": start, "stop": stop}

    return JSONResponse(await off_loop(10 * times.tokens, described), headers=times.headers())


@router.post("/decode", summary="The texts of token ids", openapi_extra=body_of(DecodeRequest))
async def decode(request: Request) -> Response:
    """`[string]`: what the tokenizer makes of each array of token ids."""
    state, times = state_of(request), Times()
    body = await parse(request, DecodeRequest)
    served = admitted(state, body.ids)
    size = served.reader.tokenizer.get_vocab_size()
    wrong = next((i for ids in body.ids for i in ids if not 0 <= i < size), None)
    if wrong is not None:
        raise errors.invalid(f"ids: the token id {wrong} is not in the vocabulary, which has ids 0 to {size - 1}", "ids")
    count = sum(map(len, body.ids))
    decoded = await off_loop(count, lambda: served.reader.tokenizer.decode_batch(body.ids, skip_special_tokens=body.skip_special_tokens))
    return JSONResponse(decoded, headers=times.headers())


def admitted(state: State, inputs: Sequence[object]) -> Served:
    """The first model, when it takes so many inputs at once; TEI's routes name no model. Raises AttendError."""
    limit = state.settings.max_client_batch_size
    if len(inputs) > limit:
        raise errors.AttendError(422, "invalid_request", f"batch size {len(inputs)} > maximum allowed batch size {limit}", "inputs")
    return state.models.get(None)


def options_of(body: Reading, *, normalize: bool = True, dimensions: int | None = None) -> Options:
    """How a body wants its texts read; without a word on it, texts that are too long are cut."""
    cut = True if body.truncate is None else body.truncate
    direction = cast(Direction, body.truncation_direction)
    return Options("inputs", None, body.prompt_name, cut, direction, dimensions, normalize)
