"""Rollbacks of a run, as recorded in events.jsonl. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from megads.data.config import SkipConfig
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE

ROLL_BACK = "roll_back"
"""Name of the event that records a decision; the launcher carries it out."""
LEFT_BEHIND = "left_behind"
"""Name of the event that lists the checkpoints that a rollback discards, written before they are deleted."""
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class RollbackRecord:
    """A recorded rollback.

    Attributes:
        checkpoint_step: step of the checkpoint from which the run continues.
        checkpoint_digest: digest of the checkpoint's manifest.
        skip_samples: range of samples to skip, as `data.skip` counts them.
        skip_index: number of entries in data.skip at the time of the decision.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    checkpoint_step: _Count
    checkpoint_digest: str
    skip_samples: tuple[_Count, _Count]
    skip_index: _Count

    @property
    def entry(self) -> SkipConfig:
        """Entry of data.skip for this rollback."""
        return SkipConfig(samples=list(self.skip_samples))


_RECORD = TypeAdapter(RollbackRecord)
_DIGESTS = TypeAdapter(dict[str, str])


def recorded_rollbacks(run_dir: Path) -> list[RollbackRecord]:
    """Returns all recorded rollbacks of the run, in order."""
    found = (_read(event) for event in read_json_lines(run_dir / EVENTS_FILE) if event.get("event") == ROLL_BACK)
    return [record for record in found if record is not None]


def pending_rollback(run_dir: Path) -> RollbackRecord | None:
    """Returns the last rollback if the ranks have not started training since; else None."""
    pending = None
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") == ROLL_BACK:
            pending = _read(event) or pending
        elif event.get("event") == "start":
            pending = None
    return pending


def discarded_checkpoints(run_dir: Path) -> set[str]:
    """Returns the manifest digests of checkpoints that rollbacks discarded."""
    found: set[str] = set()
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") == LEFT_BEHIND:
            try:
                found |= set(_DIGESTS.validate_python(event.get("checkpoints")).values())
            except ValidationError:
                continue
    return found - {""}


def _read(event: dict[str, Any]) -> RollbackRecord | None:
    """Parses a roll_back event; returns None if this version cannot read it."""
    try:
        return _RECORD.validate_python(event)
    except ValidationError:
        return None


def skips_with_rollbacks(
    asked: Sequence[SkipConfig], rollbacks: Sequence[RollbackRecord], before: Sequence[SkipConfig], digest: str
) -> list[SkipConfig]:
    """Returns the effective data.skip of a start that continues from a checkpoint of the run.

    Args:
        asked: data.skip from the command line, without rollbacks.
        rollbacks: recorded rollbacks of the run, in order.
        before: data.skip of the start that wrote the checkpoint; its rollbacks stay active.
        digest: digest of the checkpoint's manifest; rollbacks to this checkpoint are active, too.
    """
    skips = list(asked)
    for rollback in rollbacks:
        place = rollback.skip_index
        if before[place : place + 1] == [rollback.entry] or rollback.checkpoint_digest == digest:
            skips.insert(place, rollback.entry)
    return skips
