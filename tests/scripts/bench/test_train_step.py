"""Tests that the benchmark of a training step compares equal trainings, and reports when they are not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.model.gpt import GPT
from megads.runtime.metrics import read_json_lines
from scripts.bench.experts import works
from scripts.bench.train_step import COMPILED, MACHINE, OURS, SMALL, faults, sides_of
from scripts.bench.training_sides import SEED, TrainingWork, hugging_face_model
from tests.parity import hot_weights

ROOT = Path(__file__).parents[3]
SMALL_EXPERTS, _ = works("fp32", small=True)


@pytest.mark.slow
@pytest.mark.parametrize("work", [TrainingWork(**SMALL), SMALL_EXPERTS], ids=["bloom", "experts"])
def test_hugging_face_gets_our_model(work: TrainingWork) -> None:
    """Catches weights under wrong names or in a wrong order, other ALiBi slopes, another GELU, labels shifted twice,
    and experts that are initialized at random because they were not converted."""
    pytest.importorskip("transformers")
    ours, theirs = GPT(work.model, SEED, hot_weights(SEED)), hugging_face_model(work, hot_weights(SEED))
    tokens_bs = work.token_batches()[0]
    found = theirs(input_ids=tokens_bs, labels=tokens_bs)
    logits_bsv = ours(tokens_bs, BatchInfo(torch.arange(work.batch)))
    torch.testing.assert_close(found.logits, logits_bsv, rtol=1e-4, atol=1e-4)
    loss = torch.nn.functional.cross_entropy(logits_bsv[:, :-1].flatten(0, 1), tokens_bs[:, 1:].flatten())
    torch.testing.assert_close(found.loss, loss, rtol=1e-6, atol=0.0)


def test_a_model_without_counterpart_is_refused() -> None:
    """Catches a parameter of theirs that keeps its random weights, and one of ours that is left out."""
    pytest.importorskip("transformers")
    work = TrainingWork(**SMALL)
    other = dataclasses.replace(work, shape=dataclasses.replace(work.model, qk_norm=True))
    with pytest.raises(ConfigError, match=r"no published architecture .* model.qk_norm = true"):
        hugging_face_model(other, hot_weights(SEED))


def test_a_peer_that_trains_something_else_is_found() -> None:
    """Catches a speed ratio that hides skipped work: summed gradients, an optimizer that does nothing, a NaN."""
    ours = [{"loss": 7.0 - 0.1 * step, "grad_norm": 2.0} for step in range(4)]
    assert faults(ours, [step | {"loss": step["loss"] * (1 + 1e-7)} for step in ours], "fp32") == []
    assert "grad_norm 4" in faults(ours, [step | {"grad_norm": 4.0} for step in ours], "fp32")[0]
    frozen = faults(ours, [step | {"loss": 7.0} for step in ours], "bf16")
    assert len(frozen) == 3 and frozen[0].startswith("step 2: loss 7 against 6.9")
    assert faults(ours, [step | {"loss": float("nan")} for step in ours], "bf16")


def test_compiled_sides_can_be_left_out() -> None:
    """Catches a quick run that compiles all the same, and a run without the machine's GEMM limit."""
    work = TrainingWork(**SMALL)
    assert set(sides_of(work, True)) - set(sides_of(work, False)) == {COMPILED}
    assert MACHINE in sides_of(work, False)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_command_trains_all_sides_alike(precision: str, tmp_path: Path) -> None:
    """Catches an engine or a peer that the benchmark can no longer build, or that trains something else."""
    pytest.importorskip("transformers")
    results = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "scripts.bench.train_step", "--small", "--eager-only", "--rounds", "3"]
    command += ["--threads", "1", "--precision", precision, "--append", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = read_json_lines(results)
    assert record["faults"] == {} and len(record["losses"][OURS]) == 5
    assert (
        len(record["verdicts"]) == len(sides_of(TrainingWork(precision=precision), False))
        and record["losses"][OURS][-1] < record["losses"][OURS][0]
    )
