"""Metrics and events about experts: lines by layer, idle experts once each, and what a resume remembers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megads.model.moe_config import MoEConfig, Overflow
from megads.monitor.console import is_by_layer, render_event, render_step
from megads.monitor.experts import ExpertsHook
from megads.monitor.hooks import MetricsHook
from megads.runtime.hooks import ExpertStatistics, StepInfo, TrainState
from megads.runtime.metrics import EventWriter, MetricsWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE

MOE = MoEConfig(num_experts=4, top_k=1, global_loss=0.01)
EVEN = (4.0, 4.0, 4.0, 4.0)
STARVED = (8.0, 0.0, 8.0, 0.0)
"""Experts 1 and 3 get nothing."""


def info(step: int, *layers: Sequence[float], skipped: bool = False) -> StepInfo:
    """A step with experts in the layers 2, 4, ..., of which each counts are given."""
    rows = [[*counts, 0.16, 0.08, 16.0] for counts in layers]
    experts = ExpertStatistics.from_sums([2 * number + 2 for number in range(len(layers))], 1, rows)
    return StepInfo(
        step=step, samples=8 * step, tokens=16 * step, loss=2.5, grad_norm=1.0, lr=1e-3, global_batch_size=8,
        seq_len=2, step_time_s=0.5, data_time_s=0.1, skipped=skipped, culprit="", batch_hash="", experts=experts,
    )  # fmt: skip


def hook_of(
    folder: Path, moe: MoEConfig = MOE, every_steps: int | None = None, step: int = 0, idle_steps: int = 3
) -> ExpertsHook:
    hook = ExpertsHook(moe, MetricsWriter(folder, True), EventWriter(folder, True), every_steps, idle_steps)
    hook.on_start(TrainState(step=step))
    return hook


def events(folder: Path) -> list[tuple[str, int, int, list[int]]]:
    lines = [line for line in read_json_lines(folder / EVENTS_FILE) if line["event"] != "experts_idle_steps"]
    return [(line["event"], line["step"], line["layer"], line["experts"]) for line in lines]


def test_an_idle_expert_is_reported_once_until_it_recovers(tmp_path: Path) -> None:
    """Catches a warning in every step, one for steps without tokens that are not consecutive, an expert that is never
    reported again after it recovered, and experts of two layers that are confused."""
    hook = hook_of(tmp_path)
    for step in (1, 2):
        hook.on_step(info(step, EVEN, STARVED))
    hook.on_step(info(3, EVEN, (8.0, 1.0, 7.0, 0.0)))
    for step in (4, 5, 6, 7):
        hook.on_step(info(step, EVEN, STARVED))
    assert events(tmp_path) == [("experts_idle", 3, 4, [3]), ("experts_idle", 6, 4, [1])]
    hook.on_step(info(8, EVEN, EVEN))
    for step in (9, 10, 11, 12):
        hook.on_step(info(step, STARVED, EVEN))
    assert events(tmp_path)[2:] == [("experts_active", 8, 4, [1, 3]), ("experts_idle", 11, 2, [1, 3])]


def test_a_resumed_run_reports_no_expert_twice(tmp_path: Path) -> None:
    """Catches a second warning about an expert that has been idle since before the resume, and none about one that has
    recovered in an earlier start and is idle again."""
    hook = hook_of(tmp_path)
    for step in (1, 2, 3):
        hook.on_step(info(step, STARVED))
    hook.on_step(info(4, (8.0, 0.0, 7.0, 1.0)))
    resumed = hook_of(tmp_path)
    for step in (5, 6, 7, 8):
        resumed.on_step(info(step, STARVED))
    assert events(tmp_path) == [
        ("experts_idle", 3, 2, [1, 3]),
        ("experts_active", 4, 2, [3]),
        ("experts_idle", 7, 2, [3]),
    ]


@pytest.mark.parametrize(
    ("ended", "resumed_at", "reported_at"), [(20, 20, 100), (27, 20, 100), (25, 25, 100), (27, 24, 124)]
)
def test_a_resumed_run_counts_on(tmp_path: Path, ended: int, resumed_at: int, reported_at: int) -> None:
    """Catches counts that start anew at every resume, so that a run with short jobs never reports an idle expert, and
    counts of steps after the checkpoint that is resumed from."""
    hook = hook_of(tmp_path, idle_steps=100)
    for step in range(1, ended + 1):
        hook.on_step(info(step, STARVED))
    if ended == resumed_at:  # stopped, not killed
        hook.on_end(TrainState(step=ended))
    resumed = hook_of(tmp_path, step=resumed_at, idle_steps=100)
    for step in range(resumed_at + 1, reported_at + 1):
        assert events(tmp_path) == []
        resumed.on_step(info(step, STARVED))
    assert events(tmp_path) == [("experts_idle", reported_at, 2, [1, 3])]


def overflowing(step: int, needed: float, dropped: float = 0.0) -> StepInfo:
    """A step in which expert 2 of layer 4 needed a capacity factor."""
    given = info(step, EVEN, EVEN)
    assert given.experts is not None
    capacity = {"capacity_needed": (1.0, needed), "fullest": (0, 2), "dropped": (0.0, dropped)}
    return replace(given, experts=replace(given.experts, **capacity, recomputed=not dropped and needed > 1.5))


@pytest.mark.parametrize(("overflow", "dropped"), [(Overflow.recompute, 0.0), (Overflow.drop, 3.0)])
def test_an_overflow_is_reported_where_it_grows(tmp_path: Path, overflow: Overflow, dropped: float) -> None:
    """Catches an overflow that nobody notices, one event for each of many steps, and one without the factor to set."""
    moe = replace(MOE, capacity_factor=1.5, overflow=overflow)
    hook = hook_of(tmp_path, moe)
    for step, needed in ((1, 1.2), (2, 2.0), (3, 2.1), (4, 1.9)):
        hook.on_step(overflowing(step, needed, dropped * (needed > 1.5)))
    hook_of(tmp_path, moe, step=4).on_step(overflowing(5, 2.1, dropped))
    hook_of(tmp_path, moe, step=5).on_step(overflowing(6, 3.0, dropped))
    found = list(read_json_lines(tmp_path / EVENTS_FILE))
    assert [(e["event"], e["step"], e["layer"], e["expert"]) for e in found] == [
        ("experts_overflow", 2, 4, 2),
        ("experts_overflow", 6, 4, 2),
    ]
    line = render_event(found[0])
    assert "expert 2 got 2.00 times the mean rows" in line and "above model.moe.capacity_factor = 1.5" in line
    assert ("3 rows were dropped" if dropped else "the step was computed again") in line


def test_steps_of_experts_with_a_capacity_say_what_they_needed(tmp_path: Path) -> None:
    """Catches metrics from which no capacity factor can be chosen."""
    steps = MetricsHook(MetricsWriter(tmp_path, True), flops_per_token=1.0, world_size=1, peak_tflops=1.0)
    steps.on_step(overflowing(1, 2.0))
    (line,) = read_json_lines(tmp_path / METRICS_FILE)
    names = ("moe/capacity_needed", "moe/recomputed", "moe/dropped_rows")
    assert [line[name] for name in names] == [2.0, 1, 0.0]


def test_skipped_steps_do_not_count_as_idle(tmp_path: Path) -> None:
    """Catches a warning from the routing of non-finite scores."""
    hook = hook_of(tmp_path)
    for step in (1, 2, 3, 4):
        hook.on_step(info(step, STARVED, skipped=True))
    assert events(tmp_path) == []


@pytest.mark.parametrize(
    ("moe", "remedy"),
    [
        (MOE, "Raise model.moe.global_loss (0.01), or lower optim.lr"),
        (replace(MOE, bias_rate=0.001, global_loss=0.0), "Raise model.moe.bias_rate (0.001), or lower optim.lr"),
        (replace(MOE, global_loss=0.0), "The model has no balance: set model.moe.global_loss"),
    ],
)
def test_the_warning_names_layer_expert_and_remedy(tmp_path: Path, moe: MoEConfig, remedy: str) -> None:
    """Catches a warning that leaves out which expert it is about, or advises a balance that the model does not use."""
    hook = hook_of(tmp_path, moe)
    for step in (1, 2, 3):
        hook.on_step(info(step, (4.0, 4.0, 8.0, 0.0)))
    [event] = [line for line in read_json_lines(tmp_path / EVENTS_FILE) if line["event"] == "experts_idle"]
    line = render_event(event)
    assert event["level"] == "warning"
    assert line.startswith("experts idle: layer blocks.2: expert 3 got no token in 3 steps, up to step 3. ")
    assert remedy in line


def test_metrics_have_the_experts_of_a_step_and_of_its_layers(tmp_path: Path) -> None:
    """Catches keys missing from the step line, a language loss with the balance loss in it, lines by layer in steps
    between, and such a line on the console."""
    hook = hook_of(tmp_path, every_steps=2)
    steps = MetricsHook(MetricsWriter(tmp_path, True), flops_per_token=1.0, world_size=1, peak_tflops=1.0)
    for step in (1, 2):
        steps.on_step(info(step, EVEN, STARVED))
        hook.on_step(info(step, EVEN, STARVED))
    first, second, layers = read_json_lines(tmp_path / METRICS_FILE)
    assert {key: first[key] for key in first if key.startswith("moe/")} == {
        "moe/max_load": 2.0,
        "moe/dead_experts": 2,
        "moe/router_entropy": 1.0,
        "moe/balance_loss": pytest.approx(0.02),
        "moe/z_loss": pytest.approx(0.01),
    }
    assert first["loss"] == 2.5
    assert "| load 2.00 | dead experts 2 |" in render_step(second, None, None)
    assert layers == {
        "step": 2,
        "samples": 16,
        "tokens": 32,
        "layers/blocks.2/max_load": 1.0,
        "layers/blocks.2/dead_experts": 0,
        "layers/blocks.2/router_entropy": 1.0,
        "layers/blocks.4/max_load": 2.0,
        "layers/blocks.4/dead_experts": 2,
        "layers/blocks.4/router_entropy": 1.0,
    }
    assert is_by_layer(layers) and not is_by_layer(second)
