"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from megads.errors import ConfigError

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""

ZERO_STAGES = (1, 2, 3)
GRADIENT_STAGES = (2, 3)
"""Stages that shard the gradients as well."""


@dataclass
class ParallelConfig:
    """Every rank has one place on each axis; `rank_order` says which axis neighbours in rank lie along."""

    tp: int = 1
    """Tensor parallel size: every block's matrices are cut over this many ranks."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data parallel size: replicas of the model, over which ZeRO shards the optimizer."""
    cp: int = 1
    """Context parallel size: every sequence is cut over this many ranks."""
    rank_order: list[str] = field(default_factory=lambda: list(AXES))
    """Axes from the innermost, whose ranks are neighbours in one node, to the outermost."""
    zero_stage: int = 1
    """What ZeRO shards over the cp * dp ranks that hold the same weights (Rajbhandari et al. 2020): 1 the optimizer, 2
    the gradients too, 3 the weights too. 2 and 3 only without pipelines."""
    zero_shard_size: int | None = None
    """Ranks over which ZeRO-3 shards; every such subgroup holds the whole model, and only gradients travel between
    them, once a step (MiCS, Zhang et al. 2022). null: all cp * dp ranks."""

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def data_size(self) -> int:
        """Ranks that hold the same weights and see other tokens."""
        return self.cp * self.dp

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.zero_shard_size or self.data_size

    def check(self) -> None:
        """Raises ConfigError on sizes below one, an order that is none, and ZeRO stages that the layout cannot have."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        if sorted(self.rank_order) != sorted(AXES):
            raise ConfigError(
                f"parallel.rank_order = {self.rank_order}: must name each of {', '.join(AXES)} once, innermost first"
            )
        self._check_zero()

    def _check_zero(self) -> None:
        stage, size = self.zero_stage, self.zero_shard_size
        if stage not in ZERO_STAGES:
            raise ConfigError(f"parallel.zero_stage = {stage}: must be one of {', '.join(map(str, ZERO_STAGES))}")
        if stage in GRADIENT_STAGES and self.pp > 1:
            raise ConfigError(
                f"parallel.zero_stage = {stage} with parallel.pp = {self.pp}: ZeRO-{stage} reduces the gradients of "
                "every micro-batch at once, which multiplies a pipeline's traffic by its micro-batches; "
                "use zero_stage=1 with pipelines, or pp=1"
            )
        if stage in GRADIENT_STAGES and self.data_size == 1:
            raise ConfigError(
                f"parallel.zero_stage = {stage} with parallel.cp * dp = 1: there is no rank to share with; "
                "use zero_stage=1, which needs no more memory there, or more data-parallel ranks"
            )
        if size is None:
            return
        if stage != 3:
            raise ConfigError(f"parallel.zero_shard_size = {size} with parallel.zero_stage = {stage}: only 3 takes it")
        if size < 2 or self.data_size % size:
            raise ConfigError(
                f"parallel.zero_shard_size = {size}: must be at least 2 and divide parallel.cp * dp = {self.data_size}"
            )
