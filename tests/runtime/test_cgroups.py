"""Tests the limits of cgroups, of both versions."""

from __future__ import annotations

from pathlib import Path

from megads.runtime.cgroups import cpu_quota, memory_limit_bytes
from megads.runtime.environment import available_core_numbers, available_cores


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


def test_version_1_without_limit_is_recognized(tmp_path: Path) -> None:
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


def test_a_kernel_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    """Catches a crash on a kernel without cgroups."""
    assert cpu_quota(tmp_path) is None
    assert memory_limit_bytes(tmp_path) is None


def test_a_quota_limits_the_threads(tmp_path: Path) -> None:
    """Catches ranks that start 64 threads in a container with two CPUs, and none where the quota is half a CPU."""
    cores = len(available_core_numbers())
    root = plant(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert available_cores(root) == 1
    plant(root, {"sys/fs/cgroup/cpu.max": f"{cores * 100000 + 1} 100000\n"})
    assert available_cores(root) == cores
    plant(root, {"sys/fs/cgroup/cpu.max": "max 100000\n"})
    assert available_cores(root) == cores
