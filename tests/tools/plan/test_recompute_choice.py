"""The number of blocks that recompute=auto recomputes."""

from __future__ import annotations

from dataclasses import replace

from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig, Recompute
from megads.tools.plan.memory import memory_plan
from megads.tools.plan.run_plan import fewest_for_all, fewest_per_stage, peaks_by_blocks, with_blocks
from megads.tools.plan.workload import Workload

PEAKS = [[100, 70, 40, 42], [80, 65, 50], [60, 55]]


def test_devices_of_their_own() -> None:
    """Catches a stage that recomputes for the sake of another, or more than it must."""
    assert fewest_per_stage(PEAKS, 100) == [0, 0, 0]
    assert fewest_per_stage(PEAKS, 69) == [2, 1, 0]
    assert fewest_per_stage(PEAKS, 10) == [2, 2, 1], "the least of what does not fit"


def test_shared_memory() -> None:
    """Catches blocks recomputed in stages where they save little."""
    assert fewest_for_all(PEAKS, 240) == [0, 0, 0]
    assert fewest_for_all(PEAKS, 239) == [1, 0, 0]
    assert fewest_for_all(PEAKS, 166) == [2, 1, 0]
    assert fewest_for_all(PEAKS, 10) == [2, 2, 1], "no block that costs memory"


def test_peaks_are_those_of_the_plan() -> None:
    """Catches a table of other layouts: every number must be the plan's with exactly these blocks."""
    model = ModelConfig(num_layers=5, hidden_size=64, num_heads=4, vocab_size=509)
    work = Workload(seq_len=256, micro_batch_size=4, micro_batches=8, weight_bytes=2)
    parallel = ParallelConfig(pp=2, recompute=Recompute.auto)
    peaks = peaks_by_blocks(model, parallel, work)
    assert [len(row) for row in peaks] == [3, 4]
    plan = memory_plan(model, ParallelConfig(pp=2, recompute=Recompute.full, recompute_blocks=[1, 3]), work)
    assert [peaks[0][1], peaks[1][3]] == [stage.peak for stage in plan.stages]
    assert peaks[0][0] - peaks[0][1] > 1.5 * (peaks[1][0] - peaks[1][1]), "the first stage holds two micro-batches"
    assert with_blocks(parallel, [0, 0]) == replace(parallel, recompute=Recompute.none)
