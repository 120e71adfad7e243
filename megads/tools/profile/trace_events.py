"""Events of Chrome's trace-event format, which ui.perfetto.dev opens, of timelines and of profiles of several ranks."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megads.tools.profile.trace_files import METADATA, TraceFile

_CLOCK = re.compile(r"monotonic (\d+\.\d+)")
_NAMES = ("process_name", "process_sort_index")
_PIDS_OF_A_RANK = 1000


def named(kind: str, name: str, process: int, thread: int | None = None) -> dict[str, Any]:
    """Returns the event that names a process or a thread of a trace.

    Args:
        kind: process or thread.
        name: its name.
        process: number of the process.
        thread: number of the thread; None for a process.
    """
    place = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    return {"name": f"{kind}_name", "ph": "M", **place, "args": {"name": name}}


def sorted_at(kind: str, index: int, process: int, thread: int | None = None) -> dict[str, Any]:
    """Returns the event that sets the place of a process or a thread among the others."""
    place = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    return {"name": f"{kind}_sort_index", "ph": "M", **place, "args": {"sort_index": index}}


def rank_name(rank: int, pipeline_rank: int) -> str:
    """Returns the name of a rank in a trace."""
    return f"rank {rank} (pipeline rank {pipeline_rank})"


def trace_document(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a trace, a JSON object; times of its events are in microseconds."""
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_trace(file: TraceFile) -> dict[str, Any]:
    """Reads the trace of a rank.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is malformed.
    """
    try:
        with gzip.open(file.path) as content:
            trace = json.load(content)
    except EOFError as error:
        raise ValueError(f"it ends in the middle: {error}") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError("it has no traceEvents")
    return trace


def merged_trace(files: Iterable[TraceFile]) -> dict[str, Any]:
    """Joins traces of several ranks, on the clock of rank 0.

    Args:
        files: traces of the same steps.

    Raises:
        OSError: a file cannot be read.
        ValueError: a trace is malformed.
    """
    events: list[dict[str, Any]] = []
    begin_s: float | None = None
    for file in files:
        trace = read_trace(file)
        clock = _clock(trace)
        # Numbers of the clock are large: the first one is the origin.
        begin_s = clock[1] if begin_s is None else begin_s
        events += _of_rank(trace["traceEvents"], file, 1e6 * (clock[1] - begin_s) - clock[0])
    return trace_document(events)


def _clock(trace: Mapping[str, Any]) -> tuple[float, float]:
    """A time of a trace in microseconds, and the same time on rank 0's clock in seconds.

    Of the readings of both clocks, the one with the shortest delay between them.
    """
    about = trace.get(METADATA)
    offset_s = about.get("clock_offset_s") if isinstance(about, dict) else None
    named = ((_CLOCK.fullmatch(str(event.get("name"))), event) for event in trace["traceEvents"])
    readings = [(float(event["ts"]), float(found[1])) for found, event in named if found]
    if not readings or not isinstance(offset_s, float | int):
        raise ValueError("it does not say what its clock is")
    ts, monotonic_s = min(readings, key=lambda reading: reading[0] - 1e6 * reading[1])
    return ts, monotonic_s + offset_s


def _of_rank(events: Iterable[dict[str, Any]], file: TraceFile, later: float) -> Iterator[dict[str, Any]]:
    """Events of a rank with process numbers and flows of its own.

    Args:
        events: events of its trace.
        file: the trace.
        later: microseconds to add to their times.
    """
    processes: dict[Any, int] = {}
    for event in events:
        process = event.get("pid")
        number = processes.setdefault(process, _PIDS_OF_A_RANK * file.rank + len(processes))
        changed = {**event, "pid": number}
        if event.get("name") in _NAMES:
            # The label of the process, which is kept, says CPU or GPU.
            if event["name"] == "process_name":
                yield named("process", rank_name(file.rank, file.stage), number)
                yield sorted_at("process", number, number)
            continue
        if isinstance(event.get("ts"), float | int):
            changed["ts"] = event["ts"] + later
        if "id" in event:
            changed["id"] = f"{file.rank}.{event['id']}"
        yield changed
