"""p2p between stages: which tensors are kept, and that no buffer is allocated after the first step."""

from __future__ import annotations

from typing import Any

import pytest

from megads.parallel.config import ParallelConfig
from megads.parallel.schedule import ScheduleName
from tests.distributed import run_ranks
from tests.parity import build_engine, scenario_with, step_batches

pytestmark = pytest.mark.distributed

SCENARIO = scenario_with(global_batch_size=16, micro_batch_size=1)


def _kept(name: str) -> tuple[int, list[int], int]:
    """Most sent tensors kept at once, buffers allocated after each of three steps, p2p operations left over."""
    engine = build_engine(SCENARIO, ParallelConfig(pp=2, schedule=ScheduleName(name)))
    messages, most = engine._p2p, 0
    inner = messages.send

    def send(*message: Any) -> None:
        nonlocal most
        inner(*message)
        most = max(most, len(messages._leaving))

    messages.send = send
    made = []
    for step in range(3):
        engine.step(step_batches(SCENARIO, step), SCENARIO.lr)
        made.append(messages._pool.made)
    return most, made, len(messages._arriving) + len(messages._leaving)


@pytest.mark.quick("interleaved")
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_p2p_keeps_few_tensors_and_reuses_buffers(name: str) -> None:
    """Catches sent tensors kept until the end of the step, one buffer per p2p operation, and buffers that are leaked:
    16 micro-batches go both ways between two ranks, once or three times."""
    for most, made, left in run_ranks(_kept, 2, name):
        assert 1 <= most <= 6
        assert made[0] == made[1] == made[2] <= 10
        assert left == 0
