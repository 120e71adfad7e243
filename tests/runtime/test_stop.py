"""Requests to stop a run."""

from __future__ import annotations

import resource
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

from megads.errors import Fenced
from megads.runtime.distributed import open_control_plane
from megads.runtime.lease import Fence, claimed
from megads.runtime.slurm import SlurmJob
from megads.runtime.stop import (
    INTERRUPTED,
    KILL_SWITCH,
    PREEMPTED,
    REQUESTED,
    ProfileRequest,
    ProfileRequests,
    StopSignal,
    clear_stop,
    profile_path,
    read_stop,
    request_stop,
    stop_path,
)
from tests.distributed import run_ranks


def test_a_stop_request_is_seen_until_cleared(tmp_path: Path) -> None:
    """Catches a request that is not seen, or is still seen after it is cleared."""
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
def test_a_stop_request_works_on_a_full_disk(tmp_path: Path) -> None:
    """Catches a preempted run that cannot be stopped because its disk is full, and a request that stays set."""
    assert run_ranks(on_a_full_disk, 1, tmp_path) == [PREEMPTED]
    clear_stop(tmp_path)
    assert read_stop(tmp_path) is None
    (tmp_path / "stop").symlink_to("nowhere")
    assert read_stop(tmp_path) == REQUESTED


def test_a_stop_file_made_by_hand_counts_and_stays(tmp_path: Path) -> None:
    """Catches `touch stop` that is taken for a damaged file, or removed by the very restart it should prevent."""
    (tmp_path / "stop").touch()
    assert read_stop(tmp_path) == REQUESTED
    clear_stop(tmp_path)
    assert read_stop(tmp_path) == REQUESTED


def test_a_stop_folder_counts_and_stays(tmp_path: Path) -> None:
    """Catches `mkdir stop` that ends rank 0 with a traceback, and a request at a signal that fails because the folder
    exists."""
    (tmp_path / "stop").mkdir()
    assert read_stop(tmp_path) == REQUESTED
    clear_stop(tmp_path)
    assert read_stop(tmp_path) == REQUESTED
    request_stop(tmp_path, INTERRUPTED)
    assert read_stop(tmp_path) == REQUESTED
    assert [path.name for path in tmp_path.iterdir()] == ["stop"]


pytestmark = pytest.mark.distributed


def _reasons(run_dir: Path) -> list[str]:
    """Returns what every rank reads: before any request, then after each; only rank 0's folder holds the file."""
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
    """Catches ranks that look for the file themselves (one that sees it a step later makes the others hang), a reason
    lost on the way, and a request that is still seen after its file is removed."""
    expected = ["", INTERRUPTED, PREEMPTED, REQUESTED, REQUESTED, REQUESTED, ""]
    assert run_ranks(_reasons, 3, tmp_path) == [expected] * 3


def _save_times(run_dir: Path) -> list[tuple[str, bool]]:
    """Returns the reason and whether to save, at three checks; it is time on rank 0 at the second and third."""
    if (rank := dist.get_rank()) == 0:
        due = iter([False, True, True])
    signal, heard = StopSignal(run_dir, open_control_plane(), time_to_save=lambda: rank == 0 and next(due)), []
    for request in (False, False, True):
        if request and rank == 0:
            request_stop(run_dir, REQUESTED)
        heard.append((signal.reason(), signal.save_due))
    return heard


def test_all_ranks_hear_that_it_is_time_to_save(tmp_path: Path) -> None:
    """Catches ranks that look at their own clocks, and a save that is lost with a stop request or taken for one."""
    assert run_ranks(_save_times, 3, tmp_path) == [[("", False), ("", True), (REQUESTED, True)]] * 3


def test_a_request_to_profile_is_taken_once(tmp_path: Path) -> None:
    """Catches a request that is answered for ever, and content that ends rank 0."""
    for content, expected in {
        "": ProfileRequest(3, memory=False),
        "5": ProfileRequest(5, memory=False),
        "memory\n": ProfileRequest(3, memory=True),
        "2 memory": ProfileRequest(2, memory=True),
        "0": ProfileRequest(1, memory=False),
        "9" * 5000: ProfileRequest(3, memory=False),
        "1000": ProfileRequest(100, memory=False),
        "\0 steps": ProfileRequest(3, memory=False),
    }.items():
        profile_path(tmp_path).write_text(content)
        assert ProfileRequests(tmp_path).take() == expected
        assert ProfileRequests(tmp_path).take() is None
    # A folder cannot be taken.
    profile_path(tmp_path).mkdir()
    requests = ProfileRequests(tmp_path)
    assert requests.take() is None and requests._next_look_s == float("inf")


def _profile_requests(run_dir: Path) -> list[tuple[str, bool, ProfileRequest | None]]:
    rank = dist.get_rank()
    asked = iter([None, ProfileRequest(7, memory=True), ProfileRequest(1), None])
    signal = StopSignal(run_dir, open_control_plane(), time_to_save=lambda: True, profile=lambda: next(asked))
    heard = []
    for request in (False, False, True, True):
        if request and rank == 0:
            request_stop(run_dir, REQUESTED)
        heard.append((signal.reason(), signal.save_due, signal.profile))
    return heard


def test_all_ranks_hear_a_request_to_profile(tmp_path: Path) -> None:
    """Catches ranks that profile other steps than rank 0, and a request that is taken for a stop or a save."""
    expected = [
        ("", True, None),
        ("", True, ProfileRequest(7, memory=True)),
        (REQUESTED, True, ProfileRequest(1)),
        (REQUESTED, True, None),
    ]
    assert run_ranks(_profile_requests, 2, tmp_path) == [expected] * 2


def _switched_off(run_dir: Path) -> list[str]:
    """Returns what every rank reads before and after the kill switch is set, and when another start takes over."""
    rank = dist.get_rank()
    switch = run_dir / "group" / "stop"
    fence = Fence(run_dir, 1) if rank == 0 else None
    signal = StopSignal(run_dir, open_control_plane(), fence, str(switch))
    heard = [signal.reason()]
    if rank == 0:
        switch.parent.mkdir()
        switch.touch()
    heard.append(signal.reason())
    with claimed(run_dir, SlurmJob("1", 1, "c")) if rank == 0 else nullcontext():
        try:
            signal.reason()
        except Fenced as error:
            heard.append(str(error))
    return heard


def test_all_ranks_hear_of_the_kill_switch_and_of_a_takeover(tmp_path: Path) -> None:
    """Catches a kill switch that only one rank sees, and a takeover at which only rank 0 of the old start ends."""
    with claimed(tmp_path, SlurmJob("1", 0, "c")):
        heard = run_ranks(_switched_off, 2, tmp_path)
    assert heard[0] == heard[1]
    assert heard[0][:2] == ["", KILL_SWITCH] and heard[0][2].startswith("another start of this run took over")
