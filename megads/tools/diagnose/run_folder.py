"""What a run of megads recorded of its end: the failure's record and exit code, and the logs of its last start."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.diagnosis.causes import Cause
from megads.diagnosis.evidence import Finding, Survey
from megads.diagnosis.signature import Signature, Strength, signature_table
from megads.errors import EXIT_OK, DataError
from megads.runtime.metrics import read_json_lines
from megads.runtime.run_dir import EVENTS_FILE, find_run, is_run_dir, rank_log_path, srun_log_path
from megads.tools.diagnose.log_files import survey_file

_HEADER = b"--- rank "
"""A rank begins each of its starts with this line."""
_SIGNAL = re.compile(r"was killed by (SIG\w+)")
_HANG = re.compile(r"\bhung\b|lost a peer|aborted \(SIGABRT\) at once")
_OF_CODE = {
    2: Cause.config_or_shape_error,
    3: Cause.data_corrupt,
    4: Cause.checkpoint_corrupt_or_mismatch,
    5: Cause.preempted_or_time_limit,
    6: Cause.preempted_or_time_limit,
    7: Cause.nan_or_loss_divergence,
    9: Cause.process_killed_unknown,
}
_FAILURE_EVENTS = ("failure", "killed")


@dataclass(frozen=True)
class RunEnd:
    """How a run's last start ended.

    Attributes:
        folder: the run directory.
        surveys: of its records and logs; the first is of what it recorded.
        finished: it ended well, so there is nothing to diagnose.
        nodes: to blame, as the launcher found.
    """

    folder: Path
    surveys: tuple[Survey, ...]
    finished: bool
    nodes: tuple[str, ...] = ()


def read_run(name: str) -> RunEnd:
    """Reads how a run ended.

    Raises:
        ConfigError: there is no such run.
        DataError: it recorded nothing, and has no log.
    """
    folder = find_run(name)
    if not is_run_dir(folder):
        raise DataError(f"run = {name}: {folder} is no run directory: it has neither {EVENTS_FILE} nor logs of ranks")
    events = list(enumerate(read_json_lines(folder / EVENTS_FILE), 1))
    last_launch = max((place for place, (_, event) in enumerate(events) if event.get("event") == "launch"), default=0)
    events = events[last_launch:]
    failures = [(line, event) for line, event in events if event.get("event") in _FAILURE_EVENTS]
    ends = [event for _, event in events if event.get("event") == "exit"]
    if not failures and ends and ends[-1].get("exit_code") == EXIT_OK:
        return RunEnd(folder, (), True)
    recorded = Survey(EVENTS_FILE)
    recorded.lines = len(events)
    for line, event in failures:
        recorded.findings += _findings(line, event)
    blamed = failures[-1][1].get("rank") if failures else None
    logs = _logs(folder, blamed if isinstance(blamed, int) else None)
    surveys = [recorded, *(survey_file(path, str(path.relative_to(folder)), _last_start(path)) for path in logs)]
    if not failures and not any(survey.lines for survey in surveys[1:]):
        raise DataError(f"run = {name}: {folder} holds no failure and no log of a rank: was it started at all?")
    nodes = failures[-1][1].get("nodes") if failures else None
    return RunEnd(folder, tuple(surveys), False, tuple(map(str, nodes)) if isinstance(nodes, list) else ())


def _logs(folder: Path, blamed: int | None) -> list[Path]:
    """Returns the logs of a run: that of the rank to blame, the other ranks', the agents' and srun's."""
    ranks = sorted((folder / "logs").glob("rank_*.log"))
    first = rank_log_path(folder, blamed) if blamed is not None else None
    ordered = [path for path in ranks if path == first] + [path for path in ranks if path != first]
    others = [*sorted((folder / "logs").glob("agent_*.log")), srun_log_path(folder)]
    return [path for path in (*ordered, *others) if path.is_file() and path.stat().st_size]


def _last_start(path: Path) -> int:
    """Returns where a rank's log of its last start begins."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        at = content.rfind(b"\n" + _HEADER)
        return at + 1 if at >= 0 else 0


def _findings(line: int, event: Mapping[str, Any]) -> list[Finding]:
    """Translates what the launcher recorded: its exit codes say more than any line."""
    code, rank = event.get("exit_code"), event.get("rank")
    message = str(event.get("message") or event.get("cause") or "")
    signature = _signature(int(code) if isinstance(code, int) else 1, event.get("event") == "killed", message)
    if signature is None:
        return []
    text = message.splitlines()[0] if message else str(dict(event))
    found = [Finding(EVENTS_FILE, line, text, signature, signature.strength, rank if isinstance(rank, int) else None)]
    kills = event.get("oom_kills")
    if isinstance(kills, int) and kills > 0:
        said = f"the memory cgroup counted {kills} kills for want of memory (oom_kill) during this start"
        oom = Signature(Cause.host_oom_kill, Strength.root, (), said)
        found.insert(0, Finding(EVENTS_FILE, line, said, oom, oom.strength, rank if isinstance(rank, int) else None))
    return found


def _signature(code: int, interrupted: bool, message: str) -> Signature | None:
    """Returns what an exit code and its message say; None where the logs have to tell."""
    if interrupted:
        return Signature(Cause.preempted_or_time_limit, Strength.root, (), message, restartable=True)
    if killed := _SIGNAL.search(message):
        matched = signature_table().match(message.partition("cause:")[2]) if "cause:" in message else None
        if matched is not None:
            return matched.signature
        return Signature(
            Cause.process_killed_unknown, Strength.failure, (), message, restartable=killed[1] == "SIGKILL"
        )
    if _HANG.search(message):
        alone = "lost a peer" in message
        cause = Cause.nccl_remote_or_network if alone else Cause.nccl_timeout_hang
        return Signature(cause, Strength.cascade if alone else Strength.root, (), message, restartable=True)
    matched = signature_table().match(message.splitlines()[0]) if message else None
    if code in _OF_CODE:
        if matched is not None and matched.signature.cause in (Cause.disk_full, Cause.filesystem_io):
            return matched.signature
        return Signature(_OF_CODE[code], Strength.root, (), message, restartable=code in (5, 6, 9))
    return matched.signature if matched is not None else None
