"""`megads checkpoint`, on runs with real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.cli.checkpoint import run
from megads.cli.verb import Invocation
from megads.errors import CheckpointError, ConfigError
from megads.model.gpt import GPT
from megads.tools.checkpoints.command import average
from megads.tools.checkpoints.config import CheckpointAction, CheckpointActionConfig
from tests.small_run import model_config, write_dataset, write_run

STEPS = (1, 2, 5)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with three checkpoints of different weights."""
    prefix = write_dataset(tmp_path / "data")
    for step in STEPS:
        write_run(tmp_path / "run", prefix, model_of(step), step)
    lines = [{"step": 2, "loss": 3.25}, {"step": 2, "valid/held_out/loss": 3.5}, {"step": 5, "loss": 3.0}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "run"


def model_of(step: int) -> GPT:
    return GPT(model_config(), 0, lambda name, shape: torch.full(shape, float(step)) + torch.rand(shape) * 0.01)


def do(action: CheckpointAction, run_dir: Path, **keys: object) -> int:
    return run(CheckpointActionConfig(action, str(run_dir), **keys), Invocation({}, set()))


def damage(run_dir: Path, step: int) -> None:
    (path,) = (run_dir / "checkpoints" / f"step_{step:08d}").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


@pytest.mark.always
def test_list(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches losses of another step, and one unreadable manifest that hides the other checkpoints."""
    (run_dir / "checkpoints" / "step_00000001" / "manifest.json").write_text("{")
    assert do(CheckpointAction.list, run_dir) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines() if line.strip()]
    rows = {line[0]: line for line in lines if line[0].isdigit()}
    assert rows["2"][:5] == ["2", "16", "200", "3.2500", "3.5000"] and "newest" not in rows["2"]
    assert rows["5"][:4] == ["5", "40", "500", "3.0000"] and rows["5"][-1] == "newest"
    assert "step_00000001/manifest.json" in out
    assert rows["1"] == ["1", "not", "usable"]


def test_list_says_why(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a checkpoint without the reason why it is kept, and a best one by another validation set's losses."""
    write_run(run_dir, run_dir.parent / "data" / "corpus", model_of(7), 7)
    with (run_dir / "config.yaml").open("a") as file:
        file.write("checkpoint: {every_steps: 1, keep: 2, keep_every: 2, keep_best: 1, best_by: web}\n")
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step, loss in {1: 3.0, 2: 3.5, 7: 3.25}.items():
            file.write(json.dumps({"step": step, "valid/web/loss": loss, "valid/held_out/loss": -step}) + "\n")
    assert do(CheckpointAction.list, run_dir) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if ":" in line]
    assert {line[0]: line[-1] for line in lines} == {"1": "best", "2": "every", "5": "recent", "7": "newest"}


@pytest.mark.always
def test_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a flipped bit that is reported as sound, and a damaged checkpoint that ends the check of the others."""
    assert do(CheckpointAction.verify, run_dir) == 0
    assert capsys.readouterr().out.count(": sound: ") == 3
    damage(run_dir, 2)
    assert do(CheckpointAction.verify, run_dir) == 4
    first, second, third = capsys.readouterr().out.splitlines()
    assert "sound" in first and "step_00000002: damaged: " in second and "checksum" in second and "sound" in third
    assert do(CheckpointAction.verify, run_dir, steps=[1, 5]) == 0
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3; it has 1, 2, 5"):
        do(CheckpointAction.verify, run_dir, steps=3)


@pytest.mark.always
def test_average(run_dir: Path, tmp_path: Path) -> None:
    """Catches an average of the wrong checkpoints, one that is rounded, and a result that cannot be loaded."""
    models = {step: load_unsharded(open_checkpoint(folder), torch.device("cpu"), torch.float32) for step, folder in (
        (step, run_dir / "checkpoints" / f"step_{step:08d}") for step in STEPS
    )}  # fmt: skip
    (run_dir / "hugging_face").mkdir()
    (run_dir / "hugging_face" / "tokenizer_config.json").write_text("{}")
    for keys, steps in (
        ({}, STEPS),
        ({"last": 2}, (2, 5)),
        ({"steps": [1, 5]}, (1, 5)),
        ({"steps": ["1", "5"]}, (1, 5)),
    ):
        config = CheckpointActionConfig(
            CheckpointAction.average, str(run_dir), output=str(tmp_path / "mean"), overwrite=True, **keys
        )
        made = average(config)
        assert made.steps == steps
        assert (made.folder / "hugging_face" / "tokenizer_config.json").read_text() == "{}"
        mean = load_unsharded(open_checkpoint(made.folder), torch.device("cpu"), torch.float32).parameters_by_name()
        for name, weight in mean.items():
            wanted = torch.stack([models[step].parameters_by_name()[name].double() for step in steps]).mean(0)
            assert torch.equal(weight, wanted.float()), name


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"action": CheckpointAction.average}, "average needs output=<folder>"),
        ({"action": CheckpointAction.list, "output": "x"}, "list writes nothing: leave output=x out"),
        ({"action": CheckpointAction.verify, "steps": "all"}, "steps = 'all': want numbers"),
        ({"action": CheckpointAction.verify, "steps": [1, 1]}, r"steps = \[1, 1\]: want numbers, each once"),
        ({"action": CheckpointAction.average, "output": "x", "last": 0}, "last = 0: must be at least 1"),
    ],
)
def test_bad_keys(keys: dict[str, object], told: str) -> None:
    """Catches keys that are silently ignored."""
    with pytest.raises(ConfigError, match=told):
        CheckpointActionConfig(run="run", **keys).check()  # type: ignore[arg-type]


def test_nothing_half_made(run_dir: Path, tmp_path: Path) -> None:
    """Catches an average that includes a damaged checkpoint, and one that overwrites another folder."""
    damage(run_dir, 5)
    config = CheckpointActionConfig(CheckpointAction.average, str(run_dir), output=str(tmp_path / "mean"))
    with pytest.raises(CheckpointError, match="checksum"):
        average(config)
    assert not (tmp_path / "mean").exists()
    config.output, config.overwrite = str(run_dir), True
    with pytest.raises(ConfigError, match="was not created by megads checkpoint average"):
        average(config)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        do(CheckpointAction.list, tmp_path / "nothing")
