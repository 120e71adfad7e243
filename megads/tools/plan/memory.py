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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod

from megads.api import (
    EMBEDDING,
    GRADIENT_STAGES,
    TIED_COPY,
    TIED_PARAMETER,
    BucketLayout,
    GridCoordinate,
    Member,
    ModelConfig,
    OptimizerName,
    ParallelConfig,
    ParallelStyle,
    Recompute,
    Schedule,
    bucket_layouts,
    parameter_count,
    parameter_role,
    parameter_shapes,
    router_state_shapes,
)
from megads.model.config import is_block
from megads.model.sharding import sharding_of
from megads.ops import processor
from megads.optim.config import MUON_BATCH_ELEMENTS
from megads.optim.groups import ParameterRates, Role, parameter_rates, stored_tensor_kinds
from megads.parallel.config import rank_at
from megads.parallel.partition import first_match, local_shape
from megads.parallel.pipeline_actions import P2P_CTAS
from megads.parallel.schedule_simulation import most_early_receives, passes_in_flight
from megads.tools.plan.activations import stage_ops
from megads.tools.plan.memory_timeline import (
    MainGradMemory,
    Moment,
    Op,
    ShardedWeights,
    most_on_host,
    pipeline_moments,
    sharded_moments,
)
from megads.tools.plan.micro_batch import FP32, INT64, BatchSizes, adds_to_main_grad
from megads.tools.plan.workload import (
    StageLayers,
    Workload,
    block_recompute,
    leaving_blocks,
    shortened,
    stage_layers,
)

BIAS_PHASE = "attention bias"
"""Name of the phase that builds the additive attention mask."""
STEADY_ROUNDS = 4  # micro-batches per stage after which the memory pattern of a step repeats


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
        quantized_weights: FP8 copies of weights, one for each of the two products with it.
        host_activations: most bytes of activations that are offloaded at a time.
        on_cpu: whether the rank computes on a CPU, where they are in the same memory.
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
    quantized_weights: int = 0
    host_activations: int = 0
    on_cpu: bool = False

    @property
    def permanent(self) -> int:
        """Bytes that are allocated during the whole run."""
        weights = self.weights + self.quantized_weights
        return weights + self.masters + self.optimizer_state + self.attention_bias + self.pipeline_buffers

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
        return self.permanent + self.fullest.total + (self.host_activations if self.on_cpu else 0)

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
    shapes, layers = parameter_shapes(model), stage_layers(model, parallel)
    if model.tie_embeddings:
        shapes[TIED_COPY] = shapes[TIED_PARAMETER]
    # A shorter step has the same peak.
    micro_batches = shortened(parallel, workload.micro_batches, STEADY_ROUNDS)
    schedule, stages = parallel.schedule_of(micro_batches), list[StageMemory]()
    for rank in range(parallel.pp) if ranks is None else sorted(ranks):
        held = {stage: layers[stage] for stage in schedule.placement.stages_of(rank)}
        stages.append(_stage_memory(model, parallel, workload, shapes, schedule, rank, held))
    return MemoryPlan(parameter_count(model), tuple(stages), parallel.world_size // parallel.pp)


def _stage_memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    workload: Workload,
    shapes: dict[str, tuple[int, ...]],
    schedule: Schedule,
    rank: int,
    stages: Mapping[int, StageLayers],
) -> StageMemory:
    """Memory of a pipeline rank, given the layers of each of its virtual stages."""
    micro_batch = one_pass(model, parallel, workload)
    layers = {name: mode for stage in stages.values() for name, mode in stage.items()}
    prefixes = tuple(f"{layer}." for layer in layers)
    held = {name: shape for name, shape in shapes.items() if name.startswith(prefixes)}
    if model.tie_embeddings and EMBEDDING in layers:
        held.pop(TIED_COPY, None)
    members = _members(held, model, parallel, workload)
    modes = block_recompute(layers)
    leaving = leaving_blocks(model, parallel, layers)
    ops = _ops_of(micro_batch, stages, schedule, leaving)
    blocks = [micro_batch.of_layer(name) for name in layers if is_block(name)]
    masks = {block.mask_kind: block.bias_table for block in blocks if block.bias_table}
    rotations = {(b.model.rope_theta, b.model.rope_scaling): b.rotary_tables for b in blocks if b.rotary_tables}
    # While a cached mask is built: distances, a boolean mask, and the fp32 mask before a cast.
    building = (FP32 + 1) * micro_batch.seq_len**2 // micro_batch.core_cp if masks else 0
    building += FP32 * max(masks.values(), default=0) if micro_batch.mask_bytes < FP32 else 0
    mask = Moment(BIAS_PHASE, transient=building)
    if parallel.zero_stage in GRADIENT_STAGES:
        roles_and_rates = {role: dict[ParameterRates, list[int]]() for role in Role}
        for member in members:
            roles_and_rates[member.role].setdefault(member.rates, []).append(member.numel)
        groups = {(role, rates): sizes for role, found in roles_and_rates.items() for rates, sizes in found.items()}
        sharded = ShardedWeights(parallel.zero_stage, parallel.shard_size, groups, workload.weight_bytes)
        weights, gradients = sharded.weights, sharded.accumulated_gradients(workload.micro_batches)
        owned = [(role, elements) for (role, _), elements in zip(groups, sharded.partitions, strict=True)]
        (only,) = ops.values()  # without pipelines
        phases = list(sharded_moments(only, sharded, workload.micro_batches, cuda=workload.cuda))
    else:
        shards = parallel.data_size if parallel.zero_stage else 1
        expert_shards = parallel.expert_data_size if parallel.zero_stage else 1
        buckets = bucket_layouts(members, shards, parallel.bucket_elements, expert_shards)
        flat = sum(bucket.numel for bucket in buckets)
        weights, gradients = workload.weight_bytes * flat, FP32 * flat
        owned = [(bucket.role, shard_elements(bucket, parallel)) for bucket in buckets]
        phases = _pipeline_phases(ops, buckets, parallel, workload, schedule, rank)
    masters = FP32 * sum(elements for _, elements in owned)
    in_flight = max(waiting.total() for _, waiting in passes_in_flight(schedule, rank))
    agrees = model.moe.enabled or bool(workload.float8.blocks(model.num_layers))
    outside = non_tensor_memory(parallel, rank, tied=model.tie_embeddings, agrees_over_cp=agrees)
    weights += FP32 * sum(
        prod(shape) for name, shape in router_state_shapes(model).items() if name.startswith(prefixes)
    )
    return StageMemory(
        stage=rank,
        layers=tuple(layers),
        recomputation=tuple(modes),
        first_rank=rank_at(GridCoordinate(pp=rank), parallel),
        parameters=sum(prod(shape) for shape in held.values()),
        rank_parameters=sum(member.numel for member in members),
        weights=weights,
        fp32_gradients=gradients,
        reduced_gradients=masters,
        masters=masters,
        optimizer_state=sum(
            FP32 * len(stored_tensor_kinds(workload.optim, role)) * elements for role, elements in owned
        ),
        attention_bias=sum(masks.values()) * micro_batch.mask_bytes + sum(rotations.values()),
        pipeline_buffers=_pipeline_buffers(
            micro_batch, parallel, workload, stages, most_early_receives(schedule, rank), in_flight
        ),
        in_flight=in_flight,
        phases=(*phases, mask),
        non_tensor_memory=outside if workload.cuda else {},
        quantized_weights=_quantized_weights(members, model, workload),
        host_activations=most_on_host(schedule, rank, ops),
        on_cpu=not workload.cuda,
    )


def _quantized_weights(members: Sequence[Member], model: ModelConfig, workload: Workload) -> int:
    """Bytes of the FP8 copies of a rank's weights: two of each weight that multiplies in FP8."""
    in_fp8 = {f"blocks.{index}" for index in workload.float8.blocks(model.num_layers)}
    table = sharding_of(model).parameters
    found = 0
    for member in members:
        module, _, kind = member.name.rpartition(".")
        linear = kind == "weight" and first_match(table, module) in (ParallelStyle.column, ParallelStyle.row)
        if linear and ".".join(module.split(".")[:2]) in in_fp8:
            found += 2 * member.numel
    return found


def _members(
    held: Mapping[str, tuple[int, ...]], model: ModelConfig, parallel: ParallelConfig, workload: Workload
) -> list[Member]:
    """Parameters of a rank as the optimizer sees them, given the unsharded shapes of those of its stages."""
    found, optim, table = list[Member](), workload.optim, sharding_of(model)
    multiple, width_scale = parallel.rows_multiple(cuda=workload.cuda), model.width_scale(muon=optim.is_muon)
    for name, shape in held.items():
        elements = prod(local_shape(name, shape, table, parallel.tp, multiple, parallel.expert_shards))
        expert = first_match(table.parameters, name.rpartition(".")[0]) is ParallelStyle.experts
        tied = model.tie_embeddings and name in (TIED_PARAMETER, TIED_COPY)
        known = TIED_PARAMETER if tied else name
        role = parameter_role(known, tied, muon=optim.is_muon)
        rates = parameter_rates(known, role, optim, width_scale)
        found.append(Member(name, elements, role, rates=rates, expert=expert))
    return found


def shard_elements(bucket: BucketLayout, parallel: ParallelConfig) -> int:
    """Number of elements of a bucket that a rank updates under ZeRO-0 and ZeRO-1."""
    ranks = parallel.expert_data_size if bucket.expert else parallel.data_size
    return bucket.numel // (ranks if parallel.zero_stage else 1)


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
        cp_kind=parallel.cp_kind,
        cp_ulysses=parallel.cp_ulysses,
        document_mask=workload.document_mask,
        fused=workload.fused,
        loss_chunk=workload.loss_chunk,
        mlp_chunk=workload.mlp_chunk,
        vocab_multiple=parallel.rows_multiple(cuda=workload.cuda),
        fused_accumulation=parallel.zero_stage not in GRADIENT_STAGES,
        ep=parallel.ep,
        expert_tp=parallel.expert_tp,
        worst_load=workload.worst_load,
    )


def _ops_of(
    micro_batch: BatchSizes, stages: Mapping[int, StageLayers], schedule: Schedule, leaving: Collection[str]
) -> dict[int, list[Op]]:
    """Operations of each virtual stage of a rank; activations between stages of the same rank are not copied."""
    placement = schedule.placement
    ops = {}
    for stage, layers in stages.items():
        first = stage == 0 or not placement.crosses(stage - 1, stage)
        last = stage == placement.num_stages - 1
        ops[stage] = stage_ops(micro_batch, layers, first=first, last=last, leaving=leaving)
    if micro_batch.model.tie_embeddings and {0, placement.num_stages - 1} <= ops.keys():
        # Head and embedding share a weight; the head's backward pass comes first and allocates its gradient.
        at = next(i for i, op in enumerate(ops[0]) if op.name == "embedding")
        ops[0][at] = replace(ops[0][at], shared=True)
    return ops


def _step_transient(buckets: Sequence[BucketLayout], parallel: ParallelConfig, workload: Workload) -> int:
    """Temporary bytes of the optimizer step under ZeRO-0 and ZeRO-1, gradients excluded.

    LAMB and Lion need one temporary of the size of the largest bucket's shard of master weights. Muon sends its update
    directions to the ranks that own the matrices, which orthogonalize them (three more copies of each batch of
    matrices, in fp32 on CPUs without bf16 GEMMs) and send the updates back.
    """
    name, low = workload.optim.name, workload.weight_bytes
    if name in (OptimizerName.lamb, OptimizerName.lion):
        return FP32 * max(shard_elements(bucket, parallel) for bucket in buckets)
    if name != OptimizerName.muon:
        return 0
    hidden = [bucket for bucket in buckets if bucket.role is Role.hidden]
    elements = sum(bucket.numel for bucket in hidden)
    sharded = sum(shard_elements(bucket, parallel) for bucket in hidden)
    largest = max((slot.member.numel for bucket in hidden for slot in bucket.slots), default=0)
    owned = max(elements // parallel.data_size, largest)
    widened = not workload.cuda and processor.torch_loops_over_bf16()
    return low * (sharded + 2 * owned) + (FP32 if widened else low) * 4 * min(owned, MUON_BATCH_ELEMENTS)


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
    full, share = FP32 * flat, sum(shard_elements(bucket, parallel) for bucket in buckets)
    on_cpu = not workload.cuda
    in_place = on_cpu and adds_to_main_grad(low, fused=workload.fused)
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
    micro_batch: BatchSizes,
    parallel: ParallelConfig,
    workload: Workload,
    stages: Collection[int],
    early: int,
    in_flight: int,
) -> int:
    """Bytes that the engine holds between passes.

    The buffers of receives that are posted before their tensors are used, and one activation being sent per downstream
    peer. The first and last stage hold tokens, labels and mask: on a CPU of every loaded micro-batch, and this
    context-parallel rank's share of those of the current step; on a GPU of the micro-batches in flight, and of the one
    that is copied to it, as loaded steps stay on the host.

    Args:
        micro_batch: the micro-batch.
        parallel: the layout.
        workload: the workload.
        stages: virtual stages of the rank.
        early: see `most_early_receives`.
        in_flight: see `StageMemory`.
    """
    placement = parallel.placement
    after = {placement.rank_of(s + 1) for s in stages if placement.crosses(s, s + 1)}
    p2p_buffers = micro_batch.hidden * (early + len(after))
    own = micro_batch.tokens * (2 * INT64 + FP32) if {0, parallel.num_stages - 1} & set(stages) else 0
    if workload.cuda:
        return p2p_buffers + own * (in_flight + 1)
    cut = own if parallel.cp > 1 else 0
    return p2p_buffers + workload.micro_batches * (workload.steps_loaded * own * parallel.cp + cut)


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


def communicators(
    parallel: ParallelConfig, rank: int, *, tied: bool, agrees_over_cp: bool = False
) -> list[_Communicator]:
    """Communicators that a rank creates during training.

    Args:
        parallel: the layout.
        rank: pipeline rank.
        tied: whether embedding and head share their weight.
        agrees_over_cp: whether all context-parallel ranks agree on scales of FP8 or on the load of experts.
    """
    sizes = {
        "all ranks": parallel.world_size,
        "tensor parallel": parallel.tp,
        "context parallel": 1 if parallel.is_two_level and not agrees_over_cp else parallel.cp,
        "gradients": parallel.data_size,
    }
    if parallel.is_two_level:
        sizes |= {"context parallel, heads": parallel.ulysses_size, "context parallel, keys": parallel.core_cp}
    if parallel.ep > 1 or not parallel.expert_tp:
        sizes |= {"expert parallel": parallel.ep, "gradients of experts": parallel.expert_data_size}
    if parallel.zero_stage in GRADIENT_STAGES and parallel.shard_size < parallel.data_size:
        sizes |= {"shards": parallel.shard_size, "replicas of a shard": parallel.data_size // parallel.shard_size}
    found = [_Communicator(name, ranks) for name, ranks in (sizes | {"pipeline": parallel.pp}).items() if ranks > 1]
    placement = parallel.placement
    pairs = {frozenset(pair) for pair in pairwise(placement.ranks)}
    # Transfers up and down the pipeline use separate communicators, so a pair of ranks has two, one per direction.
    neighbours = sorted({other for pair in pairs if rank in pair for other in pair} - {rank})
    found += [_Communicator(f"p2p with stage {neighbour}", 2, pairs=True) for neighbour in neighbours]
    if tied and rank in placement.ends and len(set(placement.ends)) == 2:
        found.append(_Communicator("tied embedding", 2))
    return found


def non_tensor_memory(
    parallel: ParallelConfig, rank: int, *, tied: bool, agrees_over_cp: bool = False
) -> dict[str, int]:
    """GPU memory outside of tensors, in bytes by component; arguments as in `communicators`."""
    found = communicators(parallel, rank, tied=tied, agrees_over_cp=agrees_over_cp)
    return {"CUDA context and kernels": CONTEXT_BYTES, "cuBLAS workspaces": CUBLAS_BYTES} | {
        f"NCCL, {communicator.name}": communicator.bytes for communicator in found
    }
