"""The benchmark of the engines measures what it says."""

from __future__ import annotations

from typing import Any

import pytest

from megads.parallel.config import ParallelConfig
from scripts.bench.engines import (
    OURS,
    SMALL_BUCKET,
    Side,
    Table,
    add_memory_and_traffic,
    add_resume,
    add_start,
    add_step_times,
    communication,
    groups_opened,
)
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def _rows(table: Table) -> dict[str, dict[Side, Any]]:
    assert table.rows and list(table.figures) == [row for row, _ in table.rows]
    return table.figures


def test_step_times_and_resume() -> None:
    """Catches a side that does not run, blocks that do not sleep, and a resume that does not load the checkpoint."""
    table = Table()
    add_step_times(table, [2], [2], rounds=1, wait_s=1e-3)
    times, busy = _rows(table).values()
    assert times.keys() == busy.keys() == set(Side) and all(median >= 1 for median, _ in times.values())
    assert len(table.verdicts) == 3
    add_resume(table)
    same, off = list(_rows(table).values())[2:]
    assert same == dict.fromkeys(Side, True) and off.keys() == set(OURS)
    assert all(loss < 1e-6 and norm < 1e-4 for loss, norm in off.values())


@pytest.mark.slow
def test_communication() -> None:
    """Catches collectives that are not counted: the native engine reduce-scatters during the backward pass, DeepSpeed
    all-reduces after it."""
    for found in run_ranks(communication, 2, ParallelConfig(dp=2, bucket_elements=SMALL_BUCKET)):
        gradients = {side: round(seen.received["float32"], 2) for side, seen in found.items()}
        assert gradients == {Side.native: 2.0, Side.deepspeed: 4.0, Side.stock: 4.0}
        assert {round(seen.received["bfloat16"], 2) for seen in found.values()} == {1.0}
        assert [side for side, seen in found.items() if seen.first_start < 1] == [Side.native]


def test_groups() -> None:
    """Catches process groups that are not counted."""
    native, deepspeed = (run_ranks(groups_opened, 2, side, ParallelConfig(pp=2))[0] for side in OURS)
    assert 0 < native < deepspeed


@pytest.mark.slow
def test_memory_and_start() -> None:
    """Catches a measurement of memory, imports or start that does not run."""
    table = Table()
    add_memory_and_traffic(table, [2])
    add_start(table, rounds=1)
    rows = _rows(table)
    kept = rows["bytes per parameter between steps, dp 2"]
    assert kept.keys() == set(Side) and min(kept.values()) >= 8
    assert all(figure for of_side in rows.values() for figure in of_side.values())
