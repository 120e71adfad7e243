"""Every chart is drawn from any recorded run, without a warning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.runtime.run_dir import CONFIG_FILE
from megads.tools.report.charts import (
    axis_top,
    draw_dead_experts,
    draw_grad_norm,
    draw_learning_rate,
    draw_loss,
    draw_memory,
    draw_step_time,
    draw_throughput,
    envelope,
    run_charts,
    smooth,
    smoothing_width,
)
from megads.tools.report.history import ExpertLoads, read_history
from megads.tools.report.style import house_style, png, svg
from tests.tools.report.written_runs import (
    BEGIN,
    write_config,
    write_eventful_run,
    write_experts,
    write_start,
    write_steps,
    write_validation,
)

# A ResourceWarning may come from an earlier test's objects, collected while a chart is drawn.
WARNINGS_ARE_ERRORS = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")


def test_a_short_curve_is_drawn_as_it_is() -> None:
    """Catches averages where every step can be drawn."""
    step, values = np.arange(1.0, 6.0), np.array([3.0, np.nan, np.inf, 1.0, 2.0])
    curve = envelope(step, values)
    assert curve.steps_per_point == 1
    np.testing.assert_array_equal(curve.step, step)
    np.testing.assert_array_equal(curve.mean, [3, np.nan, np.nan, 1, 2])


def test_an_envelope_keeps_the_extremes_of_100_000_steps() -> None:
    """Catches downsampling by taking every hundredth step, which loses a spike of one step."""
    step = np.arange(100_000.0)
    values = np.sin(step)
    values[77_777], values[33_333], values[50_000:50_300] = 50.0, -50.0, np.nan
    curve = envelope(step, values)
    assert len(curve.step) == 1000 and curve.steps_per_point == 100
    assert (np.nanmax(curve.high), np.nanmin(curve.low)) == (50.0, -50.0)
    assert np.isnan(curve.mean[500:503]).all() and np.isfinite(curve.mean[503])
    assert np.nanmean(curve.mean) == pytest.approx(np.nanmean(values), abs=1e-6)


def test_the_last_bucket_may_be_smaller() -> None:
    """Catches a mean divided by a full bucket's length."""
    curve = envelope(np.arange(1001.0), np.full(1001, 2.0), most_points=500)
    assert curve.steps_per_point == 3
    np.testing.assert_allclose(curve.mean, 2.0)
    assert curve.step[-1] == 999.5


def test_smoothing_keeps_a_line_a_line() -> None:
    """Catches windows truncated on one side only, which bend the ends of a falling loss."""
    line = np.linspace(9, 3, 50)
    np.testing.assert_allclose(smooth(line, 11), line)


def test_smoothing_averages_what_is_finite() -> None:
    """Catches a NaN that spreads over its window."""
    values = np.array([1.0, np.nan, 3.0, np.inf, 5.0])
    np.testing.assert_allclose(smooth(values, 3), [1, 2, 3, 4, 5])
    assert np.isnan(smooth(np.full(5, np.nan), 3)).all()


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (9, 1), (10, 3), (400, 11), (100_000, 2501)])
def test_smoothing_width(steps: int, width: int) -> None:
    """Catches an even width, which shifts the curve by half a step."""
    assert smoothing_width(steps) == width


def test_only_outliers_are_cut() -> None:
    """Catches an axis that cuts off the start of a training, and one that a spike stretches."""
    loss = 4 + 6 * np.exp(-np.arange(300) / 30)
    assert axis_top(loss) is None
    spiked = loss.copy()
    spiked[200] = 900.0
    top = axis_top(spiked)
    assert top is not None and loss.max() < top < 20
    for few in (2, 10, 50):
        assert axis_top(np.array([1.0] * (few - 1) + [1000.0])) is None, "one of so few is no outlier"
    assert axis_top(np.full(100, np.nan)) is None


def assert_takes_colors_from_the_page(text: str) -> None:
    """Otherwise a chart is unreadable on a dark page."""
    assert "var(--chart-ink)" in text
    assert "#" not in text.replace('xlink:href="#', "").replace("url(#", "")


def one_step(run_dir: Path) -> None:
    write_start(run_dir, 0, BEGIN)
    write_steps(run_dir, 1, 1)


def nothing_finite(run_dir: Path) -> None:
    write_start(run_dir, 0, BEGIN)
    write_steps(run_dir, 1, 12, loss=lambda step: math.nan, skipped=range(1, 13))
    write_validation(run_dir, 12, math.nan, unigram_loss=math.nan)


def many_restarts(run_dir: Path) -> None:
    for start in range(60):
        write_start(run_dir, 5 * start, BEGIN + 10 * start)
        write_steps(run_dir, 5 * start + 1, 5 * start + 5, step_time_s=lambda step: 60.0 if step % 5 == 1 else 0.3)


def bare_lines(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n')


def zero_speed(run_dir: Path) -> None:
    keys = '"lr": 0.0, "grad_norm": 0.0, "tokens_per_s": 0.0, "mfu": 0.0, "step_time_s": 0.0, "data_time_s": 0.0'
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 0.0, {keys}}}\n' for step in range(20)))


@WARNINGS_ARE_ERRORS
@pytest.mark.parametrize("write", [write_eventful_run, one_step, nothing_finite, many_restarts, bare_lines, zero_speed])
def test_every_chart_draws(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """Catches a division by zero, an empty percentile, a legend that leaves no room, and equal axis limits."""
    write(tmp_path)
    history = read_history(tmp_path)
    with house_style():
        for chart in run_charts(history):
            for wide in {chart.wide, False}:
                figure = chart.draw(wide)
                if figure is not None:
                    assert_takes_colors_from_the_page(svg(figure, chart.name, "", chart.description))


@WARNINGS_ARE_ERRORS
def test_100_000_steps_make_a_small_picture(tmp_path: Path) -> None:
    """Catches a page of many megabytes, and a spike or skipped steps lost by downsampling."""
    write_start(tmp_path, 0, BEGIN)
    lines = (
        f'{{"step": {step}, "loss": {5000 if step == 60_001 else 3 + step % 7 / 10}, "grad_norm": 1.0, '
        f'"lr": 1e-3, "tokens_per_s": {1e4 + step % 13}, "skipped": {"true" if step % 1000 == 0 else "false"}}}\n'
        for step in range(1, 100_001)
    )
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    history = read_history(tmp_path)
    with house_style():
        for draw, expected in (
            (draw_loss, "above (1, up to 5k)"),
            (draw_grad_norm, "skipped (100)"),
            (draw_throughput, "range of 100 steps"),
        ):
            figure = draw(history, False)
            assert figure is not None
            text = svg(figure, "chart", "", "")
            assert expected in text
            assert len(text) < 300_000


def test_the_house_style_does_not_leak(tmp_path: Path) -> None:
    """Catches a report that changes the style of later figures in the process, or depends on earlier ones."""
    import matplotlib

    write_eventful_run(tmp_path)
    before = dict(matplotlib.rcParams)
    with house_style():
        figure = draw_loss(read_history(tmp_path), wide=True)
        assert figure is not None
        first = svg(figure, "loss", "", "")
    assert dict(matplotlib.rcParams) == before
    with house_style():
        again = draw_loss(read_history(tmp_path), wide=True)
        assert again is not None
        assert svg(again, "loss", "", "") == first, "the same run gives the same picture"
        assert png(again).startswith(b"\x89PNG")


def axes_of(run_dir: Path, draw: Callable[..., Figure | None]) -> Axes:
    with house_style():
        figure = draw(read_history(run_dir))
    assert figure is not None
    return figure.axes[0]


def lines_of(axes: Axes) -> dict[str, list[float]]:
    """Heights of every line, by label."""
    return {
        str(line.get_label()): [round(float(y), 6) for y in np.atleast_1d(np.asarray(line.get_ydata(), float))]
        for line in axes.lines
    }


def write_records(run_dir: Path, clip: float, **columns: list[float]) -> None:
    """Writes records of steps from 1; gradient norms are clipped at `clip`."""
    config = RootConfig()
    config.optim.clip_grad = clip
    freeze(config, run_dir / CONFIG_FILE)
    records = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    lines = [json.dumps({"step": step, "loss": 3.0} | record) for step, record in enumerate(records, 1)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_norm_s_axis_and_clip(tmp_path: Path) -> None:
    """Catches a curve that leaves its axis, a clipping line far above it or missing, and one spike flattening the
    rest."""
    for clip, drawn in ((2.0, True), (6.5, False), (0.0, False)):
        write_records(tmp_path, clip, grad_norm=[1.0, 2.0, 0.0, 1.5])
        axes = axes_of(tmp_path, draw_grad_norm)
        assert axes.get_ylim() == (0, pytest.approx(1.08 * 2))
        assert (f"clipped at {clip:g}" in lines_of(axes)) is drawn
        assert lines_of(axes)["norm"] == [1, 2, 0, 1.5]
    write_records(tmp_path, 1.0, grad_norm=[1.0, 1.0, 1.0, 31.0])
    assert axes_of(tmp_path, draw_grad_norm).get_yscale() == "log"
    write_records(tmp_path, 1.0, grad_norm=[1.0, 1.0, 1.0, 30.0])
    assert axes_of(tmp_path, draw_grad_norm).get_yscale() == "linear"
    write_records(tmp_path, 1.0, grad_norm=[0.0, 0.0])
    assert axes_of(tmp_path, draw_grad_norm).get_ylim() == (0, 1)


def test_the_learning_rate_is_in_powers_of_ten(tmp_path: Path) -> None:
    """Catches a label with another power of ten than the curve's, and a curve that leaves its axis."""
    write_records(tmp_path, 1.0, lr=[0.0, 1e-4, 3e-4])
    axes = axes_of(tmp_path, draw_learning_rate)
    assert list(lines_of(axes).values()) == [[0, 1, 3]]
    assert axes.get_ylabel() == "learning rate, 1e-4" and axes.get_ylim() == (0, pytest.approx(1.08 * 3))
    write_records(tmp_path, 1.0, lr=[2.0, 1.0])
    axes = axes_of(tmp_path, draw_learning_rate)
    assert axes.get_ylabel() == "learning rate" and list(lines_of(axes).values()) == [[2, 1]]
    write_records(tmp_path, 1.0, lr=[0.0])
    assert axes_of(tmp_path, draw_learning_rate).get_ylim() == (0, 1)


def test_throughput_and_its_share_of_the_peak(tmp_path: Path) -> None:
    """Catches an MFU axis that does not match the throughput axis, or that is drawn although the FLOPs per token
    changed, and a wrong median."""
    write_records(tmp_path, 1.0, tokens_per_s=[1000.0, 3000.0, 2500.0], mfu=[0.1, 0.3, 0.25])
    axes = axes_of(tmp_path, draw_throughput)
    assert axes.get_ylim() == (0, pytest.approx(1.08 * 3000))
    assert lines_of(axes)["median"] == [2500, 2500]
    [right] = axes.child_axes
    figure = axes.get_figure(root=True)
    assert figure is not None and png(figure), "the second axis follows when the chart is drawn"
    assert right.get_ylabel() == "MFU, % of peak" and right.get_ylim() == (0, pytest.approx(1.08 * 30))
    write_records(tmp_path, 1.0, tokens_per_s=[1000.0, 3000.0], mfu=[0.1, 0.31])
    assert not axes_of(tmp_path, draw_throughput).child_axes


def test_a_step_s_time_is_stacked(tmp_path: Path) -> None:
    """Catches data time added to the step time instead of contained in it, its share, and a wrong unit."""
    write_records(tmp_path, 1.0, step_time_s=[0.5, 0.3], data_time_s=[0.1, 0.1])
    axes = axes_of(tmp_path, draw_step_time)
    rest, waiting = (area.get_paths()[0].vertices[:, 1] for area in axes.collections)
    assert (rest.min(), rest.max(), waiting.min(), waiting.max()) == (100, 500, 0, 100)
    assert [area.get_label() for area in axes.collections] == ["compute and communication", "waiting for data (25%)"]
    assert axes.get_ylabel() == "ms" and axes.get_ylim()[0] == 0
    write_records(tmp_path, 1.0, step_time_s=[1.5], data_time_s=[0.5])
    axes = axes_of(tmp_path, draw_step_time)
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [(0.5, 1.0), (0, 0.5)]
    assert axes.get_ylabel() == "s" and axes.get_xlim() == (0, 2)


@pytest.mark.parametrize(("largest", "unit", "height"), [(2**30, "GiB", 1), (2**30 - 2**20, "MiB", 1023)])
def test_memory_in_the_unit_that_fits(tmp_path: Path, largest: int, unit: str, height: float) -> None:
    """Catches a curve in another unit than its label, and one that touches the top of its axis."""
    write_records(tmp_path, 1.0, peak_memory_bytes=[2.0**29, float(largest)])
    axes = axes_of(tmp_path, draw_memory)
    assert axes.get_ylabel() == unit and axes.get_ylim() == (0, pytest.approx(1.12 * height))
    [curve] = lines_of(axes).values()
    assert curve[-1] == height


def test_outliers_are_counted_above_the_axis(tmp_path: Path) -> None:
    """Catches a cut axis that starts at the outlier, or does not say how many steps it hides and how high they are."""
    loss = [3.0 + step / 100 for step in range(99)] + [700.0]
    write_records(tmp_path, 1.0, loss=loss)
    axes = axes_of(tmp_path, draw_loss)
    low, top = axes.get_ylim()
    assert 3.98 < top < 20 and low == pytest.approx(3.0 - 0.05 * (top - 3.0))
    assert "above (1, up to 700)" in lines_of(axes)


@WARNINGS_ARE_ERRORS
def test_the_load_of_experts_is_drawn_by_layer(tmp_path: Path) -> None:
    """Catches rows labelled by their place in place of the layer, a chart of experts for a dense model, and a chart of
    dead experts without any."""
    write_config(tmp_path / "dense", "dense")
    write_steps(tmp_path / "dense", 1, 20)
    dense, drawn = read_history(tmp_path / "dense"), ("expert_load", "dead_experts", "balance_loss", "router_entropy")
    write_config(tmp_path / "experts", "experts")
    write_experts(tmp_path / "experts", 1, 80)
    history = read_history(tmp_path / "experts")
    with house_style():
        assert all(chart.draw(chart.wide) is None for chart in run_charts(dense) if chart.name in drawn)
        figures = {chart.name: chart.draw(chart.wide) for chart in run_charts(history) if chart.name in drawn}
        assert all(figures.values())
        load = figures["expert_load"]
        assert load is not None
        png(load)
        labels = [label.get_text() for label in load.axes[0].get_yticklabels()]
        [cells] = [np.asarray(image.get_array()) for image in load.axes[0].get_images()]
    assert cells[:, 0].tolist() == [1.25, 4.0] and cells[:, -1].tolist() == [1.25, 1.5]
    assert [label for label in labels if label] == ["1", "3"]
    even = ExpertLoads((0,), np.array([10.0]), np.array([[1.0]]), np.array([[0.0]]))
    with house_style():
        assert draw_dead_experts(replace(history, loads=even)) is None
