"""Tests which checkpoint is found, which ones are skipped and why."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import (
    CheckpointHandle,
    check_model,
    differing_keys,
    find_checkpoint,
    load_unsharded,
    open_checkpoint,
    read_into,
)
from megads.checkpoint.store import save_checkpoint
from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.model.config import LayerKind, ModelConfig, Position
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.runtime.distributed import open_control_plane
from tests.checkpoint.random_layouts import (
    MODEL,
    SHAPES,
    all_equal,
    global_tensors,
    random_layout,
    run_record,
    shards_of,
)
from tests.distributed import run_ranks
from tests.small_run import hot_model, model_config, write_run

FILE = "rank_00000.safetensors"
CPU = torch.device("cpu")


def save(run_dir: Path, step: int, world_size: int = 1) -> Path:
    shards = shards_of(random_layout(step, world_size)[open_control_plane().rank], global_tensors(step))
    return save_checkpoint(run_dir, shards, run_record(step), control=open_control_plane())


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def damage(folder: Path, kind: str) -> None:
    file = folder / FILE
    if kind == "flipped byte in a tensor":
        flip(file, -3)
    elif kind == "flipped byte in the header":
        flip(file, file.read_bytes().index(b"F32") + 1)
    elif kind == "truncated shard":
        file.write_bytes(file.read_bytes()[:-8])
    elif kind == "hole":
        size = file.stat().st_size
        with file.open("r+b") as hollow:
            hollow.truncate(size - 256)
            hollow.truncate(size)
    elif kind == "missing shard":
        file.unlink()
    elif kind == "missing manifest":
        (folder / "manifest.json").unlink()
    elif kind == "flipped byte in the manifest":
        flip(folder / "manifest.json", 500)


@pytest.mark.fault(7, 8, 9)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("flipped byte in a tensor", rf"{FILE}: \w+/\w at \[.*\] fails its checksum"),
        ("flipped byte in the header", rf"{FILE}: its header fails its checksum"),
        ("truncated shard", rf"{FILE} has \d+ bytes instead of \d+ \(it holds \w+/\w\)"),
        ("hole", rf"{FILE}: \w+/\w at \[.*\] fails its checksum"),
        ("missing shard", rf"{FILE}: No such file or directory \(it holds \w+/\w\)"),
        ("missing manifest", "manifest.json is missing: the checkpoint was never completed"),
        ("flipped byte in the manifest", "manifest.json: it"),
    ],
)
def test_damaged_checkpoint(kind: str, reason: str, tmp_path: Path) -> None:
    """Catches damage that torch and safetensors load silently, and a fallback that gives no reason."""
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    damage(folder, kind)
    with pytest.raises(CheckpointError, match=rf"checkpoint\.load = .*step_00000002 is not usable: .*{reason}"):
        find_checkpoint(tmp_path, str(folder))
    handle = find_checkpoint(tmp_path, "auto")
    assert handle is not None and handle.state == run_record(1).state
    [skipped] = handle.skipped
    assert skipped.startswith("step_00000002: ")
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000001")
    with pytest.raises(CheckpointError, match=r"is usable; checkpoint\.load=none starts afresh: step_00000002"):
        find_checkpoint(tmp_path, "auto")


def test_fresh_run(tmp_path: Path) -> None:
    """Catches a first start that fails, a partial folder accepted as a checkpoint, and a `none` that loads."""
    assert find_checkpoint(tmp_path, "auto") is None
    save(tmp_path, 1)
    assert find_checkpoint(tmp_path, "none") is None
    (tmp_path / "checkpoints" / "step_00000001").rename(tmp_path / "checkpoints" / ".step_00000001.partial")
    assert find_checkpoint(tmp_path, "auto") is None


@pytest.mark.parametrize("content", ["step_00000077\n", "", "\x00\x00"])
def test_latest_that_names_nothing(content: str, tmp_path: Path) -> None:
    """Catches a start that trusts `latest` more than the folders."""
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "latest").write_text(content)
    if content.startswith("step"):
        with pytest.raises(CheckpointError, match="step_00000077"):
            find_checkpoint(tmp_path / "other", str(tmp_path))
    handle = find_checkpoint(tmp_path, "auto")
    assert handle is not None and handle.state["step"] == 1


@pytest.mark.parametrize("content", ["step_00000009\n", "", "\x00\x00", None])
def test_a_run_means_what_it_committed_last(content: str | None, tmp_path: Path) -> None:
    """Catches a start from an older checkpoint than the last committed one because a kill came between its commit and
    the write of `latest`, or `latest` is damaged; one from the highest step, of a part of the run that was abandoned;
    and an older one that silently replaces the damaged one that `latest` names."""
    run_dir = tmp_path / "run"
    for step in (1, 9, 4):
        save(run_dir, step)
    folder = run_dir / "checkpoints"
    if content is None:
        (folder / "latest").unlink()
    else:
        (folder / "latest").write_text(content)
    before = sorted(path.name for path in folder.iterdir())
    shutil.copytree(folder, tmp_path / "copied")
    for path in (run_dir, folder, tmp_path / "copied"):
        handle = find_checkpoint(tmp_path / "other", str(path))
        assert handle is not None and handle.state["step"] == 4
    assert sorted(path.name for path in folder.iterdir()) == before
    damage(folder / "step_00000001", "flipped byte in the manifest")
    assert find_checkpoint(tmp_path / "other", str(run_dir)) is not None
    damage(folder / "step_00000009", "flipped byte in the manifest")
    if content and content.startswith("step"):
        with pytest.raises(CheckpointError, match="step_00000009"):
            find_checkpoint(tmp_path / "other", str(run_dir))


def test_given_path(tmp_path: Path) -> None:
    """Catches a path of a run, or of a moved checkpoint, that cannot be loaded, and a mistyped path read as no
    checkpoint."""
    first = save(tmp_path / "run", 1)
    save(tmp_path / "run", 2)
    shutil.copytree(first, tmp_path / "moved")
    for path, step in (
        (first, 1),
        (tmp_path / "run", 2),
        (tmp_path / "run" / "checkpoints", 2),
        (tmp_path / "moved", 1),
    ):
        handle = find_checkpoint(tmp_path / "other", str(path))
        assert handle is not None and handle.state["step"] == step
    with pytest.raises(CheckpointError, match="typo: there is no such folder"):
        find_checkpoint(tmp_path / "run", str(tmp_path / "typo"))


def test_opened_by_a_reader(tmp_path: Path) -> None:
    """Catches a path that is not resolved, a damaged checkpoint that is read, and errors that advise on training."""
    first, second = save(tmp_path / "run", 1), save(tmp_path / "run", 2)
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints", second):
        assert open_checkpoint(path).state["step"] == 2
    assert open_checkpoint(first).state["step"] == 1
    damage(second, "flipped byte in a tensor")
    handle = open_checkpoint(tmp_path / "run")
    assert handle.state["step"] == 1 and "fails its checksum" in handle.skipped[0]
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*step_00000002 is usable: .* fails its checksum"):
        open_checkpoint(second)
    with pytest.raises(CheckpointError, match="typo: there is no such folder"):
        open_checkpoint(tmp_path / "typo")
    for name in ("empty", "run/logs"):
        (tmp_path / name).mkdir()
        with pytest.raises(CheckpointError, match=f"{name} holds no checkpoint"):
            open_checkpoint(tmp_path / name)


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    """Catches a reader that restores a checkpoint that a training run is just replacing."""
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    before = sorted(path.name for path in folder.parent.iterdir())
    assert open_checkpoint(tmp_path).state["step"] == 1
    assert sorted(path.name for path in folder.parent.iterdir()) == before


@pytest.mark.parametrize("seed", range(20))
def test_reshard(seed: int, tmp_path: Path) -> None:
    """Catches a wrong slice on either side of the copy, in one to three dims, and wrong copies held by several
    ranks."""
    save(tmp_path, seed)
    handle = find_checkpoint(tmp_path, "auto")
    assert handle is not None
    shards = [shard for owned in random_layout(1000 + seed, 4) for shard in shards_of(owned)]
    copies = shards_of(random_layout(2000 + seed, 2)[0])
    read_into(handle, shards + copies)
    assert all_equal(shards + copies, global_tensors(seed))


def test_shards_that_are_not_stored(tmp_path: Path) -> None:
    """Catches weights left at their random initialization because a name or a shape does not match."""
    save(tmp_path, 1)
    handle = find_checkpoint(tmp_path, "auto")
    assert handle is not None
    tensor = global_tensors(0)["weight/b"]
    with pytest.raises(CheckpointError, match="holds no weight/new"):
        read_into(handle, [Shard("weight/new", (40,), (0,), tensor)])
    with pytest.raises(CheckpointError, match=r"weight/b has shape \[40\] there and \[50\] here"):
        read_into(handle, [Shard("weight/b", (50,), (0,), tensor)])
    with pytest.raises(CheckpointError, match=r"weight/b at \[10\] of shape \[40\]: 30 of 40 elements"):
        read_into(handle, [Shard("weight/b", SHAPES["weight/b"], (10,), tensor)])


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Catches weights loaded into another architecture, and a refusal of settings that may change during a run."""
    save(tmp_path, 1)
    handle = find_checkpoint(tmp_path, "auto")
    assert handle is not None
    check_model(handle, {**MODEL, "init_std": 0.1, "hidden_dropout": 0.1, "max_seq_len": 128, "ffn_size": 32})
    with pytest.raises(
        CheckpointError, match=r"another model \(model\.ffn_size: 32 there, 64 here; model\.num_layers: 2"
    ):
        check_model(handle, {**MODEL, "num_layers": 3, "ffn_size": 64})


def test_settings_of_later_versions_have_their_defaults() -> None:
    """Catches a run of an earlier version that cannot resume because its record lacks a key of rope_scaling."""
    older = {"kind": "linear", "factor": 2.0}
    rope = {
        "position": "rope",
        "rope_scaling": older,
        "layer_pattern": [{**asdict(LayerKind()), "rope_scaling": older}],
    }
    scaling = RopeScalingConfig(RopeScaling.linear, 2.0)
    now = ModelConfig(position=Position.rope, rope_scaling=scaling, layer_pattern=[LayerKind(rope_scaling=scaling)])
    assert differing_keys(rope, asdict(now)) == {}
    assert [*differing_keys(rope, asdict(replace(now, rope_scaling=RopeScalingConfig())))] == ["rope_scaling"]


def test_software_differences(tmp_path: Path) -> None:
    """Catches a software difference reported where nothing changed."""
    save(tmp_path, 1)
    handle = find_checkpoint(tmp_path, "auto")
    assert handle is not None and handle.software_differences() == []


def auto_by_rank(run_dir: Path) -> object:
    handle = find_checkpoint(run_dir, "auto", open_control_plane())
    assert handle is not None
    return handle.state["step"], handle.skipped


@pytest.mark.slow
@pytest.mark.fault(9)
@pytest.mark.distributed
def test_damage_seen_by_one_rank(tmp_path: Path) -> None:
    """Catches ranks that choose different checkpoints because each verifies only a share of the files."""
    run_ranks(save, 3, tmp_path, 1, 3)
    run_ranks(save, 3, tmp_path, 2, 3)
    flip(tmp_path / "checkpoints" / "step_00000002" / "rank_00002.safetensors", -1)
    results = run_ranks(auto_by_rank, 2, tmp_path)
    assert results[0] == results[1]
    step, [reason] = results[0]
    assert step == 1 and "rank_00002.safetensors: " in reason and "fails its checksum" in reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_checkpoint(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Catches a weight left uninitialized, an output head that is no longer tied, another shape, another rounding."""
    config = dataclasses.replace(model_config(Position.learned), tie_embeddings=tied)
    model = hot_model(config)
    loaded = load_unsharded(open_checkpoint(write_run(tmp_path, tmp_path / "none", model)), CPU, dtype)
    assert loaded.config == config and not loaded.training
    expected = {name: weight.to(dtype) for name, weight in model.parameters_by_name().items()}
    found = loaded.parameters_by_name()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (loaded.layers[-1].weight is loaded.layers[0].word.weight) is tied
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
    """Catches a traceback for a checkpoint of a later version, and missing weights that are not reported."""
    handle = open_checkpoint(write_run(tmp_path, tmp_path / "none", hot_model(ModelConfig(vocab_size=11))))
    record = RunRecord(**(dataclasses.asdict(handle.manifest.run) | {"model": handle.manifest.run.model | change}))
    changed = CheckpointHandle(handle.folder, dataclasses.replace(handle.manifest, run=record))
    with pytest.raises(CheckpointError, match=message):
        load_unsharded(changed, CPU, torch.float32)
