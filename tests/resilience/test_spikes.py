"""Loss spikes: detected in curves with injected ones, not in healthy ones, and the same after a restart."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import SkipConfig
from megads.errors import ConfigError, NumericalError, RollBack
from megads.resilience.config import SpikeAction, SpikeConfig
from megads.resilience.hooks import SavedState, SpikeHook
from megads.resilience.rollbacks import RollbackRecord, pending_rollback, recorded_rollbacks, skips_with_rollbacks
from megads.resilience.spikes import Spike, SpikeDetector, StepLoss
from megads.runtime.distributed import ALONE
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE

CONFIG = SpikeConfig(window_steps=32, patience_steps=3)


def curve(steps: int, share: float = 0.01, seed: int = 0) -> list[StepLoss]:
    """A falling loss with heavy-tailed noise; ten samples per step."""
    draw, at = np.random.default_rng(seed), np.arange(1, steps + 1)
    losses = (2 + 8 * (1 + at / 20) ** -0.6) * (1 + share * draw.standard_t(3, steps))
    norms = np.exp(0.2 * draw.standard_normal(steps))
    return [StepLoss(int(n), 10 * int(n), float(x), float(g)) for n, x, g in zip(at, losses, norms, strict=True)]


def changed(steps: list[StepLoss], first: int, count: int, factor: float, norm: float = 1.0) -> list[StepLoss]:
    """The same curve with the losses and gradient norms of some steps multiplied."""
    within = range(first, first + count)
    return [StepLoss(s.step, s.samples, s.loss * factor, s.grad_norm * norm) if s.step in within else s for s in steps]


def found(steps: list[StepLoss], config: SpikeConfig = CONFIG) -> list[Spike]:
    detector = SpikeDetector(config)
    return [spike for step in steps if (spike := detector.observe(step)) is not None]


def test_a_healthy_curve_has_no_spikes() -> None:
    """Catches false alarms from a steep start or from heavy-tailed noise."""
    assert [spike for seed in range(5) for spike in found(curve(600, 0.02, seed), SpikeConfig())] == []


def test_a_planted_spike_is_found_once_after_the_patience() -> None:
    """Catches a spike that is missed, found late, reported at each of its steps, or reported with a wrong range."""
    (spike,) = found(changed(curve(200), 120, 20, 1.5))
    assert (spike.first_step, spike.step, spike.samples) == (120, 122, 1220)
    assert (spike.begin, spike.begin_samples) == (116, 1160)
    assert spike.loss > 1.3 * spike.median


def test_short_and_small_rises_are_no_spikes() -> None:
    """Catches a rollback after one bad batch, and a small rise of a curve with little noise reported as a spike."""
    assert found(changed(curve(200), 120, 2, 1.5)) == []
    assert found(changed(curve(200, share=0.0001), 120, 20, 1.015)) == []
    assert len(found(changed(curve(200, share=0.0001), 120, 20, 1.06))) == 1
    flat = [StepLoss(n, 10 * n, 3.0 + 0.0001 * (n % 7), 1.0) for n in range(1, 201)]
    assert found(changed(flat, 120, 20, 1.015)) == [] and len(found(changed(flat, 120, 20, 1.03))) == 1


def test_a_jump_with_its_gradient_norm_is_a_spike_at_once() -> None:
    """Catches a divergence that is reported only after the patience, and one batch with only a high loss reported."""
    jump = changed(curve(200), 120, 1, 6.0, norm=50.0)
    assert [spike.step for spike in found(jump)] == [120]
    assert found(changed(curve(200), 120, 1, 6.0)) == []


def test_the_gradient_norm_dates_the_spike() -> None:
    """Catches a rollback to a checkpoint between the gradient norm's explosion and the loss's."""
    (spike,) = found(changed(changed(curve(200), 118, 2, 1.0, norm=100.0), 120, 20, 1.5))
    assert spike.first_step == 118 and spike.begin == 114


def test_steps_that_are_not_finite_are_passed_over() -> None:
    """Catches a NaN that turns every median into NaN."""
    steps = changed(curve(200), 120, 20, 1.5)
    nan = [StepLoss(s.step, s.samples, math.nan, math.inf) if s.step in (60, 100, 121) else s for s in steps]
    assert [spike.step for spike in found(nan)] == [123]


@pytest.mark.parametrize("cut", [60, 118, 120, 121, 122, 123, 130, 150])
def test_a_restart_finds_the_same(cut: int) -> None:
    """Catches a decision that depends on steps before those that a restart reads, or that is made twice."""
    steps = changed(changed(curve(200), 118, 2, 1.0, norm=100.0), 120, 40, 1.5)
    whole = found(steps)
    detector = SpikeDetector(CONFIG)
    last = detector.replay(steps[max(0, cut - detector.memory_steps) : cut])
    later = [spike for step in steps[cut:] if (spike := detector.observe(step)) is not None]
    assert later == [spike for spike in whole if spike.step > cut]
    assert [last] * (last is not None) == [spike for spike in whole if spike.step == cut]


def info(step: StepLoss, **changes: bool) -> StepInfo:
    return StepInfo(
        step=step.step, samples=step.samples, tokens=0, loss=step.loss, grad_norm=step.grad_norm, lr=0.1,
        global_batch_size=10, seq_len=1, step_time_s=0.1, data_time_s=0.0, batch_hash="", culprit="",
        skipped=changes.get("skipped", False), last=changes.get("last", False),
    )  # fmt: skip


def hook(run_dir: Path, action: SpikeAction, saved: SavedState | None = None, most: int = 5) -> SpikeHook:
    config = SpikeConfig(action, window_steps=32, max_rollbacks=most)
    made = SpikeHook(run_dir, config, EventWriter(run_dir), ALONE, 0, lambda _step: saved)
    made.on_start(TrainState())
    return made


def test_a_warning_is_an_event_and_training_goes_on(tmp_path: Path) -> None:
    """Catches a rollback that was not requested, and skipped steps that count."""
    watch = hook(tmp_path, SpikeAction.warn, SavedState(100, "step_00000100", "d"))
    for step in changed(curve(200), 120, 20, 1.5):
        watch.on_step(info(step))
        watch.on_step(info(StepLoss(step.step, step.samples, 99.0, 1.0), skipped=True))
    (event,) = read_json_lines(tmp_path / EVENTS_FILE)
    assert (event["event"], event["first_step"], event["step"]) == ("loss_spike", 120, 122)


def test_a_rollback_is_recorded_before_the_ranks_end(tmp_path: Path) -> None:
    """Catches a decision that cannot be replayed, rollbacks beyond the limit, and a run that ends because it has no
    checkpoint to roll back to."""
    steps = changed(curve(200), 120, 20, 1.5)
    for saved in (None, SavedState(110, "step_00000110", "d")):
        watch = hook(tmp_path, SpikeAction.roll_back, saved, most=1)
        for step in steps[:121]:
            watch.on_step(info(step))
        if saved is None:
            watch.on_step(info(steps[121]))
            continue
        with pytest.raises(RollBack):
            watch.on_step(info(steps[121]))
    (record,) = recorded_rollbacks(tmp_path)
    assert record == RollbackRecord(110, "d", (1160, 1220), 0) == pending_rollback(tmp_path)
    watch = hook(tmp_path, SpikeAction.roll_back, SavedState(110, "step_00000110", "d"), most=1)
    with pytest.raises(NumericalError, match=r"rolled back 1 times \(resilience.spikes.max_rollbacks = 1\)") as caught:
        for step in steps:
            watch.on_step(info(step))
    assert not isinstance(caught.value, RollBack)
    EventWriter(tmp_path).write("start")
    assert pending_rollback(tmp_path) is None


def test_the_last_step_saves_and_leaves_the_rollback_to_the_next_start(tmp_path: Path) -> None:
    """Catches a preempted run that ends without its checkpoint, or whose next start trains through the spike."""
    steps, saved = changed(curve(200), 120, 20, 1.5), SavedState(110, "step_00000110", "d")
    watch = hook(tmp_path, SpikeAction.roll_back, saved)
    ledger = EventWriter(tmp_path / "ledger")
    for step in steps[:122]:
        watch.on_step(info(step, last=step.step == 122))
        ledger.write_line({"step": step.step, "samples": step.samples, "loss": step.loss, "grad_norm": step.grad_norm})
    (tmp_path / "ledger" / EVENTS_FILE).rename(tmp_path / "metrics.jsonl")
    assert recorded_rollbacks(tmp_path) == []
    again = SpikeHook(
        tmp_path, SpikeConfig(SpikeAction.roll_back, window_steps=32), EventWriter(tmp_path), ALONE, 0, lambda _: saved
    )
    with pytest.raises(RollBack):
        again.on_start(TrainState(122, 1220, 0))


def test_skips_follow_from_the_record() -> None:
    """Catches a rollback applied to a fresh start in the same folder, one that is lost once a checkpoint includes it,
    and an order that changes how later entries count."""
    one, two = RollbackRecord(30, "c30", (444, 516), 1), RollbackRecord(60, "c60", (700, 760), 2)
    user, later = SkipConfig(steps=[5, 6]), SkipConfig(samples=[900, 950])
    rolled = skips_with_rollbacks([user], [one], [user], "c30")
    assert rolled == [user, one.entry]
    assert skips_with_rollbacks([user], [one, two], rolled, "c60") == [user, one.entry, two.entry]
    assert skips_with_rollbacks([user, later], [one], rolled, "c40") == [user, one.entry, later]
    assert skips_with_rollbacks([user], [one, two], [user], "another life") == [user]


@pytest.mark.parametrize(
    "config", [SpikeConfig(threshold=0.5), SpikeConfig(window_steps=4), SpikeConfig(patience_steps=80)]
)
def test_settings_by_which_nothing_is_a_spike_are_refused(config: SpikeConfig) -> None:
    """Catches accepted settings that break detection, such as a window that the spike itself fills."""
    with pytest.raises(ConfigError, match=r"resilience\.spikes\."):
        config.check()
