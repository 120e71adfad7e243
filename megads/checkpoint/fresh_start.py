"""Fresh starts: where a run with checkpoint.load=none begins, so that its restarts continue from its own checkpoints.

<run.dir>/fresh_start.json records which checkpoints existed before it, and which process or job began it. The launcher
writes the file, and keeps it when ranks are restarted and when its SLURM job, or a chain of jobs, is requeued; every
other start with checkpoint.load=none is a new fresh start.
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
    """The process that starts a run.

    Attributes:
        launcher: identifies the process, unique across machines and reboots.
        series: the SLURM job, or the job array of a chain; empty outside SLURM.
        attempt: the job, and how often it was requeued.
    """

    launcher: str
    series: str
    attempt: str


@dataclass(frozen=True)
class _FreshStart(_Starter):
    """Content of fresh_start.json.

    Attributes:
        start: lease number of the fresh start.
        sequence: sequence of the newest checkpoint that existed before it; 0: there was none.
        unreadable: names of existing checkpoints with a damaged manifest.
    """

    __pydantic_config__: ClassVar = STRICT

    start: Count
    sequence: Count
    unreadable: tuple[str, ...]


_FRESH_START = TypeAdapter(_FreshStart)


def begin_fresh_start(run_dir: Path) -> None:
    """Records a fresh start: only checkpoints from now on belong to it. The launcher must hold the run directory.

    Raises:
        OSError: the record cannot be written.
    """
    sequences = {folder.name: read_sequence(folder) for folder in list_checkpoints(run_dir).values()}
    newest = max((sequence or 0 for sequence in sequences.values()), default=0)
    unreadable = tuple(name for name, sequence in sequences.items() if sequence is None)
    holder = current_holder(run_dir)
    record = _FreshStart(
        **asdict(_this_starter()), start=holder.number if holder else 0, sequence=newest, unreadable=unreadable
    )
    # Existing local checkpoints belong to the history before the fresh start.
    forget(run_dir)
    with atomic_writer(run_dir / FRESH_START_FILE) as file:
        file.write(json.dumps(asdict(record)).encode())


def forget_fresh_start(run_dir: Path) -> None:
    """Removes the record of a fresh start, for a start that may continue from every checkpoint."""
    (run_dir / FRESH_START_FILE).unlink(missing_ok=True)


def continues_fresh_start(run_dir: Path) -> bool:
    """Whether this process, or an earlier attempt of its SLURM job or chain, made the recorded fresh start."""
    began, now = _read(run_dir), _this_starter()
    if began is None:
        return False
    is_requeued = now.series != "" and began.series == now.series and began.attempt != now.attempt
    return is_requeued or began.launcher == now.launcher


def leaves_a_ledger(load: str, run_dir: Path, start: int | None) -> bool:
    """Whether metrics.jsonl only holds metrics from before the fresh start with checkpoint.load=none.

    Args:
        load: checkpoint.load.
        run_dir: the run's folder.
        start: lease number of this start; None if it has no lease.
    """
    began = _read(run_dir)
    return load == "none" and (began is None or start is None or began.start == start)


def own_history(load: str, run_dir: Path) -> History | None:
    """The checkpoints that this start may continue from, after the launcher has recorded it.

    Args:
        load: checkpoint.load.
        run_dir: the run's folder.

    Returns:
        None if there are none at all.
    """
    return recorded_history(run_dir) if load == "none" else EVERYTHING


def recorded_history(run_dir: Path) -> History | None:
    """Checkpoints since the recorded fresh start; None if there is no record, as after a start with another load."""
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
