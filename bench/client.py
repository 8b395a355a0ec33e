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


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one answer to its end and say how many bytes its body had.

    Raises BadAnswer when the status is not 200, with the beginning of what the server said.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    size = 0
    if b"transfer-encoding: chunked" in head:
        while length := int((await reader.readline()).split(b";")[0], 16):
            await _skip(reader, length)
            await reader.readexactly(2)
            size += length
        await reader.readexactly(2)
    else:
        size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        if not head.startswith(b"http/1.1 200"):
            said = await reader.readexactly(min(size, 500))
            raise BadAnswer(head.split(b"\r\n")[0].decode() + " " + said.decode(errors="replace"))
        await _skip(reader, size)
    if not head.startswith(b"http/1.1 200"):
        raise BadAnswer(head.split(b"\r\n")[0].decode())
    return size


async def _skip(reader: asyncio.StreamReader, size: int) -> None:
    while size:
        got = len(await reader.read(min(size, 1 << 20)))
        if not got:
            raise ConnectionResetError("the server closed the connection in the middle of an answer")
        size -= got


async def _client(load: Load, todo: Iterator[bytes], latencies: list[float]) -> int:
    reader, writer = await asyncio.open_connection(load.host, load.port, limit=1 << 20)
    received = 0
    for request in todo:
        start = time.perf_counter()
        writer.write(request)
        received += await asyncio.wait_for(read_answer(reader), load.timeout)
        latencies.append(time.perf_counter() - start)
    writer.close()
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
