"""ops.cuda_graphs=auto: the rule, agreement of all ranks, and a decision that later starts keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megads.config.root import RootConfig
from megads.engine import micro_batch_graphs
from megads.engine.interface import PassTimes
from megads.engine.micro_batch_graphs import EAGER_STEPS
from megads.model.config import ModelConfig
from megads.ops.config import TORCH
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.tools.autotune.graphs import GRAPHS_EVENT, GraphsDecision, GraphsHook, decide, graphs_key, kept_graphs
from tests.distributed import run_ranks
from tests.parity import LAYOUTS, build_engine, scenario_with, step_batches

CPU = torch.device("cpu")
UNDECIDED = replace(TORCH, cuda_graphs=None)
CONFIG = RootConfig(model=ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512))

HOST_BOUND, DEVICE_BOUND = PassTimes(8, 60.0, 20.0), PassTimes(8, 20.0, 60.0)


@pytest.mark.parametrize(
    ("ranks", "captured", "reason"),
    [
        ([HOST_BOUND], True, "the GPU waits for the host"),
        ([DEVICE_BOUND], False, "the GPU does not wait for the host"),
        ([PassTimes(8, 60.0, 59.0)], False, "graphs would save less than 3%"),
        ([PassTimes(8, 60.0, 58.0)], True, "the GPU waits for the host"),
        # One rank with slow kernels: all others wait for it, however slow their hosts are.
        ([HOST_BOUND, replace(HOST_BOUND, device_ms=70.0)], False, "the GPU does not wait for the host"),
        ([DEVICE_BOUND, replace(DEVICE_BOUND, host_ms=90.0)], True, "the GPU waits for the host"),
        # The reduction is overlapped with eager passes only: 40 ms against 40 saved by one micro-batch, or by eight.
        ([replace(HOST_BOUND, reduce_ms=40.0)] * 2, True, "the GPU waits for the host"),
        (
            [replace(HOST_BOUND, micro_batches=1, reduce_ms=40.0), replace(HOST_BOUND, micro_batches=1, reduce_ms=9.0)],
            False,
            "graphs would save less than 3%, as the reduction of gradients, 40 ms, would not be overlapped",
        ),
        (
            [HOST_BOUND, replace(HOST_BOUND, device_ms=None, failure="out of memory")],
            False,
            "graphs do not work: out of memory",
        ),
    ],
)
def test_graphs_are_taken_where_they_shorten_a_step(ranks: Sequence[PassTimes], captured: bool, reason: str) -> None:
    """Catches graphs for a run whose GPU is busy anyway, for one whose reduction was hidden, or with a rank that has
    none; and a rank whose times are ignored."""
    decision = decide(ranks)
    assert (decision.captured, decision.reason) == (captured, reason)
    assert decide(list(reversed(ranks))) == decision, "on whichever rank"
    assert decision.text.endswith(reason) and f"{decision.times.host_ms:.3g} ms" in decision.text
    assert GraphsDecision.from_dict(decision.to_dict()) == decision


def decided(run_dir: Path) -> tuple[bool, bool | None, bool | None]:
    """Whether this rank's engine has graphs; and what later starts take, of the same and of another shape."""
    rank, parallel = dist.get_rank(), LAYOUTS["dp2"]
    scenario = scenario_with()
    engine: Any = build_engine(scenario, parallel)
    micro_batch_graphs.capture = lambda run, _pool: run  # type: ignore[assignment]
    key, events = graphs_key(CONFIG, UNDECIDED, CPU), EventWriter(run_dir, rank == 0)
    assert kept_graphs(CONFIG, run_dir, UNDECIDED, engine.grid, CPU, events) == UNDECIDED
    hook = GraphsHook(engine, key, events)
    for step in range(EAGER_STEPS + 1):
        engine.step(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp), scenario.lr)
        hook.after_step()
    kept = kept_graphs(CONFIG, run_dir, UNDECIDED, engine.grid, CPU, events)
    longer = replace(CONFIG, train=replace(CONFIG.train, seq_len=256))
    other = kept_graphs(longer, run_dir, UNDECIDED, engine.grid, CPU, events)
    return engine._graphs is not None, kept.cuda_graphs, other.cuda_graphs


@pytest.mark.distributed
def test_all_ranks_and_later_starts_take_one_decision(tmp_path: Path) -> None:
    """Catches ranks that decide by their own times, a resumed run that measures again and may decide otherwise, and a
    decision for another shape that is taken over."""
    first, second = run_ranks(decided, 2, tmp_path)
    assert first == second and first[0] is first[1] and first[2] is None
    measured, again = (e for e in read_json_lines(tmp_path / "events.jsonl") if e["event"] == GRAPHS_EVENT)
    assert measured["source"] == "measured" and again["source"] == "as in the run's earlier start"
    assert measured["captured"] is again["captured"] is first[0] and measured["times"] == again["times"]
    assert "launching the passes of a micro-batch takes" in measured["message"]


def test_a_decided_run_measures_nothing(tmp_path: Path) -> None:
    """Catches an explicit true or false that an earlier decision of auto overrides."""
    grid = build_grid(ParallelConfig(), 0, 1)
    events = EventWriter(tmp_path)
    decision = replace(decide([HOST_BOUND]), key=graphs_key(CONFIG, UNDECIDED, CPU))
    events.write(GRAPHS_EVENT, message=decision.text, **decision.to_dict())
    for given, taken in ((None, True), (False, False), (True, True)):
        kernels = replace(UNDECIDED, cuda_graphs=given)
        assert kept_graphs(CONFIG, tmp_path, kernels, grid, CPU, events).cuda_graphs is taken
