"""When a run validates."""

from __future__ import annotations

from dataclasses import dataclass

from megads.errors import ConfigError


@dataclass
class EvaluationConfig:
    """Validation covers the whole validation set, the same tokens in every layout."""

    every_steps: int = 0
    """Steps between validations; 0 validates at the end only."""
    at_end: bool = True
    """Validate after the last step."""

    def check(self) -> None:
        """Raises ConfigError on a negative interval."""
        if self.every_steps < 0:
            raise ConfigError(f"evaluation.every_steps = {self.every_steps}: must not be negative")
