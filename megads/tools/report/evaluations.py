"""Loss by position and needles in a haystack in a report: results of validations and of `megads evaluate`."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megads.tools.report.history import FloatArray, RunHistory, number
from megads.tools.report.html_page import table
from megads.tools.report.style import CYCLE, GREEN, INK, ORANGE, RED, close_panel, open_panel

_MOST_CURVES = 8
"""The newest curves and grids are shown; more cannot be told apart."""


@dataclass(frozen=True)
class LossByPosition:
    """Mean losses by position in the sequence.

    Attributes:
        name: set, sequence length and step.
        first: first position of each range, ascending.
        loss: mean loss of each range, in nats per token.
    """

    name: str
    first: FloatArray
    loss: FloatArray


@dataclass(frozen=True)
class NeedleGrid:
    """Retrieval of needles.

    Attributes:
        name: settings and step.
        lengths: numbers of tokens, ascending.
        depths: depths of the needle, ascending; 0 is the beginning.
        accuracy: share of right answers, [depths, lengths]; NaN where none is recorded.
        exact_match: share of answers that greedy generation gives, likewise.
        samples: number of haystacks of each cell.
        chance: accuracy of a guess.
    """

    name: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    accuracy: FloatArray
    exact_match: FloatArray
    samples: int
    chance: float


def losses_by_position(history: RunHistory) -> list[LossByPosition]:
    """The newest losses by position of each set and settings: those of the last validation first."""
    found: dict[str, LossByPosition] = {}
    for name, (step, losses) in history.by_position.items():
        _keep(found, f"{name}, validation at step {step:,.0f}", losses)
    for content in history.evaluation_results:
        sets = content.get("sets")
        for name, values in sets.items() if isinstance(sets, Mapping) else ():
            ranges = values.get("by_position") if isinstance(values, Mapping) else None
            if isinstance(ranges, list):
                pairs = [(number(one.get("first")), number(one.get("loss"))) for one in ranges if isinstance(one, dict)]
                _keep(found, f"{name}{_settings(content)}", {int(f): x for f, x in pairs if math.isfinite(f)})
    return list(found.values())[-_MOST_CURVES:]


def _keep(found: dict[str, LossByPosition], name: str, losses: Mapping[int, float]) -> None:
    found.pop(name, None)
    if losses:
        firsts = sorted(losses)
        values = np.array([losses[first] for first in firsts])
        found[name] = LossByPosition(name, np.array(firsts, dtype=np.float64), values)


def _settings(content: Mapping[str, Any]) -> str:
    """Sequence length, RoPE and step of an evaluation, as in the file, to follow a name."""
    settings, words = content.get("settings"), []
    if isinstance(settings, Mapping):
        length, theta, scaling = (settings.get(key) for key in ("seq_len", "rope_theta", "rope_scaling"))
        words += [f"{number(length):,.0f} tokens"] if length is not None else []
        words += [f"RoPE base {number(theta):,g}"] if theta is not None else []
        if isinstance(scaling, Mapping):
            kind = scaling.get("kind")
            words.append("no RoPE scaling" if kind == "none" else f"{kind} x {number(scaling.get('factor')):g}")
    words.append(f"step {number(content.get('step')):,.0f}")
    return "".join(f", {word}" for word in words)


def draw_losses_by_position(history: RunHistory, wide: bool = False) -> Figure | None:
    """Loss over the position in the sequence, which has a logarithmic axis."""
    curves = losses_by_position(history)
    if not curves:
        return None
    figure, axes = open_panel("Loss by position in the sequence", wide)
    for curve, color in zip(curves, CYCLE, strict=False):
        # Positions 0 and 1 have ranges of their own; the axis begins at 1 token of context.
        axes.plot(curve.first + 1, curve.loss, color=color, marker="o", markersize=3.5, linewidth=1, label=curve.name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:,.0f}"))
    close_panel(axes, "tokens of context, from", "nats per token")
    return figure


def position_table(history: RunHistory) -> str:
    """Table of the losses by position; empty without any."""
    curves = losses_by_position(history)
    firsts = sorted({int(first) for curve in curves for first in curve.first})
    rows = []
    for first in firsts:
        by_curve = [dict(zip(curve.first.astype(int).tolist(), curve.loss.tolist(), strict=True)) for curve in curves]
        cells = ["" if first not in values else f"{values[first]:.4f}" for values in by_curve]
        rows.append((f"{first:,}" if first < 2 else f"{first:,} to {2 * first - 1:,}", *cells))
    return table((">position", *(f">{curve.name}" for curve in curves)), rows) if rows else ""


def needle_grids(history: RunHistory) -> list[NeedleGrid]:
    """The newest grid of each length of the sequence, RoPE and step."""
    found: dict[str, NeedleGrid] = {}
    for content in history.evaluation_results:
        needles = content.get("needles")
        cells = needles.get("cells") if isinstance(needles, Mapping) else None
        if not isinstance(needles, Mapping) or not isinstance(cells, list):
            continue
        by_place: dict[tuple[float, float], Any] = {
            (number(cell.get("length")), number(cell.get("depth"))): cell
            for cell in cells
            if isinstance(cell, Mapping) and math.isfinite(number(cell.get("length")))
        }
        lengths, depths = (tuple(sorted({place[index] for place in by_place})) for index in (0, 1))
        accuracy, exact = (
            np.array([[number(by_place.get((n, d), {}).get(key)) for n in lengths] for d in depths])
            for key in ("accuracy", "exact_match")
        )
        distractors, samples = (number(needles.get(key)) for key in ("distractors", "samples"))
        name = _settings(content).removeprefix(", ")
        found.pop(name, None)
        if by_place and math.isfinite(samples):
            chance = 1 / (1 + distractors) if math.isfinite(distractors) else math.nan
            sizes = tuple(int(length) for length in lengths)
            found[name] = NeedleGrid(name, sizes, depths, accuracy, exact, int(samples), chance)
    return list(found.values())[-_MOST_CURVES:]


def draw_needles(history: RunHistory, wide: bool = False) -> Figure | None:
    """Heat map of the newest grid of needles: the share of right answers by depth and length."""
    grids = needle_grids(history)
    if not grids:
        return None
    grid = grids[-1]
    figure, axes = open_panel(f"Needles found, {grid.name}", wide)
    colors = LinearSegmentedColormap.from_list("needles", [RED, ORANGE, GREEN])
    image = axes.imshow(100 * grid.accuracy, cmap=colors, vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    axes.grid(visible=False)
    axes.set_xticks(range(len(grid.lengths)), [f"{length:,}" for length in grid.lengths])
    axes.set_yticks(range(len(grid.depths)), [f"{100 * depth:g}%" for depth in grid.depths])
    for (row, column), share in np.ndenumerate(grid.accuracy):
        if math.isfinite(share):
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=INK, fontsize=7.5)
    figure.colorbar(image, ax=axes, label="% right")
    close_panel(axes, "tokens", "depth of the needle")
    return figure


def needle_table(history: RunHistory) -> str:
    """Table of every grid: right answers, and in brackets those of greedy generation; empty without any."""
    parts = []
    for grid in needle_grids(history):
        rows = [
            (f"{100 * depth:g}%", *(f"{share:.0%} ({same:.0%})" for share, same in zip(right, exact, strict=True)))
            for depth, right, exact in zip(grid.depths, grid.accuracy, grid.exact_match, strict=True)
        ]
        chance = f"{grid.chance:.0%}" if math.isfinite(grid.chance) else "unknown"
        note = f"{grid.name}: {grid.samples:,} haystacks a cell; a guess is right in {chance} of them"
        parts.append(
            f"<p>{html.escape(note)}</p>" + table(("depth", *(f">{length:,} tokens" for length in grid.lengths)), rows)
        )
    return "".join(parts)
