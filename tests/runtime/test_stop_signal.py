"""The agreement to stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megads.runtime.stop_file import INTERRUPTED, PREEMPTED, REQUESTED, request_stop, stop_path
from megads.runtime.stop_signal import StopSignal
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def _reasons(run_dir: Path) -> list[str]:
    """What every rank hears: before any request, then after each; only rank 0's folder holds the file."""
    rank = dist.get_rank()
    mine = run_dir if rank == 0 else run_dir / "another-node"
    signal, heard = StopSignal(mine, rank, torch.device("cpu")), []
    heard.append(signal.reason())
    for reason in (INTERRUPTED, PREEMPTED, REQUESTED, "an unknown reason"):
        if rank == 0:
            request_stop(run_dir, reason)
        heard.append(signal.reason())
    if rank == 0:
        stop_path(run_dir).write_bytes(b"\xff not json")
    heard.append(signal.reason())
    if rank == 0:
        stop_path(run_dir).unlink()
    heard.append(signal.reason())
    return heard


def test_all_ranks_hear_what_rank_0_sees(tmp_path: Path) -> None:
    """Catches ranks that look for the file themselves (they may see it a step later and hang the others), a reason lost
    on the way, and a signal that sticks."""
    expected = ["", INTERRUPTED, PREEMPTED, REQUESTED, REQUESTED, REQUESTED, ""]
    assert run_ranks(_reasons, 3, tmp_path) == [expected] * 3
