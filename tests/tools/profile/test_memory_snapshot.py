"""Snapshots of GPU memory; what torch records is replaced, since this test needs no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megads.tools.profile import memory_snapshot
from megads.tools.profile.trace_files import trace_path


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls that start and stop torch's recording; a snapshot is the number of calls so far."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text(str(len(calls))))
    return calls


def test_a_rank_that_runs_out_of_memory_leaves_a_snapshot(recording: list[dict[str, Any]], tmp_path: Path) -> None:
    """Catches a snapshot taken after the history was dropped, a failure that it hides, and a message that does not name
    it."""
    path = memory_snapshot.oom_path(tmp_path, 2, 3)
    with pytest.raises(torch.OutOfMemoryError, match="tried to allocate") as failed, memory_snapshot.recorded(path):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")
    assert path.read_text() == "1" and [path] == list(path.parent.iterdir())
    assert path.name == "out_of_memory.start_00002.rank_00003.memory.pickle"
    assert recording == [{"stacks": "python", "max_entries": 100_000}, {"enabled": None}]
    assert str(path) in failed.value.__notes__[0]


def test_other_failures_leave_no_snapshot(recording: list[dict[str, Any]], tmp_path: Path) -> None:
    """Catches a snapshot for every failure, and a history that is recorded for ever."""
    with pytest.raises(KeyError), memory_snapshot.recorded(tmp_path / "traces" / "oom"):
        raise KeyError
    with memory_snapshot.recorded(tmp_path / "traces" / "oom"):
        pass
    assert not (tmp_path / "traces").exists() and len(recording) == 4


def test_a_full_disk_does_not_hide_the_failure(recording: list[dict[str, Any]], tmp_path: Path) -> None:
    """Catches a rank that ends with the disk's error in place of its own."""
    (tmp_path / "traces").write_text("in the way")
    with pytest.raises(torch.OutOfMemoryError), memory_snapshot.recorded(tmp_path / "traces" / "oom"):
        raise torch.OutOfMemoryError


def test_a_snapshot_lies_beside_its_trace() -> None:
    """Catches snapshots of two ranks with one name."""
    trace = trace_path(Path("run"), 3, 4, 5, 1)
    assert memory_snapshot.snapshot_path(trace).name == "steps_00000003_00000004.rank_00005.stage_001.memory.pickle"
