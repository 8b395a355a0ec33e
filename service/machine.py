"""What the process may use of the machine, and how the libraries below are told: before torch is imported."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Cores that this process may keep busy: its affinity, cut by the cgroup's quota (version 2 or 1), at least 1."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return max(1, min(available, int(quota) if quota >= 1 else 1)) if quota else available


def _quota() -> float | None:
    try:
        limit, period = (_CGROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        return limit_us / int((_CGROUP / "cpu/cpu.cfs_period_us").read_text()) if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def memory_limit() -> int:
    """Bytes that this process may use: the cgroup's limit (version 2 or 1), or all that the machine has."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        return min(int(limit), total) if limit.isdigit() else total
    return total


def prepare(threads: int) -> None:
    """Set what OpenMP, the tokenizers and the allocator read once, when they are loaded. What the environment sets, stays.

    - OpenMP's threads wait actively for the next piece of a forward, for a fraction of a millisecond, before they sleep. Two cores,
      p50 of one short text at a time: asleep at once (PASSIVE) 16 ms, libgomp's own 300,000 turns 13 ms, 1,000 turns 12.5, 10,000 turns
      10.3, 30,000 turns 9.9, 10 million no better and 80 ms of two cores spent after each request. An idle service uses no CPU.
      Where another program keeps the same cores busy, waiting actively costs: PASSIVE 15 ms, 1,000 turns 19, 10,000 turns 43,
      30,000 turns 86; there, set OMP_WAIT_POLICY=PASSIVE.
    - oneDNN makes a program for each number of tokens that it meets, half a megabyte and a millisecond each. Between the 1,024
      that it would keep, large batches do not find their place: with 128 1.05 GB after 6,000 requests and growing, with 32 0.84.
    - The tokenizers' own threads stay off: several requests are tokenized side by side already.
    - Few arenas, and a heap that gives back what is free above 128 MB: the vectors of a large batch, 12 MB each, are not mapped anew at
      every layer (that cost a tenth of the forward in page faults), and what a large answer took goes back to the system.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "32")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    m_trim_threshold, m_mmap_threshold, m_arena_max = -1, -3, -8
    mallopt(m_arena_max, 2)
    mallopt(m_mmap_threshold, 16 * 2**20)
    mallopt(m_trim_threshold, 128 * 2**20)


def give_back() -> None:
    """Return to the system what the allocator keeps free between what is in use. It takes up to 10 ms; without glibc nothing happens.

    glibc 2.36 does not use a freed piece again for a tensor of the same size, since tensors are aligned (2.38 and later do): the
    heap of batches that need 25 MB came to 170 MB.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
