"""Branch-and-bound search for the fastest layouts of a model on a number of devices.

Every candidate gets lower bounds of its step time (compute of the busiest rank and the smallest bubble of its schedule)
and of its memory (weights, gradients, optimizer state and the activations that every pass needs). Candidates are
evaluated exactly in the order of their time bounds, until no bound is below the step time of the worst result kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, log, sqrt
from typing import Any

from megads.model.config import ModelConfig
from megads.model.sharding import why_not_tp
from megads.parallel.config import GRADIENT_STAGES, EngineKind, ParallelConfig, Recompute
from megads.parallel.schedule import SPLIT_SCHEDULES, V_SHAPED, ScheduleName
from megads.tools.plan.collectives import FLAT, Network, all_gather, communication_group, reduce_scatter
from megads.tools.plan.devices import Device
from megads.tools.plan.operators import MEGADS, Execution, LayerSeconds, RankOperators, total
from megads.tools.plan.step_estimate import JITTER, StepEstimate, StepModel, StepShape

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
        bound_s: lower bound of the step time in seconds.
        bound_bytes: lower bound of the memory per device.
    """

    parallel: ParallelConfig
    micro_batch_size: int
    micro_batches: int
    bound_s: float = 0.0
    bound_bytes: float = 0.0


@dataclass(frozen=True)
class EvaluatedCandidate:
    """A candidate with its exact estimates.

    Attributes:
        candidate: the evaluated candidate.
        refused: reason why the layout is invalid; empty if it is valid.
        memory_bytes: peak memory of the device that needs most.
        estimate: step estimate; None if the layout is invalid.
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
        model: model config.
        parallel: settings that are not searched, such as rank order and bucket size.
        seq_len: tokens per sample.
        batch: global batch size in samples.
        devices: number of devices; a layout must use all of them.
        device: device of each rank.
        width: bytes per element of weights and activations.
        memory_bytes: memory per device.
        network: network between nodes.
        execution: execution strategy of the trainer.
        engine: the engine; auto searches ZeRO stages and schedules of both.
    """

    model: ModelConfig
    parallel: ParallelConfig
    seq_len: int
    batch: int
    devices: int
    device: Device
    width: int
    memory_bytes: int
    network: Network = FLAT
    execution: Execution = MEGADS
    engine: EngineKind = EngineKind.auto


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
                dp = asked.devices // (tp * cp * pp)
                yield from _grid_candidates(asked, tp, cp, pp, dp)


def _grid_candidates(asked: LayoutQuery, tp: int, cp: int, pp: int, dp: int) -> Iterator[LayoutCandidate]:
    """Candidates of one process grid: schedule, sequence parallelism, micro-batch size, recomputation, ZeRO stage."""
    shards = [replace(asked.parallel, zero_stage=1, zero_shard_size=None)]
    if pp == 1 and cp * dp > 1 and asked.engine is not EngineKind.native:
        shards += [replace(shards[0], zero_stage=stage) for stage in GRADIENT_STAGES]
    shapes: list[tuple[ScheduleName, int | None]] = [(ScheduleName["1f1b"], None)]
    if pp > 1 and asked.engine is not EngineKind.deepspeed:
        shapes += [(ScheduleName.zb_h1, None)]
        if pp <= _V_SHAPED_RANKS:
            shapes += [(name, None) for name in V_SHAPED]
        deepest = (asked.model.num_layers + 2) // pp
        shapes += [(ScheduleName.interleaved, virtual) for virtual in _VIRTUAL if virtual <= deepest]
    for size in _MICRO_BATCH_SIZES:
        if asked.batch % (size * dp):
            continue
        count = asked.batch // (size * dp)
        for base, (schedule, virtual), cut, mode in product(
            shards, shapes, (True, False) if tp > 1 else (False,), (Recompute.none, Recompute.selective, Recompute.full)
        ):
            if cut and (asked.seq_len // cp) % tp:
                continue
            parallel = replace(
                base,
                tp=tp,
                cp=cp,
                pp=pp,
                dp=dp,
                schedule=schedule,
                virtual_stages=virtual,
                contiguous_micro_batches=None,
                sequence_parallel=cut,
                recompute=mode,
                recompute_blocks=None,
                first_stage_blocks=None,
                last_stage_blocks=None,
            )
            yield LayoutCandidate(parallel, size, count)


class Bounds:
    """Computes lower bounds of candidates; layer costs that candidates share are cached."""

    def __init__(self, asked: LayoutQuery) -> None:
        self._asked = asked
        self._layers: dict[tuple[object, ...], tuple[LayerSeconds, LayerSeconds]] = {}
        model = asked.model
        self._block = model.hidden_size * (model.qkv_width + model.attention_width + model.mlp_rows + model.ffn_width)
        self._vocabulary = model.vocabulary * model.hidden_size

    def with_bound(self, candidate: LayoutCandidate) -> LayoutCandidate:
        """Returns the candidate with its bounds filled in."""
        parallel, asked = candidate.parallel, self._asked
        tokens = candidate.micro_batch_size * asked.seq_len // parallel.cp
        split = parallel.schedule in SPLIT_SCHEDULES
        key = (parallel.tp, parallel.cp, parallel.sequence_parallel, candidate.micro_batch_size, split)
        block, head = self._costs((*key, parallel.recompute), parallel, tokens)
        blocks = ceil(asked.model.num_layers / parallel.pp)
        of_block, of_head = _pass_seconds(block), _pass_seconds(head)
        work = candidate.micro_batches * (blocks * of_block + of_head / parallel.pp)
        idle = (parallel.pp - 1) * blocks * of_block / (3.0 if split else 1.0) / (parallel.virtual_stages or 1)
        idle = 0.0 if parallel.schedule in V_SHAPED else idle
        shards = parallel.shard_size
        held = (asked.model.num_layers * self._block + self._vocabulary) / parallel.pp / parallel.tp
        low, main_grad = float(asked.width), 4.0
        if parallel.zero_stage in GRADIENT_STAGES:
            main_grad = 4.0 / shards
            low = low / shards if parallel.zero_stage == 3 else low
        state = held * (low + main_grad + 12.0 / (shards if parallel.zero_stage else 1))
        waiting = min(candidate.micro_batches, parallel.pp) * blocks
        kept = waiting * tokens * asked.width * self._kept_elements(parallel)
        straggling = 1 + JITTER * sqrt(2 * log(asked.devices))
        seconds = (work + idle + self._data_parallel(candidate, held)) * straggling
        return replace(candidate, bound_s=seconds, bound_bytes=state + kept)

    def _data_parallel(self, candidate: LayoutCandidate, held: float) -> float:
        """Exposed seconds of data-parallel collectives for `held` parameters per rank."""
        asked, parallel = self._asked, candidate.parallel
        group = communication_group(parallel, ("cp", "dp"), asked.device.ranks_per_node, asked.network)
        if parallel.zero_stage in GRADIENT_STAGES:
            if asked.execution.overlap_zero:
                return 0.0
            reduced = reduce_scatter(asked.device, group, held * asked.execution.gradient_bytes)
            return candidate.micro_batches * reduced
        hidden = parallel.zero_stage == 0 or asked.execution.overlap_param_gather
        return 0.0 if hidden else all_gather(asked.device, group, held * asked.width)

    def _kept_elements(self, parallel: ParallelConfig) -> float:
        """Fewest elements per token that a block keeps: inputs of GEMMs and norms, or only its own input."""
        model, cut = self._asked.model, parallel.tp if parallel.sequence_parallel else 1
        if parallel.recompute is Recompute.full:
            return model.hidden_size / cut
        outside = (2 if model.parallel_block else 4) * model.hidden_size / cut
        inside = model.qkv_width + model.attention_width + model.mlp_rows + model.ffn_width
        return outside + inside / parallel.tp

    def _costs(
        self, key: tuple[object, ...], parallel: ParallelConfig, tokens: int
    ) -> tuple[LayerSeconds, LayerSeconds]:
        found = self._layers.get(key)
        if found is None:
            asked = self._asked
            operators = RankOperators(
                asked.model,
                parallel,
                tokens,
                asked.seq_len,
                asked.width,
                asked.device,
                asked.network,
                asked.execution,
            )
            kinds = [replace(operators, model=kind) for kind, _ in asked.model.layer_kinds()]
            # A lower bound may take all layers for the fastest of them.
            block = min((of_kind.block(parallel.recompute) for of_kind in kinds), key=_pass_seconds)
            found = self._layers[key] = block, operators.head()
        return found


def _pass_seconds(layer: LayerSeconds) -> float:
    return total(layer.forward) + total(layer.backward_input) + total(layer.backward_weight)


Examine = Callable[[LayoutCandidate], EvaluatedCandidate]


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
    """

    best: tuple[EvaluatedCandidate, ...]
    unfit: tuple[EvaluatedCandidate, ...]
    considered: int
    pruned: int
    examined: int
    complete: bool


def search(asked: LayoutQuery, examine: Examine, most: int = 10, limit: int = MOST_FITTING) -> Found:
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


def step_model(asked: LayoutQuery, candidate: LayoutCandidate) -> StepModel:
    """The step model of a candidate."""
    shape = StepShape(asked.seq_len, candidate.micro_batch_size, candidate.micro_batches, asked.width)
    return StepModel(asked.model, candidate.parallel, shape, asked.device, asked.network, asked.execution)


def neighbours(asked: LayoutQuery, winner: LayoutCandidate) -> list[tuple[str, LayoutCandidate]]:
    """Layouts that differ from the winner in one setting, each with a description of the change."""
    own, found = winner.parallel, list[tuple[str, LayoutCandidate]]()

    def add(what: str, size: int = winner.micro_batch_size, **changes: Any) -> None:
        changed = replace(own, **changes)
        dp = asked.devices // (changed.tp * changed.cp * changed.pp)
        if dp < 1 or changed.tp * changed.cp * changed.pp * dp != asked.devices or asked.batch % (dp * size):
            return
        changed = replace(changed, dp=dp)
        found.append((what, LayoutCandidate(changed, size, asked.batch // (dp * size))))

    for mode in (Recompute.none, Recompute.selective, Recompute.full):
        if mode is not own.recompute:
            add(f"recompute={mode}", recompute=mode)
    plain: dict[str, Any] = {"schedule": ScheduleName["1f1b"], "virtual_stages": None}
    for tp in sorted({1, own.tp // 2, 2 * own.tp, 2 * asked.device.ranks_per_node} - {0, own.tp}):
        add(f"tp={tp}", tp=tp, sequence_parallel=own.sequence_parallel and tp > 1)
    for pp in sorted({1, own.pp // 2, 2 * own.pp} - {0, own.pp}):
        add(f"pp={pp}", pp=pp, **(plain if pp == 1 else {}))
    if own.pp > 1:
        add("pp=1, zero_stage=3", pp=1, zero_stage=3, **plain)
    if own.schedule != ScheduleName["1f1b"]:
        add("schedule=1f1b", **plain)
    if own.tp > 1:
        add(f"sequence_parallel={not own.sequence_parallel}", sequence_parallel=not own.sequence_parallel)
    for size in sorted({winner.micro_batch_size // 2, 2 * winner.micro_batch_size} - {0}):
        add(f"micro_batch_size={size}", size=size)
    return found
