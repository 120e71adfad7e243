"""Search of `megads plan search=true`: the ten fastest layouts that fit, and alternatives to the fastest.

A branch-and-bound search. Every candidate gets lower bounds of its step time (compute of the busiest rank and the
smallest bubble of its schedule) and of its memory (weights, gradients, optimizer state and the activations that every
pass needs). Candidates are evaluated exactly in the order of their time bounds, until no bound is below the step time
of the worst result kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil, gcd, log, sqrt
from typing import Any

from megads.api import (
    GRADIENT_STAGES,
    ConfigError,
    EngineKind,
    MLPKind,
    ModelConfig,
    ParallelConfig,
    Partition,
    Progress,
    Recompute,
    RootConfig,
    ScheduleName,
    check_shape,
    resolve_auto,
)
from megads.model.sharding import why_not_tp
from megads.parallel.config import Offload
from megads.parallel.schedule import SPLIT_SCHEDULES, V_SHAPED
from megads.tools.plan.collectives import (
    FLAT,
    Network,
    all_gather,
    communication_group,
    context_choices,
    expert_groups,
    reduce_scatter,
)
from megads.tools.plan.devices import Device
from megads.tools.plan.execution import Execution
from megads.tools.plan.longest_sequence import MLP_CHUNK
from megads.tools.plan.operators import LayerSeconds, RankOperators
from megads.tools.plan.run_plan import bytes_per_element, machine_of, megads_execution, memory_need, plan_of
from megads.tools.plan.step_estimate import JITTER, StepEstimate, StepModel, block_parameters, expert_parameters
from megads.tools.plan.workload import Workload

_VIRTUAL = (2, 4, 8)
_MICRO_BATCH_SIZES = (1, 2, 4, 8)
_V_SHAPED_RANKS = 8
"""Maximum pipeline size for V-shaped schedules (ZB-V, DualPipeV); above it, generating a schedule takes seconds."""
MOST_FITTING = 500
"""Number of layouts that fit after which a search stops; their steps are what takes time, 0.1 to 0.5 s each."""


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout to evaluate.

    Attributes:
        parallel: the layout.
        micro_batch_size: samples per micro-batch.
        micro_batches: micro-batches per step and data-parallel rank.
        mlp_chunk: ops.mlp_chunk.
        bound_s: lower bound of the step time in seconds.
        bound_bytes: lower bound of the memory per device.
    """

    parallel: ParallelConfig
    micro_batch_size: int
    micro_batches: int
    mlp_chunk: int | None = None
    bound_s: float = 0.0
    bound_bytes: float = 0.0


@dataclass(frozen=True)
class EvaluatedCandidate:
    """A candidate with its exact estimates.

    Attributes:
        candidate: the evaluated candidate.
        refused: reason why the layout is invalid; empty if it is valid.
        memory_bytes: peak memory of the device that needs most.
        estimate: step estimate; None if the layout is invalid or does not fit.
    """

    candidate: LayoutCandidate
    refused: str = ""
    memory_bytes: int = 0
    estimate: StepEstimate | None = None

    @property
    def seconds(self) -> float:
        return self.estimate.step_time_s if self.estimate else float("inf")


@dataclass(frozen=True)
class LayoutQuery:
    """Inputs of a layout search.

    Attributes:
        config: config of the run; what is not searched, such as rank order and bucket size, is taken from it.
        devices: number of devices; a layout must use all of them.
        device: device of each rank.
        memory_bytes: memory per device.
        network: network between nodes.
    """

    config: RootConfig
    devices: int
    device: Device
    memory_bytes: int
    network: Network = FLAT

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def seq_len(self) -> int:
        return self.config.train.seq_len

    @property
    def batch(self) -> int:
        """Global batch size in samples."""
        return self.config.train.global_batch_size

    @property
    def width(self) -> int:
        """Bytes per element of weights and activations."""
        return bytes_per_element(self.config)

    def workload(self, candidate: LayoutCandidate) -> Workload:
        """The training step of a candidate."""
        sizes = (self.seq_len, candidate.micro_batch_size, candidate.micro_batches, self.width)
        return Workload(*sizes, float8=self.config.train.float8, mlp_chunk=candidate.mlp_chunk)

    @cached_property
    def execution(self) -> Execution:
        return megads_execution(self.config, self.device)


@dataclass(frozen=True)
class Found:
    """Result of a layout search.

    Attributes:
        best: fastest layouts that fit into memory, fastest first.
        unfit: evaluated layouts that are fast by their bounds but do not fit into memory.
        considered: number of candidates.
        pruned: number of candidates whose memory bound exceeds the device's memory.
        examined: number of candidates that were evaluated exactly.
        complete: whether no other candidate can be faster; False if the search stopped at its limit.
        others: plausible alternatives to the fastest layout, each with a description of the change.
        seconds: duration of the search.
    """

    best: tuple[EvaluatedCandidate, ...]
    unfit: tuple[EvaluatedCandidate, ...]
    considered: int
    pruned: int
    examined: int
    complete: bool
    others: tuple[tuple[str, EvaluatedCandidate], ...] = ()
    seconds: float = 0.0


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def layouts(asked: LayoutQuery) -> Iterator[LayoutCandidate]:
    """Yields every candidate that evenly divides devices and batch, without bounds."""
    model, most_tp = asked.model, 2 * asked.device.ranks_per_node
    for tp in (n for n in _divisors(asked.devices) if n <= most_tp and not why_not_tp(model, n)):
        for cp in (
            n for n in _divisors(asked.devices // tp) if (n & (n - 1) == 0 and asked.seq_len // n >= 4096) or n == 1
        ):
            for pp in (n for n in _divisors(asked.devices // (tp * cp)) if n <= model.num_layers + 2):
                yield from _grid_candidates(asked, tp, cp, pp, asked.devices // (tp * cp * pp))


def _grid_candidates(asked: LayoutQuery, tp: int, cp: int, pp: int, dp: int) -> Iterator[LayoutCandidate]:
    """Candidates of one process grid: schedule, sequence parallelism, micro-batch size, recomputation, ZeRO stage."""
    engine = asked.config.engine
    zero_stages = [1]
    if pp == 1 and cp * dp > 1 and engine is not EngineKind.native and not asked.model.moe.enabled:
        zero_stages += GRADIENT_STAGES
    shapes: list[tuple[ScheduleName, int | None]] = [(ScheduleName["1f1b"], None)]
    if pp > 1 and engine is not EngineKind.deepspeed:
        shapes += [(ScheduleName.zb_h1, None)]
        if pp <= _V_SHAPED_RANKS:
            shapes += [(name, None) for name in V_SHAPED]
        deepest = (asked.model.num_layers + 2) // pp
        shapes += [(ScheduleName.interleaved, virtual) for virtual in _VIRTUAL if virtual <= deepest]
    modes = (Recompute.none, Recompute.selective, Recompute.full)
    grid = replace(asked.config.parallel, ep=1, expert_tp=True, tp=tp, cp=cp, pp=pp, dp=dp)
    kinds = context_choices(asked.model, grid, asked.device.ranks_per_node)
    for size in (size for size in _MICRO_BATCH_SIZES if asked.batch % (size * dp) == 0):
        for zero_stage, (schedule, virtual), cut, mode, (kind, exchanging) in product(
            zero_stages, shapes, (True, False) if tp > 1 else (False,), modes, kinds
        ):
            if cut and (asked.seq_len // cp) % tp:
                continue
            parallel = replace(
                grid, zero_stage=zero_stage, zero_shard_size=None, cp_kind=kind, cp_ulysses=exchanging,
                schedule=schedule, virtual_stages=virtual, contiguous_micro_batches=None, sequence_parallel=cut,
                recompute=mode, recompute_blocks=None, first_stage_blocks=None, last_stage_blocks=None,
            )  # fmt: skip
            for with_experts in _expert_layouts(asked.model, parallel):
                yield LayoutCandidate(with_experts, size, asked.batch // (size * dp), asked.config.ops.mlp_chunk)


def _expert_layouts(model: ModelConfig, parallel: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yields a layout with every size of expert parallelism, and with divided and whole experts."""
    if not model.moe.enabled:
        yield parallel
        return
    for expert_tp in (True, False) if parallel.sequence_parallel else (True,):
        found = replace(parallel, expert_tp=expert_tp)
        for ep in _divisors(gcd(model.moe.num_experts, found.expert_domain)):
            yield replace(found, ep=ep)


def _least_kept(model: ModelConfig, parallel: ParallelConfig, *, mlp_in_chunks: bool) -> float:
    """Fewest elements per token that a block keeps on a rank: inputs of GEMMs and norms, with the even load; of an MLP
    in chunks only its input."""
    cut, moe = parallel.tp if parallel.sequence_parallel else 1, model.moe
    relu = model.mlp in (MLPKind.relu, MLPKind.relu2)  # whose backward pass reads its output
    of_feature = 1 if relu else 2 + model.mlp.gated
    width, outside = model.ffn_width, 2 if model.parallel_block else 4
    chosen = 0.0
    if moe.enabled:
        width, outside = moe.shared_ffn_size, 4 if moe.shared_ffn_size else 3
        # The experts' rows, features and outputs.
        parts = (1, parallel.tp) if parallel.expert_tp else (parallel.tp, 1)
        chosen = moe.top_k * (2 * model.hidden_size + of_feature * model.expert_width / parts[1]) / parts[0]
    inside = model.qkv_width + model.attention_width + (0 if mlp_in_chunks else of_feature * width)
    return outside * model.hidden_size / cut + inside / parallel.tp + chosen


class Bounds:
    """Computes lower bounds of candidates; layer costs that candidates share are cached."""

    def __init__(self, asked: LayoutQuery) -> None:
        self._asked = asked
        self._layers: dict[tuple[object, ...], tuple[LayerSeconds, LayerSeconds]] = {}

    def with_bound(self, candidate: LayoutCandidate) -> LayoutCandidate:
        """Returns the candidate with its bounds filled in."""
        parallel, asked = candidate.parallel, self._asked
        model, execution, shards = asked.model, asked.execution, parallel.shard_size
        sharded = parallel.zero_stage in GRADIENT_STAGES
        tokens = candidate.micro_batch_size * asked.seq_len // parallel.cp
        blocks = ceil(model.num_layers / parallel.pp)
        # Work of the busiest rank, and the smallest bubble.
        split = parallel.schedule in SPLIT_SCHEDULES
        key = (
            *(parallel.tp, parallel.cp, parallel.sequence_parallel, candidate.micro_batch_size, split),
            *(parallel.recompute, parallel.ep, parallel.expert_tp, parallel.cp_kind, parallel.cp_ulysses),
            # Where the ranks of an expert-parallel group are.
            *((parallel.pp, parallel.dp) if parallel.ep > 1 else ()),
        )
        if key not in self._layers:
            workload = asked.workload(candidate)
            operators = RankOperators(model, parallel, workload, asked.device, asked.network, execution)
            kinds = [
                replace(operators, model=kind, fp8=fp8)
                for kind, _ in model.layer_kinds()
                for fp8 in {False, bool(workload.float8.blocks(model.num_layers))}
            ]
            # A lower bound may take all layers for the fastest of them.
            block = min((of_kind.block(parallel.recompute) for of_kind in kinds), key=lambda block: block.total)
            self._layers[key] = block, operators.head()
        of_block, of_head = (layer.total for layer in self._layers[key])
        work = candidate.micro_batches * (blocks * of_block + of_head / parallel.pp)
        # The others' blocks, one after the other, while the pipeline fills and empties.
        idle = (model.num_layers - blocks) * of_block / (3.0 if split else 1.0) / (parallel.virtual_stages or 1)
        idle = 0.0 if parallel.schedule in V_SHAPED else idle
        # Parameters of a rank, and their exposed data-parallel collectives.
        counted = model.layer_kinds()
        elements = sum(count * block_parameters(kind) for kind, count in counted) + model.vocabulary * model.hidden_size
        held = elements / parallel.pp / parallel.tp
        experts = sum(count * expert_parameters(kind) for kind, count in counted) / parallel.pp / parallel.expert_shards
        group = communication_group(parallel, ("cp", "dp"), asked.device.ranks_per_node, asked.network)
        exposed, overlaps_gather = 0.0, execution.overlap_param_gather or parallel.overlap_param_gather
        if sharded and not execution.overlap_zero:
            reduced = reduce_scatter(asked.device, group, held * execution.gradient_bytes)
            exposed = candidate.micro_batches * reduced
        elif not sharded and parallel.zero_stage and not overlaps_gather:
            same = expert_groups(parallel, asked.device.ranks_per_node, asked.network)[1]
            exposed = all_gather(asked.device, group, held * asked.width)
            exposed += all_gather(asked.device, same, experts * asked.width)
        low = asked.width / (shards if parallel.zero_stage == 3 else 1)
        main_grad = 4.0 / (shards if sharded else 1)
        state = held * (low + main_grad + 12.0 / (shards if parallel.zero_stage else 1))
        state += experts * (low + main_grad + 12.0 / (parallel.expert_data_size if parallel.zero_stage else 1))
        # Fewest elements per token that a block keeps on the device: inputs of GEMMs and norms, or only its own input.
        cut = parallel.tp if parallel.sequence_parallel else 1
        kept = model.hidden_size / cut
        if parallel.offload is not Offload.none:
            kept = 0.0
        elif parallel.recompute is not Recompute.full:
            chunked = candidate.mlp_chunk is not None
            kept = min(_least_kept(kind, parallel, mlp_in_chunks=chunked) for kind, _ in counted)
        # The mean over the ranks, as the fullest one has no less: the first ranks hold the most passes, but may hold
        # fewer blocks, as embedding and head count as a block each.
        passes = [min(candidate.micro_batches, parallel.pp - rank) for rank in range(parallel.pp)]
        on_each = max(0, (model.num_layers + 2) // parallel.pp - 2)
        rest = model.num_layers - parallel.pp * on_each
        kept *= (on_each * sum(passes) + rest) / parallel.pp * tokens * asked.width
        seconds = (work + idle + exposed) * (1 + JITTER * sqrt(2 * log(asked.devices)))
        # With few micro-batches all passes are in flight before the first gradients are allocated.
        grads = (held + experts) * main_grad if candidate.micro_batches <= parallel.pp else 0.0
        return replace(candidate, bound_s=seconds, bound_bytes=max(state, state - grads + kept))


def search(
    asked: LayoutQuery,
    examine: Callable[[LayoutCandidate], EvaluatedCandidate],
    most: int = 10,
    limit: int = MOST_FITTING,
) -> Found:
    """Searches for the fastest layouts.

    Args:
        asked: inputs of the search.
        examine: evaluates a candidate exactly, or returns why it is invalid.
        most: maximum number of layouts to return.
        limit: number of layouts that fit after which the search returns what it has found. It bounds the work, so that
            the result does not depend on how busy the machine is.
    """
    bounds = Bounds(asked)
    every = [bounds.with_bound(candidate) for candidate in layouts(asked)]
    possible = [candidate for candidate in every if candidate.bound_bytes <= asked.memory_bytes]
    fitting: list[EvaluatedCandidate] = []
    unfit: list[EvaluatedCandidate] = []
    examined, complete = 0, True
    for candidate in sorted(possible, key=lambda found: found.bound_s):
        best = sorted(fitting, key=lambda one: one.seconds)[:most]
        if len(best) == most and candidate.bound_s >= best[-1].seconds:
            break
        if len(fitting) >= limit:
            complete = False
            break
        found = examine(candidate)
        examined += 1
        if found.refused:
            continue
        (unfit if found.memory_bytes > asked.memory_bytes else fitting).append(found)
    best = sorted(fitting, key=lambda one: one.seconds)[:most]
    return Found(tuple(best), tuple(unfit), len(every), len(every) - len(possible), examined, complete)


def _changes_of_kind(model: ModelConfig, own: ParallelConfig, node: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields kinds of context and expert parallelism that differ from a layout's, each with a description.

    Args:
        model: the model.
        own: the layout.
        node: ranks per node.
    """
    for kind, exchanging in context_choices(model, own, node):
        if (kind, exchanging) != (own.cp_kind, own.cp_ulysses):
            two_level = f", cp_ulysses={exchanging}" if exchanging > 1 else ""
            yield f"cp_kind={kind}{two_level}", {"cp_kind": kind, "cp_ulysses": exchanging}
    if not model.moe.enabled:
        return
    for ep in sorted({1, own.ep // 2, 2 * own.ep} - {0, own.ep}):
        if own.expert_domain % ep == 0 and model.moe.num_experts % ep == 0:
            yield f"ep={ep}", {"ep": ep}
    if own.sequence_parallel:
        yield f"expert_tp={not own.expert_tp}", {"expert_tp": not own.expert_tp}


def neighbours(asked: LayoutQuery, winner: LayoutCandidate) -> list[tuple[str, LayoutCandidate]]:
    """Layouts that differ from the winner in one setting, each with a description of the change."""
    own, found = winner.parallel, list[tuple[str, LayoutCandidate]]()

    def add(what: str, size: int = winner.micro_batch_size, **changes: Any) -> None:
        changed = replace(own, **changes)
        dp = asked.devices // (changed.tp * changed.cp * changed.pp)
        if dp < 1 or changed.tp * changed.cp * changed.pp * dp != asked.devices or asked.batch % (dp * size):
            return
        changed = replace(changed, dp=dp)
        changed = replace(changed, ep=gcd(changed.ep, changed.expert_domain))
        found.append((what, LayoutCandidate(changed, size, asked.batch // (dp * size), winner.mlp_chunk)))

    for mode in (Recompute.none, Recompute.selective, Recompute.full):
        if mode is not own.recompute:
            add(f"recompute={mode}", recompute=mode)
    for what, changes in _changes_of_kind(asked.model, own, asked.device.ranks_per_node):
        add(what, **changes)
    plain: dict[str, Any] = {"schedule": ScheduleName["1f1b"], "virtual_stages": None}
    for tp in sorted({1, own.tp // 2, 2 * own.tp, 2 * asked.device.ranks_per_node} - {0, own.tp}):
        add(f"tp={tp}", tp=tp, sequence_parallel=own.sequence_parallel and tp > 1, expert_tp=own.expert_tp or tp == 1)
    for pp in sorted({1, own.pp // 2, 2 * own.pp} - {0, own.pp}):
        add(f"pp={pp}", pp=pp, **(plain if pp == 1 else {}))
    if own.pp > 1:
        add("pp=1, zero_stage=3", pp=1, zero_stage=3, **plain)
    if own.schedule != ScheduleName["1f1b"]:
        add("schedule=1f1b", **plain)
    if own.tp > 1:
        add(
            f"sequence_parallel={not own.sequence_parallel}",
            sequence_parallel=not own.sequence_parallel,
            expert_tp=True,
        )
    for size in sorted({winner.micro_batch_size // 2, 2 * winner.micro_batch_size} - {0}):
        add(f"micro_batch_size={size}", size=size)
    return found


def _with_less_memory(asked: LayoutQuery) -> Iterator[LayoutQuery]:
    """Yields the same query with settings that need less memory: MLPs in chunks, offloaded activations, both."""
    parallel, ops = asked.config.parallel, asked.config.ops
    chunks = dict.fromkeys((ops.mlp_chunk, ops.mlp_chunk or MLP_CHUNK))
    # A CPU's activations are in host memory anyway.
    for offload in dict.fromkeys((parallel.offload, parallel.offload if asked.device.on_cpu else Offload.activations)):
        for chunk in chunks:
            if (offload, chunk) != (parallel.offload, ops.mlp_chunk):
                changed = replace(parallel, offload=offload), replace(ops, mlp_chunk=chunk)
                yield replace(asked, config=replace(asked.config, parallel=changed[0], ops=changed[1]))


def find_layouts(asked: LayoutQuery, most: int = 10) -> Found:
    """Searches for the fastest layouts, and examines alternatives to the fastest.

    Where no layout fits, it tries those with MLPs in chunks, then with offloaded activations, then with both.
    """
    start = time.perf_counter()
    with Progress("planning layouts") as progress:
        counted = 0

        def examine(candidate: LayoutCandidate) -> EvaluatedCandidate:
            nonlocal counted
            counted += 1
            progress.update(note=f"{counted} so far")
            return examined(asked, candidate)

        found, smaller = search(asked, examine, most), _with_less_memory(asked)
        while not found.best and (less := next(smaller, None)) is not None:
            asked = less
            found = search(asked, examine, most)
        while found.best:
            others = tuple((what, examine(one)) for what, one in neighbours(asked, found.best[0].candidate))
            found = replace(found, others=others)
            fitting = (one for _, one in others if not one.refused and one.memory_bytes <= asked.memory_bytes)
            faster = [one for one in fitting if one.seconds < found.best[0].seconds]
            if not faster:
                break
            # Only if the search has stopped at its limit, or if a neighbour is none of its candidates.
            known = {overrides(one.candidate): one for one in (*found.best, *faster)}
            found = replace(found, best=tuple(sorted(known.values(), key=lambda one: one.seconds)[:most]))
    return replace(found, seconds=time.perf_counter() - start)


def examined(asked: LayoutQuery, candidate: LayoutCandidate) -> EvaluatedCandidate:
    """Validates a candidate like a run, plans its memory exactly and, if it fits, its step time."""
    train = replace(asked.config.train, micro_batch_size=candidate.micro_batch_size)
    config = replace(asked.config, parallel=candidate.parallel, train=train)
    try:
        check_shape(config)
        if candidate.parallel.partition is Partition.auto:
            config, _ = resolve_auto(config, None)
        # The first pipeline rank has the most micro-batches in flight, the second the most communicators, and the last
        # the logits. On a CPU all ranks share the memory.
        cuda, last = not asked.device.on_cpu, config.parallel.pp - 1
        plan = plan_of(config, cuda=cuda, ranks={0, min(1, last), last} if cuda else None)
        memory = memory_need(machine_of(asked.device), plan).needed
        if memory > asked.memory_bytes:
            return EvaluatedCandidate(candidate, "", memory)
        workload = asked.workload(candidate)
        model = StepModel(asked.model, candidate.parallel, workload, asked.device, asked.network, asked.execution)
        return EvaluatedCandidate(candidate, "", memory, model.estimate())
    except ConfigError as error:
        return EvaluatedCandidate(candidate, str(error))


def overrides(candidate: LayoutCandidate) -> str:
    """The layout as overrides for `megads train experiment=...`."""
    parallel = candidate.parallel
    words = [f"parallel.{axis}={size}" for axis, size in parallel.sizes.items()]
    words += [f"parallel.cp_kind={parallel.cp_kind}"] if parallel.cp > 1 else []
    words += [f"parallel.cp_ulysses={parallel.cp_ulysses}"] if parallel.cp_ulysses > 1 else []
    words += [f"parallel.offload={parallel.offload}"] if parallel.offload is not Offload.none else []
    words += [f"ops.mlp_chunk={candidate.mlp_chunk}"] if candidate.mlp_chunk is not None else []
    words += [] if parallel.expert_tp else ["parallel.expert_tp=false"]
    words += [f"parallel.schedule={parallel.schedule}"]
    if parallel.virtual_stages is not None:
        words.append(f"parallel.virtual_stages={parallel.virtual_stages}")
    words += [
        f"parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}",
        f"parallel.recompute={parallel.recompute}",
        f"parallel.zero_stage={parallel.zero_stage}",
        f"train.micro_batch_size={candidate.micro_batch_size}",
    ]
    return " ".join(words)
