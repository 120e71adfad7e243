"""Configuration of a run's parallel layout, and the mapping between global ranks and coordinates in its grid.

The grid has tp x cp x pp x dp ranks. By default (`parallel.rank_order`), tensor parallelism is innermost, then context,
then pipeline, and data parallelism outermost: the axes that communicate most stay inside a node. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from math import isfinite, lcm
from typing import NamedTuple

from megads.errors import ConfigError
from megads.parallel.pipeline_actions import Schedule, StagePlacement
from megads.parallel.schedule import ScheduleName, build_schedule, check_contiguous, stage_placement

AXES = ("tp", "cp", "pp", "dp")
"""The axes of the grid of ranks."""
# Larger than any machine; bounds the time of planning, which visits every rank.
_MOST_RANKS = {"tp": 1024, "cp": 1024, "pp": 1024, "dp": 1 << 17}

_GPU_VOCAB_MULTIPLE = 128
"""Rows of a GEMM's tile; also aligns rows of bf16 logits to 256 bytes, so that kernels can load whole vectors."""

ZERO_STAGES = (0, 1, 2, 3)
"""Supported ZeRO stages."""
GRADIENT_STAGES = (2, 3)
"""ZeRO stages that reduce and shard gradients after every micro-batch."""


SMALLEST_OFFLOADED_BYTES = 1 << 20
"""Tensors below this size are not offloaded: their copies would only cost launches."""


class EngineKind(StrEnum):
    """Training engine: native is megads' own, deepspeed is DeepSpeed's; auto is the one of `resolve_engine`."""

    auto = "auto"
    native = "native"
    deepspeed = "deepspeed"


def resolve_engine(asked: EngineKind, zero_stage: int) -> EngineKind:
    """Returns the engine that trains: native or deepspeed.

    auto is native for ZeRO-0 and 1; only DeepSpeed shards gradients and weights (ZeRO-2 and 3).

    Args:
        asked: value of the config key `engine`.
        zero_stage: value of parallel.zero_stage.
    """
    if asked is not EngineKind.auto:
        return asked
    return EngineKind.deepspeed if zero_stage in GRADIENT_STAGES else EngineKind.native


class ContextParallelKind(StrEnum):
    """How the ranks of a context-parallel group compute attention over whole samples.

    allgather all-gathers keys and values, and each rank attends with its own queries (Dubey et al. 2024, Llama 3);
    ulysses redistributes tokens to heads by an all-to-all before attention, and back after it (Jacobs et al. 2023,
    DeepSpeed-Ulysses); ring receives the keys and values of one rank after another while it attends with those of the
    previous one (Liu et al. 2023, Ring Attention). auto is replaced before ranks start, see
    `megads.launch.layout.resolve_auto`.
    """

    allgather = "allgather"
    ulysses = "ulysses"
    ring = "ring"
    auto = "auto"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that users may expect, and why they are not supported."""
        return {
            "a2a": "use ulysses",
            "all_gather": "use allgather",
            "p2p": "use ring",
            "a2a+p2p": "use ring with parallel.cp_ulysses",
        }


class Recompute(StrEnum):
    """Activation recomputation mode; results are bitwise identical in all modes."""

    none = "none"
    selective = "selective"
    full = "full"
    auto = "auto"


class Offload(StrEnum):
    """What moves to host memory between the forward and the backward pass; results are bitwise identical."""

    none = "none"
    activations = "activations"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that users may expect, and why they are not supported."""
        return {
            "True": "say what moves to host memory: activations",
            "False": "use none",
            "cpu": "say what moves to host memory: activations",
            "optimizer": "masters and moments stay on the device; ZeRO shards them (parallel.zero_stage)",
            "parameters": "weights stay on the device; ZeRO-3 shards them (parallel.zero_stage=3)",
        }


class Partition(StrEnum):
    """How layers are partitioned into pipeline stages.

    uniform gives every stage the same number of blocks, not counting embedding and head; weighted minimizes the cost
    of the most expensive stage, by parallel.layer_costs; auto is weighted by the estimated FLOPs of each layer.
    """

    uniform = "uniform"
    weighted = "weighted"
    auto = "auto"


@dataclass
class ParallelConfig:
    """Parallel layout: sizes of all axes, ZeRO, pipeline schedule and activation recomputation.

    Every rank has one coordinate on each axis; `rank_order` maps coordinates to ranks."""

    tp: int = 1
    """Tensor-parallel size: the matrices of every block are sharded over this many ranks."""
    pp: int = 1
    """Pipeline-parallel size."""
    dp: int = 1
    """Data-parallel size: replicas of the model."""
    cp: int = 1
    """Context-parallel size: the tokens of every sample are sharded over this many ranks."""
    cp_kind: ContextParallelKind = ContextParallelKind.allgather
    """How context-parallel ranks compute attention: allgather (all-gather keys and values; any number of heads),
    ulysses (all-to-all from tokens to heads and back; cp must divide the heads of a tensor-parallel rank), ring (keys
    and values of one rank after another, while attending; any number of heads, model.attention=auto or sdpa), or auto
    (the one with the shortest step on H100s by the estimate of megads plan). docs/long-contexts.md compares them. No
    effect at cp = 1."""
    cp_ulysses: int = 1
    """For cp_kind=allgather and ring: number of consecutive context-parallel ranks, such as those of a node, that
    exchange tokens for heads by all-to-alls, as with ulysses; only the cp / cp_ulysses groups of them exchange keys and
    values by cp_kind. It divides cp and the heads of a tensor-parallel rank. 1: no such groups."""
    ep: int = 1
    """Expert-parallel size: the experts of a layer (model.moe) are divided over groups of this many of the cp * dp
    ranks that hold the same other weights, adjacent ones; with expert_tp=false, of the tp * cp * dp ranks."""
    expert_tp: bool = True
    """Divide the features of each expert over the tensor-parallel ranks, like those of an MLP. false: experts are
    whole, and each tensor-parallel rank processes its own share of the sequence (requires sequence_parallel=true):
    larger GEMMs and no all-gather of tokens. No effect at tp = 1."""
    sequence_parallel: bool = False
    """Shard norms, dropouts and residuals along the sequence over the tensor-parallel ranks, instead of replicating
    them (Korthikanti et al. 2022): smaller activations and p2p tensors between pipeline stages, at the cost of one more
    all-gather in the backward pass of each region. No effect at tp = 1."""
    tp_chunks: int = 1
    """Chunks into which a micro-batch's tokens are split at the entry and exit of tensor-parallel regions, so that the
    collective of one chunk is overlapped with the GEMM of another (Jiang et al. 2024, MegaScale, section 3.2). 1: no
    such overlap. No effect at tp = 1."""
    vocab_multiple: int | None = None
    """Pad the rows of the vocabulary on each tensor-parallel rank to a multiple of this (Megatron-LM's
    make-vocab-size-divisible-by); null: 128 on GPUs, whose GEMMs and kernels need aligned rows, and 1 on CPUs. Padding
    rows are masked and never saved, and a run can continue with another number."""
    rank_order: list[str] = field(default_factory=lambda: list(AXES))
    """Axes from the innermost, whose ranks are adjacent in a node, to the outermost."""
    zero_stage: int = 1
    """ZeRO stage (Rajbhandari et al. 2020), i.e. what is sharded over the cp * dp ranks that hold the same weights:
    0 nothing, 1 optimizer states and reduced gradients, 2 also the gradients of every micro-batch, 3 also the weights.
    2 and 3 require pp = 1."""
    zero_shard_size: int | None = None
    """Number of ranks over which ZeRO-3 shards. Every such subgroup holds the whole model, and only gradients are
    communicated between subgroups, once per step (MiCS, Zhang et al. 2022). null: all cp * dp ranks."""
    bucket_elements: int = 2**25
    """Gradient elements reduced in one collective: a bucket is reduced once it holds this many and all of them are
    computed. Smaller buckets overlap better with the backward pass, larger ones use the network better."""
    overlap_param_gather: bool = False
    """ZeRO-1: all-gather the updated weights of each bucket during the forward pass of the next step's first
    micro-batch, one layer ahead of the layer that needs them, instead of at the end of the step (Megatron-LM's
    overlap-param-gather). Results are bitwise identical. No effect at cp * dp = 1."""
    schedule: ScheduleName = ScheduleName["1f1b"]
    """Pipeline schedule: 1f1b, interleaved (several virtual stages per rank, smaller bubble, more p2p communication),
    zb_h1 (split backward pass, a third of 1F1B's bubble with the same memory), dualpipe_v and zb_v (two virtual stages
    per rank in a V shape, split backward pass). docs/layouts.md compares them. engine=deepspeed only has 1f1b."""
    virtual_stages: int | None = None
    """Virtual stages per pipeline rank. null: 1 for 1f1b and zb_h1 (their only value), 2 for the others; only
    interleaved takes other values than 2."""
    contiguous_micro_batches: int | None = None
    """For interleaved: minimum number of consecutive micro-batches that run through one virtual stage before the next
    virtual stage runs. pp is depth-first (least memory), all micro-batches of the step is breadth-first (Llama 3,
    section 3.3.2). null: pp."""
    partition: Partition = Partition.weighted
    """How layers are partitioned into stages: uniform (counts blocks only), weighted (by layer_costs), or auto (by
    estimated FLOPs)."""
    layer_costs: list[float] | None = None
    """Measured costs of the embedding, of one block and of the head, in any unit, for partition=weighted; or of every
    layer: embedding, blocks and head. null: all cost the same."""
    first_stage_blocks: int | None = None
    """Blocks of the first stage, in addition to the embedding; 0: the embedding only; null: by partition."""
    last_stage_blocks: int | None = None
    """Blocks of the last stage, in addition to the head; 0: the head only; null: by partition."""
    recompute: Recompute = Recompute.none
    """Activation recomputation: none, selective (attention cores), full (whole blocks), or auto (as few whole blocks of
    each stage as fit into memory)."""
    recompute_interval: int = 1
    """Recompute every n-th block of a stage, starting with its first."""
    recompute_blocks: list[int] | None = None
    """For recompute=full: number of blocks that each pipeline rank recomputes, counted from its first; null: by
    recompute_interval."""
    offload: Offload = Offload.none
    """activations: what a block keeps for the backward pass (its saved tensors, or its input if it is recomputed) moves
    to pinned host memory while the next block runs, and comes back one block ahead of the backward pass. For long
    sequences; `megads plan` says whether the copies take longer than the blocks (docs/memory.md). none: stays on the
    device."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of every axis by name, and `ep` if experts are divided, for display and records."""
        return {axis: getattr(self, axis) for axis in AXES} | ({"ep": self.ep} if self.ep > 1 else {})

    @property
    def product(self) -> str:
        """The sizes as text, for example "tp 2 x cp 1 x pp 2 x dp 1"."""
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def placement(self) -> StagePlacement:
        """Which pipeline rank holds which virtual stage.

        Raises:
            ConfigError: the schedule does not support this number of virtual stages.
        """
        return stage_placement(self.schedule, self.pp, self.virtual_stages)

    def schedule_of(self, micro_batches: int) -> Schedule:
        """The pipeline schedule of a step.

        Args:
            micro_batches: micro-batches per step and data-parallel rank.

        Raises:
            ConfigError: the schedule does not exist.
        """
        return build_schedule(
            self.schedule, self.pp, self.virtual_stages, micro_batches, contiguous=self.contiguous_micro_batches
        )

    @property
    def num_stages(self) -> int:
        """Number of virtual stages of the whole pipeline."""
        return self.placement.num_stages

    def rows_multiple(self, *, cuda: bool) -> int:
        """`vocab_multiple` with its default for the device.

        Args:
            cuda: whether ranks compute on GPUs.
        """
        return self.vocab_multiple or (_GPU_VOCAB_MULTIPLE if cuda else 1)

    @property
    def data_size(self) -> int:
        """Number of ranks that hold the same weights and process different tokens, cp * dp."""
        return self.cp * self.dp

    @property
    def ulysses_size(self) -> int:
        """Number of context-parallel ranks that exchange tokens for heads: those of the axis `cp_inner` of the grid."""
        return self.cp if self.cp_kind is ContextParallelKind.ulysses else self.cp_ulysses

    @property
    def core_cp(self) -> int:
        """Number of ranks over which the queries of a sample are divided inside an attention core: those of the axis
        `cp_outer` of the grid."""
        return self.cp // self.ulysses_size

    @property
    def is_ring(self) -> bool:
        """Whether an attention core receives keys in blocks, from one context-parallel rank after another."""
        return self.core_cp > 1 and self.cp_kind is ContextParallelKind.ring

    @property
    def is_two_level(self) -> bool:
        """Whether context-parallel ranks exchange heads in subgroups, and keys and values between these."""
        return self.ulysses_size > 1 and self.core_cp > 1

    @property
    def context_text(self) -> str:
        """Kind of context parallelism, for display: for example "ring", or "ulysses 2 x ring 4"."""
        kind = self.cp_kind.value
        return f"ulysses {self.cp_ulysses} x {kind} {self.core_cp}" if self.cp_ulysses > 1 else kind

    @property
    def expert_domain(self) -> int:
        """Number of ranks of a pipeline stage that hold the same part of each expert that they hold: `ep` divides
        it."""
        return self.data_size if self.expert_tp else self.data_size * self.tp

    @property
    def expert_data_size(self) -> int:
        """Number of ranks that hold the same experts: those of the axis `expert_data` of the grid."""
        return self.expert_domain // self.ep

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which the elements of a layer's experts are divided."""
        return self.ep * (self.tp if self.expert_tp else 1)

    @property
    def shard_size(self) -> int:
        """Number of ranks over which ZeRO shards."""
        return self.zero_shard_size or self.data_size

    def leaves_device(self, block: int, num_layers: int, *, with_head: bool) -> bool:
        """Whether a block's activations are offloaded: not those of the last block, whose backward pass begins at once.

        Args:
            block: index of the block in the model.
            num_layers: blocks of the model.
            with_head: whether the block's pipeline rank also computes the loss.
        """
        return self.offload is Offload.activations and not (with_head and block == num_layers - 1)

    def why_no_cuda_graphs(self) -> str:
        """Why this layout rules out CUDA graphs of whole micro-batches, and what to set; empty if it does not."""
        for name, value, most in (
            ("pp", self.pp, 1),
            ("tp", self.tp, 1),
            ("cp", self.cp, 1),
            ("ep", self.ep, 1),
            ("zero_stage", self.zero_stage, 1),
        ):
            if value > most:
                what = "a micro-batch is captured as a whole, on one rank"
                return f"parallel.{name} = {value}: {what}; set parallel.{name}={most}"
        if self.overlap_param_gather:
            what = "a replayed graph does not wait for the weights of each layer"
            return f"parallel.overlap_param_gather = true: {what}; set parallel.overlap_param_gather=false"
        if self.offload is not Offload.none:
            what = "a replayed graph would read host memory that another micro-batch has overwritten"
            return f"parallel.offload = {self.offload}: {what}; set parallel.offload=none"
        return ""

    def check(self) -> None:
        """Raises ConfigError on invalid sizes, rank order, ZeRO, pipeline, partition or recomputation settings."""
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
        for name in ("bucket_elements", "tp_chunks", "vocab_multiple"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"parallel.{name} = {getattr(self, name)}: must be at least 1")
        self._check_context()
        self._check_zero()
        self._check_experts()
        self._check_pipeline()
        self._check_partition()
        self._check_recompute()

    def _check_context(self) -> None:
        size = self.cp_ulysses
        if size > 1 and self.cp_kind is ContextParallelKind.ulysses:
            raise ConfigError(
                f"parallel.cp_ulysses = {size} with parallel.cp_kind = ulysses, which exchanges heads over all of "
                f"parallel.cp = {self.cp}: remove it, or set parallel.cp_kind to allgather or ring"
            )
        if size < 1 or self.cp % size:
            divisors = ", ".join(str(n) for n in range(1, self.cp + 1) if self.cp % n == 0)
            raise ConfigError(
                f"parallel.cp_ulysses = {size} does not divide parallel.cp = {self.cp}: every subgroup of "
                f"context-parallel ranks has as many; use one of {divisors}"
            )

    def _check_experts(self) -> None:
        if self.ep < 1 or self.expert_domain % self.ep:
            axes = "cp * dp" if self.expert_tp else "tp * cp * dp"
            raise ConfigError(
                f"parallel.ep = {self.ep} does not divide parallel.{axes} = {self.expert_domain}: the experts are "
                "divided over these ranks; choose a divisor"
            )
        if not self.expert_tp and self.tp > 1 and not self.sequence_parallel:
            raise ConfigError(
                "parallel.expert_tp = false requires parallel.sequence_parallel = true with parallel.tp = "
                f"{self.tp}: each rank processes its own share of the sequence; set it, or expert_tp=true"
            )

    def _check_pipeline(self) -> None:
        """Raises ConfigError on virtual stages or contiguous micro-batches that the schedule does not support."""
        if self.placement.num_stages > self.pp == 1:
            raise ConfigError(
                f"parallel.schedule = {self.schedule} with parallel.pp = 1: virtual stages need several pipeline "
                "ranks; use parallel.schedule=1f1b, or raise parallel.pp"
            )
        check_contiguous(self.schedule, self.pp, self.contiguous_micro_batches)

    def _check_partition(self) -> None:
        """Raises ConfigError on invalid layer costs or numbers of blocks."""
        costs = self.layer_costs
        if costs is not None:
            if len(costs) < 3 or min(costs) < 0 or not min(costs[1:-1]) > 0 or not all(map(isfinite, costs)):
                raise ConfigError(
                    f"parallel.layer_costs = {costs}: must be three numbers, the costs of the embedding, of one block "
                    "and of the head, or one for each layer, none negative and the block's above 0"
                )
            if self.partition is not Partition.weighted:
                raise ConfigError(
                    f"parallel.layer_costs = {costs} with parallel.partition = {self.partition}: only weighted uses "
                    "given costs; set parallel.partition=weighted, or remove them"
                )
        for name in ("first_stage_blocks", "last_stage_blocks"):
            blocks = getattr(self, name)
            if blocks is not None and blocks < 0:
                raise ConfigError(f"parallel.{name} = {blocks}: must be 0 or more")
            if blocks is not None and self.num_stages == 1:
                raise ConfigError(
                    f"parallel.{name} = {blocks} with a single stage, which holds all blocks: remove it, or raise "
                    "parallel.pp"
                )

    def _check_recompute(self) -> None:
        if self.recompute_interval < 1:
            raise ConfigError(f"parallel.recompute_interval = {self.recompute_interval}: must be at least 1")
        if self.recompute_interval > 1 and self.recompute not in (Recompute.selective, Recompute.full):
            raise ConfigError(
                f"parallel.recompute_interval = {self.recompute_interval} does nothing with parallel.recompute = "
                f"{self.recompute}: remove it, or set parallel.recompute to selective or full"
            )
        blocks = self.recompute_blocks
        if blocks is None:
            return
        if self.recompute is not Recompute.full:
            raise ConfigError(
                f"parallel.recompute_blocks = {blocks} only applies to parallel.recompute = full, but "
                f"parallel.recompute = {self.recompute}: set parallel.recompute=full, or remove the numbers"
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
                f"parallel.zero_stage = {stage} with parallel.pp = {self.pp}: ZeRO-{stage} reduces gradients after "
                "every micro-batch, which multiplies communication by the number of micro-batches of the pipeline; "
                "use zero_stage=1 with pipelines, or pp=1"
            )
        if stage in GRADIENT_STAGES and self.data_size == 1:
            raise ConfigError(
                f"parallel.zero_stage = {stage} with parallel.cp * dp = 1: there is no rank to shard over; "
                "use zero_stage=1, which needs no more memory in this case, or more data-parallel ranks"
            )
        if self.overlap_param_gather and stage != 1:
            raise ConfigError(
                "parallel.overlap_param_gather = true only applies to parallel.zero_stage = 1, which all-gathers the "
                f"updated weights, but parallel.zero_stage = {stage}: set parallel.overlap_param_gather=false"
            )
        if size is None:
            return
        if stage != 3:
            raise ConfigError(
                f"parallel.zero_shard_size = {size} only applies to parallel.zero_stage = 3, but parallel.zero_stage = "
                f"{stage}: remove it"
            )
        if size < 2 or self.data_size % size:
            raise ConfigError(
                f"parallel.zero_shard_size = {size}: must be at least 2 and divide parallel.cp * dp = {self.data_size}"
            )


class GridCoordinate(NamedTuple):
    """Coordinates of a rank in the grid."""

    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp: int = 0


def place_of(rank: int, parallel: ParallelConfig) -> GridCoordinate:
    """Coordinates of a global rank."""
    found = {}
    for axis in parallel.rank_order:
        rank, found[axis] = divmod(rank, getattr(parallel, axis))
    return GridCoordinate(**found)


def rank_at(place: GridCoordinate, parallel: ParallelConfig) -> int:
    """Inverse of `place_of`."""
    rank = 0
    for axis in reversed(parallel.rank_order):
        rank = rank * getattr(parallel, axis) + getattr(place, axis)
    return rank


def axis_ranks(axis: str, parallel: ParallelConfig) -> list[tuple[int, ...]]:
    """Global ranks of all process groups of an axis of the grid, or of one that combines or divides these.

    See `megads.parallel.grid.ParallelGrid` for their names and meaning.

    The result is the same on every rank. Each line is in ascending order of global ranks, as process groups number
    their members; along a single axis that is also the order of the coordinate.
    """
    divided = {
        **dict.fromkeys(("cp_inner", "cp_outer"), ("cp", parallel.ulysses_size)),
        **dict.fromkeys(("shard", "replica"), ("data", parallel.shard_size)),
        **dict.fromkeys(("ep", "expert_data"), ("expert_domain", parallel.ep)),
    }
    if axis in divided:
        whole, size = divided[axis]
        lines = axis_ranks(whole, parallel)
        cut = [[line[start : start + size] for start in range(0, len(line), size)] for line in lines]
        inner = axis in ("cp_inner", "shard", "ep")
        return [line for subgroups in cut for line in (subgroups if inner else zip(*subgroups, strict=True))]
    along: tuple[str, ...] = ("cp", "dp") if axis in ("data", "expert_domain") else (axis,)
    if axis == "expert_domain" and not parallel.expert_tp:
        along = ("tp", "cp", "dp")
    others = [name for name in reversed(AXES) if name not in along]
    lines = []
    for fixed in product(*(range(getattr(parallel, name)) for name in others)):
        start = GridCoordinate(**dict(zip(others, fixed, strict=True)))
        moves = product(*(range(getattr(parallel, name)) for name in along))
        ranks = (rank_at(start._replace(**dict(zip(along, move, strict=True))), parallel) for move in moves)
        lines.append(tuple(sorted(ranks)))
    return lines


def padded_rows(vocab_size: int, size: int, multiple: int = 1) -> int:
    """Rows of the vocabulary per rank, the same on all ranks; rows beyond the vocabulary are padding.

    Args:
        vocab_size: vocabulary size without padding.
        size: number of tensor-parallel ranks.
        multiple: number that divides the result, see `ParallelConfig.vocab_multiple`.
    """
    return -(-vocab_size // (size * multiple)) * multiple


def exchanged_kv_heads(kv_heads: int, ranks: int) -> int:
    """KV heads that a rank sends in Ulysses' all-to-all, repeated ones included: the fewest that divide over the ranks.

    A rank receives an equal share of them, so that each rank's queries find their KV head there.

    Args:
        kv_heads: KV heads of a tensor-parallel rank.
        ranks: number of ranks of the all-to-all.
    """
    return lcm(kv_heads, ranks)
