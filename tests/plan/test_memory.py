"""The exact parts of the plan, in round numbers and against the published model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig
from megads.plan.memory import REDUCTION_BUCKET, Workload, bubble_share, in_flight, memory_plan

BLOOM = ModelConfig(num_layers=70, hidden_size=14336, num_heads=112, vocab_size=250_880)
SMALL = ModelConfig(num_layers=4, hidden_size=64, num_heads=4, vocab_size=509)
WORK = Workload(seq_len=32, micro_batch_size=2, micro_batches=4, weight_bytes=2)


def test_bloom_176b() -> None:
    """Catches a layout other than BLOOM's, and a parameter lost or counted twice over it."""
    plan = memory_plan(BLOOM, ParallelConfig(tp=4, pp=12, dp=8), replace(WORK, seq_len=2048, micro_batches=256))
    assert plan.parameters == 176_247_271_424
    tied = 250_880 * 14336
    assert sum(stage.parameters for stage in plan.stages) == plan.parameters + tied
    assert [len(stage.layers) for stage in plan.stages] == [6] * 11 + [7]
    middle = plan.stages[5]
    assert middle.masters + middle.adam_moments == pytest.approx(12 * middle.rank_parameters / 8, rel=1e-6)
    assert middle.fp32_gradients == pytest.approx(4 * middle.rank_parameters, rel=1e-6)
    assert [stage.first_rank for stage in plan.stages] == list(range(0, 48, 4))
    assert plan.largest.stage == 1, "as many blocks as the others, and more micro-batches in flight than they"


def test_vocabulary_padding_and_alignment() -> None:
    """Catches a rank that holds fewer rows than it allocates, or flat buffers that data parallel ranks cannot share."""
    [stage] = memory_plan(SMALL, ParallelConfig(tp=2, dp=3), WORK).stages
    rows = 255
    unsharded = memory_plan(SMALL, ParallelConfig(), WORK).stages[0]
    assert stage.rank_parameters < unsharded.rank_parameters / 2 + 64 * 64
    assert (rows * 64 * 2) % 2 == 0 and stage.weights % (2 * 2 * 3) == 0
    assert stage.masters * 3 == stage.fp32_gradients


def test_in_flight() -> None:
    """Catches a schedule that forgets that the first stage holds the most, or that there may be fewer micro-batches."""
    assert [in_flight(stage, 4, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(stage, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert bubble_share(1, 7) == 0.0
    assert bubble_share(4, 8) == pytest.approx(3 / 11)


def test_zero_shards_the_optimizer_only() -> None:
    """Catches gradients or weights divided by dp."""
    one, four = (memory_plan(SMALL, ParallelConfig(dp=dp), WORK).largest for dp in (1, 4))
    assert four.weights == pytest.approx(one.weights, rel=1e-3)
    assert four.fp32_gradients == pytest.approx(one.fp32_gradients, rel=1e-3)
    assert four.masters == pytest.approx(one.masters / 4, rel=1e-3)


def test_large_gradients_are_reduced_without_a_copy() -> None:
    """Catches a copy of all gradients planned where DeepSpeed reduces a single large buffer in place."""
    big = memory_plan(BLOOM, ParallelConfig(tp=4, pp=12, dp=8), WORK).stages[5]
    reduction = next(moment for moment in big.phases if moment.name == "gradient reduction")
    assert big.rank_parameters > REDUCTION_BUCKET and reduction.transient == 0
    small = memory_plan(SMALL, ParallelConfig(), WORK).largest
    reduction = next(moment for moment in small.phases if moment.name == "gradient reduction")
    assert reduction.transient == small.fp32_gradients
