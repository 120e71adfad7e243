"""One thing that was checked."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a check ended: fine, worth knowing, or training cannot work."""

    ok = "ok"
    note = "note"
    problem = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was checked.

    Attributes:
        check: what was looked at, in a word or two.
        status: how it ended.
        found: what is there.
        cost: what that costs; nothing for ok.
        remedy: what to do about it.
    """

    check: str
    status: Status
    found: str
    cost: str = ""
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Returns a finding that needs nothing."""
    return Finding(check, Status.ok, found)


def note(check: str, found: str, cost: str, remedy: str) -> Finding:
    """Returns a finding that costs something but lets training go on."""
    return Finding(check, Status.note, found, cost, remedy)


def problem(check: str, found: str, cost: str, remedy: str) -> Finding:
    """Returns a finding that prevents training, or makes it wrong."""
    return Finding(check, Status.problem, found, cost, remedy)


def size(num_bytes: float) -> str:
    """Returns a number of bytes as 512 MiB or 23.5 GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"
