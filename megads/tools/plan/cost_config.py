"""Config of prices and scaling laws for `megads plan budget_hours=...`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class LawName(StrEnum):
    """A published scaling law (megads/plan/scaling_law.py)."""

    epoch2024 = "epoch2024"
    hoffmann2022 = "hoffmann2022"


@dataclass
class CostConfig:
    """Prices, power and scaling law of a budget."""

    law: LawName = LawName.epoch2024
    """Scaling law: Hoffmann et al. 2022, approach 3, as published or with Epoch's corrected coefficients of 2024."""
    effective_time: float = 1.0
    """Effective training time (goodput) as a share, as estimated by megads plan life=true."""
    gpu_hour_price: float | None = None
    """Price of one GPU hour, in any currency."""
    gpu_watts: float | None = None
    """Mean power of a GPU including its share of the node, in watts; gives the energy."""
    pue: float = 1.0
    """Power usage effectiveness: power of the whole site over that of its computers."""
    kwh_price: float | None = None
    """Price of a kilowatt-hour, in the same currency; needs gpu_watts."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        for name in ("gpu_hour_price", "gpu_watts", "kwh_price"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"cost.{name} = {value}: must be positive")
        if not 0 < self.effective_time <= 1:
            raise ConfigError(f"cost.effective_time = {self.effective_time}: must be above 0 and at most 1")
        if not self.pue >= 1:
            raise ConfigError(f"cost.pue = {self.pue}: must be at least 1")
        if self.kwh_price is not None and self.gpu_watts is None:
            raise ConfigError("cost.kwh_price needs cost.gpu_watts to compute the energy")
