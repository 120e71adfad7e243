"""Pipeline timeline of a step from a FLOP-based cost model, and traces of measured and simulated steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from megads.api import HEAD, ActionKind, ModelConfig, ParallelConfig, Schedule, Span, simulate_schedule
from megads.model.model_size import LayerFlops, block_flops, head_flops, recompute_flops
from megads.parallel.schedule_simulation import (
    ScheduleCosts,
    Timeline,
    bubble_share,
    closed_form_bubble_share,
    peak_in_flight,
)
from megads.tools.plan.memory import one_pass
from megads.tools.plan.workload import Workload, block_kinds, stage_layers
from megads.tools.profile.trace_events import named, rank_name, sorted_at, trace_document


@dataclass(frozen=True)
class Speed:
    """Compute and link speed of one rank.

    Attributes:
        tflops: achieved TFLOPs per rank.
        gigabytes_per_s: p2p bandwidth between two ranks, one direction; None: unlimited.
        latency_us: latency of a p2p transfer.
    """

    tflops: float
    gigabytes_per_s: float | None = None
    latency_us: float = 0.0


@dataclass(frozen=True)
class ScheduleForecast:
    """Predicted timeline and bubble of one step under a pipeline schedule.

    Attributes:
        schedule: pipeline schedule of the step.
        unit_bubble_share: bubble fraction if a forward pass and each part of a backward pass of a virtual stage take 1
            and p2p transfers take no time.
        timeline: simulated timeline with the estimated costs, in seconds.
        waiting: maximum number of passes in flight on each rank, over its virtual stages.
    """

    schedule: Schedule
    unit_bubble_share: float
    timeline: Timeline
    waiting: tuple[int, ...]

    @property
    def bubble_share(self) -> float:
        """Bubble fraction with the estimated costs; includes imbalance between stages."""
        return self.timeline.bubble_share

    @property
    def over_ideal(self) -> float:
        """Step time relative to perfectly balanced ranks without a bubble."""
        return 1 / (1 - self.bubble_share)


def forecast_schedule(
    model: ModelConfig, parallel: ParallelConfig, workload: Workload, speed: Speed
) -> ScheduleForecast:
    """Simulates the layout's schedule; parallel.recompute and parallel.partition must be resolved (not auto)."""
    schedule = parallel.schedule_of(workload.micro_batches)
    timeline = simulate_schedule(schedule, estimated_costs(model, parallel, workload, speed))
    known = closed_form_bubble_share(schedule.name, parallel.pp, parallel.virtual_stages or 1, workload.micro_batches)
    share = bubble_share(schedule) if known is None else known
    return ScheduleForecast(schedule, share, timeline, tuple(peak_in_flight(schedule)))


def estimated_costs(model: ModelConfig, parallel: ParallelConfig, workload: Workload, speed: Speed) -> ScheduleCosts:
    """Seconds of each virtual stage's passes, derived from their FLOPs, and of a p2p transfer, from its bytes.

    Not counted: norms, activation functions, the embedding, and tensor- and context-parallel communication.
    """
    kinds = [kind for kind, _ in model.layer_kinds()]
    of_kinds = [(block_flops(kind, workload.seq_len), recompute_flops(kind, workload.seq_len)) for kind in kinds]
    head = head_flops(model)
    if one_pass(model, parallel, workload).in_chunks:
        head = LayerFlops(head.total, 0, 0)
    tokens = workload.micro_batch_size * workload.seq_len / parallel.cp
    scale = tokens / parallel.tp / (speed.tflops * 1e12)
    forward, backward_input, backward_weight = [], [], []
    for layers in stage_layers(model, parallel):
        blocks, heads = [(*of_kinds[kind], mode) for kind, mode in block_kinds(model, layers)], int(HEAD in layers)
        forward.append(scale * (sum(block.forward for block, _, _ in blocks) + heads * head.forward))
        of_input = sum(block.backward_input + again[mode] for block, again, mode in blocks)
        backward_input.append(scale * (of_input + heads * head.backward_input))
        of_weight = sum(block.backward_weight for block, _, _ in blocks)
        backward_weight.append(scale * (of_weight + heads * head.backward_weight))
    shards = parallel.tp if parallel.sequence_parallel else 1
    size = tokens * model.hidden_size * workload.weight_bytes / shards
    transfer = size / (speed.gigabytes_per_s * 1e9) if speed.gigabytes_per_s else 0.0
    return ScheduleCosts(forward, backward_input, backward_weight, speed.latency_us * 1e-6, transfer)


_SENDS: Mapping[str, tuple[str, int]] = {
    ActionKind.send_activation: (ActionKind.receive_activation, 1),
    ActionKind.send_gradient: (ActionKind.receive_gradient, -1),
}
"""Receive action and stage offset of each send action."""


@dataclass(frozen=True)
class RankTrace:
    """Timeline of one rank in a step.

    Attributes:
        rank: global rank; the pipeline rank in a simulated step.
        pipeline_rank: pipeline rank.
        replica: coordinates along the other axes, which identify the pipeline.
        bars: spans ordered by start; times are seconds since the first span of any rank.
    """

    rank: int
    pipeline_rank: int
    replica: tuple[int, ...]
    bars: tuple[Span, ...]


def simulated_step(timeline: Timeline) -> list[RankTrace]:
    """Traces of a simulated step, one per pipeline rank; spans of zero length are omitted unless they are p2p."""
    return [
        RankTrace(
            rank,
            rank,
            (),
            tuple(
                Span(span.action.kind.value, span.action.micro_batch, span.action.stage, span.start, span.end)
                for span in row
                if span.end > span.start or span.action.kind.sends or span.action.kind.receives
            ),
        )
        for rank, row in enumerate(timeline.spans)
    ]


def idle_share(traces: Sequence[RankTrace]) -> float:
    """Fraction of the time from the first to the last pass of all ranks in which ranks run no pass."""
    passes = [[bar for bar in trace.bars if _is_pass(bar)] for trace in traces]
    every = [bar for row in passes for bar in row]
    if not every:
        return 0.0
    whole = max(bar.end_s for bar in every) - min(bar.start_s for bar in every)
    return 1 - sum(bar.end_s - bar.start_s for bar in every) / (len(traces) * whole)


def _is_pass(bar: Span) -> bool:
    return bar.kind in list(ActionKind) and ActionKind(bar.kind).computes


def mean_costs(traces: Sequence[RankTrace], num_stages: int) -> ScheduleCosts:
    """Mean seconds of each virtual stage's passes, and of p2p transfers whose receiver was already waiting.

    Args:
        traces: traces of one or several measured steps.
        num_stages: number of virtual stages of the pipeline.
    """
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for trace in traces:
        for bar in trace.bars:
            if _is_pass(bar) and bar.stage is not None:
                seconds[bar.kind, bar.stage].append(bar.end_s - bar.start_s)

    def mean(kind: ActionKind, stage: int) -> float:
        found = seconds.get((kind.value, stage))
        return fmean(found) if found else 0.0

    stages = range(num_stages)
    inputs = [mean(ActionKind.backward_input, stage) for stage in stages]
    weights = [mean(ActionKind.backward_weight, stage) for stage in stages]
    whole = [mean(ActionKind.backward, stage) for stage in stages]
    # A stage may run whole or split backward passes, or both; then both are assumed to cost the same.
    parts = [i + w if i + w else b for i, w, b in zip(inputs, weights, whole, strict=True)]
    first = [i if i else b / 2 for i, b in zip(inputs, whole, strict=True)]
    second = [total - part for total, part in zip(parts, first, strict=True)]
    transits = [transit for transit in _transits(traces) if transit > 0]
    latency = fmean(transits) if transits else 0.0
    return ScheduleCosts([mean(ActionKind.forward, stage) for stage in stages], first, second, latency)


def measured_layer_costs(costs: ScheduleCosts, bounds: Sequence[int]) -> tuple[float, float, float] | None:
    """Value for `parallel.layer_costs` from measured stage costs, in units of one block.

    The cost of a block is measured on the stages between the first and the last; embedding and head get the remaining
    time of the first and last stage.

    Args:
        costs: costs of each virtual stage.
        bounds: virtual stage i holds layers bounds[i] to bounds[i + 1] - 1: embedding, blocks, final norm, head.

    Returns:
        Costs of the embedding, of a block (1) and of the head; None if there is no inner stage.
    """
    totals = [sum(parts) for parts in zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)]
    layers = [end - start for start, end in pairwise(bounds)]
    inner, blocks = sum(totals[1:-1]), sum(layers[1:-1])
    if len(layers) != len(totals) or not blocks or not inner:
        return None
    block = inner / blocks
    embedding, head = (max(0.0, totals[i] / block - (layers[i] - ends)) for i, ends in ((0, 1), (-1, 2)))
    return embedding, 1.0, head


def _transits(traces: Sequence[RankTrace]) -> Iterator[float]:
    """Seconds from the start of a send to the end of its receive, for receives that started earlier."""
    receives = {(trace.replica, bar.kind, bar.micro_batch, bar.stage): bar for trace in traces for bar in trace.bars}
    for trace in traces:
        for bar in trace.bars:
            if bar.kind not in _SENDS or bar.stage is None:
                continue
            kind, further = _SENDS[bar.kind]
            receive = receives.get((trace.replica, kind, bar.micro_batch, bar.stage + further))
            if receive is not None and receive.start_s <= bar.start_s:
                yield receive.end_s - bar.start_s


def perfetto_trace(groups: Mapping[str, Sequence[RankTrace]]) -> dict[str, Any]:
    """Converts traces to the trace-event format of ui.perfetto.dev and chrome://tracing.

    Args:
        groups: steps by name; each is a process of the trace, each rank a thread, and each p2p transfer an arrow.

    Returns:
        A JSON object; times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (name, traces) in enumerate(groups.items()):
        events.append(named("process", name, process))
        for trace in traces:
            place = {"pid": process, "tid": trace.rank}
            events.append(named("thread", rank_name(trace.rank, trace.pipeline_rank), process, trace.rank))
            events.append(sorted_at("thread", trace.rank, process, trace.rank))
            events += (
                {
                    "name": bar.name,
                    "cat": bar.kind,
                    "ph": "X",
                    "ts": 1e6 * bar.start_s,
                    "dur": 1e6 * (bar.end_s - bar.start_s),
                    **place,
                    "args": {"micro_batch": bar.micro_batch, "stage": bar.stage},
                }
                for bar in trace.bars
            )
        events += _arrows(traces, process)
    return trace_document(events)


def _arrows(traces: Sequence[RankTrace], process: int) -> Iterable[dict[str, Any]]:
    """Flow events from each send to its receive."""
    ends = {
        (trace.replica, bar.kind, bar.micro_batch, bar.stage): (trace.rank, bar)
        for trace in traces
        for bar in trace.bars
        if bar.kind in [kind for kind, _ in _SENDS.values()]
    }
    for trace in traces:
        for bar in trace.bars:
            if bar.kind not in _SENDS or bar.stage is None:
                continue
            kind, further = _SENDS[bar.kind]
            key = trace.replica, kind, bar.micro_batch, bar.stage + further
            if key not in ends:
                continue
            rank, receive = ends[key]
            common = {"name": "message", "cat": "message", "pid": process, "id": f"{process}.{trace.replica}.{key[1:]}"}
            yield {**common, "ph": "s", "tid": trace.rank, "ts": 1e6 * bar.start_s}
            yield {**common, "ph": "f", "bp": "e", "tid": rank, "ts": 1e6 * max(receive.end_s, bar.start_s)}
