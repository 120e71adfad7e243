"""Config of `megads verify_layout`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megads.api import LONGEST_WAIT_S, ConfigError, RootConfig


class VerifyDevice(StrEnum):
    """Device of the verified ranks."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass
class VerifyConfig:
    """Layout verification. The layout is scaled down to this machine, never up."""

    max_ranks: int | None = None
    """Maximum number of processes; null is 8, or more if the layout needs more to keep each parallel axis above 1. Data
    parallelism is reduced first, then pipeline, context and tensor parallelism."""
    steps: int = 10
    """Number of training steps to compare."""
    phase: int | None = None
    """Training phase to verify, counted from 1 (train.phases); null uses the config without phase overrides."""
    dir: str | None = None
    """Folder for verify.json and the logs of the ranks; null is runs/verify/<name>-<hash of the config>."""
    device: VerifyDevice = VerifyDevice.cpu
    """Device of the layout's ranks: cpu, over gloo; or cuda, this machine's GPUs over NCCL, of which
    cluster.ranks_per_gpu ranks share one. The reference always runs on the CPU."""
    timeout_s: float = 120.0
    """Timeout in seconds for a rank that waits for another."""

    def check(self) -> None:
        """Raises ConfigError if a value is out of range."""
        for name in ("max_ranks", "steps", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"verify.{name} = {value}: must be at least 1")
        if self.phase is not None and self.phase < 1:
            raise ConfigError(f"verify.phase = {self.phase}: must be at least 1, the first of train.phases, or null")
        if self.timeout_s > LONGEST_WAIT_S:
            raise ConfigError(f"verify.timeout_s = {self.timeout_s}: must be at most {LONGEST_WAIT_S:.0f}")


@dataclass
class VerifyLayoutConfig(RootConfig):
    """Config of `megads train`, with the settings of the verification."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """Layout verification."""
    json: bool = False
    """Print JSON instead of a table."""
