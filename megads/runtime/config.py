"""How a run is named, where it writes and how its processes start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class ClusterKind(StrEnum):
    """Where the ranks run."""

    local = "local"


@dataclass
class RunConfig:
    """Identity and place of a run."""

    id: str | None = None
    """Name of the run; null derives one from the config, so that the same command continues the same run."""
    dir: str | None = None
    """Folder the run writes to; null is runs/<run.id>."""
    name: str | None = None
    """First part of a derived run.id; null is the experiment's name, else the model's."""
    dry_run: bool = False
    """Check the config and print what would run and where it would write; start nothing."""
    check_memory: bool = True
    """Refuse a run whose planned memory this machine does not have; false tries all the same."""

    def check(self) -> None:
        """Raises ConfigError on an id that is no plain folder name."""
        for name in ("id", "name"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
                raise ConfigError(
                    f"run.{name} = {value!r}: want letters, digits, '.', '_' and '-' only; a path goes into run.dir"
                )


@dataclass
class LoggingConfig:
    """What the console shows."""

    level: str = "info"
    """debug, info, warning or error."""
    every_steps: int = 1
    """Steps between console lines; metrics.jsonl has every step."""

    def check(self) -> None:
        """Raises ConfigError on an unknown level or interval."""
        if self.level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"logging.level = {self.level!r}: want debug, info, warning or error")
        if self.every_steps < 1:
            raise ConfigError(f"logging.every_steps = {self.every_steps}: must be at least 1")


@dataclass
class ClusterConfig:
    """The machine."""

    kind: ClusterKind = ClusterKind.local
    """local: torch's elastic agent starts every rank on this machine."""
    threads_per_rank: int | None = None
    """CPU threads of each rank, equal on all; null shares the cores out evenly."""
    peak_tflops: float | None = None
    """Peak of one device for MFU; null takes the known figure of the GPU, or measures the CPU once and caches it."""
    timeout_s: float = 600.0
    """A collective that hangs this long fails."""

    def check(self) -> None:
        """Raises ConfigError on non-positive sizes."""
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise ConfigError(f"cluster.threads_per_rank = {self.threads_per_rank}: must be at least 1")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ConfigError(f"cluster.peak_tflops = {self.peak_tflops}: must be positive")
        if self.timeout_s <= 0:
            raise ConfigError(f"cluster.timeout_s = {self.timeout_s}: must be positive")
