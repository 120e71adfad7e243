"""Replicas share one read of a checkpoint: the same bits, fewer bytes, and an error on every rank."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megads.checkpoint.read
from megads.checkpoint import shared_read
from megads.checkpoint.config import CheckpointRead
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.read import CheckpointHandle, find_checkpoint
from megads.checkpoint.shared_read import ReadReport, read_shards
from megads.checkpoint.store import save_checkpoint
from megads.engine.interface import TrainEngine
from megads.errors import CheckpointError
from megads.model.config import ModelConfig
from megads.model.moe_config import MoEConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.distributed import open_control_plane
from megads.tools.verify.layout import rank_batches
from tests.command import StartCommand, checkpoint_of, checksums, events_of, small_model, steps_of
from tests.distributed import run_ranks
from tests.parity import Scenario, build_engine

pytestmark = pytest.mark.distributed

MODEL = ModelConfig(num_layers=3, hidden_size=24, num_heads=6, vocab_size=101, max_seq_len=64)
SCENARIO = Scenario(model=MODEL, global_batch_size=8, micro_batch_size=1, seq_len=8, steps=1)
OF_EXPERTS = replace(SCENARIO, model=replace(MODEL, bias=False, moe=MoEConfig(num_experts=4, bias_rate=0.1)))
# Some tensors span many blocks, and some blocks hold many tensors.
BLOCK_BYTES = 1000


def layout(**changes: Any) -> ParallelConfig:
    return ParallelConfig(**changes)


def train_and_save(folder: Path, parallel: ParallelConfig) -> None:
    scenario = OF_EXPERTS if parallel.ep > 1 else SCENARIO
    engine = build_engine(scenario, parallel)
    engine.step(rank_batches(scenario, 0, engine.grid), scenario.lr)
    record = RunRecord({"step": 1, "samples": 8, "tokens": 64}, 1, "digest", {}, parallel.sizes)
    save_checkpoint(folder, engine.named_shards(), record, control=open_control_plane())


def held(engine: TrainEngine) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
    return [
        (shard.key, tuple(shard.offset), shard.tensor.detach().numpy().copy())
        for shard in engine.named_shards(owned=False)
    ]


@dataclass
class Loaded:
    """What a rank holds after each way of reading, and the read report."""

    tensors: dict[str, Any]
    read: dict[str, str]
    replicas: dict[str, int]
    read_bytes: dict[str, int]


def load_each_way(folder: Path, parallel: ParallelConfig) -> Loaded:
    shared_read.BLOCK_BYTES = BLOCK_BYTES
    control, loaded = open_control_plane(), Loaded({}, {}, {}, {})
    handle = find_checkpoint(folder, "auto", control)
    assert handle is not None
    for how in (CheckpointRead.all, CheckpointRead.one):
        engine = build_engine(OF_EXPERTS if parallel.ep > 1 else SCENARIO, parallel)
        report = load(handle, engine, how)
        loaded.tensors[how] = held(engine)
        loaded.read[how], loaded.replicas[how], loaded.read_bytes[how] = report.read, report.replicas, report.read_bytes
    return loaded


def load(handle: CheckpointHandle, engine: TrainEngine, how: CheckpointRead) -> ReadReport:
    """Loads the state as a start does."""
    reports: list[ReadReport] = []
    engine.load_shards(lambda shards: reports.append(read_shards(handle, shards, engine.grid, how)), 1)
    return reports[0]


@pytest.mark.quick("tp2-tp2dp2")
@pytest.mark.parametrize(
    ("saved", "loaded", "replicas"),
    [
        pytest.param(layout(dp=2, zero_stage=0), layout(dp=4, zero_stage=0), 4, id="dp2-dp4"),
        pytest.param(layout(tp=2), layout(tp=2, dp=2, zero_stage=0), 2, id="tp2-tp2dp2"),
        pytest.param(layout(dp=4, zero_stage=1), layout(pp=2, dp=2, zero_stage=0), 2, id="dp4zero1-pp2dp2"),
        pytest.param(layout(pp=2), layout(cp=2, dp=2, zero_stage=0), 4, id="pp2-cp2dp2"),
        pytest.param(layout(tp=3), layout(dp=2, zero_stage=1), 1, id="tp3-dp2zero1"),
        pytest.param(layout(dp=2), layout(dp=4, zero_stage=3, zero_shard_size=2), 2, id="dp2-dp4zero3of2"),
        pytest.param(layout(dp=1), layout(dp=2, zero_stage=3), 1, id="dp1-dp2zero3"),
        pytest.param(layout(dp=2, ep=2), layout(dp=4, ep=2, zero_stage=0), 2, id="ep2-ep2dp2"),
    ],
)
def test_the_same_bits_of_fewer_bytes(
    saved: ParallelConfig, loaded: ParallelConfig, replicas: int, tmp_path: Path
) -> None:
    """Catches a wrong offset in a block, a block of another group's rank, ranks that wait for a broadcast that others
    do not issue, and replicas that also read what they receive."""
    run_ranks(train_and_save, saved.world_size, tmp_path, saved)
    ranks = run_ranks(load_each_way, loaded.world_size, tmp_path, loaded)
    for rank in ranks:
        for one, other in zip(rank.tensors["all"], rank.tensors["one"], strict=True):
            assert one[:2] == other[:2] and one[2].tobytes() == other[2].tobytes(), one[:2]
        assert any(values.any() for key, _, values in rank.tensors["one"] if key.startswith("exp_avg/"))
        assert rank.read == {"all": "all", "one": "one" if replicas > 1 else "all"}
        assert rank.replicas == {"all": 1, "one": replicas}
        assert rank.read_bytes["all"] == replicas * rank.read_bytes["one"]


def load_automatically(folder: Path) -> list[str]:
    handle = find_checkpoint(folder, "auto", open_control_plane())
    assert handle is not None
    engine = build_engine(SCENARIO, layout(dp=2, zero_stage=0))
    found = list[str]()
    for ranks_per_node in ("1", "2"):
        os.environ["LOCAL_WORLD_SIZE"] = ranks_per_node
        found.append(load(handle, engine, CheckpointRead.auto).read)
    return found


def test_auto_depends_on_nodes(tmp_path: Path) -> None:
    """Catches replicas on one node that wait for broadcasts although its page cache serves them, and nodes that all
    read the same bytes."""
    run_ranks(train_and_save, 1, tmp_path, layout())
    assert run_ranks(load_automatically, 2, tmp_path) == [["one", "all"]] * 2


def load_damaged(folder: Path, kind: str) -> tuple[int, str]:
    """Lets a read fail on rank 2 after the verification; returns the number of reads, and the error."""
    shared_read.BLOCK_BYTES = BLOCK_BYTES
    control = open_control_plane()
    handle = find_checkpoint(folder, "auto", control)
    assert handle is not None
    engine = build_engine(SCENARIO, layout(pp=2, dp=2, zero_stage=0))
    inner = megads.checkpoint.read.read_into
    calls = list[str]()

    def read_into(handle: CheckpointHandle, shards: Any, rank: int = 0) -> int:
        calls.append(shards[0].key)
        if rank == 2 and len(calls) == 3:
            if kind == "file":
                raise CheckpointError(f"{handle.folder}/rank_00001.safetensors cannot be read: gone")
            raise MemoryError("no memory is left")
        return inner(handle, shards, rank)

    vars(shared_read)["read_into"] = read_into
    try:
        load(handle, engine, CheckpointRead.one)
    except CheckpointError as error:
        # No rank hangs: another collective works.
        return sum(control.gather(len(calls), int)), str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.quick("file")
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_a_reader_that_fails(kind: str, tmp_path: Path) -> None:
    """Catches ranks that hang on a block that cannot be read, that load it anyway, or that blame another rank."""
    run_ranks(train_and_save, 2, tmp_path, layout(dp=2))
    ranks = run_ranks(load_damaged, 4, tmp_path, kind)
    reason = "rank_00001.safetensors cannot be read: gone" if kind == "file" else "no memory is left"
    for _, message in ranks:
        assert message.startswith("rank 2: ") and reason in message and "rank 0" not in message.split(": ")[0]
    assert len({message for _, message in ranks}) == 1


def test_a_missing_file(tmp_path: Path) -> None:
    """Catches an error for a missing file that is raised only on the rank that reads it."""
    run_ranks(train_and_save, 2, tmp_path, layout(dp=2))
    for error in run_ranks(load_without_a_file, 2, tmp_path):
        assert "rank_00001.safetensors" in error


def load_without_a_file(folder: Path) -> str:
    control = open_control_plane()
    handle = find_checkpoint(folder, "auto", control)
    assert handle is not None
    control.barrier()
    (handle.folder / "rank_00001.safetensors").unlink(missing_ok=True)
    control.barrier()
    engine = build_engine(SCENARIO, layout(dp=2, zero_stage=0))
    with pytest.raises(CheckpointError) as raised:
        load(handle, engine, CheckpointRead.one)
    return str(raised.value)


@pytest.mark.slow
def test_a_run_goes_on_the_same_way(corpus: Path, megads: StartCommand) -> None:
    """Catches checkpoint.read that the command ignores, and a resumed run whose bits depend on it."""
    common = small_model(corpus, parallel__dp=2, parallel__zero_stage=0, checkpoint__every_steps=2)
    results = []

    def train(steps: int, run_dir: Path, how: str) -> None:
        changes = (f"train.steps={steps}", f"run.dir={run_dir}", f"checkpoint.read={how}")
        ended = megads("train", *common, *changes).end()
        assert ended.code == 0, ended.err

    train(2, megads.folder / "all", "all")
    shutil.copytree(megads.folder / "all", megads.folder / "one")
    for how, replicas in (("all", 1), ("one", 2)):
        run_dir = megads.folder / how
        train(4, run_dir, how)
        results.append((steps_of(run_dir), checksums(checkpoint_of(run_dir, 4))))
        [event] = events_of(run_dir, "checkpoint_read")
        assert (event["read"], event["replicas"]) == (how, replicas)
    assert results[0] == results[1]
