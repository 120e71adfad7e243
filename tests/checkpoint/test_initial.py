"""Initial weights for a new run: which checkpoint is used, and which models it fits."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megads.checkpoint.config import CheckpointConfig
from megads.checkpoint.initial import WeightSource, find_source, open_source
from megads.checkpoint.manifest import MANIFEST_FILE, RunRecord
from megads.checkpoint.read import CheckpointHandle, open_checkpoint
from megads.errors import CheckpointError, ConfigError
from megads.model.config import LayerKind, ModelConfig, NormKind, Position
from megads.runtime.distributed import ALONE
from tests.checkpoint.test_read import damage, save


def source_of(model: ModelConfig, folder: Path) -> WeightSource:
    """A checkpoint whose record names this model."""
    handle = open_checkpoint(save(folder, 1))
    known = json.loads(json.dumps(dataclasses.asdict(model)))
    run = RunRecord(**(dataclasses.asdict(handle.manifest.run) | {"model": known}))
    return WeightSource("pre", CheckpointHandle(handle.folder, dataclasses.replace(handle.manifest, run=run)))


def test_a_run_means_its_newest_intact_checkpoint_and_a_checkpoint_itself(tmp_path: Path) -> None:
    """Catches a damaged checkpoint that is silently replaced by another one although it was named, one that prevents a
    start from the run's other checkpoints, and an error that does not name the key."""
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert find_source(str(tmp_path)).step == open_source(str(tmp_path), ALONE).step == 2
    assert find_source(str(first)).step == open_source(str(first), ALONE).step == 1
    damage(second, "flipped byte in a tensor")
    passed = open_source(str(tmp_path), ALONE)
    assert passed.step == 1 and "step_00000002: " in str(passed) and "fails its checksum" in str(passed)
    with pytest.raises(CheckpointError, match=r"checkpoint\.init_from = .*step_00000002: .* fails its checksum"):
        open_source(str(second), ALONE)
    (second / MANIFEST_FILE).write_text("{")
    assert find_source(str(tmp_path)).step == 1 and "is damaged" in str(find_source(str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"checkpoint\.init_from = .*step_00000002: no checkpoint .* is damaged"):
        find_source(str(second))
    shutil.rmtree(first)
    for path, reason in ((tmp_path, "is damaged"), (tmp_path / "typo", "there is no such folder")):
        with pytest.raises(CheckpointError, match=rf"checkpoint\.init_from = {path}.*{reason}"):
            find_source(str(path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 96}, "model.hidden_size: 64 there, 96 here"),
        ({"num_layers": 3}, "model.num_layers: 2 there, 3 here"),
        ({"num_heads": 2}, "model.num_heads: 4 there, 2 here"),
        ({"vocab_size": 600}, "model.vocab_size: 512 there, 600 here"),
        ({"tie_embeddings": False}, "model.tie_embeddings: true there, false here"),
        ({"embedding_norm": False}, "model.embedding_norm: true there, false here"),
        ({"position": Position.rope}, "model.position: alibi there, rope here"),
        ({"norm": NormKind.rmsnorm}, "model.norm: layernorm there, rmsnorm here"),
        ({"bias": False}, "model.bias: true there, false here"),
        ({"norm_eps": 1e-6}, "model.norm_eps: 1e-05 there, 1e-06 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_shape_or_other_parts_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Catches weights that are loaded into another model, which shapes alone do not always reveal."""
    source = source_of(ModelConfig(), tmp_path)
    with pytest.raises(ConfigError, match="is of another model") as refused:
        source.check_model(dataclasses.replace(ModelConfig(), **change))
    key, value = named.removeprefix("model.").split(" there")[0].split(": ")
    assert named in str(refused.value) and f"model.{key}={value.lower()}" in str(refused.value)


def test_what_no_weight_has_the_shape_of_may_change(tmp_path: Path) -> None:
    """Catches dropout, lengths and kernels that prevent a start from the weights, and attention settings that change
    silently."""
    source = source_of(ModelConfig(position=Position.rope), tmp_path)
    same = ModelConfig(position=Position.rope, max_seq_len=8192, hidden_dropout=0.1, ffn_size=256, num_kv_heads=4)
    assert source.check_model(same) == []
    longer = dataclasses.replace(same, rope_theta=500_000.0, window=128, vocab_size=None)
    assert source.check_model(longer) == ["model.rope_theta 10000.0 -> 500000.0", "model.window null -> 128"]
    [told] = source.check_model(
        dataclasses.replace(same, layer_pattern=[LayerKind(rope_theta=1e6), LayerKind(window=0)])
    )
    assert told == "model.layer_pattern [] -> [{layers: 1, rope_theta: 1000000.0}, {layers: 1, window: 0}]"
    assert source.check_model(dataclasses.replace(same, qkv_bias=True, mlp_bias=True)) == [], "as model.bias says"
    with pytest.raises(ConfigError, match=r"model\.qkv_bias"):
        source.check_model(dataclasses.replace(same, qkv_bias=False))
    learned = source_of(ModelConfig(position=Position.learned), tmp_path / "learned")
    with pytest.raises(ConfigError, match=r"model\.max_seq_len: 2048 there, 64 here"):
        learned.check_model(ModelConfig(position=Position.learned, max_seq_len=64))


def test_one_checkpoint_to_start_from() -> None:
    """Catches a start that leaves open whether the optimizer state is loaded."""
    CheckpointConfig(load="none", init_from="runs/pre").check()
    CheckpointConfig(load="runs/pre").check()
    with pytest.raises(ConfigError, match=r"checkpoint\.load = a and checkpoint\.init_from = b are both set"):
        CheckpointConfig(load="a", init_from="b").check()
    with pytest.raises(ConfigError, match=r"checkpoint\.init_from is empty"):
        CheckpointConfig(init_from="").check()
