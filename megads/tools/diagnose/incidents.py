"""Past incidents of a site: their storage, and the search for incidents that are similar to a new failure."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megads.api import DataError, read_json_lines
from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.decision import Diagnosis
from megads.tools.diagnose.evidence import Survey
from megads.tools.diagnose.message_model import message_model, stems, template

_LEAST_LIKENESS = 0.5
"""Lowest similarity at which an incident is shown."""
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Incident:
    """One past failure.

    Attributes:
        time_s: time of the diagnosis, in seconds since 1970.
        run: run directory, or first log or dump.
        cause: diagnosed cause; empty if none was found.
        restartable: whether a restart was considered enough.
        culprit: rank, node or worker.
        note: finding of a person.
        templates: templates of the log lines about the failure.
    """

    time_s: float
    run: str
    cause: str
    restartable: bool
    culprit: str
    note: str
    templates: tuple[str, ...]


@dataclass(frozen=True)
class SimilarIncident:
    """A past incident that is similar to a failure.

    Attributes:
        incident: the incident.
        likeness: cosine similarity of the word stems of both, weighted by inverse document frequency; 1 if equal.
    """

    incident: Incident
    likeness: float

    def as_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, without templates."""
        known = asdict(self.incident)
        del known["templates"]
        return {**known, "likeness": round(self.likeness, 3)}


def failure_templates(surveys: Iterable[Survey]) -> tuple[str, ...]:
    """Returns the templates of the lines about the failure; if no log has any, those of the last lines of each log."""
    surveys = list(surveys)
    lines = [finding.text for survey in surveys for finding in survey.findings]
    if not lines:
        ends = [sorted(survey.kinds.values(), key=lambda kind: kind.last)[-10:] for survey in surveys]
        lines = [kind.text for kinds in ends for kind in kinds]
    return tuple(dict.fromkeys(filter(None, map(template, lines))))


def read_incidents(path: Path) -> list[Incident]:
    """Returns the incidents in a file; ignores invalid lines, and returns none if the file does not exist."""
    found = []
    for record in read_json_lines(path):
        try:
            found.append(Incident(**{**record, "templates": tuple(map(str, record["templates"]))}))
        except (TypeError, KeyError):
            continue
    return found


def find_similar(templates: Sequence[str], incidents: Sequence[Incident]) -> list[SimilarIncident]:
    """Returns the incidents that are similar to a failure, most similar first.

    Args:
        templates: templates of the failure.
        incidents: past incidents.
    """
    model = message_model()

    def weights(lines: Iterable[str]) -> dict[str, float]:
        return {stem: model.rarity(stem) for line in lines for stem in stems(line)}

    own, found = weights(templates), []
    for incident in incidents:
        other = weights(incident.templates)
        norm = math.hypot(*own.values()) * math.hypot(*other.values())
        likeness = sum(own[name] * other[name] for name in own.keys() & other.keys()) / norm if norm else 0.0
        if likeness >= _LEAST_LIKENESS:
            found.append(SimilarIncident(incident, likeness))
    return sorted(found, key=lambda one: (-one.likeness, -one.incident.time_s))[:_MOST_SHOWN]


def past_cause(similar: Sequence[SimilarIncident]) -> Cause | None:
    """Returns the cause of the most similar incident whose cause is known to this version."""
    return next((Cause(one.incident.cause) for one in similar if one.incident.cause in set(Cause)), None)


def store_incident(path: Path, run: str, diagnosis: Diagnosis, note: str, templates: Sequence[str]) -> None:
    """Appends an incident to a file; safe with several concurrent writers.

    Raises:
        DataError: The file cannot be written.
    """
    incident = Incident(
        time.time(),
        run,
        str(diagnosis.cause or ""),
        bool(diagnosis.restartable),
        diagnosis.culprit,
        note,
        tuple(templates),
    )
    line = json.dumps(asdict(incident)) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A single write in append mode, so that lines of several writers do not interleave.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o664)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"incidents.file = {path} cannot be written ({error.strerror}): choose another file") from error
