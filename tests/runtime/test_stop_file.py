"""Requests to stop."""

from __future__ import annotations

from pathlib import Path

from megads.runtime.stop_file import INTERRUPTED, REQUESTED, clear_stop, read_stop, request_stop


def test_round_trip(tmp_path: Path) -> None:
    """Catches a request that is not seen, or seen for ever."""
    assert read_stop(tmp_path) is None
    request_stop(tmp_path, INTERRUPTED)
    assert read_stop(tmp_path) == INTERRUPTED
    clear_stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_made_by_hand_counts_and_stays(tmp_path: Path) -> None:
    """Catches `touch stop` being taken for a broken file, or removed by the very restart it should prevent."""
    (tmp_path / "stop").touch()
    assert read_stop(tmp_path) == REQUESTED
    clear_stop(tmp_path)
    assert read_stop(tmp_path) == REQUESTED
