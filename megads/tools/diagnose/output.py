"""Output of `megads diagnose`: a panel with tables, or one JSON object."""

from __future__ import annotations

import json
import time
from typing import Any

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megads.runtime.visible_console import VisibleConsole
from megads.tools.diagnose.command import FinishedRun, Report

_WIDTH = 120
_SHOWN_CHARACTERS = 300


def finished_json(found: FinishedRun) -> str:
    """Returns a JSON object for a run without a failure."""
    return json.dumps({"cause": None, "run": str(found.folder), "note": "the run's last start ended well"}, indent=2)


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
    console, diagnosis = VisibleConsole(width=_WIDTH, highlight=False), report.diagnosis
    summary = Table.grid(padding=(0, 2))
    # A node can be excluded; a rank cannot, it is restarted.
    without = f", without {diagnosis.culprit}" if diagnosis.culprit and "rank" not in diagnosis.culprit else ""
    restart = f"is enough{without}" if diagnosis.restartable else "does not help: something must be changed first"
    for name, value in (
        ("cause", f"{diagnosis.cause} ({diagnosis.domain}; confidence {diagnosis.confidence:.1f})"),
        ("restart", restart),
        ("culprit", diagnosis.culprit or "none named"),
        ("advice", diagnosis.advice),
        ("also", ", ".join(diagnosis.candidates)),
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


def _evidence_table(report: Report) -> Table:
    table = Table("where", "what it says", box=box.SIMPLE_HEAD, width=_WIDTH)
    for evidence in report.diagnosis.evidence:
        place = f"{evidence.file}:{evidence.line}" if evidence.line else evidence.file
        table.add_row(Text(place, overflow="fold"), Text(evidence.text[:_SHOWN_CHARACTERS], overflow="fold"))
    return table


def _template_table(report: Report, most: int) -> Table:
    table = Table("lines", "template", box=box.SIMPLE_HEAD, width=_WIDTH)
    for name, count in _rarest(report.templates, most):
        table.add_row(f"{count:,}", Text(name[:_SHOWN_CHARACTERS], overflow="fold"))
    return table


def _rarest(templates: dict[str, int], most: int) -> list[tuple[str, int]]:
    """Returns the rarest templates first: a line that occurs once is more informative than one of every step."""
    return sorted(templates.items(), key=lambda item: item[1])[:most]
