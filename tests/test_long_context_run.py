"""Training that grows its context by phases: batch, layout and RoPE of each, and resume at and between boundaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megads.checkpoint.manifest import read_manifest
from megads.model.config import ModelConfig
from megads.model.model_size import model_flops_per_token
from megads.runtime.metrics import read_json_lines
from tests.command import (
    StartCommand,
    checkpoint_of,
    checksums,
    events_of,
    small_model,
    steps_of,
)
from tests.test_phase_run import boundary_is_saved, kill_when, phase_has_ended

pytestmark = pytest.mark.distributed

GROWTH: list[dict[str, Any]] = [
    {"until_steps": 3, "model": {"max_seq_len": 32}},
    {"until_steps": 6, "train": {"seq_len": 64}, "model": {"max_seq_len": 64, "rope_theta": 50000}},
    {
        "train": {"seq_len": 128},
        "model": {"max_seq_len": 128, "rope_scaling": {"kind": "yarn", "factor": 2, "original_max_seq_len": 64}},
        "parallel": {"cp": 2, "dp": 1},
    },
]
STEPS, BOUNDARIES, STEP_TOKENS = 9, (3, 6), 8 * 32


def growing(corpus: Path, run_dir: Path) -> list[str]:
    """Returns overrides for a run on two ranks whose context grows from 32 to 64 and 128 tokens."""
    return small_model(
        corpus,
        run__dir=run_dir,
        train__phases=json.dumps(GROWTH).replace('"', ""),
        train__keep_batch_tokens="true",
        train__steps=STEPS,
        train__seq_len=32,
        train__global_batch_size=8,
        model__position="rope",
        parallel__dp=2,
        checkpoint__every_steps=1,
        checkpoint__keep=20,
        evaluation__at_end="false",
    )


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory, module_megads: StartCommand) -> Path:
    """Run directory of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("growth") / "whole"
    ended = module_megads("train", *growing(corpus, run_dir)).end()
    assert ended.code == 0, ended.err
    return run_dir


def test_the_context_grows_and_a_step_keeps_its_tokens(whole: Path) -> None:
    """Catches a phase with the batch, layout, RoPE or FLOPs of another, and tokens that are lost at a boundary."""
    lines = [line for line in read_json_lines(whole / "metrics.jsonl") if "loss" in line]
    assert [line["seq_len"] for line in lines] == [32] * 3 + [64] * 3 + [128] * 3
    assert [line["global_batch_size"] for line in lines] == [8] * 3 + [4] * 3 + [2] * 3
    assert [line["tokens"] for line in lines] == [STEP_TOKENS * step for step in range(1, STEPS + 1)]
    assert [event["layout"] for event in events_of(whole, "start")] == [
        "tp1 cp1 pp1 dp2", "tp1 cp1 pp1 dp2", "tp1 cp2 pp1 dp1"
    ]  # fmt: skip
    assert [event["left_out_tokens"] for event in events_of(whole, "training_phase")] == [0, 0, 0]
    for step, line in enumerate(lines, 1):
        model = read_manifest(checkpoint_of(whole, step)).run.model
        phase = (step - 1) // 3
        assert model["max_seq_len"] == 32 * 2**phase
        assert model["rope_theta"] == (10000.0 if phase == 0 else 50000.0)
        assert model["rope_scaling"]["kind"] == ("yarn" if phase == 2 else "none")
        size = ModelConfig(num_heads=6, hidden_size=48, vocab_size=model["vocab_size"])
        flops = 1e12 * 2 * line["tflops_per_device"] / line["tokens_per_s"]
        assert flops == pytest.approx(model_flops_per_token(size, line["seq_len"]), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", [0, 1])
def test_kills_at_a_boundary_and_in_the_middle_of_a_phase_change_nothing(
    boundary: int, corpus: Path, whole: Path, megads: StartCommand
) -> None:
    """Catches state of a phase that does not follow from a checkpoint: each run is killed where a phase's last
    checkpoint is committed, once more where the next phase may be starting, and within the next phase."""
    run_dir = megads.folder / "run"
    words = growing(corpus, run_dir)
    kill_when(megads("train", *words), boundary_is_saved(run_dir, BOUNDARIES[boundary]))
    kill_when(megads("train", *words), phase_has_ended(run_dir, boundary + 1))
    middle = BOUNDARIES[boundary] + 1
    kill_when(megads("train", *words), lambda: any(line["step"] >= middle for line in steps_of(run_dir)))
    ended = megads("train", *words).end()
    assert ended.code == 0, ended.err
    assert steps_of(run_dir) == steps_of(whole)
    assert checksums(checkpoint_of(run_dir, STEPS)) == checksums(checkpoint_of(whole, STEPS))
