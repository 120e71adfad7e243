"""Tests the order of streams, communicators and buffers on NCCL, on traces of all ranks of a step.

The engine runs unmodified with torch's fake process group. See stream_trace.py and stream_order.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import megads
from megads.engine import native_engine
from megads.engine.bucket import Bucket, WeightGathers
from megads.engine.interface import TrainEngine
from megads.engine.native_engine import NativeEngine
from megads.engine.optimizer import BucketOptimizer
from megads.engine.p2p import P2P_CTAS, P2PCommunicator, p2p_options
from megads.model.config import ModelConfig
from megads.parallel import ring
from megads.parallel.config import ContextParallelKind, ParallelConfig, Recompute, axis_ranks
from megads.parallel.pipeline_actions import Action
from megads.parallel.ring_shifts import Shift
from megads.parallel.schedule import V_SHAPED, ScheduleName
from tests.distributed import run_ranks
from tests.engine.stream_order import collectives_out_of_order, deadlocks, mismatches, stuck, when_needed
from tests.engine.stream_trace import Kernel, Launch, Trace, Wait, trace_ranks
from tests.parity import build_engine, scenario_with, step_batches

SCHEDULES = tuple(ScheduleName)
LAYOUTS = {
    **{f"pp4 {name}": ParallelConfig(pp=4, schedule=name) for name in SCHEDULES},
    "pp2cp2 ZeRO-0": ParallelConfig(pp=2, cp=2, zero_stage=0),
    "tp2pp2dp2sp": ParallelConfig(
        tp=2, pp=2, dp=2, sequence_parallel=True, tp_chunks=2, schedule=ScheduleName.zb_h1, bucket_elements=2048
    ),
    "tp2dp2sp": ParallelConfig(tp=2, dp=2, sequence_parallel=True, bucket_elements=2048),
    "tp2cp2": ParallelConfig(tp=2, cp=2, tp_chunks=2),
    "pp2cp2 ulysses": ParallelConfig(pp=2, cp=2, cp_kind=ContextParallelKind.ulysses, schedule=ScheduleName.zb_h1),
    "cp2dp2 ulysses": ParallelConfig(cp=2, dp=2, cp_kind=ContextParallelKind.ulysses, recompute=Recompute.selective),
    "cp4 ring": ParallelConfig(cp=4, cp_kind=ContextParallelKind.ring),
    "pp2cp2 ring": ParallelConfig(pp=2, cp=2, cp_kind=ContextParallelKind.ring, schedule=ScheduleName.zb_h1),
    "tp2cp2dp2 ring": ParallelConfig(
        tp=2, cp=2, dp=2, cp_kind=ContextParallelKind.ring, recompute=Recompute.selective, bucket_elements=2048
    ),
    "cp4 ulysses 2 x ring": ParallelConfig(cp=4, cp_kind=ContextParallelKind.ring, cp_ulysses=2),
    "pp2cp4 ulysses 2 x allgather": ParallelConfig(
        pp=2, cp=4, cp_ulysses=2, schedule=ScheduleName.zb_h1, recompute=Recompute.selective
    ),
    "ZeRO-2": ParallelConfig(dp=2, zero_stage=2),
    "ZeRO-3": ParallelConfig(tp=2, dp=2, zero_stage=3),
}
PAIR = ParallelConfig(pp=2)
interleaved = partial(ParallelConfig, schedule=ScheduleName.interleaved)
Defect = Callable[[], None]


@dataclass(frozen=True)
class Traced:
    """A step to trace.

    Attributes:
        parallel: the layout.
        micro_batches: number of micro-batches per rank; None: 2 * pp.
        evaluates: whether it is an evaluation instead of a training step.
        defect: changes the engine.
        steps: number of training steps.
    """

    parallel: ParallelConfig
    micro_batches: int | None = None
    evaluates: bool = False
    defect: Defect | None = None
    steps: int = 1


def _traced(step: Traced) -> tuple[dict[int, Trace], list[str]]:
    """Traces a step of every rank of a layout."""
    if step.defect is not None:
        step.defect()
    parallel, micro_batches = step.parallel, step.micro_batches or 2 * step.parallel.pp
    layers = max(2, parallel.placement.num_stages - 1)
    scenario = scenario_with(
        model=ModelConfig(num_layers=layers, hidden_size=24, num_heads=2, vocab_size=64, max_seq_len=16), seq_len=16,
        global_batch_size=micro_batches * parallel.dp, micro_batch_size=1,
    )  # fmt: skip

    def run(engine: TrainEngine) -> None:
        batches = step_batches(scenario, 0, engine.grid.dp.rank, engine.grid.dp.size)
        if step.evaluates:
            engine.evaluate(batches)
            return
        for _ in range(step.steps):
            engine.step(batches, scenario.lr)
        if parallel.overlap_param_gather:
            engine.replicas()  # waits for the weights that a next step would wait for

    return trace_ranks(lambda layout: build_engine(scenario, layout), run, parallel)


def traced(
    parallel: ParallelConfig, defect: Defect | None = None, **changes: Any
) -> tuple[dict[int, Trace], list[str]]:
    """Runs `_traced` in a separate process."""
    found: tuple[dict[int, Trace], list[str]]
    found = run_ranks(_traced, 1, Traced(parallel, defect=defect, **changes))[0]
    return found


def sends(traces: dict[int, Trace]) -> int:
    return sum(isinstance(item, Launch) and item.kind == "send" for trace in traces.values() for item in trace)


@pytest.mark.quick("pp4 1f1b", "pp4 zb_v", "pp4 interleaved", "tp2pp2dp2sp", "tp2cp2", "pp2cp2 ring", "ZeRO-3")
@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_all_ranks_can_run_on_nccl(name: str) -> None:
    """Catches a send that is paired with another send's receive, collectives that ranks launch in contradicting orders,
    a deadlock of kernels, with a hardware queue for each stream or one for all (CUDA_DEVICE_MAX_CONNECTIONS=1) and if
    CUDA synchronizes with everything that runs, memory that is read before it is received or written while it is being
    sent, and communication that is never waited for."""
    parallel = LAYOUTS[name]
    traces, races = traced(parallel)
    assert races == []
    assert mismatches(traces) == []
    assert collectives_out_of_order(traces) == ""
    assert deadlocks(traces) == []
    assert any(isinstance(item, Launch) for item in traces[0])
    if parallel.pp > 1:
        hops = sum(a != b for a, b in pairwise(parallel.placement.ranks))
        assert sends(traces) == 2 * hops * 2 * parallel.pp * (parallel.world_size // parallel.pp)


GATHERS = ("_allgather_base", "all_gather_single")
gathered = partial(ParallelConfig, bucket_elements=2048, overlap_param_gather=True)
OVERLAPPED = {
    "dp2": gathered(dp=2),
    "tp2dp2sp": gathered(tp=2, dp=2, sequence_parallel=True, tp_chunks=2),
    "pp2dp2": gathered(pp=2, dp=2),
    "pp2dp2 interleaved": gathered(pp=2, dp=2, schedule=ScheduleName.interleaved),
    "pp2dp2 zb_v": gathered(pp=2, dp=2, schedule=ScheduleName.zb_v),
    "pp2cp2 ring": gathered(pp=2, cp=2, cp_kind=ContextParallelKind.ring),
}


@pytest.mark.quick("dp2", "pp2dp2 interleaved")
@pytest.mark.distributed
@pytest.mark.parametrize("name", OVERLAPPED)
def test_gathers_of_weights_overlap_with_the_next_forward_pass(name: str) -> None:
    """Catches all-gathers that end before the next step begins, layers that read weights which are still arriving, a
    gather that begins before the update has written what it sends, one that other ranks launch at another place, and a
    deadlock with the pipeline's messages, whatever the hardware queues."""
    parallel = OVERLAPPED[name]
    traces, races = traced(parallel, steps=2)
    assert races == mismatches(traces) == deadlocks(traces) == []
    assert collectives_out_of_order(traces) == ""
    for trace in traces.values():
        waits = {item.number: place for place, item in enumerate(trace) if isinstance(item, Wait)}
        gathers = [
            (place, waits[item.number])
            for place, item in enumerate(trace)
            if isinstance(item, Launch) and item.kind in GATHERS and item.ranks in axis_ranks("data", parallel)
        ]
        hidden = [any(isinstance(item, Kernel) for item in trace[begin:end]) for begin, end in gathers]
        assert len(hidden) > 4 and sum(hidden) > len(hidden) // 2


def _no_wait_for_new_weights() -> None:
    inner = Bucket.end_gather

    def end(bucket: Bucket) -> None:
        bucket._gather = SimpleNamespace(wait=lambda: None)
        inner(bucket)

    Bucket.end_gather = end  # type: ignore[method-assign]


def _gathers_before_the_update() -> None:
    inner = BucketOptimizer._update

    def update(optimizer: BucketOptimizer, learning_rate: float) -> None:
        begin, gathers = WeightGathers.begin, optimizer._gathers
        gathers.begin()
        WeightGathers.begin = lambda _: None
        optimizer.finish_gathers = lambda: None
        inner(optimizer, learning_rate)
        WeightGathers.begin = begin
        del optimizer.finish_gathers

    BucketOptimizer._update = update  # type: ignore[method-assign]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("defect", "race"),
    [(_no_wait_for_new_weights, "may be writing"), (_gathers_before_the_update, "may be reading")],
)
def test_planted_races_of_new_weights_are_found(defect: Defect, race: str) -> None:
    """Catches a trace that does not see what all-gathers of weights read and write."""
    traces, races = traced(OVERLAPPED["dp2"], defect, steps=2)
    assert any(race in found for found in races)
    assert mismatches(traces) == []


def _initialisations(package: Path) -> dict[str, list[str | None]]:
    """Keywords of every init_process_group call in a package."""
    return {
        f"{path.relative_to(package)}:{node.lineno}": [keyword.arg for keyword in node.keywords]
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "init_process_group"
    }


def test_process_groups_are_created_without_device_id() -> None:
    """Catches a device_id in init_process_group, with which all p2p of a group shares one communicator and stream
    (pytorch#154132): the two directions between two ranks would take turns."""
    found = _initialisations(Path(megads.__file__).parent)
    assert found and not {place for place, keywords in found.items() if "device_id" in keywords}


def _messages_when_needed() -> None:
    build, alone = ParallelConfig.schedule_of, native_engine.forward_only
    ParallelConfig.schedule_of = lambda parallel, micro_batches: when_needed(build(parallel, micro_batches))
    native_engine.forward_only = lambda schedule: when_needed(alone(schedule))


HANGS = {
    "pp2 m4": Traced(interleaved(pp=2), 4),
    "pp2 v4 m8": Traced(interleaved(pp=2, virtual_stages=4), 8),
    "pp3 m8": Traced(interleaved(pp=3), 8),
    "pp2dp2 m16": Traced(interleaved(pp=2, dp=2), 16),
    "pp4 contiguous": Traced(interleaved(pp=4, contiguous_micro_batches=8), 8),
}
"""Interleaved steps that deadlocked with one hardware queue before their messages had one order; of the evaluations
only the last one did."""


@pytest.mark.quick("False-pp2 m4", "True-pp2 m4")
@pytest.mark.distributed
@pytest.mark.parametrize("name", HANGS)
@pytest.mark.parametrize("evaluates", [False, True])
def test_interleaved_pipelines_need_one_message_order(name: str, evaluates: bool) -> None:
    """Catches an exchange that deadlocks on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=1 where several sends to one peer
    follow each other, and a model of NCCL that does not see it."""
    step = replace(HANGS[name], evaluates=evaluates)
    before, _ = run_ranks(_traced, 1, replace(step, defect=_messages_when_needed))[0]
    assert stuck(before) == []
    assert bool(stuck(before, connections=1)) == (not evaluates or name == "pp4 contiguous")
    traces, races = run_ranks(_traced, 1, step)[0]
    assert races == mismatches(traces) == deadlocks(traces) == []
    assert sends(before) == sends(traces) > 0


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_v_shaped_schedules_deadlock_without_one_message_order(name: str) -> None:
    """Catches a model of NCCL in which V shapes do not need the order either: with messages when they are needed they
    deadlock with one queue, and as soon as computation synchronizes with concurrent kernels."""
    before, races = traced(ParallelConfig(pp=4, schedule=ScheduleName(name)), _messages_when_needed)
    assert races == [] and stuck(before) == []
    assert bool(stuck(before, connections=1)) == bool(stuck(before, synchronises=True)) == (name in V_SHAPED)


def _first_two_sends_swapped() -> None:
    inner, kept = P2PCommunicator.send, []

    def send(messages: P2PCommunicator, action: Action, tensor: Any) -> None:
        if dist.get_rank() == 0 and len(kept) < 2:
            kept.append((action, tensor))
            if len(kept) < 2:
                return
            for message in reversed(kept):
                inner(messages, *message)
            return
        inner(messages, action, tensor)

    P2PCommunicator.send = send  # type: ignore[method-assign]


def _buffer_released_early() -> None:
    inner = NativeEngine._run_forward

    def run_forward(engine: NativeEngine, micro_batch: int, stage: int, hidden: Any, buffer: Any) -> None:
        inner(engine, micro_batch, stage, hidden, buffer)
        if buffer is not None:
            engine._p2p.release(buffer)
            engine._in_flight[micro_batch, stage].buffer = None

    NativeEngine._run_forward = run_forward  # type: ignore[method-assign]


def _no_wait_for_a_receive() -> None:
    def take(messages: P2PCommunicator, action: Action) -> Any:
        _, buffer = messages._arriving.pop(action)
        for send in messages._acknowledged.get(action, ()):
            messages._end(send)
        return buffer

    P2PCommunicator.take = take  # type: ignore[method-assign]


def _sent_tensor_overwritten() -> None:
    inner = P2PCommunicator.send

    def send(messages: P2PCommunicator, action: Action, tensor: Any) -> None:
        inner(messages, action, tensor)
        tensor.mul_(2.0)

    P2PCommunicator.send = send  # type: ignore[method-assign]


def _no_wait_for_a_reduction() -> None:
    inner = Bucket.finish

    def finish(bucket: Bucket) -> None:
        bucket._reduction = None
        inner(bucket)

    Bucket.finish = finish  # type: ignore[method-assign]


@pytest.mark.always
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("defect", "layout", "micro_batches", "race"),
    [
        # With one micro-batch, nothing else is received into the buffer before the backward pass reads it.
        (_buffer_released_early, PAIR, 1, "touches a buffer that was given back"),
        (_no_wait_for_a_receive, PAIR, 4, "may be writing"),
        (_sent_tensor_overwritten, PAIR, 4, "may be reading"),
        (_no_wait_for_a_reduction, ParallelConfig(dp=2), 2, "never waited for"),
    ],
)
def test_planted_races_are_found(defect: Defect, layout: ParallelConfig, micro_batches: int, race: str) -> None:
    """Catches a trace that records no races: each defect leaves the send/receive pairs and the order unchanged."""
    traces, races = traced(layout, defect, micro_batches=micro_batches)
    assert any(race in found for found in races)
    assert mismatches(traces) == []


@pytest.mark.distributed
def test_planted_swaps_of_pairs_and_orders_are_found() -> None:
    """Catches a check that counts sends but does not tell them apart, and one that checks each group separately: two
    collectives of groups that share ranks, swapped on one rank, match within each group and yet deadlock."""
    traces, _ = traced(PAIR, _first_two_sends_swapped)
    assert any("micro-batch 1" in found and "micro-batch 0" in found for found in mismatches(traces))
    traces, _ = traced(ParallelConfig(tp=2, dp=2))
    assert collectives_out_of_order(traces) == ""
    own = traces[1]
    places = [place for place, item in enumerate(own) if isinstance(item, Launch)]
    first = next(a for a, b in pairwise(places) if len(own[a].ranks) < len(own[b].ranks))  # type: ignore[union-attr]
    second = places[places.index(first) + 1]
    own[first], own[second] = own[second], own[first]
    assert mismatches(traces) == []
    assert "contradicting orders" in collectives_out_of_order(traces)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_message_kernels_hold_few_multiprocessors() -> None:
    """Catches receives posted ahead whose kernels take up to 32 SMs from the computation that they overlap."""
    assert p2p_options(None).config.max_ctas == P2P_CTAS


def _a_shift_the_other_way() -> None:
    inner = ring.ring_shifts

    def shifts(rank: int, size: int, chunk: int, window: int | None) -> tuple[Shift, ...]:
        found = inner(rank, size, chunk, window)
        return found[::-1] if rank == 1 else found

    ring.ring_shifts = shifts


def _a_gradient_returned_too_late() -> None:
    """The gradients of a block are overwritten while they are being sent."""
    inner = ring._Ring.return_gradients

    def back(self: ring._Ring, shift: Shift, grads: Any) -> Any:
        transfer = inner(self, shift, grads)
        grads.zero_()
        return transfer

    ring._Ring.return_gradients = back


@pytest.mark.distributed
def test_planted_faults_of_a_ring_are_found() -> None:
    """Catches a check that does not compare the parts of all-to-alls, and a trace that does not see what they read."""
    layout = ParallelConfig(cp=4, cp_kind=ContextParallelKind.ring)
    traces, _ = traced(layout, _a_shift_the_other_way)
    assert any("rank 1 sends" in found and "which expects" in found for found in mismatches(traces))
    _, races = traced(layout, _a_gradient_returned_too_late)
    assert any("may be reading" in found for found in races)
