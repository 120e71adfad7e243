"""The root cause that is reported when several ranks fail."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from megads.errors import NumericalError, UnhealthyNode
from megads.launch.rank import is_lost_peer
from megads.launch.rank_outcome import (
    FailureRecord,
    NodeReport,
    Outcome,
    RankExit,
    clear_records,
    determine_outcome,
    hang_outcome,
    hung_record,
    lost_nodes,
    read_exits,
    read_failures,
)
from megads.runtime.heartbeat import RankPosition
from megads.runtime.run_dir import exit_path, failure_path
from megads.tools.diagnose.flight_recorder import find_culprit_ranks, parse_trace


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def record(
    run_dir: Path, rank: int, *, code: int = 1, at_s: float = 0.0, consequence: bool = False, start: int | None = None
) -> None:
    content = {"rank": rank, "exit_code": code, "kind": "Kind", "user_error": code != 1, "message": f"from {rank}"}
    path = failure_path(run_dir, rank, start=start)
    path.write_text(json.dumps({**content, "monotonic_s": at_s, "consequence": consequence}))


def judged(run_dir: Path, num_ranks: int, exits: list[RankExit], killed: Collection[int] = ()) -> Outcome:
    """The outcome of a run on one machine."""
    failures, returned = read_failures(run_dir, range(num_ranks)), read_exits(run_dir, range(num_ranks))
    return determine_outcome(run_dir, num_ranks, [NodeReport("", failures, exits, sorted(killed), returned)])


def test_the_earliest_cause_wins_over_earlier_consequences(run_dir: Path) -> None:
    """Catches a root cause chosen by rank number, or by which rank noticed first."""
    record(run_dir, 0, at_s=1.0, consequence=True)
    record(run_dir, 1, code=3, at_s=3.0)
    record(run_dir, 2, code=7, at_s=2.0)
    outcome = judged(run_dir, 3, [RankExit(0, 1), RankExit(1, 3), RankExit(2, 7)])
    assert (outcome.exit_code, outcome.rank) == (7, 2)


def test_a_signal_from_outside_wins_over_consequences(run_dir: Path) -> None:
    """Catches an out-of-memory kill reported as a lost connection."""
    record(run_dir, 0, consequence=True)
    outcome = judged(
        run_dir, 3, [RankExit(0, 1), RankExit(2, -signal.SIGKILL), RankExit(1, -signal.SIGTERM)], killed=()
    )
    assert (outcome.exit_code, outcome.rank) == (10, 2)
    assert "SIGKILL" in outcome.message


@pytest.mark.parametrize(
    ("killer", "code"),
    [
        *((name, 10) for name in ("KILL", "TERM", "HUP", "INT", "XCPU", "BUS")),
        *((name, 1) for name in ("SEGV", "ABRT", "FPE", "ILL")),
    ],
)
def test_a_crash_is_a_bug_and_an_outside_kill_is_not(run_dir: Path, killer: str, code: int) -> None:
    """Catches a kill from outside, such as the OOM killer's, reported as a bug, and a crash reported as such a kill."""
    outcome = judged(run_dir, 1, [RankExit(0, -signal.Signals[f"SIG{killer}"])])
    assert (outcome.exit_code, outcome.rank) == (code, 0)
    assert f"was killed by SIG{killer}" in outcome.message


def test_no_rank_is_blamed_where_all_aborted(run_dir: Path) -> None:
    """Catches the first rank that NCCL's watchdog aborted, and its node, named as root cause of the hang: the restart
    would exclude a healthy node."""
    ends = [RankExit(rank, -signal.SIGABRT) for rank in range(4)]
    reports = [NodeReport("n1", exits=ends[:2]), NodeReport("n2", exits=ends[2:])]
    outcome = determine_outcome(run_dir, 4, reports)
    assert (outcome.exit_code, outcome.rank, outcome.nodes, outcome.lost) == (1, None, (), False)
    assert outcome.message.startswith("all 4 ranks aborted (SIGABRT)") and "no rank is known" in outcome.message
    assert str(run_dir / "logs" / "rank_*.log") in outcome.message


@pytest.mark.parametrize(
    ("ends", "ranks", "rank"),
    [
        ([-signal.SIGTERM, -signal.SIGABRT, -signal.SIGTERM], 3, 1),
        ([-signal.SIGABRT, -signal.SIGABRT], 3, 0),
        ([-signal.SIGSEGV] * 3, 3, 0),
        ([-signal.SIGABRT], 1, 0),
    ],
)
def test_the_one_rank_that_aborted_is_blamed(run_dir: Path, ends: list[int], ranks: int, rank: int) -> None:
    """Catches an aborted rank that is not named as the root cause when its peers were terminated because of it, and
    'all 1 ranks aborted'."""
    outcome = judged(run_dir, ranks, [RankExit(number, code) for number, code in enumerate(ends)])
    assert (outcome.exit_code, outcome.rank) == (1, rank)


def test_a_failure_record_takes_precedence_over_aborts(run_dir: Path) -> None:
    """Catches a rank's failure record that is ignored because its peers aborted."""
    record(run_dir, 2, code=3)
    outcome = judged(run_dir, 3, [RankExit(0, -signal.SIGABRT), RankExit(1, -signal.SIGABRT), RankExit(2, 3)])
    assert (outcome.exit_code, outcome.rank) == (3, 2)


def test_ranks_killed_by_the_launcher_are_not_blamed(run_dir: Path) -> None:
    """Catches 'rank 0 was killed by SIGKILL' when the launcher killed it after rank 1 lost a peer."""
    record(run_dir, 1, consequence=True)
    outcome = judged(run_dir, 2, [RankExit(0, -signal.SIGKILL), RankExit(1, 1)], killed={0})
    assert outcome.rank == 1
    assert "no rank says why" in outcome.message


def test_a_silent_exit_is_blamed_before_lost_peers(run_dir: Path) -> None:
    """Catches a library's os._exit(3) that is hidden by its peers' connection errors."""
    record(run_dir, 0, consequence=True)
    outcome = judged(run_dir, 2, [RankExit(0, 1), RankExit(1, 3)])
    assert (outcome.exit_code, outcome.rank) == (3, 1)


def test_success_needs_an_exit_record_of_every_rank(run_dir: Path) -> None:
    """Catches a rank that exited with status 0 in the middle of training, and counts as successful."""
    exit_path(run_dir, 0).write_text('{"rank": 0, "exit_code": 0}')
    assert judged(run_dir, 2, [], killed=()).exit_code == 1
    exit_path(run_dir, 1).write_text('{"rank": 1, "exit_code": 6}')
    assert judged(run_dir, 2, [], killed=()).exit_code == 6
    clear_records(run_dir)
    assert list((run_dir / "logs").iterdir()) == []


def failure(rank: int, monotonic_s: float, time_s: float, consequence: bool = False) -> FailureRecord:
    return FailureRecord(rank, 3, "Kind", True, f"from {rank}", monotonic_s, consequence, time_s)


def test_failures_of_two_nodes_are_compared_by_the_time_of_day(run_dir: Path) -> None:
    """Catches a comparison of monotonic clocks, which start at each node's boot, and a message without the node."""
    reports = [
        NodeReport("n1", failures=[failure(0, monotonic_s=50.0, time_s=12.0)]),
        NodeReport("n2", failures=[failure(1, monotonic_s=900.0, time_s=11.0)]),
    ]
    carried = [NodeReport.decode(json.loads(json.dumps(report.encode()))) for report in reports]
    outcome = determine_outcome(run_dir, 2, carried)
    assert (outcome.rank, outcome.message.splitlines()[0]) == (1, "rank 1 on n2: from 1")


def test_a_lost_node_is_named_before_its_peers(run_dir: Path) -> None:
    """Catches a lost node that is reported as a lost connection of the ranks that noticed."""
    peer = NodeReport("n1", failures=[failure(0, 1.0, 1.0, consequence=True)], returned={})
    outcome = determine_outcome(run_dir, 2, [peer, *lost_nodes(["n2"], "Node failure on n2")])
    assert (outcome.exit_code, outcome.rank) == (9, None)
    assert outcome.message == "node n2: lost, its agent ended without a report (Node failure on n2)"


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "Read error: Connection reset by peer",
        "recvBytes failed on SocketImpl",
        "Socket Timeout",
    ],
)
def test_lost_connection_messages_are_recognised(text: str) -> None:
    """Catches a lost connection that is taken for a root cause."""
    assert is_lost_peer(RuntimeError(text))
    wrapped = ValueError("while reducing")
    wrapped.__cause__ = RuntimeError(text)
    assert is_lost_peer(wrapped)


def test_root_causes_are_not_taken_for_lost_connections() -> None:
    """Catches a root cause that is dismissed because of words in its message."""
    assert not is_lost_peer(NumericalError("the dataset server said: connection reset"))
    assert not is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_lost_peer(ValueError("connection reset"))


def test_the_failure_of_an_orphaned_rank_is_ignored(run_dir: Path) -> None:
    """Catches the failure of an orphaned rank of an earlier start that ends the current start."""
    record(run_dir, 0, consequence=True, start=1)
    exit_path(run_dir, 1, start=1).write_text('{"rank": 1, "exit_code": 6}')
    assert [record.rank for record in read_failures(run_dir, range(2), start=1)] == [0]
    assert (read_failures(run_dir, range(2), start=2), read_exits(run_dir, range(2), start=2)) == ([], {})
    clear_records(run_dir)
    assert list((run_dir / "logs").iterdir()) == []


def test_a_hang_is_dated_by_its_last_progress() -> None:
    """Catches a hang that is dated by its detection, counts as another rank's consequence, or is reported with a
    traceback although there is none."""
    before = time.time()
    record = hung_record(RankPosition(3, 17, "backward", phase_s=4.0, silent_s=120.0))
    assert (record.rank, record.exit_code, record.kind) == (3, UnhealthyNode.exit_code, "Hang")
    assert record.user_error and not record.consequence and record.message.startswith("hung: ")
    assert before - 120 <= record.time_s <= time.time() - 120
    assert record.monotonic_s <= time.monotonic() - 120


ENTERED = {
    "record_id": 1,
    "pg_id": 0,
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 7,
    "profiling_name": "gloo:all_reduce",
    "state": "scheduled",
}


def hung_together(*entered: int, silent: int | None = None) -> Outcome:
    """Outcome of a hang of two ranks in the same phase, of which `entered` entered a collective."""
    suspects = [
        RankPosition(rank, 5, "engine step", 20.0, silent_s=20.0 if rank == silent else 0.0, node=f"node-{rank}")
        for rank in (0, 1)
    ]
    traces = [parse_trace(rank, {"entries": [ENTERED] if rank in entered else []}) for rank in (0, 1)]
    return hang_outcome(Path("run"), suspects, find_culprit_ranks(traces), [Path("run/evidence/start_1_now")])


def test_among_ranks_of_one_phase_the_one_outside_the_collective_is_blamed() -> None:
    """Catches the waiting rank, or none, named as root cause where only the flight recorder can tell."""
    found = hung_together(0)
    assert (found.rank, found.nodes, found.exit_code, found.hung) == (1, ("node-1",), 9, True)
    assert found.message.startswith("rank 1 on node-1: hung: in step 5, engine step for 20 s\n")
    assert "flight recorder: rank 1 did not enter gloo:all_reduce number 7" in found.message
    assert "evidence: run/evidence/start_1_now" in found.message and "rank_00001.log" in found.message


def test_a_stopped_process_is_blamed_first() -> None:
    """Catches a stopped process that is not named as root cause because all ranks entered the collective."""
    found = hung_together(0, 1, silent=0)
    assert found.rank == 0 and found.message.startswith("rank 0 on node-0: hung: sends no heartbeat for 20 s")


def test_a_hang_in_a_collective_that_all_entered_blames_nobody() -> None:
    """Catches one rank named, or healthy nodes excluded, when all ranks entered the same collective and it hangs."""
    found = hung_together(0, 1)
    assert found.rank is None and found.nodes == ()
    assert found.message.startswith("hung: ranks 0, 1: in step 5, engine step for 20 s")


def test_a_rank_that_the_others_waited_for_is_blamed_after_a_timeout(run_dir: Path) -> None:
    """Catches rank 0 blamed for a hang before the first step because its collective timed out first, although the
    positions name another rank."""
    late = "Timed out waiting 600000ms for recv operation to complete"
    failures = [FailureRecord(rank, 1, "RuntimeError", False, late, float(rank), consequence=True) for rank in (0, 2)]
    positions = [RankPosition(rank, 0, "building the engine", 600.0) for rank in (0, 2)]
    positions.append(RankPosition(1, 0, "opening the data", 602.0))
    exits = [RankExit(0, 1), RankExit(2, 1)]
    outcome = determine_outcome(run_dir, 3, [NodeReport("", failures, exits, [1], positions=positions)])
    assert (outcome.exit_code, outcome.rank, outcome.hung) == (9, 1, True)
    assert "rank 1: hung: opening the data for 602 s; rank 0 waited until Timed out" in outcome.message
    everywhere = [RankPosition(rank, 0, "building the engine", 600.0) for rank in range(3)]
    outcome = determine_outcome(run_dir, 3, [NodeReport("", failures, exits, [1], positions=everywhere)])
    assert outcome.rank == 0 and "lost a peer, and no rank says why" in outcome.message
