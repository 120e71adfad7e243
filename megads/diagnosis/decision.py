"""Determines the root cause from the findings in the logs of all ranks and in the run's own records.

The exit codes and messages in events.jsonl are more specific than log lines and take precedence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from megads.diagnosis.causes import FACTS, Cause, Domain
from megads.diagnosis.evidence import LogFinding, Survey, survey_log, worded_findings
from megads.diagnosis.message_model import MessageModel, message_model
from megads.diagnosis.signature import Signature, Strength, signature_table
from megads.runtime.files import open_regular
from megads.runtime.run_dir import EVENTS_FILE

_MOST_EVIDENCE = 8
_LONGEST_EVIDENCE = 600
_PROGRESS_REACH = 50
"""A finding after which the log shows training progress for more lines than this did not end the run."""
_TASK_EXITED = re.compile(r"MPI_Abort|Exited with exit code [1-9]|Terminating (?:StepId|job step)", re.IGNORECASE)
_SLURM_ENDS = re.compile(r"^(?:slurmstepd|srun): (?!.*(?:DUE TO|out of memory|oom))", re.IGNORECASE)
"""SLURM messages while it ends the remaining tasks."""
_FIRST_OF_TABLE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_CONFIDENCE = {
    Strength.fact: 0.95,
    Strength.root: 0.9,
    Strength.failure: 0.7,
    Strength.cascade: 0.5,
    Strength.teardown: 0.3,
    Strength.noise: 0.2,
}


class Basis(StrEnum):
    """How a cause was determined: by a signature, by the wording of a line, by a past incident, or not at all."""

    signature = "signature"
    wording = "wording"
    incident = "incident"
    nothing = "nothing"


@dataclass(frozen=True)
class Evidence:
    """A log line that supports the diagnosis.

    Attributes:
        file: name of the log.
        line: line number, from 1; 0 if the evidence is not from a log.
        text: text of the line.
    """

    file: str
    line: int
    text: str

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True)
class Diagnosis:
    """Root cause of a failure, with evidence and advice.

    Attributes:
        cause: root cause.
        domain: origin of the fault.
        restartable: whether a restart, or a restart without the culprit, is enough.
        culprit: rank, node or worker that the logs name; empty if none.
        evidence: supporting log lines, the decisive one first.
        advice: recommended action.
        confidence: from 0 to 1, by the strength of the decisive line.
        candidates: causes that other lines indicate, most likely first.
        basis: how the cause was determined.
    """

    cause: Cause
    domain: Domain
    restartable: bool
    culprit: str
    evidence: tuple[Evidence, ...]
    advice: str
    confidence: float
    candidates: tuple[Cause, ...] = field(default=())
    basis: Basis = Basis.signature

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {
            "cause": str(self.cause),
            "domain": str(self.domain),
            "restartable": self.restartable,
            "culprit": self.culprit,
            "evidence": [evidence.as_json() for evidence in self.evidence],
            "advice": self.advice,
            "confidence": self.confidence,
            "candidates": [str(cause) for cause in self.candidates],
            "basis": str(self.basis),
        }


def decide(surveys: Sequence[Survey], model: MessageModel | None = None) -> Diagnosis:
    """Determines the root cause from the findings of all logs.

    The strongest finding is the cause. Among equally strong ones the first is used: by timestamp if all of them have
    one, else by the order of the logs and of the lines in them.

    Args:
        surveys: surveys of all logs, in rank order where that is known.
        model: classifies lines by their wording where no signature decides; None uses the bundled model.
    """
    model = model or message_model()
    findings = [_after_progress(one, survey) for survey in surveys for one in _after_exit(survey.findings)]
    if all(finding.strength <= Strength.teardown for finding in findings):
        worded = [finding for survey in surveys for finding in worded_findings(survey, model)]
        findings += sorted(worded, key=lambda finding: -(finding.probability or 0.0))[:1]
    if not findings:
        return _unknown(surveys)
    order = {survey.file: place for place, survey in enumerate(surveys)}
    ranked = _ranked(findings, order)
    top = ranked[0]
    facts, signature = FACTS[top.signature.cause], top.signature
    evidence = [top, *_supporting(top, ranked)]
    return Diagnosis(
        signature.cause,
        signature.domain or facts.domain,
        facts.restartable if signature.restartable is None else signature.restartable,
        _culprit(top, ranked),
        tuple(Evidence(one.file, one.line, one.text[:_LONGEST_EVIDENCE]) for one in evidence[:_MOST_EVIDENCE]),
        signature.advice or facts.advice,
        _CONFIDENCE[top.strength] if top.probability is None else min(_CONFIDENCE[top.strength], top.probability),
        tuple(cause for cause in dict.fromkeys(one.signature.cause for one in ranked) if cause != signature.cause),
        Basis.signature if top.probability is None else Basis.wording,
    )


def _after_exit(findings: Sequence[LogFinding]) -> list[LogFinding]:
    """Weakens SLURM messages about tasks that it ends because another task has exited."""
    left = next((one.line for one in findings if _TASK_EXITED.search(one.text)), None)
    return [
        replace(one, strength=min(one.strength, Strength.teardown))
        if left is not None and one.line > left and _SLURM_ENDS.match(one.text)
        else one
        for one in findings
    ]


def _after_progress(finding: LogFinding, survey: Survey) -> LogFinding:
    """Weakens a finding after which training continued."""
    if survey.last_progress <= finding.line + _PROGRESS_REACH:
        return finding
    weaker = Strength(max(finding.strength - 1, Strength.noise))
    return replace(finding, strength=weaker, progress_after=True)


def _ranked(findings: Sequence[LogFinding], order: dict[str, int]) -> list[LogFinding]:
    """Sorts findings by how likely they are the root cause, most likely first."""
    strongest = max(finding.strength for finding in findings)
    timed = all(finding.time_s is not None for finding in findings if finding.strength == strongest)

    def key(finding: LogFinding) -> tuple[float, bool, float, int, int]:
        time_s = finding.time_s if timed and finding.time_s is not None else 0.0
        # A message that a program was aborted is less specific than the messages around it, often in the next line.
        only_ended = finding.strength == Strength.cascade and finding.signature.cause is Cause.process_killed_unknown
        return -finding.strength, only_ended, time_s, order[finding.file], finding.line

    return sorted(findings, key=key)


def _supporting(top: LogFinding, ranked: Sequence[LogFinding]) -> list[LogFinding]:
    """Returns other findings of the same cause, then findings of other causes."""
    others = [finding for finding in ranked if finding is not top]
    same = [finding for finding in others if finding.signature.cause == top.signature.cause]
    return same[: _MOST_EVIDENCE // 2] + [finding for finding in others if finding not in same][: _MOST_EVIDENCE // 2]


def _culprit(top: LogFinding, ranked: Sequence[LogFinding]) -> str:
    """Returns the culprit: named in the message, else the node or rank of the line, else torchrun's first failed rank.

    Empty if none of these is known.
    """
    if top.named:
        return top.named
    if top.node:
        return top.node
    if top.rank is not None:
        return f"rank {top.rank}"
    for finding in sorted((one for one in ranked if one.file == top.file), key=lambda one: one.line):
        if found := _FIRST_OF_TABLE.search(finding.text):
            return f"rank {found[2]}"
    return ""


def _unknown(surveys: Sequence[Survey]) -> Diagnosis:
    """Returns the diagnosis for logs without any finding, with the last line of each as evidence."""
    cause = Cause.process_killed_unknown
    last = [
        Evidence(survey.file, kind.line, kind.text[:_LONGEST_EVIDENCE])
        for survey in surveys[:_MOST_EVIDENCE]
        for kind in sorted(survey.kinds.values(), key=lambda kind: kind.last)[-1:]
    ]
    facts = FACTS[cause]
    return Diagnosis(cause, facts.domain, facts.restartable, "", tuple(last), facts.advice, 0.0, basis=Basis.nothing)


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
