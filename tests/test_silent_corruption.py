"""Tests that the real command detects flipped bits in a rank's memory and wrong results, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import StartCommand, checkpoint_of, checksums, events_of, finished_run, small_model, steps_of
from tests.faults import FAULTY_RANK, FAULTY_STEP, SUSPICIOUS_STEP

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> Path:
    """A run without faults; read only."""
    return finished_run(module_megads, "reference", overrides(corpus))


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


def test_overlapped_gathers_of_weights_are_checked_as_others(
    corpus: Path, megads: StartCommand, reference: Path
) -> None:
    """Catches replicas that are compared before the weights have arrived, a checked or observed step that reads them
    too early, a checkpoint of other weights, and a restart that computes something else."""
    run_dir = megads.folder / "run"
    checks = ["resilience.check_replicas_every_steps=2", "resilience.check_compute_every_steps=3"]
    changes = ["parallel.overlap_param_gather=true", "logging.layer_norms_every_steps=2", "cluster.max_restarts=1"]
    arguments = [*overrides(corpus), *checks, *changes, f"run.dir={run_dir}"]
    ended = megads("train", *arguments, fault="flip_bit_once").end()
    assert ended.code == 0, ended.err
    assert len(events_of(run_dir, "replicas_differ")) == len(events_of(run_dir, "restart")) == 1
    assert steps_of(run_dir) == steps_of(reference)
    assert checksums(checkpoint_of(run_dir, 8)) == checksums(checkpoint_of(reference, 8))


@pytest.mark.slow
def test_without_restarts_corrupt_state_ends_the_run(corpus: Path, megads: StartCommand) -> None:
    """Catches a run that ends with another exit code than that of a faulty rank."""
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
def test_a_persistent_fault_is_skipped_and_reported_as_such(corpus: Path, megads: StartCommand) -> None:
    """Catches a rerun that hides a corrupt weight, and one that is repeated endlessly."""
    run_dir = megads.folder / "run"
    arguments = [*overrides(corpus), f"run.dir={run_dir}", "resilience.rerun_nonfinite=true"]
    ended = megads("train", *arguments, "train.max_nonfinite_steps=1", fault="poison_weight").end()
    assert ended.code == 7, ended.err
    assert [event["fault"] for event in events_of(run_dir, "step_rerun")] == ["persistent"] * 2
    assert len(events_of(run_dir, "step_skipped")) == 2


@pytest.fixture(scope="module")
def pipeline(corpus: Path, module_megads: StartCommand) -> Path:
    """A run of two pipeline stages of two tensor-parallel ranks without faults; read only."""
    return finished_run(module_megads, "pipeline", pipeline_overrides(corpus))


def pipeline_overrides(corpus: Path) -> list[str]:
    layout = {"parallel__tp": 2, "parallel__pp": 2, "model__hidden_dropout": 0.1}
    return small_model(corpus, train__steps=4, checkpoint__every_steps=2, **layout)


@pytest.mark.fault(11)
def test_a_wrong_gemm_is_computed_again(corpus: Path, megads: StartCommand, pipeline: Path) -> None:
    """Catches a wrong GEMM result that is trained on, and step metrics that differ because a step was recomputed."""
    run_dir = megads.folder / "run"
    arguments = [*pipeline_overrides(corpus), f"run.dir={run_dir}", "resilience.check_compute_every_steps=1"]
    ended = megads("train", *arguments, fault="wrong_product_once").end()
    assert ended.code == 0, ended.err
    (event,) = events_of(run_dir, "compute_differs")
    assert (event["step"], event["fault"], event["ranks"]) == (FAULTY_STEP, "transient", [FAULTY_RANK])
    assert event["first"][0][1].startswith("a message (forward of micro-batch 0, stage 0"), event
    assert steps_of(run_dir) == steps_of(pipeline)
    assert checksums(checkpoint_of(run_dir, 4)) == checksums(checkpoint_of(pipeline, 4))


@pytest.mark.slow
@pytest.mark.fault(11)
def test_a_rank_that_keeps_computing_wrongly_ends_the_start(corpus: Path, megads: StartCommand, pipeline: Path) -> None:
    """Catches a persistent fault that is classified as transient, and a restart that continues from wrong weights."""
    run_dir = megads.folder / "run"
    arguments = [*pipeline_overrides(corpus), f"run.dir={run_dir}", "resilience.check_compute_every_steps=1"]
    ended = megads("train", *arguments, "cluster.max_restarts=1", fault="wrong_products").end()
    assert ended.code == 0, ended.err
    (event,) = events_of(run_dir, "compute_differs")
    assert (event["step"], event["fault"], event["ranks"]) == (FAULTY_STEP, "persistent", [FAULTY_RANK])
    (restart,) = events_of(run_dir, "restart")
    assert f"rank {FAULTY_RANK}: step {FAULTY_STEP} gives another result when it is recomputed" in restart["cause"]
    assert restart["from_step"] == 2
    assert steps_of(run_dir) == steps_of(pipeline)
    assert checksums(checkpoint_of(run_dir, 4)) == checksums(checkpoint_of(pipeline, 4))


@pytest.mark.slow
@pytest.mark.fault(11)
def test_a_gradient_that_explodes_is_computed_again_before_it_is_applied(corpus: Path, megads: StartCommand) -> None:
    """Catches a suspicious step whose update is applied before it is checked, and a data spike that is called a
    fault."""
    watched = {"resilience__spikes__window_steps": 8, "resilience__spikes__patience_steps": 1}
    arguments = small_model(corpus, parallel__dp=2, train__steps=16, optim__lr=1e-4, **watched)
    reference, run_dir = finished_run(megads, "reference", arguments), megads.folder / "run"
    checked = [*arguments, f"run.dir={run_dir}", "resilience.check_suspicious_steps=true"]
    ended = megads("train", *checked, fault="huge_product_once").end()
    assert ended.code == 0, ended.err
    (event,) = events_of(run_dir, "compute_differs")
    assert (event["step"], event["fault"], event["ranks"]) == (SUSPICIOUS_STEP, "transient", [FAULTY_RANK])
    assert event["grad_norm"] > 100 * steps_of(reference)[SUSPICIOUS_STEP - 1]["grad_norm"]
    assert steps_of(run_dir) == steps_of(reference)
