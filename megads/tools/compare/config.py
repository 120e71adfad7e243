"""Config of `megads compare`."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from megads.api import ConfigError


@dataclass
class CompareConfig:
    """`megads compare`: whether a run is within the tolerance of a reference run."""

    run: str = MISSING
    """Run directory, or id of a run in runs/."""
    reference: str = MISSING
    """Name of a reference run of docs/runs.md, a folder like them, or another run, by directory or id."""
    loss_tolerance: float | None = None
    """Largest relative difference of a loss, in all steps; null: the reference's own, by step, or 1e-5 for a reference
    without one."""
    grad_norm_tolerance: float | None = None
    """Likewise of the gradient norm; null: the reference's own, or 1e-4."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        """Raises ConfigError on a negative tolerance."""
        for name in ("loss_tolerance", "grad_norm_tolerance"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{name} = {value}: want a relative difference, 0 or above")
