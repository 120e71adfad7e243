"""Checkpoints of several files, each made in milliseconds, and which of them a run would load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megads.checkpoint.read import find_checkpoint, read_into
from megads.checkpoint.store import save_parts
from megads.engine.interface import Shard
from megads.runtime.metrics import MetricsWriter
from tests.checkpoint.random_layouts import run_record

FILES = 3


def values(seed: int) -> list[Shard]:
    draw = torch.Generator().manual_seed(seed)
    return [Shard(f"weight/w{i}", (40, 8), (0, 0), torch.randn(40, 8, generator=draw)) for i in range(FILES)]


def write_checkpoint(run_dir: Path, step: int, seed: int | None = None) -> Path:
    """Writes a checkpoint of three files, after a line of metrics.jsonl; returns its folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    metrics = MetricsWriter(run_dir, True)
    metrics.write({"step": step, "loss": 1.0})
    ledger = metrics.record()
    metrics.close()
    for name in ("config.yaml", "tokenizer.json", "configs/0123.yaml"):
        (run_dir / name).parent.mkdir(exist_ok=True)
        (run_dir / name).write_text(f"{name} of {run_dir.name}\n")
    shards = values(step if seed is None else seed)
    return save_parts(run_dir, [[shard] for shard in shards], replace(run_record(step), ledger=ledger))


def seed_of(run_dir: Path, seeds: range = range(400)) -> int:
    """The seed of the tensors in a run's newest usable checkpoint."""
    handle = find_checkpoint(run_dir, "auto")
    assert handle is not None
    shards = [replace(shard, tensor=torch.empty_like(shard.tensor)) for shard in values(0)]
    read_into(handle, shards)
    found = [s for s in seeds if all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, values(s), strict=True))]
    assert len(found) == 1, found
    return found[0]
