"""gzip for clients that ask for it (`Accept-Encoding`), off the event loop. Plain ASGI."""

import asyncio
import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SMALLEST = 1024
"""Shorter answers go out as they are: their headers are as long."""
INLINE = 8192
"""A piece up to this size is compressed where it stands: handing it to a thread would take longer."""
LEVEL = 1
"""The fastest: JSON numbers shrink to a quarter at 150 MB/s; level 6 makes it a fifth, in four times the time."""
AS_THEY_ARE = ("application/x-safetensors",)
"""float32 bits hardly get shorter (4 %), and compressing them would take longer than all the rest of the request."""
GZIP = zlib.MAX_WBITS | 16


class Compression:
    """Compresses the answers of an application, piece by piece: a streamed answer stays streamed, each piece can be read at once."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["method"] != "HEAD":
            send = Answer(send, asked=accepts_gzip(Headers(scope=scope).getlist("accept-encoding"))).send
        await self.app(scope, receive, send)


class Answer:
    """One answer on its way out."""

    def __init__(self, send: Send, asked: bool) -> None:
        self._send = send
        self._head: Message | None = None
        self._gzip = zlib.compressobj(LEVEL, wbits=GZIP) if asked else None

    async def send(self, message: Message) -> None:
        """The next message. The head waits for the first piece of the body, which decides."""
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None:
            head, self._head = self._head, None
            self._decide(head, message)
            await self._send(head)
        if self._gzip is not None and message["type"] == "http.response.body":
            message = {**message, "body": await self._squeeze(message.get("body", b""), last=not message.get("more_body", False))}
        await self._send(message)

    def _decide(self, head: Message, first: Message) -> None:
        headers = MutableHeaders(raw=head["headers"])
        short = not first.get("more_body", False) and len(first.get("body", b"")) < SMALLEST
        if short or head["status"] in (204, 304) or "content-encoding" in headers or headers.get("content-type") in AS_THEY_ARE:
            self._gzip = None
            return
        headers.add_vary_header("Accept-Encoding")
        if self._gzip is not None:
            headers["content-encoding"] = "gzip"
            del headers["content-length"]

    async def _squeeze(self, piece: bytes, last: bool) -> bytes:
        def work() -> bytes:
            assert self._gzip is not None
            return self._gzip.compress(piece) + self._gzip.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)

        return work() if len(piece) <= INLINE else await asyncio.to_thread(work)


def accepts_gzip(values: list[str]) -> bool:
    """Whether `Accept-Encoding` allows gzip (RFC 9110, section 12.5.3): by name, or else by "*", with a weight above 0."""
    weights: dict[str, float] = {}
    for part in ",".join(values).lower().split(","):
        name, _, weight = part.replace(" ", "").partition(";q=")
        weights[name] = float(weight) if weight.replace(".", "", 1).isdigit() else 1.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0
