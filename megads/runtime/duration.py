"""Durations as people and SLURM write them."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_WAIT_S = 86400.0 * 7
"""Most that a wait can be set to: some of the system's calls count milliseconds in 31 bits."""
_NO_LIMIT = ("UNLIMITED", "NOT_SET", "INVALID", "")


def parse_duration(text: str) -> float:
    """Returns a duration in seconds: 90s, 30m, 2h30m, 1.5d, or SLURM's 12:00:00 and 1-12:00:00; a number is seconds.

    Raises:
        ValueError: it is none, or not positive.
    """
    seconds = _seconds(text.strip())
    if seconds is None or seconds <= 0:
        raise ValueError(f"{text!r} is no duration: want 90s, 30m, 2h30m, 1.5d, or 1-12:00:00")
    return seconds


def parse_time_left(text: str) -> float | None:
    """Returns what squeue prints as %L in seconds; None for a job without a limit. An overdue job has 0 or less."""
    text = text.strip()
    if text in _NO_LIMIT:
        return None
    overdue = text.startswith("-")
    seconds = _clock(text.removeprefix("-"))
    if seconds is None:
        return None
    return -seconds if overdue else seconds


def _seconds(text: str) -> float | None:
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?[smhd])+", text):
        return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"([\d.]+)([smhd])", text))
    return _clock(text)


def _clock(text: str) -> float | None:
    """Reads [days-]hours:minutes:seconds and minutes:seconds."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){1,2})", text)
    if match is None:
        return None
    seconds = 0.0
    for part in match[2].split(":"):
        seconds = 60 * seconds + int(part)
    return 86400 * int(match[1] or 0) + seconds
