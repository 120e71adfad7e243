"""Optuna's part: samplers that propose points from those before, and pruners that judge validation curves.

The study lives in memory and is filled again from the sweep's own records, so that there is one truth on disk.
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

from megads.errors import NumericalError
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
    """All that is known of the points of one sweep, as Optuna sees them.

    Args:
        config: the sweep's.
        space: what is searched.
        validation_steps: steps between validations; the first rung of pruning by halving.
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
        """The point that the sampler wants next; the same for the same history and number, resumed or not."""
        self._study.sampler = _make_sampler(self._config, number)
        trial = self._study.ask(self._distributions)
        assignment = {key: _text(parameter, trial.params[key]) for key, parameter in self._space.items()}
        # What is trained has fewer digits; the study must know of that, as it would after a restart.
        self._study.tell(trial, state=TrialState.FAIL)
        return assignment

    def adopt(self, number: int, assignment: Assignment) -> None:
        """Takes a point that is going to be trained, or was."""
        if number in self._trials:
            return
        self._study.enqueue_trial({key: _parameter(self._space[key], value) for key, value in assignment.items()})
        self._trials[number] = self._study.ask(self._distributions)

    def report(self, number: int, curve: Mapping[int, float]) -> bool:
        """Notes validations of a point, by step; tells whether one of them is bad enough to stop it."""
        if not curve:
            return False
        trial, stop = self._trials[number], False
        known = self._study.trials[trial.number].intermediate_values
        for step, value in sorted(curve.items()):
            # A resumed point's validations are read again.
            if step in known:
                continue
            # Optuna takes a value that is none for the best so far where there is no other.
            trial.report(self._worst if math.isnan(value) else value, step)
            # Asked at every step: the pruner keeps its rungs by being asked.
            stop = bool(trial.should_prune()) or stop
        return stop

    def end(self, point: Point) -> None:
        """Notes how a point ended; one that will be started again, or could not run, teaches nothing."""
        diverged = point.state is PointState.failed and point.exit_code == NumericalError.exit_code
        if point.state is PointState.finished and point.objective is not None:
            self._study.tell(self._trials.pop(point.number), point.objective)
        elif point.state in (PointState.finished, PointState.pruned) or diverged:
            self._study.tell(self._trials.pop(point.number), state=TrialState.PRUNED)
        else:
            self.forget(point.number)

    def forget(self, number: int) -> None:
        """Gives up a point."""
        self._study.tell(self._trials.pop(number), state=TrialState.FAIL)


def make_pruner(config: PruningConfig, validation_steps: int) -> BasePruner:
    """Optuna's pruner for a config.

    median is the rule of Golovin et al. 2017 (Vizier); halving that of Li et al. 2020 (ASHA), which waits for nobody.
    """
    if config.name is PrunerName.median:
        return MedianPruner(n_startup_trials=config.startup_points, n_warmup_steps=config.from_step)
    if config.name is PrunerName.halving:
        first_rung = max(config.from_step, validation_steps, 1)
        return SuccessiveHalvingPruner(min_resource=first_rung, reduction_factor=config.factor)
    return NopPruner()


class NoiseAwareGPSampler(GPSampler):
    """Optuna's Gaussian process with an improvement that is expected over what is true, not over what was lucky.

    Optuna 5 fits the noise of the objective but measures improvement from the best value observed, noise included. Here
    it is measured from the best posterior mean at the points observed (the plug-in of Picheny et al. 2013, "A benchmark
    of kriging-based infill criteria for noisy optimization"). And points that were stopped early count with their last
    validation: Optuna leaves them out, and would propose the same bad region again.
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
        # The sampler fits with the sign turned, so that the greatest is the best.
        acqf._threshold = float(regressor.posterior(regressor._X_train)[0].max())
        return super()._optimize_acqf(acqf, best_params)


def _as_completed(trial: FrozenTrial, completed: Sequence[FrozenTrial], direction: str) -> FrozenTrial:
    """A stopped point as if its last validation were its end; the worst end of all where it has no finite one."""
    reported = [value for _, value in sorted(trial.intermediate_values.items()) if math.isfinite(value)]
    ends = [ended.value for ended in completed if ended.value is not None]
    worst = max(ends) if direction == "MINIMIZE" else min(ends)
    return create_trial(
        value=reported[-1] if reported else worst, params=trial.params, distributions=trial.distributions
    )


def _make_sampler(config: SweepConfig, number: int) -> BaseSampler:
    # A stream of its own for each point: a sweep that goes on must not draw again what it drew first.
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
        # Numbers have an order that the model should know; their place in it stands for them.
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
