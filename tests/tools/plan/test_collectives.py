"""Planned times of collectives, against calculations by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from megads.ops.config import Float8, Float8Recipe
from megads.parallel import context, float8_linear, region_linear, ring
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute, axis_ranks, place_of
from megads.parallel.ring_shifts import keys_needed, ring_shifts
from megads.tools.plan.collectives import (
    CommunicationGroup,
    Network,
    all_gather,
    all_reduce,
    communication_group,
    context_choices,
    context_groups,
    context_messages,
    context_seconds,
    p2p,
    placement,
    received_bytes,
)
from megads.tools.plan.devices import DEVICES
from megads.tools.plan.execution import MEGADS
from megads.tools.plan.operators import RankOperators
from megads.tools.plan.step import placement_line
from megads.tools.plan.workload import Workload
from tests.distributed import run_ranks
from tests.parity import MODEL, Collective, build_engine, recorded_collectives, scenario_with, step_batches

DEVICE = replace(
    DEVICES["h100"],
    node_gigabytes_per_s=100.0,
    link_efficiency=1.0,
    nic_gigabytes_per_s=10.0,
    nic_efficiency=1.0,
    node_latency_us=1.0,
    nic_latency_us=10.0,
)


@pytest.mark.parametrize("order", [["tp", "cp", "pp", "dp"], ["dp", "tp", "pp", "cp"], ["cp", "pp", "dp", "tp"]])
@pytest.mark.parametrize("node", [4, 8])
def test_groups_are_those_of_the_grid(order: list[str], node: int) -> None:
    """Catches an axis whose ranks are planned on other nodes than the grid puts them, also with other rank orders."""
    parallel = ParallelConfig(tp=4, cp=2, pp=2, dp=4, rank_order=order)
    for axis in ("tp", "cp", "pp", "dp"):
        line = next(line for line in axis_ranks(axis, parallel) if 0 in line)
        near = sum(rank < node for rank in line)
        assert communication_group(parallel, (axis,), node) == CommunicationGroup(len(line), near)
    sharing = communication_group(parallel, ("cp", "dp"), node)
    assert sharing.size == 8
    cp = next(line for line in axis_ranks("cp", parallel) if 0 in line)
    dp = next(line for line in axis_ranks("dp", parallel) if 0 in line)
    assert sharing.per_node == sum(a + b < node for a in cp for b in dp)


def test_a_ring_inside_a_node_takes_its_bytes_and_steps() -> None:
    """Catches a missing factor: all-gather sends 7/8 of the bytes once, all-reduce twice, in 7 steps each."""
    group = CommunicationGroup(8, 8)
    assert all_gather(DEVICE, group, 8e9) == pytest.approx(7e9 / 100e9 + 7e-6)
    assert all_reduce(DEVICE, group, 8e9) == pytest.approx(2 * (7e9 / 100e9 + 7e-6))
    assert all_gather(DEVICE, CommunicationGroup(1, 1), 8e9) == all_reduce(DEVICE, CommunicationGroup(1, 1), 8e9) == 0.0


def test_between_nodes_a_group_has_the_ports_of_its_ranks() -> None:
    """Catches a group across nodes planned at the speed inside a node, and one whose ranks of a node share one NIC."""
    one, four = (all_gather(DEVICE, CommunicationGroup(16, per_node), 16e9) for per_node in (1, 4))
    assert one == pytest.approx(15e9 / 10e9 + 16 * 10e-6)
    assert four == pytest.approx(15e9 / 40e9 + 4 * 10e-6 + 12 * 1e-6)
    slow = communication_group(ParallelConfig(dp=64), ("dp",), 8, Network(pod_ranks=32, oversubscription=2.0))
    fast = communication_group(ParallelConfig(dp=64), ("dp",), 8, Network(pod_ranks=64, oversubscription=2.0))
    assert (slow.slowdown, fast.slowdown) == (2.0, 1.0)
    assert all_gather(DEVICE, slow, 64e9) > 1.5 * all_gather(DEVICE, replace(fast, per_node=8), 64e9)


def test_sums_take_the_quickest_algorithm() -> None:
    """Catches an all-reduce of few bytes on many nodes planned as a ring, which takes as many steps as ranks."""
    few = all_reduce(DEVICE, CommunicationGroup(1024, 1), 8.0)
    assert few < 2 * 12 * 10e-6
    assert all_reduce(DEVICE, CommunicationGroup(1024, 1), 1e9) == pytest.approx(2e9 / 10e9, rel=0.01)


def test_messages_go_by_what_is_between() -> None:
    """Catches a p2p transfer between nodes planned at the speed inside a node."""
    assert p2p(DEVICE, 1e9, between_nodes=True) == (pytest.approx(0.1), pytest.approx(10e-6))
    assert p2p(DEVICE, 1e9, between_nodes=False) == (pytest.approx(0.01), pytest.approx(1e-6))


def test_placement_names_what_crosses_nodes_and_pods() -> None:
    """Catches an axis across nodes that is reported inside one, and one across pods that is not reported."""
    layout = ParallelConfig(tp=4, cp=2, pp=4, dp=8)
    found = placement(layout, 8, Network(pod_ranks=64, oversubscription=3.0))
    assert list(found) == ["tp", "cp", "pp", "dp", "cp x dp"]
    assert [group.nodes > 1 for group in found.values()] == [False, False, True, True, True]
    assert [group.slowdown for group in found.values()] == [1.0, 1.0, 1.0, 3.0, 3.0]
    turned = placement(replace(layout, rank_order=["dp", "tp", "cp", "pp"]), 8)
    assert turned["dp"].nodes == 1 and turned["tp"].nodes == 4
    asked = placement_line(layout, DEVICES["h100"], Network(pod_ranks=64, oversubscription=3.0))
    assert "tp 4 inside a node" in asked and "dp 8 over 8 nodes, beyond pods of 64, 3 x slower" in asked


ALLGATHER, ULYSSES, RING = ContextParallelKind.allgather, ContextParallelKind.ulysses, ContextParallelKind.ring


def received_by_rank(parallel: ParallelConfig, kv_heads: int, precision: str) -> tuple[list[int], tuple[float, float]]:
    """Bytes that a rank receives in forward passes, and in steps, of one layer and micro-batch; and the plan's."""
    scenario = scenario_with(
        model=replace(MODEL, num_kv_heads=kv_heads), global_batch_size=2, micro_batch_size=1, precision=precision
    )
    engine = build_engine(scenario, parallel)
    batches, counted = step_batches(scenario, 0), []
    for run in (lambda: engine.evaluate(batches), lambda: engine.step(batches, scenario.lr)):
        seen: list[Collective] = []
        with recorded_collectives(seen, context):
            run()
        counted.append(sum(one.received_bytes for one in seen) // (MODEL.num_layers * len(batches)))
    tokens = scenario.seq_len // parallel.cp
    return counted, received_bytes(context_messages(scenario.model, parallel, tokens, scenario.dtype.itemsize))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "sizes", "kv_heads", "precision"),
    [
        (ALLGATHER, {"cp": 2}, 6, "float32"),
        (ALLGATHER, {"cp": 3}, 2, "bfloat16"),
        (ULYSSES, {"cp": 2}, 6, "float32"),
        (ULYSSES, {"cp": 3}, 2, "bfloat16"),
        (ULYSSES, {"tp": 2, "cp": 3}, 2, "float32"),
        (ALLGATHER, {"cp": 4, "cp_ulysses": 2}, 2, "bfloat16"),
        (ALLGATHER, {"cp": 6, "cp_ulysses": 3}, 2, "float32"),
    ],
)
def test_bytes_of_context_parallelism_are_those_of_the_collectives(
    kind: ContextParallelKind, sizes: dict[str, int], kv_heads: int, precision: str
) -> None:
    """Catches repeated KV heads, the output or its gradient that are not planned, and gradients planned in another
    dtype than that in which they are reduced."""
    parallel = ParallelConfig(cp_kind=kind, **sizes)
    for (forward, both), planned in run_ranks(received_by_rank, parallel.world_size, parallel, kv_heads, precision):
        assert (forward, both - forward) == planned


def received_in_a_ring(parallel: ParallelConfig, window: int | None) -> tuple[list[int], tuple[float, float]]:
    """Bytes that arrive on a rank in a forward pass, and in a step, of one layer and micro-batch; and the plan's.

    Those of heads that are exchanged before and after the ring included.
    """
    model = replace(MODEL, num_kv_heads=2, window=window)
    scenario = scenario_with(model=model, global_batch_size=4, micro_batch_size=2, precision="bfloat16")
    engine = build_engine(scenario, parallel)
    batches, counted, inner = step_batches(scenario, 0), [], ring._Transfer.wait
    arrived: list[int] = []

    def wait(self: ring._Transfer) -> Tensor:
        arrived.append(inner(self).nbytes)
        return self._received

    ring._Transfer.wait = wait  # type: ignore[method-assign]
    for run in (lambda: engine.evaluate(batches), lambda: engine.step(batches, scenario.lr)):
        arrived.clear()
        seen: list[Collective] = []
        with recorded_collectives(seen, context):
            run()
        arrived += [one.received_bytes for one in seen]
        counted.append(sum(arrived) // (model.num_layers * len(batches)))
    tokens = 2 * scenario.seq_len // parallel.cp
    return counted, received_bytes(context_messages(model, parallel, tokens, 2, 2))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cp", "tp", "window", "exchanging"),
    [(2, 1, None, 1), (3, 2, None, 1), (4, 1, None, 1), (4, 1, 3, 1), (3, 1, 9, 1), (4, 1, 7, 2), (6, 1, None, 2)],
)
def test_bytes_of_a_ring_are_those_of_its_shifts(cp: int, tp: int, window: int | None, exchanging: int) -> None:
    """Catches chunks that are sent although no query of the receiver sees them, or beyond its windows, and a plan that
    is not the most that any rank receives."""
    parallel = ParallelConfig(tp=tp, cp=cp, cp_kind=RING, cp_ulysses=exchanging)
    ranks, heads, kv_heads = cp // exchanging, MODEL.num_heads // tp, 2 // tp
    # Keys and values of two samples; two KV heads divide over the ranks that exchange them.
    chunk, row = 24 // (2 * ranks), 2 * 2 * (kv_heads // exchanging) * MODEL.head_dim
    # Queries, keys, values and the output of a rank's own tokens.
    exchanged = 2 * (exchanging - 1) * (48 // cp) * MODEL.head_dim * (2 * heads + 2 * kv_heads) // exchanging
    every = run_ranks(received_in_a_ring, parallel.world_size, parallel, window)
    planned = every[0][1]
    for rank, ((forward, both), same) in enumerate(every):
        shifts = ring_shifts(place_of(rank, parallel).cp // exchanging, ranks, chunk, window)
        arriving, leaving = (
            sum(map(len, part))
            for part in ([p for s in shifts for p in s.arriving], [p for s in shifts for p in s.leaving])
        )
        assert forward == exchanged + 2 * row * arriving
        assert both - forward == exchanged + row * (2 * arriving + 4 * leaving)
        assert same == planned and forward <= planned[0] and both - forward <= planned[1]
    if window is None:
        whole = (ranks - 1) * 2 * chunk
        assert planned == (exchanged + 2 * row * whole, exchanged + 6 * row * whole)
        assert max(forward for (forward, _), _ in every) == planned[0]
        # Every pair of ranks but the halves that are hidden: 3/4 of what an all-gather brings.
        model, same_heads = replace(MODEL, num_kv_heads=2), replace(parallel, cp_kind=ALLGATHER)
        gathered, _ = received_bytes(context_messages(model, same_heads, 48 // cp, 2))
        received = sum(forward - exchanged for (forward, _), _ in every)
        assert received == 0.75 * cp * tp * (gathered - exchanged)


def received_in_windows(parallel: ParallelConfig, window: int) -> tuple[list[int], tuple[float, float]]:
    """Bytes of keys and values that arrive in a forward pass, and in a step, of one layer and micro-batch; and the
    plan's."""
    model = replace(MODEL, num_kv_heads=2, window=window)
    scenario = scenario_with(model=model, global_batch_size=4, micro_batch_size=2, precision="bfloat16")
    engine = build_engine(scenario, parallel)
    batches, counted, arrived = step_batches(scenario, 0), [], list[int]()
    inner = context._WindowParts.exchange

    def exchange(self: context._WindowParts, *parts: Any) -> list[Tensor]:
        found = inner(self, *parts)
        arrived.append(sum(part.nbytes for part in found))
        return found

    context._WindowParts.exchange = exchange  # type: ignore[method-assign]
    for run in (lambda: engine.evaluate(batches), lambda: engine.step(batches, scenario.lr)):
        arrived.clear()
        seen: list[Collective] = []
        with recorded_collectives(seen, context):
            run()
        assert {one.name for one in seen} == {"all_to_all_single"}
        counted.append(sum(arrived) // (model.num_layers * len(batches)))
    return counted, context_messages(model, parallel, 2 * scenario.seq_len // parallel.cp, 2, 2)[1].received


@pytest.mark.distributed
@pytest.mark.parametrize(("cp", "window", "exchanging"), [(2, 5, 1), (4, 4, 1), (4, 6, 2)])
def test_windows_gather_the_rows_that_they_reach(cp: int, window: int, exchanging: int) -> None:
    """Catches rows that are sent although no window reaches them, gradients that are returned in bf16, and a plan of
    an all-gather."""
    parallel = ParallelConfig(cp=cp, cp_ulysses=exchanging)
    ranks = cp // exchanging
    chunk, row = 24 // (2 * ranks), 2 * 2 * (2 // exchanging) * MODEL.head_dim  # keys and values of two samples
    every = run_ranks(received_in_windows, cp, parallel, window)

    def rows(receiver: int, owner: int) -> int:
        return sum(map(len, keys_needed(receiver, owner, ranks, chunk, window))) if receiver != owner else 0

    for rank, ((forward, both), _) in enumerate(every):
        own = rank // exchanging
        assert forward == 2 * row * sum(rows(own, other) for other in range(ranks))
        assert both - forward == 4 * row * sum(rows(other, own) for other in range(ranks))
    # In the middle a chunk at each end needs those of the neighbour.
    most = (1 if ranks == 2 else 2) * (window - 1)
    assert {planned for _, planned in every} == {(2 * row * most, 4 * row * most)}
    assert max(forward for (forward, _), _ in every) == 2 * row * most


def test_all_to_alls_over_heads_take_time_by_their_bytes() -> None:
    """Catches all-to-alls planned with the bytes of keys and values alone, or as if every rank received everything."""
    model = replace(MODEL, num_heads=32, hidden_size=4096, num_kv_heads=8)

    def seconds(**changes: object) -> tuple[float, float]:
        parallel = replace(ParallelConfig(cp=8, cp_kind=ULYSSES), **changes)
        groups = context_groups(parallel, DEVICE.ranks_per_node)
        return context_seconds(DEVICE, groups, context_messages(model, parallel, 131072 // 8, 2), 2)

    elements = 131072 // 8 * 128
    sent, returned = (32 + 2 * 8) * elements * 2, 32 * elements * 2
    expected = 7 / 8 * (sent + returned) / 100e9 + 2 * 1e-6
    assert seconds() == (pytest.approx(expected), pytest.approx(expected))
    gathered = 2 * 8 * 8 * elements * 2
    assert seconds(cp_kind=ALLGATHER) == (
        pytest.approx(7 / 8 * gathered / 100e9 + 7e-6),
        pytest.approx(7 / 8 * 2 * gathered / 100e9 + 7e-6),
    )
    # Keys and values of 7 ranks in 7 shifts; their gradients in fp32 return likewise.
    block = 2 * 8 * elements * 2
    shifted = 7 * (block / 100e9 + 1e-6)
    returned_s = 7 * (2 * block / 100e9 + 1e-6)
    assert seconds(cp_kind=RING) == (pytest.approx(shifted), pytest.approx(shifted + returned_s))
    assert seconds(cp=1) == (0.0, 0.0)


def test_heads_are_exchanged_inside_a_node_and_keys_between_nodes() -> None:
    """Catches groups planned on other nodes than the grid puts them, and one level timed with the other's bytes."""
    model = replace(MODEL, num_heads=32, hidden_size=4096, num_kv_heads=8)
    parallel = ParallelConfig(tp=2, cp=8, cp_ulysses=4)
    groups = context_groups(parallel, DEVICE.ranks_per_node)
    assert groups == (CommunicationGroup(4, 4), CommunicationGroup(2, 1))
    for name, group in zip(("cp_inner", "cp_outer"), groups, strict=True):
        line = next(line for line in axis_ranks(name, parallel) if 0 in line)
        assert (len(line), sum(rank < 8 for rank in line)) == (group.size, group.per_node)
    said = placement(parallel, DEVICE.ranks_per_node)
    assert (said["cp, heads"], said["cp, keys and values"]) == groups
    head = 16384 * 128 * 2  # of 16,384 tokens on a rank; 16 query heads and 4 KV heads after tensor parallelism
    found = context_seconds(DEVICE, groups, context_messages(model, parallel, 16384, 2), 2)
    exchanged = 3 / 4 * (16 + 2 * 4 + 16) * head / 100e9 + 2e-6
    gathered = 1 / 2 * 2 * 2 * 4 * head  # one KV head of four times the tokens
    assert found == (
        pytest.approx(exchanged + gathered / 10e9 + 20e-6),
        pytest.approx(exchanged + 2 * gathered / 10e9 + 20e-6),
    )


def test_choices_of_context_parallelism_exchange_heads_inside_a_node() -> None:
    """Catches ranks of two nodes that exchange heads, heads that do not divide, and choices that are kinds alone."""
    model, kinds = replace(MODEL, num_heads=32, hidden_size=4096), ((ALLGATHER, 1), (ULYSSES, 1), (RING, 1))

    def choices(**sizes: int) -> tuple[tuple[ContextParallelKind, int], ...]:
        return context_choices(model, ParallelConfig(**sizes), 8)

    assert choices() == ((ALLGATHER, 1),)
    assert choices(cp=2) == kinds
    assert choices(cp=8, tp=2) == (*kinds, (ALLGATHER, 4), (RING, 4))
    assert choices(cp=8) == (*kinds, (ALLGATHER, 4), (RING, 4))
    assert choices(cp=8, tp=8) == ((ALLGATHER, 1), (RING, 1))
    assert choices(cp=12, tp=2) == ((ALLGATHER, 1), (RING, 1), (ALLGATHER, 4), (RING, 4))


def test_shifts_of_a_ring_overlap_with_attention() -> None:
    """Catches a ring whose messages are planned as if ranks waited for all of them, or for none."""
    model, parallel = replace(MODEL, num_heads=32, hidden_size=4096), ParallelConfig(cp=8, cp_kind=RING)
    groups, messages = context_groups(parallel, 8), context_messages(model, parallel, 131072 // 8, 2)
    alone = context_seconds(DEVICE, groups, messages, 2)
    idle = replace(DEVICE, hidden_cost=0.0)
    assert context_seconds(idle, groups, messages, 2, (8 / 7 * alone[0], 8 / 7 * alone[1])) == pytest.approx((0.0, 0.0))
    assert context_seconds(idle, groups, messages, 2, (4 / 7 * alone[0], 0.0)) == pytest.approx(
        (alone[0] / 2, alone[1])
    )


def received_in_blocks(parallel: ParallelConfig, recipe: Float8Recipe, norms: int) -> tuple[list[int], list[float]]:
    """Bytes that a rank receives for tensor parallelism in the forward and backward pass of a block in bf16 and of one
    in FP8, and the plan's; `norms`: of a parallel block, or 0."""
    model = replace(MODEL, num_layers=3, parallel_block=norms > 0, parallel_norms=max(1, norms))
    sizes = {"global_batch_size": 2, "micro_batch_size": 2, "precision": "bfloat16", "float8": Float8(recipe)}
    scenario = scenario_with(model=model, **sizes)
    engine, seen, counted = build_engine(scenario, parallel), list[Collective](), dict[str, int]()

    def count(*_: Any, key: str) -> None:
        counted[key] = sum(one.received_bytes for one in seen)

    for name, layer in engine.layers():
        layer.register_forward_pre_hook(lambda *_: seen.clear())
        layer.register_forward_hook(partial(count, key=f"{name}, forward"))
        if name.startswith("blocks."):
            layer.register_full_backward_pre_hook(lambda *_: seen.clear())
            layer.register_full_backward_hook(partial(count, key=f"{name}, backward"))
    with recorded_collectives(seen, region_linear), recorded_collectives(seen, float8_linear):
        engine.step(step_batches(scenario, 0), scenario.lr)
    # Its seconds are the bytes that a rank receives.
    device = replace(DEVICE, node_gigabytes_per_s=1e-9, node_latency_us=0.0)
    work = Workload(scenario.seq_len, scenario.micro_batch_size, 1, float8=scenario.float8)
    operators = RankOperators(model, parallel, work, device, execution=replace(MEGADS, overlap_tp=False))
    blocks = [replace(operators, fp8=on).block(Recompute.none) for on in (False, True)]
    passes = [(block, way) for block in ("blocks.0", "blocks.1") for way in ("forward", "backward")]
    planned = [part["tp"] for block in blocks for part in (block.forward, block.backward_input)]
    return [counted[f"{block}, {way}"] for block, way in passes], planned


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("sizes", "recipe", "norms"),
    [
        ({"tp": 2, "sequence_parallel": True}, Float8Recipe.tensorwise, 0),
        ({"tp": 2, "sequence_parallel": True}, Float8Recipe.rowwise, 0),
        ({"tp": 2, "sequence_parallel": True}, Float8Recipe.rowwise, 1),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, Float8Recipe.tensorwise, 1),
        ({"tp": 2, "cp": 2, "sequence_parallel": True}, Float8Recipe.tensorwise, 2),
        ({"tp": 2}, Float8Recipe.tensorwise, 0),
        ({"tp": 2}, Float8Recipe.rowwise, 1),
        ({"tp": 2, "cp": 2}, Float8Recipe.rowwise, 0),
    ],
)
def test_bytes_of_a_block_in_fp8_are_those_of_the_collectives(
    sizes: dict[str, Any], recipe: Float8Recipe, norms: int
) -> None:
    """Catches inputs that are planned to be gathered in bf16, magnitudes or scales that are left out, and collectives
    that branches of a parallel block share, or do not."""
    parallel = ParallelConfig(**sizes)
    for counted, planned in run_ranks(received_in_blocks, parallel.world_size, parallel, recipe, norms):
        assert counted == pytest.approx(planned)
