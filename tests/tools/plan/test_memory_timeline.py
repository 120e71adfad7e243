"""Tests the peak memory of a rank's schedule, with operations small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

from megads.model.config import ModelConfig
from megads.optim.groups import Role
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.pipeline_actions import ActionKind
from megads.parallel.schedule import V_SHAPED, ScheduleName, build_schedule
from megads.parallel.schedule_simulation import peak_in_flight
from megads.tools.plan.memory import memory_plan
from megads.tools.plan.memory_timeline import (
    MainGradMemory,
    Op,
    ShardedWeights,
    backward_moments,
    forward_moments,
    kept_bytes,
    pipeline_moments,
    sharded_moments,
)
from megads.tools.plan.workload import Workload

OPS = [Op("a", kept=10, forward=3, backward=4, gradient=2, deferred=5), Op("b", kept=20, forward=1, backward=2)]
SUMS = MainGradMemory(allocated=lambda made: made, full=100)


def fullest(name: str, p: int, m: int, rank: int) -> dict[str, int]:
    schedule = build_schedule(name, p, None, m)
    stages = dict.fromkeys(schedule.placement.stages_of(rank), OPS)
    return {moment.name.partition(":")[0]: moment.total for moment in pipeline_moments(schedule, rank, stages, SUMS)}


def peak(waiting: int, sums: MainGradMemory) -> int:
    """Of one micro-batch's passes while `waiting` others wait for their backward pass."""
    held = waiting * kept_bytes(OPS)
    moments = [*forward_moments(OPS, held, sums), *backward_moments(OPS, held, sums)]
    return max(moment.total for moment in moments)


def test_1f1b_is_the_formula() -> None:
    """Catches other numbers of held micro-batches than 1F1B's: min(p - rank, m), then min(p - rank, m - 1)."""
    for p, m in ((1, 1), (1, 3), (4, 1), (4, 2), (4, 8)):
        for rank in range(p):
            found = fullest("1f1b", p, m, rank)
            waiting = min(p - rank, m)
            assert found["first micro-batch"] == peak(waiting - 1, SUMS)
            assert ("later micro-batch" in found) == (m > 1)
            if m > 1:
                left = min(p - rank, m - 1)
                assert found["later micro-batch"] == peak(left - 1, replace(SUMS, allocated=lambda _: 100))


def test_a_part_that_is_put_off_holds_its_share() -> None:
    """Catches deferred wgrads that hold no memory, or all that the forward pass kept.

    ZB-H1's last rank of two, m = 2: F0 I0 F1 I1 W0 W1. In addition to I0's 5 deferred bytes, F1 keeps 30, and I1 needs
    2 more.
    """
    schedule = build_schedule("zb_h1", 2, None, 2)
    letters = {ActionKind.forward: "F", ActionKind.backward_input: "I", ActionKind.backward_weight: "W"}
    passes = [f"{letters[a.kind]}{a.micro_batch}" for a in schedule.actions[1] if a.kind in letters]
    assert passes == ["F0", "I0", "F1", "I1", "W0", "W1"]
    found = fullest("zb_h1", 2, 2, 1)
    assert found["first micro-batch"] == 5 + 30 + 2
    # W1 alone: 5 deferred, its gradient of 2, and all of main_grad.
    assert found["later micro-batch"] == 100 + 5 + 2


MODEL = ModelConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=512, tie_embeddings=True)
WORK = Workload(seq_len=64, micro_batch_size=2, micro_batches=8, weight_bytes=2)


def plan_of(name: str, pp: int = 2) -> list[int]:
    plan = memory_plan(MODEL, ParallelConfig(pp=pp, schedule=ScheduleName[name], partition=Partition.uniform), WORK)
    assert plan.parameters == memory_plan(MODEL, ParallelConfig(), WORK).parameters
    return [stage.fullest.activations for stage in plan.stages]


def test_every_layer_is_held_once_in_every_schedule() -> None:
    """Catches virtual stages that the plan omits or counts on two ranks; only a tied embedding may be held twice."""
    alone = memory_plan(MODEL, ParallelConfig(), WORK).stages[0]
    tied = 512 * 64
    for name in ScheduleName:
        plan = memory_plan(MODEL, ParallelConfig(pp=2, schedule=name), WORK)
        layers = [layer for stage in plan.stages for layer in stage.layers]
        assert sorted(layers) == sorted(alone.layers)
        both = name in V_SHAPED  # the first rank has embedding and head
        assert sum(stage.parameters for stage in plan.stages) == alone.parameters + (0 if both else tied)
        schedule = build_schedule(name, 2, None, 8)
        assert [stage.in_flight for stage in plan.stages] == peak_in_flight(schedule)


def test_deeper_schedules_hold_more() -> None:
    """Catches activations not computed from the schedule: V shapes balance what 1F1B holds on its first rank."""
    one, zero, looped, v_shaped = (plan_of(name, 4) for name in ("1f1b", "zb_h1", "interleaved", "zb_v"))
    assert one == sorted(one, reverse=True) and one[0] > 2 * one[-1]
    assert looped[0] > one[0] and zero[-1] > one[-1]
    assert max(v_shaped) < 1.6 * min(v_shaped)


def test_recomputation_counts_a_rank_together() -> None:
    """Catches recompute_blocks applied to each virtual stage instead of each rank."""
    parallel = ParallelConfig(pp=2, schedule=ScheduleName["interleaved"])
    full = replace(parallel, recompute=Recompute.full, recompute_blocks=[3, 0])
    stages = memory_plan(MODEL, full, WORK).stages
    assert stages[0].recomputation.count(Recompute.full) == 3
    assert Recompute.full not in stages[1].recomputation


def test_sums_that_a_product_computes_in_lie_beside_what_it_reads() -> None:
    """Catches a plan that assumes that a wgrad GEMM's input is freed before its main_grad is allocated."""
    op = Op("head", kept=0, backward=40, arriving=32, gradient=4, deferred=36)
    found = {
        in_place: max(
            moment.total
            for moment in backward_moments([op], 0, replace(SUMS, widening=2, cast=True, in_place=in_place))
        )
        for in_place in (False, True)
    }
    assert found == {False: 44, True: 48}


def test_sums_that_a_forward_pass_begins() -> None:
    """Catches main_grad of a chunked loss that the plan counts from the backward pass on only, omits there, or misses
    in another stage's pass between the two."""
    block, head = Op("block", kept=10, backward=5, gradient=7), Op("head", kept=1, forward=30, early=4, is_loss=True)
    sums = replace(SUMS, widening=2)
    forward = forward_moments([block, head], 0, sums)
    assert [moment.gradients for moment in forward] == [0, 2 * 4]
    backward = backward_moments([block, head], 0, sums)
    assert [moment.gradients for moment in backward] == [2 * 4, 2 * 4 + 2 * 7]
    # One rank with both stages: F0 of the last one, then F1 of the first one, before any backward pass.
    schedule = build_schedule("dualpipe_v", 1, None, 2)
    stages = {0: [Op("block", forward=50)], 1: [Op("head", early=7, is_loss=True)]}
    first = pipeline_moments(schedule, 0, stages, replace(SUMS, allocated=lambda made: made))[0]
    assert (first.name, first.total) == ("first micro-batch: block, forward", 50 + 7)


ROLES = list(Role)[:2]


def test_shards_are_padded_as_deepspeed_pads_them() -> None:
    """Catches ZeRO-3 weights counted unsharded or not at all, a ZeRO-2 group whose partitions are not 4-byte aligned,
    and fp32 gradients kept only where the rank updates them.

    Three ranks. ZeRO-3 partitions each parameter: ceil(10/3) + ceil(2/3) = 5 and ceil(7/3) = 3 elements. ZeRO-2
    partitions a flat group evenly: 12 in parts of 4, 7 in parts of 4.
    """
    groups = {ROLES[0]: [10, 2], ROLES[1]: [7]}
    two, three = (ShardedWeights(stage, 3, groups, 2) for stage in (2, 3))
    assert three.partitions == [5, 3] and three.weights == 2 * 8
    assert two.partitions == [4, 4] and two.weights == 2 * 3 * 8
    assert three.accumulated_gradients(5) == two.accumulated_gradients(5) == 4 * 8
    # In fp32: ranks 0 and 1 update parts of the 10 and of the 7, the last one of the 10 and of the 2.
    wide = replace(two, weight_bytes=4)
    assert wide.accumulated_gradients(1) == 4 * 17 and wide.accumulated_gradients(5) == 2 * 4 * 17


def test_moments_of_a_sharded_step() -> None:
    """Catches a bucket that is reduced too early or never, and a plan that omits the copy for gloo or for the cast to
    fp32, omits the weights that ZeRO-3 gathers, or counts reduced gradients before the first reduction."""
    groups = {ROLES[0]: [8], ROLES[1]: [8]}
    ops = [Op("a", kept=10, forward=3, backward=4, gradient=16), Op("b", kept=20, forward=1, backward=2, gradient=16)]
    for stage, cuda, copies, gathered in (
        (2, False, 2 * 8 + 4 * 8, 0),
        (3, False, 4 * 8 * 2 + 4 * 8, 2 * 2 * 16),
        (3, True, 4 * 8 + 4 * 8, 2 * 2 * 16),
    ):
        sharded = ShardedWeights(stage, 2, groups, 2)
        assert sharded.bucket == 8, "elements, so 16 bytes"
        row = list(sharded_moments(ops, sharded, 1, cuda=cuda))
        # Reduced gradients of this rank's 4 + 4 elements; ZeRO-2 has none before the first reduction.
        sums = 32 if stage == 3 else 0
        assert [(m.name, m.total - gathered) for m in row[:7]] == [
            ("micro-batch: a, forward", sums + 10 + 3),
            ("micro-batch: b, forward", sums + 30 + 1),
            ("micro-batch: b, backward", sums + 16 + 30 + 2 + 16),
            ("gradient reduction", 32 + 16 + 10 + copies),
            ("micro-batch: a, backward", 32 + 16 + 10 + 4 + 16),
            ("gradient reduction", 32 + 16 + copies),
            ("gradient reduction", 32 + 16 + copies),
        ]
        # The fp32 copy of one group's partition; gloo's copy of the largest group in bf16.
        last = ("optimizer step", 32 + 4 * 4) if stage == 3 else ("weight all-gather", 32 + 2 * 4 * 2)
        assert [(m.name, m.total) for m in row[7:]] == [last]
    again = list(sharded_moments(ops, ShardedWeights(2, 2, groups, 2), 2, cuda=True))
    assert again[0].gradients == 32, "a later micro-batch adds to the sums"
    assert again[-1].total == 32, "NCCL needs no copy"
