"""create_app: settings in, application out. Wiring and lifespan, nothing else."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from service.compression import Compression
from service.http import Frame, handle_refusals
from service.metrics import Metrics
from service.routes import attend, ollama, openai, operations, tei
from service.served import Models
from service.settings import Settings
from service.state import State
from service.versions import version

DESCRIPTION = "Contextual embeddings with the attention left in: tokens, vectors and attention weights of texts, from a real transformer."
ROUTERS = (attend.router, openai.router, tei.router, ollama.router, operations.router)


def create_app(settings: Settings, failed: Callable[[str], None] = lambda line: None) -> FastAPI:
    """The application; its models are loaded in the background once it starts.

    `failed` is called with one line when a model cannot be loaded.
    """
    metrics = Metrics()
    state = State(settings, metrics, Models(settings, metrics))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        state.models.load(failed)
        yield
        await state.models.close()

    app = FastAPI(
        title="attend", version=version("attend"), description=DESCRIPTION, lifespan=lifespan, redoc_url=None, root_path=settings.root_path
    )
    app.state.attend = state
    for router in ROUTERS:
        app.include_router(router)
    handle_refusals(app, state)
    paths = [route.path for router in (app.router, *ROUTERS) for route in router.routes if isinstance(route, Route)]
    metrics.prepare(state.models.names, [*paths, "other"])
    _wrap(app, state)
    return app


def _wrap(app: FastAPI, state: State) -> None:
    """Compression inside, the frame around it, CORS around that: pages that may call can read errors too."""
    build = app.build_middleware_stack

    def stack() -> ASGIApp:
        framed: ASGIApp = Frame(Compression(build()), state)
        origins = state.settings.cors_origin
        if not origins:
            return framed
        return CORSMiddleware(
            framed, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["*"], max_age=600
        )

    app.build_middleware_stack = stack  # type: ignore[method-assign]
