"""What the process may use of the machine: affinity and cgroup, made up in a temporary folder."""

import asyncio
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service import machine
from service.app import create_app
from service.leftovers import Leftovers
from service.settings import Settings
from tests.server import ROOT


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup, and an affinity of 8 cores."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def version_1(group: Path, quota: int) -> None:
    """The quota as version 1 has it."""
    (group / "cpu").mkdir()
    (group / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")


def test_without_a_cgroup_the_affinity_counts(group: Path) -> None:
    assert machine.cores() == 8


@pytest.mark.parametrize(
    ("line", "cores"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("100000 50000", 2),
        ("", 8),
    ],
)
def test_the_quota_of_version_2(group: Path, line: str, cores: int) -> None:
    """Parts of a core do not count, except for the first."""
    (group / "cpu.max").write_text(line + "\n")
    assert machine.cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 8), (300_000, 3), (199_999, 1), (20_000, 1), (10_000_000, 8)])
def test_the_quota_of_version_1(group: Path, quota: int, cores: int) -> None:
    version_1(group, quota)
    assert machine.cores() == cores


def test_version_2_goes_before_version_1(group: Path) -> None:
    (group / "cpu.max").write_text("200000 100000\n")
    version_1(group, 500_000)
    assert machine.cores() == 2


def test_the_affinity_cuts_the_quota(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (group / "cpu.max").write_text("600000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine.cores() == 2


def test_a_system_without_affinity_has_all_its_cores(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.cores() == 6


PREPARED = """
import os, sys
from service.machine import prepare
prepare(1)
assert "torch" not in sys.modules
import torch
names = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "GOMP_SPINCOUNT")
print(torch.get_num_threads(), *(os.environ.get(name) for name in names))
"""


def prepared(**given: str) -> list[str]:
    """torch's threads, OMP_NUM_THREADS, TOKENIZERS_PARALLELISM and GOMP_SPINCOUNT in a new process after prepare(1)."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_", "TOKENIZERS_"))}
    out = subprocess.run([sys.executable, "-c", PREPARED], cwd=ROOT, env={**clean, **given}, capture_output=True, text=True, check=True)
    return out.stdout.split()


def test_torch_takes_the_threads_that_were_prepared() -> None:
    assert prepared() == ["1", "1", "false", "10000"]


def test_what_the_environment_says_stays() -> None:
    assert prepared(OMP_NUM_THREADS="2", TOKENIZERS_PARALLELISM="true", GOMP_SPINCOUNT="7")[1:] == ["2", "true", "7"]
    assert prepared(OMP_WAIT_POLICY="PASSIVE")[3] == "None"


GIVEN_BACK = """
from pathlib import Path
from service.machine import give_back, prepare
prepare(1)
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 2**20
pieces = [bytearray(2**20) for _ in range(100)]
for piece in pieces:
    piece[:] = bytes([1]) * len(piece)
full = resident()
del pieces[:-1]  # the last one holds the heap's end
free = resident()
give_back()
print(full - free, free - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_is_free_between_what_is_used_is_given_back() -> None:
    out = subprocess.run([sys.executable, "-c", GIVEN_BACK], cwd=ROOT, capture_output=True, text=True, check=True)
    alone, given_back = map(int, out.stdout.split())
    assert alone < 10
    assert given_back > 85


def test_leftovers_go_back_once_for_many_requests_and_again_for_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr("service.leftovers.AFTER", 0.05)
    monkeypatch.setattr("service.leftovers.give_back", lambda: threads.append(threading.current_thread().name))

    async def work() -> list[int]:
        counts = []
        leftovers = Leftovers()
        for requests in (5, 1, 0):
            for _ in range(requests):
                leftovers.note()
            counts.append(len(threads))
            await asyncio.sleep(0.3)
        return [*counts, len(threads)]

    assert asyncio.run(work()) == [0, 1, 2, 2]
    assert threading.main_thread().name not in threads


def test_requests_are_noted_and_operations_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    monkeypatch.setattr(Leftovers, "note", lambda self: noted.append(1))
    client = TestClient(create_app(Settings()))  # not started: no model is loaded
    assert client.get("/livez").status_code == 200
    assert noted == []
    assert client.post("/attend", json={"text": "a"}).status_code == 503
    assert noted == [1]
