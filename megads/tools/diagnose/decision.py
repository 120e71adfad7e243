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

from megads.api import EVENTS_FILE, open_regular
from megads.tools.diagnose.causes import FACTS, Cause, Domain
from megads.tools.diagnose.evidence import LogFinding, Survey, findings_by_wording, lines_marked_as_errors, survey_log
from megads.tools.diagnose.message_model import MessageModel, message_model
from megads.tools.diagnose.signature import Signature, Strength, signature_table

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


class DiagnosisOutcome(StrEnum):
    """What the logs and records show: a failure, that there was none, or an end without a cause."""

    failure = "failure"
    no_failure = "no_failure"
    no_cause = "no_cause"


class CauseBasis(StrEnum):
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
    """Root cause of a failure with evidence and advice, or the statement that none is found.

    Attributes:
        cause: root cause; None unless the outcome is a failure.
        domain: origin of the fault; None without a cause.
        restartable: whether a restart, or a restart without the culprit, is enough; None if nothing failed.
        culprit: rank, node or worker that the logs name; empty if none.
        evidence: supporting log lines, the decisive one first.
        advice: recommended action.
        confidence: from 0 to 1, by the strength of the decisive line.
        candidates: causes that other lines indicate, most likely first.
        basis: how the cause was determined.
        outcome: whether there is a failure at all.
    """

    cause: Cause | None
    domain: Domain | None
    restartable: bool | None
    culprit: str
    evidence: tuple[Evidence, ...]
    advice: str
    confidence: float
    candidates: tuple[Cause, ...] = field(default=())
    basis: CauseBasis = CauseBasis.signature
    outcome: DiagnosisOutcome = DiagnosisOutcome.failure

    @property
    def summary(self) -> str:
        """Cause, culprit and first advice in a line.

        It does not say that a restart is useless: whether to restart is the launcher's decision, not the diagnosis's.
        """
        if self.cause is None:
            return "no line of the logs shows the cause"
        culprit = f", {self.culprit}" if self.culprit else ""
        restart = "; a restart may be enough" if self.restartable else ""
        advice = self.advice.partition(". ")[0].rstrip(".")
        return f"{FACTS[self.cause].title}{culprit}{restart}. {advice}"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {
            "cause": self.cause and str(self.cause),
            "domain": self.domain and str(self.domain),
            "restartable": self.restartable,
            "culprit": self.culprit,
            "evidence": [evidence.as_json() for evidence in self.evidence],
            "advice": self.advice,
            "confidence": self.confidence,
            "candidates": [str(cause) for cause in self.candidates],
            "basis": str(self.basis),
            "outcome": str(self.outcome),
        }


def decide(surveys: Sequence[Survey], model: MessageModel | None = None) -> Diagnosis:
    """Determines the root cause from the findings of all logs.

    Only findings above the bar of `_is_evidence` can be the cause; the strongest is. Among equally strong ones the
    first is used: by timestamp if all of them have one, else by the order of the logs and of the lines in them.

    Args:
        surveys: surveys of all logs, in rank order where that is known.
        model: classifies lines by their wording where no signature decides; None uses the bundled model.
    """
    model = model or message_model()
    by_file = {survey.file: survey for survey in surveys}
    findings = [_after_progress(one, survey) for survey in surveys for one in _after_exit(survey.findings)]
    evidence = [one for one in findings if _is_evidence(one, by_file[one.file])]
    if all(finding.strength <= Strength.teardown for finding in evidence):
        # What a job prints as it fails is evidence of a failure: then a warning may name its cause.
        failed = bool(evidence)
        worded = [one for survey in surveys for one in findings_by_wording(survey, model, warnings=failed)]
        worded = [one for one in worded if _is_evidence(_after_progress(one, by_file[one.file]), by_file[one.file])]
        if failed:
            evidence += [
                one for one in findings if one.excused and _is_evidence(replace(one, excused=False), by_file[one.file])
            ]
        evidence += sorted(worded, key=lambda finding: -(finding.probability or 0.0))[:1]
    evidence += [one for survey in surveys for one in _repeated_overflows(findings, survey)]
    order = {survey.file: place for place, survey in enumerate(surveys)}
    if not evidence:
        return _without_cause(surveys, _ranked(findings, order))
    if any(one.of_pace and one.signature.cause is Cause.nccl_timeout_hang for one in evidence):
        # What ends a job after hours without a step is not the reason for them.
        evidence = [one for one in evidence if one.signature.cause is not Cause.preempted_or_time_limit]
    ranked = _ranked(evidence, order)
    others = [one for one in _ranked(findings, order) if one not in ranked]
    return _verdict(ranked, others, surveys)


_NOISE_OF_THE_END = (
    Cause.nccl_remote_or_network,
    Cause.nccl_timeout_hang,
    Cause.port_or_rendezvous,
    Cause.aux_service_network,
    Cause.preempted_or_time_limit,
)
"""What ranks report about each other and about trackers while a finished job ends."""
_SMALL_SCALE = 1024.0
_SCALE = re.compile(
    r"(?:reducing|reduced?)(?: loss scale)? (?:to|from \S+ to) (\d+(?:\.\d+)?(?:e[-+]?\d+)?)", re.IGNORECASE
)
_NOT_A_NUMBER = re.compile(r"[:=|\s](?:nan|inf)\b", re.IGNORECASE)


def _repeated_overflows(findings: Sequence[LogFinding], survey: Survey) -> list[LogFinding]:
    """Returns the lines about skipped steps if several end the log, and the search for a loss scale is over."""
    last = [
        one
        for one in findings
        if one.file == survey.file
        and one.excused
        and one.signature.cause is Cause.nan_or_loss_divergence
        and one.line > survey.last_progress
    ]
    real = [
        one
        for one in last
        if _NOT_A_NUMBER.search(one.text) or ((found := _SCALE.search(one.text)) and float(found[1]) < _SMALL_SCALE)
    ]
    return real if len(real) > 1 else []


def _is_evidence(finding: LogFinding, survey: Survey) -> bool:
    """Whether a finding is strong enough for a verdict: the bar of every diagnosis.

    A line that the trainer itself marks as a warning, or as retried, is none unless it names a hardware fault. Neither
    is a failure after which training went on, nor the usual noise of a job that ends after its training.
    """
    if finding.progress_after or finding.signature.strength == Strength.noise:
        return False
    if survey.finished:
        crashed = finding.strength >= Strength.cascade and finding.signature.cause not in _NOISE_OF_THE_END
        return finding.line > survey.finished and crashed and not finding.excused
    return finding.strength >= (Strength.failure if finding.excused else Strength.teardown)


def _verdict(ranked: Sequence[LogFinding], others: Sequence[LogFinding], surveys: Sequence[Survey]) -> Diagnosis:
    """Returns the diagnosis from the evidence, the most likely root cause first, and from weaker findings."""
    top = ranked[0]
    facts, signature = FACTS[top.signature.cause], top.signature
    shown = [top, *_supporting(top, [*ranked, *others])]
    causes = dict.fromkeys(one.signature.cause for one in (*ranked, *others))
    return Diagnosis(
        signature.cause,
        signature.domain or facts.domain,
        facts.restartable if signature.restartable is None else signature.restartable,
        _culprit(top, [*ranked, *others], surveys),
        tuple(Evidence(one.file, one.line, one.text[:_LONGEST_EVIDENCE]) for one in shown[:_MOST_EVIDENCE]),
        signature.advice or facts.advice,
        _CONFIDENCE[top.strength] if top.probability is None else min(_CONFIDENCE[top.strength], top.probability),
        tuple(cause for cause in causes if cause != signature.cause),
        CauseBasis.signature if top.probability is None else CauseBasis.wording,
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
    if finding.of_pace or survey.last_progress <= finding.line + _PROGRESS_REACH:
        return finding
    weaker = Strength(max(finding.strength - 1, Strength.noise))
    return replace(finding, strength=weaker, progress_after=True)


def _ranked(findings: Sequence[LogFinding], order: dict[str, int]) -> list[LogFinding]:
    """Sorts findings by how likely they are the root cause, most likely first."""
    strongest = max((finding.strength for finding in findings), default=Strength.noise)
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


def _culprit(top: LogFinding, ranked: Sequence[LogFinding], surveys: Sequence[Survey]) -> str:
    """Returns the culprit; empty if no line names one.

    It is named in the message, else by the node or rank of the line; else by another line of the same cause, or by
    torchrun's table of failures: its root cause, or the first failed rank.
    """
    survey = next(survey for survey in surveys if survey.file == top.file)
    if survey.root_cause and top.signature.cause is Cause.process_killed_unknown and not top.named:
        # torchrun kills the other ranks after the first failure, and lists them too.
        return survey.root_cause
    same = [one for one in ranked if one.signature.cause == top.signature.cause and one.file == top.file]
    for finding in (top, *same):
        if finding.named or finding.node:
            return finding.named or finding.node
        if finding.rank is not None:
            return f"rank {finding.rank}"
    if survey.root_cause:
        return survey.root_cause
    for finding in sorted((one for one in ranked if one.file == top.file), key=lambda one: one.line):
        if found := _FIRST_OF_TABLE.search(finding.text):
            return f"rank {found[2]}"
    return ""


_FINISHED_ADVICE = "The log says that the training ended as planned. Nothing has to be changed."
_NO_CAUSE_ADVICE = (
    "No line reports a failure. If the job still runs, it trains or waits. If it is gone, something ended it without a "
    "message (look for an out-of-memory kill in dmesg, sacct or the cgroup's memory.events, and for a lost node): "
    "restart it from the last checkpoint."
)


_UNKNOWN_ERROR_ADVICE = (
    "The log ends with lines that are marked as errors, and none of them is known: read them. If they name nothing to "
    "correct, restart from the last checkpoint once."
)


def _without_cause(surveys: Sequence[Survey], weaker: Sequence[LogFinding]) -> Diagnosis:
    """Returns the diagnosis for logs without evidence of a failure, with the last line of each.

    Args:
        surveys: surveys of all logs.
        weaker: findings below the bar, most likely first.
    """
    last = [
        Evidence(survey.file, line, text[:_LONGEST_EVIDENCE])
        for survey in surveys[:_MOST_EVIDENCE]
        for line, text in [survey.end]
        if line
    ]
    candidates = tuple(dict.fromkeys(one.signature.cause for one in weaker))
    errors = [
        Evidence(survey.file, kind.line, kind.text.strip()[:_LONGEST_EVIDENCE])
        for survey in surveys
        for kind in lines_marked_as_errors(survey)
    ]
    if errors:
        shown = tuple(errors[-_MOST_EVIDENCE:])
        return Diagnosis(
            None,
            None,
            True,
            "",
            shown,
            _UNKNOWN_ERROR_ADVICE,
            0.0,
            candidates,
            CauseBasis.nothing,
            DiagnosisOutcome.no_cause,
        )
    if any(survey.finished for survey in surveys):
        return no_failure(_FINISHED_ADVICE, last, candidates)
    return Diagnosis(
        None,
        None,
        True,
        "",
        tuple(last),
        _NO_CAUSE_ADVICE,
        0.0,
        candidates,
        CauseBasis.nothing,
        DiagnosisOutcome.no_cause,
    )


def no_failure(advice: str, evidence: Sequence[Evidence] = (), candidates: tuple[Cause, ...] = ()) -> Diagnosis:
    """Returns the diagnosis that nothing failed.

    Args:
        advice: how the run ended, or that it goes on.
        evidence: lines that show it.
        candidates: causes that harmless lines indicate.
    """
    return Diagnosis(
        None, None, None, "", tuple(evidence), advice, 0.0, candidates, CauseBasis.nothing, DiagnosisOutcome.no_failure
    )


START_HEADER = b"--- rank "
"""Start of the line that a rank writes to its log at each of its starts."""
_TAIL_BYTES = 128 << 10
_MOST_LOGS = 32
_SIGNAL = re.compile(r"was killed by (SIG\w+)")
_HANG = re.compile(r"\bhung\b|lost a peer|aborted \(SIGABRT\) at once")
_LOST_NODE = re.compile(
    r"\bnodes? [\w.,\- ]+: (?:lost\b|no message)|^lost: no message from |\blost\b.*\bagents? ended without a report"
)
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


_PENDING = {
    "hang_suspected": Cause.nccl_timeout_hang,
    "heartbeat_lost": Cause.nccl_timeout_hang,
    "node_silent": Cause.node_lost,
}
"""Causes of the events that report a hang or a silence while a run goes on."""


def silent_run_finding(text: str) -> LogFinding:
    """Returns the finding that a living run has not finished a step for far longer than a step takes.

    Args:
        text: state of the run.
    """
    signature = Signature(Cause.nccl_timeout_hang, Strength.cascade, (), text)
    return LogFinding(EVENTS_FILE, 0, text, signature, signature.strength)


def recorded_findings(line: int, event: Mapping[str, Any]) -> list[LogFinding]:
    """Converts a failure that the launcher recorded to findings.

    Args:
        line: line number of the event in events.jsonl.
        event: `failure` or `killed` event, or one that reports a hang or a silence.
    """
    code, rank = event.get("exit_code"), event.get("rank")
    message = str(event.get("message") or event.get("cause") or "")
    if (cause := _PENDING.get(str(event.get("event")))) is not None:
        hang, node = Signature(cause, Strength.failure, (), message), str(event.get("node") or "")
        named = f"rank {rank}" if isinstance(rank, int) else node
        return [LogFinding(EVENTS_FILE, line, message.partition("\n")[0], hang, hang.strength, named=named)]
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
    if _LOST_NODE.search(message):
        return Signature(Cause.node_lost, Strength.root, (), message)
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
