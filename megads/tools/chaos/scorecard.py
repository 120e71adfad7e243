"""Scorecard of a campaign as a table, Markdown and JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.runtime.visible_console import VisibleConsole
from megads.tools.chaos.campaign import CampaignResult, FaultResult
from megads.tools.chaos.faults import FAULTS, Fault

SCORECARD_FILE = "scorecard.md"
JSON_FILE = "scorecard.json"
_COLUMNS = ("fault", "what must follow", "injected", "survived", "noticed after", "recovered in", "steps again")
_PIPE_WIDTH = 160


def list_faults(faults: Iterable[Fault]) -> None:
    """Prints the kinds of faults with their required consequences."""
    table = Table(box=SIMPLE_HEAD)
    for name in ("fault", "what happens", "what must follow"):
        table.add_column(name)
    for fault in faults:
        table.add_row(fault.name, fault.text, fault.consequence)
    _print(table)


def show(result: CampaignResult) -> None:
    """Prints the scorecard with one row per kind of fault, and a summary."""
    table = Table(box=SIMPLE_HEAD)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in _COLUMNS[:2] else "right")
    for row in _rows(result):
        table.add_row(*row)
    _print(table)
    print(_summary(result))


def as_json(result: CampaignResult) -> str:
    """Returns the campaign as one JSON object."""
    content = asdict(result) | {"folder": str(result.folder), "survived": _survived(result)}
    return json.dumps(content, indent=1)


def write(result: CampaignResult) -> Path:
    """Writes the scorecard as Markdown and JSON to the campaign's folder; returns the path of the Markdown file."""
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|---|" + "---:|" * (len(_COLUMNS) - 2)]
    lines += [f"| {' | '.join(row)} |" for row in _rows(result)]
    lines += ["", _summary(result), *(f"- {_told(found)}" for found in result.failed), ""]
    path = result.folder / SCORECARD_FILE
    path.write_text("\n".join(lines))
    (result.folder / JSON_FILE).write_text(as_json(result) + "\n")
    return path


def _print(table: Table) -> None:
    # Output to a file or a pipe gets a fixed width.
    VisibleConsole(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def _rows(result: CampaignResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, fault in FAULTS.items():
        found = [one for one in result.results if one.kind == name]
        if not found:
            continue
        rows.append(
            (
                name,
                fault.consequence.value,
                str(len(found)),
                str(sum(not one.problem for one in found)),
                _seconds([one.detected_s for one in found]),
                _seconds([one.recovered_s for one in found]),
                str(max(one.lost_steps for one in found)),
            )
        )
    return rows


def _seconds(values: Sequence[float | None]) -> str:
    """Formats the median and the maximum."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    return f"{statistics.median(known):.1f} s, at most {max(known):.1f}"


def _survived(result: CampaignResult) -> int:
    return len(result.results) - len(result.failed)


def _summary(result: CampaignResult) -> str:
    minutes = result.seconds / 60
    return (
        f"{_survived(result)} of {len(result.results)} faults survived with nothing lost, in {result.runs} runs and "
        f"{minutes:.1f} minutes; a step takes {1000 * result.step_s:.0f} ms. Ledgers, validations and last checkpoints "
        "are compared bit for bit with an undisturbed run's."
    )


def _told(found: FaultResult) -> str:
    return f"run {found.run}, {found.kind} ({found.where}) after step {found.step}: {found.problem}"
