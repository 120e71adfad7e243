"""A step of a pipeline as a picture: a row for each rank, what it did over time in colours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megads.parallel.pipeline_actions import ActionKind
from megads.plan.step_trace import RankTrace, idle_share
from megads.report.style import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PINK, REGULAR_INCHES, WIDE_INCHES
from megads.runtime.spans import Span

_LOOKS = {
    "forward": (BLUE, (ActionKind.forward,)),
    "backward": (ORANGE, (ActionKind.backward, ActionKind.backward_input)),
    "weight part": (GREEN, (ActionKind.backward_weight,)),
    "sends, loads": (MUTED, (ActionKind.send_activation, ActionKind.send_gradient, ActionKind.load)),
    "waits for a message": (GRID, (ActionKind.receive_activation, ActionKind.receive_gradient)),
}
"""Label, colour and kinds; everything else is what follows the schedule."""
_OTHERS = "reduction, optimizer"
_LATER_STAGE_ALPHA = 0.6
_ROW_INCHES = 0.21
_MOST_ROWS = 32
_NARROWEST = 1 / 1500
"""Of the width of the picture; neighbours of one colour that are narrower are drawn as one."""
_MOST_GAPS = 100
"""Bars of one colour in a row up to which gaps of a hair's breadth keep them apart."""
_NUMBERED = 1 / 65
"""Of the width, from which a pass shows the number of its micro-batch."""


@dataclass(frozen=True)
class Panel:
    """One step of a picture.

    Attributes:
        title: what it is.
        traces: a row each; ranks of other replicas are left out where there are too many.
    """

    title: str
    traces: Sequence[RankTrace]


def draw_steps(panels: Sequence[Panel], wide: bool = True, *, timed: bool = True) -> Figure:
    """Draws steps below each other over the same time.

    Args:
        panels: from the top.
        wide: for the width of a page.
        timed: times are seconds; else only their ratios mean something.
    """
    shown = [_shown(panel.traces) for panel in panels]
    heights = [max(3, len(rows)) * _ROW_INCHES for rows in shown]
    width = (WIDE_INCHES if wide else REGULAR_INCHES)[0]
    figure = Figure(figsize=(width, sum(heights) + 0.75 * len(panels) + 0.75))
    figure.suptitle("One step over all ranks", x=0.01, horizontalalignment="left", color=INK)
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max((bar.end_s for rows in shown for trace in rows for bar in trace.bars), default=0.0) or 1.0
    scale, unit = (1.0, "s") if end >= 2 else (1e3, "ms") if end >= 2e-3 else (1e6, "µs")
    for panel, rows, one in zip(panels, shown, axes, strict=True):
        _draw_rows(one, rows, end)
        waiting = idle_share(panel.traces)
        one.set_title(f"{panel.title}: {waiting:.1%} of the time without a pass", loc="left", color=MUTED)
        one.set_xlim(0, end)
        one.xaxis.set_major_formatter(lambda value, _position: f"{scale * value:,.4g}")
    axes[-1].set_xlabel(unit if timed else "time")
    if not timed:
        axes[-1].set_xticks([])
    handles = [Patch(color=color, label=label) for label, color in _used(shown)]
    figure.legend(handles=handles, loc="outside lower left", ncols=6 if wide else 3, borderpad=0)
    return figure


def _shown(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """All ranks, or those of the first pipeline, or as many as there is room for."""
    rows = list(traces)
    if len(rows) > _MOST_ROWS:
        rows = [trace for trace in rows if trace.replica == rows[0].replica]
    return rows[:_MOST_ROWS]


def _look(bar: Span) -> tuple[str, str]:
    return next(((label, color) for label, (color, kinds) in _LOOKS.items() if bar.kind in kinds), (_OTHERS, PINK))


def _used(shown: Sequence[Sequence[RankTrace]]) -> list[tuple[str, str]]:
    """Labels and colours of what is there, in the order of the legend."""
    there = {_look(bar) for rows in shown for trace in rows for bar in trace.bars if bar.end_s > bar.start_s}
    looks = [*((label, color) for label, (color, _) in _LOOKS.items()), (_OTHERS, PINK)]
    return [look for look in looks if look in there]


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
        # Waits first, so that what runs beside them is seen.
        for (color, later), ranges in sorted(bars.items(), key=lambda item: item[0][0] != GRID):
            alpha = _LATER_STAGE_ALPHA if later and color != GRID else 1.0
            gap = 0.6 if color != GRID and len(ranges) < _MOST_GAPS else 0.0
            axes.broken_barh(
                ranges, (place - 0.42, 0.84), facecolor=color, edgecolor="white", linewidth=gap, alpha=alpha
            )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [f"rank {trace.rank}" for trace in rows])
    axes.grid(visible=False)
