"""All ranks of a run take the kind of attention that rank 0 chose, and a resume that of the run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megads.engine.attention_kind import EVENT, earlier_choice, record_attention, settle_attention
from megads.errors import ConfigError
from megads.model.attention_choice import AttentionChoice, choice_key
from megads.model.attention_kinds import AttentionKind
from megads.model.config import ModelConfig
from megads.ops.attention_trial import Outcome
from megads.ops.config import Implementation
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.runtime.metrics import EventWriter
from tests.distributed import run_ranks

MODEL = ModelConfig(hidden_size=64, num_heads=4)
WORK = replace(
    MODEL.attention_work(), bf16=True, cuda=True, impl=Implementation.torch, seq_len=32, micro_batch_size=1, context=2
)


def settled(run_dir: Path) -> tuple[AttentionChoice, str]:
    """What a rank takes, and the error of what cannot be had; each rank has a cache of its own."""
    rank = dist.get_rank()
    os.environ["XDG_CACHE_HOME"] = str(run_dir / f"cache_{rank}")
    parallel = ParallelConfig(cp=2)
    grid = build_grid(parallel, rank, 2)
    choice = settle_attention(MODEL, WORK, grid, torch.device("cpu"), run_dir)
    with pytest.raises(ConfigError) as raised:
        settle_attention(replace(MODEL, attention=AttentionKind.cudnn), WORK, grid, torch.device("cpu"), run_dir)
    return choice, str(raised.value)


@pytest.mark.distributed
def test_rank_0_decides(tmp_path: Path) -> None:
    """Catches ranks that measure each for itself, whose replicas would drift apart, and a rank that waits for one that
    failed."""
    (first, error), (other, told) = run_ranks(settled, 2, tmp_path)
    assert first == other and first.source == "measured" and first.kind is AttentionKind.sdpa
    assert error == told and "cudnn does not run" in error
    assert (tmp_path / "cache_0").exists() and not (tmp_path / "cache_1").exists()


def test_a_start_finds_the_choice_of_the_one_before(tmp_path: Path) -> None:
    """Catches an event that cannot be read back, one of another shape or device taken for this one, and an event where
    nothing was chosen."""
    key = choice_key(WORK, torch.device("cpu"))
    outcomes = {"flash": Outcome(error=0.7, repeats=True, time_ms=1.25, kept_bytes=7), "flex": Outcome("too old")}
    choice = AttentionChoice(AttentionKind.flash, "measured", key, outcomes)
    events = EventWriter(tmp_path)
    record_attention(events, AttentionChoice(AttentionKind.auto, "nothing is measured"))
    assert not (tmp_path / "events.jsonl").read_text() and earlier_choice(tmp_path, key) is None
    record_attention(events, replace(choice, kind=AttentionKind.sdpa))
    record_attention(events, choice)
    record_attention(events, replace(choice, key="another", kind=AttentionKind.sdpa))
    assert earlier_choice(tmp_path, key) == choice
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines[1]["event"] == EVENT and lines[1]["message"] == "flash (measured); flash 1.25 ms; flex: too old"
