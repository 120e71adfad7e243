"""Failure signatures: regular expressions for messages, each with a cause and a strength.

The tables are machine_, software_ and traceback_signatures.yaml beside this file, so that a site can read and extend
them.
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

from megads.tools.diagnose.causes import Cause, Domain

_FILES = ("machine_signatures.yaml", "software_signatures.yaml", "traceback_signatures.yaml")
_SPECIAL = set(".^$*+?{}[]\\|()")
_REPEATED = set("?*{")
_SHORTEST_PART = 3


class Strength(IntEnum):
    """How certainly a message is the root cause.

    The strongest message is used wherever it is in the logs; among equally strong ones the first in time.
    """

    noise = 0
    """A warning, or an attempt that is retried."""
    teardown = 1
    """Written while the job ends: signals sent to peers, the launcher's table of failures."""
    cascade = 2
    """Reports that a peer is lost or late; the reason is elsewhere, if it was recorded."""
    failure = 3
    """Reports a failure in this process, which may be the consequence of a more specific one."""
    root = 4
    """Names the root cause itself."""
    fact = 5
    """A hardware fault reported by the device or the kernel; messages of programs are consequences of it."""


@dataclass(frozen=True)
class Signature:
    """Message of one kind of failure.

    Attributes:
        cause: cause that the message indicates.
        strength: how certainly it is the root cause.
        patterns: regular expressions, any of which is searched for in a line, ignoring case. The groups `rank` and
            `node` name the culprit.
        example: example line.
        restartable: overrides the default of the cause; None keeps it.
        domain: overrides the default of the cause; None keeps it.
        advice: overrides the default of the cause; empty keeps it.
        within_error: reduce the strength in lines that are not marked as errors.
        fallback: used only if no other signature matches the line; the wording of the line may overrule it.
        overruled_at: probability from which the wording of a line overrules a fallback.
        frames: regular expression for a traceback frame ("File ..., in function"). The signature matches only an
            exception with such a frame, and then takes precedence over signatures of the line alone.
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
    """Match of a signature in a line.

    Attributes:
        signature: matching signature.
        found: regular expression match.
    """

    signature: Signature
    found: re.Match[str]


class SignatureTable:
    """Ordered signatures: of two equally strong ones that match a line, the first is used.

    Args:
        signatures: signatures in order of precedence.
    """

    def __init__(self, signatures: tuple[Signature, ...]):
        self.signatures = signatures
        self._rows = [(pattern, signature) for signature in signatures for pattern in signature.patterns]
        # A trigram index rejects most lines: a pattern is tried only on lines that contain a trigram which all of its
        # matches contain, namely the one that the fewest patterns share.
        required = [required_literals(pattern) for pattern, _ in self._rows]
        shared = Counter(trigram for parts in required for part in parts for trigram in _trigrams(part.lower()))
        self._by_trigram: dict[str, list[int]] = {}
        self._always: list[int] = []
        for row, parts in enumerate(required):
            for part in parts:
                rarest = min(_trigrams(part.lower()), key=lambda trigram: (shared[trigram], trigram))
                self._by_trigram.setdefault(rarest, []).append(row)
            if not parts:
                self._always.append(row)

    def match(self, line: str, frames: str = "") -> SignatureMatch | None:
        """Returns the strongest signature that matches a line, or None.

        Args:
            line: the line.
            frames: frames of the traceback before the line, one per line.
        """
        rows = set(self._always)
        for trigram in self._by_trigram.keys() & _trigrams(line.lower()):
            rows.update(self._by_trigram[trigram])
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
        # A frame is more specific than a general message, and less specific than a message that names the cause.
        closer = new.strength >= old.strength and new.cause != old.cause
        return closer if new.frames else new.strength > old.strength
    return new.strength > old.strength


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


@functools.cache
def signature_table() -> SignatureTable:
    """Returns the bundled signatures."""
    rows: list[dict[str, Any]] = []
    for name in _FILES:
        # Ten times faster than the pure Python loader, where PyYAML was built with libyaml.
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


def required_literals(pattern: str) -> list[str]:
    """Returns literals of which every match of a pattern contains at least one; empty if there are none.

    They are the longest literal outside groups, or one literal for each alternative of a mandatory group.
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
    # A single literal rejects more lines than several, and a longer one more than a shorter one.
    return max(sure, key=lambda parts: (-len(parts), min(map(len, parts))), default=[])


def _parts_of_group(group: str) -> list[str]:
    """Returns the literals of all alternatives of a group; empty if one of the alternatives has none."""
    inside = re.match(r"\((?:\?:|\?P<\w+>)?([^?].*)\)$", group)
    if inside is None:
        return []
    found = [required_literals(alternative) for alternative in _alternatives(inside[1])]
    return [part for parts in found for part in parts] if all(found) else []


def _alternatives(pattern: str) -> list[str]:
    """Splits a pattern at the `|` outside groups."""
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
    """Returns the position after the group or character class that opens at `start`."""
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
    raise ValueError(f"the pattern {pattern!r} has a group that is not closed")
