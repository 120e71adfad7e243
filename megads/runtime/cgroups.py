"""Limits of this process's cgroup, of version 1 or 2: they apply in containers and to jobs of SLURM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# cgroup v1 writes "no limit" as the largest multiple of the page size.
_UNLIMITED_BYTES = 2**60


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the cgroup's CPU quota of this process, in CPUs, or None without a limit.

    Args:
        root: folder that contains proc and sys.
    """
    quotas = []
    for folder in _folders(root, "cpu"):
        limit, _, period = _read(folder / "cpu.max").partition(" ")
        if not limit:
            limit, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(limit) and int(period):
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """Returns the cgroup's memory limit of this process, or None without a limit.

    Args:
        root: folder that contains proc and sys.
    """
    limits = []
    for folder in _folders(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
            limits.append(int(limit))
    return min(limits, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroup and its ancestors; the limits of all of them apply."""
    base = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        folder = top / path.lstrip("/")
        # Inside a container the path is the host's, and only the top folder exists.
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
