"""Optuna samplers, which propose points from earlier results, and pruners, which evaluate validation curves.

The study is kept in memory and rebuilt from the records of the sweep, which are the only persistent state.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from megads.api import NumericalError
from megads.tools.sweep.config import (
    Assignment,
    Choice,
    Direction,
    Interval,
    PrunerName,
    PruningConfig,
    SamplerName,
    Space,
    SweepConfig,
)
from megads.tools.sweep.points import Point, PointState


class Study:
    """The points of one sweep as an Optuna study.

    Args:
        config: config of the sweep.
        space: search space.
        validation_steps: number of steps between validations; lower bound of the first rung for pruning by halving.
    """

    def __init__(self, config: SweepConfig, space: Space, validation_steps: int):
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._config = config
        self._space = space
        self._distributions = {key: _distribution(parameter) for key, parameter in space.items()}
        self._trials: dict[int, Trial] = {}
        self._worst = math.inf if config.direction is Direction.minimize else -math.inf
        self._study = optuna.create_study(
            direction=config.direction.value,
            pruner=make_pruner(config.pruning, validation_steps),
            sampler=optuna.samplers.RandomSampler(seed=config.seed),
        )

    def propose(self, number: int) -> Assignment:
        """The sampler's next proposal; it depends only on the history and `number`, also after a resume."""
        self._study.sampler = _make_sampler(self._config, number)
        trial = self._study.ask(self._distributions)
        assignment = {key: _text(parameter, trial.params[key]) for key, parameter in self._space.items()}
        # The trained values are rounded. The study gets the rounded values through `add_trial`, as after a restart.
        self._study.tell(trial, state=TrialState.FAIL)
        return assignment

    def add_trial(self, number: int, assignment: Assignment) -> None:
        """Adds a point that will be trained or was trained."""
        if number in self._trials:
            return
        self._study.enqueue_trial({key: _parameter(self._space[key], value) for key, value in assignment.items()})
        self._trials[number] = self._study.ask(self._distributions)

    def report(self, number: int, curve: Mapping[int, float]) -> bool:
        """Reports validation values of a point, by step; returns whether the pruner would stop it."""
        if not curve:
            return False
        trial, stop = self._trials[number], False
        known = self._study.trials[trial.number].intermediate_values
        for step, value in sorted(curve.items()):
            # The validations of a resumed point are read again.
            if step in known:
                continue
            # Optuna treats NaN as the best value if there is no other.
            trial.report(self._worst if math.isnan(value) else value, step)
            # Called at every step, because the pruner updates its rungs in this call.
            stop = bool(trial.should_prune()) or stop
        return stop

    def end(self, point: Point) -> None:
        """Records the outcome of a point; the sampler ignores points that will be restarted or could not run."""
        diverged = point.state is PointState.failed and point.exit_code == NumericalError.exit_code
        if point.state is PointState.finished and point.objective is not None:
            self._study.tell(self._trials.pop(point.number), point.objective)
        elif point.state in (PointState.finished, PointState.pruned) or diverged:
            self._study.tell(self._trials.pop(point.number), state=TrialState.PRUNED)
        else:
            self._study.tell(self._trials.pop(point.number), state=TrialState.FAIL)


def make_pruner(config: PruningConfig, validation_steps: int) -> BasePruner:
    """Creates the Optuna pruner of a config.

    median is the rule of Golovin et al. 2017 (Vizier); halving is the asynchronous rule of Li et al. 2020 (ASHA).
    """
    if config.name is PrunerName.median:
        return MedianPruner(n_startup_trials=config.startup_points, n_warmup_steps=config.from_step)
    if config.name is PrunerName.halving:
        first_rung = max(config.from_step, validation_steps, 1)
        return SuccessiveHalvingPruner(min_resource=first_rung, reduction_factor=config.factor)
    return NopPruner()


class NoiseAwareGPSampler(GPSampler):
    """Optuna's Gaussian process sampler with expected improvement for noisy objectives.

    Optuna 5 fits the noise of the objective but measures improvement from the best observed value, which includes
    noise. This sampler measures it from the best posterior mean at the observed points (the plug-in criterion of
    Picheny et al. 2013, "A benchmark of kriging-based infill criteria for noisy optimization"). It also counts points
    that were stopped early, with their last validation: Optuna ignores them and would propose the same region again.
    """

    def _sample_relative_impl(
        self,
        study: optuna.Study,
        completed_trials: list[FrozenTrial],
        running_trials: list[FrozenTrial],
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        stopped = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
        judged = [_as_completed(trial, completed_trials, study.direction.name) for trial in stopped]
        return super()._sample_relative_impl(study, [*completed_trials, *judged], running_trials, search_space)

    def _optimize_acqf(self, acqf: Any, best_params: Any) -> Any:
        assert self._gprs_cache_list is not None
        regressor = self._gprs_cache_list[0]
        # The sampler negates a minimized objective, so the maximum is the best.
        acqf._threshold = float(regressor.posterior(regressor._X_train)[0].max())
        return super()._optimize_acqf(acqf, best_params)


def _as_completed(trial: FrozenTrial, completed: Sequence[FrozenTrial], direction: str) -> FrozenTrial:
    """A pruned trial as completed with its last finite validation, or with the worst completed value."""
    reported = [value for _, value in sorted(trial.intermediate_values.items()) if math.isfinite(value)]
    ends = [ended.value for ended in completed if ended.value is not None]
    worst = max(ends) if direction == "MINIMIZE" else min(ends)
    return create_trial(
        value=reported[-1] if reported else worst, params=trial.params, distributions=trial.distributions
    )


def _make_sampler(config: SweepConfig, number: int) -> BaseSampler:
    # Each point has its own random stream, so that a resumed sweep does not repeat earlier draws.
    seed = random.Random(f"{config.seed} {number}").randrange(2**31)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        if config.sampler is SamplerName.tpe:
            return TPESampler(seed=seed, n_startup_trials=config.startup_trials, constant_liar=True)
        return NoiseAwareGPSampler(seed=seed, n_startup_trials=config.startup_trials, deterministic_objective=False)


def _distribution(parameter: Choice | Interval) -> BaseDistribution:
    if isinstance(parameter, Interval):
        if parameter.integer:
            return IntDistribution(math.ceil(parameter.low), math.floor(parameter.high), log=parameter.log)
        return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
    if parameter.numbers:
        # Numeric choices are ordered: encode each by its rank.
        return IntDistribution(0, len(parameter.values) - 1)
    return CategoricalDistribution(tuple(dict.fromkeys(parameter.values)))


def _text(parameter: Choice | Interval, value: Any) -> str:
    if isinstance(parameter, Interval):
        return parameter.text(value)
    return _ascending(parameter)[value] if parameter.numbers else str(value)


def _parameter(parameter: Choice | Interval, text: str) -> Any:
    if isinstance(parameter, Interval):
        return int(text) if parameter.integer else float(text)
    return _ascending(parameter).index(text) if parameter.numbers else text


def _ascending(parameter: Choice) -> list[str]:
    return sorted(parameter.values, key=float)
