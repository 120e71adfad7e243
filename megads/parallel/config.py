"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from megads.errors import ConfigError

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""


@dataclass
class ParallelConfig:
    """Every rank has one place on each axis; `rank_order` says which axis neighbours in rank lie along."""

    tp: int = 1
    """Tensor parallel size: every block's matrices are cut over this many ranks."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data parallel size: replicas of the model, over which ZeRO-1 shards the optimizer."""
    cp: int = 1
    """Context parallel size: every sample's tokens are cut over this many ranks."""
    rank_order: list[str] = field(default_factory=lambda: list(AXES))
    """Axes from the innermost, whose ranks are neighbours in one node, to the outermost."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis by name, for people and records."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def product(self) -> str:
        """As in tp 2 x cp 1 x pp 2 x dp 1."""
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items())

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def check(self) -> None:
        """Raises ConfigError on sizes below one and on an order that is none."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        if sorted(self.rank_order) != sorted(AXES):
            raise ConfigError(
                f"parallel.rank_order = {self.rank_order}: must name each of {', '.join(AXES)} once, innermost first"
            )
