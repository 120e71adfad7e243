"""When checkpoints are written and which one a run starts from."""

from __future__ import annotations

from dataclasses import dataclass

from megads.errors import ConfigError


@dataclass
class CheckpointConfig:
    """Checkpoints live in <run.dir>/checkpoints/step_XXXXXXXX."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Newest checkpoints kept; 0 keeps all."""
    max_failed_saves: int = 3
    """Saves in a row that may fail, for example on a full disk; one more ends the run (exit 4)."""
    load: str = "auto"
    """auto: the newest usable one of this run, else start fresh; none: start fresh; or the path of a checkpoint or run:
    the first start with it loads that, and the same command again continues from what was saved since."""

    def check(self) -> None:
        """Raises ConfigError on negative numbers."""
        for name in ("every_steps", "keep", "max_failed_saves"):
            if getattr(self, name) < 0:
                raise ConfigError(f"checkpoint.{name} = {getattr(self, name)}: must not be negative")
