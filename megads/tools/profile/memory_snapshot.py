"""Snapshots of GPU memory (logging.memory_snapshot): allocations and Python stacks, for pytorch.org/memory_viz."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megads.api import atomic_writer
from megads.tools.profile.trace_files import TRACES_FOLDER

_MOST_ENTRIES = 100_000
"""Number of allocations and frees in a snapshot, the last ones; what is allocated is in it anyway."""
_log = logging.getLogger(__name__)


def snapshot_path(trace: Path) -> Path:
    """Returns the path of the snapshot that belongs to a trace."""
    return trace.with_name(trace.name.removesuffix(".json.gz") + ".memory.pickle")


def oom_path(run_dir: Path, start: int | None, rank: int) -> Path:
    """Returns the path of the snapshot of a rank that ran out of memory.

    Args:
        run_dir: the run directory.
        start: number of the run's start.
        rank: the rank.
    """
    return run_dir / TRACES_FOLDER / f"out_of_memory.start_{start or 0:05d}.rank_{rank:05d}.memory.pickle"


def start() -> None:
    """Records the allocations of this process from now on."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ENTRIES)


def stop() -> None:
    """Stops recording, and forgets what was recorded."""
    torch.cuda.memory._record_memory_history(enabled=None)


def dump(path: Path) -> None:
    """Writes a snapshot at once; its folder is created.

    Raises:
        OSError: the disk is full, or the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # torch takes a path only, and opens the temporary file again.
    with atomic_writer(path) as file:
        torch.cuda.memory._dump_snapshot(file.name)


@contextmanager
def recorded(path: Path) -> Iterator[None]:
    """Records allocations inside the block, and writes a snapshot if it runs out of GPU memory.

    Args:
        path: file of that snapshot.
    """
    start()
    try:
        yield
    except torch.OutOfMemoryError as error:
        try:
            dump(path)
            error.add_note(f"a snapshot of the GPU's memory is in {path}: drop it on pytorch.org/memory_viz")
        except OSError as failure:
            # It must not hide the failure that it is about.
            _log.warning("the snapshot of the GPU's memory was not written: %s", failure)
        raise
    finally:
        stop()
