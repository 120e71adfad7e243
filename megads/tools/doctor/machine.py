"""Checks of cores, memory, limits, clocks and disks of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from megads.api import (
    KernelsUnavailable,
    available_core_numbers,
    available_cores,
    describe_gemm,
    gib,
    requested_threads,
)
from megads.ops.build import find_compiler
from megads.ops.processor import torch_loops_over_bf16
from megads.runtime.cgroups import cpu_quota, memory_limit_bytes
from megads.runtime.environment import explicit_thread_counts
from megads.tools.doctor.finding import Finding, Status, note, ok, problem

# In every rank the imported torch and DeepSpeed take about half of this.
_LEAST_MEMORY_BYTES = 2**30
_LEAST_SHARED_MEMORY_BYTES = 2**30
_LEAST_OPEN_FILES = 4096
# Load per core above which other processes slow down training.
_BUSY = 1.5
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def check_cores(root: Path = Path("/")) -> list[Finding]:
    """Compares the cores that this process may use with the cgroup's CPU quota."""
    cores, quota = len(available_core_numbers()), cpu_quota(root)
    found = f"{cores} core{'s' if cores > 1 else ''} for this process"
    if quota is None or quota >= cores:
        return [ok("cores", found)]
    found += f", but the cgroup's quota is {quota:.1f} CPUs"
    used = available_cores(root)
    if quota >= 1:
        return [ok("cores", f"{found}: all ranks together get {used} thread{'s' if used > 1 else ''}")]
    cost = "every process is throttled once the quota is used up, even with one thread"
    return [note("cores", found, cost, "give the container at least one CPU")]


def check_processor() -> list[Finding]:
    """Reports the instruction sets for GEMMs; on CPUs without bf16 units bf16 needs megads' kernels to be fast."""
    try:
        find_compiler()
    except KernelsUnavailable as reason:
        if torch_loops_over_bf16():
            cost = "PyTorch converts the operands of every bf16 GEMM to fp32 and the result back"
            return [note("processor", describe_gemm(bf16=True, kernels=False), cost, str(reason))]
    return [ok("processor", describe_gemm(bf16=True, kernels=True))]


def check_load(load: float | None = None) -> list[Finding]:
    """Compares the load average with the number of cores.

    Args:
        load: runnable processes, averaged over a minute; None reads the kernel's value.
    """
    load = os.getloadavg()[0] if load is None else load
    cores = available_cores()
    found = f"load average {load:.1f} on {cores} cores (last minute)"
    if load <= _BUSY * cores:
        return [ok("load", found)]
    cost = f"everything takes about {load / cores:.0f} times as long, including the times measured here"
    return [note("load", found, cost, "wait for other programs or end them; top lists them")]


def check_threads() -> list[Finding]:
    """Checks for thread counts in the environment."""
    given = explicit_thread_counts()
    if not given:
        return [ok("threads", "cores are divided among the ranks (no OMP_NUM_THREADS)")]
    found = f"{', '.join(f'{name}={value}' for name, value in given.items())} is set"
    if "OMP_NUM_THREADS" in given:
        cost = f"every rank gets {requested_threads()} threads, however many cores there are"
    else:
        cost = "megads train overrides it with the thread count of each rank; only other verbs use it"
    return [note("threads", found, cost, "set cluster.threads_per_rank, which takes precedence, or unset it")]


def check_memory(root: Path = Path("/")) -> list[Finding]:
    """Checks free memory and the cgroup's limit."""
    import psutil

    memory = psutil.virtual_memory()
    limit = memory_limit_bytes(root)
    free = memory.available if limit is None else min(memory.available, limit)
    found = f"{gib(memory.available)} free of {gib(memory.total)}"
    if limit is not None and limit < memory.total:
        found += f", the cgroup's limit is {gib(limit)}"
    if free < _LEAST_MEMORY_BYTES:
        return [problem("memory", found, "a single rank does not fit", "end other programs, or raise the limit")]
    if limit is not None and limit < memory.total:
        cost = "a run that exceeds the limit is killed without a message (exit -9), even if the machine has free memory"
        return [note("memory", found, cost, "raise the limit of the container or job (SLURM: --mem)")]
    return [ok("memory", found)]


def check_shared_memory(folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Checks the size of the shared memory that NCCL uses between the GPUs of one node."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError:
        cost = "NCCL cannot use it between the GPUs of this node"
        return [note("shared memory", f"no {folder}", cost, "mount a tmpfs there")]
    found = f"{gib(total)} at {folder}"
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
    cost = "a rank opens several sockets to every other rank: about a hundred ranks would reach the limit"
    return [note("open files", found, cost, f"ulimit -n {most if most.isdigit() else 65536} (up to {most} is allowed)")]


def check_huge_pages(root: Path = Path("/")) -> list[Finding]:
    """Checks whether transparent huge pages are enabled."""
    path = root / "sys" / "kernel" / "mm" / "transparent_hugepage" / "enabled"
    try:
        text = path.read_text()
    except OSError:
        return []
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen != "never":
        return [ok("huge pages", f"transparent huge pages: {chosen}")]
    cost = "large CPU tensors cause one page fault per 4 KiB"
    return [note("huge pages", "transparent huge pages: never", cost, f"echo madvise > {path} (as root)")]


def check_clock(root: Path = Path("/")) -> list[Finding]:
    """Checks that the monotonic clock does not go backward and is cheap to read."""
    readings = [time.monotonic_ns() for _ in range(1000)]
    if readings != sorted(readings) or not time.get_clock_info("monotonic").monotonic:
        cost = "timeouts fire at the wrong moment, and step times are meaningless"
        remedy = "choose another clock source for the kernel"
        return [problem("clock", "the monotonic clock goes backward", cost, remedy)]
    source = root / "sys" / "devices" / "system" / "clocksource" / "clocksource0" / "current_clocksource"
    name = source.read_text().strip() if source.is_file() else "unknown"
    if name in _SLOW_CLOCKS:
        cost = "every clock read is a slow system call; profiles and timers are inaccurate"
        return [note("clock", f"monotonic, from {name}", cost, f"echo tsc > {source} (as root), if available")]
    return [ok("clock", f"monotonic, from {name}")]


_CHUNK_BYTES = 2**20
_MOST_BYTES = 64 * 2**20
_WRITE_S = 0.25
_SYNC_S = 0.15
_FULL_BYTES = 200 * 2**20
_NEARLY_FULL_BYTES = 5 * 2**30
_SLOW_BYTES_PER_S = 50e6
_SLOW_SYNC_S = 0.1


def check_disk(check: str, folder: Path, needed: bool) -> list[Finding]:
    """Checks free space and write speed of a folder's disk; leaves no files.

    Args:
        check: name of the check.
        folder: folder to check; need not exist yet.
        needed: whether training is impossible if the folder cannot be written to.
    """
    absolute = folder.expanduser().absolute()
    there = next(path for path in (absolute, *absolute.parents) if path.is_dir())
    try:
        free = shutil.disk_usage(there).free
        bytes_per_s, sync_s = _measure(there)
    except OSError as error:
        cost = "no run can write there" if needed else "nothing is cached: index maps are rebuilt every time"
        status = Status.problem if needed else Status.note
        found = f"{there} cannot be written to: {error.strerror or error}"
        return [Finding(check, status, found, cost, "choose another folder, or change its owner")]
    kind = file_system(there)
    found = f"{there} ({kind}): {gib(free)} free, writes {bytes_per_s / 1e6:,.0f} MB/s, fsync {1000 * sync_s:.1f} ms"
    if needed and free < _FULL_BYTES:
        return [problem(check, found, "a checkpoint does not fit", "free space, or set run.dir to another disk")]
    if needed and free < _NEARLY_FULL_BYTES:
        cost = "a checkpoint takes 14 bytes per parameter: 1.4 GB for 100 M parameters, and two are kept"
        return [note(check, found, cost, "free space, or set run.dir to another disk")]
    if needed and kind in ("tmpfs", "ramfs"):
        cost = "files of runs are in memory: they reduce the memory for training and are lost after a reboot"
        return [note(check, found, cost, "set run.dir to a disk")]
    if bytes_per_s < _SLOW_BYTES_PER_S or sync_s > _SLOW_SYNC_S:
        seconds = 1e9 / bytes_per_s
        cost = f"writing a checkpoint of 1 GB takes {seconds:.0f} s, and every small file {sync_s:.2f} s"
        return [note(check, found, cost, "use a local or parallel file system, or save less often")]
    return [ok(check, found)]


def _measure(folder: Path) -> tuple[float, float]:
    """Returns the speed of writing a large file, in bytes/s, and the seconds of a small write with its fsync."""
    block = os.urandom(_CHUNK_BYTES)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megads-doctor-", buffering=0) as file:
        written, start = 0, time.perf_counter()
        while written < _MOST_BYTES and time.perf_counter() - start < _WRITE_S:
            written += file.write(block)
        os.fsync(file.fileno())
        bytes_per_s = written / (time.perf_counter() - start)
        syncs: list[float] = []
        while sum(syncs) < _SYNC_S and len(syncs) < 20:
            start = time.perf_counter()
            file.write(b"x")
            os.fsync(file.fileno())
            syncs.append(time.perf_counter() - start)
    return bytes_per_s, sorted(syncs)[len(syncs) // 2]


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Returns the type of a folder's file system, or "unknown" if it cannot be determined."""
    best, kind = "", "unknown"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        # A space in a path is written as \040.
        _, point, name, *_ = line.replace("\\040", "\0").split(" ")
        point = point.replace("\0", " ")
        if folder.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, name
    return kind
