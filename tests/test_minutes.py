"""Runs whose length is given in minutes: the number of steps is fixed once, whatever is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from megads.cli.entry import compose_typed, hydra_initialized, structured_schema
from megads.config.frozen import load_frozen
from megads.config.root import RootConfig, check_config, learning_rate
from megads.errors import ConfigError
from megads.tools.sweep.config import TrainCommandConfig
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of, validations_of
from tests.fork_server import ForkServer
from tests.test_resume import last_step


def composed(*overrides: str) -> RootConfig:
    """Returns the config of a command line of megads train."""
    ConfigStore.instance().store(name="train_schema", node=structured_schema(TrainCommandConfig))
    with hydra_initialized("train"):
        config = compose_typed("train", TrainCommandConfig, overrides).config
    assert isinstance(config, RootConfig)
    return config


@pytest.mark.distributed
def test_a_timed_run_keeps_its_length_over_kills(corpus: Path, megads: StartCommand) -> None:
    """N5. Catches a length that is measured again, a learning rate that a kill moves, timed steps that leave a trace in
    the run, which equals one whose number of steps was given from the beginning, and a ramp timed at one size only."""
    ramp = {"train__batch_ramp__start": 4, "train__batch_ramp__increment": 4, "train__batch_ramp__samples": 100}
    overrides = small_model(corpus, parallel__dp=2, checkpoint__every_steps=10, evaluation__max_tokens=64, **ramp)
    run_dir = megads.folder / "run"
    timed = ("train", *overrides, "train.minutes=0.005", f"run.dir={run_dir}")

    command = megads(*timed)
    command.wait_for(lambda: bool(events_of(run_dir, "launch")))
    command.kill_everything()
    assert load_frozen(run_dir / "config.yaml").train.minutes == 0.005
    assert not events_of(run_dir, "length_fixed") and not (run_dir / "metrics.jsonl").exists()

    command = megads(*timed)
    command.wait_for(lambda: last_step(run_dir) >= 13)
    command.kill_everything()
    [timed_steps], [fixed] = events_of(run_dir, "steps_timed"), events_of(run_dir, "length_fixed")
    sizes = [steps["batch_size"] for steps in (timed_steps["ramp_start"], timed_steps)]
    assert sizes == [4, 12] and " s at 4 samples to " in fixed["message"]
    assert fixed["steps"] >= 50
    assert load_frozen(run_dir / "config.yaml").train.steps == fixed["steps"]

    ended = megads(*timed).end()
    assert (ended.code, ended.err) == (0, "")
    assert f"train.minutes = 0.005: {fixed['steps']:,} steps, as an earlier start fixed them" in ended.out
    assert "changed since the last start" not in ended.out
    assert events_of(run_dir, "resume")[-1]["step"] >= 10
    assert len(events_of(run_dir, "steps_timed")) == len(events_of(run_dir, "length_fixed")) == 1
    assert {event["total_steps"] for event in events_of(run_dir, "start")} == {fixed["steps"]}
    assert events_of(run_dir, "end")[-1]["step"] == fixed["steps"]

    again = megads(*timed).end()
    assert again.code == 0 and f"finished at step {fixed['steps']}: raise train.minutes to go on" in again.out
    given = megads.folder / "given"
    assert megads("train", *overrides, f"train.steps={fixed['steps']}", f"run.dir={given}").end().code == 0
    assert steps_of(run_dir) == steps_of(given) and steps_of(given)[-1]["lr"] == 0.0
    assert validations_of(run_dir) == validations_of(given)
    last = (checksums(checkpoint_of(folder, fixed["steps"])) for folder in (run_dir, given))
    assert next(last) == next(last)


def test_a_dry_run_of_minutes_measures_nothing(corpus: Path, tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches a dry run that fails without a number of steps, or that measures one."""
    found = fork_server(tmp_path, ("train", *small_model(corpus), "train.minutes=3", "run.dry_run=true"))
    assert found.code == 0 and "length     as many steps as 3 min of training take: the first start times" in found.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.minutes=0"], "train.minutes = 0.0: must be above 0"),
        (["train.minutes=1", "train.steps=9"], "exactly one of .* but train.steps = 9, train.minutes = 1.0"),
        (["train.minutes=1", "train.epochs=1"], "exactly one of .* but train.epochs = 1.0, train.minutes = 1.0"),
        (["train.minutes=1", "train.phases=[{until_steps: 9}, {}]"], "not supported with train.phases"),
    ],
)  # fmt: skip
def test_minutes_that_contradict_other_keys_are_refused(overrides: list[str], said: str) -> None:
    """Catches two lengths of which one is ignored, and a time predicted from steps that are not like the later ones."""
    config = composed("model=tiny", "data.raw=notes", *overrides)
    with pytest.raises(ConfigError, match=said):
        check_config(config)


@pytest.mark.parametrize(
    ("overrides", "length"),
    [
        ([], ("auto", None, 2.0)),
        (["train.steps=50"], (50, None, None)),
        (["train.steps=null", "train.epochs=8"], (None, 8.0, None)),
        (["train.minutes=9"], ("auto", None, 9.0)),
        (["train.steps=auto"], ("auto", None, 2.0)),
    ],
)  # fmt: skip
def test_a_length_on_the_command_line_wins_over_an_experiments_minutes(
    overrides: list[str], length: tuple[object, ...]
) -> None:
    """Catches an explicit number of steps that experiment=first refuses, or cuts short on a slow machine."""
    config = composed("experiment=first", *overrides)
    check_config(config)
    assert (config.train.steps, config.train.epochs, config.train.minutes) == length


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        ([], 40),
        (["schedule.warmup_samples=80"], 80),
        (["schedule.warmup_steps=3"], 24),
        (["schedule.warmup_steps=null"], 40),
        (["schedule.warmup_share=0.5"], 400),
    ],
)
def test_a_warmup_on_the_command_line_wins_over_an_experiments_share(overrides: list[str], warmup: int) -> None:
    """Catches a warmup of the command line that is ignored, or refused because the experiment has another unit."""
    config = composed("experiment=demo", "train.steps=100", *overrides)
    check_config(config)
    assert learning_rate(config).warmup == warmup


@pytest.mark.slow
@pytest.mark.distributed
def test_minutes_cannot_be_given_to_a_run_that_has_begun(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that measures its length in the middle, which would move its learning rate."""
    overrides = (*small_model(corpus), "run.id=one")
    assert megads("train", *overrides, "train.steps=2").end().code == 0
    ended = megads("train", *overrides, "train.minutes=1").end()
    assert ended.code == 2 and "continues step 2 of runs/one" in ended.err and "train.steps above 2" in ended.err
    sweep = megads("train", "-m", *small_model(corpus), "train.minutes=1", "optim.lr=1e-3,1e-4").end()
    assert sweep.code == 2 and "set train.steps=<number>" in sweep.err


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stop_during_timing_is_obeyed(corpus: Path, megads: StartCommand) -> None:
    """Catches a timing start that ignores Ctrl-C, or whose end is taken for that of the run."""
    run_dir, arguments = megads.folder / "run", small_model(corpus, parallel__dp=2)
    command = megads("train", *arguments, "train.minutes=9", f"run.dir={run_dir}")
    command.wait_for(lambda: bool(events_of(run_dir, "launch")))
    command.process.send_signal(signal.SIGINT)
    ended = command.end()
    assert ended.code == 5 and "starts it from step 0" in ended.out
    assert not events_of(run_dir, "length_fixed") and not (run_dir / "metrics.jsonl").exists()
    again = megads("train", *arguments, "train.minutes=0.001", f"run.dir={run_dir}").end()
    assert again.code == 0 and "finished at step 50: raise train.minutes to go on" in again.out, again.err
