"""The queue and its worker with a model that only says which texts it was given: order, budget, fairness, failures."""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from models.values import Encoding, Passage, Probe
from service import scheduler as scheduler_module
from service.errors import AttendError
from service.metrics import Metrics
from service.scheduler import Job, Scheduler

PROOF = 0
"""What the texts of these tests are called: a number, their first token. 0 is the proof of a new worker."""


def text(number: int, tokens: int = 4) -> Passage:
    """A passage with a number of its own."""
    return Passage((str(number),), [number] * tokens, [0] * tokens, [(0, 0)] * tokens, [0] * tokens, [False] * tokens)


def answer(passage: Passage) -> Encoding:
    """The one right answer to a passage."""
    return Encoding(pooled=np.array([passage.ids[0], len(passage)], np.float32))


class Model:
    """Notes the batches that it is given. `gate` closed: it does not get through one; `fault` may raise for one."""

    def __init__(self) -> None:
        self.batches: list[list[Passage]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Callable[[Sequence[Passage]], None] = lambda passages: None

    def __call__(self, passages: Sequence[Passage], probes: Sequence[Probe]) -> list[Encoding | Exception]:
        """One forward."""
        assert len(passages) == len(probes)
        self.batches.append(list(passages))
        self.fault(passages)
        assert self.gate.wait(10)
        return [answer(passage) for passage in passages]

    @property
    def numbers(self) -> list[list[int]]:
        """The batches as the numbers of their texts."""
        return [[passage.ids[0] for passage in batch] for batch in self.batches]


class Desk:
    """A scheduler with its model, and what tests do with them."""

    def __init__(self, batch_tokens: int, queue_tokens: int, worker_timeout: float) -> None:
        self.model, self.metrics = Model(), Metrics()
        self.metrics.prepare(["m"], [])
        self.scheduler = Scheduler(
            "m", self.model, text(PROOF), metrics=self.metrics, batch_tokens=batch_tokens, queue_tokens=queue_tokens,
            worker_timeout=worker_timeout,
        )  # fmt: skip

    def submit(self, *passages: Passage) -> Job:
        """A job of these texts."""
        return self.scheduler.submit(passages, [Probe()] * len(passages))

    async def block(self) -> Job:
        """Close the gate and put a first text into the forward, so that all further ones wait."""
        self.model.gate.clear()
        job, before = self.submit(text(999_999, 1)), len(self.model.batches)
        await until(lambda: len(self.model.batches) > before)
        return job

    def metric(self, name: str) -> float:
        """The value of a series of the model."""
        found = re.search(rf'^{name}{{model="m"}} (\S+)$', generate_latest(self.metrics.registry).decode(), re.M)
        assert found, name
        return float(found[1])


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Wait for a condition; → the seconds that it took."""
    start = perf_counter()
    while not condition():
        assert perf_counter() - start < seconds, "it did not come to that"
        await asyncio.sleep(0.001)
    return perf_counter() - start


async def done(job: Job) -> list[Encoding]:
    """All results of a job, in order."""
    return await asyncio.wait_for(asyncio.gather(*job.results), 10)


def right(job: Job, results: Sequence[Encoding]) -> bool:
    """Whether each text of the job has its own answer."""
    return all(np.array_equal(r.pooled, answer(p).pooled) for r, p in zip(results, job.passages, strict=True))


def at_a_desk(
    scenario: Callable[[Desk], Awaitable[None]], *, batch_tokens: int = 16, queue_tokens: int = 1000, worker_timeout: float = 30.0
) -> Desk:
    """Run a scenario in an event loop; the worker ends with it."""

    async def run() -> Desk:
        desk = Desk(batch_tokens, queue_tokens, worker_timeout)
        try:
            await scenario(desk)
        finally:
            desk.model.gate.set()
            await desk.scheduler.close()
        return desk

    return asyncio.run(run())


# ── Order and fairness ───────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    jobs=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=12),
    pauses=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    leaving=st.sets(st.integers(0, 11)),
    batch_tokens=st.sampled_from([16, 400]),
)
@settings(max_examples=60, deadline=None)
def test_every_text_gets_its_own_answer(jobs: list[list[int]], pauses: list[int], leaving: set[int], batch_tokens: int) -> None:
    """Whatever arrives when, in whatever sizes, and whoever leaves: right answers in order, batches within the budget."""

    async def scenario(desk: Desk) -> None:
        sent, number = [], 0
        for k, sizes in enumerate(jobs):
            sent.append(desk.submit(*(text(number := number + 1, size) for size in sizes)))
            for _ in range(pauses[k]):
                await asyncio.sleep(0)
            if k in leaving:
                desk.scheduler.forget(sent[-1])
        for k, job in enumerate(sent):
            if k not in leaving:
                assert right(job, await done(job))
            else:
                assert all(result.done() for result in job.results)
        await until(lambda: desk.metric("attend_queue_tokens") == 0 == desk.metric("attend_queue_texts"))

    desk = at_a_desk(scenario, batch_tokens=batch_tokens, queue_tokens=100_000)
    numbers = [number for batch in desk.model.numbers for number in batch]
    assert len(set(numbers)) == len(numbers), "a text went through two forwards"
    for batch in desk.model.batches:
        assert sum(map(len, batch)) <= batch_tokens or len(batch) == 1


@given(sizes=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=1, max_size=10))
@settings(max_examples=60, deadline=None)
def test_the_oldest_text_is_always_in_the_next_batch(sizes: list[list[int]]) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.block()
        number = 0
        jobs = [desk.submit(*(text(number := number + 1, size) for size in job)) for job in sizes]
        desk.model.gate.set()
        for job in jobs:
            assert right(job, await done(job))

    waiting = list(range(1, sum(map(len, sizes)) + 1))
    for batch in at_a_desk(scenario, queue_tokens=100_000).model.numbers[1:]:
        assert waiting[0] in batch
        waiting = [number for number in waiting if number not in batch]
    assert not waiting


def test_a_lone_request_starts_at_once_and_what_arrives_meanwhile_is_the_next_batch() -> None:
    async def scenario(desk: Desk) -> None:
        first = await desk.block()
        others = [desk.submit(text(n)) for n in (1, 2, 3)]
        desk.model.gate.set()
        for job in (first, *others):
            await done(job)

    assert at_a_desk(scenario).model.numbers == [[999_999], [1, 2, 3]]


def test_what_the_last_answers_bring_in_joins_the_little_that_waits() -> None:
    """Who sends the next text on an answer shares a forward with the text that waited, instead of taking turns with it for ever."""

    async def scenario(desk: Desk) -> None:
        async def client(job: Job, then: int) -> None:
            assert right(job, await done(job))
            last = desk.submit(text(then))
            assert right(last, await done(last))

        first, waiting = await desk.block(), desk.submit(text(1))
        clients = asyncio.gather(client(first, 2), done(waiting))
        await asyncio.sleep(0.2)
        desk.model.gate.set()
        await clients

    assert at_a_desk(scenario, batch_tokens=400).model.numbers == [[999_999], [1, 2]]


@pytest.mark.parametrize(("tokens", "least", "most"), [(50, 0.0, 0.2), (49, 0.2, 2.0)], ids=["enough waits", "little waits"])
def test_the_worker_waits_for_the_event_loop_only_with_little_and_not_for_long(tokens: int, least: float, most: float) -> None:
    """An event loop that does not turn holds an eighth of a batch's tokens up not at all, less for as long as the last forward took."""

    async def scenario(desk: Desk) -> None:
        began: list[float] = []
        await desk.block()
        desk.submit(text(1, tokens))
        desk.model.fault = lambda passages: began.append(perf_counter())
        await asyncio.sleep(0.3)
        opened = perf_counter()
        desk.model.gate.set()
        threading.Event().wait(1.0)
        assert least < began[0] - opened < most

    assert at_a_desk(scenario, batch_tokens=400).model.numbers == [[999_999], [1]]


def test_an_event_loop_that_is_never_quiet_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        first, waiting = await desk.block(), desk.submit(text(1))
        await asyncio.sleep(0.1)
        desk.model.gate.set()
        assert right(first, await done(first))
        assert right(waiting, await done(waiting))

    monkeypatch.setattr(scheduler_module, "QUIET_TURNS", 10**9)
    assert at_a_desk(scenario, batch_tokens=400).model.numbers == [[999_999], [1]]


def test_closing_does_not_wait_for_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(desk: Desk) -> None:
        await desk.block()
        desk.submit(text(1))
        await asyncio.sleep(0.8)
        desk.model.gate.set()
        await until(lambda: desk.scheduler._settling is not None)
        start = perf_counter()
        await desk.scheduler.close()
        assert perf_counter() - start < 0.4
        assert not desk.scheduler._thread.is_alive()

    monkeypatch.setattr(scheduler_module, "QUIET_TURNS", 10**9)
    assert at_a_desk(scenario, batch_tokens=400).model.numbers == [[999_999]]


def test_small_overtakes_large() -> None:
    """A small job that comes after a large one is in the very next batch, beside the large one's oldest texts."""

    async def scenario(desk: Desk) -> None:
        await desk.block()
        large = desk.submit(*(text(n) for n in range(1, 101)))
        small = desk.submit(text(500))
        desk.model.gate.set()
        await done(small)
        assert right(large, await done(large))

    batches = at_a_desk(scenario).model.numbers
    assert batches[1] == [1, 2, 500, 3]


def test_a_large_job_ends_under_a_steady_stream_of_small_ones() -> None:
    """More small texts than fit come with every batch; the large job still gets half of each."""

    async def scenario(desk: Desk) -> None:
        number = 1000

        def stream(passages: Sequence[Passage]) -> None:
            nonlocal number
            for _ in range(8):
                number += 1
                loop.call_soon_threadsafe(desk.submit, text(number))

        loop = asyncio.get_running_loop()
        await desk.block()
        large = desk.submit(*(text(n) for n in range(1, 41)))
        desk.model.fault = stream
        stream([])
        desk.model.gate.set()
        assert right(large, await done(large))
        desk.model.fault = lambda passages: None

    batches = at_a_desk(scenario, queue_tokens=1_000_000).model.numbers
    last = next(k for k, batch in enumerate(batches) if 40 in batch)
    assert last <= 40 // 2 + 1


# ── Refusals and leaving ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_more_than_the_queue_holds_is_413_with_its_numbers() -> None:
    async def scenario(desk: Desk) -> None:
        with pytest.raises(AttendError, match="101 tokens, and no more than 100") as refused:
            desk.submit(text(1, 101))
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")
        whole = desk.submit(*(text(n, 10) for n in range(1, 11)))
        assert right(whole, await done(whole))

    at_a_desk(scenario, queue_tokens=100)


def test_a_full_queue_is_429_with_the_seconds_by_the_measured_rate() -> None:
    """40 tokens took 0.4 s, so that the 250 that wait will take about 2.5 s: Retry-After is 3."""

    async def scenario(desk: Desk) -> None:
        desk.model.fault = lambda passages: threading.Event().wait(0.01 * sum(map(len, passages))) and None
        await done(desk.submit(*(text(n, 8) for n in range(1, 6))))
        await desk.block()
        waiting = desk.submit(*(text(n, 10) for n in range(1, 26)))
        with pytest.raises(AttendError, match="250 tokens are waiting, and no more than 256 may") as refused:
            desk.submit(text(7, 7))
        assert refused.value.status == 429
        assert refused.value.headers == {"retry-after": "3"}
        desk.submit(text(6, 6))
        desk.model.fault = lambda passages: None
        desk.model.gate.set()
        assert right(waiting, await done(waiting))
        after = desk.submit(text(7, 7))
        assert right(after, await done(after))

    at_a_desk(scenario, queue_tokens=256)


def test_who_leaves_costs_no_forward() -> None:
    async def scenario(desk: Desk) -> None:
        first = await desk.block()
        leaves, stays = desk.submit(text(1), text(2)), desk.submit(text(3))
        assert desk.metric("attend_queue_tokens") == 12
        desk.scheduler.forget(leaves)
        assert desk.metric("attend_queue_tokens") == 4
        desk.model.gate.set()
        assert right(stays, await done(stays))
        await done(first)
        assert all(result.cancelled() for result in leaves.results)
        assert desk.metric("attend_texts_total") == 2

    assert at_a_desk(scenario).model.numbers == [[999_999], [3]]


def test_leaving_in_the_middle_keeps_what_is_not_begun_out() -> None:
    async def scenario(desk: Desk) -> None:
        desk.model.gate.clear()
        job = desk.submit(*(text(n) for n in range(1, 11)))
        await until(lambda: bool(desk.model.batches))
        desk.scheduler.forget(job, TimeoutError())
        desk.model.gate.set()
        with pytest.raises(TimeoutError):
            await job.results[0]
        stays = desk.submit(text(99))
        assert right(stays, await done(stays))

    assert at_a_desk(scenario).model.numbers == [[1, 2, 3, 4], [99]]


# ── Failures ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def raising(error: BaseException, number: int) -> Callable[[Sequence[Passage]], None]:
    """A fault for batches that have the text of that number."""

    def fault(passages: Sequence[Passage]) -> None:
        if any(passage.ids[0] == number for passage in passages):
            raise error

    return fault


def test_an_exception_fails_its_batch_alone() -> None:
    async def scenario(desk: Desk) -> None:
        desk.model.fault = raising(ValueError("no"), 2)
        await desk.block()
        beside, bad, later = desk.submit(text(1, 8)), desk.submit(text(2, 8)), desk.submit(text(3, 16))
        desk.model.gate.set()
        for job in (beside, bad):
            with pytest.raises(ValueError, match="no"):
                await job.results[0]
        assert right(later, await done(later))
        assert desk.scheduler.up
        assert desk.metric("attend_worker_restarts_total") == 0

    assert at_a_desk(scenario).model.numbers == [[999_999], [1, 2], [3]]


def test_one_bad_text_leaves_the_others_of_its_batch() -> None:
    """What the model gives as wrong for one text is that text's error, and counted when it was no number."""

    class NonfiniteOutput(Exception):
        pass

    async def scenario(desk: Desk) -> None:
        wrong = NonfiniteOutput()
        model = desk.model
        desk.scheduler._encode = lambda passages, probes: [
            wrong if passage.ids[0] == 2 else given for passage, given in zip(passages, model(passages, probes), strict=True)
        ]
        job = desk.submit(text(1), text(2), text(3))
        results = await asyncio.gather(*job.results, return_exceptions=True)
        assert results[1] is wrong
        assert isinstance(results[0], Encoding)
        assert isinstance(results[2], Encoding)
        assert desk.metric("attend_nonfinite_total") == 1

    at_a_desk(scenario)


def test_out_of_memory_is_tried_once_more_in_halves() -> None:
    """[1 2 3 4] is too large, so is [3 4]: 3 and 4 fail, 1 and 2 do not, and nothing is tried a third time."""

    async def scenario(desk: Desk) -> None:
        desk.model.fault = raising(MemoryError(), 4)
        await desk.block()
        job = desk.submit(*map(text, (1, 2, 3, 4)))
        desk.model.gate.set()
        results = await asyncio.gather(*job.results, return_exceptions=True)
        later = desk.submit(text(5))
        assert right(later, await done(later))
        assert [type(result) for result in results] == [Encoding, Encoding, MemoryError, MemoryError]

    assert at_a_desk(scenario).model.numbers == [[999_999], [1, 2, 3, 4], [1, 2], [3, 4], [5]]


def test_a_lone_text_without_memory_is_tried_once_more() -> None:
    async def scenario(desk: Desk) -> None:
        def once(passages: Sequence[Passage]) -> None:
            desk.model.fault = lambda passages: None
            raise MemoryError

        desk.model.fault = once
        job = desk.submit(text(1))
        assert right(job, await done(job))
        desk.model.fault = raising(MemoryError(), 2)
        with pytest.raises(MemoryError):
            await desk.submit(text(2)).results[0]

    assert at_a_desk(scenario).model.numbers == [[1], [1], [2], [2]]


def test_a_dead_worker_is_replaced() -> None:
    """Its texts get 503 at once, what waits is served by the next worker, and readiness is down in between."""

    async def scenario(desk: Desk) -> None:
        scheduler, model = desk.scheduler, desk.model
        hold = threading.Event()

        def fault(passages: Sequence[Passage]) -> None:
            if passages[0].ids[0] == 1:
                raise SystemExit("killed")
            if passages[0].ids[0] == PROOF:
                hold.wait(10)

        model.fault = fault
        await desk.block()
        lost, waiting = desk.submit(text(1, 16)), desk.submit(text(2, 16))
        model.gate.set()
        start = perf_counter()
        with pytest.raises(AttendError) as refused:
            await lost.results[0]
        assert perf_counter() - start < 0.5
        assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "2"})
        assert not scheduler.up
        assert scheduler.alive
        assert desk.metric("attend_worker_up") == 0
        with pytest.raises(AttendError, match="started again"):
            desk.submit(text(3))
        hold.set()
        assert right(waiting, await done(waiting))
        assert scheduler.up
        assert desk.metric("attend_worker_up") == 1
        assert desk.metric("attend_worker_restarts_total") == 1

    assert at_a_desk(scenario).model.numbers[1:] == [[1], [PROOF], [2]]


def test_a_hanging_worker_is_replaced_more_than_once() -> None:
    """Seen after worker_timeout, also in the batches after a restart, without another request having to come."""

    async def scenario(desk: Desk) -> None:
        hang = threading.Event()
        desk.model.fault = lambda passages: hang.wait(10) and None if passages[0].ids[0] < 0 else None
        try:
            for k in (1, 2):
                job, start = desk.submit(text(-k)), perf_counter()
                with pytest.raises(AttendError) as refused:
                    await job.results[0]
                assert refused.value.status == 503
                assert 0.2 <= perf_counter() - start < 0.6
                await until(lambda: desk.scheduler.up)
                assert desk.metric("attend_worker_restarts_total") == k
                served = desk.submit(text(k))
                assert right(served, await done(served))
        finally:
            hang.set()

    at_a_desk(scenario, worker_timeout=0.2)


def test_what_a_hanging_worker_says_in_the_end_is_not_heard() -> None:
    async def scenario(desk: Desk) -> None:
        hang, back = threading.Event(), threading.Event()

        def fault(passages: Sequence[Passage]) -> None:
            if passages[0].ids[0] == 1:
                hang.wait(10)
                back.set()

        desk.model.fault = fault
        lost = desk.submit(text(1))
        with pytest.raises(AttendError):
            await lost.results[0]
        await until(lambda: desk.scheduler.up)
        hang.set()
        await until(back.is_set)
        served = desk.submit(text(2))
        assert right(served, await done(served))
        assert desk.metric("attend_texts_total") == 1
        assert threading.active_count() <= before + 1

    before = threading.active_count()
    at_a_desk(scenario, worker_timeout=0.1)


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_restart_that_fails_ends_liveness(how: str) -> None:
    async def scenario(desk: Desk) -> None:
        hang = threading.Event()

        def fault(passages: Sequence[Passage]) -> None:
            if passages[0].ids[0] == 1 or how == "raises":
                raise SystemExit
            hang.wait(10)

        await desk.block()
        desk.model.fault = fault
        lost, waiting = desk.submit(text(1, 16)), desk.submit(text(2, 16))
        desk.model.gate.set()
        for job in (lost, waiting):
            with pytest.raises(AttendError) as refused:
                await asyncio.wait_for(job.results[0], 2)
            assert refused.value.status == 503
        assert not desk.scheduler.alive
        assert not desk.scheduler.up
        assert desk.metric("attend_queue_tokens") == 0
        with pytest.raises(AttendError):
            desk.submit(text(3))
        hang.set()

    at_a_desk(scenario, worker_timeout=0.2)


def test_closing_ends_the_worker_after_its_batch() -> None:
    async def scenario(desk: Desk) -> None:
        first = await desk.block()
        desk.model.gate.set()
        assert right(first, await done(first))
        await desk.scheduler.close()
        await until(lambda: threading.active_count() <= before + 1)  # the loop's own helper thread may be left
        with pytest.raises(AttendError) as refused:
            desk.submit(text(1))
        assert refused.value.status == 503

    before = threading.active_count()
    at_a_desk(scenario)
