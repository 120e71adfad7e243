"""Finds the cause among the ends of all ranks: one failure makes its peers fail too, and they must not be blamed."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from megads.errors import EXIT_BUG, EXIT_OK
from megads.runtime.run_dir import exit_path, rank_log_path

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory? look for oom-kill in the kernel's log)",
    signal.SIGBUS: " (a mapped file was truncated, its disk failed, or /dev/shm is full)",
}


@dataclass(frozen=True)
class RankExit:
    """How the agent saw a process end.

    Attributes:
        rank: the rank.
        exit_code: its exit status; negative is the number of the signal that killed it.
    """

    rank: int
    exit_code: int


@dataclass(frozen=True)
class FailureRecord:
    """What a failing rank wrote about itself; see rank_process.

    Attributes:
        rank: the rank.
        exit_code: the documented code of the failure.
        kind: class of the exception.
        user_error: the message is meant for the user as it stands.
        message: what the exception said.
        monotonic_s: when, on this machine's monotonic clock.
        consequence: it only lost a peer.
    """

    rank: int
    exit_code: int
    kind: str
    user_error: bool
    message: str
    monotonic_s: float
    consequence: bool


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code; for a failure the rank to blame, one message, and the signal that killed it."""

    exit_code: int
    rank: int | None = None
    message: str = ""
    signal: int | None = None


def clear_records(run_dir: Path) -> None:
    """Removes the records that an earlier start left."""
    for pattern in ("failure_*.json", "exit_*.json"):
        for path in (run_dir / "logs").glob(pattern):
            path.unlink(missing_ok=True)


def read_failures(run_dir: Path) -> list[FailureRecord]:
    """Returns the failure records of this start, earliest first."""
    records = [FailureRecord(**json.loads(path.read_text())) for path in (run_dir / "logs").glob("failure_*.json")]
    return sorted(records, key=lambda record: record.monotonic_s)


def judge(run_dir: Path, num_ranks: int, exits: Sequence[RankExit], killed: Collection[int]) -> Outcome:
    """Decides what a run ended with.

    The order of blame: the earliest failure that is not a lost peer; a rank killed by a signal from outside; a rank
    that ended without a word; the earliest lost peer.

    Args:
        run_dir: holds the ranks' records.
        num_ranks: ranks that were started.
        exits: processes that the agent saw fail.
        killed: ranks that the launcher itself killed.
    """
    failures = read_failures(run_dir)
    causes = [record for record in failures if not record.consequence]
    if causes:
        return _from_record(run_dir, causes[0])
    silent = [end for end in exits if end.rank not in {record.rank for record in failures}]
    # The agent ends the peers of a failed rank by SIGTERM, so that signal is blamed only when there is nothing else.
    for end in silent:
        if end.exit_code < 0 and end.exit_code != -signal.SIGTERM and end.rank not in killed:
            return _from_signal(run_dir, end)
    for end in silent:
        if end.exit_code > 0:
            message = f"rank {end.rank} ended with exit code {end.exit_code} before it could say why"
            return Outcome(end.exit_code, end.rank, _with_log(run_dir, end.rank, message))
    if failures:
        return _from_record(run_dir, failures[0])
    if silent:
        return _from_signal(run_dir, silent[0])
    return Outcome(_returned_code(run_dir, num_ranks))


def _returned_code(run_dir: Path, num_ranks: int) -> int:
    """Returns the code that the ranks returned; one that left no record is a bug."""
    codes = []
    for rank in range(num_ranks):
        path = exit_path(run_dir, rank)
        codes.append(json.loads(path.read_text())["exit_code"] if path.exists() else EXIT_BUG)
    return next((code for code in codes if code != EXIT_OK), EXIT_OK)


def _from_record(run_dir: Path, record: FailureRecord) -> Outcome:
    if record.consequence:
        text = f"rank {record.rank} lost a peer, and no rank says why: {record.message}"
    elif record.user_error:
        text = f"rank {record.rank}: {record.message}"
    else:
        text = f"rank {record.rank} failed, {record.kind}: {record.message}"
    return Outcome(record.exit_code, record.rank, _with_log(run_dir, record.rank, text))


def _from_signal(run_dir: Path, end: RankExit) -> Outcome:
    try:
        name = signal.Signals(-end.exit_code).name
    except ValueError:
        name = f"signal {-end.exit_code}"
    message = f"rank {end.rank} was killed by {name}{_HINTS.get(-end.exit_code, '')}"
    return Outcome(EXIT_BUG, end.rank, _with_log(run_dir, end.rank, message), -end.exit_code)


def _with_log(run_dir: Path, rank: int, message: str) -> str:
    return f"{message}\n  log: {rank_log_path(run_dir, rank)}"
