"""What `megads doctor` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from megads.errors import ConfigError
from megads.runtime.config import LONGEST_WAIT_S


@dataclass
class DoctorConfig:
    """`megads doctor`: checks this machine and its software."""

    json: bool = False
    """Print one JSON object instead of a table; --json is short for it."""
    runs_dir: str = "runs"
    """Folder that runs write to: its disk is checked."""
    cache_dir: str | None = None
    """Folder of cached index maps and measurements; null is the user's cache."""
    timeout_s: float = 6.0
    """Longest wait for what is tried in a process of its own: importing torch and DeepSpeed, a collective, the GPUs."""

    def check(self) -> None:
        """Raises ConfigError on a wait that is none."""
        if not 0 < self.timeout_s <= LONGEST_WAIT_S:
            raise ConfigError(f"timeout_s = {self.timeout_s}: must be positive, and at most {LONGEST_WAIT_S:.0f}")
