"""What `megads chaos` can be told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megads.errors import ConfigError


@dataclass
class ChaosConfig:
    """`megads chaos`: trains small runs here, injects faults into them, and verifies what they recover to."""

    faults: int = 20
    """Faults to inject."""
    minutes: float = 30.0
    """No further fault is injected after so long; the run under attack is still trained to its end and verified."""
    seed: int = 0
    """Of the choice of faults, ranks and moments."""
    kinds: Any = None
    """Kinds of faults to choose from, a name or a list; null: all. dry_run=true lists them."""
    train: dict[str, Any] = field(default_factory=dict)
    """Keys of megads train for the run under attack, for example train.parallel.tp=2 train.parallel.dp=1; by default it
    is a tiny model on two ranks of the CPU. run.dir, the data and train.steps are the campaign's own."""
    steps: int = 60
    """Steps of each run; when one has come to its end, the campaign goes on with another."""
    recover_s: float = 120.0
    """A run that trains no new step for so long after a fault counts as lost."""
    dir: str | None = None
    """Folder of the campaign; null: runs/chaos/<date and time>. Runs that lost something stay there, and the scorecard
    does."""
    json: bool = False
    """Print one JSON object in place of lines and tables."""
    dry_run: bool = False
    """List the faults and what must follow each; start nothing."""

    @property
    def wanted_kinds(self) -> list[str] | None:
        """kinds as a list."""
        return [self.kinds] if isinstance(self.kinds, str) else self.kinds

    def check(self) -> None:
        """Raises ConfigError on counts and times that are none."""
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
        """train as keys of megads train and their values."""
        return dict(_flat(self.train))


def _flat(content: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "null" if value is None else str(value)


_OWN = ("run.dir", "run.id", "data.train", "data.raw", "train.steps", "train.samples", "train.tokens", "train.epochs")
