"""The benchmark of pipeline schedules runs all of them with blocks that sleep."""

from __future__ import annotations

import pytest

from megads.parallel.schedule import ScheduleName
from scripts.bench.pipeline import ADAPTED, PEERS, measure
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def test_every_schedule_sleeps() -> None:
    """Catches a sleeping block that a schedule with deferred weight gradients cannot run, or that does not sleep."""
    found = run_ranks(measure, 2, [2], 1, 1e-3)[0]
    sides = {*(f"megads {name}" for name in ScheduleName), ADAPTED, "DeepSpeed 1F1B", *PEERS}
    assert set(found) == {(side, 2) for side in sides}
    # No schedule is faster than the passes of a rank without its bubble: 2 / 3 of 1F1B's formula at p = m = 2.
    assert all(taken.over_ideal > 2 / 3 for (taken,) in found.values())
