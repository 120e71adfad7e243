"""The agreement to stop."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from megads.errors import Fenced
from megads.runtime.control_plane import open_control_plane
from megads.runtime.lease import Fence, claimed
from megads.runtime.slurm import Job
from megads.runtime.stop_file import INTERRUPTED, KILL_SWITCH, PREEMPTED, REQUESTED, request_stop, stop_path
from megads.runtime.stop_signal import StopSignal
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def _reasons(run_dir: Path) -> list[str]:
    """What every rank hears: before any request, then after each; only rank 0's folder holds the file."""
    rank = dist.get_rank()
    mine = run_dir if rank == 0 else run_dir / "another-node"
    signal, heard = StopSignal(mine, open_control_plane()), []
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


def _switched_off(run_dir: Path) -> list[str]:
    """What every rank hears before and after somebody touches the kill switch, and when another start takes over."""
    rank = dist.get_rank()
    switch = run_dir / "group" / "stop"
    fence = Fence(run_dir, 1) if rank == 0 else None
    signal = StopSignal(run_dir, open_control_plane(), fence, switch)
    heard = [signal.reason()]
    if rank == 0:
        switch.parent.mkdir()
        switch.touch()
    heard.append(signal.reason())
    with claimed(run_dir, Job("1", 1, "c")) if rank == 0 else nullcontext():
        try:
            signal.reason()
        except Fenced as error:
            heard.append(str(error))
    return heard


def test_all_ranks_hear_of_the_kill_switch_and_of_a_takeover(tmp_path: Path) -> None:
    """Catches a switch that one rank sees and the others do not, and orphans of which only rank 0 ends."""
    with claimed(tmp_path, Job("1", 0, "c")):
        heard = run_ranks(_switched_off, 2, tmp_path)
    assert heard[0] == heard[1]
    assert heard[0][:2] == ["", KILL_SWITCH] and heard[0][2].startswith("another start of this run took over")
