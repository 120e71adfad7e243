"""Where a run begins that was told to load nothing (checkpoint.load=none), so that its own restarts lose nothing.

<run.dir>/fresh_start.json says which checkpoints were there before it, and who began. The launcher writes it, and keeps
it at a restart of the ranks and at a requeue of its SLURM job, or of a chain of jobs; every other start with
checkpoint.load=none begins again.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter, ValidationError

from megads.checkpoint.config import EVERYTHING, History, list_checkpoints
from megads.checkpoint.local import forget
from megads.checkpoint.manifest import read_sequence
from megads.checkpoint.rank_file import STRICT, Count
from megads.runtime import environment
from megads.runtime.files import atomic_writer, read_regular
from megads.runtime.lease import current_holder, machine_id, process_birth

FRESH_START_FILE = "fresh_start.json"


@dataclass(frozen=True)
class _Starter:
    """Who starts a run.

    Attributes:
        launcher: names the process, over machines and reboots.
        series: the SLURM job, or the array of a chain; empty outside of SLURM.
        attempt: the job and how often it was requeued before.
    """

    launcher: str
    series: str
    attempt: str


@dataclass(frozen=True)
class _FreshStart(_Starter):
    """fresh_start.json.

    Attributes:
        start: number of its lease.
        sequence: of the newest checkpoint that was there before; 0: there was none.
        unreadable: names of those that were there with a damaged manifest.
    """

    __pydantic_config__: ClassVar = STRICT

    start: Count
    sequence: Count
    unreadable: tuple[str, ...]


_FRESH_START = TypeAdapter(_FreshStart)


def begin_fresh_start(run_dir: Path) -> None:
    """From now on the run's own history is what comes next; the launcher holds the run directory.

    Raises:
        OSError: that cannot be written down.
    """
    sequences = {folder.name: read_sequence(folder) for folder in list_checkpoints(run_dir).values()}
    newest = max((sequence or 0 for sequence in sequences.values()), default=0)
    unreadable = tuple(name for name, sequence in sequences.items() if sequence is None)
    holder = current_holder(run_dir)
    record = _FreshStart(
        **asdict(_this_starter()), start=holder.number if holder else 0, sequence=newest, unreadable=unreadable
    )
    # Local checkpoints are of the history that is left behind.
    forget(run_dir)
    with atomic_writer(run_dir / FRESH_START_FILE) as file:
        file.write(json.dumps(asdict(record)).encode())


def forget_fresh_start(run_dir: Path) -> None:
    """A start that may go on from every checkpoint ends the history of its own that the last one had."""
    (run_dir / FRESH_START_FILE).unlink(missing_ok=True)


def continues_fresh_start(run_dir: Path) -> bool:
    """Whether this process, or an earlier attempt of its SLURM job or chain, began the run's own history."""
    began, now = _read(run_dir), _this_starter()
    if began is None:
        return False
    is_requeued = now.series != "" and began.series == now.series and began.attempt != now.attempt
    return is_requeued or began.launcher == now.launcher


def leaves_a_ledger(load: str, run_dir: Path, start: int | None) -> bool:
    """Whether what metrics.jsonl holds is of a history that checkpoint.load=none leaves behind, and not of this one.

    Args:
        load: checkpoint.load.
        run_dir: the run's folder.
        start: number of the lease of this start; None for one without.
    """
    began = _read(run_dir)
    return load == "none" and (began is None or start is None or began.start == start)


def own_history(load: str, run_dir: Path) -> History | None:
    """The checkpoints that a start may go on from which has been accepted.

    Args:
        load: checkpoint.load.
        run_dir: the run's folder.

    Returns:
        None: none at all.
    """
    return recorded_history(run_dir) if load == "none" else EVERYTHING


def recorded_history(run_dir: Path) -> History | None:
    """What has come since the last start with checkpoint.load=none; None where a later one had another value."""
    began = _read(run_dir)
    return None if began is None else History(began.sequence, began.unreadable)


def _read(run_dir: Path) -> _FreshStart | None:
    try:
        return _FRESH_START.validate_json(read_regular(run_dir / FRESH_START_FILE))
    except (OSError, ValidationError):
        return None


def _this_starter() -> _Starter:
    slurm, pid = environment.slurm_variables(), os.getpid()
    job, restarts = slurm.get("SLURM_JOB_ID", ""), slurm.get("SLURM_RESTART_COUNT", "0")
    series = f"{slurm.get('SLURM_CLUSTER_NAME', '')} {slurm.get('SLURM_ARRAY_JOB_ID', job)}" if job else ""
    return _Starter(f"{machine_id()} {pid} {process_birth(pid)}", series, f"{job} {restarts}")
