"""Large answers: made in a thread while they are sent."""

import asyncio
from collections.abc import AsyncGenerator, Generator

AHEAD = 2**20
"""Bytes that an answer is made ahead of its reader: enough for neither to wait for the other."""


async def ahead(chunks: Generator[bytes]) -> AsyncGenerator[bytes, None]:
    """The chunks of a generator that runs in threads, made while those before them are on their way.

    Whoever stops reading closes the generator, after the chunk that it is at. What the generator raises comes after its chunks.
    """
    maker = _Maker(chunks)
    try:
        while (chunk := await maker.ready.get()) is not None:
            maker.take(chunk)
            yield chunk
        await maker.making
    finally:
        maker.close()


class _Maker:
    """A thread makes chunks until AHEAD bytes of them wait, then it does something else; when half of them have gone, one goes on.

    So a slow reader holds up no thread, and no answer needs more memory than that.
    """

    def __init__(self, chunks: Generator[bytes]) -> None:
        self.ready: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._chunks, self._loop = chunks, asyncio.get_running_loop()
        self._made = self._taken = 0
        self._paused = self._closed = False
        self._go_on()

    def take(self, chunk: bytes) -> None:
        """Note that this chunk is on its way."""
        self._taken += len(chunk)
        if self._paused and self._made - self._taken <= AHEAD // 2:
            self._go_on()

    def close(self) -> None:
        """Make no more."""
        self._closed = True
        if self.making.done():
            self._chunks.close()

    def _go_on(self) -> None:
        self._paused = False
        self.making = self._loop.run_in_executor(None, self._make)
        self.making.add_done_callback(self._stopped)

    def _make(self) -> bool:
        """In a thread. → Whether there are no more chunks."""
        for chunk in self._chunks:
            self._made += len(chunk)
            self._loop.call_soon_threadsafe(self.ready.put_nowait, chunk)
            if self._closed or self._made - self._taken >= AHEAD:
                return False
        return True

    def _stopped(self, making: "asyncio.Future[bool]") -> None:
        if self._closed:
            self._chunks.close()
        elif making.exception() is not None or making.result():
            self.ready.put_nowait(None)
        else:
            self._paused = True
            self.take(b"")
