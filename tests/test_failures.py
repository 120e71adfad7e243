"""Failures of runs and how they are reported: the real command, real ranks, and injected faults."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest

from megads.data.indexed.writer import IndexedDatasetWriter
from megads.runtime.metrics import read_json_lines
from tests.command import TIMEOUT_S, StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.corpus import VOCAB_SIZE, documents
from tests.faults import FAULTY_RANK, FAULTY_STEP

pytestmark = pytest.mark.distributed

# A rank that waits for a failed one does so for cluster.timeout_s, 600 s; `Command.end` fails long before.


@pytest.mark.quick("forward-layout0")
@pytest.mark.parametrize(
    ("where", "layout"), [("forward", {"parallel__pp": 2}), ("backward", {"parallel__tp": 2, "parallel__pp": 2})]
)
def test_the_failing_ranks_error_is_reported(
    where: str, layout: dict[str, int], corpus: Path, megads: StartCommand
) -> None:
    """Catches a failure hidden by its peers' connection errors, and peers that hang waiting for the failed rank."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, train__steps=50, checkpoint__every_steps=2, run__dir=run_dir, **layout)
    ended = megads("train", *overrides, fault=f"raise_in_{where}").end()
    assert ended.code == 1
    first, *described, log, diagnosis = ended.err.splitlines()
    assert described[0].startswith(f"  in step {FAULTY_STEP} of {run_dir} ")
    assert re.match(r"  samples \d+ to \d+ of the run, .*; documents of ", described[1])
    assert diagnosis.startswith(f"megads: diagnosis: the program raised an exception, rank {FAULTY_RANK}. ")
    assert first == f"megads: rank {FAULTY_RANK} failed, InjectedError: injected into the {where}"
    assert log == f"  log: {run_dir / 'logs' / f'rank_{FAULTY_RANK:05d}.log'}"
    assert f"InjectedError: injected into the {where}" in Path(log.removeprefix("  log: ")).read_text()
    assert [line["step"] for line in steps_of(run_dir)] == list(range(1, FAULTY_STEP))
    assert checkpoint_of(run_dir, 2).exists()


def test_a_token_outside_the_vocabulary_is_named(megads: StartCommand) -> None:
    """Catches an index error raised inside an embedding, and a wrong row silently looked up with tensor parallelism."""
    prefix, bad_document = megads.folder / "bad", 71
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number, tokens in enumerate(documents()):
            writer.append([*tokens[:10], VOCAB_SIZE, *tokens[11:]] if number == bad_document else tokens)
    run_dir = megads.folder / "run"
    overrides = small_model(prefix, train__steps=100, parallel__tp=2, run__dir=run_dir)
    ended = megads("train", *overrides).end()
    assert ended.code == 3
    assert f"{prefix}: document {bad_document} holds token {VOCAB_SIZE}, model.vocab_size is 509" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.fault(10)
def test_persistent_nan_ends_the_run(corpus: Path, megads: StartCommand) -> None:
    """Catches NaN that only one rank sees, ranks that disagree on a skip, and a run that skips every step."""
    run_dir = megads.folder / "run"
    overrides = small_model(
        corpus, train__steps=50, train__max_nonfinite_steps=2, parallel__tp=2, checkpoint__every_steps=1,
        checkpoint__keep=0, run__dir=run_dir,
    )  # fmt: skip
    ended = megads("train", *overrides, fault="poison_weight").end()
    assert ended.code == 7
    assert "3 non-finite steps in a row, up to step 5 (train.max_nonfinite_steps = 2)" in ended.err
    assert f"checkpoint.load={checkpoint_of(run_dir, 1)}" in ended.err and "Traceback" not in ended.err
    skips = events_of(run_dir, "step_skipped")
    assert [skip["step"] for skip in skips] == [3, 4, 5]
    assert all(skip["culprit"] == "rank 1 in its weights (blocks.0.attention.qkv.weight)" for skip in skips)
    assert [line["skipped"] for line in steps_of(run_dir)] == [False, False, True, True, True]


@pytest.mark.slow
@pytest.mark.fault(10)
def test_a_run_resumes_from_before_persistent_nan(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that resumes from broken weights, and a checkpoint named by the user that is ignored."""
    run_dir = megads.folder / "run"
    overrides = small_model(
        corpus, train__steps=50, train__max_nonfinite_steps=2, parallel__tp=2, checkpoint__every_steps=1,
        checkpoint__keep=0, run__dir=run_dir,
    )  # fmt: skip
    assert megads("train", *overrides, fault="poison_weight").end().code == 7
    # Nothing was saved meanwhile: the same command resumes from the checkpoint before.
    again = megads("train", *overrides, "train.steps=6").end()
    assert again.code == 0, again.err
    assert events_of(run_dir, "resume")[-1]["step"] == 2
    assert [line["skipped"] for line in steps_of(run_dir)] == [False] * 6
    # A checkpoint that the user names takes precedence over the run's newest, but only once.
    older = [*overrides, "train.steps=3", f"checkpoint.load={checkpoint_of(run_dir, 1)}"]
    for resumed, said in (
        (1, "the run's own later checkpoints, up to step 6, are not used"),
        (3, "resumes from a checkpoint saved after it"),
    ):
        assert megads("train", *older).end().code == 0
        assert events_of(run_dir, "resume")[-1]["step"] == resumed
        assert said in events_of(run_dir, "resume")[-1]["note"]


@pytest.mark.fault(10)
def test_transient_nan_skips_one_step(corpus: Path, megads: StartCommand) -> None:
    """Catches a skipped step that changes weights or moments, is not counted, or is blamed on the wrong rank."""
    run_dir = megads.folder / "run"
    overrides = small_model(
        corpus, train__steps=5, parallel__pp=2, checkpoint__every_steps=1, checkpoint__keep=0, run__dir=run_dir
    )
    ended = megads("train", *overrides, fault="poison_gradient_once").end()
    assert (ended.code, ended.err) == (0, "")
    steps = list(read_json_lines(run_dir / "metrics.jsonl"))[:5]
    assert [line["skipped"] for line in steps] == [False, False, True, False, False]
    assert [line["samples"] for line in steps] == [12, 24, 36, 48, 60]
    assert all(np.isfinite(line["loss"]) for line in steps)
    (skip,) = events_of(run_dir, "step_skipped")
    assert skip["step"] == 3
    assert skip["culprit"].startswith("rank 1 in its backward (blocks.1.attention.qkv.bias")
    weights = [checksums(checkpoint_of(run_dir, step)) for step in (1, 2, 4, 5)]
    assert all(before != after for before, after in itertools.pairwise(weights))
    taken = [json.loads((checkpoint_of(run_dir, s) / "manifest.json").read_text())["run"] for s in (1, 2, 4, 5)]
    assert [run["optimizer_steps"] for run in taken] == [1, 2, 3, 4]
    assert not checkpoint_of(run_dir, 3).exists()


def test_an_interrupted_run_saves_and_continues(corpus: Path, megads: StartCommand) -> None:
    """Catches an interrupt that loses steps, prints tracebacks, or makes the resumed run repeat or skip samples."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, parallel__pp=2, schedule__name="constant", run__dir=run_dir)
    command = megads("train", *overrides, "train.steps=100000")
    command.wait_for(lambda: len(steps_of(run_dir)) >= 3)
    command.process.send_signal(signal.SIGINT)
    ended = command.end()
    assert (ended.code, ended.err) == (5, "")
    assert "SIGINT: saving and stopping" in ended.out and "Traceback" not in ended.out
    last = steps_of(run_dir)[-1]["step"]
    assert checkpoint_of(run_dir, last).exists()
    assert events_of(run_dir, "end")[-1]["stopped"] == "interrupted"
    assert megads("train", *overrides, f"train.steps={last + 2}").end().code == 0
    assert events_of(run_dir, "resume")[-1]["step"] == last
    steps = steps_of(run_dir)
    assert [line["step"] for line in steps] == list(range(1, last + 3))
    assert [line["samples"] for line in steps] == [12 * line["step"] for line in steps]
    assert len({line["batch_hash"] for line in steps}) == len(steps)


@pytest.mark.fault(3)
def test_a_preempted_run_saves(corpus: Path, megads: StartCommand) -> None:
    """Catches a SIGTERM from the scheduler that kills the run without saving, or that is taken for a user's stop."""
    run_dir = megads.folder / "run"
    command = megads("train", *small_model(corpus, train__steps=100000, run__dir=run_dir))
    command.wait_for(lambda: len(steps_of(run_dir)) >= 1)
    command.process.send_signal(signal.SIGTERM)
    ended = command.end()
    assert (ended.code, ended.err) == (6, "")
    assert checkpoint_of(run_dir, steps_of(run_dir)[-1]["step"]).exists()
    assert events_of(run_dir, "end")[-1]["stopped"] == "preempted"
    assert not (run_dir / "stop").exists()


def test_a_stop_file_stops_until_it_is_removed(corpus: Path, megads: StartCommand) -> None:
    """Catches a stop file that does not stop the run, or that the next start ignores."""
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, schedule__name="constant", run__dir=run_dir)
    command = megads("train", *overrides, "train.steps=100000")
    command.wait_for(lambda: len(steps_of(run_dir)) >= 1)
    (run_dir / "stop").touch()
    assert command.end().code == 5
    last = steps_of(run_dir)[-1]["step"]
    assert checkpoint_of(run_dir, last).exists()
    assert megads("train", *overrides, "train.steps=100000").end().code == 5
    assert steps_of(run_dir)[-1]["step"] == last


@pytest.mark.fault(1)
def test_a_killed_rank_is_named(corpus: Path, megads: StartCommand) -> None:
    """Catches a lost rank reported as its peers' error, and peers or a launcher that keep running."""
    victim = 0
    run_dir = megads.folder / "run"
    overrides = small_model(corpus, train__steps=100000, parallel__dp=2, run__dir=run_dir)
    command = megads("train", *overrides)
    command.wait_for(lambda: len(steps_of(run_dir)) >= 2)
    started = command.processes()
    log = (run_dir / "logs" / f"rank_{victim:05d}.log").read_text()
    os.kill(int(log.split("pid ")[1].split(",")[0]), signal.SIGKILL)
    ended = command.end()
    assert ended.code == 10
    assert f"rank {victim} was killed by SIGKILL" in ended.err and "Traceback" not in ended.err
    _, alive = psutil.wait_procs(started, timeout=TIMEOUT_S)
    assert alive == []
