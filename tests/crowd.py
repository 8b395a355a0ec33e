"""Clients that never rest: each keeps a connection, asks again as soon as it is answered, and notes what became of every request.

Standard library only, so that it runs inside the image too: `python -m tests.crowd --port 8000 --clients 8 --seconds 120`
prints the outcome as JSON. A request is *answered* (200, complete), *refused* (a status that tells the client to come again, no
connection, or one that is cut after a 503 had said that the service is going), or *lost*: anything else.
"""

import argparse
import http.client
import itertools
import json
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.texts import make

REFUSALS = (429, 503)
ERRORS = (OSError, http.client.HTTPException)


@dataclass
class Outcome:
    """What became of all requests; latencies in seconds, of those that were answered."""

    answered: int = 0
    refused: dict[str, int] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    retried: int = 0
    latencies: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        """The latency that the share q of the answers did not exceed."""
        return sorted(self.latencies)[min(len(self.latencies) - 1, int(q * len(self.latencies)))]


def mix(count: int = 400) -> list[tuple[str, bytes]]:
    """The benchmark's mix: of ten requests six embed 8 texts, three ask for the last layer's attention, one for all heads' mean."""
    texts = iter([text.text for text in make("mix", count * 8)])
    requests = []
    for kind in itertools.islice(itertools.cycle("aeeaeemeae"), count):
        if kind == "e":
            path, body = "/v1/embeddings", {"input": list(itertools.islice(texts, 8))}
        else:
            path, body = "/attend", {"text": next(texts), **({"layers": "all", "combine_heads": "mean"} if kind == "m" else {})}
        requests.append((path, json.dumps(body).encode()))
    return requests


class Crowd:
    """So many clients, from `with` to the end of the block or until `stop`; each request may be sent once more, if `retry`."""

    def __init__(
        self, port: int, requests: list[tuple[str, bytes]], clients: int = 8, retry: bool = False, host: str = "127.0.0.1"
    ) -> None:
        self.address, self.retry, self.outcome = (host, port), retry, Outcome()
        self._requests: Iterator[tuple[str, bytes]] = itertools.cycle(requests)
        self._lock, self._over, self._going = threading.Lock(), threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> Outcome:
        """Let every client finish the request that it is at; → the outcome."""
        self._over.set()
        for thread in self._threads:
            thread.join(120)
        return self.outcome

    def _client(self) -> None:
        connection = http.client.HTTPConnection(*self.address, timeout=90)
        while not self._over.is_set():
            with self._lock:
                path, body = next(self._requests)
            start = time.perf_counter()
            result = self._ask(connection, path, body)
            if result != "answered" and self.retry:
                with self._lock:
                    self.outcome.retried += 1
                time.sleep(0.2)
                result = self._ask(connection, path, body)
            self._note(result, time.perf_counter() - start)
            if result.startswith("refused") and not self.retry:
                time.sleep(0.1)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, path: str, body: bytes) -> str:
        try:
            # As HTTP libraries do: a connection that the server has closed meanwhile can be read from, and is not used again.
            if connection.sock and select.select([connection.sock], [], [], 0)[0]:
                connection.close()
            if connection.sock is None:
                connection.connect()
        except ERRORS:
            return "refused connection"
        told = self._going.is_set()
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
        except ERRORS as error:
            connection.close()
            return "refused connection" if told else f"lost {path}: {type(error).__name__} {error}"
        if answer.status == 200:
            return "answered"
        if answer.status == 503:
            self._going.set()
        return f"refused {answer.status}" if answer.status in REFUSALS else f"lost {path}: status {answer.status}"

    def _note(self, result: str, seconds: float) -> None:
        with self._lock:
            if result == "answered":
                self.outcome.answered += 1
                self.outcome.latencies.append(seconds)
            elif result.startswith("refused"):
                self.outcome.refused[result.removeprefix("refused ")] += 1
            else:
                self.outcome.lost.append(result.removeprefix("lost "))


def main() -> None:
    """A crowd for a while; the outcome as JSON."""
    parser = argparse.ArgumentParser(prog="tests.crowd", description="Load with the benchmark's mix.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with Crowd(options.port, mix(), options.clients) as crowd:
        time.sleep(options.seconds)
    print(json.dumps(vars(crowd.outcome)))


if __name__ == "__main__":
    main()
