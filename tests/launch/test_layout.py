"""What a config leaves to the machine, and starting a run where the memory planner is not installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.config.root import RootConfig
from megads.config.train import TrainConfig
from megads.errors import ConfigError
from megads.launch.layout import (
    FLOPS_PER_THREAD,
    Machine,
    NoRunPlanner,
    resolve_auto,
    run_planner,
    useful_threads,
)
from megads.model.config import ModelConfig
from megads.model.model_size import block_flops
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute
from megads.runtime.optional_tools import find_tool, require_tool


def test_threads_per_rank_follow_the_models_size() -> None:
    """Catches a tiny model whose threads spend their time waking each other, and a large one on a single core."""
    tiny = ModelConfig(num_layers=2, hidden_size=64, num_heads=4)
    config = RootConfig(model=tiny, train=TrainConfig(micro_batch_size=1, seq_len=128))
    assert useful_threads(config) == 1, "no vocabulary is needed"
    large = replace(config, model=replace(tiny, hidden_size=2048, num_heads=16))
    flops = 128 * block_flops(large.model, 128).forward
    assert useful_threads(large) == int(flops / FLOPS_PER_THREAD) > 100
    shared = replace(large, parallel=ParallelConfig(tp=4, cp=2))
    assert useful_threads(shared) == int(flops / 8 / FLOPS_PER_THREAD)
    several = replace(config, train=TrainConfig(micro_batch_size=64, seq_len=128))
    assert useful_threads(several) > 1


def test_a_run_starts_without_the_planner() -> None:
    """Catches a core that needs megads.tools: without, it recomputes nothing, says so, and refuses no run."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)
    config = RootConfig(model=model, parallel=ParallelConfig(recompute=Recompute.auto))
    tiny = Machine(1, per_gpu=True)
    settled, _ = resolve_auto(config, tiny)
    assert settled.parallel.recompute_blocks == [2], "where the planner is installed"
    with pytest.raises(ConfigError, match="use a smaller model"):
        run_planner().refuse_unfit(settled, tiny)
    NoRunPlanner().refuse_unfit(config, tiny)
    chosen, line = NoRunPlanner().choose_recompute(config, tiny)
    assert chosen.parallel.recompute is Recompute.none and "megads.tools" in line
    assert NoRunPlanner().choose_recompute(chosen, tiny) == (chosen, "")


def test_the_kind_of_context_parallelism_is_chosen_by_estimated_time() -> None:
    """Catches a kind that the model does not allow, one without a reason, a choice that depends on what is not known
    before the data is prepared, and auto that reaches a rank."""
    train = TrainConfig(seq_len=65536, micro_batch_size=1)
    bloom = ModelConfig(num_layers=4, hidden_size=4096, num_heads=32, max_seq_len=65536)
    auto = ParallelConfig(cp=4, cp_kind=ContextParallelKind.auto, recompute=Recompute.auto)
    config = RootConfig(model=replace(bloom, vocab_size=250880), parallel=auto, train=train)
    chosen, (line,) = resolve_auto(config, None)
    assert chosen.parallel == replace(auto, cp_kind=ContextParallelKind.ulysses)
    assert line.startswith("parallel.cp_kind=auto is ulysses: estimated steps on h100s are allgather ")
    assert "ring" in line and "allgather with cp_ulysses=2 " in line
    assert resolve_auto(replace(config, model=bloom), None)[0].parallel == chosen.parallel
    three = replace(config, parallel=replace(auto, cp=3), model=replace(config.model, attention=AttentionKind.flex))
    assert resolve_auto(three, None)[0].parallel.cp_kind is ContextParallelKind.allgather
    assert resolve_auto(three, None)[1] == ["parallel.cp_kind=auto is allgather, the only kind that the model allows"]
    given, (line,) = resolve_auto(replace(config, parallel=replace(auto, cp_ulysses=2)), None)
    assert given.parallel.cp_ulysses == 2 and given.parallel.cp_kind is not ContextParallelKind.ulysses
    assert line.count("with cp_ulysses=2 ") == 2 and "ulysses 0" not in line
    # Over nodes, with one KV head for each of the ranks of a node.
    wide = replace(config, parallel=replace(auto, cp=16, dp=1), model=replace(config.model, num_kv_heads=8))
    chosen, (line,) = resolve_auto(wide, None)
    assert chosen.parallel.cp_ulysses == 8, line
    alone, lines = resolve_auto(replace(config, parallel=replace(auto, cp=1)), None)
    assert alone.parallel.cp_kind is ContextParallelKind.allgather and lines == []
    found, line = NoRunPlanner().choose_context_kind(config)
    assert found.parallel.cp_kind is ContextParallelKind.allgather and "megads.tools" in line


def test_a_broken_tool_is_told_from_one_not_installed() -> None:
    """Catches a tool that cannot be imported and is taken for one that is not installed, and an unreadable error."""
    assert find_tool("no_such_tool.command") is None
    with pytest.raises(ConfigError, match=r"run\.dry_run=true needs megads\.tools\.no_such_tool"):
        require_tool("no_such_tool.command", "run.dry_run=true")
