"""Cores, memory, limits and clocks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megads.resilience.doctor import machine
from megads.resilience.doctor.finding import Finding, Status
from tests.resilience.doctor.test_cgroup import plant


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_cpu_quota_below_the_cores_is_a_note(tmp_path: Path) -> None:
    """Catches ranks that start 64 threads on a container's two CPUs."""
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    found = only(machine.check_cores(root))
    assert found.status == Status.note and "0.5 CPUs" in found.found and "threads_per_rank" in found.remedy
    assert only(machine.check_cores(tmp_path / "none")).status == Status.ok


def test_load() -> None:
    """Catches a slow start on a busy machine that is blamed on the disk."""
    assert only(machine.check_load(0.1)).status == Status.ok
    assert only(machine.check_load(1000.0)).status == Status.note
    assert "processes want to run" in only(machine.check_load()).found


def test_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a user who believes that OMP_NUM_THREADS counts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS=3" in only(machine.check_threads()).found
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert only(machine.check_threads()).status == Status.ok


def test_memory_limits(tmp_path: Path) -> None:
    """Catches a run that a container's limit kills while the machine has memory."""
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{2**31}\n"})
    found = only(machine.check_memory(root))
    assert found.status == Status.note and "limit is 2.0 GiB" in found.found
    (root / "sys" / "fs" / "cgroup" / "memory.max").write_text(f"{2**29}\n")
    assert only(machine.check_memory(root)).status == Status.problem


def test_open_files() -> None:
    """Catches a limit that a hundred ranks would reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = only(machine.check_open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.status == Status.note and found.found.startswith("512") and found.remedy.startswith("ulimit -n")


def test_kernel_settings(tmp_path: Path) -> None:
    """Catches a setting read from the wrong word of the file."""
    root = plant(
        tmp_path,
        {
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n",
        },
    )
    assert only(machine.check_huge_pages(root)).status == Status.note
    assert only(machine.check_clock(root)).status == Status.note
    assert machine.check_huge_pages(tmp_path / "none") == []
    assert only(machine.check_clock()).status in (Status.ok, Status.note)


def test_shared_memory(tmp_path: Path) -> None:
    """Catches a crash where /dev/shm is missing."""
    assert only(machine.check_shared_memory(tmp_path / "none")).status == Status.note
    assert "GiB" in only(machine.check_shared_memory(tmp_path)).found
