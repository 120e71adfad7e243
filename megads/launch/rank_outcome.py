"""Finds the root cause among the ends of all ranks: one failure makes its peers fail, which must not be blamed."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megads.errors import EXIT_BUG, EXIT_OK, UnhealthyNode, exit_code_of_signal
from megads.launch.hang_detection import furthest_behind
from megads.runtime.files import read_regular
from megads.runtime.heartbeat import STOPPED_AFTER_S, RankPosition, render_positions
from megads.runtime.own_folder import is_users_folder
from megads.runtime.run_dir import exit_path, failure_path, rank_log_path, spare_path

T = TypeVar("T")

_FULL_BYTES = 2**20
_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory? look for oom-kill in the kernel's log)",
    signal.SIGBUS: " (a mapped file was truncated, its disk failed, or /dev/shm is full)",
}


@dataclass(frozen=True)
class RankExit:
    """How the process of a rank ended.

    Attributes:
        rank: the rank.
        exit_code: its exit code; negative for a process killed by that signal.
    """

    rank: int
    exit_code: int


@dataclass(frozen=True)
class FailureRecord:
    """Record that a failing rank wrote about its failure; see `megads.launch.rank`.

    Attributes:
        rank: the rank.
        exit_code: documented exit code of the failure.
        kind: class name of the exception.
        user_error: whether the message is meant for the user as it is.
        message: message of the exception.
        monotonic_s: time of the failure on the node's monotonic clock.
        consequence: whether the rank failed only because it lost a peer.
        time_s: time of the failure in seconds since 1970, to order failures of several nodes as far as their clocks
            agree.
    """

    rank: int
    exit_code: int
    kind: str
    user_error: bool
    message: str
    monotonic_s: float
    consequence: bool
    time_s: float = 0.0


@dataclass(frozen=True)
class NodeReport:
    """How the ranks of one node ended.

    Attributes:
        node: name of the node; empty on a run of one machine, and if no node is to blame.
        failures: records of the failing ranks.
        exits: rank processes whose failure the agent observed.
        killed: ranks that the agent itself killed.
        returned: exit codes of the ranks that returned.
        positions: positions of the ranks by their heartbeats when the first failure on the node was observed.
        error: failure of the agent itself; empty for none.
        exit_code: exit code of that failure.
    """

    node: str = ""
    failures: Sequence[FailureRecord] = ()
    exits: Sequence[RankExit] = ()
    killed: Sequence[int] = ()
    returned: Mapping[int, int] = field(default_factory=dict)
    positions: Sequence[RankPosition] = ()
    error: str = ""
    exit_code: int = EXIT_BUG

    @property
    def failed(self) -> bool:
        """Whether a rank or the agent failed."""
        return bool(self.failures or self.exits or self.error)

    def encode(self) -> dict[str, Any]:
        """Converts to JSON types."""
        return asdict(self)

    @classmethod
    def decode(cls, content: Mapping[str, Any]) -> NodeReport:
        """Converts from the JSON types of `encode`."""
        return cls(
            node=content["node"],
            failures=[FailureRecord(**record) for record in content["failures"]],
            exits=[RankExit(**end) for end in content["exits"]],
            killed=content["killed"],
            returned={int(rank): code for rank, code in content["returned"].items()},
            positions=[RankPosition(**position) for position in content["positions"]],
            error=content["error"],
            exit_code=content["exit_code"],
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: documented exit code.
        rank: rank that is the root cause of a failure; None if there is none, or it is not known.
        message: message about the failure; empty for none.
        nodes: nodes that are the root cause, or the node of `rank`; empty on a run of one machine.
        lost: whether the nodes themselves are the root cause, and not a rank on them.
        first_sign_s: time of the first recorded failure of a rank, in seconds since 1970; None if there is no record.
        stopping: whether a stop had been requested before the end.
        signal: signal that killed `rank`.
        hung: whether `rank`, or all ranks, hung.
    """

    exit_code: int
    rank: int | None = None
    message: str = ""
    nodes: tuple[str, ...] = ()
    lost: bool = False
    first_sign_s: float | None = None
    stopping: bool = False
    signal: int | None = None
    hung: bool = False


def clear_records(run_dir: Path) -> None:
    """Removes the records of earlier starts."""
    for pattern in ("failure_*.json", "exit_*.json"):
        for folder in (run_dir / "logs", spare_path(run_dir / "logs" / "any").parent):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


def read_failures(run_dir: Path, ranks: Iterable[int], start: int | None = None) -> list[FailureRecord]:
    """Returns the failure records that the ranks of a start wrote, see run_dir.failure_path."""
    found = (_record(failure_path(run_dir, rank, start), FailureRecord) for rank in ranks)
    return [record for record in found if record is not None]


def read_exits(run_dir: Path, ranks: Iterable[int], start: int | None = None) -> dict[int, int]:
    """Returns the recorded exit codes of the ranks of a start that returned."""
    found = (_record(exit_path(run_dir, rank, start), RankExit) for rank in ranks)
    return {record.rank: record.exit_code for record in found if record is not None}


def _record(path: Path, kind: type[T]) -> T | None:
    """Reads a record of a rank of this node, or of any node on a shared disk; None if it is missing or unreadable."""
    # Slow to import, and needed only at the end of a run.
    from pydantic import TypeAdapter

    spare = spare_path(path)
    # In the run directory a file server may report another owner.
    ours = path if path.exists() else spare if is_users_folder(spare.parent) and spare.exists() else None
    try:
        return None if ours is None else TypeAdapter(kind).validate_json(read_regular(ours))
    except (OSError, ValueError):
        return None


def determine_outcome(run_dir: Path, num_ranks: int, reports: Sequence[NodeReport]) -> Outcome:
    """Determines the outcome of a run; see `_find_cause` for the order of precedence.

    Args:
        run_dir: the run directory, with the ranks' logs.
        num_ranks: number of started ranks.
        reports: reports of the nodes; ranks of a node without a report count as ranks without a record.
    """
    outcome = _find_cause(run_dir, num_ranks, reports)
    signs = [record.time_s for report in reports for record in report.failures]
    return replace(outcome, first_sign_s=min(signs, default=None))


def _find_cause(run_dir: Path, num_ranks: int, reports: Sequence[NodeReport]) -> Outcome:
    """Determines the root cause of a failure, and the outcome.

    In order of precedence: the earliest failure that is not a lost peer; an agent that failed itself; no rank, if all
    aborted; a rank killed by a signal; a rank that exited without a record; a rank that the others waited for until
    their collectives timed out; the earliest lost peer.
    """
    nodes = {record.rank: report.node for report in reports for record in report.failures}
    failures = _by_time([record for report in reports for record in report.failures], single=len(reports) == 1)
    causes = [record for record in failures if not record.consequence]
    if causes:
        return _from_record(run_dir, causes[0], nodes[causes[0].rank])
    broken = [report for report in reports if report.error]
    if broken:
        first = broken[0]
        names = tuple(report.node for report in broken if report.node and report.error == first.error)
        lost = first.exit_code == UnhealthyNode.exit_code
        where = f"node {', '.join(names)}: " if names else ""
        return Outcome(first.exit_code, None, f"{where}{first.error}", names, lost)
    silent = [(end, report.node) for report in reports for end in report.exits if end.rank not in nodes]
    killed = {rank for report in reports for rank in report.killed}
    found = render_positions(position for report in reports for position in report.positions)
    whereabouts = f"\n  when it was noticed: {found}" if found else ""
    if len(silent) == num_ranks > 1 and {end.exit_code for end, _ in silent} == {-signal.SIGABRT} and not killed:
        return _all_aborted(run_dir, num_ranks, whereabouts)
    blamed = _unrecorded_cause(run_dir, silent, killed)
    if blamed is not None:
        return blamed
    if failures:
        waited_for = _waited_for(run_dir, failures, [at for report in reports for at in report.positions])
        if waited_for is not None:
            return waited_for
        return _from_record(run_dir, failures[0], nodes[failures[0].rank], whereabouts)
    if silent:
        return _from_signal(run_dir, *silent[0])
    returned = {rank: code for report in reports for rank, code in report.returned.items()}
    codes = [returned.get(rank, EXIT_BUG) for rank in range(num_ranks)]
    return Outcome(next((code for code in codes if code != EXIT_OK), EXIT_OK))


def _waited_for(run_dir: Path, failures: Sequence[FailureRecord], positions: Sequence[RankPosition]) -> Outcome | None:
    """Outcome for ranks in an earlier phase than all others, whose collectives timed out; None if there are none."""
    late = [record for record in failures if any(word in record.message.lower() for word in ("timed out", "timeout"))]
    behind = furthest_behind(positions)
    if not late or not behind or len(behind) == len(positions):
        return None
    found = hang_outcome(run_dir, behind, None, ())
    first, _, rest = found.message.partition("\n")
    return replace(found, message=f"{first}; rank {late[0].rank} waited until {late[0].message}\n{rest}")


def lost_nodes(names: Collection[str], said: str) -> list[NodeReport]:
    """Returns reports for the nodes whose agents sent none.

    Args:
        names: names of the nodes.
        said: message of the scheduler about them; empty for none.
    """
    what = f"lost, its agent ended without a report{f' ({said})' if said else ''}"
    return [NodeReport(node=name, error=what, exit_code=UnhealthyNode.exit_code) for name in names]


def _by_time(records: list[FailureRecord], single: bool) -> list[FailureRecord]:
    """Sorts by time: on one node by its monotonic clock, on several nodes by the time of day."""
    return sorted(records, key=lambda record: record.monotonic_s if single else record.time_s)


def _unrecorded_cause(run_dir: Path, silent: Sequence[tuple[RankExit, str]], killed: Collection[int]) -> Outcome | None:
    """Outcome for a rank that ended by itself without a record; None if there is none."""
    # The peers of a failed rank are ended by SIGTERM, so this signal is a cause only if there is no other.
    for end, node in silent:
        if end.exit_code < 0 and end.exit_code != -signal.SIGTERM and end.rank not in killed:
            return _from_signal(run_dir, end, node)
    for end, node in silent:
        if end.exit_code > 0:
            message = f"{_rank(end.rank, node)} ended with exit code {end.exit_code} without recording a cause"
            with suppress(OSError):  # the folder may be deleted
                full = shutil.disk_usage(run_dir).free < _FULL_BYTES
                message += f": the disk of {run_dir} is full" if full else ""
            return Outcome(end.exit_code, end.rank, _with_log(run_dir, end.rank, message), _nodes(node))
    return None


def _all_aborted(run_dir: Path, num_ranks: int, whereabouts: str) -> Outcome:
    """Outcome without a root cause: which rank makes a collective hang does not show in which rank aborted first."""
    return Outcome(
        exit_code_of_signal(signal.SIGABRT),
        message=f"all {num_ranks} ranks aborted (SIGABRT) at once without an error, as they do when NCCL's watchdog "
        f"finds a collective that hangs; no rank is known to be the cause{whereabouts}\n"
        f"  logs: {rank_log_path(run_dir, 0).with_name('rank_*.log')}: the collective that each rank waited in; a rank "
        "that waited in another one, or in none, is the likely cause (TORCH_NCCL_DESYNC_DEBUG=1 has them name it)",
    )


def _nodes(name: str) -> tuple[str, ...]:
    return (name,) if name else ()


def _rank(rank: int, node: str) -> str:
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def hung_record(position: RankPosition) -> FailureRecord:
    """Returns the failure record of a hung rank, which cannot write one itself."""
    code, now = UnhealthyNode.exit_code, position.silent_s
    began = {"monotonic_s": time.monotonic() - now, "time_s": time.time() - now}
    return FailureRecord(position.rank, code, "Hang", True, f"hung: {position}", consequence=False, **began)


class HangVerdict(Protocol):
    """Which ranks did not enter which collective: `megads.tools.diagnose.flight_recorder`."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks to examine first."""
        ...

    def sentences(self) -> list[str]:
        """Returns the findings as readable sentences."""
        ...


def hang_outcome(
    run_dir: Path, suspects: Sequence[RankPosition], flight: HangVerdict | None, folders: Sequence[Path]
) -> Outcome:
    """Returns the outcome of a start that hangs.

    Args:
        run_dir: the run directory, with the ranks' logs.
        suspects: the ranks that all others wait for.
        flight: analysis of the flight recorder dumps, if there are any: which ranks did not enter which collective.
        folders: evidence folders of the start.
    """
    # A process without heartbeats takes precedence: the flight recorders of its peers may not name it.
    silent = [at for at in suspects if at.silent_s >= STOPPED_AFTER_S]
    named = [at for at in suspects if flight is not None and at.rank in flight.culprits]
    behind = silent or named or list(suspects)
    names = {at.node for at in behind}
    nodes = tuple(names) if len(names) == 1 and "" not in names else ()
    rank = behind[0].rank if len(behind) == 1 else None
    what = behind[0].silence if silent else str(behind[0])
    message = f"{behind[0].name}: hung: {what}" if rank is not None else f"hung: {render_positions(behind)}"
    if flight is not None and named:
        message += f"\n  flight recorder: {flight.sentences()[0]}"
    message += "".join(f"\n  evidence: {folder}" for folder in folders[-1:])
    return Outcome(UnhealthyNode.exit_code, rank, _with_log(run_dir, behind[0].rank, message), nodes, hung=True)


def lost_nodes_outcome(silent_s: Mapping[str, float]) -> Outcome:
    """Returns the outcome of a start some of whose nodes fell silent, such as after a power failure.

    Args:
        silent_s: seconds since the last message from each of them.
    """
    said = ", ".join(f"node {name} (for {seconds:.0f} s)" for name, seconds in silent_s.items())
    message = f"lost: no message from {said}, and the ranks of all other nodes wait"
    return Outcome(UnhealthyNode.exit_code, None, message, tuple(silent_s), lost=True)


def _from_record(run_dir: Path, record: FailureRecord, node: str, whereabouts: str = "") -> Outcome:
    rank = _rank(record.rank, node)
    if record.consequence:
        text = f"{rank} lost a peer, and no rank says why: {record.message}{whereabouts}"
    elif record.user_error:
        text = f"{rank}: {record.message}"
    else:
        text = f"{rank} failed, {record.kind}: {record.message}"
    return Outcome(record.exit_code, record.rank, _with_log(run_dir, record.rank, text), _nodes(node))


def _from_signal(run_dir: Path, end: RankExit, node: str) -> Outcome:
    message = f"{_rank(end.rank, node)} was killed by {signal_name(-end.exit_code)}{_HINTS.get(-end.exit_code, '')}"
    code = exit_code_of_signal(-end.exit_code)
    return Outcome(code, end.rank, _with_log(run_dir, end.rank, message), _nodes(node), signal=-end.exit_code)


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_log(run_dir: Path, rank: int, message: str) -> str:
    return f"{message}\n  log: {rank_log_path(run_dir, rank)}"
