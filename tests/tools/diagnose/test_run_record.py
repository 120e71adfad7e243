"""A run's record of its failure, as the launcher and `megads diagnose run=...` read it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.decision import diagnose_failure, recorded_findings


def failure(exit_code: int, message: str, **fields: Any) -> dict[str, Any]:
    return {"event": "failure", "exit_code": exit_code, "message": message, "rank": 1, **fields}


KILLED = "rank 1 was killed by SIGKILL (out of memory? look for oom-kill in the kernel's log)\n  log: x"


@pytest.mark.parametrize(
    ("event", "cause", "restartable"),
    [
        (failure(2, "rank 1: parallel.tp = 3 must divide 8"), Cause.config_or_shape_error, False),
        (failure(3, "rank 1: the two files do not belong together"), Cause.data_corrupt, False),
        (failure(4, "rank 1: no checkpoint in runs/a is usable"), Cause.checkpoint_corrupt_or_mismatch, False),
        (failure(4, "rank 1: [Errno 28] No space left on device: 'a'"), Cause.disk_full, False),
        (failure(7, "rank 1: 6 non-finite steps in a row"), Cause.nan_or_loss_divergence, False),
        (failure(10, KILLED), Cause.process_killed_unknown, True),
        (failure(1, "rank 1 was killed by SIGSEGV\n  log: x"), Cause.process_killed_unknown, False),
        (failure(10, KILLED, oom_kills=0), Cause.process_killed_unknown, True),
        (failure(10, KILLED, oom_kills=None), Cause.process_killed_unknown, True),
        (failure(10, KILLED, oom_kills=1), Cause.host_oom_kill, False),
        (failure(9, "rank 1 hung: sends no heartbeat for 300 s"), Cause.nccl_timeout_hang, True),
        (failure(9, "node n2: lost, its agent ended without a report"), Cause.node_lost, True),
        (failure(9, "lost: no message from n2, and the ranks of all other nodes wait"), Cause.node_lost, True),
        (failure(1, "all 8 ranks aborted (SIGABRT) at once and left no word"), Cause.nccl_timeout_hang, True),
        (failure(1, "rank 1 lost a peer, and no rank says why: x"), Cause.nccl_remote_or_network, True),
        (failure(1, "rank 1 failed, OutOfMemoryError: CUDA out of memory. Tried"), Cause.cuda_oom, False),
        (failure(1, "rank 1 failed, KeyError: 'x'"), Cause.user_code_exception, False),
        ({"event": "killed", "cause": "a second signal", "exit_code": 130}, Cause.preempted_or_time_limit, True),
    ],
)
def test_exit_codes_and_messages(event: dict[str, Any], cause: Cause, restartable: bool) -> None:
    """Catches an ignored exit code that tells the cause, and hints in a message used as evidence."""
    found = diagnose_failure(event, [])
    assert (found.cause, found.restartable) == (cause, restartable)
    assert found.culprit == ("rank 1" if "rank" in event else "")


def test_the_logs_tell_more_than_a_signal(tmp_path: Path) -> None:
    """Catches a diagnosis of a failure that does not read the ranks' logs."""
    path = tmp_path / "rank_00001.log"
    path.write_text("--- rank 1 of 2\nMemory cgroup out of memory: Killed process 12 (python)\n")
    found = diagnose_failure(failure(10, KILLED), [tmp_path / "rank_00000.log", path])
    assert found.cause == Cause.host_oom_kill and found.evidence[0].file == "rank_00001.log"


def test_an_earlier_start_is_not_read(tmp_path: Path) -> None:
    """Catches a diagnosis based on the failure of an earlier start, which the log still contains."""
    path = tmp_path / "rank_00001.log"
    path.write_text("--- rank 1 of 2\nRuntimeError: CUDA out of memory\n--- rank 1 of 2\nstep 7\n")
    assert diagnose_failure(failure(10, KILLED), [path]).cause == Cause.process_killed_unknown


def test_only_the_ends_of_long_logs_are_read(tmp_path: Path) -> None:
    """Catches a launcher that reads gigabytes of logs before it exits."""
    path = tmp_path / "rank_00000.log"
    with path.open("wb") as file:
        file.truncate(1 << 33)
        file.seek(0, 2)
        file.write(b"\nRuntimeError: CUDA out of memory\n")
    begin = time.process_time()
    assert diagnose_failure(failure(1, "rank 0 failed, RuntimeError: x"), [path]).cause == Cause.cuda_oom
    assert time.process_time() - begin < 20


def test_what_nobody_can_place() -> None:
    """Catches an exception for a record with unexpected content."""
    assert recorded_findings(1, {"event": "failure"}) == []
