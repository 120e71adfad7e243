"""Keys of `megads checkpoint`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from megads.api import ConfigError, check_url, is_url


class CheckpointAction(Enum):
    """What `megads checkpoint` does."""

    list = "list"
    verify = "verify"
    average = "average"
    reshard = "reshard"
    upload = "upload"
    download = "download"


@dataclass
class CheckpointActionConfig:
    """`megads checkpoint`: lists, verifies, averages, reshards, uploads and downloads the checkpoints of a run."""

    action: CheckpointAction = MISSING
    """What to do; the word alone is enough: megads checkpoint list."""
    run: str = MISSING
    """Folder of a run, or its name in runs/; for reshard, also a checkpoint's folder; for list, verify and download,
    also the URL of a run or of its checkpoint in a store, for example s3://bucket/prefix/<run id>."""
    steps: Any = None
    """Steps to verify or average, or the one to reshard or download. null: verify all, average the last ones, reshard
    or download the newest."""
    last: int = 3
    """Number of checkpoints to average if steps is not given."""
    output: str | None = None
    """Folder to create. average: a run without training, for generate, evaluate, export and checkpoint.init_from.
    reshard, download: a run that checkpoint.load continues. upload: a URL like checkpoint.upload, by default the run's
    own."""
    files: int | None = None
    """Number of files that reshard distributes a checkpoint over, of about equal size; fewer if it has too few rows."""
    overwrite: bool = False
    """Replace what the same action wrote to that folder before."""

    @property
    def wanted_steps(self) -> list[int] | None:
        """`steps` as a list; the command line keeps what was typed for keys of any type, so that numbers are texts."""
        if self.steps is None:
            return None
        given = self.steps if isinstance(self.steps, list) else [self.steps]
        return [int(step) if isinstance(step, str) and step.isdecimal() else step for step in given]

    def check(self) -> None:
        """Raises ConfigError on invalid steps, and on keys that the action requires or does not use."""
        steps = self.wanted_steps
        if steps is not None and (
            not steps
            or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in steps)
            or len(set(steps)) < len(steps)
        ):
            raise ConfigError(f"steps = {self.steps!r}: want numbers, each once, as in steps='[100, 200]'")
        if self.last < 1:
            raise ConfigError(f"last = {self.last}: must be at least 1")
        self._check_urls()
        makes = self.action in (CheckpointAction.average, CheckpointAction.reshard, CheckpointAction.download)
        if (self.output is None) == makes and self.action is not CheckpointAction.upload:
            told = "needs output=<folder>" if self.output is None else f"writes nothing: leave output={self.output} out"
            raise ConfigError(f"{self.action.value} {told}")
        if (self.files is None) == (self.action is CheckpointAction.reshard):
            told = "needs files=<number>" if self.files is None else f"makes no files: leave files={self.files} out"
            raise ConfigError(f"{self.action.value} {told}")
        if self.files is not None and self.files < 1:
            raise ConfigError(f"files = {self.files}: must be at least 1")
        one = self.action in (CheckpointAction.reshard, CheckpointAction.download)
        if one and steps is not None and len(steps) > 1:
            raise ConfigError(f"steps = {self.steps}: {self.action.value} takes one checkpoint; give one step")

    def _check_urls(self) -> None:
        if is_url(self.run):
            if self.action not in (CheckpointAction.list, CheckpointAction.verify, CheckpointAction.download):
                raise ConfigError(
                    f"run = {self.run}: {self.action.value} takes a folder; fetch it with megads checkpoint download"
                )
            check_url(self.run, "run")
        elif self.action is CheckpointAction.download:
            raise ConfigError(f"run = {self.run}: download takes a URL, as s3://bucket/prefix/<run id>")
