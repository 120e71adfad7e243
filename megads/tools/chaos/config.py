"""Settings of `megads chaos`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megads.api import ConfigError


@dataclass
class ChaosConfig:
    """`megads chaos`: trains small runs on this machine, injects faults into them, and verifies that they recover."""

    faults: int = 20
    """Number of faults to inject."""
    minutes: float = 30.0
    """Time in minutes, from the first fault, after which no further fault is injected; the current run is still trained
    to its end and verified. Fewer faults than asked for are a failure."""
    seed: int = 0
    """Seed for the choice of faults, ranks and times."""
    kinds: Any = None
    """Kinds of faults to choose from, a name or a list; null: all. dry_run=true lists them."""
    train: dict[str, Any] = field(default_factory=dict)
    """Keys of megads train for the runs, for example train.parallel.tp=2 train.parallel.dp=1; the default is a tiny
    model on two CPU ranks. run.dir, the data and train.steps are set by the campaign."""
    steps: int = 60
    """Training steps of each run; after its end, the campaign continues with another run."""
    recover_s: float = 120.0
    """Seconds without a new step after a fault from which a run counts as lost."""
    dir: str | None = None
    """Folder of the campaign; null: runs/chaos/<date and time>. It keeps the scorecard, and the runs that lost
    something."""
    json: bool = False
    """Print one JSON object instead of lines and tables."""
    dry_run: bool = False
    """List the faults and the required consequence of each; start nothing."""

    @property
    def wanted_kinds(self) -> list[str] | None:
        """kinds as a list."""
        return [self.kinds] if isinstance(self.kinds, str) else self.kinds

    def check(self) -> None:
        """Raises ConfigError if a setting is invalid."""
        for name, least in (("faults", 1), ("steps", 10)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least {least}")
        for name in ("minutes", "recover_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0")
        kinds = self.wanted_kinds
        if kinds is not None and (
            not isinstance(kinds, list) or not kinds or not all(isinstance(k, str) for k in kinds)
        ):
            raise ConfigError(f"kinds = {self.kinds!r}: want a name or a list, as in kinds='[kill_rank, stop_rank]'")
        for key in self.overrides:
            if key in _OWN:
                raise ConfigError(f"train.{key} is set by the campaign: leave it out")

    @property
    def overrides(self) -> dict[str, str]:
        """train, flattened to keys of megads train and their values."""
        return dict(_flat(self.train))


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "null" if value is None else str(value)


_OWN = (
    "run.dir",
    "run.id",
    "data.train",
    "data.raw",
    "train.steps",
    "train.samples",
    "train.tokens",
    "train.epochs",
    "train.minutes",
)
