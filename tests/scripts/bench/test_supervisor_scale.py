"""The simulation of a launcher with many nodes."""

from __future__ import annotations

import pytest

from scripts.bench.supervisor_scale import simulate


@pytest.mark.slow
@pytest.mark.distributed
def test_messages_grow_with_the_nodes_and_no_faster() -> None:
    """Catches agents that poll the launcher continuously, messages of each that are sent to all, a benchmark that does
    not run, and a fault after which not every node is told to end or starts again."""
    few = simulate(8, ranks=2, processes=1, steady_s=3.0, ramp_s=0.0, faults=[])
    many = simulate(64, ranks=2, processes=1, steady_s=3.0, ramp_s=0.0, faults=["dead"])
    # Every five seconds each node sends a heartbeat and polls for an order: three messages with the launcher's reply.
    assert many.messages_per_s - few.messages_per_s < 2.0 * (64 - 8)
    assert many.received_bytes_per_s < 1000 * 64
    times = many.faults["dead"]
    assert times["detected"] is not None and times["agreed"] is not None and times["restarted"] is not None
    assert 0 < times["detected"] <= times["agreed"] < times["restarted"]
