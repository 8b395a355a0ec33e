"""What happens to every request, whatever its route: an id, a key, a limit on the body, counts, and errors in its dialect.

Plain ASGI, since it is on the way of every byte.
"""

import hmac
import logging
import re
import uuid
from time import perf_counter

import orjson
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service import errors
from service.answers import Gone
from service.errors import AttendError
from service.state import State

log = logging.getLogger(__name__)
OPERATIONS = frozenset(["/", "/livez", "/readyz", "/health", "/info", "/metrics", "/docs", "/openapi.json", "/docs/oauth2-redirect"])
"""Routes that need no key, and that answer while the service shuts down."""

REJECTIONS = {400: "invalid", 401: "invalid", 404: "invalid", 405: "invalid", 406: "invalid", 413: "too_large", 422: "invalid",
              429: "overloaded", 504: "deadline"}  # fmt: skip
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Frame:
    """The outermost layer: around everything that the application does for one request."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app, self.state, self.keys = app, state, state.settings.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; every fault becomes an answer, unless it has begun already."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = HTTPConnection(scope).headers.get("x-request-id", "")
        exchange = Exchange(self.state, scope, receive, send, given if _ID.fullmatch(given) else uuid.uuid4().hex)
        counted = scope["path"] not in OPERATIONS or scope["method"] == "POST"
        self.state.metrics.inflight.inc()
        self.state.busy += counted
        try:
            self._admit(scope)
            exchange.limit_body()
            await self.app(scope, exchange.receive, exchange.send)
        except AttendError as error:
            await self._refuse(exchange, error)
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            if not exchange.status:
                await self._refuse(exchange, errors.internal(exchange.request_id))
        finally:
            self.state.metrics.inflight.dec()
            self.state.busy -= counted
            exchange.finish()
            if counted:
                self.state.leftovers.note()

    async def _refuse(self, exchange: "Exchange", error: AttendError) -> None:
        response = refusal(self.state, exchange.scope["path"], error)
        await response(exchange.scope, exchange.receive, exchange.send)

    def _admit(self, scope: Scope) -> None:
        """Raises AttendError for a request without a key, and for any while the service shuts down."""
        if scope["method"] == "OPTIONS" or (scope["path"] in OPERATIONS and scope["method"] in ("GET", "HEAD")):
            return
        if self.state.draining:
            raise errors.draining()
        if self.keys:
            scheme, _, key = HTTPConnection(scope).headers.get("authorization", "").partition(" ")
            sent = key.strip().encode() if scheme.lower() == "bearer" else b""
            # every key is compared, so that the time says nothing about any
            matches = [hmac.compare_digest(sent, known.encode()) for known in self.keys]
            if not any(matches):
                said = "is not known" if sent else "is missing; send Authorization: Bearer KEY"
                raise AttendError(401, "invalid_api_key", f"the API key {said}", None, {"www-authenticate": "Bearer"})


class Exchange:
    """One request and its answer as they pass: counted, timed, bounded."""

    def __init__(self, state: State, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.state, self.scope, self.request_id = state, scope, request_id
        self.status, self.sent, self.read = 0, 0, 0
        self.start = perf_counter()
        scope["request_id"] = request_id
        self._receive, self._send = receive, send

    @property
    def route(self) -> str:
        """The route's template; "other" for what is no route."""
        return getattr(self.scope.get("route"), "path", "other")

    def limit_body(self) -> None:
        """Raises AttendError when the body is announced to be too large."""
        announced = HTTPConnection(self.scope).headers.get("content-length", "0")
        limit = self.state.settings.max_body_bytes
        if announced.isdigit() and int(announced) > limit:
            raise errors.body_too_large(int(announced), limit)

    async def receive(self) -> Message:
        """The next piece of the body. Raises AttendError when it becomes too large."""
        message = await self._receive()
        self.read += len(message.get("body", b""))
        if self.read > self.state.settings.max_body_bytes:
            raise errors.body_too_large(None, self.state.settings.max_body_bytes)
        return message

    async def send(self, message: Message) -> None:
        """The next piece of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if self.state.draining:  # the next request of this client must go to another replica
                headers["connection"] = "close"
        else:
            self.sent += len(message.get("body", b""))
        await self._send(message)

    def finish(self) -> None:
        """Count and log the request."""
        metrics, seconds = self.state.metrics, perf_counter() - self.start
        metrics.requests.labels(self.route, str(self.status)).inc()
        metrics.request_seconds.labels(self.route).observe(seconds)
        metrics.response_bytes.labels(self.route).inc(self.sent)
        level = logging.DEBUG if self.scope["path"] in OPERATIONS else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s %s %d", self.scope["method"], self.route, self.status, extra={"fields": {
                "request_id": self.request_id, "ms": round(1000 * seconds, 2), "bytes": self.sent}})  # fmt: skip


def refusal(state: State, path: str, error: AttendError) -> Response:
    """The answer to a request that is refused, in the dialect of its path, counted by its reason."""
    reason = "draining" if error.code == "draining" else REJECTIONS.get(error.status)
    if reason is not None:
        state.metrics.rejected.labels(reason).inc()
    status, body = errors.render(error, errors.dialect_of(path))
    return Response(orjson.dumps(body), status, dict(error.headers), "application/json")


def handle_refusals(app: FastAPI, state: State) -> None:
    """Let the application answer what its routes raise: AttendError, what starlette refuses by itself, and clients that left."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, AttendError)
        return refusal(state, request.url.path, error)

    async def not_routed(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = "not_found" if error.status_code == 404 else "invalid_request"
        said = f"{request.method} {request.url.path}: {error.detail}"
        return refusal(state, request.url.path, AttendError(error.status_code, code, said, None, error.headers or {}))

    async def gone(request: Request, error: Exception) -> Response:
        state.metrics.rejected.labels("disconnected").inc()
        return Response(status_code=499)

    async def broken(request: Request, error: Exception) -> Response:
        # starlette sends this and raises the error again, for the frame to log
        return refusal(state, request.url.path, errors.internal(request.scope["request_id"]))

    app.add_exception_handler(Exception, broken)
    app.add_exception_handler(AttendError, refused)
    app.add_exception_handler(HTTPException, not_routed)
    app.add_exception_handler(Gone, gone)
    app.add_exception_handler(ClientDisconnect, gone)
