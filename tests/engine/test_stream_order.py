"""Tests the order of streams, communicators and buffers on NCCL, on traces of all ranks of a step.

The engine runs unmodified with torch's fake process group. See stream_trace.py and stream_order.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megads
from megads.engine import p2p as engine_p2p
from megads.engine.optimizer import Bucket
from megads.engine.p2p import P2P_CTAS, P2PCommunicator, p2p_options, receives_ahead
from megads.engine.pipeline_engine import StageEngine
from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.pipeline_actions import Action
from megads.parallel.schedule import ScheduleName
from tests.distributed import run_ranks
from tests.engine.stream_order import collectives_out_of_order, mismatches, stuck
from tests.engine.stream_trace import Launch, Trace, trace_ranks
from tests.parity import build_engine, scenario_with, step_batches

SCHEDULES = tuple(ScheduleName)
V_SHAPED = ("zb_v", "dualpipe_v")
LAYOUTS = {
    **{f"pp4 {name}": ParallelConfig(pp=4, schedule=name) for name in SCHEDULES},
    "pp2cp2 ZeRO-0": ParallelConfig(pp=2, cp=2, zero_stage=0),
    "tp2pp2dp2sp": ParallelConfig(
        tp=2, pp=2, dp=2, sequence_parallel=True, tp_chunks=2, schedule=ScheduleName.zb_h1, bucket_elements=2048
    ),
    "tp2dp2sp": ParallelConfig(tp=2, dp=2, sequence_parallel=True, bucket_elements=2048),
    "tp2cp2": ParallelConfig(tp=2, cp=2, tp_chunks=2),
    "ZeRO-2": ParallelConfig(dp=2, zero_stage=2),
    "ZeRO-3": ParallelConfig(tp=2, dp=2, zero_stage=3),
}
PAIR = ParallelConfig(pp=2)
Defect = Callable[[], None]


def _as_on_gpus(inner: Callable[..., int]) -> Callable[..., int]:
    return lambda placement, _device: inner(placement, torch.device("cuda"))


def _traced(parallel: ParallelConfig, defect: Defect | None = None) -> tuple[dict[int, Trace], list[str]]:
    """Traces a step of every rank of a layout, with 2 * pp micro-batches."""
    engine_p2p.receives_ahead = _as_on_gpus(engine_p2p.receives_ahead)
    if defect is not None:
        defect()
    layers = max(2, parallel.placement.num_stages - 1)
    scenario = scenario_with(
        model=ModelConfig(num_layers=layers, hidden_size=24, num_heads=2, vocab_size=64, max_seq_len=16), seq_len=16,
        global_batch_size=2 * parallel.pp * parallel.dp, micro_batch_size=1,
    )  # fmt: skip
    return trace_ranks(
        lambda layout: build_engine(scenario, layout),
        lambda engine: engine.step(step_batches(scenario, 0, engine.grid.dp.rank, engine.grid.dp.size), scenario.lr),
        parallel,
    )


def traced(parallel: ParallelConfig, defect: Defect | None = None) -> tuple[dict[int, Trace], list[str]]:
    """Runs `_traced` in a separate process."""
    found: tuple[dict[int, Trace], list[str]] = run_ranks(_traced, 1, parallel, defect)[0]
    return found


def sends(traces: dict[int, Trace]) -> int:
    return sum(isinstance(item, Launch) and item.kind == "send" for trace in traces.values() for item in trace)


@pytest.mark.quick("pp4 1f1b", "pp4 zb_v", "pp4 interleaved", "tp2pp2dp2sp", "tp2cp2", "ZeRO-3")
@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_all_ranks_can_run_on_nccl(name: str) -> None:
    """Catches a send that is paired with another send's receive, collectives that ranks launch in contradicting orders,
    a deadlock of kernels, with a hardware queue for each stream or one for all (CUDA_DEVICE_MAX_CONNECTIONS=1), memory
    that is read before it is received or written while it is being sent, and communication that is never waited for."""
    parallel = LAYOUTS[name]
    traces, races = traced(parallel)
    assert races == []
    assert mismatches(traces) == []
    assert collectives_out_of_order(traces) == ""
    assert stuck(traces) == stuck(traces, one_connection=True) == []
    if parallel.placement.ranks == tuple(range(parallel.pp)):
        assert stuck(traces, synchronises=True) == []
    assert any(isinstance(item, Launch) for item in traces[0])
    if parallel.pp > 1:
        hops = sum(a != b for a, b in pairwise(parallel.placement.ranks))
        assert sends(traces) == 2 * hops * 2 * parallel.pp * (parallel.world_size // parallel.pp)


def _initialisations(package: Path) -> dict[str, list[str | None]]:
    """Keywords of every init_process_group call in a package."""
    return {
        f"{path.relative_to(package)}:{node.lineno}": [keyword.arg for keyword in node.keywords]
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "init_process_group"
    }


def test_no_device_id() -> None:
    """Catches a device_id in init_process_group, with which all p2p of a group shares one communicator and stream
    (pytorch#154132): see the deadlocks in `test_why_receives_are_posted_as_they_are`."""
    found = _initialisations(Path(megads.__file__).parent)
    assert found and not {place for place, keywords in found.items() if "device_id" in keywords}


def _receives_ahead() -> None:
    engine_p2p.receives_ahead = lambda placement, device: 1  # type: ignore[assignment]


def _receives_at_the_point_of_need() -> None:
    engine_p2p.receives_ahead = lambda placement, device: 0  # type: ignore[assignment]


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_why_receives_are_posted_as_they_are(name: str) -> None:
    """Catches another choice than `receives_ahead`'s: in one-way pipelines a receive that is posted ahead deadlocks as
    soon as computation synchronizes with concurrent kernels; V-shaped ones deadlock without it if all streams share a
    hardware queue; and with device_id in init_process_group all p2p of a group shares a stream, and every schedule that
    posts receives ahead deadlocks."""
    layout = ParallelConfig(pp=4, schedule=ScheduleName(name))
    ahead, _ = traced(layout, _receives_ahead)
    assert stuck(ahead) == stuck(ahead, one_connection=True) == []
    assert stuck(ahead, synchronises=True) and stuck(ahead, p2p_by_group=True)
    at_need, races = traced(layout, _receives_at_the_point_of_need)
    assert races == [] and stuck(at_need) == []
    assert bool(stuck(at_need, one_connection=True)) == bool(stuck(at_need, synchronises=True)) == (name in V_SHAPED)


def test_receives_ahead() -> None:
    """Catches receive kernels that spin during the computation on GPUs, and V shapes that post no receives ahead."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    found = {name: receives_ahead(ParallelConfig(pp=4, schedule=name).placement, gpu) for name in SCHEDULES}
    assert found == {"1f1b": 0, "interleaved": 0, "zb_h1": 0, "zb_v": 1, "dualpipe_v": 1}
    assert receives_ahead(PAIR.placement, cpu) == 1


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
    inner = StageEngine._run_forward

    def run_forward(engine: StageEngine, micro_batch: int, stage: int, hidden: Any, buffer: Any) -> None:
        inner(engine, micro_batch, stage, hidden, buffer)
        if buffer is not None:
            engine._p2p.release(buffer)
            engine._in_flight[micro_batch, stage].buffer = None

    StageEngine._run_forward = run_forward  # type: ignore[method-assign]


def _no_wait_for_a_receive() -> None:
    def take(messages: P2PCommunicator, action: Action) -> Any:
        _, buffer = messages._arriving.pop(action)
        for send in messages._acknowledged.get(action, ()):
            messages._end(send)
        peer = messages._peers[action]
        messages._links[peer].posted -= 1
        messages._post_ahead(peer)
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
    ("defect", "layout", "race"),
    [
        (_buffer_released_early, PAIR, "touches a buffer that was given back"),
        (_no_wait_for_a_receive, PAIR, "may be writing"),
        (_sent_tensor_overwritten, PAIR, "may be reading"),
        (_no_wait_for_a_reduction, ParallelConfig(dp=2), "never waited for"),
    ],
)
def test_races_are_seen(defect: Defect, layout: ParallelConfig, race: str) -> None:
    """Catches a trace that records no races: each defect leaves the send/receive pairs and the order unchanged."""
    traces, races = traced(layout, defect)
    assert any(race in found for found in races)
    assert mismatches(traces) == []


@pytest.mark.distributed
def test_swapped_pairs_and_orders_are_seen() -> None:
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
