"""The layout of a run over its processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite

from megads.errors import ConfigError
from megads.parallel.pipeline_actions import Schedule, StagePlacement
from megads.parallel.schedule import ScheduleName, build_schedule, check_contiguous, stage_placement

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""
# Beyond any machine; what is planned rank by rank ends.
_MOST_RANKS = {"tp": 1024, "cp": 1024, "pp": 1024, "dp": 1 << 17}

ZERO_STAGES = (0, 1, 2, 3)
"""Stages of ZeRO that an engine trains."""
GRADIENT_STAGES = (2, 3)
"""Those that shard gradients as they come, micro-batch by micro-batch."""

SPLIT_SCHEDULES = (ScheduleName.zb_h1, ScheduleName.zb_v, ScheduleName.dualpipe_v)
"""Those with backward passes in two parts."""


class Recompute(StrEnum):
    """What backward computes again instead of keeping it; the results are the same to the bit."""

    none = "none"
    selective = "selective"
    full = "full"
    auto = "auto"


class Partition(StrEnum):
    """How layers are cut into the stages of a pipeline.

    uniform gives every stage the same number of blocks, embedding and head coming on top; weighted makes the heaviest
    stage as light as it can be, by parallel.layer_costs; auto is weighted by the estimated FLOPs of each layer.
    """

    uniform = "uniform"
    weighted = "weighted"
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
    tp_chunks: int = 1
    """Parts into which a micro-batch's tokens are cut where tensor-parallel regions begin and end, so that the message
    of one part travels while the matrix product of another is computed (Jiang et al. 2024, MegaScale, section 3.2). 1:
    messages and products take turns. Of no effect at tp = 1."""
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
    schedule: ScheduleName = ScheduleName["1f1b"]
    """Order of forward and backward passes in a pipeline: 1f1b, interleaved (several virtual stages a rank, smaller
    bubble, more messages), zb_h1 (backward in two parts, a third of 1F1B's bubble in the same memory), dualpipe_v and
    zb_v (two virtual stages a rank in the shape of a V, backward in two parts). docs/layouts.md compares them."""
    virtual_stages: int | None = None
    """Stages of each pipeline rank. null: 1 for 1f1b and zb_h1, which have no more; 2 for the others, of which
    interleaved alone takes any number."""
    contiguous_micro_batches: int | None = None
    """For interleaved, the least number of micro-batches that run through one virtual stage in a row before the next
    one's turn: pp is depth-first (least memory), all of the step's micro-batches breadth-first (Llama 3, section
    3.3.2). null: pp."""
    partition: Partition = Partition.weighted
    """How layers are cut into stages: uniform (blocks alone count), weighted (by layer_costs), or auto (by estimated
    FLOPs)."""
    layer_costs: list[float] | None = None
    """Costs of the embedding, of one block and of the head in any unit, as measured, for partition=weighted; null
    weighs each as much as a block."""
    first_stage_blocks: int | None = None
    """Blocks beside the embedding on the first of all stages, 0 for a stage of its own; null goes by partition."""
    last_stage_blocks: int | None = None
    """Blocks beside the head on the last of all stages, 0 for a stage of its own; null goes by partition."""
    recompute: Recompute = Recompute.none
    """Computed again in backward: none, selective (the attention cores), full (whole blocks), or auto: as few whole
    blocks of each stage as fit the memory."""
    recompute_interval: int = 1
    """Recompute every n-th block of a stage, from its first on."""
    recompute_blocks: list[int] | None = None
    """For recompute=full, how many blocks of each pipeline rank, its first ones; null goes by the interval."""

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
    def placement(self) -> StagePlacement:
        """Which pipeline rank holds which virtual stage.

        Raises:
            ConfigError: the schedule cannot have so many virtual stages.
        """
        return stage_placement(self.schedule, self.pp, self.virtual_stages)

    def schedule_of(self, micro_batches: int) -> Schedule:
        """The pipeline's schedule for a step of so many micro-batches of each data-parallel rank.

        Raises:
            ConfigError: there is no such schedule.
        """
        return build_schedule(
            self.schedule, self.pp, self.virtual_stages, micro_batches, contiguous=self.contiguous_micro_batches
        )

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline, virtual ones counted each."""
        return self.placement.num_stages

    @property
    def data_size(self) -> int:
        """Ranks that hold the same weights and see other tokens."""
        return self.cp * self.dp

    @property
    def shard_size(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.zero_shard_size or self.data_size

    def why_no_cuda_graphs(self) -> str:
        """What keeps a micro-batch from being captured as a whole, on one rank, and what to set; empty: nothing."""
        for name, value, most in (
            ("pp", self.pp, 1),
            ("tp", self.tp, 1),
            ("cp", self.cp, 1),
            ("zero_stage", self.zero_stage, 1),
        ):
            if value > most:
                what = "a micro-batch is captured as a whole, on one rank"
                return f"parallel.{name} = {value}: {what}; set parallel.{name}={most}"
        return ""

    def check(self) -> None:
        """Raises ConfigError on sizes below one, an order that is none, and ZeRO or recomputation that cannot be."""
        for name in AXES:
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        for name, most in _MOST_RANKS.items():
            if getattr(self, name) > most:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at most {most}")
        if sorted(self.rank_order) != sorted(AXES):
            raise ConfigError(
                f"parallel.rank_order = {self.rank_order}: must name each of {', '.join(AXES)} once, innermost first"
            )
        for name in ("bucket_elements", "tp_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        self._check_zero()
        self._check_pipeline()
        self._check_partition()
        self._check_recompute()

    def _check_pipeline(self) -> None:
        """Raises ConfigError on virtual stages and contiguous micro-batches that the schedule does not have."""
        if self.placement.num_stages > self.pp == 1:
            raise ConfigError(
                f"parallel.schedule = {self.schedule} with parallel.pp = 1: virtual stages overlap the work of several "
                "pipeline ranks; use parallel.schedule=1f1b, or raise parallel.pp"
            )
        check_contiguous(self.schedule, self.pp, self.contiguous_micro_batches)

    def _check_partition(self) -> None:
        """Raises ConfigError on costs and numbers of blocks that no partition can go by."""
        costs = self.layer_costs
        if costs is not None:
            if len(costs) != 3 or min(costs) < 0 or not costs[1] > 0 or not all(map(isfinite, costs)):
                raise ConfigError(
                    f"parallel.layer_costs = {costs}: must be three numbers, the costs of the embedding, of one block "
                    "and of the head, none negative and the block's above 0"
                )
            if self.partition is not Partition.weighted:
                raise ConfigError(
                    f"parallel.layer_costs = {costs} with parallel.partition = {self.partition}: only weighted goes by "
                    "given costs; set parallel.partition=weighted, or leave them out"
                )
        for name in ("first_stage_blocks", "last_stage_blocks"):
            blocks = getattr(self, name)
            if blocks is not None and blocks < 0:
                raise ConfigError(f"parallel.{name} = {blocks}: must be 0 or more")
            if blocks is not None and self.num_stages == 1:
                raise ConfigError(
                    f"parallel.{name} = {blocks} with a single stage, which holds all blocks: leave it out, or raise "
                    "parallel.pp"
                )

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
