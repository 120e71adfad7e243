"""Planned memory of mixture-of-experts layers against what autograd saves, and of a rank's share of the experts."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from megads.batch import BatchInfo
from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import initial_value, make_block, use_kernels
from megads.model.model_size import parameter_shapes
from megads.model.moe_config import MoEConfig, Overflow, RouterScore
from megads.model.sharding import sharding_of
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.experts import ExpertParallel
from megads.parallel.grid import build_grid
from megads.parallel.partition import local_shape
from megads.parallel.sharding import materialise, shard_layer
from megads.tools.plan.activations import block_ops
from megads.tools.plan.memory import memory_plan
from megads.tools.plan.memory_timeline import kept_bytes
from megads.tools.plan.micro_batch import BatchSizes
from megads.tools.plan.workload import Workload
from tests.distributed import run_ranks
from tests.tools.plan.test_activations import BATCH, SEQ_LEN, saved_bytes

EXPERTS = MoEConfig(num_experts=8, top_k=2, expert_ffn_size=24)
MODEL = ModelConfig(
    num_layers=1, hidden_size=96, num_heads=6, vocab_size=320, max_seq_len=64, ffn_size=168, bias=False,
    mlp=MLPKind.swiglu, norm=NormKind.rmsnorm, position=Position.rope, moe=EXPERTS,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"global_loss": 0.02},
    "olmoe": {"top_k": 3, "normalize_weights": False, "sequence_loss": 0.1, "z_loss": 0.01},
    "deepseek": {
        "top_k": 3, "score": RouterScore.sigmoid, "num_groups": 4, "top_groups": 2, "routed_scale": 2.5,
        "shared_ffn_size": 24, "bias_rate": 0.05, "sequence_loss": 0.05,
    },
    "qwen2": {"shared_ffn_size": 36, "shared_gate": True, "router_bias": True, "global_loss": 0.05},
}  # fmt: skip


def saved_by(model: ModelConfig, parallel: ParallelConfig, dtype: torch.dtype, fused: bool, seq_len: int) -> int:
    """Bytes that this rank saves in a block whose router gives all tokens to the first experts if its weight is 0."""
    alone = parallel.world_size == 1
    grid = None if alone else build_grid(parallel, torch.distributed.get_rank(), parallel.world_size)
    with torch.device("meta"):
        block = make_block(model, 0, 0)
    if fused:
        use_kernels(block)
    if grid is not None:
        experts = ExpertParallel.of_grid(grid, expert_tp=parallel.expert_tp)
        sequence_parallel = parallel.sequence_parallel
        block, placements = shard_layer(
            block, "blocks.0", sharding_of(model), grid.tp, sequence_parallel=sequence_parallel, experts=experts
        )
        materialise(block, placements, initial_value(model, 0), torch.device("cpu"))
    else:
        block = make_block(model, 0, 0)
        if fused:
            use_kernels(block)
    for name, parameter in block.to(dtype).named_parameters():
        if "expert_" in name:
            parameter.data = torch.ones_like(parameter, dtype=torch.float32)
        if "router.weight" in name and grid is not None:
            parameter.data.zero_()
    info = BatchInfo(torch.arange(BATCH), step_tokens=BATCH * SEQ_LEN)
    inputs = torch.randn(BATCH, seq_len, model.hidden_size, dtype=dtype, requires_grad=True)
    return saved_bytes(block, inputs, info)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_a_block_with_experts(name: str, dtype: torch.dtype, fused: bool) -> None:
    """Catches rows counted once per token instead of once per choice, scores or the fp32 input of the router that are
    not counted, and a shared expert that is missing or whose input is counted twice."""
    model = replace(MODEL, moe=replace(EXPERTS, **MODELS[name]))
    one_pass = BatchSizes(model, 1, BATCH, SEQ_LEN, dtype.itemsize, fused=fused)
    saved = saved_by(model, ParallelConfig(), dtype, fused, SEQ_LEN)
    assert saved - one_pass.rotary_tables == kept_bytes(block_ops(one_pass))


LAYOUTS = {
    "ep2": ParallelConfig(dp=2, ep=2),
    "tp2": ParallelConfig(tp=2, sequence_parallel=True),
    "tp2 whole": ParallelConfig(tp=2, sequence_parallel=True, expert_tp=False),
    "tp2 whole ep2": ParallelConfig(tp=2, ep=2, sequence_parallel=True, expert_tp=False),
}


@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_with_experts_on_ranks(layout: str, dtype: torch.dtype) -> None:
    """Catches a plan of the worst load that is not the memory of a rank whose experts get all tokens, one of the even
    load that is not that of ranks with equal loads, and a gathered sequence or rows before the exchange that are
    saved."""
    parallel = LAYOUTS[layout]
    seq_len = SEQ_LEN // parallel.tp
    for moe, worst in ((EXPERTS, True), (replace(EXPERTS, num_experts=2), False)):
        model = replace(MODEL, moe=replace(moe, shared_ffn_size=24))
        saved = run_ranks(saved_by, 2, model, parallel, dtype, False, seq_len)
        one_pass = BatchSizes(
            model, parallel.tp, BATCH, SEQ_LEN, dtype.itemsize, sequence_parallel=parallel.sequence_parallel,
            ep=parallel.ep, expert_tp=parallel.expert_tp, worst_load=worst,
        )  # fmt: skip
        planned = kept_bytes(block_ops(one_pass)) + one_pass.rotary_tables
        assert saved[0] == planned, (worst, saved[0] - planned)
        if worst and parallel.ep > 1:
            assert saved[1] < planned
        else:
            assert saved[1] == planned


def test_a_token_sends_a_rank_no_more_rows_than_it_has_experts() -> None:
    """Catches a worst load with more rows than a token can send to the experts of one rank."""
    one_pass = BatchSizes(MODEL, 1, BATCH, SEQ_LEN, 2, ep=8, worst_load=True)
    assert one_pass.expert_rows == 8 * BATCH * SEQ_LEN
    assert replace(one_pass, ep=2).expert_rows == 2 * 2 * BATCH * SEQ_LEN
    assert replace(one_pass, worst_load=False).expert_rows == 2 * BATCH * SEQ_LEN
    # With a capacity of 1.5 the padding counts; only where no row is dropped may a step be computed without it.
    padded = replace(one_pass, model=replace(MODEL, moe=replace(EXPERTS, capacity_factor=1.5)))
    dropping = replace(MODEL, moe=replace(EXPERTS, capacity_factor=1.5, overflow=Overflow.drop))
    assert replace(padded, worst_load=False).expert_rows == 3 * BATCH * SEQ_LEN
    assert padded.expert_rows == one_pass.expert_rows
    assert replace(padded, model=dropping).expert_rows == 3 * BATCH * SEQ_LEN


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(dp=4, ep=2),
        ParallelConfig(tp=2, dp=4, ep=4),
        ParallelConfig(tp=2, dp=2, ep=4, sequence_parallel=True, expert_tp=False),
        ParallelConfig(cp=2, dp=2, ep=2, zero_stage=0),
    ],
    ids=str,
)
def test_experts_are_divided_over_their_ranks(parallel: ParallelConfig) -> None:
    """Catches experts that are not divided by ep, or divided by tp although they are whole, and optimizer states of
    experts that are sharded over ranks with other experts."""
    table, shapes = sharding_of(MODEL), parameter_shapes(MODEL)
    experts, others = 0, 0
    for name, shape in shapes.items():
        local = prod(local_shape(name, shape, table, parallel.tp, 1, parallel.expert_shards))
        if "experts" in name:
            assert local * parallel.expert_shards == prod(shape)
            experts += local
        else:
            others += local
    workload = Workload(SEQ_LEN, BATCH, 2)
    [stage] = memory_plan(MODEL, parallel, workload).stages
    assert stage.rank_parameters == experts + others
    sharded = (
        (experts / parallel.expert_data_size + others / parallel.data_size)
        if parallel.zero_stage
        else (experts + others)
    )
    # Buckets are padded.
    assert 4 * sharded <= stage.masters <= 4 * 1.05 * sharded
    worst = memory_plan(MODEL, parallel, replace(workload, worst_load=True)).stages[0]
    assert worst.peak > stage.peak and worst.permanent == stage.permanent


def test_recomputed_experts_keep_their_input_only() -> None:
    """Catches recomputation that still keeps the rows of experts."""
    one_pass = BatchSizes(MODEL, 1, BATCH, SEQ_LEN, 2)
    assert kept_bytes(block_ops(one_pass, Recompute.full)) == one_pass.hidden


def test_layers_with_and_without_experts_differ() -> None:
    """Catches a first dense layer that is planned with experts, or a layer with experts that is planned as an MLP."""
    model = replace(MODEL, num_layers=3, moe=replace(EXPERTS, first_dense=1))
    one_pass = BatchSizes(model, 1, BATCH, SEQ_LEN, 2)
    names = [[op.name for op in block_ops(one_pass.of_layer(f"blocks.{index}"))] for index in range(3)]
    assert "mlp up" in names[0] and "router" not in names[0]
    assert "router" in names[1] and names[1] == names[2]
