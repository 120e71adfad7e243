"""Bits flip in a rank's memory or in what it computes: the real command finds it, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.faults import FAULTY_RANK, FAULTY_STEP

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> Path:
    """A run without faults; read only."""
    run_dir = module_megads.folder / "reference"
    ended = module_megads("train", *overrides(corpus), f"run.dir={run_dir}").end()
    assert ended.code == 0, ended.err
    return run_dir


def overrides(corpus: Path) -> list[str]:
    return small_model(corpus, parallel__dp=2, train__steps=8, checkpoint__every_steps=2)


@pytest.mark.fault(8)
def test_a_flipped_bit_of_a_moment_restarts_the_run_before_it(
    corpus: Path, megads: StartCommand, reference: Path
) -> None:
    """Catches corrupt state that is saved or trained on, and a healthy rank that is blamed."""
    run_dir = megads.folder / "run"
    arguments = [*overrides(corpus), f"run.dir={run_dir}", "resilience.check_replicas_every_steps=2"]
    ended = megads("train", *arguments, "cluster.max_restarts=1", fault="flip_bit_once").end()
    assert ended.code == 0, ended.err
    (event,) = events_of(run_dir, "replicas_differ")
    assert (event["step"], event["ranks"]) == (FAULTY_STEP, [FAULTY_RANK])
    assert [(key.endswith("qkv.weight"), ranks, what) for key, ranks, what in event["tensors"]] == [
        (True, [FAULTY_RANK], "changed")
    ]
    (restart,) = events_of(run_dir, "restart")
    assert f"rank {FAULTY_RANK}: the state of the run is corrupt at step {FAULTY_STEP}" in restart["cause"]
    assert restart["from_step"] == 2
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 8)) == checksums(checkpoint_of(reference, 8))


@pytest.mark.slow
def test_without_restarts_corrupt_state_ends_the_run(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that ends with another code than a faulty rank's."""
    arguments = [*overrides(corpus), "resilience.check_replicas_every_steps=1", "cluster.max_restarts=0"]
    ended = megads("train", *arguments, fault="flip_bit_once").end()
    assert ended.code == 9
    assert f"of rank {FAULTY_RANK} changed between two steps" in ended.err


@pytest.mark.fault(11)
def test_a_transient_fault_costs_a_second_computation_only(corpus: Path, megads: StartCommand, reference: Path) -> None:
    """Catches a rerun that starts from other weights, samples or dropout, or is not recorded."""
    run_dir = megads.folder / "run"
    arguments = [*overrides(corpus), f"run.dir={run_dir}", "resilience.rerun_nonfinite=true"]
    ended = megads("train", *arguments, fault="poison_gradient_once").end()
    assert ended.code == 0, ended.err
    (event,) = events_of(run_dir, "step_rerun")
    assert (event["step"], event["fault"], event["rank"]) == (FAULTY_STEP, "transient", FAULTY_RANK)
    assert events_of(run_dir, "step_skipped") == []
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 8)) == checksums(checkpoint_of(reference, 8))


@pytest.mark.slow
@pytest.mark.fault(11)
def test_a_persistent_fault_is_skipped_and_said_to_be_one(corpus: Path, megads: StartCommand) -> None:
    """Catches a rerun that hides a broken weight, and one that is tried for ever."""
    run_dir = megads.folder / "run"
    arguments = [*overrides(corpus), f"run.dir={run_dir}", "resilience.rerun_nonfinite=true"]
    ended = megads("train", *arguments, "train.max_nonfinite_steps=1", fault="poison_weight").end()
    assert ended.code == 7, ended.err
    assert [event["fault"] for event in events_of(run_dir, "step_rerun")] == ["persistent"] * 2
    assert len(events_of(run_dir, "step_skipped")) == 2
