"""The load: clients that each keep one connection, send the next request when the last answer is there, and note the time.

Run as a process of its own (`python -m bench.client`, the load as JSON on standard input, the outcome on standard output),
so that neither a server nor the program that compares them shares an interpreter with it. It speaks just enough HTTP/1.1 to
read an answer with a content-length or in chunks and throws the bytes away; the requests are built before the clock starts,
so that on a small machine the load costs the servers as little as it can.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field


class BadAnswer(Exception):
    """A server answered with something else than 200; a comparison of errors is worth nothing, so the run ends."""


@dataclass(frozen=True)
class Load:
    """What to send: the bodies are taken in turn by whichever of the clients is free, each body once."""

    host: str
    port: int
    path: str
    bodies: list[str]
    clients: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 300.0


@dataclass(frozen=True)
class Outcome:
    """Seconds from the first byte sent to the last one read, of the whole load and of each request, and bytes of the answers."""

    seconds: float
    latencies: list[float]
    received: int


def requests_of(load: Load) -> list[bytes]:
    """The requests as they go on the wire, head and body."""
    extra = "".join(f"{name}: {value}\r\n" for name, value in load.headers.items())
    out = []
    for body in load.bodies:
        data = body.encode()
        head = (
            f"POST {load.path} HTTP/1.1\r\nhost: {load.host}:{load.port}\r\ncontent-type: application/json\r\n"
            f"{extra}content-length: {len(data)}\r\n\r\n"
        )
        out.append(head.encode() + data)
    return out


class Answers(asyncio.BufferedProtocol):
    """Reads one answer after another of a connection, with a content-length or in chunks, and throws the bytes of their bodies away."""

    def __init__(self) -> None:
        self._buffer = bytearray(1 << 20)
        self._gone: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self._line, self._head = bytearray(), b""
        self._said = bytearray()
        self._size = self._left = 0
        self._chunked = False
        self._answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def next(self) -> int:
        """The bytes of the next answer's body. Raises BadAnswer when its status is not 200, ConnectionResetError when there is no more."""
        if self._gone is not None:
            raise self._gone
        try:
            return await self._answer
        finally:
            self._begin()

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go: asyncio's side of this protocol."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes have come."""
        data = memoryview(self._buffer)[:nbytes]
        while len(data):
            data = self._body(data) if self._left else self._text(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """There will be no more."""
        self._gone = exc or ConnectionResetError("the server closed the connection in the middle of an answer")
        if not self._answer.done():
            self._answer.set_exception(self._gone)
            self._answer.exception()

    def _body(self, data: memoryview) -> memoryview:
        taken = min(self._left, len(data))
        if len(self._said) < 500:
            self._said += data[: min(taken, 500)]
        self._left -= taken
        if not self._left and not self._chunked:
            self._done()
        return data[taken:]

    def _text(self, data: memoryview) -> memoryview:
        """The head, or the line before a chunk."""
        end = b"\r\n" if self._head else b"\r\n\r\n"
        before = len(self._line)
        self._line += data[:4096]
        if (place := self._line.find(end, max(0, before - 3))) < 0:
            return data[4096:]
        line, self._line = bytes(self._line[:place]), bytearray()
        self._chunk(line) if self._head else self._headers(line)
        return data[place + len(end) - before :]

    def _headers(self, head: bytes) -> None:
        self._head = head.lower()
        self._chunked = b"transfer-encoding: chunked" in self._head
        if not self._chunked:
            self._size = self._left = int(self._head.split(b"content-length:")[1].split(b"\r\n")[0])
            if not self._left:
                self._done()

    def _chunk(self, line: bytes) -> None:
        if not line:  # the end of a chunk, or of all
            if self._size < 0:
                self._size = ~self._size
                self._done()
            return
        length = int(line.split(b";")[0], 16)
        self._left = length
        self._size = self._size + length if length else ~self._size

    def _done(self) -> None:
        if self._answer.done():
            return
        if self._head.startswith(b"http/1.1 200"):
            self._answer.set_result(self._size)
        else:
            status = self._head.partition(b"\r\n")[0].decode()
            self._answer.set_exception(BadAnswer(f"{status} {self._said.decode(errors='replace')}"))


async def _client(load: Load, todo: Iterator[bytes], latencies: list[float]) -> int:
    transport, answers = await asyncio.get_running_loop().create_connection(Answers, load.host, load.port)
    received = 0
    try:
        for request in todo:
            start = time.perf_counter()
            transport.write(request)
            received += await asyncio.wait_for(answers.next(), load.timeout)
            latencies.append(time.perf_counter() - start)
    finally:
        transport.close()
    return received


async def run(load: Load) -> Outcome:
    """Send the load and wait for the last answer.

    Raises BadAnswer at the first status that is not 200, OSError when the server goes away.
    """
    todo, latencies = iter(requests_of(load)), []
    start = time.perf_counter()
    received = await asyncio.gather(*(_client(load, todo, latencies) for _ in range(load.clients)))
    return Outcome(time.perf_counter() - start, latencies, sum(received))


def main() -> None:
    """One load in, one outcome out; an error as `{"error": …}`."""
    load = Load(**json.load(sys.stdin))
    try:
        print(json.dumps(asdict(asyncio.run(run(load)))))
    except (BadAnswer, OSError, TimeoutError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))


if __name__ == "__main__":
    main()
