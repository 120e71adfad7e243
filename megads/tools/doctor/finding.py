"""Findings of checks, and how they are printed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Status(StrEnum):
    """Result of a check: ok, a note that costs something, or a problem that prevents training or makes it wrong."""

    ok = "ok"
    note = "note"
    problem = "problem"


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        check: name of the check, one or two words.
        status: severity.
        found: what the check found.
        cost: effect on training; empty for ok.
        remedy: what the user can do; empty for ok.
    """

    check: str
    status: Status
    found: str
    cost: str = ""
    remedy: str = ""

    @classmethod
    def from_json(cls, content: Mapping[str, str]) -> Finding:
        """Reads a finding that `dataclasses.asdict` and JSON have written."""
        return cls(**{**content, "status": Status(content["status"])})  # type: ignore[arg-type]


def ok(check: str, found: str) -> Finding:
    """Returns a finding that needs no action."""
    return Finding(check, Status.ok, found)


def note(check: str, found: str, cost: str, remedy: str) -> Finding:
    """Returns a finding that costs something but does not prevent training."""
    return Finding(check, Status.note, found, cost, remedy)


def problem(check: str, found: str, cost: str, remedy: str) -> Finding:
    """Returns a finding that prevents training or makes it wrong."""
    return Finding(check, Status.problem, found, cost, remedy)


_STYLES = {Status.ok: "green", Status.note: "yellow", Status.problem: "bold red"}


def show(findings: Sequence[Finding]) -> None:
    """Prints a coloured table on a terminal, and plain lines elsewhere or if rich is not installed."""
    if sys.stdout.isatty():
        try:
            from megads.api import VisibleConsole

            VisibleConsole().print(_table(findings))
            return
        except ImportError:
            pass
    print(plain(findings))


def plain(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines of text."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<7}  {finding.check:<{width}}  {finding.found}")
        for label, text in (("costs", finding.cost), ("remedy", finding.remedy)):
            if text:
                lines.append(f"{'':<7}  {'':<{width}}    {label}: {text}")
    return "\n".join(lines)


def _table(findings: Sequence[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        said = Text(finding.found)
        for label, text in (("costs", finding.cost), ("remedy", finding.remedy)):
            if text:
                said.append(f"\n{label}: ", style="bold")
                said.append(text)
        table.add_row(Text(finding.status, style=_STYLES[finding.status]), Text(finding.check), said)
    return table
