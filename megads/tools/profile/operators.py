"""Adds up the time of operators in traces of torch.profiler by part of the code: attention, MLP, optimizer, ...

On a GPU these are the times of its kernels, each counted to the operator that launched it. On a CPU an operator's time
excludes the operators that it calls; a gloo collective runs beside them, from its call until all ranks have called it.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megads.tools.profile.trace_events import merged_trace, read_trace
from megads.tools.profile.trace_files import METADATA, TraceFile, newest_traces

COMMUNICATION, OPTIMIZER, LOSS, OTHER = "communication", "optimizer", "head and loss", "other"
PARTS = ("attention", "MLP", "norm", "embedding", "block", LOSS)
"""Parts of the model that ranges of a trace name (`torch_profiler.part_of`)."""
_ACTIONS = {
    "forward": "forward",
    "backward": "backward",
    "receive": COMMUNICATION,
    "send": COMMUNICATION,
    "reduce": "reduction",
    "optimizer": OPTIMIZER,
}
"""First words of the spans of a step, and the phases that they are."""
_COLLECTIVES = ("c10d::", "nccl:", "gloo:", "ncclDevKernel", "ncclKernel", "record_param_comms")
_EVALUATE = "autograd::engine::evaluate_function: "
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_MOST_RANKS = 8
_MOST_BYTES = 64 << 20
"""Largest compressed trace that is read; in memory it takes some thirty times as much."""
_log = logging.getLogger(__name__)


@dataclass
class OperatorTime:
    """Time of one operator in one part of the code, over all steps and ranks.

    Attributes:
        part: part of the code.
        phase: forward, backward, recompute, reduction, optimizer or communication; empty between steps.
        name: name of the operator.
        calls: number of calls; on a GPU of kernels.
        seconds: its time.
    """

    part: str
    phase: str
    name: str
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class OperatorTable:
    """Times of the operators in the newest profile of a run.

    Attributes:
        first_step: first profiled step.
        last_step: last profiled step.
        ranks: ranks whose traces were read.
        on_gpu: whether times are those of a GPU.
        rows: operators by part, phase and name, longest first.
    """

    first_step: int
    last_step: int
    ranks: tuple[int, ...]
    on_gpu: bool
    rows: tuple[OperatorTime, ...]

    @property
    def num_steps(self) -> int:
        """Number of steps times number of ranks that the times are the sum of."""
        return (self.last_step - self.first_step + 1) * len(self.ranks)

    def parts(self) -> dict[str, float]:
        """Seconds of each part, longest first."""
        found = defaultdict[str, float](float)
        for row in self.rows:
            found[row.part] += row.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass
class _HostEvent:
    """An event on a thread of the host.

    Attributes:
        category: cat of the trace.
        name: its name.
        begin: start in microseconds.
        end: end in microseconds.
        parent: the event around it on its thread.
        inside: microseconds of the events that it directly contains.
        forward: operator of the forward pass whose gradient it computes.
    """

    category: str
    name: str
    begin: float
    end: float
    parent: _HostEvent | None = None
    inside: float = 0.0
    forward: _HostEvent | None = None

    def around(self) -> Iterator[_HostEvent]:
        """This event and those around it, from the inside."""
        event: _HostEvent | None = self
        while event is not None:
            yield event
            event = event.parent

    @property
    def own(self) -> float:
        """Microseconds outside of the events that it contains."""
        return max(0.0, self.end - self.begin - self.inside)


@dataclass
class _Threads:
    """Events of the host by thread, in the order of their starts, and gloo's collectives, which end beside them."""

    events: dict[Any, list[_HostEvent]] = field(default_factory=lambda: defaultdict(list))
    collectives: list[_HostEvent] = field(default_factory=list)
    begins: dict[Any, list[float]] = field(default_factory=dict)

    def nest(self) -> None:
        for thread, events in self.events.items():
            events.sort(key=lambda event: (event.begin, -event.end))
            self.begins[thread] = [event.begin for event in events]
            around: list[_HostEvent] = []
            for event in events:
                while around and around[-1].end < event.end:
                    around.pop()
                if around:
                    event.parent = around[-1]
                    around[-1].inside += event.end - event.begin
                around.append(event)

    def at(self, thread: Any, time: float) -> _HostEvent | None:
        """The innermost event that starts at a time."""
        place = bisect_right(self.begins.get(thread, []), time) - 1
        event = self.events[thread][place] if place >= 0 else None
        return event if event is not None and math.isclose(event.begin, time, abs_tol=2e-3) else None


def _is_collective(name: str) -> bool:
    return name.startswith(_COLLECTIVES)


def _part_named(event: _HostEvent) -> str:
    """The part of the model that a range names; empty for any other event."""
    part, colon, _ = event.name.partition(": ")
    return part if colon and event.category == "user_annotation" and part in PARTS else ""


def _phase_of(around: Sequence[_HostEvent]) -> str:
    for event in around:
        if event.category == "user_annotation" and (phase := _ACTIONS.get(event.name.split(" ")[0])):
            return phase
    # On a GPU, autograd runs in a thread of its own, outside of the span.
    return "backward" if any(event.name.startswith(_EVALUATE) for event in around) else ""


def _place_of(event: _HostEvent, *, has_head: bool) -> tuple[str, str]:
    """Part of the code and phase of an event of the host."""
    around = list(event.around())
    phase = _phase_of(around)
    if phase == COMMUNICATION or any(_is_collective(one.name) for one in around):
        return COMMUNICATION, phase or COMMUNICATION
    if phase in (OPTIMIZER, "reduction"):
        return OPTIMIZER, phase
    if part := next(filter(None, map(_part_named, around)), ""):
        return part, "recompute" if phase == "backward" else phase
    source = next((one.forward for one in around if one.forward is not None), None)
    if source is not None:
        return _place_of(source, has_head=has_head)[0], phase
    if phase == "forward" and has_head:
        return LOSS, phase  # on the last stage, what follows the last layer
    return ("weight gradients" if phase == "backward" else OTHER), phase


def operator_times(trace: Mapping[str, Any]) -> tuple[list[OperatorTime], bool]:
    """Adds up the operators of one trace.

    Args:
        trace: a trace in torch.profiler's JSON.

    Returns:
        The operators, and whether their times are those of a GPU.
    """
    about = trace.get(METADATA)
    has_head = bool(about.get("has_head")) if isinstance(about, dict) else True
    threads, launches, flows = _Threads(), dict[Any, _HostEvent](), defaultdict[Any, dict[str, Any]](dict)
    kernels: list[dict[str, Any]] = []
    for event in trace["traceEvents"]:
        kind, category = event.get("ph"), event.get("cat")
        if kind == "X" and category in _ON_DEVICE:
            kernels.append(event)
        elif kind == "X" and category in _ON_HOST:
            begin = float(event["ts"])
            found = _HostEvent(category, str(event["name"]), begin, begin + float(event.get("dur", 0.0)))
            asynchronous = found.name.startswith("gloo:")
            (threads.collectives if asynchronous else threads.events[event.get("tid")]).append(found)
            if category in ("cuda_runtime", "cuda_driver"):
                launches[event.get("args", {}).get("correlation")] = found
        elif category == "fwdbwd" and kind in ("s", "f"):
            flows[event.get("id")][kind] = event
    threads.nest()
    for flow in flows.values():
        if len(flow) == 2:
            source, target = (threads.at(flow[kind].get("tid"), float(flow[kind]["ts"])) for kind in ("s", "f"))
            if source is not None and target is not None:
                for event in target.around():
                    if event is target or event.name.startswith(_EVALUATE):
                        event.forward = source
    timed = _of_kernels(kernels, launches, has_head) if kernels else _of_host(threads, has_head)
    rows: dict[tuple[str, str, str], OperatorTime] = {}
    for part, phase, name, microseconds in timed:
        row = rows.setdefault((part, phase, name), OperatorTime(part, phase, name))
        row.calls += 1
        row.seconds += microseconds / 1e6
    return list(rows.values()), bool(kernels)


_Timed = Iterator[tuple[str, str, str, float]]
"""Part, phase, name and microseconds of calls."""


def _of_kernels(kernels: Iterable[Mapping[str, Any]], launches: Mapping[Any, _HostEvent], has_head: bool) -> _Timed:
    for kernel in kernels:
        name, launch = str(kernel["name"]), launches.get(kernel.get("args", {}).get("correlation"))
        part, phase, operator = OTHER, "", ""
        if launch is not None:
            part, phase = _place_of(launch, has_head=has_head)
            operator = next((one.name for one in launch.around() if one.category == "cpu_op"), "")
            if "GraphLaunch" in launch.name:
                part = "CUDA graph"
        if _is_collective(name):
            part, operator = COMMUNICATION, name.partition("(")[0]
        yield part, phase, operator or name.partition("<")[0], float(kernel.get("dur", 0.0))


def _of_host(threads: _Threads, has_head: bool) -> _Timed:
    for events in threads.events.values():
        for event in events:
            if event.category == "cpu_op":
                part, phase = _place_of(event, has_head=has_head)
                yield part, phase, event.name.removeprefix(_EVALUATE), event.own
            elif (phase := _phase_of([event])) == COMMUNICATION and event.name.startswith("receive"):
                yield COMMUNICATION, phase, "waiting for p2p", event.own
    for event in threads.collectives:
        yield COMMUNICATION, "", event.name, event.end - event.begin


def read_operators(run_dir: Path) -> OperatorTable | None:
    """Reads the newest profile of a run: the trace of one rank of each pipeline stage.

    Args:
        run_dir: the run directory.

    Returns:
        The operators; None if no step was profiled, or no trace can be read.
    """
    read, rows, on_gpu = list[TraceFile](), dict[tuple[str, str, str], OperatorTime](), False
    for file in _shown(run_dir):
        times = _read_times(file)
        if times is None:
            continue
        read.append(file)
        on_gpu |= times[1]
        for row in times[0]:
            total = rows.setdefault((row.part, row.phase, row.name), OperatorTime(row.part, row.phase, row.name))
            total.calls += row.calls
            total.seconds += row.seconds
    if not read:
        return None
    longest = sorted(rows.values(), key=lambda row: -row.seconds)
    ranks = tuple(file.rank for file in read)
    return OperatorTable(read[0].first_step, read[0].last_step, ranks, on_gpu, tuple(longest))


def merged_profile(run_dir: Path) -> dict[str, Any] | None:
    """Joins the traces of the newest profile of a run that `read_operators` reads; None if there are fewer than two, or
    they are malformed or too large."""
    files = _shown(run_dir)
    try:
        if len(files) < 2 or sum(file.path.stat().st_size for file in files) > _MOST_BYTES:
            return None
        return merged_trace(files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("the traces of %s are not joined: %s", run_dir, error)
        return None


def _shown(run_dir: Path) -> list[TraceFile]:
    """The newest trace of the first rank of each pipeline stage, the first and the last stage among them."""
    of_stage: dict[int, TraceFile] = {}
    for file in newest_traces(run_dir):
        of_stage.setdefault(file.stage, file)
    stages = sorted(of_stage)
    if len(stages) > _MOST_RANKS:
        stages = sorted({stages[place * (len(stages) - 1) // (_MOST_RANKS - 1)] for place in range(_MOST_RANKS)})
    return [of_stage[stage] for stage in stages]


def _read_times(file: TraceFile) -> tuple[list[OperatorTime], bool] | None:
    """The operators of a trace; None if it is malformed, as after a kill, or too large."""
    try:
        if file.path.stat().st_size > _MOST_BYTES:
            _log.warning("%s is too large for the table of operators: profile fewer steps", file.path)
            return None
        return operator_times(read_trace(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("%s cannot be read: %s", file.path, error)
        return None
