"""Executes the rollbacks that ranks decided on: skips samples at a start, and deletes checkpoints."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megads.checkpoint.config import EVERYTHING, list_checkpoints
from megads.config import RootConfig
from megads.errors import CheckpointError
from megads.resilience.rollbacks import (
    LEFT_BEHIND,
    left_behind,
    pending_rollback,
    recorded_rollbacks,
    skips_with_rollbacks,
)
from megads.runtime.lease import claimed
from megads.runtime.metrics import EventWriter
from megads.runtime.slurm import SlurmJob

if TYPE_CHECKING:
    from megads.resume import Past


def with_rollbacks(config: RootConfig, past: Past) -> RootConfig:
    """Returns the config with the samples that the run's rollbacks skip in data.skip.

    Args:
        config: config of the start, as requested.
        past: checkpoint that it resumes from.
    """
    run_dir = Path(str(config.run.dir))
    if past.config is None or past.run_dir != run_dir:
        return config
    rollbacks, before = recorded_rollbacks(run_dir), past.config.data.skip
    skips = skips_with_rollbacks(config.data.skip, rollbacks, before, past.manifest.digest())
    return replace(config, data=replace(config.data, skip=skips))


def finish_rollback(run_dir: Path, job: SlurmJob | None) -> None:
    """Completes a rollback that was interrupted before the ranks started again; see `leave_behind`.

    Args:
        run_dir: the run directory, on which nobody holds a lease.
        job: SLURM job of this process; None outside of SLURM.
    """
    if _discarded(run_dir):
        with claimed(run_dir, job):
            leave_behind(run_dir)


def leave_behind(run_dir: Path) -> bool:
    """Deletes the checkpoints after the one that the last rollback returns to; the caller holds the lease on the run.

    The digests of their manifests are recorded first, so that a copy restored from checkpoint.upload is deleted again.

    Returns:
        Whether a rollback is pending that no start has executed yet.
    """
    from megads.checkpoint.local import forget
    from megads.checkpoint.store import discard

    pending, found = pending_rollback(run_dir), _discarded(run_dir)
    if pending is not None and set(found.values()) - left_behind(run_dir):
        checkpoints = {str(step): digest for step, digest in found.items() if digest}
        with closing(EventWriter(run_dir)) as events:
            events.write(LEFT_BEHIND, step=pending.checkpoint_step, checkpoints=checkpoints)
    if pending is not None:
        # A local checkpoint of a later step may descend from a checkpoint that is kept.
        forget(run_dir)
    discard(run_dir, list(found))
    return pending is not None


def _discarded(run_dir: Path) -> dict[int, str]:
    """Digests of the checkpoints that rollbacks discard, by step; empty for an unreadable checkpoint."""
    from megads.checkpoint.fresh_start import recorded_history
    from megads.checkpoint.manifest import read_manifest, read_sequence

    history = recorded_history(run_dir) or EVERYTHING
    pending, gone = pending_rollback(run_dir), left_behind(run_dir)
    if pending is None and not gone:
        return {}
    found: dict[int, str] = {}
    for step, folder in list_checkpoints(run_dir).items():
        digest = ""
        with suppress(CheckpointError):
            digest = read_manifest(folder).digest()
        came_after = pending is not None and step > pending.checkpoint_step
        if digest in gone or (came_after and history.has(folder, read_sequence(folder))):
            found[step] = digest
    return found
