"""Tests the printed table of which rank holds what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megads.cli.main import run
from megads.config.root import RootConfig
from megads.config.train import TrainConfig
from megads.errors import ConfigError
from megads.model.attention import AttentionCore
from megads.model.config import ModelConfig
from megads.model.gpt import layer_specs
from megads.model.sharding import SHARDING
from megads.parallel.config import ParallelConfig, axis_ranks
from megads.parallel.grid import Axis
from megads.parallel.sharding import shard_layer
from megads.tools.plan.devices import find_device
from megads.tools.plan.tables import (
    axes_across_nodes,
    is_simulation_feasible,
    layers_text,
    phase_table,
    phases_json,
    rank_shard_ranges,
    rank_table,
    replicas,
    spans,
    text_of,
)

MODEL = ModelConfig(num_layers=3, hidden_size=24, num_heads=6, vocab_size=7)


@pytest.mark.parametrize("order", [["tp", "cp", "pp", "dp"], ["pp", "dp", "tp", "cp"]])
def test_places_are_those_of_the_grid_and_the_layers(order: list[str]) -> None:
    """Catches a table that numbers ranks in another order than the process groups, and shards of heads or vocabulary
    that differ from those of the built layers."""
    parallel = ParallelConfig(tp=3, cp=2, pp=2, dp=2, rank_order=order)
    places = rank_shard_ranges(MODEL, parallel)
    for axis in ("tp", "cp", "pp", "dp"):
        for line in axis_ranks(axis, parallel):
            assert [getattr(places[rank].place, axis) for rank in line] == list(range(len(line)))
    for held in places:
        for spec in layer_specs(MODEL, 0):
            if spec.name not in held.layers:
                continue
            with torch.device("meta"):
                stage = spec.build()
            stage, placements = shard_layer(
                stage, spec.name, SHARDING, Axis(held.place.tp, (0, 1, 2), None), sequence_parallel=False
            )
            for core in (module for module in stage.modules() if isinstance(module, AttentionCore)):
                assert held.heads == core.heads
            for place in placements.values():
                if place.key in ("embedding.word.weight", "head.weight"):
                    assert held.vocabulary == place.held[0]
    stages = [{held.layers for held in places if held.place.pp == stage} for stage in range(2)]
    assert all(len(layers) == 1 for layers in stages)
    assert sum((layers.pop() for layers in stages), ()) == tuple(spec.name for spec in layer_specs(MODEL, 0))


def test_replicas_are_the_ranks_of_a_data_group() -> None:
    """Catches a folded row whose ranks hold different weights."""
    parallel = ParallelConfig(tp=2, cp=2, pp=2, dp=3)
    groups = {tuple(held.rank for held in group) for group in replicas(rank_shard_ranges(MODEL, parallel))}
    assert groups == set(axis_ranks("data", parallel))


def test_nodes() -> None:
    """Catches an unreported axis whose groups span nodes, such as tp."""
    parallel = ParallelConfig(tp=2, pp=2, dp=2)
    assert [held.node for held in rank_shard_ranges(MODEL, parallel, ranks_per_node=4)] == [0] * 4 + [1] * 4
    assert axes_across_nodes(parallel, 8) == []
    assert axes_across_nodes(parallel, 4) == ["dp"]
    assert axes_across_nodes(parallel, 2) == ["pp", "dp"]
    assert axes_across_nodes(ParallelConfig(tp=4, dp=2), 6) == ["tp", "dp"]


def test_what_is_not_held_or_known() -> None:
    """Catches heads on a stage without blocks, vocabulary rows on a middle stage, and a guessed vocabulary size."""
    places = rank_shard_ranges(replace(MODEL, num_layers=1), ParallelConfig(pp=3))
    assert [len(held.heads) for held in places] == [0, 6, 0]
    assert [held.vocabulary for held in places] == [range(7), range(0), range(7)]
    assert rank_shard_ranges(replace(MODEL, vocab_size=None), ParallelConfig())[0].vocabulary is None
    with pytest.raises(ConfigError, match=r"parallel\.pp = 6"):
        rank_shard_ranges(MODEL, ParallelConfig(pp=6))


LAYOUT = ["model=demo", "model.vocab_size=8191", "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "device=cpu"]


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]


def test_plan_prints_every_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a table that is missing from the text or the JSON output, and a difference between the two."""
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *LAYOUT]) == 0
    assert "which rank holds what" not in capsys.readouterr().out
    assert run(["plan", *LAYOUT, "ranks=true", "cluster.ranks_per_node=4"]) == 0
    printed = rows(capsys.readouterr().out.partition("which rank holds what")[2])
    assert run(["plan", *LAYOUT, "ranks=true", "cluster.ranks_per_node=4", "json=true"]) == 0
    places = json.loads(capsys.readouterr().out)["places"]
    assert len(printed) == len(places) == 8
    for row, place in zip(printed, places, strict=True):
        assert [int(cell) for cell in row[:6]] == [place[key] for key in ("rank", "node", "tp", "cp", "pp", "dp")]
        assert row[-2] == f"{place['heads'][0]}-{place['heads'][1] - 1}"
        assert row[-1] == f"{place['vocabulary'][0]:,}-{place['vocabulary'][1] - 1:,}"
    assert places[-1]["vocabulary"] == [4096, 8191], "padding is no row of the vocabulary"


def test_many_ranks_share_rows() -> None:
    """Catches a table of thousands of lines, and ranks lost when rows are folded."""
    config = RootConfig(
        model=ModelConfig(num_layers=8, num_heads=4, vocab_size=None), parallel=ParallelConfig(tp=4, pp=4, dp=64)
    )
    text = text_of(rank_table(config, cuda=False), 120)
    assert len(rows(text)) == 16 and "the tokenizer's" in text
    assert text.count("(64)") == 16 and text.count("0-63") == 16
    assert max(map(len, text.splitlines())) <= 120


def test_dry_run_shows_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a dry run that does not show the layout, and a table of a single rank."""
    monkeypatch.chdir(tmp_path)
    command = ["train", "train.steps=1", "data.train=[{path: nowhere}]", "run.dry_run=true"]
    assert run([*command, "parallel.tp=2"]) == 0
    assert len(rows(capsys.readouterr().out.partition("which rank holds what")[2])) == 2
    assert run(command) == 0
    assert "which rank holds what" not in capsys.readouterr().out


def test_words() -> None:
    """Catches ranges that include a gap, and blocks listed one by one."""
    assert spans([3, 0, 1, 2]) == "0-3"
    assert spans([5]) == "5"
    assert spans([0, 1, 4, 5, 9]) == "0-1, 4-5, 9"
    assert spans(range(0, 400, 48)) == "0, 48 .. 384 (9)"
    assert layers_text(("embedding", "blocks.0", "blocks.1")) == "embedding, blocks 0-1"
    assert layers_text(("blocks.7", "final_norm", "head")) == "block 7, final norm, head"


def test_what_is_simulated() -> None:
    """Catches a simulation of a huge step, which takes minutes, and one of an ordinary pipeline that is skipped."""
    for pp, micro_batches, known in ((2, 2**19, True), (2, 2**19 + 1, False), (4, 2**18, True), (1, 1, True)):
        config = RootConfig(model=replace(MODEL, num_layers=8), parallel=ParallelConfig(pp=pp))
        config.train.global_batch_size, config.train.micro_batch_size = micro_batches, 1
        assert is_simulation_feasible(config) is known
    assert not is_simulation_feasible(config, 0)


def test_each_phase_is_timed_at_its_length_and_layout() -> None:
    """Catches steps of all phases timed like one of them, an MFU by the FLOPs of another length, and a layout that is
    not shown."""
    config = RootConfig()
    config.train = TrainConfig(steps=30, seq_len=1024, global_batch_size=16, keep_batch_tokens=True)
    config.parallel.dp = 4
    config.train.phases = [{"until_steps": 10}, {"train.seq_len": 8192, "parallel": {"cp": 2, "dp": 2}}]
    device = find_device("h100")
    short, long = phases_json(config, cuda=True, device=device)
    assert (short["layout"]["cp"], long["layout"]["cp"], long["layout"]["dp"]) == (1, 2, 2)
    assert long["global_batch_size"] == 2 and long["flops_per_token"] > short["flops_per_token"]
    for row in (short, long):
        assert row["time_s"] == row["steps"] * row["step_time_s"]
        flops = row["flops_per_token"] * row["global_batch_size"] * row["seq_len"]
        peak = flops / row["step_time_s"] / 4 / row["mfu"]
        assert peak == pytest.approx(device.peak_tflops * 1e12, rel=1e-6)
    assert phases_json(config, cuda=True)[0]["mfu"] is None
    assert "MFU" in text_of(phase_table(config, cuda=True, device=device), 160)
