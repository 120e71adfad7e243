"""Past incidents of a site: what was diagnosed, what a person noted, and which of them a new failure is like."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megads.diagnosis.causes import Cause
from megads.diagnosis.decision import Diagnosis
from megads.diagnosis.evidence import Survey
from megads.diagnosis.message_model import message_model, stems
from megads.diagnosis.templates import template
from megads.errors import DataError
from megads.runtime.metrics import read_json_lines

_LIKE = 0.5
"""Incidents that are less alike are not shown."""
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Incident:
    """One failure of the past.

    Attributes:
        time_s: when it was diagnosed, in seconds since 1970.
        run: run directory or first log.
        cause: what was found.
        restartable: whether a restart was thought to be enough.
        culprit: rank, node or worker.
        note: what a person found out.
        templates: of the lines that told of the failure.
    """

    time_s: float
    run: str
    cause: str
    restartable: bool
    culprit: str
    note: str
    templates: tuple[str, ...]


@dataclass(frozen=True)
class Recollection:
    """A past incident that a failure is like.

    Attributes:
        incident: the incident.
        likeness: cosine of the word stems of the two, weighted by how rare each is; 1 is the same.
    """

    incident: Incident
    likeness: float

    def as_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        known = asdict(self.incident)
        del known["templates"]
        return {**known, "likeness": round(self.likeness, 3)}


def telling_templates(surveys: Iterable[Survey]) -> tuple[str, ...]:
    """Returns the templates of the lines that tell of the failure; of a log without any, those of its last lines."""
    surveys = list(surveys)
    lines = [finding.text for survey in surveys for finding in survey.findings]
    if not lines:
        ends = [sorted(survey.kinds.values(), key=lambda kind: kind.last)[-10:] for survey in surveys]
        lines = [kind.text for kinds in ends for kind in kinds]
    return tuple(dict.fromkeys(filter(None, map(template, lines))))


def read_incidents(path: Path) -> list[Incident]:
    """Returns the incidents of a file; lines that are none are passed over, and no file is no incident."""
    found = []
    for record in read_json_lines(path):
        try:
            found.append(Incident(**{**record, "templates": tuple(map(str, record["templates"]))}))
        except (TypeError, KeyError):
            continue
    return found


def recall(templates: Sequence[str], incidents: Sequence[Incident]) -> list[Recollection]:
    """Returns the incidents that a failure is like, the likest first.

    Args:
        templates: of the failure.
        incidents: of the site.
    """
    model = message_model()

    def weights(lines: Iterable[str]) -> dict[str, float]:
        return {stem: model.rarity(stem) for line in lines for stem in stems(line)}

    own, found = weights(templates), []
    for incident in incidents:
        other = weights(incident.templates)
        norm = math.hypot(*own.values()) * math.hypot(*other.values())
        likeness = sum(own[name] * other[name] for name in own.keys() & other.keys()) / norm if norm else 0.0
        if likeness >= _LIKE:
            found.append(Recollection(incident, likeness))
    return sorted(found, key=lambda one: (-one.likeness, -one.incident.time_s))[:_MOST_SHOWN]


def remembered_cause(recollections: Sequence[Recollection]) -> Cause | None:
    """Returns the cause of the likest incident, where it is one that is known."""
    return next((Cause(one.incident.cause) for one in recollections if one.incident.cause in set(Cause)), None)


def store_incident(path: Path, run: str, diagnosis: Diagnosis, note: str, templates: Sequence[str]) -> None:
    """Adds an incident to a file that several may write to at once.

    Raises:
        DataError: it cannot be written.
    """
    incident = Incident(
        time.time(), run, str(diagnosis.cause), diagnosis.restartable, diagnosis.culprit, note, tuple(templates)
    )
    line = json.dumps(asdict(incident)) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write in append mode: lines of several writers do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o664)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"incidents.file = {path} cannot be written ({error.strerror}): choose another file") from error
