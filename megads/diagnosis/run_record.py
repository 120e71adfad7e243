"""Findings from the events that a megads run recorded: its exit codes and messages are more specific than log lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megads.diagnosis.causes import Cause
from megads.diagnosis.decision import Diagnosis, decide
from megads.diagnosis.evidence import LogFinding, Survey, survey_log
from megads.diagnosis.signature import Signature, Strength, signature_table
from megads.runtime.files import open_regular
from megads.runtime.run_dir import EVENTS_FILE

START_HEADER = b"--- rank "
"""Start of the line that a rank writes to its log at each of its starts."""
_TAIL_BYTES = 128 << 10
_MOST_LOGS = 32
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


def diagnose_failure(event: Mapping[str, Any], logs: Sequence[Path]) -> Diagnosis:
    """Diagnoses a failure when it happens, from its event and the ends of the rank logs, in a fraction of a second.

    Args:
        event: `failure` event, as written to events.jsonl.
        logs: rank logs, that of the culprit first; only the first 32 are read.
    """
    recorded = Survey(EVENTS_FILE, lines=1, findings=recorded_findings(0, event))
    return decide([recorded, *(_survey_tail(path) for path in logs[:_MOST_LOGS] if path.is_file())])


def _survey_tail(path: Path) -> Survey:
    """Scans the end of a rank log, from the rank's last start at the earliest; line numbers count from there."""
    with open_regular(path) as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        tail = file.read(_TAIL_BYTES)
    start = tail.rfind(b"\n" + START_HEADER)
    found = re.search(r"(\d+)", path.stem)
    return survey_log(path.name, [tail[start + 1 :]], int(found[1]) if found else None)


def recorded_findings(line: int, event: Mapping[str, Any]) -> list[LogFinding]:
    """Converts a failure that the launcher recorded to findings.

    Args:
        line: line number of the event in events.jsonl.
        event: `failure` or `killed` event.
    """
    code, rank = event.get("exit_code"), event.get("rank")
    message = str(event.get("message") or event.get("cause") or "")
    signature = _signature(int(code) if isinstance(code, int) else 1, event.get("event") == "killed", message)
    if signature is None:
        return []
    text = message.splitlines()[0] if message else str(dict(event))
    found = [
        LogFinding(EVENTS_FILE, line, text, signature, signature.strength, rank if isinstance(rank, int) else None)
    ]
    kills = event.get("oom_kills")
    if isinstance(kills, int) and kills > 0:
        said = f"the memory cgroup counted {kills} out-of-memory kills (oom_kill) during this start"
        oom = Signature(Cause.host_oom_kill, Strength.root, (), said)
        found.insert(0, LogFinding(EVENTS_FILE, line, said, oom, oom.strength, rank if isinstance(rank, int) else None))
    return found


def _signature(code: int, interrupted: bool, message: str) -> Signature | None:
    """Returns the signature of an exit code and its message; None if only the logs can determine the cause."""
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
