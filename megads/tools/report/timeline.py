"""Timelines of a run: its starts and events, its activities, and timed steps compared with simulated ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megads.api import ActionKind, ConfigError, Schedule, Span, simulate_schedule
from megads.monitor.accounting import Activity
from megads.parallel.schedule import build_schedule
from megads.tools.plan.step_time import (
    RankTrace,
    idle_share,
    mean_costs,
    measured_layer_costs,
    simulated_step,
)
from megads.tools.report.history import PHASE_EVENTS, RunHistory, number
from megads.tools.report.style import (
    BLUE,
    GREEN,
    GRID,
    INK,
    MUTED,
    ORANGE,
    PINK,
    RED,
    close_panel,
    open_figure,
    open_panel,
)

_LANES = (
    ("failures", ("failure", "killed", "checkpoint_failed"), "X", RED),
    ("skipped steps", ("step_skipped",), "x", RED),
    ("loss spikes", ("loss_spike", "roll_back"), "^", RED),
    ("stop requests", ("stop_requested",), "s", ORANGE),
    ("other configs", ("config_changed", "run_changed"), "D", BLUE),
    ("training phases", PHASE_EVENTS, ">", BLUE),
    ("checkpoints", ("checkpoint_saved",), "|", GREEN),
)
"""Label, event names, marker and colour of each lane; lanes without events are left out."""
_BEFORE_LAUNCH = ("config_changed", "run_changed", "nodes_checked")
"""Launcher events that precede the start they belong to."""
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
_PLACES = 600
"""Number of distinguishable positions along a lane."""


@dataclass(frozen=True)
class RunStart:
    """One start of the run's processes; times are Unix timestamps in seconds.

    Attributes:
        begin: start time of the launcher.
        end: end time of the launcher, or the last known activity if no end was recorded.
        exit_code: exit code; None if no end was recorded, because it still runs or was killed.
    """

    begin: float
    end: float
    exit_code: int | None


def find_starts(history: RunHistory) -> list[RunStart]:
    """The starts of a run, in order. Under train.minutes the first one includes the timing of steps."""
    names = [event.get("event") for event in history.events]
    pairs = enumerate(pairwise(["", *names]))
    launches = [place for place, (before, name) in pairs if name == "launch" and before != "length_fixed"]
    starts = []
    for first, after in pairwise([*launches, len(history.events)]):
        events = history.events[first:after]
        begin, code = number(events[0].get("time")), math.nan
        if not math.isfinite(begin):
            continue
        own = [number(event.get("time")) for event in events if event.get("event") not in _BEFORE_LAUNCH]
        end = max(time for time in own if math.isfinite(time))
        ends = [event for event in events if event.get("event") in ("exit", "killed")]
        going_on = [event for event in events if event.get("event") == "start"]
        if ends:
            code, ended = (number(ends[-1].get(key)) for key in ("exit_code", "time"))
            end = ended if math.isfinite(ended) else end
        elif going_on and after == len(history.events):
            # The end is estimated by adding up step times.
            steps = history.step > number(going_on[-1].get("step"))
            trained_s = float(np.nansum(history.columns["step_time_s"][steps]))
            end = max(end, number(going_on[-1].get("time")) + trained_s)
        starts.append(RunStart(begin, end, int(code) if math.isfinite(code) else None))
    return starts


def draw_timeline(history: RunHistory, wide: bool = False) -> Figure | None:
    """Draws starts as bars and events as marks, over the time since the first start."""
    starts = find_starts(history)
    if not starts:
        return None
    origin = starts[0].begin
    span = max(start.end for start in starts) - origin
    scale, unit = next((pair for pair in _UNITS if span >= 2 * pair[0]), (1.0, "seconds"))
    lanes = [lane for lane in _LANES if any(event.get("event") in lane[1] for event in history.events)]
    figure, axes = open_panel("Timeline", wide)
    for label, color, alpha, shown in (
        ("finished", BLUE, 0.75, [start for start in starts if start.exit_code == 0]),
        ("stopped or failed", ORANGE, 0.75, [start for start in starts if start.exit_code]),
        ("no end recorded", MUTED, 0.45, [start for start in starts if start.exit_code is None]),
    ):
        bars = [((start.begin - origin) / scale, (start.end - start.begin) / scale) for start in shown]
        if bars:
            axes.broken_barh(bars, (-0.3, 0.6), color=color, alpha=alpha, linewidth=0, label=label)
    for height, (_, names, marker, color) in enumerate(lanes, start=1):
        found = [number(event.get("time")) - origin for event in history.events if event.get("event") in names]
        times = np.array([time for time in found if math.isfinite(time)])
        times = np.unique(np.round(times / max(span, 1e-9) * _PLACES)) / _PLACES * span / scale
        axes.plot(
            times, np.full(len(times), height), linestyle="", marker=marker, color=color, markersize=6,
            markeredgewidth=1.4,
        )  # fmt: skip
    axes.set_yticks(range(len(lanes) + 1), ["starts", *(lane[0] for lane in lanes)])
    axes.set_ylim(-0.6, max(len(lanes), 3) + 0.6)
    axes.set_xlim(-0.01 * span / scale, 1.01 * span / scale if span else 1)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    close_panel(axes, f"{unit} since the first start", "")
    return figure


_ACTIVITY_COLORS = {
    Activity.train: BLUE,
    Activity.validate: GREEN,
    Activity.save: GREEN,
    Activity.load: GREEN,
    Activity.detect: ORANGE,
    Activity.recover: ORANGE,
    Activity.lost: RED,
}
"""Colours of activities; the others, in which nothing is computed, are grey."""


def draw_activities(history: RunHistory, wide: bool = False) -> Figure | None:
    """Draws one row per activity over wall time, with its share."""
    accounting = history.accounting
    if accounting is None or not accounting.wall_us:
        return None
    origin, span = accounting.periods[0].begin_us / 1e6, accounting.wall_us / 1e6
    scale, unit = next((pair for pair in _UNITS if span >= 2 * pair[0]), (1.0, "seconds"))
    spent = {activity: share for activity, share in accounting.spent_us.items() if share}
    figure, axes = open_panel("Where the time went", wide)
    for row, activity in enumerate(spent):
        bars: list[tuple[float, float]] = []
        for period in accounting.periods:
            if period.activity is not activity:
                continue
            begin, end = (moment / 1e6 - origin for moment in (period.begin_us, period.end_us))
            if bars and begin - bars[-1][1] < span / _PLACES:
                bars[-1] = bars[-1][0], end
            else:
                bars.append((begin, end))
        ranges = [(begin / scale, max(end - begin, span / _PLACES) / scale) for begin, end in bars]
        axes.broken_barh(ranges, (row - 0.38, 0.76), color=_ACTIVITY_COLORS.get(activity, MUTED), linewidth=0)
    shares = [f"{activity} {share / accounting.wall_us:.1%}" for activity, share in spent.items()]
    axes.set_yticks(range(len(spent)), shares)
    axes.set_ylim(len(spent) - 0.4, -0.6)
    axes.set_xlim(0, 1.01 * span / scale)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    close_panel(axes, f"{unit} since the first start", "")
    return figure


_LOOKS = {
    "forward": (BLUE, (ActionKind.forward,)),
    "backward": (ORANGE, (ActionKind.backward, ActionKind.backward_input)),
    "weight gradient": (GREEN, (ActionKind.backward_weight,)),
    "p2p send, data load": (MUTED, (ActionKind.send_activation, ActionKind.send_gradient, ActionKind.load)),
    "waiting for p2p": (GRID, (ActionKind.receive_activation, ActionKind.receive_gradient)),
}
"""Label, colour and action kinds; other spans follow the schedule (`_OTHERS`)."""
_OTHERS = "reduction, optimizer"
_LATER_STAGE_ALPHA = 0.6
_ROW_INCHES = 0.21
_MOST_ROWS = 32
_NARROWEST = 1 / 1500
"""Share of the width below which adjacent bars of one colour are merged."""
_MOST_GAPS = 100
"""Bars of one colour in a row up to which thin gaps separate them."""
_NUMBERED = 1 / 65
"""Share of the width above which a pass is labelled with its micro-batch."""


@dataclass(frozen=True)
class Panel:
    """One step of a timeline chart.

    Attributes:
        title: title of the panel.
        traces: traces of the ranks, one row each; if there are too many, other replicas are left out.
    """

    title: str
    traces: Sequence[RankTrace]


def draw_steps(panels: Sequence[Panel], wide: bool = True, *, timed: bool = True) -> Figure:
    """Draws steps below each other on a shared time axis.

    Args:
        panels: panels from top to bottom.
        wide: whether the figure takes the full page width.
        timed: whether times are in seconds; otherwise only their ratios are meaningful.
    """
    shown = []
    for panel in panels:
        rows = list(panel.traces)
        if len(rows) > _MOST_ROWS:
            rows = [trace for trace in rows if trace.replica == rows[0].replica]
        shown.append(rows[:_MOST_ROWS])
    heights = [max(3, len(rows)) * _ROW_INCHES for rows in shown]
    figure = open_figure("One step over all ranks", wide, sum(heights) + 0.75 * len(panels) + 0.75)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max((bar.end_s for rows in shown for trace in rows for bar in trace.bars), default=0.0) or 1.0
    scale, unit = (1.0, "s") if end >= 2 else (1e3, "ms") if end >= 2e-3 else (1e6, "µs")
    for panel, rows, one in zip(panels, shown, axes, strict=True):
        _draw_rows(one, rows, end)
        idle = idle_share(panel.traces)
        one.set_title(f"{panel.title}: {idle:.1%} of the time without a pass", loc="left", color=MUTED)
        one.set_xlim(0, end)
        one.xaxis.set_major_formatter(lambda value, _position: f"{scale * value:,.4g}")
    axes[-1].set_xlabel(unit if timed else "time")
    if not timed:
        axes[-1].set_xticks([])
    used = {_look(bar) for rows in shown for trace in rows for bar in trace.bars if bar.end_s > bar.start_s}
    looks = [*((label, color) for label, (color, _) in _LOOKS.items()), (_OTHERS, PINK)]
    handles = [Patch(color=color, label=label) for label, color in looks if (label, color) in used]
    figure.legend(handles=handles, loc="outside lower left", ncols=6 if wide else 3, borderpad=0)
    return figure


def _look(bar: Span) -> tuple[str, str]:
    return next(((label, color) for label, (color, kinds) in _LOOKS.items() if bar.kind in kinds), (_OTHERS, PINK))


def _draw_rows(axes: Axes, rows: Sequence[RankTrace], end: float) -> None:
    for place, trace in enumerate(rows):
        stages = sorted({bar.stage for bar in trace.bars if bar.stage is not None})
        bars: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
        for bar in trace.bars:
            later = bar.stage is not None and bar.stage != stages[0]
            row = bars[_look(bar)[1], later]
            touches = row and bar.start_s - sum(row[-1]) < _NARROWEST * end
            if touches and min(row[-1][1], bar.end_s - bar.start_s) < _NARROWEST * end:
                row[-1] = row[-1][0], max(sum(row[-1]), bar.end_s) - row[-1][0]
            else:
                row.append((bar.start_s, bar.end_s - bar.start_s))
            passes = bar.kind in list(ActionKind) and ActionKind(bar.kind).computes
            if passes and bar.end_s - bar.start_s > _NUMBERED * end:
                axes.text(
                    (bar.start_s + bar.end_s) / 2, place, str(bar.micro_batch), fontsize=6.5, color="white",
                    horizontalalignment="center", verticalalignment="center_baseline",
                )  # fmt: skip
        # Waits are drawn first, so that they do not hide overlapping bars.
        for (color, later), ranges in sorted(bars.items(), key=lambda item: item[0][0] != GRID):
            alpha = _LATER_STAGE_ALPHA if later and color != GRID else 1.0
            gap = 0.6 if color != GRID and len(ranges) < _MOST_GAPS else 0.0
            axes.broken_barh(
                ranges, (place - 0.42, 0.84), facecolor=color, edgecolor="white", linewidth=gap, alpha=alpha
            )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [f"rank {trace.rank}" for trace in rows])
    axes.grid(visible=False)


def schedule_of(history: RunHistory, traces: Sequence[RankTrace]) -> Schedule | None:
    """The schedule of a measured step; None if it cannot be derived from config and micro-batches."""
    numbers = {bar.micro_batch for trace in traces for bar in trace.bars if bar.micro_batch is not None}
    if numbers != set(range(len(numbers))) or not numbers:
        return None
    ranks = 1 + max(trace.pipeline_rank for trace in traces)
    settings = [history.setting(f"parallel.{key}") for key in ("virtual_stages", "contiguous_micro_batches")]
    virtual, contiguous = (value if isinstance(value, int) else None for value in settings)
    name = str(history.setting("parallel.schedule") or "1f1b")
    try:
        return build_schedule(name, ranks, virtual, len(numbers), contiguous=contiguous)
    except ConfigError:
        return None


def layer_costs(history: RunHistory) -> tuple[float, float, float] | None:
    """Costs of embedding, block and head relative to a block, from all timed steps; None if not derivable."""
    traces = [trace for step in history.timed_steps.values() for trace in step]
    bounds = history.last_event("start").get("stages")
    if not traces or not isinstance(bounds, list) or not all(isinstance(bound, int) for bound in bounds):
        return None
    return measured_layer_costs(mean_costs(traces, len(bounds) - 1), bounds)


def draw_step_timeline(history: RunHistory, wide: bool = True) -> Figure | None:
    """Draws the last timed step and, below it, a simulation of its schedule with the measured mean costs."""
    steps = history.timed_steps
    if not steps:
        return None
    most = max(len(traces) for traces in steps.values())
    step, traces = next((step, traces) for step, traces in reversed(steps.items()) if len(traces) == most)
    panels = [Panel(f"measured, step {step:,}", traces)]
    schedule = schedule_of(history, traces)
    if schedule is not None:
        costs = mean_costs(traces, schedule.placement.num_stages)
        simulated = simulated_step(simulate_schedule(schedule, costs))
        panels.append(Panel(f"{schedule.name} simulated with these mean costs", simulated))
    return draw_steps(panels, wide)
