"""Shows what a verb has checked: a coloured table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megads.resilience.doctor.finding import Finding, Status

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {Status.ok: "green", Status.note: "yellow", Status.problem: "bold red"}


def show(findings: Sequence[Finding]) -> None:
    """Prints a coloured table on a terminal, plain lines elsewhere or without rich."""
    if sys.stdout.isatty():
        try:
            from megads.runtime.terminal import VisibleConsole

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
