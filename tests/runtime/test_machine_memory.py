"""Available memory, with the cgroup files of a container laid out as the kernel does."""

from __future__ import annotations

from pathlib import Path

import psutil

from megads.runtime.machine_memory import available_memory, free_gpu_memory, oom_kills

MIB = 2**20


def cgroup(folder: Path, limit: str, usage: int, cache: int) -> None:
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon {usage - cache}\ninactive_file {cache}\n")


def member_of(tmp_path: Path, lines: str) -> Path:
    path = tmp_path / "membership"
    path.write_text(lines)
    return path


def test_this_machines_memory_is_plausible() -> None:
    """Catches available memory that is not positive or exceeds the memory of this machine."""
    assert 0 < available_memory() <= psutil.virtual_memory().total
    assert all(size > 0 for size in free_gpu_memory())


def test_the_tightest_limit_of_cgroup_v2_counts_without_page_cache(tmp_path: Path) -> None:
    """Catches a limit of an enclosing cgroup that is ignored, or page cache that counts as used."""
    root = tmp_path / "cgroup"
    cgroup(root / "outer", str(100 * MIB), 60 * MIB, 10 * MIB)
    cgroup(root / "outer" / "inner", "max", 40 * MIB, 0)
    membership = member_of(tmp_path, "0::/outer/inner\n")
    assert available_memory(root, membership) == 50 * MIB
    (root / "outer" / "inner" / "memory.max").write_text(f"{64 * MIB}\n")
    assert available_memory(root, membership) == 24 * MIB


def test_the_limit_of_cgroup_v1_counts(tmp_path: Path) -> None:
    """Catches an ignored limit of cgroup version 1, which older kernels use."""
    folder = tmp_path / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{32 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{20 * MIB}\n")
    (folder / "memory.stat").write_text(f"cache 0\ntotal_inactive_file {4 * MIB}\n")
    membership = member_of(tmp_path, "12:cpu,cpuacct:/job\n5:memory:/job\n")
    assert available_memory(tmp_path / "cgroup", membership) == 16 * MIB


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    """Catches a machine without cgroups, or with no limit in them, that is taken for one without memory."""
    total = psutil.virtual_memory().total
    assert 0 < available_memory(tmp_path / "nowhere", tmp_path / "no file") <= total
    folder = tmp_path / "cgroup" / "memory"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (folder / "memory.usage_in_bytes").write_text("4096\n")
    (folder / "memory.stat").write_text("cache 0\n")
    assert 0 < available_memory(tmp_path / "cgroup", member_of(tmp_path, "5:memory:/\n")) <= total


def test_oom_kills_of_the_own_cgroup_are_counted(tmp_path: Path) -> None:
    """Catches OOM kills of another cgroup, a version 1 count that is not read, and a number where there is no count."""
    root = tmp_path / "cgroup"
    own = root / "outer" / "inner"
    own.mkdir(parents=True)
    (root / "outer" / "memory.events").write_text("low 0\noom 9\noom_kill 9\n")
    (own / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(root, member_of(tmp_path, "0::/outer/inner\n")) == 2
    old = root / "memory" / "job"
    old.mkdir(parents=True)
    (old / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_kills(root, member_of(tmp_path, "4:memory:/job\n")) == 5
    assert oom_kills(root, member_of(tmp_path, "0::/none\n")) is None
    assert oom_kills(root, tmp_path / "nothing") is None
