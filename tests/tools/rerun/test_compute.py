"""Silent data corruption is detected and attributed in every layout, and the check does not change training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megads.tools.rerun.silent_corruption
from megads.engine.interface import Shard
from megads.errors import UnhealthyNode
from megads.ops.config import Float8, Float8Recipe
from megads.parallel.grid import ComputeTrace
from megads.runtime.hooks import TrainState
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import EVENTS_FILE
from megads.tools.rerun.repeated_step import ComputeComparison, Difference, Trace, checksum
from megads.tools.rerun.silent_corruption import ComputeFault, ComputeHook, compute_fault
from megads.tools.verify.layout import rank_batches
from tests.distributed import run_ranks
from tests.engine.test_moe import scenario as moe_scenario
from tests.engine.test_training import filling_from, state
from tests.faulty_products import FaultyProducts, always_the_same, at_random, once
from tests.parity import LAYOUTS, MODEL, ParallelConfig, build_engine, digest, scenario_with
from tests.resilience.test_spikes import StepLoss, info

MORE = {
    "dp3": ParallelConfig(dp=3),
    "tp2dp3": ParallelConfig(tp=2, dp=3),
    "ep2 of experts": ParallelConfig(dp=2, ep=2),
    "ep2dp2 of experts": ParallelConfig(dp=4, ep=2),
    "cp2ep4dp2 of experts": ParallelConfig(cp=2, dp=4, ep=4),
    "tp2dp2sp in FP8": ParallelConfig(tp=2, dp=2, sequence_parallel=True),
    "tp2ep2dp2 of whole experts": ParallelConfig(tp=2, dp=2, ep=2, sequence_parallel=True, expert_tp=False),
}
WRONG = {"same": always_the_same, "random": at_random}
WGRAD = ("weight_gradient", "add_weight_gradient")

# Layout, fault, GEMM functions that are counted, faulty rank, and ranks that must be named.
FAULTS: list[tuple[str, Any, Sequence[str], int, list[int]]] = [
    ("tp2pp2", 0, (), 1, [1]),
    ("tp2pp2", 3, ("linear_into",), 2, [2]),
    ("tp2pp2", 0, ("input_gradient",), 3, [3]),
    ("tp2pp2", 2, WGRAD, 0, [0]),
    ("tp2pp2", "random", (), 1, [1]),
    ("tp2pp2", "random", ("input_gradient",), 2, [2]),
    ("single", 2, (), 0, [0]),
    ("dp2", 1, (), 1, [1]),
    ("dp2", "same", (), 1, [0, 1]),
    ("dp3", "same", (), 1, [1]),
    ("dp3", "random", (), 2, [2]),
    ("tp2dp3", "same", ("linear_into",), 3, [3]),
    ("tp2pp2sp", 1, (), 3, [3]),
    ("tp2dp2sp", 1, ("input_gradient",), 2, [2]),
    ("pp2 interleaved", 4, (), 1, [1]),
    ("pp2 zb_h1", 5, WGRAD, 0, [0]),
    ("pp2 zb_v", 4, ("input_gradient",), 0, [0]),
    ("pp2dp2 dualpipe_v", 4, (), 3, [3]),
    ("pp2cp2", 1, (), 2, [2]),
    ("cp2dp2", 1, (), 3, [3]),
    ("pp2dp2, ZeRO-0", 1, (), 1, [1]),
    ("zero2dp2", 1, (), 1, [1]),
    ("zero2tp2dp2", 1, ("linear_into",), 1, [1]),
    ("zero3dp3", "same", (), 1, [1]),
    ("zero3tp2dp2", 1, (), 2, [2]),
    ("hierarchical", 1, (), 3, [3]),
    ("ep2 of experts", 1, (), 1, [1]),
    ("ep2dp2 of experts", 1, (), 2, [2]),
    ("ep2dp2 of experts", "same", ("input_gradient",), 3, [1, 3]),
    ("cp2ep4dp2 of experts", 1, (), 5, [5]),
    ("tp2ep2dp2 of whole experts", 1, (), 1, [1]),
    ("tp2dp2sp in FP8", 1, (), 2, [2]),
]


def checked_steps(
    layout: str, folder: Path, precision: str, faults: Sequence[tuple[Any, Sequence[str], int]]
) -> list[tuple[str, bool]]:
    """Trains each step without a check, and again with a check and a fault; returns the reported fault, and whether
    results and state are bitwise equal."""
    megads.tools.rerun.silent_corruption.HEAD_START_S = 0.0
    batch = 8 if layout == "hierarchical" else 12
    model = replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)
    if "experts" in layout:
        model, batch = replace(moe_scenario("deepseek").model, hidden_dropout=0.1), 8
    scenario = scenario_with(precision=precision, model=model, global_batch_size=batch)
    if "FP8" in layout:
        scenario = replace(scenario, float8=Float8(Float8Recipe.tensorwise))
    engine = build_engine(scenario, (LAYOUTS | MORE)[layout])
    rank, control, watched = engine.grid.rank, engine.grid.control, num_forward_hooks(engine)
    hook, said = ComputeHook(engine, EventWriter(folder, enabled=rank == 0), 1), []
    for number, (wrong, kinds, faulty) in enumerate([(None, (), 0), *faults]):
        batches = rank_batches(scenario, number, engine.grid)
        saved, steps = state(engine), engine.optimizer_steps
        expected = step_bits(engine, batches, scenario.lr)
        engine.load_shards(filling_from(saved), steps)
        hook.on_start(TrainState(step=number))
        broken = FaultyProducts(once(wrong) if isinstance(wrong, int) else WRONG.get(wrong, lambda _: None), *kinds)
        if rank == faulty:
            broken.install()
        try:
            same, fault = step_bits(engine, batches, scenario.lr) == expected, "none"
        except UnhealthyNode as error:
            fault, same = str(error), control.any(False)
            engine.load_shards(filling_from(saved), steps)
        finally:
            broken.remove()
            hook.on_end(TrainState())
        said.append((fault, not control.any(not same)))
    assert num_forward_hooks(engine) == watched, "a check leaves its hooks behind"
    return said


def num_forward_hooks(engine: Any) -> int:
    return sum(len(layer._forward_hooks) for _, layer in engine.layers())


def step_bits(engine: Any, batches: Any, lr: float) -> tuple[Any, dict[str, str], list[dict[str, str]]]:
    """The result of a step, digests of the optimizer state after it, and of the gradients at each call of a watch."""
    watched: list[dict[str, str]] = []
    engine.watch_gradients(lambda shards: watched.append(digests(shards)))
    return engine.step(batches, lr), digests(engine.named_shards(owned=False)), watched


def digests(shards: Sequence[Shard]) -> dict[str, str]:
    return {f"{shard.key} {shard.offset}": digest(shard.tensor) for shard in shards}


@pytest.mark.distributed
@pytest.mark.quick("dp3")
@pytest.mark.always("dp3")
@pytest.mark.parametrize("layout", dict.fromkeys(layout for layout, *_ in FAULTS))
def test_a_wrong_product_is_found_and_its_rank_named(layout: str, tmp_path: Path) -> None:
    """Catches a faulty GEMM that is not found or is applied, a rank blamed for values that it received, recomputations
    that differ without a fault (dropout, stale buffers), and a checked step not bitwise equal to an unchecked one."""
    wanted = [fault for fault in FAULTS if fault[0] == layout]
    given = [fault[1:4] for fault in wanted]
    precision = "bfloat16" if layout in ("tp2pp2", "zero3dp3", "cp2dp2") else "float32"
    world = (LAYOUTS | MORE)[layout].world_size
    everyone = run_ranks(checked_steps, world, layout, tmp_path, precision, given)
    assert all(said == everyone[0] for said in everyone)
    healthy, *broken = everyone[0]
    assert healthy == ("none", True)
    events = [event for event in read_json_lines(tmp_path / EVENTS_FILE) if event["event"] == "compute_differs"]
    assert len(events) == len(wanted)
    for (_, wrong, _, _, named), event, (fault, same) in zip(wanted, events, broken, strict=True):
        assert event["ranks"] == named, event
        assert event["fault"] == ("transient" if isinstance(wrong, int) else "persistent")
        assert (fault == "none" and same) if isinstance(wrong, int) else f"rank {named[0]}: " in fault, event


def suspicious_steps(layout: str, folder: Path, faulty: int) -> list[bool]:
    """Trains a suspicious step without a fault, and one with; returns whether each equals an unchecked run's."""
    engine, scenario = build_engine(scenario_with(), LAYOUTS[layout]), scenario_with()
    rank, same = engine.grid.rank, []
    events = EventWriter(folder, enabled=rank == 0)
    for number in (0, 1):
        hook = ComputeHook(engine, events, 0, lambda _step, _loss, _norm: True)
        batches, saved, steps = rank_batches(scenario, number, engine.grid), state(engine), engine.optimizer_steps
        expected = step_bits(engine, batches, scenario.lr)
        engine.load_shards(filling_from(saved), steps)
        broken = FaultyProducts(once(0))
        hook.on_start(TrainState(step=number))
        if number and rank == faulty:
            broken.install()
        same.append(step_bits(engine, batches, scenario.lr) == expected)
        broken.remove()
        hook.on_end(TrainState())
    return same


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["tp2pp2", "pp2dp2", "zero2dp2", "zero3dp2"])
def test_a_suspicious_step_is_computed_again(layout: str, tmp_path: Path) -> None:
    """Catches an update that is made before the step is recomputed, and gradients that are accumulated twice."""
    world, faulty = LAYOUTS[layout].world_size, 1
    assert run_ranks(suspicious_steps, world, layout, tmp_path, faulty) == [[True, True]] * world
    plain, wrong = read_json_lines(tmp_path / EVENTS_FILE)
    assert (plain["event"], plain["step"]) == ("suspicious_step", 1)
    assert (wrong["event"], wrong["step"], wrong["fault"]) == ("compute_differs", 2, "transient")
    assert faulty in wrong["ranks"]


def test_every_third_step_is_checked(tmp_path: Path) -> None:
    """Catches a check one step too late, when no checkpoint is saved, and a check of every step."""
    engine: Any = None
    hook, due = ComputeHook(engine, EventWriter(tmp_path, enabled=False), 3), []
    for step in range(1, 8):
        due.append(hook.should_check())
        hook.on_step(info(StepLoss(step, step, 1.0, 1.0)))
    assert due == [False, False, True, False, False, True, False]


def test_a_checksum_sees_any_flip_and_any_order() -> None:
    """Catches a checksum that misses two swapped elements, or errors of +1 and -1 at different positions."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)).to(dtype)
        words = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
        swapped = ((0, 1), (3, 65_540), (65_536, 4))
        for one, other in swapped:
            words[other] += words[one] == words[other]  # two bytes may be equal
        known = checksum(x).item()
        assert checksum(x.clone()).item() == known
        for place in (0, 1, 65_535, 65_536, 70_000):
            for bit in range(8 * x.element_size() - 1):
                words[place] ^= 1 << bit
                assert checksum(x).item() != known
                words[place] ^= 1 << bit
        for one, other in swapped:
            assert words[one] != words[other]
            words[[one, other]] = words[[other, one]]
            assert checksum(x).item() != known
            words[[one, other]] = words[[other, one]]
        for change in ([1, -1], [1, -2, 1], [1, -3, 3, -1]):
            words[10 : 10 + len(change)] += torch.tensor(change, dtype=words.dtype)
            assert checksum(x).item() != known
            words[10 : 10 + len(change)] -= torch.tensor(change, dtype=words.dtype)
        assert checksum(x).item() == known
    assert checksum(torch.zeros(3, 2).t()).item() == checksum(torch.zeros(2, 3)).item()


def test_two_traces_part_where_the_first_entry_differs() -> None:
    """Catches a comparison of totals, which does not locate a difference, and entries recorded outside of a check."""
    trace, traces = ComputeTrace(), []
    for wrong in (False, True):
        trace.record("before", torch.ones(2))
        entries = list[tuple[str, bool, torch.Tensor]]()
        trace.recorder = lambda name, x, received, to=entries: to.append((name, received, checksum(x)))
        for number in range(3):
            trace.record(f"entry {number}", torch.full((2,), float(wrong and number > 0)), received=number == 1)
        with trace.paused():
            trace.record("a warm-up", torch.ones(2))
        trace.recorder = None
        names, received, checksums = zip(*entries, strict=True)
        traces.append(Trace(list(names), list(received), torch.stack(checksums)))
    assert traces[0].first_difference(traces[0]) is None
    assert traces[0].first_difference(traces[1]) == Difference(1, "entry 1", received=True)


def compared(rank: int, peer: int, coordinates: tuple[int, int], **found: Difference) -> ComputeComparison:
    return ComputeComparison(rank, peer, coordinates, found.get("by_rank"), found.get("by_peer"), found.get("across"))


def test_who_computed_wrongly() -> None:
    """Catches blame on the rank that a wrong value reached first in time, not in the order of computation."""
    sent, later = Difference(4, "a message", received=False), Difference(9, "a gradient", received=False)
    got = Difference(2, "a received p2p tensor", received=True)
    own = [
        compared(0, 0, (0, 0), by_rank=later),
        compared(1, 1, (0, 0), by_rank=sent),
        compared(2, 2, (1, 0), by_rank=got),
    ]
    assert compute_fault(own) == ComputeFault(persistent=False, found=((1, "a message"),))
    # The peer of rank 0 is rank 2, which computed rank 0's samples wrongly once.
    pairs = [compared(0, 2, (0, 0), by_peer=sent), compared(2, 0, (0, 1))]
    assert compute_fault(pairs).ranks == [2]
    # Two faulty ranks: rank 2's earlier error does not explain rank 0's error in another group.
    assert compute_fault([compared(0, 2, (0, 0), by_rank=later, by_peer=sent), pairs[1]]).ranks == [0, 2]
    assert compute_fault([compared(2, 2, (1, 0), by_rank=got)]).found == ((2, "a received p2p tensor"),)
    # Every rank reproduces its own result: of three replicas, the one in both pairs is at fault; of two, both may be.
    three = [
        compared(0, 2, (0, 0)), compared(1, 0, (0, 1), across=sent), compared(2, 1, (0, 2), across=sent)
    ]  # fmt: skip
    assert compute_fault(three) == ComputeFault(persistent=True, found=((1, "a message"),))
    two = [compared(0, 1, (0, 0), across=sent), compared(1, 0, (0, 1), across=sent)]
    assert compute_fault(two).ranks == [0, 1]
