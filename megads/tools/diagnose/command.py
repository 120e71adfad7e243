"""`megads diagnose`: reads what there is, decides what failed first, and looks for the like of it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megads.diagnosis.causes import FACTS, Cause
from megads.diagnosis.decision import Basis, Diagnosis, Evidence, decide
from megads.diagnosis.evidence import Survey
from megads.diagnosis.flight_recorder import FlightVerdict, judge_traces
from megads.errors import DataError
from megads.launch.evidence import flight_verdict, main_thread_stack
from megads.tools.diagnose.config import DiagnoseConfig
from megads.tools.diagnose.incidents import (
    Recollection,
    read_incidents,
    recall,
    remembered_cause,
    store_incident,
    telling_templates,
)
from megads.tools.diagnose.inputs import find_logs, read_dumps, read_run, survey_file
from megads.tools.diagnose.language_model import ask

_RECALLED_CONFIDENCE = 0.4
_RANK = re.compile(r"\d+")
_MOST_FRAMES = 4
_HANGS = (Cause.nccl_timeout_hang, Cause.process_killed_unknown, Cause.nccl_remote_or_network)
"""Causes of which the flight recorder knows more than the logs."""


@dataclass(frozen=True)
class FinishedRun:
    """A run whose last start ended well.

    Attributes:
        folder: the run directory.
    """

    folder: Path


@dataclass(frozen=True)
class Report:
    """All that is known of a failure.

    Attributes:
        diagnosis: what failed first.
        surveys: of the logs.
        flight: what the flight recorder shows; None where no dumps were given.
        recollections: incidents that this one is like.
        advice_of_model: what the language model says; empty where none was asked.
        notes: what could not be read, and the like.
        seconds: how long it took.
    """

    diagnosis: Diagnosis
    surveys: tuple[Survey, ...]
    flight: FlightVerdict | None
    recollections: tuple[Recollection, ...]
    advice_of_model: str
    notes: tuple[str, ...]
    seconds: float

    @property
    def templates(self) -> Counter[str]:
        """The templates of all logs, each with the number of its lines."""
        found: Counter[str] = Counter()
        for survey in self.surveys:
            found.update(survey.templates())
        return found


def diagnose(config: DiagnoseConfig) -> Report | FinishedRun:
    """Reads, decides and remembers as the config says.

    Raises:
        ConfigError: there is no such run, or the language model's key cannot be read.
        DataError: a log or a dump is missing or cannot be read, or there is nothing in them.
    """
    start = time.perf_counter()
    surveys: list[Survey] = []
    nodes: tuple[str, ...] = ()
    collected: tuple[Path, ...] = ()
    if config.run:
        end = read_run(config.run)
        if end.finished and not config.logs and not config.flight_recorder:
            return FinishedRun(end.folder)
        surveys += end.surveys
        nodes, collected = end.nodes, end.evidence
    surveys += [survey_file(path, str(path)) for path in find_logs(config.log_paths)]
    flight = judge_traces(read_dumps(config.dump_paths)) if config.flight_recorder else flight_verdict(collected)
    notes = [f"{survey.file} {note}" for survey in surveys for note in survey.notes]
    if not flight and not any(survey.lines or survey.findings for survey in surveys):
        raise DataError(f"nothing to diagnose: {'; '.join(notes) or 'the logs are empty'}")
    diagnosis = decide(surveys)
    if not diagnosis.culprit and nodes:
        diagnosis = replace(diagnosis, culprit=", ".join(nodes))
    if flight is not None:
        diagnosis = with_flight(diagnosis, flight, bool(surveys))
    diagnosis = with_stacks(diagnosis, collected)
    telling = telling_templates(surveys)
    recollections: list[Recollection] = []
    if config.incidents.file is not None:
        recollections = recall(telling, read_incidents(Path(config.incidents.file)))
        diagnosis = with_past(diagnosis, recollections)
    advice = _ask(config, diagnosis, notes)
    if config.incidents.store and config.incidents.file is not None:
        what = config.run or next(iter(config.log_paths + config.dump_paths))
        store_incident(Path(config.incidents.file), what, diagnosis, config.incidents.note or "", telling)
    seconds = time.perf_counter() - start
    return Report(diagnosis, tuple(surveys), flight, tuple(recollections), advice, tuple(notes), seconds)


def _ask(config: DiagnoseConfig, diagnosis: Diagnosis, notes: list[str]) -> str:
    """Returns the language model's advice; notes why there is none where one was asked."""
    if config.llm.endpoint is None:
        return ""
    answer, problem = ask(config.llm, diagnosis)
    if problem:
        notes.append(f"the language model: {problem}")
    return answer


def with_flight(diagnosis: Diagnosis, flight: FlightVerdict, has_logs: bool) -> Diagnosis:
    """Adds what the flight recorder shows; where the logs only say that something hung, it names the culprit.

    Args:
        diagnosis: by the logs.
        flight: by the dumps.
        has_logs: there were logs.
    """
    shown = tuple(Evidence("flight recorder", 0, sentence) for sentence in flight.sentences())
    if has_logs and diagnosis.cause not in _HANGS:
        return replace(diagnosis, evidence=(*diagnosis.evidence, *shown))
    cause, facts = Cause.nccl_timeout_hang, FACTS[Cause.nccl_timeout_hang]
    ranks = flight.culprits
    culprit = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else diagnosis.culprit
    advice = (
        "Look at what the named ranks did instead: their stack in the dump, py-spy dump on a live process, the GPU "
        "and the kernel's log of their node."
        if ranks
        else facts.advice
    )
    others = tuple(one for one in (diagnosis.cause, *diagnosis.candidates) if has_logs and one != cause)
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
    """Adds where the ranks to blame were when the launcher collected evidence, before it ended them.

    Args:
        diagnosis: by logs and dumps.
        folders: of the evidence, the last one last.
    """
    shown = []
    for folder in folders[-1:]:
        for rank in map(int, _RANK.findall(diagnosis.culprit) if "rank" in diagnosis.culprit else ()):
            if frames := main_thread_stack(folder, rank):
                text = f"rank {rank} was in {'; '.join(frames[:_MOST_FRAMES])}"
                shown.append(Evidence(f"evidence/{folder.name}/stacks_rank_{rank:05d}.txt", 0, text))
    return replace(diagnosis, evidence=(*diagnosis.evidence[:1], *shown, *diagnosis.evidence[1:]))


def with_past(diagnosis: Diagnosis, recollections: Sequence[Recollection]) -> Diagnosis:
    """Takes the cause of the likest incident of the site where no signature decided."""
    cause = remembered_cause(recollections)
    if diagnosis.basis == Basis.signature or cause is None:
        return diagnosis
    facts, past = FACTS[cause], recollections[0].incident
    note = f" A person noted: {past.note}" if past.note else ""
    return replace(
        diagnosis,
        cause=cause,
        domain=facts.domain,
        restartable=past.restartable,
        advice=f"{facts.advice}{note}",
        confidence=_RECALLED_CONFIDENCE,
        basis=Basis.incident,
    )
