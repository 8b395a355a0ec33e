"""What every dialect does between its request and its answer: read the body and the texts, wait for the model, send."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from models.passages import Direction, TextError, TextTooLong
from models.values import Encoding, Passage, Probe
from service import errors
from service.ahead import ahead
from service.errors import AttendError
from service.metrics import Metrics
from service.scheduler import Job
from service.served import Served
from service.state import State

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)
INLINE = 4000
"""Work on so many characters or numbers is done where it stands: handing it to a thread would take longer."""

CHARACTERS_A_TOKEN = 8
"""No fewer tokens than one for so many characters are expected: an estimate on the safe side, to refuse early under overload."""


class Gone(Exception):
    """The client has closed the connection; there is nobody to answer."""


@dataclass
class Times:
    """Seconds that a request spent in each stage, for the answer's headers."""

    start: float = field(default_factory=perf_counter)
    tokenization: float = 0.0
    queue: float = 0.0
    inference: float = 0.0
    tokens: int = 0

    def headers(self) -> dict[str, str]:
        """x-total-time, x-tokenization-time, x-queue-time, x-inference-time (ms) and x-compute-tokens."""
        return {
            "x-total-time": f"{1000 * (perf_counter() - self.start):.2f}",
            "x-tokenization-time": f"{1000 * self.tokenization:.2f}",
            "x-queue-time": f"{1000 * self.queue:.2f}",
            "x-inference-time": f"{1000 * self.inference:.2f}",
            "x-compute-tokens": str(self.tokens),
        }


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do some work on `size` characters or numbers without holding up the event loop."""
    return work() if size <= INLINE else await asyncio.to_thread(work)


async def parse(request: Request, model: type[Body]) -> Body:
    """The request's body. Raises AttendError with what is wrong with it."""
    raw = await request.body()
    try:
        return await off_loop(len(raw), lambda: model.model_validate_json(raw))
    except ValidationError as error:
        raise errors.from_validation(error) from error


async def read_passages(
    served: Served,
    metrics: Metrics,
    times: Times,
    texts: Sequence[tuple[str, ...]],
    field: str,
    *,
    prompt: str = "",
    truncate: bool = False,
    direction: Direction = "right",
    special_tokens: bool = True,
    limited: bool = True,
) -> list[Passage]:
    """Tokenize; what is wrong with a text becomes an AttendError on `field` that says which text it is."""
    start, characters = perf_counter(), sum(len(text) for item in texts for text in item)
    if limited:
        longest = served.reader.max_length or characters
        served.scheduler.expect(sum(max(1, min(sum(map(len, item)) // CHARACTERS_A_TOKEN, longest)) for item in texts))

    def work() -> list[Passage]:
        return served.reader.read(
            texts, prompt=prompt, truncate=truncate, direction=direction, special_tokens=special_tokens, limited=limited
        )

    try:
        passages = await off_loop(characters, work)
    except TextError as error:
        which = f"{field}: item {error.index}: " if len(texts) > 1 and error.index is not None else f"{field}: "
        if isinstance(error, TextTooLong):
            raise errors.text_too_long(f"{which}{error}: send a shorter text, or have it cut with truncate", field) from error
        raise errors.invalid(f"{which}{error}", field) from error
    note_tokens(served, metrics, times, passages, perf_counter() - start)
    return passages


def note_tokens(served: Served, metrics: Metrics, times: Times, passages: Sequence[Passage], seconds: float) -> None:
    """Keep how many tokens a request has and how long it took to find them."""
    times.tokenization, times.tokens = seconds, sum(map(len, passages))
    metrics.stage_seconds.labels(served.name, "tokenize").observe(seconds)


@asynccontextmanager
async def submitted(
    request: Request, served: Served, passages: Sequence[Passage], probes: Sequence[Probe], timeout: float, times: Times
) -> AsyncIterator["Results"]:
    """The results of a job; whoever leaves early takes what is left of it out of the queue.

    Raises AttendError when the job is refused.
    """
    results = Results(request, served, served.scheduler.submit(passages, probes), times, timeout)
    try:
        yield results
    finally:
        if not results.kept_open:
            results.close()


class Results:
    """The results of one job. When the deadline has come or the client has left, all that are not there yet fail."""

    def __init__(self, request: Request, served: Served, job: Job, times: Times, timeout: float) -> None:
        self.request, self.served, self.job, self.times = request, served, job, times
        self.kept_open = False
        loop, left = asyncio.get_running_loop(), times.start + timeout - perf_counter()
        self._deadline = loop.call_later(left, served.scheduler.forget, job, errors.deadline_exceeded(timeout))
        self._watch = loop.create_task(_forget_when_gone(request, served, job))

    def keep_open(self) -> None:
        """The answer goes on after the route has returned; it closes the job itself."""
        self.kept_open = True

    def close(self) -> None:
        """Nobody waits for the rest any more."""
        self._deadline.cancel()
        self._watch.cancel()
        self.served.scheduler.forget(self.job)

    async def all(self) -> list[Encoding]:
        """All results, in order."""
        return [await self.get(i) for i in range(len(self.job.results))]

    async def get(self, i: int) -> Encoding:
        """The result of text i.

        Raises AttendError (500, 503, 504), Gone when the client has left.
        """
        try:
            result = await self.job.results[i]
        except MemoryError as error:
            raise AttendError(500, "internal", "there is not enough memory for this text; send less at once") from error
        except Exception as error:
            if type(error).__name__ != "NonfiniteOutput":
                raise
            raise errors.nonfinite(self.served.name) from error
        self.times.queue, self.times.inference = self.job.queued, self.job.computed
        return result


async def _forget_when_gone(request: Request, served: Served, job: Job) -> None:
    """The body has been read before, so what comes next from the client is that it is gone.

    No method of Results: the trace of its cancellation would tie the results into a knot that keeps them until a collection.
    """
    while (await request.receive())["type"] != "http.disconnect":
        pass
    served.scheduler.forget(job, Gone())


def streamed(state: State, served: Served, chunks: Iterable[bytes], media: str, headers: dict[str, str]) -> Response:
    """An answer that is encoded in a thread while it is sent."""
    return StreamingResponse(ahead(_timed(state, served, chunks)), media_type=media, headers=headers)


def _timed(state: State, served: Served, chunks: Iterable[bytes]) -> Generator[bytes]:
    spent, iterator = 0.0, iter(chunks)
    try:
        while True:
            start = perf_counter()
            chunk = next(iterator, None)
            spent += perf_counter() - start
            if chunk is None:
                return
            yield chunk
    finally:
        state.metrics.stage_seconds.labels(served.name, "encode").observe(spent)
