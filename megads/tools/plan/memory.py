"""Memory estimate of every rank, before anything is allocated.

Weights, gradients and optimizer state are exact: they follow from shapes, layout and the engine's flat buffers.
Activations and temporaries come from `activations`; tests compare the total with PyTorch's allocator over real steps.
docs/notes/memory.md has the table.

Activations of a plugin's block are not modelled: they are counted as those of a built-in block of the same sizes.
Not counted: the interpreter and its libraries (`megads.runtime.machine_memory` adds them), workspace inside kernels,
and heap fragmentation. GPU memory of CUDA, cuBLAS and NCCL is listed separately, in `non_tensor_memory`.

NCCL creates a communicator when its ranks first use it, and allocates buffers per channel and peer: for receiving, one
for each of its three protocols; for sending, one page for pointers (src/transport/p2p.cc; the sizes are NCCL's defaults
in src/init.cc and src/include/device.h, NCCL 2.28). Every allocation takes whole pages of 2 MiB. The number of channels
depends on the machine: the figures here are for GPUs connected by an NVLink switch, the maximum that a communicator
takes; between nodes there are fewer. None has been measured yet; `scripts/bench/gpu.sh --stage memory` measures all of
them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from math import prod

from megads.model.config import EMBEDDING, TIED_COPY, TIED_PARAMETER, ModelConfig, is_block, layer_costs
from megads.model.model_size import parameter_count, parameter_shapes
from megads.model.sharding import sharding_of
from megads.ops import processor
from megads.ops.processor import GemmBackend
from megads.optim.config import MUON_BATCH_ELEMENTS, OptimConfig, OptimizerName
from megads.optim.groups import (
    BucketLayout,
    Member,
    ParameterRates,
    Role,
    bucket_layouts,
    parameter_rates,
    parameter_role,
    stored_tensor_kinds,
)
from megads.parallel.config import GRADIENT_STAGES, GridCoordinate, ParallelConfig, Recompute, rank_at
from megads.parallel.partition import block_modes, local_shape, stage_bounds
from megads.parallel.pipeline_actions import P2P_CTAS, Schedule, StagePlacement
from megads.parallel.schedule_simulation import most_early_receives
from megads.tools.plan.activations import stage_ops
from megads.tools.plan.memory_timeline import (
    MainGradMemory,
    Moment,
    Op,
    ShardedWeights,
    max_passes_in_flight,
    pipeline_moments,
    sharded_moments,
)
from megads.tools.plan.micro_batch import FP32, INT64, BatchSizes

BIAS_PHASE = "attention bias"
"""Name of the phase that builds the additive attention mask."""
STEADY_ROUNDS = 4  # micro-batches per stage after which the memory pattern of a step repeats


@dataclass(frozen=True)
class Workload:
    """Batch sizes and execution settings of a training step.

    Attributes:
        seq_len: tokens per sample.
        micro_batch_size: samples per micro-batch of one data-parallel rank.
        micro_batches: micro-batches of one data-parallel rank per step.
        weight_bytes: bytes per element of weights and activations: 2 for bf16, 4 for fp32.
        steps_loaded: number of steps whose micro-batches are in memory, prefetched ones included.
        cuda: whether ranks compute on GPUs.
        document_mask: whether attention is masked across packed documents.
        fused: whether megads' kernels compute attention, GELU and the loss.
        loss_chunk: value of ops.loss_chunk.
        optim: optimizer config, which determines the optimizer's state and temporaries.
        cuda_graphs: whether passes are captured in CUDA graphs and replayed.
    """

    seq_len: int
    micro_batch_size: int
    micro_batches: int
    weight_bytes: int
    steps_loaded: int = 1
    cuda: bool = False
    document_mask: bool = False
    fused: bool = False
    loss_chunk: int | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    cuda_graphs: bool = False


@dataclass(frozen=True)
class StageMemory:
    """Memory of one rank of a pipeline stage, all its virtual stages together. Sizes in bytes.

    All ranks of a stage need the same memory.

    Attributes:
        stage: pipeline rank.
        layers: names of its layers, in forward order.
        recomputation: recomputation mode of each of its blocks: none, selective or full.
        first_rank: lowest global rank of the stage.
        parameters: number of unsharded parameters; a tied embedding counts on both stages that hold it.
        rank_parameters: number of parameters per rank, vocabulary padding included.
        weights: weights in the compute dtype; this rank's shard under ZeRO-3.
        fp32_gradients: main_grad (fp32 gradient accumulation), from a step's first backward pass to the reduction.
        reduced_gradients: this rank's shard of the reduced gradients, from the reduction to the end of the step.
        masters: this rank's shard of the fp32 master weights.
        optimizer_state: this rank's shard of the other optimizer state, such as AdamW's two moments.
        attention_bias: the cached additive attention mask and the rotary embedding tables.
        pipeline_buffers: receive and send buffers, and prefetched micro-batches.
        in_flight: maximum number of passes whose backward is not complete, over all virtual stages.
        phases: peak moment of each phase of a step; phases do not overlap.
        non_tensor_memory: GPU memory of CUDA, cuBLAS and communicators, by name; empty on a CPU.
    """

    stage: int
    layers: tuple[str, ...]
    recomputation: tuple[Recompute, ...]
    first_rank: int
    parameters: int
    rank_parameters: int
    weights: int
    fp32_gradients: int
    reduced_gradients: int
    masters: int
    optimizer_state: int
    attention_bias: int
    pipeline_buffers: int
    in_flight: int
    phases: tuple[Moment, ...]
    non_tensor_memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def permanent(self) -> int:
        """Bytes that are allocated during the whole run."""
        return self.weights + self.masters + self.optimizer_state + self.attention_bias + self.pipeline_buffers

    @property
    def saved(self) -> int:
        """Bytes of the rank's checkpoint; an asynchronous save copies them to host memory."""
        return self.masters + self.optimizer_state

    @property
    def fullest(self) -> Moment:
        """The moment with the peak memory."""
        return max(self.phases, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Peak memory of the rank's tensors."""
        return self.permanent + self.fullest.total

    @property
    def device_peak(self) -> int:
        """Peak memory of the GPU: tensors, CUDA, cuBLAS and communicators."""
        return self.peak + sum(self.non_tensor_memory.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of all ranks of a layout.

    Attributes:
        parameters: parameter count of the model, padding excluded and a tied embedding counted once.
        stages: memory of one rank of each pipeline stage.
        ranks_per_stage: product of tensor, context and data parallel sizes.
    """

    parameters: int
    stages: tuple[StageMemory, ...]
    ranks_per_stage: int

    @property
    def largest(self) -> StageMemory:
        """The stage with the highest peak; the first one if several are equal."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def fullest_device(self) -> StageMemory:
        """The stage with the highest `device_peak`; inner pipeline ranks have the most communicators."""
        return max(self.stages, key=lambda stage: stage.device_peak)

    @property
    def all_ranks(self) -> int:
        """Sum of the peak memory of all ranks, in bytes."""
        return self.ranks_per_stage * sum(stage.peak for stage in self.stages)


def memory_plan(
    model: ModelConfig, parallel: ParallelConfig, workload: Workload, ranks: Collection[int] | None = None
) -> MemoryPlan:
    """Estimates the memory of every rank.

    Args:
        model: model config.
        parallel: the layout; recompute and partition must be resolved (not auto).
        workload: the training step.
        ranks: pipeline ranks to plan; None: all.

    Raises:
        ConfigError: there are more pipeline stages than layers, or more recomputed blocks than blocks.
    """
    costs = layer_costs(model)
    names, bounds = list(costs), stage_bounds(list(costs.values()), parallel)
    layers = [tuple(names[start:end]) for start, end in pairwise(bounds)]
    shapes = parameter_shapes(model)
    if model.tie_embeddings:
        shapes[TIED_COPY] = shapes[TIED_PARAMETER]
    schedule, stages = parallel.schedule_of(_steady(parallel, workload.micro_batches)), list[StageMemory]()
    for rank in range(parallel.pp) if ranks is None else sorted(ranks):
        held = {stage: layers[stage] for stage in schedule.placement.stages_of(rank)}
        stages.append(_stage_memory(model, parallel, workload, shapes, schedule, rank, held))
    return MemoryPlan(parameter_count(model), tuple(stages), parallel.world_size // parallel.pp)


def _steady(parallel: ParallelConfig, micro_batches: int) -> int:
    """Reduced number of micro-batches with the same peak memory: beyond the steady state the pattern repeats.

    This holds for schedules whose number of micro-batches in flight does not grow with that of a step. It does grow
    with `contiguous_micro_batches` beyond the reduced number: there the plan is too low.
    """
    beyond = micro_batches - STEADY_ROUNDS * parallel.num_stages
    return micro_batches - max(0, beyond // parallel.pp * parallel.pp)


def _stage_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    workload: Workload,
    shapes: dict[str, tuple[int, ...]],
    schedule: Schedule,
    rank: int,
    layers_of: Mapping[int, tuple[str, ...]],
) -> StageMemory:
    """Memory of a pipeline rank, given the layers of each of its virtual stages."""
    micro_batch = one_pass(model, parallel, workload)
    layers = tuple(chain.from_iterable(layers_of.values()))
    held = {name: shape for name, shape in shapes.items() if _layer_of(name) in layers}
    if model.tie_embeddings and EMBEDDING in layers:
        held.pop(TIED_COPY, None)
    table = sharding_of(model)
    multiple = parallel.rows_multiple(cuda=workload.cuda)
    local = {name: prod(local_shape(name, shape, table, parallel.tp, multiple)) for name, shape in held.items()}
    buckets = _buckets(local, model, parallel, workload.optim)
    low, flat = workload.weight_bytes, sum(bucket.numel for bucket in buckets)
    share = _share(flat, parallel)
    blocks = [layer for layer in layers if is_block(layer)]
    modes = block_modes(parallel, rank, len(blocks))
    recompute = dict(zip(blocks, modes, strict=True))
    ops = _ops_of(micro_batch, layers_of, recompute, schedule.placement)
    in_blocks = [micro_batch.of_layer(block) for block in blocks]
    masks = {sizes.mask_kind: sizes.bias_table for sizes in in_blocks}
    rotations = {(s.model.rope_theta, s.model.rope_scaling): s.rotary_tables for s in in_blocks if s.rotary_tables}
    mask = Moment(BIAS_PHASE, transient=_bias_transient(micro_batch, max(masks.values(), default=0)))
    memory = StageMemory(
        stage=rank,
        layers=layers,
        recomputation=tuple(modes),
        first_rank=rank_at(GridCoordinate(pp=rank), parallel),
        parameters=sum(prod(shape) for shape in held.values()),
        rank_parameters=sum(local.values()),
        weights=low * flat,
        fp32_gradients=FP32 * flat,
        reduced_gradients=FP32 * share,
        masters=FP32 * share,
        optimizer_state=sum(
            FP32 * len(stored_tensor_kinds(workload.optim, bucket.role)) * _share(bucket.numel, parallel)
            for bucket in buckets
        ),
        attention_bias=sum(masks.values()) * micro_batch.mask_bytes + sum(rotations.values()),
        pipeline_buffers=_pipeline_buffers(
            micro_batch, parallel, workload, layers_of, most_early_receives(schedule, rank)
        ),
        in_flight=max_passes_in_flight(schedule, rank),
        phases=(*_pipeline_phases(ops, buckets, parallel, workload, schedule, rank), mask),
        non_tensor_memory=non_tensor_memory(parallel, rank, tied=model.tie_embeddings) if workload.cuda else {},
    )
    if parallel.zero_stage not in GRADIENT_STAGES:
        return memory
    (only,) = ops.values()  # without pipelines
    return _zero_sharded(memory, only, local, model, parallel, workload)


def one_pass(model: ModelConfig, parallel: ParallelConfig, workload: Workload) -> BatchSizes:
    """Sizes of one micro-batch on a rank."""
    return BatchSizes(
        model,
        parallel.tp,
        workload.micro_batch_size,
        workload.seq_len,
        workload.weight_bytes,
        workload.cuda,
        sequence_parallel=parallel.sequence_parallel,
        cp=parallel.cp,
        document_mask=workload.document_mask,
        fused=workload.fused,
        loss_chunk=workload.loss_chunk,
        vocab_multiple=parallel.rows_multiple(cuda=workload.cuda),
        fused_accumulation=parallel.zero_stage not in GRADIENT_STAGES,
    )


def _ops_of(
    micro_batch: BatchSizes,
    layers_of: Mapping[int, tuple[str, ...]],
    recompute: Mapping[str, Recompute],
    placement: StagePlacement,
) -> dict[int, list[Op]]:
    """Operations of each virtual stage of a rank; activations between stages of the same rank are not copied."""
    ops = {
        stage: stage_ops(
            micro_batch,
            layers,
            {layer: recompute[layer] for layer in layers if is_block(layer)},
            first=stage == 0 or not placement.crosses(stage - 1, stage),
            last=stage == placement.num_stages - 1,
        )
        for stage, layers in layers_of.items()
    }
    if micro_batch.model.tie_embeddings and {0, placement.num_stages - 1} <= ops.keys():
        # Head and embedding share a weight; the head's backward pass comes first and allocates its gradient.
        at = next(i for i, op in enumerate(ops[0]) if op.name == "embedding")
        ops[0][at] = replace(ops[0][at], shared=True)
    return ops


def _share(elements: int, parallel: ParallelConfig) -> int:
    """Number of a stage's elements that one rank's optimizer updates."""
    return elements // parallel.data_size if parallel.zero_stage else elements


def _step_transient(buckets: Sequence[BucketLayout], parallel: ParallelConfig, workload: Workload) -> int:
    """Temporary bytes of the optimizer step under ZeRO-0 and ZeRO-1, gradients excluded.

    LAMB and Lion need one temporary of the size of the largest bucket's shard of master weights. Muon sends its update
    directions to the ranks that own the matrices, which orthogonalize them (three more copies of each batch of
    matrices, in fp32 on CPUs without bf16 GEMMs) and send the updates back.
    """
    name, low = workload.optim.name, workload.weight_bytes
    if name in (OptimizerName.lamb, OptimizerName.lion):
        return FP32 * max(_share(bucket.numel, parallel) for bucket in buckets)
    if name != OptimizerName.muon:
        return 0
    hidden = [bucket for bucket in buckets if bucket.role is Role.hidden]
    elements = sum(bucket.numel for bucket in hidden)
    share = _share(elements, parallel)
    owned = max(elements // parallel.data_size, max((_largest(bucket) for bucket in hidden), default=0))
    widened = not workload.cuda and processor.torch_loops_over_bf16()
    return low * (share + 2 * owned) + (FP32 if widened else low) * 4 * min(owned, MUON_BATCH_ELEMENTS)


def _largest(bucket: BucketLayout) -> int:
    return max(slot.member.numel for slot in bucket.slots)


def _pipeline_phases(
    ops: Mapping[int, Sequence[Op]],
    buckets: Sequence[BucketLayout],
    parallel: ParallelConfig,
    workload: Workload,
    schedule: Schedule,
    rank: int,
) -> list[Moment]:
    """Peak moment of each phase of a step under ZeRO-0 and ZeRO-1."""
    low, flat = workload.weight_bytes, sum(bucket.numel for bucket in buckets)
    full, share = FP32 * flat, _share(flat, parallel)
    on_cpu = not workload.cuda
    ours = processor.gemm(bf16=low < FP32, kernels=workload.fused) is GemmBackend.megads
    in_place = ours and on_cpu
    allocated = (lambda _made: full) if workload.cuda_graphs else _allocated_main_grads(buckets)
    main_grads = MainGradMemory(allocated, full, FP32 // low, cast=low < FP32 and on_cpu, in_place=in_place)
    passes = pipeline_moments(schedule, rank, ops, main_grads)
    reduced, between = FP32 * share, Moment("")
    if workload.cuda_graphs:  # main_grad is not freed after the reduction, and graphs keep their memory pool
        reduced = full + (FP32 * share if share < flat else 0)
        between = max(passes, key=lambda moment: moment.total - moment.gradients)
    transient = _step_transient(buckets, parallel, workload)
    phases = [*passes, replace(between, name="optimizer step", gradients=reduced, transient=transient)]
    if parallel.data_size > 1 and parallel.zero_stage:
        # gloo copies the buffers of reductions and all-gathers; NCCL does not.
        copied = 0 if workload.cuda else 1
        gathered = copied * low * max(bucket.numel for bucket in buckets)
        phases += [
            replace(between, name="gradient reduction", gradients=full + FP32 * share, transient=copied * full),
            replace(between, name="weight all-gather", gradients=reduced, transient=gathered),
        ]
    return phases


def _zero_sharded(
    memory: StageMemory,
    ops: Sequence[Op],
    local: dict[str, int],
    model: ModelConfig,
    parallel: ParallelConfig,
    workload: Workload,
) -> StageMemory:
    """Memory of the same rank under ZeRO-2 or ZeRO-3; the attention mask is unchanged."""
    optim, by_role = workload.optim, {role: dict[ParameterRates, list[int]]() for role in Role}
    width_scale = model.width_scale(muon=optim.is_muon)
    for name, elements in local.items():
        tied = model.tie_embeddings and name in (TIED_PARAMETER, TIED_COPY)
        known = TIED_PARAMETER if tied else name
        role = parameter_role(known, tied, muon=optim.is_muon)
        by_role[role].setdefault(parameter_rates(known, role, optim, width_scale), []).append(elements)
    groups = {(role, rates): sizes for role, of_role in by_role.items() for rates, sizes in of_role.items()}
    sharded = ShardedWeights(parallel.zero_stage, parallel.shard_size, groups, workload.weight_bytes)
    owned = sum(sharded.partitions)
    mask = [moment for moment in memory.phases if moment.name == BIAS_PHASE]
    return replace(
        memory,
        weights=sharded.weights,
        fp32_gradients=sharded.accumulated_gradients(workload.micro_batches),
        reduced_gradients=FP32 * owned,
        masters=FP32 * owned,
        optimizer_state=sum(
            FP32 * len(stored_tensor_kinds(optim, role)) * elements
            for (role, _), elements in zip(sharded.groups, sharded.partitions, strict=True)
        ),
        phases=(*sharded_moments(ops, sharded, workload.micro_batches, cuda=workload.cuda), *mask),
    )


def _layer_of(name: str) -> str:
    """Layer that owns a parameter: blocks.3 for blocks.3.mlp.up.weight."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def _buckets(
    local: dict[str, int], model: ModelConfig, parallel: ParallelConfig, optim: OptimConfig
) -> list[BucketLayout]:
    """The optimizer's buckets on a rank, given its number of elements of every parameter."""
    members, width_scale = [], model.width_scale(muon=optim.is_muon)
    for name, elements in local.items():
        is_tied = model.tie_embeddings and name in (TIED_PARAMETER, TIED_COPY)
        role = parameter_role(TIED_PARAMETER if is_tied else name, is_tied, muon=optim.is_muon)
        rates = parameter_rates(TIED_PARAMETER if is_tied else name, role, optim, width_scale)
        members.append(Member(name, elements, role, rates=rates))
    ranks = parallel.data_size if parallel.zero_stage else 1
    return bucket_layouts(members, ranks, parallel.bucket_elements)


def _allocated_main_grads(buckets: Sequence[BucketLayout]) -> Callable[[int], int]:
    """Bytes of main_grad allocated in a step's first backward pass, by bytes of matrix gradients computed so far.

    A bucket is allocated as a whole. Buckets of biases and norms, which no operation counts, are allocated with the
    first one.
    """
    others = FP32 * sum(bucket.numel for bucket in buckets if not bucket.role.decays)
    matrices = sorted((bucket for bucket in buckets if bucket.role.decays), key=lambda bucket: bucket.begins)
    allocated = list(accumulate((FP32 * bucket.numel for bucket in matrices), initial=others))
    made_by = list(accumulate(FP32 * sum(slot.member.numel for slot in bucket.slots) for bucket in matrices))

    def of(made: int) -> int:
        return allocated[min(bisect_left(made_by, made) + 1, len(matrices))] if made else 0

    return of


def _pipeline_buffers(
    micro_batch: BatchSizes, parallel: ParallelConfig, workload: Workload, stages: Collection[int], early: int
) -> int:
    """Bytes that the engine holds between passes.

    The buffers of receives that are posted before their tensors are used, and one activation being sent per downstream
    peer. The first and last stage hold tokens, labels and mask of every loaded micro-batch, and this context-parallel
    rank's share of those of the current step.

    Args:
        micro_batch: the micro-batch.
        parallel: the layout.
        workload: the workload.
        stages: virtual stages of the rank.
        early: see `most_early_receives`.
    """
    placement = parallel.placement
    after = {placement.rank_of(s + 1) for s in stages if placement.crosses(s, s + 1)}
    p2p_buffers = micro_batch.hidden * (early + len(after))
    own = micro_batch.tokens * (2 * INT64 + FP32) if {0, parallel.num_stages - 1} & set(stages) else 0
    cut = own if parallel.cp > 1 else 0
    return p2p_buffers + workload.micro_batches * (workload.steps_loaded * own * parallel.cp + cut)


def _bias_transient(micro_batch: BatchSizes, elements: int) -> int:
    """Temporary bytes while the cached mask is built: distances, a boolean mask, and the fp32 mask before a cast.

    Args:
        micro_batch: the micro-batch.
        elements: number of elements of the mask.
    """
    if not elements:
        return 0
    distances = (FP32 + 1) * micro_batch.seq_len**2 // micro_batch.cp
    return distances + (FP32 * elements if micro_batch.mask_bytes < FP32 else 0)


_MIB = 2**20
CONTEXT_BYTES = 640 * _MIB
"""CUDA context on Hopper and the loaded kernels of PyTorch, cuBLAS and megads; an estimate."""
CUBLAS_BYTES = 2 * 32 * _MIB
"""Workspaces of cuBLAS and cuBLASLt on Hopper, 32 MiB each as set by PyTorch; `:4096:8` of deterministic runs has the
same size."""
_PAGE_BYTES = 2 * _MIB
_CHANNELS = 24
"""Channels of a collective communicator; point-to-point communicators have `P2P_CTAS`."""
_STEPS = 8
_LL_BYTES = 8 * 512 * _STEPS * 16
_LL128_BYTES = 120 * 640 * _STEPS * 8
_SIMPLE_BYTES = 4 * _MIB
_SEND_BYTES = _PAGE_BYTES
RECEIVE_BYTES = -(-(_LL_BYTES + _LL128_BYTES + _SIMPLE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
"""Buffers of one channel to send to, and to receive from, one peer: 2 and 10 MiB."""


@dataclass(frozen=True)
class _Communicator:
    """A communicator of a rank.

    Attributes:
        name: purpose of the communicator.
        ranks: number of ranks.
        pairs: whether it is a point-to-point communicator with one peer; otherwise it runs collectives.
    """

    name: str
    ranks: int
    pairs: bool = False

    @property
    def bytes(self) -> int:
        """Bytes on this rank's GPU: a ring and, with more than two ranks, trees, which have other peers."""
        if self.pairs:
            return P2P_CTAS * (_SEND_BYTES + RECEIVE_BYTES)
        neighbours = 1 if self.ranks == 2 else 2
        return neighbours * _CHANNELS * (_SEND_BYTES + RECEIVE_BYTES)


def communicators(parallel: ParallelConfig, rank: int, *, tied: bool) -> list[_Communicator]:
    """Communicators that a rank creates during training.

    Args:
        parallel: the layout.
        rank: pipeline rank.
        tied: whether embedding and head share their weight.
    """
    return [found for found in _all_communicators(parallel, rank, tied) if found.ranks > 1]


def _all_communicators(parallel: ParallelConfig, rank: int, tied: bool) -> Iterator[_Communicator]:
    yield _Communicator("all ranks", parallel.world_size)
    yield _Communicator("tensor parallel", parallel.tp)
    yield _Communicator("context parallel", parallel.cp)
    yield _Communicator("gradients", parallel.data_size)
    if parallel.zero_stage in GRADIENT_STAGES and parallel.shard_size < parallel.data_size:
        yield _Communicator("shards", parallel.shard_size)
        yield _Communicator("replicas of a shard", parallel.data_size // parallel.shard_size)
    yield _Communicator("pipeline", parallel.pp)
    placement = parallel.placement
    pairs = {frozenset(pair) for pair in pairwise(placement.ranks)}
    # Transfers up and down the pipeline use separate communicators, so a pair of ranks has two, one per direction.
    for neighbour in sorted({other for pair in pairs if rank in pair for other in pair} - {rank}):
        yield _Communicator(f"p2p with stage {neighbour}", 2, pairs=True)
    if tied and rank in placement.ends and len(set(placement.ends)) == 2:
        yield _Communicator("tied embedding", 2)


def non_tensor_memory(parallel: ParallelConfig, rank: int, *, tied: bool) -> dict[str, int]:
    """GPU memory outside of tensors, in bytes by component; arguments as in `communicators`."""
    found = communicators(parallel, rank, tied=tied)
    return {"CUDA context and kernels": CONTEXT_BYTES, "cuBLAS workspaces": CUBLAS_BYTES} | {
        f"NCCL, {communicator.name}": communicator.bytes for communicator in found
    }
