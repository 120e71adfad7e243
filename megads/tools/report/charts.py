"""Charts of one run; each drawing function returns None if there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megads.api import read_json_lines, slowdowns_path
from megads.tools.report.evaluations import draw_losses_by_position, draw_needles
from megads.tools.report.history import ExpertLoads, FloatArray, RunHistory
from megads.tools.report.planned_step import StepComparison, draw_comparison
from megads.tools.report.style import BLUE, GREEN, INK, MUTED, ORANGE, RED, Chart, close_panel, count_axis, open_panel
from megads.tools.report.timeline import draw_activities, draw_step_timeline, draw_timeline

MOST_POINTS = 1000
"""Maximum number of points of a curve; longer curves are reduced to an envelope."""


@dataclass(frozen=True)
class Envelope:
    """A curve reduced to buckets of equally many steps, which preserves its extremes.

    Attributes:
        steps_per_point: steps per bucket; 1 if the curve is not reduced.
        step: mean step of each bucket.
        low: smallest finite value of each bucket; NaN if there is none.
        high: largest finite value of each bucket; NaN if there is none.
        mean: mean of the finite values of each bucket; NaN if there are none.
    """

    steps_per_point: int
    step: FloatArray
    low: FloatArray
    high: FloatArray
    mean: FloatArray


def finite(values: FloatArray) -> FloatArray:
    """Replaces infinities by NaN."""
    return np.where(np.isfinite(values), values, np.nan)


def envelope(step: FloatArray, values: FloatArray, most_points: int = MOST_POINTS) -> Envelope:
    """Reduces a curve to at most `most_points` buckets."""
    size = max(1, -(-len(step) // most_points))
    starts = np.arange(0, len(step), size)
    values = finite(values)
    valid = np.isfinite(values)
    count = np.add.reduceat(valid.astype(np.float64), starts)
    total = np.add.reduceat(np.where(valid, values, 0.0), starts)
    steps = np.add.reduceat(step, starts) / np.diff(np.append(starts, len(step)))
    mean = np.divide(total, count, out=np.full(len(starts), np.nan), where=count > 0)
    return Envelope(size, steps, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts), mean)


def smoothing_width(num_steps: int) -> int:
    """Smoothing window in steps: about a fortieth of the run, odd, at least 3; 1 for runs too short to smooth."""
    width = num_steps // 40
    return 1 if num_steps < 10 else max(3, width + 1 - width % 2)


def smooth(values: FloatArray, width: int) -> FloatArray:
    """Mean of the finite values in a window of `width` steps around each.

    Near the ends the window shrinks symmetrically, which avoids bias on a falling curve.
    """
    values = finite(values)
    valid = np.isfinite(values)
    totals = np.append(0.0, np.cumsum(np.where(valid, values, 0.0)))
    counts = np.append(0.0, np.cumsum(valid))
    index = np.arange(len(values))
    reach = np.minimum(np.minimum(index, len(values) - 1 - index), width // 2)
    low, high = index - reach, index + reach + 1
    count = counts[high] - counts[low]
    return np.divide(totals[high] - totals[low], count, out=np.full(len(values), np.nan), where=count > 0)


def axis_top(values: FloatArray) -> float | None:
    """Upper limit of an axis on which outliers would flatten the rest of the curve; None if no limit is needed.

    The limit is twice the range of 99% of the values, and applies only if it at least halves the axis.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, usual = np.percentile(values, [0, 99])
    top = float(usual + (usual - low))
    return top if top > low and values.max() - low > 2 * (top - low) else None


_MOST_RESTART_MARKS = 50
_MOST_CELLS = 256
"""Maximum number of rows and of columns of a heat map."""
_DARKEST_SLOWDOWN = 0.25
_TASK_LOOKS = tuple(product(("o", "s", "D", "^"), (BLUE, GREEN, ORANGE, RED, INK)))
_VALIDATION_LOOKS = ((GREEN, "o"), (ORANGE, "s"), (INK, "D"))


def run_charts(history: RunHistory, compared: StepComparison | None = None) -> list[Chart]:
    """The charts of a run in the order of the page.

    Args:
        history: history of the run.
        compared: comparison of a timed step with its plan.
    """
    drawn = (
        ("loss", "Training loss, validation loss and unigram loss over steps", draw_loss, True),
        ("tasks", "Metrics of lm-eval's tasks over steps", draw_tasks, False),
        ("loss_by_position", "Loss by position in the sequence", draw_losses_by_position, False),
        ("needles", "Needles found in haystacks, by depth and length", draw_needles, False),
        ("learning_rate", "Learning rate over steps", draw_learning_rate, False),
        ("grad_norm", "Gradient norm over steps, skipped steps marked", draw_grad_norm, False),
        ("throughput", "Tokens per second and MFU over steps", draw_throughput, False),
        ("step_time", "Step time over steps, with time waiting for data", draw_step_time, False),
        ("memory", "Peak memory over steps", draw_memory, False),
        ("step_timeline", "Timeline of all ranks in one step, measured and simulated", draw_step_timeline, True),
        (
            "planned_step",
            "Parts of a timed step, measured and planned",
            lambda _, wide: draw_comparison(compared, wide),
            False,
        ),
        ("expert_load", "Load of the busiest expert of each layer over steps", draw_expert_load, True),
        ("dead_experts", "Number of experts without tokens of each layer over steps", draw_dead_experts, False),
        ("balance_loss", "Balance loss and z-loss of the routers over steps", draw_balance_losses, False),
        ("router_entropy", "Mean entropy of the routers over steps", draw_router_entropy, False),
        ("stragglers", "Slowdown of each rank relative to its peers, over steps", draw_stragglers, False),
        ("timeline", "Starts, checkpoints and faults over time", draw_timeline, False),
        ("activities", "Activities of the run over wall time", draw_activities, False),
    )
    return [Chart(name, description, partial(draw, history), wide) for name, description, draw, wide in drawn]


def draw_loss(history: RunHistory, wide: bool = True) -> Figure | None:
    """Training loss, raw and smoothed, all validation losses, and the unigram loss as a baseline."""
    loss = history.columns["loss"]
    figure, axes = open_panel("Loss", wide)
    width = smoothing_width(len(loss))
    _draw_raw(axes, history.step, loss, "train", BLUE, strong=width == 1)
    if not np.isfinite(loss).any():
        axes.set_yticks([])
    elif width > 1:
        # Spikes are marked separately; smoothing would widen them.
        top = axis_top(loss)
        curve = envelope(history.step, smooth(loss if top is None else np.where(loss > top, np.nan, loss), width))
        axes.plot(curve.step, curve.mean, color=BLUE, label=f"train, mean of {width:,} steps")
    shown = [finite(loss), *_draw_validations(axes, history)]
    _cut_outliers(axes, history.step, loss, np.concatenate(shown))
    wrong = history.step[~np.isfinite(loss)]
    _mark_top(axes, wrong, f"not finite ({len(wrong):,})")
    return _finish(figure, axes, history, "nats per token")


def _draw_validations(axes: Axes, history: RunHistory) -> Iterator[FloatArray]:
    """Draws the validation losses and unigram losses; yields the values drawn."""
    for validation, (color, marker) in zip(history.validations, cycle(_VALIDATION_LOOKS), strict=False):
        label = "validation" if len(history.validations) == 1 else f"validation {validation.name}"
        values = finite(validation.loss)
        size = 4.5 if len(values) <= 60 else 2.5
        axes.plot(validation.step, values, color=color, marker=marker, markersize=size, linewidth=1, label=label)
        yield values
        if np.isfinite(validation.unigram_loss):
            yield np.array([validation.unigram_loss])
            axes.axhline(validation.unigram_loss, color=MUTED, linestyle=(0, (5, 3)), linewidth=1)
            axes.annotate(
                "unigram", (1, validation.unigram_loss), xycoords=("axes fraction", "data"), xytext=(-2, 2.5),
                textcoords="offset points", horizontalalignment="right", color=MUTED,
            )  # fmt: skip


def draw_tasks(history: RunHistory, wide: bool = False) -> Figure | None:
    """Metrics of the tasks evaluated during training."""
    if not history.tasks:
        return None
    figure, axes = open_panel("Tasks", wide)
    for task, (marker, color) in zip(history.tasks, cycle(_TASK_LOOKS), strict=False):
        axes.plot(task.step, finite(task.value), color=color, marker=marker, markersize=4, linewidth=1, label=task.name)
    return _finish(figure, axes, history, "")


def draw_learning_rate(history: RunHistory, wide: bool = False) -> Figure | None:
    """Learning rate of each step."""
    rate = history.columns["lr"]
    if not np.isfinite(rate).any():
        return None
    figure, axes = open_panel("Learning rate", wide)
    largest = float(np.nanmax(finite(rate)))
    exponent = math.floor(math.log10(largest)) if largest > 0 else 0
    _draw_line(axes, history.step, rate / 10.0**exponent, BLUE)
    axes.set_ylim(0, 1.08 * largest / 10.0**exponent or 1)
    return _finish(figure, axes, history, f"learning rate, 1e{exponent}" if exponent else "learning rate")


def draw_grad_norm(history: RunHistory, wide: bool = False) -> Figure | None:
    """Gradient norm before clipping; skipped steps are marked."""
    norm = history.columns["grad_norm"]
    skipped = np.nan_to_num(history.columns["skipped"]) > 0
    if not (np.isfinite(norm).any() or skipped.any()):
        return None
    figure, axes = open_panel("Gradient norm", wide)
    positive = finite(norm)[finite(norm) > 0]
    if len(positive) and positive.max() > 30 * np.median(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    else:
        axes.set_ylim(0, 1.08 * positive.max() if len(positive) else 1)
    _draw_raw(axes, history.step, norm, "norm", BLUE, strong=True)
    clip = history.setting("optim.clip_grad")
    if isinstance(clip, int | float) and clip > 0 and len(positive) and clip < 3 * positive.max():
        axes.axhline(clip, color=MUTED, linestyle=(0, (5, 3)), linewidth=1, label=f"clipped at {clip:g}")
    _mark_top(axes, history.step[skipped], f"skipped ({int(skipped.sum()):,})")
    return _finish(figure, axes, history, "L2 norm, before clipping")


def draw_throughput(history: RunHistory, wide: bool = False) -> Figure | None:
    """Tokens per second and MFU."""
    speed, mfu = history.columns["tokens_per_s"], history.columns["mfu"]
    if not np.isfinite(speed).any():
        return None
    figure, axes = open_panel("Throughput", wide)
    _draw_raw(axes, history.step, speed, "", BLUE, strong=True)
    axes.axhline(float(np.nanmedian(finite(speed))), color=MUTED, linestyle=(0, (5, 3)), linewidth=1, label="median")
    axes.set_ylim(0, 1.08 * float(np.nanmax(finite(speed))) or 1)
    _cut_outliers(axes, history.step, speed, finite(speed))
    axes.yaxis.set_major_formatter(FuncFormatter(_short_count))
    ratio = mfu / np.where(speed > 0, speed, np.nan)
    ratio = ratio[np.isfinite(ratio)]
    # Both share a curve only if the FLOPs per token and the devices stay the same.
    if len(ratio) and ratio.min() > 0 and ratio.max() < 1.001 * ratio.min():
        percent = 100 * float(ratio[0])
        right = axes.secondary_yaxis(
            "right", functions=(partial(np.multiply, percent), partial(np.multiply, 1 / percent))
        )
        right.set_ylabel("MFU, % of peak")
        right.spines["right"].set_visible(False)
    return _finish(figure, axes, history, "tokens/s")


def draw_step_time(history: RunHistory, wide: bool = False) -> Figure | None:
    """Step time, split into waiting for data and the rest."""
    total, data = history.columns["step_time_s"], history.columns["data_time_s"]
    if not np.isfinite(total).any():
        return None
    curve, waiting = envelope(history.step, total, 300), envelope(history.step, data, 300)
    scale, unit = (1000, "ms") if np.nanmedian(curve.mean) < 1 else (1, "s")
    wait = scale * np.nan_to_num(waiting.mean)
    share = np.nansum(finite(data)) / max(np.nansum(finite(total)), 1e-12)
    figure, axes = open_panel("Step time", wide)
    rest_label, wait_label = "compute and communication", f"waiting for data ({100 * share:.2g}%)"
    if len(curve.step) > 1:
        axes.fill_between(
            curve.step, wait, scale * curve.mean, step="mid", color=BLUE, alpha=0.55, linewidth=0, label=rest_label
        )
        axes.fill_between(curve.step, 0, wait, step="mid", color=ORANGE, linewidth=0, label=wait_label)
    else:
        rest = scale * curve.mean - wait
        axes.bar(curve.step, rest, bottom=wait, width=0.3, color=BLUE, alpha=0.55, label=rest_label)
        axes.bar(curve.step, wait, width=0.3, color=ORANGE, label=wait_label)
    axes.set_ylim(bottom=0)
    _cut_outliers(axes, curve.step, scale * curve.mean, scale * curve.mean)
    each = "" if curve.steps_per_point == 1 else f", mean of {curve.steps_per_point:,} steps"
    return _finish(figure, axes, history, unit + each)


def draw_memory(history: RunHistory, wide: bool = False) -> Figure | None:
    """Peak memory of rank 0 up to each step; it never decreases until a restart."""
    memory = history.columns["peak_memory_bytes"]
    if not np.isfinite(memory).any():
        return None
    largest = float(np.nanmax(finite(memory)))
    scale, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    figure, axes = open_panel("Peak memory of rank 0", wide)
    _draw_line(axes, history.step, memory / scale, BLUE)
    axes.set_ylim(0, 1.12 * largest / scale)
    return _finish(figure, axes, history, unit)


def draw_stragglers(history: RunHistory, wide: bool = False) -> Figure | None:
    """Heat map of ranks over steps: the slowdown of each rank relative to ranks with the same work."""
    steps, slowdown = _read_slowdowns(history)
    if not len(steps):
        return None
    figure, axes = open_panel("Slowdown of ranks against their peers", wide)
    span = (float(steps[0]), float(steps[-1]) + 1)
    _draw_heat_map(axes, 100 * np.maximum(slowdown, 0.0), span, 0.0, 100 * _DARKEST_SLOWDOWN, RED, "% longer")
    close_panel(axes, "step", "rank")
    return figure


def _draw_heat_map(
    axes: Axes, values: FloatArray, span: tuple[float, float], low: float, high: float, color: str, label: str
) -> None:
    """Draws values [rows, steps]; a cell that stands for several rows or steps shows the maximum.

    Args:
        axes: the axes.
        values: the values; NaN is not drawn.
        span: first step, and one past the last.
        low: value without any colour.
        high: least value of the full colour; larger if there are larger values.
        color: the full colour.
        label: label of the colour bar.
    """
    rows, columns = (np.arange(0, size, -(-size // _MOST_CELLS)) for size in values.shape)
    cells = np.fmax.reduceat(np.fmax.reduceat(values, rows, axis=0), columns, axis=1)
    colors = LinearSegmentedColormap.from_list("heat", [to_rgba(color, 0.0), to_rgba(color, 1.0)])
    image = axes.imshow(
        cells, cmap=colors, vmin=low, vmax=max(high, float(np.nanmax(cells, initial=high))), aspect="auto",
        interpolation="nearest", extent=(*span, len(values) - 0.5, -0.5),
    )  # fmt: skip
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=axes, label=label)
    count_axis(axes)


_FULL_LOAD = 2.0


def draw_expert_load(history: RunHistory, wide: bool = True) -> Figure | None:
    """Heat map of layers over steps: the tokens of the busiest expert relative to the mean."""
    if (loads := history.loads) is None:
        return None
    figure, axes = open_panel("Load of the busiest expert", wide)
    _draw_by_layer(axes, loads, loads.max_load, 1.0, _FULL_LOAD, ORANGE, "times the mean")
    return figure


def draw_dead_experts(history: RunHistory, wide: bool = False) -> Figure | None:
    """Heat map of layers over steps: the number of experts without tokens; None if every expert always got some."""
    if (loads := history.loads) is None or not np.nansum(loads.dead):
        return None
    figure, axes = open_panel("Experts without tokens", wide)
    _draw_by_layer(axes, loads, loads.dead, 0.0, 1.0, RED, "experts")
    return figure


def _draw_by_layer(
    axes: Axes, loads: ExpertLoads, values: FloatArray, low: float, high: float, color: str, label: str
) -> None:
    # A column covers the steps since the one before it.
    before = loads.step[0] - (loads.step[1] - loads.step[0] if len(loads.step) > 1 else 1)
    _draw_heat_map(axes, values, (float(before), float(loads.step[-1])), low, high, color, label)
    axes.yaxis.set_major_formatter(FuncFormatter(partial(_layer_label, loads.layers)))
    close_panel(axes, "step", "layer")


def _layer_label(layers: Sequence[int], row: float, _position: int | None = None) -> str:
    return str(layers[round(row)]) if 0 <= round(row) < len(layers) else ""


def draw_balance_losses(history: RunHistory, wide: bool = False) -> Figure | None:
    """Balance loss and z-loss of all routers, which are added to the language loss."""
    drawn = [("balance loss", "moe/balance_loss", BLUE), ("z-loss", "moe/z_loss", ORANGE)]
    drawn = [one for one in drawn if np.nansum(finite(history.columns[one[1]]))]
    if not drawn:
        return None
    figure, axes = open_panel("Balance losses of the routers", wide)
    for label, key, color in drawn:
        _draw_raw(axes, history.step, history.columns[key], label, color, strong=True)
    axes.set_ylim(bottom=0)
    return _finish(figure, axes, history, "added to the loss")


def draw_router_entropy(history: RunHistory, wide: bool = False) -> Figure | None:
    """Mean entropy of the routers' scores, and that of equal scores."""
    entropy = history.columns["moe/router_entropy"]
    if not np.isfinite(entropy).any():
        return None
    figure, axes = open_panel("Entropy of the routers", wide)
    _draw_raw(axes, history.step, entropy, "mean over layers", BLUE, strong=True)
    experts, top = history.setting("model.moe.num_experts"), float(np.nanmax(finite(entropy)))
    if isinstance(experts, int) and experts > 0:
        top = max(top, math.log(experts))
        axes.axhline(math.log(experts), color=MUTED, linestyle=(0, (5, 3)), linewidth=1, label="equal scores")
    axes.set_ylim(0, 1.08 * top or 1)
    return _finish(figure, axes, history, "nats")


def _read_slowdowns(history: RunHistory) -> tuple[FloatArray, FloatArray]:
    """Timed steps, ascending, and slowdowns [ranks, steps]; only steps with as many ranks as the last one recorded."""
    found: dict[int, list[float]] = {}
    for line in read_json_lines(slowdowns_path(history.run_dir)):
        step, values = line.get("step"), line.get("slowdown")
        if isinstance(step, int) and isinstance(values, list) and all(isinstance(v, int | float) for v in values):
            # For a step trained more than once, the last line is used.
            found.pop(step, None)
            found[step] = values
    width = len(found[next(reversed(found))]) if found else 0
    steps = sorted(step for step, values in found.items() if len(values) == width)
    return np.array(steps, dtype=np.float64), np.array([found[step] for step in steps], dtype=np.float64).T


def _draw_raw(axes: Axes, step: FloatArray, values: FloatArray, label: str, color: str, strong: bool) -> None:
    """Draws a curve as a line, or as a band from minimum to maximum if there are more steps than points."""
    curve = envelope(step, values)
    if curve.steps_per_point > 1:
        span = f"range of {curve.steps_per_point:,} steps"
        band = f"{label}, {span}" if label else span
        axes.fill_between(curve.step, curve.low, curve.high, color=color, alpha=0.3, linewidth=0, label=band)
        if strong:
            axes.plot(curve.step, curve.mean, color=color, linewidth=1.2, label="mean")
        return
    axes.plot(
        step, finite(values), color=color, linewidth=1.3 if strong else 0.8, alpha=1 if strong else 0.4,
        marker="o" if len(step) <= 30 else "", markersize=3.5, label=label or None,
    )  # fmt: skip


def _draw_line(axes: Axes, step: FloatArray, values: FloatArray, color: str) -> None:
    """Draws a curve without noise as a line that covers the range of each bucket."""
    curve = envelope(step, values)
    axes.fill_between(curve.step, curve.low, curve.high, color=color, linewidth=1.5)
    axes.plot(curve.step, curve.mean, color=color, marker="o" if len(step) == 1 else "")


def _cut_outliers(axes: Axes, step: FloatArray, values: FloatArray, shown: FloatArray) -> None:
    """Limits an axis that outliers would flatten, and marks the values above the limit."""
    top = axis_top(shown)
    if top is None:
        return
    kept = shown[shown <= top]
    low = 0.0 if axes.get_ylim()[0] == 0 else float(kept.min() - 0.05 * (top - kept.min()))
    axes.set_ylim(low, top)
    above = step[np.isfinite(values) & (values > top)]
    largest = _short_count(float(np.nanmax(finite(values))))
    _mark_top(axes, above, f"above ({len(above):,}, up to {largest})", "^", MUTED)


def _mark_top(axes: Axes, step: FloatArray, label: str, marker: str = "X", color: str = RED) -> None:
    """Marks steps at the top edge of the axes."""
    if not len(step):
        return
    shown = step[:: -(-len(step) // 400)]
    axes.plot(
        shown, np.full(len(shown), 0.98), transform=axes.get_xaxis_transform(), linestyle="", marker=marker,
        markersize=5.5, markeredgewidth=0, color=color, label=label, clip_on=False,
    )  # fmt: skip


def _finish(figure: Figure, axes: Axes, history: RunHistory, y_label: str) -> Figure:
    """Marks restarts and training phases and labels the axes."""
    count_axis(axes)
    restarts = history.restarts
    for position, step in enumerate(restarts[-_MOST_RESTART_MARKS:]):
        axes.axvline(
            step, color=INK, linestyle=(0, (1, 2)), linewidth=1, zorder=1.5, alpha=1 if len(restarts) <= 8 else 0.4,
            label=f"restart ({len(restarts)})" if position == 0 else None,
        )  # fmt: skip
    for position, step in enumerate(history.phase_begins[1:]):
        axes.axvline(step, color=GREEN, linewidth=1, zorder=1.4, label="training phase" if position == 0 else None)
    close_panel(axes, "step", y_label)
    first, last = history.step[0], history.step[-1]
    if first == last:
        axes.set_xlim(first - 1, last + 1)
    return figure


def _short_count(value: float, _position: int | None = None) -> str:
    """Formats a count, for example 12.3k."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"
