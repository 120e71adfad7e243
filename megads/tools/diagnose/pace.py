"""Pace of a training in its log: the times and the losses of its steps, and what is wrong with them.

A loss that rose and stayed high, and hours without a step, are failures that no line reports.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megads.tools.diagnose.causes import Cause
from megads.tools.diagnose.signature import Strength

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"], 1
    )
}
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")
_GLOG = re.compile(r"(?:^|\[)[EWIF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d+)")
_SYSLOG = re.compile(r"\b([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)\b")
_LOSS = re.compile(
    r"(?<![\w/])(?:lm[ _]|train[ _])?loss['\"]?\s*[:=|]?\s*(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)", re.IGNORECASE
)
_READ_LINES = 2000
"""Lines at the end of each block whose times and losses are read."""
_LEAST_STEPS = 5
_WINDOW = 5
_LEAST_LOSSES = 30
_RISE, _RISE_FACTOR = 1.0, 1.5
_SILENT_S, _SILENT_STEPS = 600.0, 20.0


@dataclass(frozen=True)
class PaceFault:
    """Failure that the pace of the steps shows.

    Attributes:
        cause: cause.
        strength: strength as evidence.
        line: line number, from 1.
        text: description with the values.
    """

    cause: Cause
    strength: Strength
    line: int
    text: str


class Pace:
    """Times and losses of the steps in a log, of which the last lines of each block are read."""

    def __init__(self) -> None:
        self._losses: dict[bytes, list[tuple[int, float]]] = {}
        self._times: list[tuple[int, float]] = []
        self._last_time: tuple[int, float] | None = None

    def read(self, lines: Sequence[bytes], keys: Sequence[bytes], start: int, progressing: Collection[bytes]) -> None:
        """Reads the end of a block.

        Args:
            lines: lines of the block.
            keys: the lines without digits.
            start: number of lines before the block.
            progressing: keys of the lines that show progress.
        """
        for index in range(max(0, len(lines) - _READ_LINES), len(lines)):
            text = lines[index][:1000].decode("utf-8", errors="replace")
            moment = time_of(text)
            if moment is not None:
                self._last_time = (start + index + 1, moment)
            if keys[index] not in progressing:
                continue
            if moment is not None:
                self._times.append((start + index + 1, moment))
            if found := _LOSS.search(text):
                self._losses.setdefault(keys[index], []).append((start + index + 1, float(found[1])))

    def troubles(self) -> list[PaceFault]:
        """Returns what is wrong with the steps: at most a diverged loss and a silence at the end."""
        losses = max(self._losses.values(), key=len, default=[])
        found = [_divergence(losses), self._silence()]
        return [one for one in found if one is not None]

    def _silence(self) -> PaceFault | None:
        """Returns a hang if a later line is much farther from the last step than the steps are from each other."""
        if len(self._times) < _LEAST_STEPS or self._last_time is None:
            return None
        last_line, last_step = self._times[-1]
        gap_s = self._last_time[1] - last_step
        usual_s = statistics.median(later - earlier for (_, earlier), (_, later) in pairwise(self._times))
        if self._last_time[0] <= last_line or usual_s < 0 or gap_s <= max(_SILENT_S, _SILENT_STEPS * usual_s):
            return None
        text = f"no step for {gap_s / 60:,.0f} minutes after this line, where steps took {usual_s:,.1f} s"
        return PaceFault(Cause.nccl_timeout_hang, Strength.cascade, last_line, text)


def _divergence(losses: Sequence[tuple[int, float]]) -> PaceFault | None:
    """Returns a divergence if the loss at the end is far above its lowest level before."""
    if len(losses) < _LEAST_LOSSES:
        return None
    values = [loss for _, loss in losses]
    levels = [statistics.median(values[place : place + _WINDOW]) for place in range(len(values) - _WINDOW + 1)]
    lowest, end = min(levels), levels[-1]
    if end < lowest + _RISE or end < _RISE_FACTOR * lowest:
        return None
    middle = (lowest + end) / 2
    first = next(place for place in range(len(values) - 1, -1, -1) if values[place] <= middle) + 1
    text = f"the loss rose from {lowest:.3g} to {end:.3g} here and stayed there"
    return PaceFault(Cause.nan_or_loss_divergence, Strength.cascade, losses[min(first, len(losses) - 1)][0], text)


def time_of(text: str) -> float | None:
    """Returns the timestamp of a line in seconds since the start of the year, months taken as 31 days; None if none."""
    if found := _ISO.search(text):
        month, day, *clock = (int(part) for part in found.groups()[1:6])
        fraction = found[7]
    elif found := _GLOG.search(text):
        month, day, *clock = (int(part) for part in found.groups()[:5])
        fraction = found[6]
    elif (found := _SYSLOG.search(text)) and found[1] in _MONTHS:
        month, day, *clock = _MONTHS[found[1]], *(int(part) for part in found.groups()[1:5])
        fraction = None
    else:
        return None
    hour, minute, second = clock
    days = (month - 1) * 31 + day - 1
    return days * 86400.0 + hour * 3600 + minute * 60 + second + (float(f"0.{fraction}") if fraction else 0.0)
