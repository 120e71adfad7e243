"""Runs of experts by the real command: kills, damaged checkpoints, averaged, resharded and upcycled weights."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megads.checkpoint.read import find_checkpoint, load_unsharded, open_checkpoint
from megads.errors import CheckpointError
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import METRICS_FILE
from megads.tools.checkpoints.command import average, reshard
from megads.tools.checkpoints.config import CheckpointAction, CheckpointActionConfig
from tests.command import StartCommand, checkpoint_of, checksums, events_of, finished_run, small_model, steps_of
from tests.faults import HOLD_STEP
from tests.test_resume import kill_at_a_random_moment

pytestmark = pytest.mark.distributed

# Both states of routers, a dense layer, and a shared expert; experts on two of four ranks each.
EXPERTS = {
    "model__bias": False, "model__mlp": "swiglu", "model__moe__num_experts": 4, "model__moe__expert_ffn_size": 32,
    "model__moe__shared_ffn_size": 16, "model__moe__first_dense": 1, "model__moe__bias_rate": 0.01,
    "model__moe__global_loss": 0.01, "parallel__dp": 4, "parallel__ep": 2, "train__global_batch_size": 8,
}  # fmt: skip
EXPERT = "weight/blocks.1.mlp.experts.down.weight"
BIAS = "blocks.1.mlp.router.expert_bias"


def overrides(corpus: Path, **changes: object) -> list[str]:
    wanted = {"train__steps": 8, "checkpoint__every_steps": 2, "checkpoint__keep": 0, "optim__ema_decay": 0.9}
    return small_model(corpus, **EXPERTS, **wanted, **changes)


@pytest.fixture(scope="module")
def reference(corpus: Path, module_megads: StartCommand) -> Path:
    """A run that nothing interrupts; read only."""
    return finished_run(module_megads, "reference", overrides(corpus))


def weights_of(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    model = load_unsharded(open_checkpoint(checkpoint_of(run_dir, step)), torch.device("cpu"), torch.float32)
    return {name: weight.detach() for name, weight in model.parameters_by_name().items()}


@pytest.mark.quick("0")
@pytest.mark.parametrize("local_every_steps", [0, 1])
def test_a_killed_run_of_experts_continues_bit_for_bit(
    local_every_steps: int, corpus: Path, megads: StartCommand, reference: Path
) -> None:
    """N5. Catches biases and loads of routers that are not saved, are loaded on some ranks only, or start anew; and
    experts of a local checkpoint that another rank loads."""
    killed = megads.folder / "killed"
    command = [*overrides(corpus, checkpoint__local_every_steps=local_every_steps), f"run.dir={killed}"]
    running = megads("train", *command, fault="hold", variables={HOLD_STEP: "8"})
    moment = kill_at_a_random_moment(running, killed, 3, 6)
    again = megads("train", *command).end()
    assert (again.code, again.err) == (0, ""), moment
    assert [event["step"] for event in events_of(killed, "resume")] != [0], moment
    assert steps_of(killed) == steps_of(reference), moment
    assert checksums(checkpoint_of(killed, 8)) == checksums(checkpoint_of(reference, 8)), moment
    first, last = (weights_of(killed, step)[BIAS] for step in (2, 8))
    assert last.any() and not torch.equal(first, last), "the bias does not move"


@pytest.mark.slow
def test_a_capacity_changes_no_loss(corpus: Path, megads: StartCommand, reference: Path) -> None:
    """Catches rows that are lost beyond a capacity, a step that counts twice where it is computed twice, and a resume
    with another capacity that is refused or trains another model."""
    expected = {line["step"]: line for line in read_json_lines(reference / METRICS_FILE) if "moe/max_load" in line}
    narrow, wide = megads.folder / "narrow", megads.folder / "wide"
    for run_dir, factor, start in ((narrow, 1.0, "auto"), (wide, 3.0, checkpoint_of(narrow, 4))):
        changes = {"model__moe__capacity_factor": factor, "checkpoint__load": start, "run__dir": run_dir}
        ended = megads("train", *overrides(corpus, **changes)).end()
        assert ended.code == 0, ended.err
        lines = [line for line in read_json_lines(run_dir / METRICS_FILE) if "moe/recomputed" in line]
        assert [line["step"] for line in lines] == list(range(1 if start == "auto" else 5, 9))
        for line in lines:
            other = expected[line["step"]]
            assert line["loss"] == pytest.approx(other["loss"], rel=1e-5) and line["batch_hash"] == other["batch_hash"]
            assert line["moe/recomputed"] == (line["moe/capacity_needed"] > factor) and not line["moe/dropped_rows"]
        assert bool(events_of(run_dir, "experts_overflow")) == any(line["moe/recomputed"] for line in lines)
        assert factor > 1.0 or all(line["moe/recomputed"] for line in lines)


def flip_a_byte_of(folder: Path, key: str) -> str:
    """Flips one bit of a stored part of a tensor; returns the name of its file."""
    part = next(iter(open_checkpoint(folder).parts_of(key)))
    path = folder / part.file
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    begin, end = json.loads(content[8 : 8 + length])[part.name]["data_offsets"]
    content[8 + length + random.randrange(begin, end)] ^= 16
    path.write_bytes(content)
    return part.file


def lose(folder: Path, key: str) -> str:
    """Removes a file with a part of a tensor; returns its name."""
    part = next(iter(open_checkpoint(folder).parts_of(key)))
    (folder / part.file).unlink()
    return part.file


@pytest.mark.parametrize("damage", [flip_a_byte_of, lose])
def test_a_changed_or_lost_expert_is_noticed(
    damage: Callable[[Path, str], str], corpus: Path, megads: StartCommand, reference: Path
) -> None:
    """Catches an expert that is not covered by a checksum, and a start from it."""
    run_dir = megads.folder / "damaged"
    shutil.copytree(reference, run_dir)
    file = damage(checkpoint_of(run_dir, 8), EXPERT)
    with pytest.raises(CheckpointError, match=rf"{file}.*{re.escape(EXPERT)}" if damage is flip_a_byte_of else file):
        open_checkpoint(checkpoint_of(run_dir, 8))
    handle = find_checkpoint(run_dir, "auto")
    assert handle is not None and handle.state["step"] == 6 and file in handle.skipped[0]


def test_averaged_and_resharded_checkpoints_hold_experts_and_routers(reference: Path, tmp_path: Path) -> None:
    """Catches the state of routers that is left out, without which the model cannot be loaded, and experts in another
    order."""
    steps = (4, 6, 8)
    asked = CheckpointActionConfig(CheckpointAction.average, str(reference), output=str(tmp_path / "mean"), last=3)
    assert average(asked).steps == steps
    every = [weights_of(reference, step) for step in steps]
    mean = weights_of(tmp_path / "mean", 0)
    assert mean.keys() == every[0].keys() and BIAS in mean
    for name, weight in mean.items():
        expected = torch.stack([weights[name].double() for weights in every]).mean(0).float()
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9)
    asked = CheckpointActionConfig(CheckpointAction.reshard, str(reference), output=str(tmp_path / "whole"), files=3)
    reshard(asked)
    for name, weight in weights_of(tmp_path / "whole", 8).items():
        assert torch.equal(weight, every[-1][name]), name


def test_experts_start_from_a_dense_run(corpus: Path, megads: StartCommand) -> None:
    """Catches routers that are not initialized on some rank, a first loss that is not the dense model's, and experts of
    another width that are refused only after the start."""
    dense = {"model__bias": False, "model__mlp": "swiglu", "model__ffn_size": 32, "train__global_batch_size": 8}
    source = finished_run(megads, "dense", small_model(corpus, **dense, train__steps=2))
    begun = [*small_model(corpus, **dense, train__steps=1), f"checkpoint.init_from={source}"]
    same = finished_run(megads, "same", begun)
    experts = ["model.moe.num_experts=4", "parallel.dp=2", "parallel.ep=2"]
    upcycled = finished_run(megads, "upcycled", [*begun, *experts])
    assert steps_of(upcycled)[0]["loss"] == pytest.approx(steps_of(same)[0]["loss"], rel=1e-5)
    (event,) = events_of(upcycled, "init_from")
    assert event["adapted"] == ["model.moe.num_experts 0 -> 4: experts start as copies of the MLPs, routers at random"]
    refused = megads("train", *begun, *experts, "model.moe.expert_ffn_size=48", "run.id=other").end()
    assert refused.code == 2 and "model.moe.expert_ffn_size=32" in refused.err
