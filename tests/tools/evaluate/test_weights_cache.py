"""Tests checkpoints cached in a node's memory: read once, mapped by all workers, removed when unused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megads.batch import BatchInfo
from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.read import load_unsharded, open_checkpoint
from megads.errors import CheckpointError
from megads.tools.evaluate.weights_cache import NodeWeightsCache, cached_name
from tests.small_run import hot_model, model_config, write_dataset, write_run

CPU, FP32 = torch.device("cpu"), torch.float32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    prefix = write_dataset(folder / "data")
    for step in (1, 2, 3):
        model = hot_model(model_config())
        with torch.no_grad():
            next(iter(model.parameters())).mul_(step)
        write_run(folder / "run", prefix, model, step)
    return sorted((folder / "run" / "checkpoints").glob("step_*"))


def name_of(checkpoint: Path, dtype: torch.dtype = FP32) -> str:
    return cached_name(read_manifest(checkpoint).digest(), dtype)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
def test_one_reads_and_all_map(checkpoints: list[Path], tmp_path: Path, dtype: torch.dtype) -> None:
    """Catches a second read of a checkpoint, weights that differ from those of an uncached load, and a copy of them in
    every worker."""
    first, second = (NodeWeightsCache(tmp_path, Path("evaluation")) for _ in range(2))
    name = name_of(checkpoints[1], dtype)
    loaded = [cache.load(checkpoints[1], name, CPU, dtype) for cache in (first, second)]
    assert [read for _, read in loaded] == [True, False]
    assert first.cached() == {name}
    alone = load_unsharded(open_checkpoint(checkpoints[1]), CPU, dtype)
    tokens_bs = torch.arange(12).reshape(2, 6)
    info = BatchInfo(torch.zeros(2, dtype=torch.int64))
    for model, _ in loaded:
        assert torch.equal(model(tokens_bs, info), alone(tokens_bs, info))
        mine, theirs = model.parameters_by_name(), alone.parameters_by_name()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
        # Kernels may sum in another order if weights are less aligned than torch's own.
        assert all(weight.data_ptr() % 64 == 0 for weight in mine.values())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{name}.weights" in line]
    assert len(mapped) == 2
    for cache in (first, second):
        cache.close()
    assert not first.folder.exists()


def test_memory_is_bounded(checkpoints: list[Path], tmp_path: Path) -> None:
    """Catches a checkpoint that is removed while a worker maps it, and memory above the limit."""
    cache = NodeWeightsCache(tmp_path, Path("evaluation"), most_bytes=1 << 40)
    names = [name_of(checkpoint) for checkpoint in checkpoints]
    cache.load(checkpoints[0], names[0], CPU, FP32)
    size = (cache.folder / f"{names[0]}.weights").stat().st_size
    first, second = (NodeWeightsCache(tmp_path, Path("evaluation"), most_bytes=2 * size) for _ in range(2))
    cache.close()
    first.load(checkpoints[1], names[1], CPU, FP32)
    second.load(checkpoints[2], names[2], CPU, FP32)
    assert first.cached() == set(names[1:]), "the one that nobody maps went"
    third = NodeWeightsCache(tmp_path, Path("evaluation"), most_bytes=2 * size)
    _, read = third.load(checkpoints[0], names[0], CPU, FP32)
    assert read and first.cached() == set(names[1:])
    for one in (first, second, third):
        one.close()


def test_what_was_killed_is_cleaned_up(checkpoints: list[Path], tmp_path: Path) -> None:
    """Catches a partial checkpoint used as a complete one, and memory of a killed evaluation that is never freed."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        cache = NodeWeightsCache(tmp_path, Path("killed"))
        cache.load(checkpoints[0], name_of(checkpoints[0]), CPU, FP32)
        (cache.folder / f"{name_of(checkpoints[1])}.partial").write_bytes(b"half")
        os.write(write, b"x")
        os._exit(9)
    os.read(read, 1)
    os.waitpid(child, 0)
    (left,) = tmp_path.glob("megads-evaluate-*")
    assert len(list(left.glob("*.weights"))) == 1
    again = NodeWeightsCache(tmp_path, Path("another"))
    assert not left.exists() and again.folder.exists()
    (again.folder / f"{name_of(checkpoints[1])}.partial").write_bytes(b"half")
    again.load(checkpoints[1], name_of(checkpoints[1]), CPU, FP32)
    assert again.cached() == {name_of(checkpoints[1])}
    again.close()
    assert not list(tmp_path.glob("megads-evaluate-*"))


def test_a_damaged_checkpoint_is_not_cached(checkpoints: list[Path], tmp_path: Path) -> None:
    """Catches cached weights that were not verified."""
    (file,) = checkpoints[2].glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    cache = NodeWeightsCache(tmp_path, Path("evaluation"))
    with pytest.raises(CheckpointError, match="checksum"):
        cache.load(checkpoints[2], name_of(checkpoints[2]), CPU, FP32)
    assert cache.cached() == set()
    cache.close()
