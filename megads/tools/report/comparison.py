"""Several runs in one picture and one table."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megads.tools.report.charts import axis_top, envelope, finite, smooth, smoothing_width
from megads.tools.report.history import FloatArray, RunHistory
from megads.tools.report.page import document, footer, table
from megads.tools.report.style import CYCLE, PALETTE, Chart, close_panel, count_axis, open_panel
from megads.tools.report.summary import facts, figures, short, status

_UNCOMPARED = ("run", "logging")
"""Sections of the config that say nothing of what a run computed."""


def comparison_charts(histories: Sequence[RunHistory]) -> list[Chart]:
    """The charts of a comparison in the order of its page."""
    return [
        Chart("loss", "Loss of every run over tokens", partial(draw_losses, histories, "tokens"), wide=True),
        Chart("loss_over_steps", "Loss of every run over steps", partial(draw_losses, histories, "steps")),
        Chart("throughput", "Tokens per second of every run over steps", partial(draw_speeds, histories)),
    ]


def draw_losses(histories: Sequence[RunHistory], key: str, wide: bool) -> Figure:
    """Smoothed training loss as lines, validations as points, over tokens or steps."""
    figure, axes = open_panel(f"Loss over {key}", wide)
    shown = []
    for name, history, color in zip(names(histories), histories, CYCLE, strict=False):
        loss = smooth(history.columns["loss"], smoothing_width(len(history.step)))
        curve = envelope(_places(history, key), loss)
        axes.plot(curve.step, curve.mean, color=color, label=name, marker="o" if len(loss) == 1 else "", markersize=3.5)
        shown.append(loss)
        for validation in history.validations:
            place = np.interp(validation.step, history.step, _places(history, key))
            axes.plot(place, finite(validation.loss), color=color, linestyle="", marker="D", markersize=4)
    axes.set_ylim(top=axis_top(np.concatenate(shown)))
    count_axis(axes)
    if key == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _position: short(value)))
    close_panel(axes, key, "nats per token (points: validation)")
    return figure


def draw_speeds(histories: Sequence[RunHistory], wide: bool) -> Figure:
    """Smoothed tokens a second."""
    figure, axes = open_panel("Throughput", wide)
    for name, history, color in zip(names(histories), histories, CYCLE, strict=False):
        speed = smooth(history.columns["tokens_per_s"], smoothing_width(len(history.step)))
        curve = envelope(history.step, speed)
        axes.plot(
            curve.step, curve.mean, color=color, label=name, marker="o" if len(speed) == 1 else "", markersize=3.5
        )
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: short(value)))
    count_axis(axes)
    close_panel(axes, "step", "tokens/s, smoothed")
    return figure


def comparison_page(histories: Sequence[RunHistory], pictures: Sequence[str]) -> str:
    """The report of several runs.

    Args:
        histories: what to compare.
        pictures: the charts, as page.picture gives them.
    """
    titles = names(histories)
    body = [
        f"<header><h1>{html.escape(', '.join(titles))}</h1></header>",
        f'<div class="charts">{"".join(pictures)}</div>',
        f"<h2>Numbers</h2>{_grid(titles, _numbers(histories))}",
    ]
    differences = list(_config_differences(histories))
    if differences:
        body.append(f"<h2>Config where it differs</h2>{_grid(titles, differences)}")
    body.append(footer(sum(history.unreadable_lines for history in histories)))
    return document("comparison", body)


def names(histories: Sequence[RunHistory]) -> list[str]:
    """The run ids; with the directory where two runs share an id."""
    ids = [history.run_id for history in histories]
    found = [str(history.run_dir) if ids.count(history.run_id) > 1 else history.run_id for history in histories]
    # matplotlib leaves labels with a leading underscore out of the legend.
    return [f" {name}" if name.startswith("_") else name for name in found]


def _places(history: RunHistory, key: str) -> FloatArray:
    """Where the steps are on the x axis: a column without gaps, else the step number."""
    column = history.columns.get(key, history.step)
    return column if np.isfinite(column).all() else history.step


def _grid(titles: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    """A table of one column a run, with the color of its curves."""
    names_of_colors = {shade.light: name for name, shade in PALETTE.items()}
    heads = [
        f'<span class="swatch" style="background:var(--chart-{names_of_colors[color]})"></span>{html.escape(title)}'
        for title, color in zip(titles, CYCLE, strict=False)
    ]
    lines = (
        f'<tr><td class="key">{html.escape(label)}</td><td>{"</td><td>".join(map(html.escape, cells))}</td></tr>'
        for label, cells in rows
    )
    return table(("", *heads), lines)


def _numbers(histories: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    columns = [
        {"status": status(history)[0]} | {item.label: item.value for item in figures(history)} | dict(facts(history))
        for history in histories
    ]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    return [(label, [column.get(label, "") for column in columns]) for label in labels]


def _config_differences(histories: Sequence[RunHistory]) -> Iterator[tuple[str, list[str]]]:
    flat = [dict(_flat(history.config)) for history in histories]
    for key in dict.fromkeys(key for config in flat for key in config):
        values = [str(config.get(key, "")) for config in flat]
        if len(set(values)) > 1 and key.partition(".")[0] not in _UNCOMPARED:
            yield key, values


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
