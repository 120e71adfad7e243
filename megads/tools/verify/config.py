"""How a layout is verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from megads.config import RootConfig
from megads.errors import ConfigError
from megads.runtime.config import LONGEST_WAIT_S


@dataclass
class VerifyConfig:
    """The layout is scaled down to this machine, never up."""

    max_ranks: int | None = None
    """Most processes to start; null is 8, or what keeps every axis above 1 that is, if that is more. Data parallelism
    shrinks first, then pipeline, context and tensor parallelism."""
    steps: int = 10
    """Steps of the curve that is compared."""
    stage: int | None = None
    """Training stage whose keys are verified, from 1 (train.stages); null takes those of the config itself."""
    dir: str | None = None
    """Folder of verify.json and the ranks' logs; null is runs/verify/<name>-<hash of the config>."""
    timeout_s: float = 120.0
    """Seconds that a rank waits for another before it gives up."""

    def check(self) -> None:
        """Raises ConfigError on counts below one."""
        for name in ("max_ranks", "steps", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"verify.{name} = {value}: must be at least 1")
        if self.stage is not None and self.stage < 1:
            raise ConfigError(f"verify.stage = {self.stage}: must be at least 1, the first of train.stages, or null")
        if self.timeout_s > LONGEST_WAIT_S:
            raise ConfigError(f"verify.timeout_s = {self.timeout_s}: must be at most {LONGEST_WAIT_S:.0f}")


@dataclass
class VerifyLayoutConfig(RootConfig):
    """The config of `megads train`, and how to verify its layout."""

    verify: VerifyConfig = field(default_factory=VerifyConfig)
    """The verification."""
    json: bool = False
    """Print JSON instead of a table."""
