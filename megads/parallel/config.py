"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from megads.errors import ConfigError

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""

ZERO_STAGES = (0, 1, 2, 3)
"""Stages of ZeRO that an engine trains."""
GRADIENT_STAGES = (2, 3)
"""Those that shard gradients as they come, micro-batch by micro-batch."""


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
    """Data parallel size: replicas of the model."""
    cp: int = 1
    """Context parallel size: every sample's tokens are cut over this many ranks."""
    sequence_parallel: bool = False
    """Cut norms, dropouts and residuals along the sequence over the tensor-parallel ranks, which otherwise all compute
    them whole (Korthikanti et al. 2022): smaller activations and pipeline messages, for one more all-gather where a
    region's gradient is computed. Of no effect at tp = 1."""
    rank_order: list[str] = field(default_factory=lambda: list(AXES))
    """Axes from the innermost, whose ranks are neighbours in one node, to the outermost."""
    zero_stage: int = 1
    """What the cp * dp ranks with the same weights share out instead of each holding all of it (ZeRO, Rajbhandari et
    al. 2020): 0 nothing, 1 optimizer states and reduced gradients, 2 gradients as they come too, 3 weights too. 2 and 3
    only without pipelines."""
    zero_shard_size: int | None = None
    """Ranks over which ZeRO-3 shards; every such subgroup holds the whole model, and only gradients travel between
    them, once a step (MiCS, Zhang et al. 2022). null: all cp * dp ranks."""
    bucket_elements: int = 2**25
    """Gradients that are reduced in one collective: a bucket is sent off once it holds this many and all of them are
    there. Smaller ones overlap better with the backward pass, larger ones use the network better."""
    recompute: Recompute = Recompute.none
    """Computed again in backward: none, selective (the attention cores), full (whole blocks), or auto: as few whole
    blocks of each stage as fit the memory."""
    recompute_interval: int = 1
    """Recompute every n-th block of a stage, from its first on."""
    recompute_blocks: list[int] | None = None
    """For recompute=full, how many blocks of each pipeline stage, its first ones; null goes by the interval."""

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

    @property
    def data_size(self) -> int:
        """Ranks that hold the same weights and see other tokens."""
        return self.cp * self.dp

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.zero_shard_size or self.data_size

    def check(self) -> None:
        """Raises ConfigError on sizes below one, an order that is none, and ZeRO or recomputation that cannot be."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        if sorted(self.rank_order) != sorted(AXES):
            raise ConfigError(
                f"parallel.rank_order = {self.rank_order}: must name each of {', '.join(AXES)} once, innermost first"
            )
        if self.bucket_elements < 1:
            raise ConfigError(f"parallel.bucket_elements = {self.bucket_elements}: must be at least 1")
        self._check_zero()
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
