"""The whole model of a checkpoint; layouts are tested with real trainings in tests/tools/test_generate.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import CheckpointHandle, open_checkpoint
from megads.checkpoint.unsharded import load_unsharded
from megads.errors import CheckpointError
from megads.model.config import ModelConfig, Position
from tests.small_run import hot_model, model_config, write_run

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_checkpoint(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches a weight that stays uninitialised, a head that is no longer tied, another shape, another rounding."""
    config = dataclasses.replace(model_config(Position.learned), tie_embeddings=tied)
    model = hot_model(config)
    loaded = load_unsharded(open_checkpoint(write_run(tmp_path, tmp_path / "none", model)), CPU, dtype)
    assert loaded.config == config and not loaded.training
    expected = {name: weight.to(dtype) for name, weight in model.parameters_by_name().items()}
    found = loaded.parameters_by_name()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (loaded.stages[-1].weight is loaded.stages[0].word.weight) is tied
    assert not any(weight.requires_grad for weight in loaded.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 8}, "cannot build .*experts.*use the version that wrote it"),
        ({"position": "sinusoidal"}, "cannot build"),
        ({"num_layers": 3}, "holds no weight/blocks.2"),
    ],
)
def test_another_model(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """Catches a traceback for a checkpoint of a later version, and weights that are missing."""
    handle = open_checkpoint(write_run(tmp_path, tmp_path / "none", hot_model(ModelConfig(vocab_size=11))))
    record = RunRecord(**(dataclasses.asdict(handle.manifest.run) | {"model": handle.manifest.run.model | change}))
    changed = CheckpointHandle(handle.folder, dataclasses.replace(handle.manifest, run=record))
    with pytest.raises(CheckpointError, match=message):
        load_unsharded(changed, CPU, torch.float32)
