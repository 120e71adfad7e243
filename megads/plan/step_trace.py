"""A step over all ranks, measured or simulated, in one form: for pictures, for Perfetto, and for mean costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from megads.engine.timeline import Span
from megads.parallel.pipeline_actions import ActionKind
from megads.parallel.schedule_simulation import ScheduleCosts, Timeline

_SENDS: Mapping[str, tuple[str, int]] = {
    ActionKind.send_activation: (ActionKind.receive_activation, 1),
    ActionKind.send_gradient: (ActionKind.receive_gradient, -1),
}
"""What receives a message, and how many stages further."""


@dataclass(frozen=True)
class RankTrace:
    """What one rank did in a step.

    Attributes:
        rank: global rank; the place in the pipeline of a simulated one.
        pipeline_rank: its place in the pipeline.
        replica: what tells its pipeline from others: places along the other axes.
        bars: by their starts; times are seconds since the first thing that any rank did.
    """

    rank: int
    pipeline_rank: int
    replica: tuple[int, ...]
    bars: tuple[Span, ...]


def simulated_step(timeline: Timeline) -> list[RankTrace]:
    """A simulated step, one row a pipeline rank; what takes no time is left out."""
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
    """Share of the time from the first to the last pass of all ranks in which they run none."""
    passes = [[bar for bar in trace.bars if _is_pass(bar)] for trace in traces]
    every = [bar for row in passes for bar in row]
    if not every:
        return 0.0
    whole = max(bar.end_s for bar in every) - min(bar.start_s for bar in every)
    return 1 - sum(bar.end_s - bar.start_s for bar in every) / (len(traces) * whole)


def _is_pass(bar: Span) -> bool:
    return bar.kind in list(ActionKind) and ActionKind(bar.kind).computes


def mean_costs(traces: Sequence[RankTrace], num_stages: int) -> ScheduleCosts:
    """Mean seconds of each virtual stage's passes, and of messages for which a rank was already waiting.

    Args:
        traces: a measured step, or several.
        num_stages: virtual stages of the pipeline.
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
    # A stage that runs whole passes beside split ones has the same costs in both, or only one of them.
    parts = [i + w if i + w else b for i, w, b in zip(inputs, weights, whole, strict=True)]
    first = [i if i else b / 2 for i, b in zip(inputs, whole, strict=True)]
    second = [total - part for total, part in zip(parts, first, strict=True)]
    transits = [transit for transit in _transits(traces) if transit > 0]
    latency = fmean(transits) if transits else 0.0
    return ScheduleCosts([mean(ActionKind.forward, stage) for stage in stages], first, second, latency)


def measured_layer_costs(costs: ScheduleCosts, bounds: Sequence[int]) -> tuple[float, float, float] | None:
    """What `parallel.layer_costs` wants, from the costs of stages: the embedding and the head in blocks.

    A block costs what it does on the stages between the first and the last, and the ends what is left there.

    Args:
        costs: of each virtual stage.
        bounds: virtual stage i holds layers bounds[i] to bounds[i + 1] - 1: embedding, blocks, final norm, head.

    Returns:
        Costs of the embedding, of a block (1) and of the head; None without a stage in between.
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
    """Seconds from the begin of a send to the end of a receive that had begun before."""
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
    """The trace-event format that ui.perfetto.dev and chrome://tracing open.

    Args:
        groups: steps by name; each is a process of the trace, each of its ranks a thread, and each message an arrow.

    Returns:
        A JSON object; times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (name, traces) in enumerate(groups.items()):
        events.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})
        for trace in traces:
            place = {"pid": process, "tid": trace.rank}
            label = f"rank {trace.rank} (pipeline rank {trace.pipeline_rank})"
            events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": label}})
            events.append({"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": trace.rank}})
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
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _arrows(traces: Sequence[RankTrace], process: int) -> Iterable[dict[str, Any]]:
    """From each send to its receive."""
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
