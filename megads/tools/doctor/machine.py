"""Cores, memory, limits and clocks of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from megads.runtime.environment import available_cores, thread_settings
from megads.tools.doctor.finding import Finding, note, ok, problem, size

# cgroup v1 writes "no limit" as the largest multiple of a page.
_UNLIMITED_BYTES = 2**60


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the CPUs' worth of time that this process may use, or None without a limit.

    Args:
        root: where /proc and /sys are.
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
    """Returns the memory above which this process is killed, or None without a limit.

    Args:
        root: where /proc and /sys are.
    """
    limits = []
    for folder in _folders(root, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
            limits.append(int(limit))
    return min(limits, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the control folders of this process and of all above it: every one of them limits it."""
    base = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = base / controller if controllers else base
        folder = top / path.lstrip("/")
        # Inside a container the path is the host's: only the top is there.
        while folder != top:
            yield folder
            folder = folder.parent
        yield top


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# An imported torch and DeepSpeed take about half of it in every rank.
_LEAST_MEMORY_BYTES = 2**30
_LEAST_SHARED_MEMORY_BYTES = 2**30
_LEAST_OPEN_FILES = 4096
# Load per core above which others are in the way.
_BUSY = 1.5
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def check_cores(root: Path = Path("/")) -> list[Finding]:
    """Compares the cores that this process sees with the CPU time that it gets."""
    cores, quota = available_cores(), cpu_quota(root)
    found = f"{cores} core{'s' if cores > 1 else ''} for this process"
    if quota is None or quota >= cores:
        return [ok("cores", found)]
    threads = max(1, int(quota))
    return [
        note(
            "cores",
            f"{found}, but the cgroup's quota is {quota:.1f} CPUs",
            "ranks start as many threads as there are cores, and all stand still while the quota is used up",
            f"give the container {cores} CPUs, or let all ranks together have {threads}: cluster.threads_per_rank",
        )
    ]


def check_load(load: float | None = None) -> list[Finding]:
    """Compares the processes that want to run with the cores.

    Args:
        load: their number, averaged over a minute; None asks the kernel.
    """
    load = os.getloadavg()[0] if load is None else load
    cores = available_cores()
    found = f"{load:.1f} processes want to run on {cores} cores (last minute)"
    if load <= _BUSY * cores:
        return [ok("load", found)]
    cost = f"everything takes about {load / cores:.0f} times as long, the times that are given here too"
    return [note("load", found, cost, "wait for other programs or end them; top shows them")]


def check_threads() -> list[Finding]:
    """Finds thread counts in the environment that megads does not follow."""
    given = ", ".join(f"{name}={value}" for name, value in thread_settings().items())
    if not given:
        return [ok("threads", "the cores are shared out over the ranks (no OMP_NUM_THREADS)")]
    return [
        note(
            "threads",
            f"{given} is set",
            "megads train gives every rank its own thread count and overrides it; only other verbs follow it",
            "set cluster.threads_per_rank instead, or unset it",
        )
    ]


def check_memory(root: Path = Path("/")) -> list[Finding]:
    """Checks free memory and the cgroup's limit."""
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit_bytes(root)
    free = memory.available if limit is None else min(memory.available, limit)
    found = f"{size(memory.available)} free of {size(memory.total)}"
    if limit is not None and limit < memory.total:
        found += f", the cgroup's limit is {size(limit)}"
    if free < _LEAST_MEMORY_BYTES:
        return [problem("memory", found, "a single rank does not fit", "end other programs, or raise the limit")]
    if limit is not None and limit < memory.total:
        cost = "a run that exceeds the limit is killed without a message (exit -9), though the machine has memory"
        return [note("memory", found, cost, "raise the limit of the container or job (SLURM: --mem)")]
    return [ok("memory", found)]


def check_shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks the size of the shared memory that NCCL uses between the GPUs of one node."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError:
        cost = "NCCL cannot use it between the GPUs of this node"
        return [note("shared memory", f"no {folder}", cost, "mount a tmpfs there")]
    found = f"{size(total)} at {folder}"
    if total >= _LEAST_SHARED_MEMORY_BYTES:
        return [ok("shared memory", found)]
    cost = "NCCL needs more with several GPUs, and fails with a bus error or 'unhandled system error'"
    return [note("shared memory", found, cost, "docker run --shm-size=8g, or --ipc=host")]


def check_open_files() -> list[Finding]:
    """Checks how many files and sockets a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft} (ulimit -n)"
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_OPEN_FILES:
        return [ok("open files", found)]
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    cost = "a rank opens several sockets to every other one: about a hundred ranks would reach the limit"
    return [note("open files", found, cost, f"ulimit -n {most if most.isdigit() else 65536} (up to {most} is allowed)")]


def check_huge_pages(root: Path = Path("/")) -> list[Finding]:
    """Checks whether the kernel backs large tensors with large pages."""
    path = root / "sys" / "kernel" / "mm" / "transparent_hugepage" / "enabled"
    try:
        text = path.read_text()
    except OSError:
        return []
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen != "never":
        return [ok("huge pages", f"transparent huge pages: {chosen}")]
    cost = "large tensors on the CPU take a page fault every 4 KiB"
    return [note("huge pages", "transparent huge pages: never", cost, f"echo madvise > {path} (as root)")]


def check_clock(root: Path = Path("/")) -> list[Finding]:
    """Checks that time goes forward and is cheap to read."""
    readings = [time.monotonic_ns() for _ in range(1000)]
    if readings != sorted(readings) or not time.get_clock_info("monotonic").monotonic:
        cost = "timeouts fire at the wrong moment, and step times are meaningless"
        return [
            problem("clock", "the monotonic clock goes backward", cost, "choose another clock source for the kernel")
        ]
    source = root / "sys" / "devices" / "system" / "clocksource" / "clocksource0" / "current_clocksource"
    name = source.read_text().strip() if source.is_file() else "unknown"
    if name in _SLOW_CLOCKS:
        cost = "every reading of the time is a slow system call; profiles and timers are blurred"
        return [note("clock", f"monotonic, from {name}", cost, f"echo tsc > {source} (as root), if it is offered")]
    return [ok("clock", f"monotonic, from {name}")]
