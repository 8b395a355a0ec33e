"""Memory goes back to the system once the work is done, and now and then while there is work."""

import asyncio

from service.machine import give_back

AFTER = 10.0
"""Seconds from a request until what it left goes back: memory taken anew costs a large batch 10 ms, so not after each."""


class Leftovers:
    """One timer, set by the first request after it was last due. Without requests there is nothing to do, and nothing is done."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def note(self) -> None:
        """A request has been answered."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(AFTER, self._go, loop)

    def _go(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        loop.run_in_executor(None, give_back)
