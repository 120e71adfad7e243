"""What a config leaves to the machine, and starting a run where the memory planner is not installed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from megads.model.moe_config import MoEConfig
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import Float8Recipe, OpsConfig
from megads.parallel.config import ContextParallelKind, EngineKind, ParallelConfig, Recompute
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel": ParallelConfig(tp=2)}, "not supported with parallel.tp = 2: a micro-batch is captured"),
        ({"parallel": ParallelConfig(dp=2, zero_stage=2)}, "not supported with parallel.zero_stage = 2"),
        (
            {"model": ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512, moe=MoEConfig(4, 2))},
            "not supported with model.moe.num_experts = 4 and no capacity",
        ),
        ({"train": TrainConfig(fp8=Float8Recipe.tensorwise)}, "not supported with train.fp8 = tensorwise"),
        ({"engine": EngineKind.deepspeed}, "not supported with engine = deepspeed"),
    ],
)
def test_graphs_are_left_out_where_they_are_not_supported(changes: dict[str, Any], reason: str) -> None:
    """Catches a run with ops.cuda_graphs=auto that is refused, or measures what it cannot capture."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)
    config = replace(RootConfig(model=model, ops=OpsConfig(cuda_graphs="auto")), **changes)
    for machine in (None, Machine(2**36, per_gpu=True)):
        chosen, (line,) = resolve_auto(config, machine)
        assert chosen.ops.cuda_graphs is False and line.startswith(f"ops.cuda_graphs=auto is false: {reason}")


def test_graphs_are_measured_where_their_memory_fits() -> None:
    """Catches graphs that are captured although the plan says that they do not fit, a run that is refused because of
    them, and true or false that change."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)
    config = RootConfig(model=model, ops=OpsConfig(cuda_graphs="auto"), engine=EngineKind.native)
    for given in (True, False):
        explicit = replace(config, ops=OpsConfig(cuda_graphs=given))
        assert resolve_auto(explicit, Machine(2**36, per_gpu=True)) == (explicit, [])
    assert resolve_auto(config, None) == (config, []), "whether they fit is not known"
    chosen, (line,) = resolve_auto(config, Machine(2**36, per_gpu=True))
    assert chosen == config and "decided by measurement after the first steps: with graphs, a GPU" in line
    fits, need = run_planner().graphs_fit(config, Machine(2**36, per_gpu=True))
    assert fits and need in line
    large = replace(config, model=replace(model, hidden_size=2048, num_layers=24, num_heads=16))
    needed = max(
        size for size in range(1, 60) if not run_planner().graphs_fit(large, Machine(size << 30, per_gpu=True))[0]
    )
    chosen, (line,) = resolve_auto(large, Machine(needed << 30, per_gpu=True))
    assert chosen.ops.cuda_graphs is False and "auto is false: with graphs, a GPU" in line
    chosen, (line,) = resolve_auto(config, Machine(2**36, per_gpu=False))
    assert chosen.ops.cuda_graphs is False and line.endswith("the model is on a CPU")
    assert NoRunPlanner().graphs_fit(config, Machine(2**36, per_gpu=True))[0] is False


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
