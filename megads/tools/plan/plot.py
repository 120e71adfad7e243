"""The breakdown of a planned step time as a picture, or as a page with a table."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING

from megads.errors import ConfigError
from megads.plan.devices import Device
from megads.plan.step_estimate import StepEstimate
from megads.tools.plan.step import MEANING, seconds_text, step_line
from megads.tools.report.config import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WORK = {"matmul", "attention", "elementwise", "recompute", "main_grad", "optimizer"}
"""Parts in which ranks compute; in the others they communicate or wait."""


def write_plot(path: Path, estimate: StepEstimate, device: Device) -> None:
    """Draws the parts of a step, the largest first.

    Args:
        path: output file: .png, .svg or .html.
        estimate: estimated step.
        device: device on which the step is planned.

    Raises:
        ConfigError: The file cannot be written, or matplotlib is not installed.
    """
    require_matplotlib()
    from megads.runtime.files import atomic_writer
    from megads.tools.report.page import document, footer, picture, table
    from megads.tools.report.style import house_style, png, svg

    said = step_line(estimate, device)
    with house_style():
        figure = draw_parts(estimate)
        if path.suffix == ".png":
            content = png(figure)
        elif path.suffix == ".svg":
            content = standalone_svg(figure)
        else:
            rows = (
                f'<tr><td>{name}</td><td class="number">{seconds_text(seconds)}</td>'
                f'<td class="number">{seconds / estimate.step_time_s:.1%}</td><td>{MEANING[name]}</td></tr>'
                for name, seconds in by_size(estimate)
            )
            body = [
                f"<header><h1>{html.escape(said)}</h1></header>",
                f'<div class="charts">{picture(svg(figure, "parts", "", said), None, wide=True)}</div>',
                table(("part", ">time", ">share", "what"), rows),
                footer(0),
            ]
            content = document("planned step", body).encode()
    try:
        with atomic_writer(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"plot = {path} cannot be written ({error.strerror}): choose another file") from error


def by_size(estimate: StepEstimate) -> list[tuple[str, float]]:
    """Parts of the step with their seconds, the largest first."""
    return sorted(estimate.parts.items(), key=lambda part: -part[1])


def standalone_svg(figure: Figure) -> bytes:
    """The figure as a standalone SVG file."""
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", facecolor="white")
    return buffer.getvalue()


def draw_parts(estimate: StepEstimate) -> Figure:
    """One bar per part, with one colour for compute and another for waiting."""
    from megads.tools.report.style import BLUE, INK, ORANGE, close_panel, open_panel

    figure, axes = open_panel("Where a step's time goes", wide=True)
    parts = by_size(estimate)
    for label, color, works in (("computes", BLUE, True), ("waits", ORANGE, False)):
        own = [(row, seconds) for row, (name, seconds) in enumerate(parts) if (name in _WORK) is works]
        if own:
            rows, lengths = zip(*own, strict=True)
            axes.barh(rows, lengths, color=color, height=0.7, label=label)
    for row, (_, seconds) in enumerate(parts):
        axes.text(seconds, row, f" {seconds / estimate.step_time_s:.1%}", va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(parts)), [name for name, _ in parts])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(visible=False, axis="y")
    close_panel(axes, f"seconds of {seconds_text(estimate.step_time_s)}", "")
    return figure
