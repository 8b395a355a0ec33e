"""What other programs take of the cores while something is measured, so that a figure from a busy machine shows as one."""

import os
import time
from contextlib import suppress
from pathlib import Path

STAT = Path("/proc/stat")
TICK = os.sysconf("SC_CLK_TCK")


def machine_ticks() -> int:
    """Clock ticks that the machine's cores were busy, or taken away by the hypervisor, since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return user + nice + system + irq + softirq + steal


def own_ticks() -> int:
    """Clock ticks of this process and all that it started, those that have ended included."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    mine, more = set(), {os.getpid()}
    while more:
        mine |= more
        more = {pid for pid, parent in parents.items() if parent in mine} - mine
    return sum(ticks.get(pid, 0) for pid in mine)


class Neighbours:
    """Counts the cores that everybody else keeps busy; nothing where there is no /proc.

    Args:
        patience: seconds in all that `wait` may wait for them to be quiet.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._mark = self._now()

    def _now(self) -> tuple[float, int]:
        return time.monotonic(), machine_ticks() - own_ticks() if STAT.exists() else 0

    def mark(self) -> None:
        """Count from here on."""
        self._mark = self._now()

    def cores(self) -> float:
        """Cores kept busy by others since the mark, on average."""
        (start, before), (end, after) = self._mark, self._now()
        return max(0.0, (after - before) / TICK / max(end - start, 1e-3))

    def wait(self) -> None:
        """Until others leave all but a seventh of a core alone for half a second, or the patience is used up. Moves no mark."""
        mark = self._mark
        while self.patience > 0:
            self.mark()
            time.sleep(0.5)
            self.patience -= 0.5
            if self.cores() < 0.15:
                break
        self._mark = mark
