"""Requests to stop."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from megads.runtime.stop_file import INTERRUPTED, PREEMPTED, REQUESTED, clear_stop, read_stop, request_stop
from tests.distributed import run_ranks


def test_round_trip(tmp_path: Path) -> None:
    """Catches a request that is not seen, or seen for ever."""
    assert read_stop(tmp_path) is None
    request_stop(tmp_path, INTERRUPTED)
    assert read_stop(tmp_path) == INTERRUPTED
    clear_stop(tmp_path)
    assert list(tmp_path.iterdir()) == []


def on_a_full_disk(run_dir: Path) -> str | None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    request_stop(run_dir, PREEMPTED)
    return read_stop(run_dir)


@pytest.mark.distributed
def test_on_a_full_disk(tmp_path: Path) -> None:
    """Catches a preempted run that cannot be asked to stop because its disk is full, and what then stays for ever."""
    assert run_ranks(on_a_full_disk, 1, tmp_path) == [PREEMPTED]
    clear_stop(tmp_path)
    assert read_stop(tmp_path) is None
    (tmp_path / "stop").symlink_to("nowhere")
    assert read_stop(tmp_path) == REQUESTED


def test_a_file_made_by_hand_counts_and_stays(tmp_path: Path) -> None:
    """Catches `touch stop` being taken for a broken file, or removed by the very restart it should prevent."""
    (tmp_path / "stop").touch()
    assert read_stop(tmp_path) == REQUESTED
    clear_stop(tmp_path)
    assert read_stop(tmp_path) == REQUESTED


def test_a_folder_counts_and_stays(tmp_path: Path) -> None:
    """Catches `mkdir stop` that ends rank 0 with a traceback, and a run that is killed at a signal because it was asked
    to stop before."""
    (tmp_path / "stop").mkdir()
    assert read_stop(tmp_path) == REQUESTED
    clear_stop(tmp_path)
    assert read_stop(tmp_path) == REQUESTED
    request_stop(tmp_path, INTERRUPTED)
    assert read_stop(tmp_path) == REQUESTED
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]
