"""`megads diagnose`: reads the inputs, determines the root cause, and finds similar past incidents.

The output is a panel with tables, or one JSON object.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megads.api import EVENTS_FILE, DataError, VisibleConsole
from megads.monitor.run_state import RunState
from megads.tools.diagnose.causes import FACTS, Cause
from megads.tools.diagnose.config import DiagnoseConfig
from megads.tools.diagnose.decision import CauseBasis, Diagnosis, DiagnosisOutcome, Evidence, decide, no_failure
from megads.tools.diagnose.evidence import Survey
from megads.tools.diagnose.flight_recorder import FlightVerdict, find_culprit_ranks, flight_recorder_verdict
from megads.tools.diagnose.incidents import (
    SimilarIncident,
    failure_templates,
    find_similar,
    past_cause,
    read_incidents,
    store_incident,
)
from megads.tools.diagnose.inputs import (
    RunEnd,
    find_logs,
    main_thread_stack,
    read_flight_dumps,
    read_run,
    survey_file,
)
from megads.tools.diagnose.language_model import ask

_INCIDENT_CONFIDENCE = 0.4
_RANK = re.compile(r"\d+")
_MOST_FRAMES = 4
_HANGS = (Cause.nccl_timeout_hang, Cause.process_killed_unknown, Cause.nccl_remote_or_network)
"""Causes for which the flight recorder takes precedence over the logs."""


@dataclass(frozen=True)
class Report:
    """Result of `megads diagnose`.

    Attributes:
        diagnosis: root cause with evidence and advice, or that nothing failed.
        surveys: surveys of the logs.
        flight: result from the flight recorder dumps; None if there are none.
        similar_incidents: similar past incidents, most similar first.
        advice_of_model: answer of the language model; empty if there is none.
        notes: problems with the inputs or the language model.
        seconds: duration of the diagnosis.
    """

    diagnosis: Diagnosis
    surveys: tuple[Survey, ...]
    flight: FlightVerdict | None
    similar_incidents: tuple[SimilarIncident, ...]
    advice_of_model: str
    notes: tuple[str, ...]
    seconds: float

    @property
    def templates(self) -> Counter[str]:
        """Templates of all logs, each with its number of lines."""
        found: Counter[str] = Counter()
        for survey in self.surveys:
            found.update(survey.templates())
        return found


def diagnose(config: DiagnoseConfig) -> Report:
    """Diagnoses a run or logs, and stores it as an incident if the config says so.

    Raises:
        ConfigError: The run does not exist, or the key file of the language model cannot be read.
        DataError: A log or dump is missing or unreadable, or all of them are empty.
    """
    start = time.perf_counter()
    surveys: list[Survey] = []
    nodes: tuple[str, ...] = ()
    collected: tuple[Path, ...] = ()
    end = read_run(config.run) if config.run else None
    if end is not None:
        if not end.surveys and not config.logs and not config.flight_recorder:
            return Report(diagnosis_without_failure(end), (), None, (), "", (), time.perf_counter() - start)
        surveys += end.surveys
        nodes, collected = end.nodes, end.evidence
    surveys += [survey_file(path, str(path)) for path in find_logs(config.log_paths)]
    flight = (
        find_culprit_ranks(read_flight_dumps(config.dump_paths))
        if config.flight_recorder
        else flight_recorder_verdict(collected)
    )
    notes = [f"{survey.file} {note}" for survey in surveys for note in survey.notes]
    if not flight and not any(survey.lines or survey.findings for survey in surveys):
        raise DataError(f"nothing to diagnose: {'; '.join(notes) or 'the logs are empty'}")
    diagnosis = decide(surveys)
    if end is not None and diagnosis.outcome is DiagnosisOutcome.no_cause:
        diagnosis = replace(diagnosis, advice=f"The run {end.status.sentence}. {_VANISHED_ADVICE}")
    if not diagnosis.culprit and nodes:
        diagnosis = replace(diagnosis, culprit=", ".join(nodes))
    if flight is not None:
        diagnosis = with_flight(diagnosis, flight, bool(surveys))
    diagnosis = with_stacks(diagnosis, collected)
    templates = failure_templates(surveys)
    similar: list[SimilarIncident] = []
    if config.incidents.file is not None:
        similar = find_similar(templates, read_incidents(Path(config.incidents.file)))
        diagnosis = with_past_incident(diagnosis, similar)
    advice = _ask(config, diagnosis, notes)
    if (
        config.incidents.store
        and config.incidents.file is not None
        and diagnosis.outcome is not DiagnosisOutcome.no_failure
    ):
        what = config.run or next(iter(config.log_paths + config.dump_paths))
        store_incident(Path(config.incidents.file), what, diagnosis, config.incidents.note or "", templates)
    seconds = time.perf_counter() - start
    return Report(diagnosis, tuple(surveys), flight, tuple(similar), advice, tuple(notes), seconds)


def diagnosis_without_failure(end: RunEnd) -> Diagnosis:
    """Returns the diagnosis of a run that trains, has finished, or was stopped after saving.

    Args:
        end: the run.
    """
    status = end.status
    then = {
        RunState.finished: "Nothing has to be done.",
        RunState.stopped: "It has saved: the same command continues it.",
        RunState.training: "It trains: look again if its step no longer changes.",
    }[status.state]
    shown = (Evidence(EVENTS_FILE, 0, f"{end.folder}: {status.sentence}"),)
    return no_failure(f"The run is {_NOW[status.state]}: {status.sentence}. {then}", shown)


_VANISHED_ADVICE = (
    "The same command restarts it from its last checkpoint. If this comes again, look for an out-of-memory kill "
    "(dmesg, sacct, the cgroup's memory.events) and for a lost node (sinfo -R)."
)
_NOW = {RunState.finished: "complete", RunState.stopped: "stopped", RunState.training: "alive"}


def _ask(config: DiagnoseConfig, diagnosis: Diagnosis, notes: list[str]) -> str:
    """Returns the language model's advice, if one is configured; adds a note if it fails to answer."""
    if config.llm.endpoint is None:
        return ""
    answer, problem = ask(config.llm, diagnosis)
    if problem:
        notes.append(f"the language model: {problem}")
    return answer


def with_flight(diagnosis: Diagnosis, flight: FlightVerdict, has_logs: bool) -> Diagnosis:
    """Adds the flight recorder's findings; if the logs show only a hang, they determine the culprit.

    Args:
        diagnosis: diagnosis from the logs.
        flight: result from the flight recorder dumps.
        has_logs: whether there are logs.
    """
    shown = tuple(Evidence("flight recorder", 0, sentence) for sentence in flight.sentences())
    if has_logs and diagnosis.cause is not None and diagnosis.cause not in _HANGS:
        return replace(diagnosis, evidence=(*diagnosis.evidence, *shown))
    cause, facts = Cause.nccl_timeout_hang, FACTS[Cause.nccl_timeout_hang]
    ranks = flight.culprits
    culprit = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else diagnosis.culprit
    advice = (
        "Find out what the named ranks did instead: their stack in the dump, py-spy dump on a live process, the GPU "
        "and the kernel log of their node."
        if ranks
        else facts.advice
    )
    named = (diagnosis.cause, *diagnosis.candidates)
    others = tuple(one for one in named if has_logs and one is not None and one != cause)
    return Diagnosis(
        cause,
        facts.domain,
        facts.restartable,
        culprit,
        (*shown, *diagnosis.evidence),
        advice,
        0.8 if ranks else 0.5,
        others,
    )


def with_stacks(diagnosis: Diagnosis, folders: Sequence[Path]) -> Diagnosis:
    """Adds the Python stacks of the culprits, which the launcher collected before it ended the ranks.

    Args:
        diagnosis: diagnosis from logs and dumps.
        folders: evidence folders, oldest first.
    """
    shown = []
    for folder in folders[-1:]:
        for rank in map(int, _RANK.findall(diagnosis.culprit) if "rank" in diagnosis.culprit else ()):
            if frames := main_thread_stack(folder, rank):
                text = f"rank {rank} was in {'; '.join(frames[:_MOST_FRAMES])}"
                shown.append(Evidence(f"evidence/{folder.name}/stacks_rank_{rank:05d}.txt", 0, text))
    return replace(diagnosis, evidence=(*diagnosis.evidence[:1], *shown, *diagnosis.evidence[1:]))


def with_past_incident(diagnosis: Diagnosis, similar: Sequence[SimilarIncident]) -> Diagnosis:
    """Replaces the cause by that of the most similar past incident, unless a signature determined it."""
    if diagnosis.basis == CauseBasis.signature or diagnosis.outcome is DiagnosisOutcome.no_failure or not similar:
        return diagnosis
    past, cause = similar[0].incident, past_cause(similar)
    note = f" A person noted: {past.note}" if past.note else ""
    if cause is None:
        return replace(diagnosis, advice=f"{diagnosis.advice}{note}")
    facts = FACTS[cause]
    return replace(
        diagnosis,
        cause=cause,
        domain=facts.domain,
        restartable=past.restartable,
        advice=f"{facts.advice}{note}",
        confidence=_INCIDENT_CONFIDENCE,
        basis=CauseBasis.incident,
        outcome=DiagnosisOutcome.failure,
    )


_SHOWN_CHARACTERS = 300
_MOST_WIDTH, _LEAST_WIDTH = 120, 80
_NONE_FOUND = {
    DiagnosisOutcome.no_failure: "none: no failure found",
    DiagnosisOutcome.no_cause: "none found: no line shows one",
}


def _width() -> int:
    """Width of the output: that of the terminal, within bounds; 80 columns without one."""
    return max(_LEAST_WIDTH, min(_MOST_WIDTH, shutil.get_terminal_size((_LEAST_WIDTH, 24)).columns))


def as_json(report: Report, most_templates: int) -> str:
    """Returns a report as one JSON object.

    Args:
        report: result of the diagnosis.
        most_templates: number of templates to list.
    """
    lines = sum(survey.lines for survey in report.surveys)
    templates = report.templates
    content: dict[str, Any] = {
        **report.diagnosis.as_json(),
        "seen_before": [one.as_json() for one in report.similar_incidents],
        "language_model": report.advice_of_model or None,
        "read": {
            "files": len(report.surveys),
            "lines": lines,
            "bytes": sum(survey.num_bytes for survey in report.surveys),
            "templates": len(templates),
            "seconds": round(report.seconds, 3),
        },
        "notes": list(report.notes),
    }
    if report.flight is not None:
        flight = report.flight
        content["flight_recorder"] = {
            "missing": list(flight.missing),
            "mismatched": list(flight.mismatched),
            "stalled": list(flight.stalled),
            "without_dump": list(flight.silent),
            "operation": flight.operation.title if flight.operation else None,
            "waiting": list(flight.waiting),
            "stacks": {str(rank): list(stack) for rank, stack in dict(flight.stacks).items()},
        }
    if most_templates:
        content["templates"] = [
            {"count": count, "template": name} for name, count in _rarest(templates, most_templates)
        ]
    return json.dumps(content, indent=2)


def show(report: Report, most_templates: int) -> None:
    """Prints the diagnosis, its evidence, and similar incidents, advice, notes and templates.

    Args:
        report: result of the diagnosis.
        most_templates: number of templates to list.
    """
    console, diagnosis = VisibleConsole(width=_width(), highlight=False), report.diagnosis
    summary = Table.grid(padding=(0, 2))
    for name, value in (
        ("cause", _cause(diagnosis)),
        ("restart", _restart(diagnosis)),
        ("culprit", diagnosis.culprit or ("none named" if diagnosis.cause else "")),
        ("advice", diagnosis.advice),
        ("also", ", ".join(diagnosis.candidates) if diagnosis.cause else ""),
    ):
        if value:
            summary.add_row(Text(name, style="bold"), Text(value))
    console.print(Panel(summary, title="diagnosis", box=box.ROUNDED))
    if diagnosis.evidence:
        console.print(_evidence_table(report))
    for one in report.similar_incidents:
        past = one.incident
        when = time.strftime("%Y-%m-%d", time.localtime(past.time_s))
        note = f"; a person noted: {past.note}" if past.note else ""
        console.print(Text(f"seen before: {past.run}, {when}: {past.cause}{note} (likeness {one.likeness:.2f})"))
    if report.advice_of_model:
        console.print(
            Panel(Text(report.advice_of_model), title="a language model's opinion; nothing acts on it", box=box.ROUNDED)
        )
    for note in report.notes:
        console.print(Text(f"note: {note}"))
    if most_templates:
        console.print(_template_table(report, most_templates))
    lines, size = sum(survey.lines for survey in report.surveys), sum(survey.num_bytes for survey in report.surveys)
    console.print(Text(f"{len(report.surveys)} logs, {lines:,} lines, {size / 1e6:,.1f} MB, {report.seconds:.1f} s"))


def _cause(diagnosis: Diagnosis) -> str:
    if diagnosis.cause is None:
        return _NONE_FOUND[diagnosis.outcome]
    title = FACTS[diagnosis.cause].title
    return f"{title} ({diagnosis.cause}; {diagnosis.domain}; confidence {diagnosis.confidence:.1f})"


def _restart(diagnosis: Diagnosis) -> str:
    """Whether a restart helps, in words."""
    if diagnosis.outcome is DiagnosisOutcome.no_failure:
        return "not needed"
    if diagnosis.outcome is DiagnosisOutcome.no_cause:
        return "from the last checkpoint, if the run is gone"
    if not diagnosis.restartable:
        return "does not help: something must be changed first"
    # A node can be excluded; a rank cannot, it is restarted.
    without = f", without {diagnosis.culprit}" if diagnosis.culprit and "rank" not in diagnosis.culprit else ""
    return f"is enough{without}"


def _evidence_table(report: Report) -> Table:
    table = Table("where", "what it says", box=box.SIMPLE_HEAD, width=_width())
    for evidence in report.diagnosis.evidence:
        place = f"{evidence.file}:{evidence.line}" if evidence.line else evidence.file
        table.add_row(Text(place, overflow="fold"), Text(evidence.text[:_SHOWN_CHARACTERS], overflow="fold"))
    return table


def _template_table(report: Report, most: int) -> Table:
    table = Table("lines", "template", box=box.SIMPLE_HEAD, width=_width())
    for name, count in _rarest(report.templates, most):
        table.add_row(f"{count:,}", Text(name[:_SHOWN_CHARACTERS], overflow="fold"))
    return table


def _rarest(templates: dict[str, int], most: int) -> list[tuple[str, int]]:
    """Returns the rarest templates first: a line that occurs once is more informative than one of every step."""
    return sorted(templates.items(), key=lambda item: item[1])[:most]
