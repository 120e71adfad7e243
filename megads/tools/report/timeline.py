"""What happened when: the starts of a run as bars, its events as marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from megads.tools.report.history import RunHistory, number
from megads.tools.report.style import BLUE, GREEN, INK, MUTED, ORANGE, RED, close_panel, open_panel

_LANES = (
    ("failures", ("failure", "killed", "checkpoint_failed"), "X", RED),
    ("skipped steps", ("step_skipped",), "x", RED),
    ("stop requests", ("stop_requested",), "s", ORANGE),
    ("other configs", ("config_changed",), "D", BLUE),
    ("checkpoints", ("checkpoint_saved",), "|", GREEN),
)
"""Label, event names, marker and colour of each lane above the bars; lanes without events are left out."""
_BEFORE_LAUNCH = ("config_changed", "nodes_checked")
"""Events of the launcher that belong to the start that follows them."""
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
_PLACES = 600
"""Marks of a lane that can be told apart."""


@dataclass(frozen=True)
class RunStart:
    """One start of the run's processes, in seconds since 1970.

    Attributes:
        begin: when the launcher started.
        end: when it ended; what is known of it where it left no word.
        exit_code: None when it left no word: it still runs, or was killed.
    """

    begin: float
    end: float
    exit_code: int | None


def find_starts(history: RunHistory) -> list[RunStart]:
    """The starts of a run, in order."""
    launches = [place for place, event in enumerate(history.events) if event.get("event") == "launch"]
    return [
        _start(history, history.events[begin:end])
        for begin, end in pairwise([*launches, len(history.events)])
        if math.isfinite(number(history.events[begin].get("time")))
    ]


def _start(history: RunHistory, events: Sequence[Mapping[str, Any]]) -> RunStart:
    begin = number(events[0].get("time"))
    own = [number(event.get("time")) for event in events if event.get("event") not in _BEFORE_LAUNCH]
    end = max(time for time in own if math.isfinite(time))
    ends = [event for event in events if event.get("event") in ("exit", "killed")]
    if ends:
        code = number(ends[-1].get("exit_code"))
        ended = number(ends[-1].get("time"))
        return RunStart(begin, ended if math.isfinite(ended) else end, int(code) if math.isfinite(code) else None)
    is_last = events[-1] is history.events[-1]
    going_on = [event for event in events if event.get("event") == "start"]
    if is_last and going_on:
        # Steps carry no time, but they add up.
        steps = history.step > number(going_on[-1].get("step"))
        trained_s = float(np.nansum(history.columns["step_time_s"][steps]))
        end = max(end, number(going_on[-1].get("time")) + trained_s)
    return RunStart(begin, end, None)


def draw_timeline(history: RunHistory, wide: bool = False) -> Figure | None:
    """Starts as bars, checkpoints, skips, stops and failures as marks, over the time since the first start."""
    starts = find_starts(history)
    if not starts:
        return None
    origin = starts[0].begin
    span = max(start.end for start in starts) - origin
    scale, unit = next((pair for pair in _UNITS if span >= 2 * pair[0]), (1.0, "seconds"))
    lanes = [lane for lane in _LANES if any(event.get("event") in lane[1] for event in history.events)]
    figure, axes = open_panel("Timeline", wide)
    looks = (("finished", BLUE, 0.75), ("stopped or failed", ORANGE, 0.75), ("no end recorded", MUTED, 0.45))
    for kind, (label, color, alpha) in enumerate(looks):
        bars = [
            ((start.begin - origin) / scale, (start.end - start.begin) / scale)
            for start in starts
            if _kind(start) == kind
        ]
        if bars:
            axes.broken_barh(bars, (-0.3, 0.6), color=color, alpha=alpha, linewidth=0, label=label)
    for height, (_, names, marker, color) in enumerate(lanes, start=1):
        times = np.array(
            [number(event.get("time")) - origin for event in history.events if event.get("event") in names]
        )
        times = np.unique(np.round(times[np.isfinite(times)] / max(span, 1e-9) * _PLACES)) / _PLACES * span / scale
        axes.plot(
            times,
            np.full(len(times), height),
            linestyle="",
            marker=marker,
            color=color,
            markersize=6,
            markeredgewidth=1.4,
        )
    axes.set_yticks(range(len(lanes) + 1), ["starts", *(lane[0] for lane in lanes)])
    axes.set_ylim(-0.6, max(len(lanes), 3) + 0.6)
    axes.set_xlim(-0.01 * span / scale, 1.01 * span / scale if span else 1)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    close_panel(axes, f"{unit} since the first start", "")
    return figure


def _kind(start: RunStart) -> int:
    if start.exit_code is None:
        return 2
    return 1 if start.exit_code else 0
