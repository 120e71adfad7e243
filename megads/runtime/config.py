"""How a run is named, where it writes and how its processes start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
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


class ConsoleKind(StrEnum):
    """How a run is shown."""

    auto = "auto"
    live = "live"
    plain = "plain"
    quiet = "quiet"


class WandbMode(StrEnum):
    """Where wandb records."""

    auto = "auto"
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class WandbConfig:
    """Recording with Weights & Biases, in <run.dir>/wandb, by a process beside the run that can fail without harm."""

    mode: WandbMode = WandbMode.auto
    """disabled, offline (`wandb sync` sends it later) or online; auto is WANDB_MODE, else offline if installed."""
    project: str = "megads"
    """Project on the server."""
    entity: str | None = None
    """User or team that owns the project; null is the account's default."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""


@dataclass
class TensorBoardConfig:
    """Recording for TensorBoard, in <run.dir>/tensorboard, by the same process."""

    enabled: bool = False
    """Write event files: `tensorboard --logdir runs` shows them."""


@dataclass
class LoggingConfig:
    """What the console shows, and who else is told."""

    level: str = "info"
    """debug, info, warning or error."""
    every_steps: int = 1
    """Steps between plain console lines; metrics.jsonl has every step."""
    console: ConsoleKind = ConsoleKind.auto
    """live (a panel), plain (lines), quiet (warnings and errors only); auto is live on a terminal, else plain."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Weights & Biases."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    timeline_every_steps: int | None = None
    """Time every n-th step on every rank, action by action, in <run.dir>/timeline; null times none."""
    flush_s: float = 10.0
    """Longest wait for wandb and TensorBoard at the end of a run; what is missing then can be sent later."""

    def check(self) -> None:
        """Raises ConfigError on an unknown level, interval or wait."""
        if self.level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"logging.level = {self.level!r}: want debug, info, warning or error")
        if self.every_steps < 1:
            raise ConfigError(f"logging.every_steps = {self.every_steps}: must be at least 1")
        if self.timeline_every_steps is not None and self.timeline_every_steps < 1:
            raise ConfigError(
                f"logging.timeline_every_steps = {self.timeline_every_steps}: must be at least 1, or null for none"
            )
        if self.flush_s < 0:
            raise ConfigError(f"logging.flush_s = {self.flush_s}: must not be negative")
        if not self.wandb.project or "/" in self.wandb.project:
            raise ConfigError(
                f"logging.wandb.project = {self.wandb.project!r}: want a name without '/'; "
                "the owner goes into logging.wandb.entity"
            )


@dataclass
class ClusterConfig:
    """The machine."""

    kind: ClusterKind = ClusterKind.local
    """local: torch's elastic agent starts every rank on this machine."""
    threads_per_rank: int | None = None
    """CPU threads of each rank, equal on all; null shares the cores out evenly."""
    peak_tflops: float | None = None
    """Peak of one device for MFU; null takes the known figure of the GPU, or measures the CPU once and caches it."""
    ranks_per_node: int | None = None
    """Neighbouring ranks that share a node, for the table of which rank holds what; null leaves nodes out of it."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, for `megads plan device=cuda` on a machine that has none; null leaves open whether it fits."""
    timeout_s: float = 600.0
    """A collective that hangs this long fails."""

    def check(self) -> None:
        """Raises ConfigError on non-positive sizes."""
        if self.threads_per_rank is not None and self.threads_per_rank < 1:
            raise ConfigError(f"cluster.threads_per_rank = {self.threads_per_rank}: must be at least 1")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"cluster.ranks_per_node = {self.ranks_per_node}: must be at least 1")
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ConfigError(f"cluster.peak_tflops = {self.peak_tflops}: must be positive")
        if self.gpu_memory_gib is not None and self.gpu_memory_gib <= 0:
            raise ConfigError(f"cluster.gpu_memory_gib = {self.gpu_memory_gib}: must be positive")
        if self.timeout_s <= 0:
            raise ConfigError(f"cluster.timeout_s = {self.timeout_s}: must be positive")
