"""The disks that runs and caches are written to: space, and the speed of what a checkpoint does to them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from megads.tools.doctor.finding import Finding, Status, note, ok, problem, size

_CHUNK_BYTES = 2**20
_MOST_BYTES = 64 * 2**20
_WRITE_S = 0.25
_SYNC_S = 0.15
_FULL_BYTES = 200 * 2**20
_NEARLY_FULL_BYTES = 5 * 2**30
_SLOW_BYTES_PER_S = 50e6
_SLOW_SYNC_S = 0.1


class _Speed(NamedTuple):
    bytes_per_s: float
    sync_s: float


def check_disk(check: str, folder: Path, needed: bool) -> list[Finding]:
    """Checks space and speed of the disk below a folder; makes nothing that it does not remove.

    Args:
        check: what to call it.
        folder: need not exist yet.
        needed: training is impossible when it cannot be written.
    """
    there = _nearest_folder(folder)
    try:
        free = shutil.disk_usage(there).free
        speed = _measure(there)
    except OSError as error:
        cost = "no run can write there" if needed else "nothing is cached: index maps are built anew every time"
        status = Status.problem if needed else Status.note
        found = f"{there} cannot be written to: {error.strerror or error}"
        return [Finding(check, status, found, cost, "choose another folder, or change its owner")]
    kind = file_system(there)
    found = (
        f"{there} ({kind}): {size(free)} free, writes {speed.bytes_per_s / 1e6:,.0f} MB/s, "
        f"fsync {1000 * speed.sync_s:.1f} ms"
    )
    if needed and free < _FULL_BYTES:
        return [problem(check, found, "a checkpoint does not fit", "free space, or set run.dir to another disk")]
    if needed and free < _NEARLY_FULL_BYTES:
        cost = "a checkpoint takes 14 bytes a parameter: 1.4 GB for 100 M parameters, and two are kept"
        return [note(check, found, cost, "free space, or set run.dir to another disk")]
    if needed and kind in ("tmpfs", "ramfs"):
        cost = "what runs leave is in memory: it takes memory from training and is gone after a restart"
        return [note(check, found, cost, "set run.dir to a disk")]
    if speed.bytes_per_s < _SLOW_BYTES_PER_S or speed.sync_s > _SLOW_SYNC_S:
        seconds = 1e9 / speed.bytes_per_s
        cost = f"a checkpoint of 1 GB takes {seconds:.0f} s to write, every small file {speed.sync_s:.2f} s"
        return [note(check, found, cost, "use a local or parallel file system, or save less often")]
    return [ok(check, found)]


def _nearest_folder(folder: Path) -> Path:
    """Returns the folder, or what exists of its path."""
    folder = folder.expanduser().absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _measure(folder: Path) -> _Speed:
    """Writes what a checkpoint writes, on a small scale: one large file, and small ones that are synced one by one."""
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
    return _Speed(bytes_per_s, sorted(syncs)[len(syncs) // 2])


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Returns the kind of file system that a folder is on, "unknown" where the machine does not tell."""
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
