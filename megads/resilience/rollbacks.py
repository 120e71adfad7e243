"""What rollbacks a run has decided on, as events.jsonl records them. Imports no torch."""

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
"""Event of a decision; the launcher carries it out."""
LEFT_BEHIND = "left_behind"
"""Event of the checkpoints that a rollback does away with, before they are deleted."""
_Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class RollbackRecord:
    """A rollback that was decided on.

    Attributes:
        checkpoint_step: of the checkpoint from which the run goes on.
        checkpoint_digest: of its manifest.
        skip_samples: range of samples to leave out, as `data.skip` counts them.
        skip_index: entries of data.skip that were in force.
    """

    __pydantic_config__ = ConfigDict(extra="ignore")

    checkpoint_step: _Count
    checkpoint_digest: str
    skip_samples: tuple[_Count, _Count]
    skip_index: _Count

    @property
    def entry(self) -> SkipConfig:
        """As an entry of data.skip."""
        return SkipConfig(samples=list(self.skip_samples))


_RECORD = TypeAdapter(RollbackRecord)
_DIGESTS = TypeAdapter(dict[str, str])


def recorded_rollbacks(run_dir: Path) -> list[RollbackRecord]:
    """Returns every rollback that the run has decided on, in order."""
    found = (_read(event) for event in read_json_lines(run_dir / EVENTS_FILE) if event.get("event") == ROLL_BACK)
    return [record for record in found if record is not None]


def pending_rollback(run_dir: Path) -> RollbackRecord | None:
    """Returns the last rollback, if no start of the ranks went on since."""
    pending = None
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") == ROLL_BACK:
            pending = _read(event) or pending
        elif event.get("event") == "start":
            pending = None
    return pending


def left_behind(run_dir: Path) -> set[str]:
    """Returns the digests of the manifests of checkpoints that rollbacks did away with."""
    found: set[str] = set()
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") == LEFT_BEHIND:
            try:
                found |= set(_DIGESTS.validate_python(event.get("checkpoints")).values())
            except ValidationError:
                continue
    return found - {""}


def _read(event: dict[str, Any]) -> RollbackRecord | None:
    """None for a line that this version cannot read."""
    try:
        return _RECORD.validate_python(event)
    except ValidationError:
        return None


def skips_with_rollbacks(
    asked: Sequence[SkipConfig], rollbacks: Sequence[RollbackRecord], before: Sequence[SkipConfig], digest: str
) -> list[SkipConfig]:
    """Returns data.skip as it is in force for a start that continues a checkpoint of the run.

    Args:
        asked: data.skip of the command line, which knows nothing of rollbacks.
        rollbacks: that the run has decided on, in order.
        before: data.skip of the start that wrote the checkpoint; a rollback in it stays.
        digest: of the checkpoint's manifest; rollbacks that went back to it hold, too.
    """
    skips = list(asked)
    for rollback in rollbacks:
        place = rollback.skip_index
        if before[place : place + 1] == [rollback.entry] or rollback.checkpoint_digest == digest:
            skips.insert(place, rollback.entry)
    return skips
