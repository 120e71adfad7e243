"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megads.errors import ConfigError

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""


class Recompute(StrEnum):
    """What backward computes again instead of keeping it; the results are the same to the bit."""

    none = "none"
    selective = "selective"
    full = "full"
    auto = "auto"


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
    """Context parallel size: every sequence is cut over this many ranks."""
    rank_order: list[str] = field(default_factory=lambda: list(AXES))
    """Axes from the innermost, whose ranks are neighbours in one node, to the outermost."""
    recompute: Recompute = Recompute.none
    """Computed again in backward: none, selective (the attention cores), full (whole blocks), or auto: as few whole
    blocks of each stage as fit the memory."""
    recompute_interval: int = 1
    """Recompute every n-th block of a stage, from its first on."""
    recompute_blocks: list[int] | None = None
    """For recompute=full, how many blocks of each pipeline stage, its first ones; null goes by the interval."""

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def check(self) -> None:
        """Raises ConfigError on sizes below one, an order that is none and recomputation that is contradictory."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        if sorted(self.rank_order) != sorted(AXES):
            raise ConfigError(
                f"parallel.rank_order = {self.rank_order}: must name each of {', '.join(AXES)} once, innermost first"
            )
        self._check_recompute()

    def _check_recompute(self) -> None:
        if self.recompute_interval < 1:
            raise ConfigError(f"parallel.recompute_interval = {self.recompute_interval}: must be at least 1")
        if self.recompute_interval > 1 and self.recompute not in (Recompute.selective, Recompute.full):
            raise ConfigError(
                f"parallel.recompute_interval = {self.recompute_interval} does nothing with parallel.recompute = "
                f"{self.recompute}: leave it out, or set parallel.recompute to selective or full"
            )
        blocks = self.recompute_blocks
        if blocks is None:
            return
        if self.recompute is not Recompute.full:
            raise ConfigError(
                f"parallel.recompute_blocks = {blocks} counts blocks that are recomputed as a whole, but "
                f"parallel.recompute = {self.recompute}: set parallel.recompute=full, or leave the numbers out"
            )
        if len(blocks) != self.pp or min(blocks) < 0:
            raise ConfigError(
                f"parallel.recompute_blocks = {blocks}: must be {self.pp} numbers of 0 or more, one for each of the "
                f"parallel.pp = {self.pp} stages"
            )
