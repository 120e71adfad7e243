"""Evaluations at other sequence lengths than the training's, and losses by position."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megads.batch import BatchInfo
from megads.checkpoint.read import open_checkpoint
from megads.config.frozen import freeze
from megads.config.root import RootConfig
from megads.data.config import DatasetConfig
from megads.errors import EXIT_OK, ConfigError
from megads.evaluate.config import WeightPrecision
from megads.model.config import LayerKind, ModelConfig, Position
from megads.model.gpt import GPT, token_losses
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.parallel.grid import build_grid
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.tools.evaluate.command import evaluate
from megads.tools.evaluate.config import EvaluateConfig, EvaluationLayoutConfig
from megads.tools.evaluate.job import evaluated_model, load_layout, load_unsharded_model, measure_validation
from megads.tools.generate import checkpoint_tokenizer
from tests.distributed import run_ranks
from tests.small_run import TEXTS, hot_model, model_config, write_dataset, write_run

ROPE = {"position": Position.rope, "rope_theta": 100.0}
LONG = "".join(TEXTS[:4])
"""A document of more than twice as many tokens as the models read in training."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with a dataset and a long text; the working directory."""
    monkeypatch.chdir(tmp_path)
    write_dataset(tmp_path / "data")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": LONG}) + "\n")
    return tmp_path


def write(folder: Path, model: ModelConfig) -> GPT:
    """Writes a run with a checkpoint of a model; returns the model."""
    made = hot_model(model)
    run = write_run(folder / "run", folder / "data" / "corpus", made)
    EventWriter(run).write("start")
    config = RootConfig(model=model)
    config.train.steps, config.train.seq_len, config.train.global_batch_size = 3, 16, 2
    config.data.train, config.data.split = [DatasetConfig(path=str(folder / "data" / "corpus"))], [0.6, 0.4]
    freeze(config, run / "config.yaml")
    return made


def config(**changes: Any) -> EvaluateConfig:
    given: dict[str, Any] = {"run": "run", "device": "cpu", "precision": WeightPrecision.fp32, "batch_size": 2}
    return EvaluateConfig(**(given | changes))


def measured(folder: Path) -> dict[str, Any]:
    """Content of the only results file."""
    (path,) = folder.glob("run/evaluation/step_*/perplexity_*.json")
    content: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return content


def ids_of_long_text() -> list[int]:
    found = checkpoint_tokenizer(open_checkpoint(Path("run")))
    assert found.end_of_document_id is not None
    return [found.end_of_document_id, *found.tokenizer.encode(LONG).ids]


def losses_of(model: GPT, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]]), BatchInfo(torch.zeros(1, dtype=torch.int64)))
    return token_losses(logits, torch.tensor([ids[1:]]))[0].double()


def test_a_text_is_read_beyond_the_trained_length_and_measured_by_position(folder: Path) -> None:
    """Catches windows of the trained length, a loss at the position beside its own, ranges that overlap or leave
    tokens out, and results under the names of those at the trained length."""
    model = write(folder, model_config())
    ids = ids_of_long_text()
    assert 64 < len(ids) - 1 < 256
    assert evaluate(config(data=["long.jsonl"], seq_len=256)) == EXIT_OK
    content = measured(folder)
    assert content["settings"] == {"seq_len": 256}
    (values,) = content["sets"].values()
    losses, first = losses_of(model, ids), 0
    for one in values["by_position"]:
        part = losses[first : one["last"] + 1]
        assert (one["first"], one["tokens"]) == (first, len(part))
        assert one["loss"] == pytest.approx(float(part.mean()), rel=1e-5)
        assert one["last"] in (2 * first - 1, 0, len(losses) - 1, 255)
        first = one["last"] + 1
    assert sum(one["tokens"] for one in values["by_position"]) == values["tokens"] == len(losses)
    assert values["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    *_, event = read_json_lines(folder / "run" / "events.jsonl")
    assert event["results"]["long.jsonl at 256 tokens/loss"] == values["loss"]
    evaluate(config(data=["long.jsonl"]))
    (windows,) = measured(folder)["sets"].values()
    assert windows["by_position"][-1]["last"] == 31 and windows["loss"] != values["loss"]
    assert windows["tokens"] == values["tokens"]


def test_rope_may_be_scaled_as_a_model_of_that_config_would_be(folder: Path) -> None:
    """Catches a scaling that is ignored, applied with another original length or factor, or kept in the checkpoint."""
    write(folder, model_config(**ROPE))
    ids = ids_of_long_text()
    evaluate(config(data=["long.jsonl"], seq_len=128, rope_scaling={"kind": "yarn"}))
    content = measured(folder)
    scaling = RopeScalingConfig(RopeScaling.yarn, 4.0, 32)
    assert content["settings"]["rope_scaling"]["original_max_seq_len"] == 32
    wanted = losses_of(hot_model(model_config(**ROPE, rope_scaling=scaling)), ids[:129])
    (values,) = content["sets"].values()
    first = [one for one in values["by_position"] if one["last"] < 32]
    assert [one["loss"] for one in first] == pytest.approx(
        [float(wanted[one["first"] : one["last"] + 1].mean()) for one in first], rel=1e-5
    )
    plain = losses_of(hot_model(model_config(**ROPE)), ids[:129])
    assert not torch.allclose(plain[:32], wanted[:32], rtol=1e-3)
    evaluate(config(data=["long.jsonl"], seq_len=128, rope_theta=1e4))
    other = losses_of(hot_model(model_config(**(ROPE | {"rope_theta": 1e4}))), ids[:129])
    (values,) = measured(folder)["sets"].values()
    assert values["by_position"][2]["loss"] == pytest.approx(float(other[2:4].mean()), rel=1e-5)


def sums_in_layout(sizes: dict[str, int], seq_len: int) -> dict[str, Any]:
    """The validation sets on one rank of a layout, or in one process."""
    asked = config(layout=EvaluationLayoutConfig(**sizes), seq_len=seq_len, rope_scaling={"kind": "yarn"})
    if not sizes:
        handle = open_checkpoint(Path("run"))
        scorer = load_unsharded_model(asked, handle)
    else:
        grid = build_grid(asked.layout.parallel, dist.get_rank(), dist.get_world_size())
        handle = open_checkpoint(Path("run"), grid.control)
        scorer = load_layout(asked, handle, grid, torch.device("cpu"))
    return measure_validation(Path("run"), scorer, checkpoint_tokenizer(handle), None, seq_len)


def sums_at(folder: str, sizes: dict[str, int], seq_len: int) -> dict[str, Any]:
    import os

    os.chdir(folder)
    return sums_in_layout(sizes, seq_len)


@pytest.mark.distributed
@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp"])
def test_losses_by_position_are_the_same_in_every_layout(axis: str, folder: Path) -> None:
    """Catches positions of a context-parallel rank's own tokens, masked windows that count, a stage without the losses,
    and ranks without the override."""
    write(folder, model_config(**ROPE))
    alone = sums_in_layout({}, 48)
    (name,) = alone
    assert alone[name]["by_position"][-1]["last"] == 47
    for found in run_ranks(sums_at, 2, str(folder), {axis: 2}, 48):
        assert found[name]["tokens"] == alone[name]["tokens"] and found[name]["bytes"] == alone[name]["bytes"]
        for ours, wanted in zip(found[name]["by_position"], alone[name]["by_position"], strict=True):
            assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert (ours["first"], ours["last"], ours["tokens"]) == (wanted["first"], wanted["last"], wanted["tokens"])


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"position": Position.learned}, {"seq_len": 64}, "seq_len = 64 exceeds the 32 learned positions"),
    (
        {},
        {"rope_scaling": {"kind": "yarn"}},
        "rope_scaling.kind = yarn has no effect, as model.position = alibi",
    ),
    ({}, {"rope_theta": 1e6}, "rope_theta = 1000000.0 has no effect"),
    (ROPE, {"rope_scaling": {"kind": "yarm"}}, "rope_scaling.kind"),
    (ROPE, {"rope_scaling": {"factor": 0.5}}, "rope_scaling.factor = 0.5"),
    (ROPE | {"layer_pattern": [LayerKind(rope_theta=50.0)]}, {"rope_theta": 1e6}, "every rotary layer .* its own"),
    (ROPE, {"rope_scaling": {"kind": "yarn", "original_max_seq_len": 0}}, "original_max_seq_len = 0"),
    ({}, {"seq_len": 1}, "seq_len = 1: must be at least 2"),
    ({}, {"seq_len": 64, "workers": 1, "tasks": ["choose"]}, "seq_len = 64: a coordinator evaluates checkpoints as"),
]


@pytest.mark.parametrize(("model", "changes", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_set_is_refused(model: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    """Catches a traceback, and settings that would silently have no effect."""
    asked = config(**changes)
    with pytest.raises(ConfigError, match=said):
        asked.check()
        evaluated_model(asked, model_config(**model))


def test_a_checkpoints_own_scaling_stays_unless_set() -> None:
    """Catches a kind of the checkpoint that gets another original length, and other keys that fall to their
    defaults."""
    own = RopeScalingConfig(RopeScaling.yarn, 2.0, 16, beta_fast=20.0)
    model = model_config(**ROPE, rope_scaling=own)
    assert evaluated_model(config(seq_len=64), model) == model
    wider = evaluated_model(config(rope_scaling={"factor": 4}), model)
    assert wider.rope_scaling == replace(own, factor=4.0)
