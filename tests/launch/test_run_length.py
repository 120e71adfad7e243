"""Run lengths that depend on the data or on the machine: train.steps=auto, train.epochs and train.minutes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megads.config.root import RootConfig, batch_size_schedule
from megads.config.train import BatchRampConfig
from megads.data.config import DatasetConfig
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.datasets import open_datasets
from megads.evaluate.config import EvaluationConfig
from megads.launch.run_length import (
    StepTiming,
    find_run_length,
    num_validations,
    resolve_length,
    run_length_for,
    wanted_tokens,
)
from megads.launch.step_timing import DROPPED_STEPS, enough_steps_timed
from megads.runtime.metrics import EventWriter
from tests.command import Ended, StartCommand, events_of, small_model
from tests.corpus import VOCAB_SIZE
from tests.fork_server import ForkServer

SEQ_LEN, BATCH = 16, 8


def config_of(*prefixes: Path, hidden_size: int = 48, **train: Any) -> RootConfig:
    """Config of a small model on one or more corpora; `train` holds keys of that section."""
    config = RootConfig()
    config.model.hidden_size, config.model.num_heads, config.model.num_layers = hidden_size, 6, 1
    config.model.vocab_size = VOCAB_SIZE
    weight = 1.0 if len(prefixes) > 1 else None
    config.data.train = [
        DatasetConfig(str(prefix), weight, name=f"set{number}", max_epochs=9.0)
        for number, prefix in enumerate(prefixes)
    ]
    config.data.split = [0.9, 0.1]
    for key, value in ({"seq_len": SEQ_LEN, "global_batch_size": BATCH} | train).items():
        setattr(config.train, key, value)
    return config


def epoch_of(config: RootConfig) -> int:
    """Samples per epoch, as the dataset counts them."""
    source, _ = open_datasets(config.data, SEQ_LEN, 1, VOCAB_SIZE)
    return int(source.samples_per_epoch)


@pytest.mark.parametrize(
    ("text", "parameters", "tokens", "why"),
    [
        (1000, 1000, 4000, "4 passes over 1,000 tokens of text"),
        (1000, 200, 4000, "4 passes"),
        (1000, 199, 3980, "20 tokens for each of the 199 parameters of the blocks"),
        (1000, 49, 980, "the text has 1,000 tokens, enough for a larger model"),
    ],
)
def test_the_default_length_follows_model_and_text_size(text: int, parameters: int, tokens: int, why: str) -> None:
    """Catches a small model trained on too many tokens, and a text repeated until it is memorized."""
    found = wanted_tokens(text, parameters)
    assert found[0] == tokens
    assert why in found[1]


@pytest.mark.parametrize("order", ["default", "megatron"])
def test_epochs_count_training_documents_only(corpus: Path, order: str) -> None:
    """Catches epochs that include the held-out documents, or that end a batch too late."""
    config = config_of(corpus, epochs=2.5)
    config.data.order = type(config.data.order)(order)
    settled, told = resolve_length(config)
    samples = 2.5 * epoch_of(config)
    assert settled.train.steps * BATCH <= samples < (settled.train.steps + 1) * BATCH
    assert settled.train.epochs is None
    assert told.startswith(f"train.epochs = 2.5: {settled.train.steps} steps over")


def test_epochs_of_blends_and_ramps_are_counted(corpus: Path) -> None:
    """Catches epochs of the first dataset only, and steps counted with the final batch size throughout."""
    alone, blend = (resolve_length(config_of(*prefixes, epochs=1.0))[0] for prefixes in ((corpus,), (corpus, corpus)))
    assert abs(blend.train.steps - 2 * alone.train.steps) <= 1
    growing = config_of(corpus, epochs=1.0)
    growing.train.batch_ramp.start, growing.train.batch_ramp.samples = 1, 400
    settled, _ = resolve_length(growing)
    batches, steps = batch_size_schedule(settled), settled.train.steps
    assert batches.samples_after(steps) <= epoch_of(growing) < batches.samples_after(steps + 1)


def test_steps_auto_follows_text_and_model(corpus: Path) -> None:
    """Catches a length that depends only on the text or only on the model, and one of fewer than 200 steps."""
    passes, _ = resolve_length(config_of(corpus, steps="auto", global_batch_size=1))
    epoch = epoch_of(config_of(corpus))
    assert passes.train.steps == 4 * epoch
    narrow, told = resolve_length(config_of(corpus, steps="auto", global_batch_size=1, hidden_size=6))
    assert 200 < narrow.train.steps < passes.train.steps and "20 tokens for each" in told
    least, told = resolve_length(config_of(corpus, steps="auto", global_batch_size=64))
    assert least.train.steps == 200 and f"{200 * 64 / epoch:.1f} passes" in told
    known = config_of(corpus, steps=7)
    assert resolve_length(known) == (known, "")


def test_minutes_include_steps_and_validations() -> None:
    """Catches a number of steps that does not fit into the minutes, or one that is smaller than it has to be."""
    for every, at_end, validation_s in (
        (0, False, 9.0),
        (0, True, 9.0),
        (7, True, 2.5),
        (10, False, 0.25),
        (1, True, 1),
    ):
        evaluation = EvaluationConfig(every_steps=every, at_end=at_end)
        timing = StepTiming(0.5, validation_s)

        def takes_s(steps: int, every: int = every, at_end: bool = at_end, each_s: float = validation_s) -> float:
            times = sum((bool(every) and n % every == 0) or (at_end and n == steps) for n in range(1, steps + 1))
            return steps * 0.5 + times * each_s

        for seconds in (0.0, 0.4, 10.0, 33.3, 60.0):
            steps = timing.steps_within(seconds, BatchSizeSchedule(8), evaluation)
            assert not steps or takes_s(steps) <= seconds
            assert takes_s(steps + 1) > seconds
    assert num_validations(20, EvaluationConfig(every_steps=10)) == 2
    assert num_validations(21, EvaluationConfig(every_steps=10)) == 3


def test_minutes_are_bounded_by_min_steps_and_steps_auto() -> None:
    """Catches a run of no step on a slow machine, and one that repeats a small text until the minutes are over."""
    config = RootConfig()
    config.train.minutes = 2.0
    found = run_length_for(config, StepTiming(0.5, 20.0))
    assert (found.steps, found.text) == (200, "train.minutes = 2: 200 steps of 0.5 s and 1 validation of 20 s")
    slow = run_length_for(config, StepTiming(6.0, 20.0))
    assert slow.steps == 50
    assert slow.text.endswith("1 validation of 20 s, as train.min_steps = 50 asks for; they take about 5m20s")
    for most, steps in ((150, 150), (250, 200), (20, 20)):
        assert run_length_for(config, StepTiming(0.5, 20.0), most, "train.steps = auto: why").steps == steps
    assert run_length_for(config, StepTiming(0.5, 20.0), 150, "why").text == (
        "why; they take about 1m35s, within train.minutes = 2"
    )
    # On a slow machine auto's number still is an upper bound.
    assert run_length_for(config, StepTiming(6.0), 20, "why").steps == 20


def test_steps_of_a_ramp_take_their_own_times() -> None:
    """Catches steps that all count as the ramp's first ones or all as its final ones, and sizes between that are not
    interpolated."""
    config = RootConfig()
    config.train.minutes, config.train.global_batch_size = 2.0, 12
    config.train.batch_ramp = BatchRampConfig(start=4, increment=4, samples=120)
    batches, evaluation = batch_size_schedule(config), config.evaluation
    timing = StepTiming.from_sizes({12: 0.5, 4: 0.25}, validation_s=20.0)
    # 15 steps of 4 samples to sample 60, 8 of 8 to sample 124, then of 12.
    assert [batches.samples_after(steps) for steps in (15, 23, 24)] == [60, 124, 136]
    assert [timing.seconds(steps, batches, EvaluationConfig(at_end=False)) for steps in (1, 15, 16, 23, 24, 123)] == (
        pytest.approx([0.25, 3.75, 4.125, 6.75, 7.25, 56.75])
    )
    # 100 s without the validation: 93.25 s after the ramp.
    assert timing.steps_within(120.0, batches, evaluation) == 23 + 186
    found = run_length_for(config, timing)
    told = "train.minutes = 2: 209 steps of 0.25 s at 4 samples to 0.5 s at 12 and 1 validation of 20 s"
    assert (found.steps, found.text) == (209, told)
    assert run_length_for(config, timing, 123, "why").text.startswith("why; they take about 1m17s, within")
    # A run that is shorter than its ramp.
    assert timing.steps_within(20.0 + 4.2, batches, evaluation) == 16


@pytest.mark.parametrize(("first_s", "last_s"), [(0.5, 0.4), (0.1, 0.4)])
def test_noise_never_makes_steps_of_other_sizes_free(first_s: float, last_s: float) -> None:
    """Catches a negative time per sample or per step, for example at a batch size that was raised since the timing."""
    timing = StepTiming.from_sizes({4: first_s, 12: last_s})
    assert timing.step_s(12) == pytest.approx(last_s)
    assert 0 < timing.step_s(1) <= timing.step_s(4) <= timing.step_s(12) <= timing.step_s(1000)


def test_timing_ends_once_the_median_is_steady() -> None:
    """Catches a median of the slow first steps, a timing that takes a good part of the minutes, and an endless one."""
    slow, quick = [60.0] * DROPPED_STEPS, [0.0] * DROPPED_STEPS
    assert not enough_steps_timed(slow, 0.01) and not enough_steps_timed([*slow, 2.0, 2.0], 0.01)
    assert enough_steps_timed([*slow, 2.0, 2.0, 2.0], 0.01)
    assert not enough_steps_timed([*quick, *[1e-3] * 29], 1.0) and enough_steps_timed([*quick, *[1e-3] * 30], 1.0)
    assert not enough_steps_timed([*quick, *[0.1] * 11], 1.0) and enough_steps_timed([*quick, *[0.1] * 13], 1.0)


def test_the_number_of_steps_is_kept_by_later_starts(tmp_path: Path) -> None:
    """Catches a start on another machine or with other validations that changes the number of steps."""
    config = RootConfig()
    config.train.minutes = 1.0
    assert find_run_length(config, tmp_path) is None

    def found(minutes: float, **evaluation: Any) -> tuple[int, bool]:
        config.train.minutes = minutes
        config.evaluation = EvaluationConfig(**evaluation)
        length = find_run_length(config, tmp_path)
        assert length is not None and length.applied(config).train.steps == length.steps
        assert length.applied(config).train.length_is_known
        with closing(EventWriter(tmp_path)) as events:
            length.record(events)
        return length.steps, length.is_recorded

    events = EventWriter(tmp_path)
    events.write("steps_timed", step_times_s=[0.3, 0.2, 9.0], validation_time_s=0.0)
    assert found(1.0) == (200, False)
    assert found(1.0) == (200, True)
    # Raised: from the same times. Lowered again: the recorded number.
    assert found(2.0) == (400, False)
    assert found(1.0, every_steps=1) == (200, True)
    # Only a fresh start times its steps again.
    events.write("steps_timed", step_times_s=[0.1], validation_time_s=0.0)
    assert found(1.0) == (600, False)
    # With a ramp: 75 steps of 4 samples, 7.5 s, then 262 of 8.
    config.train.batch_ramp = BatchRampConfig(start=4, increment=4, samples=299)
    start = {"batch_size": 4, "step_times_s": [0.1, 9.0, 0.1]}
    events.write("steps_timed", batch_size=8, step_times_s=[0.2], ramp_start=start, validation_time_s=0.0)
    assert found(1.0) == (75 + 262, False)
    assert found(1.0) == (75 + 262, True)


@pytest.mark.slow
def test_a_dry_run_works_before_the_text_is_tokenized(tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches a part of the dry run that needs the length, which is unknown before the text is tokenized."""
    (tmp_path / "a.txt").write_text("A line of text, and one more.\n" * 200)
    for length in ("train.steps=auto", "train.epochs=2"):
        for keep in (0, 3):
            found = fork_server(
                tmp_path, ("train", "data.raw=a.txt", length, f"checkpoint.keep={keep}", "run.dry_run=true")
            )
            assert found.code == 0 and "length     not known before the data is there" in found.out, found.err


@pytest.mark.slow
@pytest.mark.distributed
def test_the_length_is_printed_and_frozen(corpus: Path, megads: StartCommand) -> None:
    """Catches a frozen config or a second start without a length, and a dry run that does not print it."""

    def train(*arguments: str) -> Ended:
        ended = megads("train", *small_model(corpus, train__seq_len=128), "run.id=one", *arguments).end()
        assert ended.code == 0, ended.err
        return ended

    told = "train.epochs = 0.5: "
    dry, first = train("train.epochs=0.5", "run.dry_run=true"), train("train.epochs=0.5")
    assert told in dry.out and told in first.out
    steps = events_of(megads.folder / "runs" / "one", "start")[0]["total_steps"]
    assert f"{steps:,} steps" in dry.out and f"finished at step {steps}: raise train.epochs to go on" in first.out
    longer = train("train.epochs=1")
    assert events_of(megads.folder / "runs" / "one", "end")[-1]["step"] in (2 * steps, 2 * steps - 1)
    assert f"finished at step {2 * steps}" in longer.out or f"finished at step {2 * steps - 1}" in longer.out
