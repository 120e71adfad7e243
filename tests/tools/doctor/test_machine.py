"""Checks of cores, memory, limits, clocks and real disks."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from megads.ops import processor
from megads.tools.doctor import machine
from megads.tools.doctor.finding import Finding, Status
from megads.tools.doctor.machine import check_disk, cpu_quota, file_system, memory_limit_bytes


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_version_2_takes_the_tightest_limit_above(tmp_path: Path) -> None:
    """Catches a limit missed because SLURM sets it on the job's cgroup, not on the step's."""
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
            "sys/fs/cgroup/slurm/job_1/step_0/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slurm/job_1/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/slurm/job_1/memory.max": "2147483648\n",
            "sys/fs/cgroup/slurm/memory.max": "max\n",
        },
    )
    assert cpu_quota(root) == 1.5
    assert memory_limit_bytes(root) == 2**31


def test_inside_a_container_only_the_top_is_visible(tmp_path: Path) -> None:
    """Catches a cgroup path of the host that does not exist inside the container."""
    root = plant(
        tmp_path,
        {"proc/self/cgroup": "0::/../../docker/abc\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
    )
    assert cpu_quota(root) == 0.5


def test_version_1(tmp_path: Path) -> None:
    """Catches cgroup v1's huge number for "no limit" taken as a limit, and its -1 for "no quota"."""
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n2:freezer:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": "1073741824\n",
            "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit_bytes(root) == 2**30
    assert cpu_quota(root) == 2.0


def test_no_cgroups(tmp_path: Path) -> None:
    """Catches a crash on a kernel without cgroups."""
    assert cpu_quota(tmp_path) is None
    assert memory_limit_bytes(tmp_path) is None


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_cpu_quota_below_the_cores_is_a_note(tmp_path: Path) -> None:
    """Catches ranks that start 64 threads in a container with two CPUs."""
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    found = only(machine.check_cores(root))
    assert found.status == Status.note and "0.5 CPUs" in found.found and "threads_per_rank" in found.remedy
    assert only(machine.check_cores(tmp_path / "none")).status == Status.ok


def test_load() -> None:
    """Catches a slow start that is blamed on the disk while the machine is busy."""
    assert only(machine.check_load(0.1)).status == Status.ok
    assert only(machine.check_load(1000.0)).status == Status.note
    assert "load average" in only(machine.check_load()).found


def test_processor_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CPU without bf16 units of which nothing is said, and a missing compiler, which makes it slow there."""
    monkeypatch.setattr(processor, "torch_loops_over_bf16", lambda: True)
    monkeypatch.setattr(machine, "torch_loops_over_bf16", lambda: True)
    found = only(machine.check_processor())
    assert found.status == Status.ok and "megads' kernels multiply it in fp32" in found.found
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = only(machine.check_processor())
    assert found.status == Status.note and "PyTorch's fp32 GEMMs multiply it in fp32" in found.found
    assert "no-such-compiler" in found.remedy


def test_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches OMP_NUM_THREADS that is silently ignored."""
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
    """Catches a crash if /dev/shm is missing."""
    assert only(machine.check_shared_memory(tmp_path / "none")).status == Status.note
    assert "GiB" in only(machine.check_shared_memory(tmp_path)).found


def test_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    """Catches a doctor that creates the folder, or leaves its test file behind."""
    (finding,) = check_disk("runs", tmp_path / "runs" / "a", needed=True)
    assert "free, writes" in finding.found and "fsync" in finding.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("needed", "status"), [(True, Status.problem), (False, Status.note)])
def test_a_place_where_nothing_can_be_written(needed: bool, status: Status) -> None:
    """Catches a run that starts and fails at its first write; not even root can write to /proc."""
    (finding,) = check_disk("runs", Path("/proc/megads-runs"), needed)
    assert finding.status == status and "cannot be written" in finding.found


def test_memory_is_no_disk() -> None:
    """Catches checkpoints on tmpfs, which are lost after a reboot."""
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    (finding,) = check_disk("runs", Path("/dev/shm"), needed=True)
    assert finding.status != Status.ok


def test_file_system_takes_the_innermost_mount(tmp_path: Path) -> None:
    """Catches /data taken for the mount point of /database, and a space in a mount point."""
    mounts = tmp_path / "mounts"
    mounts.write_text("x / ext4 rw 0 0\nx /data nfs4 rw 0 0\nx /data/my\\040runs lustre rw 0 0\n")
    for folder, kind in (("/database", "ext4"), ("/data/a", "nfs4"), ("/data/my runs/b", "lustre")):
        assert file_system(Path(folder), mounts) == kind
    assert file_system(tmp_path, tmp_path / "none") == "unknown"
