"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from megads.errors import ConfigError

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""

ZERO_STAGES = (0, 1)
"""Stages of ZeRO that an engine trains."""


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
    """Context parallel size: every sequence is cut over this many ranks."""
    sequence_parallel: bool = False
    """Cut norms, dropouts and residuals along the sequence over the tensor-parallel ranks, which otherwise all compute
    them whole (Korthikanti et al. 2022): smaller activations and pipeline messages, for one more all-gather where a
    region's gradient is computed. Of no effect at tp = 1."""
    rank_order: list[str] = field(default_factory=lambda: list(AXES))
    """Axes from the innermost, whose ranks are neighbours in one node, to the outermost."""

    zero_stage: int = 1
    """What replicas share out instead of each holding all of it: 0 nothing, 1 optimizer states and reduced gradients
    (ZeRO, Rajbhandari et al. 2020)."""
    bucket_elements: int = 2**25
    """Gradients that are reduced in one collective: a bucket is sent off once it holds this many and all of them are
    there. Smaller ones overlap better with the backward pass, larger ones use the network better."""

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def data_size(self) -> int:
        """Ranks that hold the same weights and see other tokens."""
        return self.cp * self.dp

    def check(self) -> None:
        """Raises ConfigError on sizes below one and on an order that is none."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        if sorted(self.rank_order) != sorted(AXES):
            raise ConfigError(
                f"parallel.rank_order = {self.rank_order}: must name each of {', '.join(AXES)} once, innermost first"
            )
        if self.zero_stage not in ZERO_STAGES:
            raise ConfigError(
                f"parallel.zero_stage = {self.zero_stage}: must be one of {', '.join(map(str, ZERO_STAGES))}"
            )
        if self.bucket_elements < 1:
            raise ConfigError(f"parallel.bucket_elements = {self.bucket_elements}: must be at least 1")
