"""Length of a run in steps, where the config gives it by the amount of text (auto), in epochs, or in minutes.

The number of steps of train.minutes is fixed once per run. The first start of the run is a timing start: its ranks
build the model, take a few steps with it, write the event `steps_timed` and exit, without metrics or checkpoints
(megads.launch.step_timing). From then on the number of steps is a function of that event, the launcher freezes it as
train.steps before the first step of training, and the event `length_fixed` keeps it for all later starts.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from statistics import median
from typing import Any

from megads.config.root import RootConfig, batch_size_schedule, learning_rate, open_run_data, planned_steps, unstaged
from megads.config.train import AUTO
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.evaluate.config import EvaluationConfig
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.progress import render_duration
from megads.runtime.run_dir import EVENTS_FILE

PASSES = 4
"""Up to four passes, repeated text is almost as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""
TOKENS_PER_PARAMETER = 20
"""Beyond it, a larger model is the better use of compute (Hoffmann et al. 2022, arXiv:2203.15556)."""
LEAST_STEPS = 200
"""Fewer are too few for AdamW, warmup and decay, however small the text."""
_SHORT_STEPS = 100
"""Shorter runs are trials, with no warmup or the preset's: they get no warning about it."""
STEPS_TIMED, LENGTH_FIXED = "steps_timed", "length_fixed"
"""Events: the measured times, and the number of steps that follows from them."""


def resolve_length(config: RootConfig) -> tuple[RootConfig, str]:
    """Returns the config with its length in steps, and a line that explains it; empty if nothing changed.

    A length in minutes stays as it is, see `RunLength`.

    Args:
        config: config of a run whose data is prepared and whose vocabulary size is known.

    Raises:
        ConfigError: the run uses more of a dataset than allowed.
        DataError: the data is missing or damaged.
    """
    # Imports torch, which would delay shell completion.
    from megads.model.model_size import parameter_shapes

    train = config.train
    if train.length_is_known or train.minutes is not None:
        return config, ""
    source, _ = open_run_data(unstaged(config))
    samples, batches = source.samples_per_epoch, batch_size_schedule(config)
    tokens = samples * train.seq_len
    if train.epochs is not None:
        steps = max(1, batches.steps_for(ceil(train.epochs * samples)))
        told = f"train.epochs = {train.epochs:g}: {steps:,} steps over {tokens:,} tokens of text"
    else:
        shapes = parameter_shapes(config.model)
        parameters = sum(prod(shape) for name, shape in shapes.items() if name.startswith("blocks."))
        wanted, why = wanted_tokens(tokens, parameters)
        steps = batches.steps_for(ceil(wanted / train.seq_len))
        if steps < LEAST_STEPS:
            trained = batches.samples_after(LEAST_STEPS) * train.seq_len
            steps, why = LEAST_STEPS, f"the minimum, {trained / tokens:.1f} passes over {tokens:,} tokens of text"
        told = f"train.steps = {AUTO}: {steps:,} steps, {why}"
    return _with_steps(config, steps), told


def wanted_tokens(text: int, parameters: int) -> tuple[int, str]:
    """Returns the number of tokens to train on, and the reason.

    Args:
        text: number of tokens of the training data.
        parameters: number of parameters of the blocks, without the embedding, which learns from every token and has
            most of a small model's parameters.
    """
    passes, per_parameter = PASSES * text, TOKENS_PER_PARAMETER * parameters
    if passes <= per_parameter:
        return passes, f"{PASSES} passes over {text:,} tokens of text"
    enough = f"{TOKENS_PER_PARAMETER} tokens for each of the {parameters:,} parameters of the blocks"
    if per_parameter < text:
        return per_parameter, f"{enough}; the text has {text:,} tokens, enough for a larger model"
    return per_parameter, enough


def _with_steps(config: RootConfig, steps: int) -> RootConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps, epochs=None, minutes=None))


@dataclass(frozen=True)
class StepTiming:
    """Times that follow from a timing start. A step takes `fixed_s`, and `sample_s` for each of its samples.

    Attributes:
        fixed_s: part of a step's time that does not depend on its batch size; all of it if one size was timed.
        validation_s: time of one validation of all sets; 0 if the run does not validate.
        sample_s: time per sample; 0 if one batch size was timed.
    """

    fixed_s: float
    validation_s: float = 0.0
    sample_s: float = 0.0

    @classmethod
    def from_sizes(cls, times_s: Mapping[int, float], validation_s: float = 0.0) -> StepTiming:
        """Returns the times that are linear in the batch size between the smallest and the largest one timed.

        Args:
            times_s: time of a step, by batch size.
            validation_s: time of one validation of all sets.
        """
        (first, first_s), (last, last_s) = min(times_s.items()), max(times_s.items())
        # Neither part is negative, whatever the noise: more steps and larger ones never take less time.
        sample_s = min(max((last_s - first_s) / max(last - first, 1), 0.0), last_s / last)
        return cls(last_s - last * sample_s, validation_s, sample_s)

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> StepTiming:
        """Returns the times of an event `steps_timed`; earlier versions recorded no batch size."""
        timed = [event, *([event["ramp_start"]] if event.get("ramp_start") else [])]
        times_s = {int(steps.get("batch_size", 1)): median(steps["step_times_s"]) for steps in timed}
        return cls.from_sizes(times_s, float(event["validation_time_s"]))

    def step_s(self, batch_size: int) -> float:
        """Returns the time of one step."""
        return self.fixed_s + batch_size * self.sample_s

    def seconds(self, steps: int, batches: BatchSizeSchedule, evaluation: EvaluationConfig) -> float:
        """Returns the predicted time of a run: its steps and validations."""
        steps_s = steps * self.fixed_s + batches.samples_after(steps) * self.sample_s
        return steps_s + num_validations(steps, evaluation) * self.validation_s

    def steps_within(self, seconds: float, batches: BatchSizeSchedule, evaluation: EvaluationConfig) -> int:
        """Returns the largest number of steps that takes at most this time with its validations; 0 if none does."""
        longest = range(1, int(seconds / self.step_s(batches.at(0))) + 1)
        return bisect_right(longest, seconds, key=lambda steps: self.seconds(steps, batches, evaluation))


def num_validations(steps: int, evaluation: EvaluationConfig) -> int:
    """Returns how often a run of this many steps validates."""
    every = evaluation.every_steps
    periodic = steps // every if every else 0
    return periodic + int(evaluation.at_end and not (every and steps % every == 0))


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run whose length is given in minutes.

    Attributes:
        minutes: value of train.minutes.
        steps: number of steps.
        text: line that explains it.
        is_recorded: whether an earlier start fixed it.
    """

    minutes: float
    steps: int
    text: str
    is_recorded: bool = False

    def applied(self, config: RootConfig) -> RootConfig:
        """Returns the config with the length in steps."""
        return _with_steps(config, self.steps)

    def record(self, events: EventWriter) -> None:
        """Writes the event `length_fixed`, unless an earlier start has."""
        if not self.is_recorded:
            events.write(LENGTH_FIXED, level="debug", minutes=self.minutes, steps=self.steps, message=self.text)


def find_run_length(config: RootConfig, run_dir: Path) -> RunLength | None:
    """Returns the number of steps that train.minutes stands for in a run.

    It is the recorded number if the run was started with the same value before; otherwise it follows from the times
    that the run's timing start measured, for example if train.minutes was raised.

    Args:
        config: config of the run, with the vocabulary size set.
        run_dir: the run directory.

    Returns:
        None if the length is not given in minutes, or if no timing start has measured the run.
    """
    minutes, timing, fixed = config.train.minutes, None, dict[float, int]()
    if minutes is None:
        return None
    for event in read_json_lines(run_dir / EVENTS_FILE):
        if event.get("event") == STEPS_TIMED:
            # A fresh start (checkpoint.load=none) measures anew.
            timing, fixed = StepTiming.from_event(event), {}
        elif event.get("event") == LENGTH_FIXED:
            fixed[float(event["minutes"])] = int(event["steps"])
    if minutes in fixed:
        text = f"train.minutes = {minutes:g}: {fixed[minutes]:,} steps, as an earlier start fixed them"
        return RunLength(minutes, fixed[minutes], text, is_recorded=True)
    if timing is None:
        return None
    most, why = None, ""
    if config.train.steps == AUTO:
        train = dataclasses.replace(config.train, minutes=None)
        settled, why = resolve_length(dataclasses.replace(config, train=train))
        most = int(settled.train.steps or 0)
    return run_length_for(config, timing, most, why)


def run_length_for(config: RootConfig, timing: StepTiming, most: int | None = None, why: str = "") -> RunLength:
    """Returns the length of a run of train.minutes.

    Args:
        config: config of the run.
        timing: measured times.
        most: maximum number of steps, which takes precedence over train.min_steps; None: no maximum.
        why: line that explains the maximum.
    """
    minutes, least, evaluation = config.train.minutes, config.train.min_steps, config.evaluation
    assert minutes is not None
    batches = batch_size_schedule(config)
    within = timing.steps_within(60 * minutes, batches, evaluation)
    steps = max(within, least)
    if most is not None and most <= steps:
        takes = render_duration(timing.seconds(most, batches, evaluation))
        limit = f", within train.minutes = {minutes:g}" if most <= within else ""
        return RunLength(minutes, most, f"{why}; they take about {takes}{limit}")
    first, last = batches.at(0), batches.global_batch_size
    text = f"train.minutes = {minutes:g}: {steps:,} steps of {timing.step_s(first):.3g} s"
    if first < last:
        text += f" at {first} samples to {timing.step_s(last):.3g} s at {last}"
    if validations := num_validations(steps, evaluation) if timing.validation_s else 0:
        text += f" and {validations} validation{'s' if validations > 1 else ''} of {timing.validation_s:.3g} s"
    if within < least:
        takes = render_duration(timing.seconds(steps, batches, evaluation))
        text += f", as train.min_steps = {least} asks for; they take about {takes}"
    return RunLength(minutes, steps, text)


def warmup_warnings(config: RootConfig) -> Iterator[str]:
    """Yields warnings about the warmup of a run, one line each."""
    steps, batches, rate = planned_steps(config), batch_size_schedule(config), learning_rate(config)
    warmup = rate.warmup
    planned, some = batches.samples_after(steps), batches.samples_after(max(1, steps // 100))
    share = f"schedule.warmup_samples={some} is a hundredth of the run"
    if steps < _SHORT_STEPS:
        return
    if warmup == 0:
        yield (
            f"schedule.warmup_samples = 0: the first step has the full optim.lr = {config.optim.lr:g}, before AdamW "
            f"has estimated the moments of the gradients; {share}"
        )
    if warmup > planned:
        yield (
            f"the warmup of {warmup:,} samples does not end within the run's {planned:,} samples: the learning "
            f"rate rises to {rate(planned):.3g} and never reaches optim.lr = {config.optim.lr:g}; train longer, "
            f"or {share}"
        )
