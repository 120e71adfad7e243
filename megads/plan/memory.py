"""Memory of every rank before anything is allocated.

Weights, gradients and optimizer state are exact: they follow from shapes, layout and the engine's flat buffers.
Activations and temporaries follow from `megads.plan.activations`; tests compare the sum with what torch's allocator
counts over real steps. docs/memory.md has the table.

Activations of a plugin's block are not modelled: they count as those of the built-in block of the same sizes.
Not counted: the interpreter and its libraries (`megads.runtime.machine_memory` adds them), scratch space inside
kernels, fragmentation of the heap. What CUDA, cuBLAS and NCCL take of a GPU is apart, in `beside_tensors`.

NCCL makes a communicator when its ranks first use it, and allocates buffers for every channel and every neighbour: at
the receiving end one for each of its three protocols, at the sending end a page for pointers (src/transport/p2p.cc; the
sizes are NCCL's defaults in src/init.cc and src/include/device.h, NCCL 2.28). Every allocation takes whole pages of 2
MiB. How many channels there are follows from the machine: the figures here are those of GPUs that a switch of NVLink
connects, the most that a communicator takes; between nodes there are fewer. None has been measured yet:
`scripts/bench/gpu.sh --stage memory` measures all of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from math import prod

from megads.model.config import ModelConfig, sharding_of
from megads.model.stage_names import EMBEDDING, TIED_COPY, TIED_PARAMETER, is_block, stage_weights
from megads.ops import processor
from megads.optim.config import MUON_BATCH_ELEMENTS, OptimConfig, OptimizerName
from megads.optim.groups import (
    BucketLayout,
    Member,
    Rates,
    Role,
    bucket_layouts,
    held_kinds,
    parameter_rates,
    parameter_role,
)
from megads.parallel.config import GRADIENT_STAGES, ParallelConfig, Recompute
from megads.parallel.partition import block_modes, local_shape, stage_bounds
from megads.parallel.pipeline_actions import P2P_CTAS, Schedule, StagePlacement
from megads.parallel.rank_order import GridCoordinate, rank_at
from megads.plan.activations import stage_ops
from megads.plan.memory_timeline import (
    GradientSums,
    Moment,
    Op,
    ShardedWeights,
    most_waiting,
    pipeline_phases,
    sharded_phases,
)
from megads.plan.micro_batch import FP32, INT64, Pass
from megads.plan.model_size import parameter_count, parameter_shapes

BIAS_PHASE = "attention bias"
"""The moment at which the additive mask is built."""
STEADY_ROUNDS = 4  # micro-batches for every stage, after which a step only repeats itself


@dataclass(frozen=True)
class Workload:
    """What a step computes.

    Attributes:
        seq_len: tokens a sample.
        micro_batch_size: samples in one forward pass of one data-parallel rank.
        micro_batches: forward passes of one data-parallel rank in a step.
        weight_bytes: of one element of weights and activations: 2 for bf16, 4 for fp32.
        steps_loaded: steps whose micro-batches are in memory, those read ahead included.
        cuda: ranks compute on GPUs.
        document_mask: packed documents are hidden from each other.
        fused: megads' own kernels compute attention, GELU and the loss.
        loss_chunk: ops.loss_chunk.
        optim: the optimizer, of whose state and steps the memory is.
        cuda_graphs: passes are captured and replayed.
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
    """One rank of a pipeline stage, virtual ones together; all ranks of a stage are alike. Sizes in bytes.

    Attributes:
        stage: its place in the pipeline.
        layers: names of the model's stages it holds, in the order of the forward pass.
        recomputation: what each of its blocks recomputes: none, selective or full.
        first_rank: lowest global rank of the stage.
        parameters: unsharded parameters of the stage; a tied embedding counts on both stages that hold it.
        rank_parameters: elements that one rank holds, padding of the vocabulary included.
        weights: in the weights' dtype; this rank's share under ZeRO-3.
        fp32_gradients: the sums over micro-batches, from the first backward pass of a step to the reduction.
        reduced_gradients: this rank's share of them, from the reduction to the end of the step.
        masters: this rank's share of the fp32 weights.
        optimizer_state: this rank's share of what the optimizer keeps beside them: AdamW's two moments.
        attention_bias: the cached additive mask, and the tables of rotary positions.
        pipeline_buffers: the receive buffer and the micro-batches read ahead.
        in_flight: most passes of its virtual stages between forward and the end of backward.
        phases: the fullest moment of each phase of a step; they do not meet.
        beside_tensors: what CUDA, cuBLAS and communicators take of a GPU, by name; empty on a CPU.
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
    beside_tensors: Mapping[str, int] = field(default_factory=dict)

    @property
    def permanent(self) -> int:
        """Alive all the time."""
        return self.weights + self.masters + self.optimizer_state + self.attention_bias + self.pipeline_buffers

    @property
    def saved(self) -> int:
        """What a checkpoint holds of the rank: the node's memory takes a copy where saves are asynchronous."""
        return self.masters + self.optimizer_state

    @property
    def fullest(self) -> Moment:
        """The moment that decides."""
        return max(self.phases, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Most that is alive at once."""
        return self.permanent + self.fullest.total

    @property
    def device_peak(self) -> int:
        """Most that is taken of a GPU at once."""
        return self.peak + sum(self.beside_tensors.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a layout.

    Attributes:
        parameters: of the whole model, padding excluded and a tied embedding counted once.
        stages: one rank of every pipeline stage.
        ranks_per_stage: tensor times context times data parallel ranks.
    """

    parameters: int
    stages: tuple[StageMemory, ...]
    ranks_per_stage: int

    @property
    def largest(self) -> StageMemory:
        """The stage whose ranks need most; the first of equals."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def fullest_device(self) -> StageMemory:
        """The stage whose GPUs are fullest: communicators count, and ranks amid a pipeline open most of them."""
        return max(self.stages, key=lambda stage: stage.device_peak)

    @property
    def all_ranks(self) -> int:
        """Bytes of all ranks together, each at its fullest moment."""
        return self.ranks_per_stage * sum(stage.peak for stage in self.stages)


def memory_plan(
    model: ModelConfig, parallel: ParallelConfig, workload: Workload, ranks: Collection[int] | None = None
) -> MemoryPlan:
    """What every rank will hold; parallel.recompute and parallel.partition are not auto any more.

    Args:
        model: the model's shape.
        parallel: the layout.
        workload: of a step.
        ranks: of the pipeline, to be planned; None: all.

    Raises:
        ConfigError: more pipeline stages than layers, or more recomputed blocks than there are.
    """
    weights = stage_weights(model)
    names, bounds = list(weights), stage_bounds(list(weights.values()), parallel)
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
    """So many micro-batches that more of them are never held at a time: a step in its steady state repeats itself."""
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
    """What a rank of the pipeline holds, given the layers of each of its virtual stages."""
    micro_batch = one_pass(model, parallel, workload)
    layers = tuple(chain.from_iterable(layers_of.values()))
    held = {name: shape for name, shape in shapes.items() if _layer_of(name) in layers}
    if model.tie_embeddings and EMBEDDING in layers:
        held.pop(TIED_COPY, None)
    table = sharding_of(model)
    local = {name: prod(local_shape(name, shape, table, parallel.tp)) for name, shape in held.items()}
    buckets = _buckets(local, model, parallel, workload.optim)
    low, flat = workload.weight_bytes, sum(bucket.numel for bucket in buckets)
    share = _share(flat, parallel)
    blocks = [layer for layer in layers if is_block(layer)]
    modes = block_modes(parallel, rank, len(blocks))
    recompute = dict(zip(blocks, modes, strict=True))
    ops = _ops_of(micro_batch, layers_of, recompute, schedule.placement)
    bias = micro_batch.bias_table if blocks else 0
    mask = Moment(BIAS_PHASE, transient=_bias_transient(micro_batch, bias))
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
            FP32 * len(held_kinds(workload.optim, bucket.role)) * _share(bucket.numel, parallel) for bucket in buckets
        ),
        attention_bias=bias * micro_batch.mask_bytes + (micro_batch.rotary_tables if blocks else 0),
        pipeline_buffers=_pipeline_buffers(micro_batch, parallel, workload, layers_of),
        in_flight=most_waiting(schedule, rank),
        phases=(*_pipeline_phases(ops, buckets, parallel, workload, schedule, rank), mask),
        beside_tensors=beside_tensors(parallel, rank, tied=model.tie_embeddings) if workload.cuda else {},
    )
    if parallel.zero_stage not in GRADIENT_STAGES:
        return memory
    (only,) = ops.values()  # without pipelines
    return _sharded(memory, only, local, model, parallel, workload)


def one_pass(model: ModelConfig, parallel: ParallelConfig, workload: Workload) -> Pass:
    """What a rank computes at a time."""
    return Pass(
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
        step_sums=parallel.zero_stage not in GRADIENT_STAGES,
    )


def _ops_of(
    micro_batch: Pass,
    layers_of: Mapping[int, tuple[str, ...]],
    recompute: Mapping[str, Recompute],
    placement: StagePlacement,
) -> dict[int, list[Op]]:
    """The operations of each of a rank's virtual stages; what stays on the rank is handed over, not copied."""
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
        # Head and embedding share their weight, and the head's gradient is there first.
        at = next(i for i, op in enumerate(ops[0]) if op.name == "embedding")
        ops[0][at] = replace(ops[0][at], shared=True)
    return ops


def _share(elements: int, parallel: ParallelConfig) -> int:
    """Of the optimizer's elements of a stage, those that one rank updates."""
    return elements // parallel.data_size if parallel.zero_stage else elements


def _step_transient(buckets: Sequence[BucketLayout], parallel: ParallelConfig, workload: Workload) -> int:
    """Bytes beside the gradients while the optimizer steps under ZeRO-0 and ZeRO-1.

    LAMB and Lion have one temporary tensor as long as a master at a time. Muon sends its directions, takes those of the
    matrices that it owns, multiplies them (three more copies of what it multiplies together), and sends the steps back.
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
    return low * (share + 2 * owned) + low * 4 * min(owned, MUON_BATCH_ELEMENTS)


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
    """The fullest moment of each phase of a step under ZeRO-0 and ZeRO-1."""
    low, flat = workload.weight_bytes, sum(bucket.numel for bucket in buckets)
    full, share = FP32 * flat, _share(flat, parallel)
    on_cpu = not workload.cuda
    straight = workload.fused and on_cpu and processor.multiplies(low=low < FP32)
    begun = (lambda _made: full) if workload.cuda_graphs else _sums_begun(buckets)
    sums = GradientSums(begun, full, FP32 // low, cast=low < FP32 and on_cpu, straight=straight)
    passes = pipeline_phases(schedule, rank, ops, sums)
    reduced, between = FP32 * share, Moment("")
    if workload.cuda_graphs:  # main_grad stays beside its reduced slice, and the graphs keep their memory
        reduced = full + (FP32 * share if share < flat else 0)
        between = max(passes, key=lambda moment: moment.total - moment.gradients)
    transient = _step_transient(buckets, parallel, workload)
    phases = [*passes, replace(between, name="optimizer step", gradients=reduced, transient=transient)]
    if parallel.data_size > 1 and parallel.zero_stage:
        # gloo copies what it reduces and what it gathers; NCCL does not.
        copied = 0 if workload.cuda else 1
        gathered = copied * low * max(bucket.numel for bucket in buckets)
        phases += [
            replace(between, name="gradient reduction", gradients=full + FP32 * share, transient=copied * full),
            replace(between, name="weight all-gather", gradients=reduced, transient=gathered),
        ]
    return phases


def _sharded(
    memory: StageMemory,
    ops: Sequence[Op],
    local: dict[str, int],
    model: ModelConfig,
    parallel: ParallelConfig,
    workload: Workload,
) -> StageMemory:
    """The same rank under ZeRO-2 or ZeRO-3; the attention mask is built as ever."""
    optim, by_role = workload.optim, {role: dict[Rates, list[int]]() for role in Role}
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
            FP32 * len(held_kinds(optim, role)) * elements
            for (role, _), elements in zip(sharded.groups, sharded.partitions, strict=True)
        ),
        phases=(*sharded_phases(ops, sharded, workload.micro_batches, cuda=workload.cuda), *mask),
    )


def _layer_of(name: str) -> str:
    """Model stage that owns a parameter: blocks.3.mlp.up.weight is blocks.3's."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def _buckets(
    local: dict[str, int], model: ModelConfig, parallel: ParallelConfig, optim: OptimConfig
) -> list[BucketLayout]:
    """The optimizer's flat buffers of a rank that holds these elements of every parameter."""
    members, width_scale = [], model.width_scale(muon=optim.is_muon)
    for name, elements in local.items():
        is_tied = model.tie_embeddings and name in (TIED_PARAMETER, TIED_COPY)
        role = parameter_role(TIED_PARAMETER if is_tied else name, is_tied, muon=optim.is_muon)
        rates = parameter_rates(TIED_PARAMETER if is_tied else name, role, optim, width_scale)
        members.append(Member(name, elements, role, rates=rates))
    ranks = parallel.data_size if parallel.zero_stage else 1
    return bucket_layouts(members, ranks, parallel.bucket_elements)


def _sums_begun(buckets: Sequence[BucketLayout]) -> Callable[[int], int]:
    """Bytes of the buckets that a step's first backward pass has begun, by how many of matrices' gradients it made.

    A bucket comes into being as a whole; those of biases and norms, which no operation counts, with the first of all.
    """
    others = FP32 * sum(bucket.numel for bucket in buckets if not bucket.role.decays)
    matrices = sorted((bucket for bucket in buckets if bucket.role.decays), key=lambda bucket: bucket.begins)
    begun = list(accumulate((FP32 * bucket.numel for bucket in matrices), initial=others))
    made_by = list(accumulate(FP32 * sum(slot.member.numel for slot in bucket.slots) for bucket in matrices))

    def of(made: int) -> int:
        return begun[min(bisect_left(made_by, made) + 1, len(matrices))] if made else 0

    return of


def _pipeline_buffers(micro_batch: Pass, parallel: ParallelConfig, workload: Workload, stages: Collection[int]) -> int:
    """What the engine holds between passes.

    That is the buffer of a receive posted ahead for each peer, and an activation on its way to each that gets some.
    First and last stage have tokens, labels and mask of every loaded micro-batch, and of those of the running step this
    context rank's share.
    """
    placement = parallel.placement
    before, after = (
        {placement.rank_of(s + step) for s in stages if placement.crosses(s, s + step)} for step in (-1, 1)
    )
    messages = micro_batch.hidden * (len(before | after) + len(after))
    own = micro_batch.tokens * (2 * INT64 + FP32) if {0, parallel.num_stages - 1} & set(stages) else 0
    cut = own if parallel.cp > 1 else 0
    return messages + workload.micro_batches * (workload.steps_loaded * own * parallel.cp + cut)


def _bias_transient(micro_batch: Pass, elements: int) -> int:
    """Bytes beside the cached mask while it is built: distances, a boolean mask, and the fp32 original of a cast.

    Args:
        micro_batch: the micro-batch.
        elements: of the mask.
    """
    if not elements:
        return 0
    distances = (FP32 + 1) * micro_batch.seq_len**2 // micro_batch.cp
    return distances + (FP32 * elements if micro_batch.mask_bytes < FP32 else 0)


_MIB = 2**20
CONTEXT_BYTES = 640 * _MIB
"""A CUDA context on Hopper and the modules of torch's, cuBLAS' and megads' kernels; an estimate."""
CUBLAS_BYTES = 2 * 32 * _MIB
"""Workspaces of cuBLAS and cuBLASLt on Hopper, 32 MiB each as torch sets them; `:4096:8` of deterministic runs is the
same size."""
_PAGE_BYTES = 2 * _MIB
_CHANNELS = 24
"""Of a collective communicator; those between two ranks that send and receive have `P2P_CTAS`."""
_STEPS = 8
_LL_BYTES = 8 * 512 * _STEPS * 16
_LL128_BYTES = 120 * 640 * _STEPS * 8
_SIMPLE_BYTES = 4 * _MIB
_SEND_BYTES = _PAGE_BYTES
RECEIVE_BYTES = -(-(_LL_BYTES + _LL128_BYTES + _SIMPLE_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
"""Of one channel to, and from, one neighbour: 2 and 10 MiB."""


@dataclass(frozen=True)
class _Communicator:
    """One that a rank opens.

    Attributes:
        name: what it is for.
        ranks: members.
        pairs: one-way messages to one neighbour and from it; else collectives.
    """

    name: str
    ranks: int
    pairs: bool = False

    @property
    def bytes(self) -> int:
        """Of this rank's GPU: a ring, and where there are more than two ranks trees, whose neighbours are others."""
        if self.pairs:
            return P2P_CTAS * (_SEND_BYTES + RECEIVE_BYTES)
        neighbours = 1 if self.ranks == 2 else 2
        return neighbours * _CHANNELS * (_SEND_BYTES + RECEIVE_BYTES)


def communicators(parallel: ParallelConfig, rank: int, *, tied: bool) -> list[_Communicator]:
    """Those that a rank of the pipeline opens during training.

    Args:
        parallel: the layout.
        rank: along the pipeline.
        tied: embedding and head share their weight.
    """
    return [found for found in _all(parallel, rank, tied) if found.ranks > 1]


def _all(parallel: ParallelConfig, rank: int, tied: bool) -> Iterator[_Communicator]:
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
    # Messages up and messages down the pipeline have a communicator each, so a pair opens two, each for one way.
    for neighbour in sorted({other for pair in pairs if rank in pair for other in pair} - {rank}):
        yield _Communicator(f"messages with stage {neighbour}", 2, pairs=True)
    if tied and rank in placement.ends and len(set(placement.ends)) == 2:
        yield _Communicator("tied embedding", 2)


def beside_tensors(parallel: ParallelConfig, rank: int, *, tied: bool) -> dict[str, int]:
    """Bytes of a rank's GPU beside its tensors, by what takes them; arguments as of `communicators`."""
    found = communicators(parallel, rank, tied=tied)
    return {"CUDA context and kernels": CONTEXT_BYTES, "cuBLAS workspaces": CUBLAS_BYTES} | {
        f"NCCL, {communicator.name}": communicator.bytes for communicator in found
    }
