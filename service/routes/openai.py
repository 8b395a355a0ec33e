"""OpenAI's embeddings: POST /v1/embeddings, GET /v1/models. Its SDKs work with the base URL changed."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from service import errors, wire
from service.answers import Times, parse
from service.embed import Options, check_dimensions, json_answer, pooled, read
from service.openapi import body_of
from service.schemas.openai import EmbeddingRequest
from service.state import State, state_of

router = APIRouter(tags=["openai"])


@router.post("/v1/embeddings", summary="Vectors of texts, as OpenAI gives them", openapi_extra=body_of(EmbeddingRequest))
@router.post("/embeddings", summary="The same, where TEI has it", openapi_extra=body_of(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """A vector of length 1 for each input, in order; `usage` counts the tokens that went through the model."""
    state, times = state_of(request), Times()
    body = await parse(request, EmbeddingRequest)
    served = state.models.get(body.model)
    if len(body.input) > state.settings.max_request_texts:
        raise errors.invalid(f"input: the array has {len(body.input)} items; the limit is {state.settings.max_request_texts}", "input")
    options = Options("input", body.prompt, body.prompt_name, bool(body.truncate), dimensions=body.dimensions)
    check_dimensions(served, body.dimensions)
    passages = await read(state, served, times, body.input, options)
    if times.tokens > state.settings.max_request_tokens:
        raise errors.invalid(
            f"input: the request has {times.tokens} tokens; the limit for all inputs together is {state.settings.max_request_tokens}",
            "input",
        )
    vectors = await pooled(request, state, served, times, passages, options)
    written: list[Any] = [wire.floats_base64(vector) for vector in vectors] if body.encoding_format == "base64" else list(vectors)
    answer = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(written)],
        "model": body.model or served.name,
        "usage": {"prompt_tokens": times.tokens, "total_tokens": times.tokens},
    }
    return await json_answer(state, served, times, answer, len(vectors) * served.facts.dim)


@router.get("/v1/models", summary="The models that are served, aliases included")
async def models(request: Request) -> Response:
    """OpenAI's list of models."""
    state = state_of(request)
    return JSONResponse({"object": "list", "data": [described(name) for name in known(state)]})


@router.get("/v1/models/{model:path}", summary="One of them")
async def model(request: Request, model: str) -> Response:
    """OpenAI's description of a model. 404 when it is not served."""
    state = state_of(request)
    if model not in known(state):
        raise errors.model_not_found(model, state.models.nearest(model))
    return JSONResponse(described(model))


def known(state: State) -> list[str]:
    """All names that a request may use."""
    return [*state.models.names, *state.models.aliases]


def described(name: str) -> dict[str, Any]:
    """A model as OpenAI describes one."""
    return {"id": name, "object": "model", "created": 0, "owned_by": name.partition("/")[0] if "/" in name else "attend"}
