"""What the process may use of the machine: affinity and cgroup, made up in a temporary folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service import machine
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
