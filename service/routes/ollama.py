"""Ollama's embeddings: POST /api/embed, and what its clients ask before."""

from time import perf_counter
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from service.answers import Times, parse
from service.embed import Options, embed, json_answer
from service.openapi import body_of
from service.schemas.ollama import EmbedRequest
from service.state import State, state_of
from service.versions import version

router = APIRouter(prefix="/api", tags=["ollama"])


@router.post("/embed", summary="Vectors of texts, as Ollama gives them", openapi_extra=body_of(EmbedRequest))
async def embed_route(request: Request) -> Response:
    """`{"model", "embeddings", "total_duration", "load_duration", "prompt_eval_count"}`; durations in nanoseconds."""
    state, times = state_of(request), Times()
    body = await parse(request, EmbedRequest)
    served = state.models.get(spelled(state, body.model))
    options = Options("input", truncate=body.truncate is not False, dimensions=body.dimensions or None)
    vectors = await embed(request, state, served, times, body.input, options)
    answer = {
        "model": body.model,
        "embeddings": vectors,
        "total_duration": int(1e9 * (perf_counter() - times.start)),
        "load_duration": 0,
        "prompt_eval_count": times.tokens,
    }
    return await json_answer(state, served, times, answer, len(vectors) * served.facts.dim)


@router.get("/tags", summary="The models that are served, as Ollama lists them")
async def tags(request: Request) -> Response:
    """Names and what is known of each model."""
    state = state_of(request)
    return JSONResponse({"models": [described(name) for name in [*state.models.names, *state.models.aliases]]})


def spelled(state: State, name: str) -> str:
    """The name as it is served: with or without the tag `:latest`, which Ollama takes for the same."""
    known = {*state.models.names, *state.models.aliases}
    bare = name.removesuffix(":latest")
    return next((spelling for spelling in (name, bare, f"{bare}:latest") if spelling in known), bare)


def described(name: str) -> dict[str, Any]:
    """A model as Ollama lists one."""
    details = {"format": "safetensors", "family": "", "families": None, "parameter_size": "", "quantization_level": ""}
    return {"name": name, "model": name, "modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": "", "details": details}


@router.get("/version", summary="The version, where Ollama has it")
async def ollama_version() -> dict[str, str]:
    """`{"version"}`."""
    return {"version": version("attend")}
