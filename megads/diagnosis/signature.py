"""A signature: the message of one kind of failure, what it says of the cause, and how surely.

The tables are machine_, software_ and traceback_signatures.yaml beside this file: data, so that a site can read and
extend them.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import yaml

from megads.diagnosis.causes import Cause, Domain

_FILES = ("machine_signatures.yaml", "software_signatures.yaml", "traceback_signatures.yaml")
_SPECIAL = set(".^$*+?{}[]\\|()")
_REPEATED = set("?*{")
_SHORTEST_PART = 3


class Strength(IntEnum):
    """How surely a message is the root cause.

    A message of higher strength wins wherever it stands; of equal ones the first in time does.
    """

    noise = 0
    """Said in passing: a warning, or an attempt that is made again."""
    teardown = 1
    """Said while everything ends: signals sent to peers, the launcher's table of failures."""
    cascade = 2
    """Says that a peer is gone or late; the reason is elsewhere, if it was recorded."""
    failure = 3
    """Says that something failed here; it may follow from something more definite."""
    root = 4
    """Names the cause itself."""
    fact = 5
    """The hardware, or the kernel for it, reports a fault; what programs said before or after follows from it."""


@dataclass(frozen=True)
class Signature:
    """The message of one kind of failure.

    Attributes:
        cause: what it says.
        strength: how surely.
        patterns: regular expressions, any of which is searched for in a line without regard to case. The groups `rank`
            and `node` name the culprit.
        example: a line of that kind.
        restartable: where it differs from the cause's own.
        domain: where it differs from the cause's own.
        advice: where there is better advice than the cause's own.
        within_error: counts in full only in a line that says that it is an error.
        fallback: counts only where no other signature finds anything in the line, and gives way to the line's wording.
        overruled_at: probability from which the wording of a line counts more than this one, where it is a fallback.
        frames: counts only for an exception whose traceback has a frame ("File ..., in function") that this finds; and
            then before those that look at the line alone.
    """

    cause: Cause
    strength: Strength
    patterns: tuple[str, ...]
    example: str
    restartable: bool | None = None
    domain: Domain | None = None
    advice: str = ""
    within_error: bool = False
    fallback: bool = False
    overruled_at: float = 0.45
    frames: str = ""


@dataclass(frozen=True)
class SignatureMatch:
    """Where a signature was found in a line.

    Attributes:
        signature: which.
        found: the match.
    """

    signature: Signature
    found: re.Match[str]


class SignatureTable:
    """Signatures in order: of two of equal strength in one line the first counts.

    Args:
        signatures: the table.
    """

    def __init__(self, signatures: tuple[Signature, ...]):
        self.signatures = signatures
        self._rows = [(pattern, signature) for signature in signatures for pattern in signature.patterns]
        # Most lines are dismissed by their triples of characters: a pattern is tried where one is found that its
        # matches must hold, the one that the fewest patterns share.
        required = [literal_parts(pattern) for pattern, _ in self._rows]
        shared = Counter(triple for parts in required for part in parts for triple in _triples(part.lower()))
        self._by_triple: dict[str, list[int]] = {}
        self._always: list[int] = []
        for row, parts in enumerate(required):
            for part in parts:
                rarest = min(_triples(part.lower()), key=lambda triple: (shared[triple], triple))
                self._by_triple.setdefault(rarest, []).append(row)
            if not parts:
                self._always.append(row)

    def match(self, line: str, frames: str = "") -> SignatureMatch | None:
        """Returns the strongest signature of a line, or None.

        Args:
            line: the line.
            frames: of the traceback that it ends, a line each.
        """
        rows = set(self._always)
        for triple in self._by_triple.keys() & _triples(line.lower()):
            rows.update(self._by_triple[triple])
        best: SignatureMatch | None = None
        for row in sorted(rows):
            pattern, signature = self._rows[row]
            if signature.frames and not _compiled(signature.frames).search(frames):
                continue
            if best is None or _precedes(signature, best.signature):
                found = _compiled(pattern).search(line)
                best = best if found is None else SignatureMatch(signature, found)
        return best


def _precedes(new: Signature, old: Signature) -> bool:
    if new.fallback and old.fallback:
        return bool(new.frames) and not old.frames
    if new.fallback or old.fallback:
        return old.fallback
    if bool(new.frames) != bool(old.frames):
        # What failed inside of what says more than a general message, and less than one that names the cause.
        closer = new.strength >= old.strength and new.cause != old.cause
        return closer if new.frames else new.strength > old.strength
    return new.strength > old.strength


def _triples(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


@functools.cache
def signature_table() -> SignatureTable:
    """Returns the table that comes with megads."""
    rows: list[dict[str, Any]] = []
    for name in _FILES:
        # Ten times as fast as the loader in Python, where it was built.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        rows += yaml.load(Path(__file__).with_name(name).read_bytes(), loader)
    return SignatureTable(tuple(_signature(row) for row in rows))


def _signature(row: dict[str, Any]) -> Signature:
    domain = row.get("domain")
    return Signature(
        Cause(row["cause"]),
        Strength[row["strength"]],
        tuple(row["patterns"]),
        row["example"],
        row.get("restartable"),
        Domain(domain) if domain else None,
        row.get("advice", ""),
        row.get("within_error", False),
        row.get("fallback", False),
        row.get("overruled_at", Signature.overruled_at),
        row.get("frames", ""),
    )


def literal_parts(pattern: str) -> list[str]:
    """Returns texts of which every match of a pattern holds at least one; empty where that cannot be said.

    That is the longest literal text outside of groups, or one text for each alternative of a group in every match.
    """
    options: list[list[str]] = []
    run, position = "", 0
    while position < len(pattern):
        character = pattern[position]
        step, literal = 1, character
        group: list[str] = []
        if character == "\\":
            step, following = 2, pattern[position + 1]
            literal = "" if following.isalnum() else following
        elif character == "|":
            return []
        elif character in "([":
            step, literal = _end_of_group(pattern, position) - position, ""
            group = _parts_of_group(pattern[position : position + step])
        elif character == "{":
            step, literal = pattern.index("}", position) + 1 - position, ""
        elif character in _SPECIAL:
            literal = ""
        position += step
        optional = position < len(pattern) and pattern[position] in _REPEATED
        if literal and not optional:
            run += literal
        else:
            options.append([run])
            options.append([] if optional else group)
            run = ""
    options.append([run])
    sure = [parts for parts in options if parts and min(map(len, parts)) >= _SHORTEST_PART]
    # A single text dismisses more lines than several, and a longer one more than a shorter.
    return max(sure, key=lambda parts: (-len(parts), min(map(len, parts))), default=[])


def _parts_of_group(group: str) -> list[str]:
    """Returns one text for each alternative of a group, empty where one of them has none that is sure."""
    inside = re.match(r"\((?:\?:|\?P<\w+>)?([^?].*)\)$", group)
    if inside is None:
        return []
    found = [literal_parts(alternative) for alternative in _alternatives(inside[1])]
    return [part for parts in found for part in parts] if all(found) else []


def _alternatives(pattern: str) -> list[str]:
    """Splits a pattern at its outermost level."""
    parts, start, position = [], 0, 0
    while position < len(pattern):
        if pattern[position] in "([":
            position = _end_of_group(pattern, position)
            continue
        if pattern[position] == "|":
            parts.append(pattern[start:position])
            start = position + 1
        position += 2 if pattern[position] == "\\" else 1
    return [*parts, pattern[start:]]


def _end_of_group(pattern: str, start: int) -> int:
    """Returns the position after the group or class that opens at `start`."""
    depth, position, in_class = 0, start, False
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 2
            continue
        if in_class:
            in_class = character != "]"
            depth -= character == "]"
        elif character == "[":
            in_class = True
            depth += 1
        else:
            depth += (character == "(") - (character == ")")
        position += 1
        if depth == 0:
            return position
    raise ValueError(f"the pattern {pattern!r} opens a group that it does not close")
