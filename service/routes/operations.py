"""Routes for those who run the service: is it alive, is it ready, what does it serve, what has it done."""

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, RedirectResponse, Response

from service import errors
from service.served import Served
from service.settings import Settings
from service.state import state_of
from service.versions import versions

router = APIRouter(tags=["operations"])


@router.get("/livez", summary="Is the process alive, and its workers?")
async def livez(request: Request) -> Response:
    """200, or 503 when a worker could not be started again: then the process has to be."""
    alive = state_of(request).models.alive
    return JSONResponse({"status": "alive" if alive else "a worker is beyond help"}, status_code=200 if alive else 503)


@router.get("/readyz", summary="Can it serve?")
@router.get("/health", summary="The same under the name that TEI gives it")
async def readyz(request: Request) -> Response:
    """200 when all models are loaded, their workers run and the service is not shutting down; 503 otherwise."""
    state = state_of(request)
    if state.draining:
        raise errors.draining()
    if not state.models.ready:
        missing = [name for name in state.models.names if name not in {s.name for s in state.models.loaded() if s.scheduler.up}]
        raise errors.not_ready(", ".join(missing))
    return JSONResponse({"status": "ready"})


@router.get("/metrics", summary="Metrics for Prometheus")
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format."""
    return Response(generate_latest(state_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/info", summary="What is served, and within which limits")
async def info(request: Request) -> dict[str, Any]:
    """The models with their dimensions, limits, versions; the first model's facts also under the names that TEI has for them."""
    state = state_of(request)
    loaded = state.models.loaded()
    return {
        **(tei_info(loaded[0], state.settings) if loaded else {"model_id": state.models.names[0]}),
        "models": [model_info(served, [a for a, name in state.models.aliases.items() if name == served.name]) for served in loaded],
        "loading": [name for name in state.models.names if name not in {s.name for s in loaded}],
        "limits": {name: getattr(state.settings, name) for name in LIMITS},
        "versions": versions(),
    }


LIMITS = ("max_queue_tokens", "max_request_texts", "max_request_tokens", "max_client_batch_size", "max_attention_values",
          "max_answer_bytes", "max_body_bytes", "request_timeout")  # fmt: skip


def model_info(served: Served, aliases: list[str]) -> dict[str, Any]:
    """One model's facts."""
    facts = served.facts
    paths = {"packed": "recorded beside the fused attention, texts packed", "padded": "recorded beside the fused attention, texts padded",
             "eager": "the model's own eager attention", "none": "not available: this architecture does not hand it out"}  # fmt: skip
    return {
        "id": facts.name, "revision": facts.revision, "aliases": aliases, "architecture": facts.architecture,
        "num_layers": facts.num_layers, "num_heads": facts.num_heads, "d_model": facts.d_model, "dimensions": facts.dim,
        "vocab_size": facts.vocab_size,
        "max_length": facts.max_length, "pooling": facts.pooling, "dtype": facts.dtype, "device": facts.device,
        "attention": {"available": facts.path != "none", "path": facts.path, "meaning": paths[facts.path], "norms": facts.norms},
        "prompts": facts.prompts, "default_prompt": facts.default_prompt, "max_batch_tokens": served.scheduler.batch_tokens,
    }  # fmt: skip


def tei_info(served: Served, settings: Settings) -> dict[str, Any]:
    """The fields of TEI's /info."""
    facts = served.facts
    return {
        "model_id": facts.name, "model_sha": facts.revision, "model_dtype": facts.dtype,
        "model_type": {"embedding": {"pooling": facts.pooling}},
        "max_concurrent_requests": settings.max_queue_tokens, "max_input_length": facts.max_length,
        "max_batch_tokens": served.scheduler.batch_tokens, "max_batch_requests": None,
        "max_client_batch_size": settings.max_client_batch_size, "auto_truncate": True, "tokenization_workers": 1,
        "version": versions()["attend"], "sha": None, "docker_label": None,
    }  # fmt: skip


@router.get("/", include_in_schema=False)
async def front() -> Response:
    """The documentation is what there is to see."""
    return RedirectResponse("docs")
