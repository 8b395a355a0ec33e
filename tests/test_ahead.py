"""Large answers on their way: made ahead of their reader, but not far, and by no thread that waits for one."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.ahead import AHEAD, ahead

T = TypeVar("T")
SIZES = st.lists(st.sampled_from([1, 1000, AHEAD // 4, AHEAD, 3 * AHEAD]), max_size=12)


def run(work: Callable[[], Coroutine[None, None, T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work(), 20)

    return asyncio.run(bounded())


class Source:
    """Chunks that say how many of them were made, and whether the generator was closed."""

    def __init__(self, sizes: list[int], error: Exception | None = None) -> None:
        self.sizes, self.error = sizes, error
        self.made = 0
        self.closed = asyncio.Event()

    def chunks(self) -> Generator[bytes]:
        loop = asyncio.get_running_loop()  # called in the loop's thread, run in others

        def made() -> Generator[bytes]:
            try:
                for number, size in enumerate(self.sizes):
                    self.made += 1
                    yield bytes([number % 256]) * size
                if self.error:
                    raise self.error
            finally:
                loop.call_soon_threadsafe(self.closed.set)

        return made()


async def settled(source: Source) -> int:
    """How many chunks are made when no more come."""
    before = -1
    while before < source.made:
        before = source.made
        await asyncio.sleep(0.05)
    return before


@given(SIZES, st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_chunk_arrives_once_and_in_order(sizes: list[int], slow: bool) -> None:
    async def work() -> list[tuple[int, int]]:
        got = []
        async for chunk in ahead(Source(sizes).chunks()):
            got.append((chunk[0], len(chunk)))
            await asyncio.sleep(0.001 if slow else 0)
        return got

    assert run(work) == [(number % 256, size) for number, size in enumerate(sizes)]


def test_a_slow_reader_has_few_chunks_made_ahead() -> None:
    async def work() -> tuple[int, int]:
        source = Source([AHEAD // 4] * 100)
        async with aclosing(ahead(source.chunks())) as chunks:
            await anext(chunks)
            first = await settled(source)
            for _ in range(50):
                await anext(chunks)
            return first, await settled(source)

    first, later = run(work)
    assert 4 <= first <= 6
    assert 53 <= later <= 56


def test_slow_readers_hold_no_thread() -> None:
    async def work() -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        slow = [ahead(Source([AHEAD] * 10).chunks()) for _ in range(20)]
        for chunks in slow:
            await anext(chunks)
        total = 0
        async for chunk in ahead(Source([AHEAD] * 10).chunks()):
            total += len(chunk)
        for chunks in slow:
            await chunks.aclose()
        return total

    assert run(work) == 10 * AHEAD


@pytest.mark.parametrize("after", [0, 1, 7])
def test_what_goes_wrong_comes_after_the_chunks_before_it(after: int) -> None:
    got: list[int] = []

    async def work() -> None:
        async for chunk in ahead(Source([AHEAD // 2] * after, ValueError("not finite")).chunks()):
            got.append(len(chunk))

    with pytest.raises(ValueError, match="not finite"):
        run(work)
    assert got == [AHEAD // 2] * after


@pytest.mark.parametrize("taken", [1, 2, 6])
def test_who_stops_reading_closes_the_generator(taken: int) -> None:
    async def work() -> int:
        source = Source([AHEAD // 4] * 1000)
        async with aclosing(ahead(source.chunks())) as chunks:
            for _ in range(taken):
                await anext(chunks)
        await source.closed.wait()
        return source.made

    assert run(work) <= taken + 7
