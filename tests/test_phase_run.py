"""Training phases through the real command: the metrics at phase boundaries, and resume after kills."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from megads.checkpoint.manifest import read_manifest
from megads.monitor.accounting import Activity, read_accounting
from megads.runtime.metrics import read_json_lines
from megads.tools.report.history import read_history
from tests.command import (
    Command,
    StartCommand,
    checkpoint_of,
    checksums,
    events_of,
    small_model,
    steps_of,
    validations_of,
)
from tests.test_blend_run import reversed_corpus

pytestmark = pytest.mark.distributed

PHASES: list[dict[str, Any]] = [
    {"until_steps": 3},
    {"until_steps": 6, "train": {"seq_len": 32, "micro_batch_size": 1}, "parallel": {"recompute": "full"}},
    {"until_tokens": 3 * 12 * 16 + 3 * 12 * 32 + 2 * 24 * 32, "train": {"global_batch_size": 24}},
    {"schedule": {"name": "linear"}, "train": {"seq_len": 16}},
]
"""Ends after steps 3, 6 and 8, of 10."""
STEPS, BOUNDARIES = 10, (3, 6, 8)


def phased(corpus: Path, **changes: Any) -> list[str]:
    """Returns overrides for a small run with phases."""
    phases = json.dumps(PHASES).replace('"', "")
    values = {"train__phases": phases, "train__steps": STEPS, "checkpoint__every_steps": 2, "checkpoint__keep": 20}
    return small_model(corpus, **(values | {"evaluation__every_steps": 3, "evaluation__max_tokens": 64} | changes))


def computed(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the values of steps and validations in metrics.jsonl, without times."""
    keys = ("step", "valid/held_out/loss", "valid/held_out/tokens")
    return steps_of(run_dir) + [{key: line[key] for key in keys} for line in validations_of(run_dir)]


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory, module_megads: StartCommand) -> Path:
    """Run directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("phases") / "reference"
    ended = module_megads("train", *phased(corpus, run__dir=run_dir)).end()
    assert ended.code == 0, ended.err
    return run_dir


def require_same(run_dir: Path, reference: Path) -> None:
    """Requires bitwise equal metrics, and equal weights and optimizer state at the end."""
    assert computed(run_dir) == computed(reference)
    assert checksums(checkpoint_of(run_dir, STEPS)) == checksums(checkpoint_of(reference, STEPS))


def kill_when(command: Command, condition: Callable[[], bool]) -> None:
    """Kills the launcher and all ranks once the condition holds."""
    command.wait_for(condition)
    command.kill_everything()


def boundary_is_saved(run_dir: Path, step: int) -> Callable[[], bool]:
    """Returns a check that the checkpoint at the end of a phase is committed."""
    return (checkpoint_of(run_dir, step) / "manifest.json").exists


def phase_has_ended(run_dir: Path, phases: int) -> Callable[[], bool]:
    """Returns a check that this many phases have ended; the next one may be starting."""
    return lambda: len(events_of(run_dir, "end")) >= phases


def test_a_run_trains_each_phase_with_its_settings(corpus: Path, reference: Path) -> None:
    """Catches a phase that trains with another phase's batch size, sequence length or learning rate, counters or data
    that start again, and a boundary that counts as a restart, a failure or lost time."""
    lines = steps_of(reference)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    sizes = [line["global_batch_size"] for line in lines]
    assert sizes == [12] * 6 + [24] * 4
    whole = [line for line in read_json_lines(reference / "metrics.jsonl") if "loss" in line]
    assert [line["seq_len"] for line in whole] == [16] * 3 + [32] * 5 + [16] * 2
    assert [line["samples"] for line in lines] == [sum(sizes[: n + 1]) for n in range(STEPS)]
    assert [line["tokens"] for line in lines][2::3] == [576, 1728, 576 + 1152 + 1536 + 24 * 16]
    rates = [line["lr"] for line in lines]
    assert rates == sorted(rates, reverse=True) and rates[-1] == 0 < rates[7]
    assert rates[8] == pytest.approx(rates[7] / 2, rel=1e-9)
    assert len({line["batch_hash"] for line in lines}) == STEPS
    begun = events_of(reference, "training_phase")
    assert [(event["step"], event["phase"], event["seq_len"]) for event in begun] == [
        (0, 1, 16), (3, 2, 32), (6, 3, 32), (8, 4, 16)
    ]  # fmt: skip
    assert [event["left_out_tokens"] for event in begun] == [0, 0, 0, 0]
    assert not events_of(reference, "restart") and not events_of(reference, "failure")
    accounting = read_accounting(reference)
    assert accounting is not None
    spent = accounting.spent_us
    assert spent[Activity.lost] == spent[Activity.recover] == spent[Activity.detect] == 0
    history = read_history(reference)
    assert history.restarts == [] and history.phase_begins == [0, 3, 6, 8]
    assert [line["step"] for line in validations_of(reference)] == [3, 6, 9, 10]


@pytest.mark.slow
def test_a_kill_between_two_phases_changes_nothing(corpus: Path, reference: Path, megads: StartCommand) -> None:
    """Catches a phase that is repeated or skipped if a run is killed between the commit of its last checkpoint and the
    start of the next phase."""
    run_dir = megads.folder / "run"
    overrides = phased(corpus, run__dir=run_dir)
    kill_when(megads("train", *overrides), phase_has_ended(run_dir, 1))
    ended = megads("train", *overrides).end()
    assert ended.code == 0, ended.err
    require_same(run_dir, reference)


def write_as_before_the_rename(run_dir: Path) -> None:
    """Gives the phases in all configs of a run the key of versions before November 2026."""
    configs = [run_dir / "config.yaml", *(run_dir / "configs").glob("*.yaml")]
    assert len(configs) > 1
    for path in configs:
        text = path.read_text()
        assert text.count("\n  phases:\n  - until_steps") == 1
        path.write_text(text.replace("\n  phases:\n  - until_steps", "\n  stages:\n  - until_steps"))


@pytest.mark.slow
def test_a_run_of_an_earlier_version_continues(corpus: Path, reference: Path, megads: StartCommand) -> None:
    """Catches a run whose config, command and checkpoints name phases as earlier versions did, and which is refused,
    starts again, or goes on with other phases."""
    run_dir = megads.folder / "run"
    overrides = phased(corpus, run__dir=run_dir)
    kill_when(megads("train", *overrides), boundary_is_saved(run_dir, BOUNDARIES[0]))
    write_as_before_the_rename(run_dir)
    former = [text.replace("train.phases=", "train.stages=") for text in overrides]
    ended = megads("train", *former).end()
    assert ended.code == 0 and "train.stages is now called train.phases" in ended.out + ended.err, ended.err
    require_same(run_dir, reference)


@pytest.mark.slow
@pytest.mark.parametrize("step", BOUNDARIES)
def test_a_kill_after_the_last_checkpoint_of_a_phase_changes_nothing(
    step: int, corpus: Path, reference: Path, megads: StartCommand
) -> None:
    """Catches a validation at a phase's last step that is lost, or made with the next phase's sequence length."""
    run_dir = megads.folder / "run"
    overrides = phased(corpus, run__dir=run_dir)
    kill_when(megads("train", *overrides), boundary_is_saved(run_dir, step))
    assert megads("train", *overrides).end().code == 0
    require_same(run_dir, reference)


def kill_part(command: Command, victim: str, chance: random.Random) -> None:
    """Sends SIGKILL to a part of a run, or to all of it; returns when no process of it is left.

    Args:
        command: the run; it may have ended by itself.
        victim: everything, the launcher, or a rank (any process that the launcher started).
        chance: chooses the rank.
    """
    if victim == "everything":
        command.kill_everything()
        return
    with suppress(psutil.NoSuchProcess):
        launcher, *started = command.processes()
        target = launcher if victim == "launcher" or not started else chance.choice(started)
        target.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, f"left behind by the death of {victim}: {alive}"
    command.process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_twenty_kills_anywhere_change_nothing(seed: int, corpus: Path, reference: Path, megads: StartCommand) -> None:
    """Catches state of a phase that does not follow from the counters of a checkpoint, and processes that outlive their
    run: each run is killed four times (all of it, its launcher or a rank), at random and near phase boundaries."""
    run_dir, chance = megads.folder / "run", random.Random(seed)
    overrides = phased(corpus, run__dir=run_dir)
    moments = sorted([*chance.choices(range(STEPS), k=2), *chance.choices(BOUNDARIES, k=2)])
    for kill, step in enumerate(moments):
        command = megads("train", *overrides)
        command.wait_for(lambda step=step: step == 0 or any(line["step"] >= step for line in steps_of(run_dir)))
        time.sleep(chance.uniform(0, 1.0))
        kill_part(command, ("everything", "launcher", "rank")[(seed + kill) % 3], chance)
    ended = megads("train", *overrides).end()
    assert ended.code == 0, ended.err
    require_same(run_dir, reference)


@pytest.mark.slow
def test_a_layout_may_change_between_starts_but_not_the_samples(
    corpus: Path, reference: Path, megads: StartCommand
) -> None:
    """Catches phases that assign other samples when dp changes, and ranks that are in different phases."""
    run_dir = megads.folder / "run"
    # The same decay as in the reference, although the first start is shorter.
    overrides = phased(corpus, run__dir=run_dir, run__id="x", parallel__dp=2, schedule__decay_steps=STEPS)
    assert megads("train", *overrides, "train.steps=7").end().code == 0
    ended = megads("train", *overrides, "parallel.dp=1", "parallel.pp=2").end()
    assert ended.code == 0, ended.err
    wanted, found = steps_of(reference), steps_of(run_dir)
    assert [line["batch_hash"] for line in found] == [line["batch_hash"] for line in wanted]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-4)


@pytest.mark.slow
def test_a_phase_may_change_mix_and_rope(corpus: Path, megads: StartCommand) -> None:
    """Catches a checkpoint at a boundary that is taken for another model's, another phase's RoPE settings in a
    checkpoint, with which its weights would be exported, a blend that changes at another step than its phase, and a
    `why` that shows samples of another phase."""
    other = reversed_corpus(corpus, megads.folder / "other", 12)
    phases = (
        "[{until_steps: 2}, {until_steps: 4, weights: [0, 1], train: {seq_len: 32}, model: {rope_theta: 50000}}, "
        "{model: {rope_theta: 70000, rope_scaling: {kind: linear, factor: 2}}}]"
    )
    data = f"[{{path: {corpus}, weight: 1, max_epochs: 9}}, {{path: {other}, weight: 1, max_epochs: 9}}]"
    changes = {"data__train": data, "model__position": "rope", "train__phases": phases, "checkpoint__every_steps": 1}
    runs = megads.folder / "whole", megads.folder / "killed"
    whole, killed = (phased(corpus, run__dir=run, **(changes | {"train__steps": 6})) for run in runs)
    ended = megads("train", *whole).end()
    assert ended.code == 0, ended.err
    kill_when(megads("train", *killed), lambda: any(line["step"] >= 3 for line in steps_of(runs[1])))
    assert megads("train", *killed).end().code == 0
    assert steps_of(runs[1]) == steps_of(runs[0])
    models = [read_manifest(checkpoint_of(runs[0], step)).run.model for step in (2, 3, 4, 5)]
    assert [model["rope_theta"] for model in models] == [10000.0, 50000.0, 50000.0, 70000.0]
    assert [model["rope_scaling"]["factor"] for model in models][2:] == [models[0]["rope_scaling"]["factor"], 2.0]
    for step, datasets in ((2, {corpus, other}), (3, {other}), (5, {other})):
        ended = megads("why", f"run={runs[0]}", f"step={step}", "loss=none", "json=true", "count=12").end()
        assert ended.code == 0, ended.err
        assert {name for name in (corpus, other) if str(name) in ended.out} == datasets
    assert events_of(runs[0], "training_phase")[0]["left_out_tokens"] == 0


@pytest.mark.slow
def test_a_dataset_begins_with_a_later_phase(corpus: Path, megads: StartCommand) -> None:
    """Catches a dataset of weight 0 that is sampled before its phase, or is missing when its phase begins."""
    other, run_dir = reversed_corpus(corpus, megads.folder / "other", 12), megads.folder / "run"
    data = f"[{{path: {corpus}, weight: 1, max_epochs: 9}}, {{path: {other}, weight: 0, max_epochs: 9}}]"
    phases = "[{until_steps: 2}, {weights: [0, 1]}]"
    words = phased(corpus, data__train=data, train__phases=phases, train__steps=4, run__dir=run_dir)
    ended = megads("train", *words, "evaluation.every_steps=0").end()
    assert ended.code == 0, ended.err
    for step, dataset in ((2, corpus), (3, other)):
        ended = megads("why", f"run={run_dir}", f"step={step}", "loss=none", "json=true", "count=12").end()
        assert ended.code == 0, ended.err
        assert {name for name in (corpus, other) if str(name) in ended.out} == {dataset}


@pytest.mark.slow
def test_a_stop_at_a_phase_boundary_stops(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that continues with the next phase after a stop request."""
    run_dir = megads.folder / "run"
    overrides = phased(corpus, run__dir=run_dir)
    command = megads("train", *overrides)
    command.wait_for(lambda: any(line["step"] >= 2 for line in steps_of(run_dir)))
    (run_dir / "stop").touch()
    assert command.end().code == 5
    (run_dir / "stop").unlink()
    assert megads("train", *overrides).end().code == 0
    assert steps_of(run_dir)[-1]["step"] == STEPS


@pytest.mark.slow
def test_the_plan_is_shown_before_the_run(corpus: Path, megads: StartCommand) -> None:
    """Catches a dry run that shows no phases, or other figures than the run's, and an error that does not name the
    phase."""
    out = megads("train", *phased(corpus), "run.dry_run=true").end().out
    rows = [line.split() for line in out[out.index("training phases") :].splitlines() if line.strip()[:1].isdigit()]
    assert [row[:8] for row in rows] == [
        ["1", "3", "3", "576", "12", "2", "16", "192"],
        ["2", "6", "3", "1,152", "12", "1", "32", "384"],
        ["3", "8", "2", "1,536", "24", "1", "32", "768"],
        ["4", "10", "2", "768", "24", "1", "16", "384"],
    ]
    assert "10 steps, 168 samples, 4,032 tokens" in out
    planned = megads("plan", "json=true", *phased(corpus, data__train="[]", data__split="[1,0]")).end()
    found = json.loads(planned.out)["training_phases"]
    assert [row["steps"] for row in found] == [3, 3, 2, 2] and found[-1]["lr_end"] == 0
    wrong = "[{until_steps: 3}, {model: {hidden_size: 96}}]"
    ended = megads("train", *phased(corpus, train__phases=wrong)).end()
    assert ended.code == 2 and "train.phases[1] sets model.hidden_size" in ended.err
