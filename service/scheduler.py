"""Texts wait here for the model: a queue, one worker thread that does nothing but forwards, and someone who watches it.

The event loop submits jobs and awaits their futures; the worker takes batches. Nothing polls: a worker without work sleeps on a
condition, what arrives during a forward is the next batch, and a lone request is started at once. When little has arrived, the
answers of the last forward go out before the next one begins: many clients that wait for an answer to send the next text would
otherwise fall into two halves, each in a batch of its own.

A batch has at most `batch_tokens` tokens (a single text may be longer). The oldest text always goes; half of the batch is
filled first come, first served, so that a large job goes on under any stream of small ones; the rest is filled from the jobs
that have least left, so that small jobs overtake large ones.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

from models.values import Encoding, Passage, Probe
from service.errors import AttendError, overloaded, too_many, worker_down
from service.metrics import Metrics

log = logging.getLogger(__name__)

Encode = Callable[[Sequence[Passage], Sequence[Probe]], list[Encoding | Exception]]
"""One forward: for each passage an Encoding, or what went wrong with it. Raises MemoryError when the batch is too large."""

FORGETS = 0.9
"""How much of the past the measured rate keeps with each batch."""

LITTLE = 1 / 8
"""The share of a batch's tokens below which more of them make a forward cheaper by the token."""

QUIET_TURNS = 8
"""Turns of the event loop without a new job after which those who got an answer are taken to have nothing more to say."""


@dataclass(eq=False)
class Job:
    """The texts of one request, in the queue or beyond it; `results[i]` belongs to text i.

    queued and computed: seconds that its last text waited and that its forwards took.
    """

    passages: Sequence[Passage]
    probes: Sequence[Probe]
    results: list["asyncio.Future[Encoding]"]
    arrived: float
    taken: int = 0
    left: int = 0
    queued: float = 0.0
    computed: float = 0.0


@dataclass(eq=False)
class Batch:
    """Texts that go through one forward together."""

    items: list[tuple[Job, int]] = field(default_factory=list)
    tokens: int = 0
    started: float = 0.0

    def take(self, job: Job) -> None:
        """Move the next text of a job in here."""
        tokens = len(job.passages[job.taken])
        self.items.append((job, job.taken))
        self.tokens += tokens
        job.taken += 1
        job.left -= tokens


class Scheduler:
    """The queue and the worker of one model. Its methods are called from the event loop.

    Args:
        name: the model's, for logs and metrics.
        encode: one forward, run in the worker's thread.
        proof: a passage that a worker has to get through before it counts as started again.
        batch_tokens, queue_tokens: tokens in a forward, tokens that may wait.
        worker_timeout: seconds a batch may take until its worker counts as hanging.
    """

    def __init__(
        self, name: str, encode: Encode, proof: Passage, *, metrics: Metrics, batch_tokens: int, queue_tokens: int, worker_timeout: float
    ) -> None:
        self.name, self.metrics = name, metrics
        self.batch_tokens, self.queue_tokens, self.worker_timeout = batch_tokens, queue_tokens, worker_timeout
        self.up, self.alive = True, True
        self._encode, self._proof = encode, proof
        self._loop = asyncio.get_running_loop()
        self._condition = threading.Condition()
        self._jobs: list[Job] = []
        self._waiting_tokens = self._waiting_texts = 0
        self._generation = 0
        self._current: Batch | None = None
        self._settling: object | None = None
        self._submitted = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._recent_tokens = self._recent_seconds = 0.0
        self._closed = False
        self._start_worker(prove=False)

    # ── On the event loop ────────────────────────────────────────────────────────────────────────────────────────────────

    def expect(self, tokens: int) -> None:
        """Refuse a request of about so many tokens now, before anything is done for it, when it is sure to be refused later.

        Raises AttendError 429. A quiet queue takes everything: what could never fit is refused by `submit`.
        """
        if self._waiting_tokens and self._waiting_tokens + tokens > self.queue_tokens:
            raise self._overloaded()

    def _overloaded(self) -> AttendError:
        return overloaded(self._waiting_tokens, self.queue_tokens, self._seconds_for(self._waiting_tokens))

    def submit(self, passages: Sequence[Passage], probes: Sequence[Probe]) -> Job:
        """Put a request's texts into the queue.

        Raises AttendError: 413 when they could never fit, 429 when too much is waiting, 503 when there is no worker.
        """
        tokens = sum(map(len, passages))
        if tokens > self.queue_tokens:
            raise too_many(f"the request has {tokens} tokens, and no more than {self.queue_tokens} may wait at all: split it")
        if not self.up or self._closed:
            raise worker_down(self.name)
        with self._condition:
            if self._waiting_tokens + tokens > self.queue_tokens:
                raise self._overloaded()
            job = Job(passages, probes, [self._loop.create_future() for _ in passages], perf_counter(), left=tokens)
            self._jobs.append(job)
            self._submitted += 1
            self._count(tokens, len(passages))
            self._condition.notify()
        if self._alarm is None:
            self._alarm = self._loop.call_later(self.worker_timeout, self._look)
        return job

    def forget(self, job: Job, why: Exception | None = None) -> None:
        """Nobody waits for this job any more: what is not in a forward yet never will be.

        Its results that are not there yet are cancelled, or get `why`.
        """
        with self._condition:
            if job in self._jobs:
                self._jobs.remove(job)
                self._count(-job.left, job.taken - len(job.passages))
        for result in job.results:
            if why is None:
                result.cancel()
            else:
                _fail(result, why)

    async def close(self) -> None:
        """End the worker after the batch that it is in."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        await asyncio.to_thread(self._thread.join, 1.0)

    def _seconds_for(self, tokens: int) -> float:
        """How long so many tokens will take, by the last batches; 1 before there was any."""
        return tokens * self._recent_seconds / self._recent_tokens if self._recent_tokens else 1.0

    def _count(self, tokens: int, texts: int) -> None:
        self._waiting_tokens += tokens
        self._waiting_texts += texts
        self.metrics.queue_tokens.labels(self.name).set(self._waiting_tokens)
        self.metrics.queue_texts.labels(self.name).set(self._waiting_texts)

    def _deliver(self, generation: int, batch: Batch, answers: list[Encoding | Exception], seconds: float) -> None:
        if generation != self._generation:
            return
        self._recent_tokens = FORGETS * self._recent_tokens + batch.tokens
        self._recent_seconds = FORGETS * self._recent_seconds + seconds
        self._observe(batch, answers, seconds)
        for job in {id(job): job for job, _ in batch.items}.values():
            job.queued = batch.started - job.arrived
            job.computed += seconds
        for (job, i), answer in zip(batch.items, answers, strict=True):
            if isinstance(answer, Exception):
                _fail(job.results[i], answer)
            elif not job.results[i].done():
                job.results[i].set_result(answer)

    def _turn(self, settling: object, submitted: int, quiet: int) -> None:
        """One turn of the event loop while the worker lets it settle: is there enough now, or has nothing come for a while?"""
        if settling is not self._settling:
            return
        quiet = quiet + 1 if submitted == self._submitted else 0
        if quiet < QUIET_TURNS and self._has_little():
            self._loop.call_soon(self._turn, settling, self._submitted, quiet)
            return
        with self._condition:
            self._settling = None
            self._condition.notify()

    def _has_little(self) -> bool:
        return self._waiting_tokens < LITTLE * self.batch_tokens

    def _observe(self, batch: Batch, answers: list[Encoding | Exception], seconds: float) -> None:
        metrics, name = self.metrics, self.name
        metrics.nonfinite.labels(name).inc(sum(type(answer).__name__ == "NonfiniteOutput" for answer in answers))
        metrics.batch_texts.labels(name).observe(len(batch.items))
        metrics.batch_tokens.labels(name).observe(batch.tokens)
        metrics.texts.labels(name).inc(len(batch.items))
        metrics.tokens.labels(name).inc(batch.tokens)
        metrics.stage_seconds.labels(name, "forward").observe(seconds)
        queue = metrics.stage_seconds.labels(name, "queue")
        for job in {id(job): job for job, _ in batch.items}.values():
            queue.observe(batch.started - job.arrived)

    # ── Watching the worker ──────────────────────────────────────────────────────────────────────────────────────────────

    def _start_worker(self, *, prove: bool) -> None:
        if prove:
            self._current = Batch(started=perf_counter())  # the proof, which nobody waits for
        self._thread = threading.Thread(target=self._run, args=(self._generation, prove), name=f"worker {self.name}", daemon=True)
        self._thread.start()
        self.metrics.worker_up.labels(self.name).set(self.up)

    def _look(self) -> None:
        """Has the worker been in one batch for too long? Looked at while there is work, and only then."""
        self._alarm = None
        batch, now = self._current, perf_counter()
        if batch is not None and now - batch.started >= self.worker_timeout:
            self._lost(self._generation, f"has been in one batch for {self.worker_timeout:g} s")
        elif batch is not None or self._jobs:
            began = batch.started if batch is not None else now
            self._alarm = self._loop.call_later(max(0.01, began + self.worker_timeout - now), self._look)

    def _lost(self, generation: int, why: str) -> None:
        """A worker died or hangs: its texts get an error now, and another worker takes its place, if it can do a forward."""
        with self._condition:
            if generation != self._generation or self._closed:
                return
            self._generation += 1
            batch, self._current = self._current, None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for job, i in batch.items if batch is not None else []:
            _fail(job.results[i], worker_down(self.name))
        if not self.up:
            log.error("the worker of %s could not be started again: it %s", self.name, why)
            self.alive = False
            self._refuse_all()
            return
        log.error("the worker of %s %s; starting another", self.name, why)
        self.up = False
        self.metrics.worker_restarts.labels(self.name).inc()
        self._start_worker(prove=True)
        self._alarm = self._loop.call_later(self.worker_timeout, self._look)

    def _refuse_all(self) -> None:
        with self._condition:
            jobs, self._jobs = self._jobs, []
            self._count(-self._waiting_tokens, -self._waiting_texts)
        for result in (result for job in jobs for result in job.results):
            _fail(result, worker_down(self.name))

    def _risen(self, generation: int) -> None:
        if generation == self._generation:
            self.up = True
            self.metrics.worker_up.labels(self.name).set(1)
            log.info("the worker of %s runs again", self.name)

    # ── In the worker's thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, generation: int, prove: bool) -> None:
        why = "ended without being told to"
        try:
            if prove:
                answer = self._encode([self._proof], [Probe()])[0]
                if isinstance(answer, Exception):
                    raise answer
                self._call(self._risen, generation)
            took = 0.0
            while (batch := self._next(generation, took)) is not None:
                answers = self._answers(batch)
                took = perf_counter() - batch.started
                self._call(self._deliver, generation, batch, answers, took)
            why = ""
        except BaseException as error:
            why = f"died of {type(error).__name__}: {error}"
        finally:
            if why:
                self._call(self._lost, generation, why)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)

    def _next(self, generation: int, took: float) -> Batch | None:
        """Wait until there is work and take a batch of it; None when this worker has to end. took: seconds of its last forward."""
        with self._condition:
            if generation == self._generation:
                self._current = None
            self._settle(generation, took)
            self._condition.wait_for(lambda: self._jobs or self._ended(generation))
            if self._ended(generation):
                return None
            batch = self._pick()
            self._count(-batch.tokens, -len(batch.items))
            batch.started = perf_counter()
            self._current = batch
            return batch

    def _settle(self, generation: int, took: float) -> None:
        """Where some, but little is waiting: let the event loop hand out the last answers and read what they bring in.

        Never for longer than the last forward took. Without anything waiting there is nothing to hold back: who comes first goes at once.
        """
        if self._jobs and self._has_little():
            settling = self._settling = object()
            self._call(self._turn, settling, self._submitted, 0)
            self._condition.wait_for(lambda: self._settling is not settling or self._ended(generation), took)
            self._settling = None

    def _ended(self, generation: int) -> bool:
        return self._closed or generation != self._generation

    def _pick(self) -> Batch:
        batch = Batch()
        for job in self._jobs:
            self._fill(batch, job, self.batch_tokens // 2)
            if batch.tokens >= self.batch_tokens // 2:
                break
        for job in sorted((job for job in self._jobs if job.left), key=lambda job: job.left):
            self._fill(batch, job, self.batch_tokens)
        self._jobs = [job for job in self._jobs if job.taken < len(job.passages)]
        return batch

    def _fill(self, batch: Batch, job: Job, limit: int) -> None:
        while job.taken < len(job.passages) and (not batch.items or batch.tokens + len(job.passages[job.taken]) <= limit):
            batch.take(job)

    def _answers(self, batch: Batch) -> list[Encoding | Exception]:
        """The answers of a batch; what does not fit into memory is split and tried once more."""
        try:
            return self._forward(batch.items)
        except MemoryError:
            log.warning("%s: no memory for a batch of %d texts, %d tokens", self.name, len(batch.items), batch.tokens)
        # out of the handler, so that what the failed forward held is let go before it is tried again
        middle = len(batch.items) // 2
        answers: list[Encoding | Exception] = []
        for half in (batch.items[:middle], batch.items[middle:]) if middle else (batch.items,):
            try:
                answers += self._forward(half)
            except MemoryError:
                answers += [MemoryError() for _ in half]
        return answers

    def _forward(self, items: list[tuple[Job, int]]) -> list[Encoding | Exception]:
        passages = [job.passages[i] for job, i in items]
        try:
            return self._encode(passages, [job.probes[i] for job, i in items])
        except MemoryError:
            raise
        except AttendError as error:
            return [error] * len(items)
        except Exception as error:
            log.exception("%s: a batch of %d texts failed", self.name, len(items))
            return [error] * len(items)


def _fail(result: "asyncio.Future[Encoding]", error: Exception) -> None:
    """Let a result be an error, unless it is there; one that nobody looks at is no fault."""
    if not result.done():
        result.set_exception(error)
        result.exception()
