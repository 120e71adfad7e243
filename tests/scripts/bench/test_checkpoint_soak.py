"""Memory and descriptors of a run that saves repeatedly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.checkpoint_soak import Held, faults, soak

SAVES = 60


@pytest.mark.slow
@pytest.mark.distributed
def test_memory_and_descriptors_stay(tmp_path: Path) -> None:
    """Catches a rank or a writer that leaks memory, shared memory or a descriptor at every save, over 60 of them."""
    found = soak(tmp_path, SAVES, megabytes=4)
    assert {name: len(values) for name, values in found.items()} == {"rank": SAVES, "writer": SAVES}
    assert all(held.shared_bytes > 4e6 and held.descriptors > 3 for values in found.values() for held in values)
    assert faults(found) == []


def test_what_counts_as_growth() -> None:
    """Catches a soak test that detects no leak: growth of 0.1% per save, or a descriptor that stays open, must be
    found, but not a file that is open only at the time of a measurement."""
    flat = Held(100_000_000, 10_000_000, 7)
    assert faults({"rank": [flat] * SAVES}) == []
    coming = [replace(flat, descriptors=7 + number % 2) for number in range(SAVES)]
    assert faults({"rank": coming}) == []
    for name in ("resident_bytes", "shared_bytes"):
        leaking = [replace(flat, **{name: round(getattr(flat, name) * (1 + number / 1000))}) for number in range(SAVES)]
        (told,) = faults({"writer": leaking})
        assert told.startswith(f"{name} of the writer")
    (told,) = faults({"rank": [replace(flat, descriptors=7 + number // 30) for number in range(SAVES)]})
    assert told == "descriptors of the rank: 7, later 8"
