"""Keeps each rank of a machine on cores of its own, so that its threads and memory stay together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megads.runtime.environment import available_core_numbers

_CORES = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")


def bind_to_share(local_rank: int, local_world_size: int) -> list[int]:
    """Binds all threads of this process, and those to come, to one rank's share of the cores that it may run on.

    Args:
        local_rank: of this process among the ranks of its machine.
        local_world_size: ranks of the machine.

    Returns:
        The cores, as the kernel numbers them; empty where there are fewer cores than ranks, and nothing is bound.
    """
    own = share_of(available_core_numbers(), local_rank, local_world_size)
    if own:
        for task in _TASKS.iterdir():
            # A thread may have ended since it was listed.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), own)
    return own


def share_of(cores: Sequence[int], local_rank: int, local_world_size: int, folder: Path = _CORES) -> list[int]:
    """One of equal shares of the cores; those left over stay idle, as all ranks must have as many threads.

    Neighbours in a share are neighbours in the machine: by socket, die and core. The kernel numbers the second threads
    of all cores after the first ones, so that equal runs of its numbers would put two ranks on every core.

    Args:
        cores: as the kernel numbers them.
        local_rank: whose share.
        local_world_size: how many there are.
        folder: where the kernel describes the cores.
    """
    width = len(cores) // local_world_size
    ordered = sorted(cores, key=lambda core: (*_place(folder / f"cpu{core}" / "topology"), core))
    return sorted(ordered[local_rank * width : (local_rank + 1) * width])


def _place(folder: Path) -> tuple[int, ...]:
    """Socket, die and core of a thread; zeros for what the kernel does not say."""
    found = []
    for name in ("physical_package_id", "die_id", "core_id"):
        try:
            found.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            found.append(0)
    return tuple(found)
