"""Optuna's samplers and pruners as megads uses them."""

from __future__ import annotations

from typing import Any

import pytest
from optuna.samplers import GPSampler

from megads.tools.sweep.config import Interval, PrunerName, PruningConfig, SearchName, SweepConfig
from megads.tools.sweep.points import Point, PointState
from megads.tools.sweep.study import Study

SPACE = {"x": Interval(0, 1)}


def study_with(pruning: PruningConfig, curves: list[dict[int, float]]) -> Study:
    """A study of finished points with these validation curves, by step."""
    study = Study(SweepConfig(pruning=pruning), SPACE, validation_steps=10)
    for number, curve in enumerate(curves):
        study.add_trial(number, {"x": f"{number / 100}"})
        study.report(number, curve)
        study.end(Point(number, {}, state=PointState.finished, objective=curve[max(curve)]))
    study.add_trial(99, {"x": "0.99"})
    return study


FINISHED = [{10: 5.0 + place, 20: 4.0 + place, 30: 3.0 + place} for place in range(5)]


@pytest.mark.parametrize(
    ("pruning", "curve", "stopped"),
    [
        (PruningConfig(PrunerName.none), {10: 99.0, 20: 99.0}, False),
        (PruningConfig(PrunerName.median), {10: 6.9, 20: 5.9}, False),
        (PruningConfig(PrunerName.median), {10: 7.1}, True),
        (PruningConfig(PrunerName.median), {10: float("nan")}, True),
        # Bad at first and good since: the best so far counts.
        (PruningConfig(PrunerName.median, from_step=20), {10: 99.0, 20: 5.0}, False),
        (PruningConfig(PrunerName.median, from_step=20), {10: 99.0}, False),
        (PruningConfig(PrunerName.median, startup_points=6), {10: 99.0, 20: 99.0}, False),
        # Of these six points the best third passes the rung at step 10.
        (PruningConfig(PrunerName.halving, factor=3), {10: 5.5}, False),
        (PruningConfig(PrunerName.halving, factor=3), {10: 6.5}, True),
        (PruningConfig(PrunerName.halving, factor=3, from_step=20), {10: 99.0}, False),
        (PruningConfig(PrunerName.halving, factor=3, from_step=20), {10: 4.0, 20: 99.0}, True),
    ],
)
def test_whom_the_pruner_stops(pruning: PruningConfig, curve: dict[int, float], stopped: bool) -> None:
    """Catches a good point that is pruned, a bad one that is not, and one that is judged too early."""
    assert study_with(pruning, FINISHED).report(99, curve) is stopped


def test_a_repeated_report_changes_nothing() -> None:
    """Catches a resumed point that Optuna rejects because its validations are reported again."""
    study = study_with(PruningConfig(PrunerName.median), FINISHED)
    assert not study.report(99, {10: 5.0})
    assert not study.report(99, {10: 5.0, 20: 4.0})


def test_improvement_is_expected_over_the_truth_and_not_over_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Optuna's own threshold, the best noisy value, over which no improvement is expected."""
    thresholds: list[float] = []
    optimize = GPSampler._optimize_acqf

    def note(sampler: GPSampler, acqf: Any, best_params: Any) -> Any:
        thresholds.append(acqf._threshold)
        return optimize(sampler, acqf, best_params)

    monkeypatch.setattr(GPSampler, "_optimize_acqf", note)
    study = Study(SweepConfig(search=SearchName.bayes, trials=20, startup_trials=5), SPACE, 1)
    # Fourteen almost equal trainings that differ by noise, and a lucky one; `lucky` is in standard deviations.
    values = [1.0 + 0.1 * (-1) ** number for number in range(14)] + [0.0]
    for number, value in enumerate(values):
        study.add_trial(number, {"x": f"{0.5 + number / 1000}"})
        study.end(Point(number, {}, state=PointState.finished, objective=value))
    study.propose(15)
    lucky = (sum(values) / 15 - 0.0) / (sum((v - sum(values) / 15) ** 2 for v in values) / 15) ** 0.5
    assert len(thresholds) == 1
    assert thresholds[0] < lucky / 2


def test_the_gaussian_process_learns_from_points_that_were_stopped() -> None:
    """Catches a search that proposes the same bad region again because pruned points are ignored."""
    study = Study(SweepConfig(search=SearchName.bayes, trials=20, startup_trials=3), SPACE, 1)
    for number, place in enumerate((0.30, 0.35, 0.40)):
        study.add_trial(number, {"x": f"{place}"})
        study.end(Point(number, {}, state=PointState.finished, objective=1.0 - place))
    for number in range(3, 11):
        study.add_trial(number, {"x": f"{0.45 + 0.05 * number:.2f}"})
        study.report(number, {1: 9.0})
        study.end(Point(number, {}, state=PointState.pruned, objective=9.0))
    assert float(study.propose(11)["x"]) < 0.6
