"""Detects which rank hangs: a pure function of the ranks' positions over time, without a clock or processes.

A rank that waits in a collective waits for another rank, so only the ranks that are furthest behind are examined. The
job hangs when one of them exceeds the limit learned from the run's own phases of the same kind.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megads.config.root import RootConfig
from megads.ops.config import Compile
from megads.runtime.config import HangAction
from megads.runtime.heartbeat import (
    AGREEING,
    ENGINE_STEP,
    INTERVAL_S,
    LOADING_DATA,
    SAVING,
    SLOW_PHASES,
    VALIDATING,
    RankPosition,
)

UNKNOWN_S = 3600.0
"""Limit of a phase without earlier durations to compare with: startup, the first step including compilation, the first
save."""
_OF_MEDIAN, _OF_LONGEST = 15.0, 4.0
_FILES, _HOOKS = 5.0, 10.0
"""Factors on `HangSettings.min_s`. File I/O may be slow for reasons that do not affect computation; a hook does nothing
in most steps, so their durations say nothing about the others."""
_FEWEST = 3
_REMEMBERED = 255
_FLOORS = {ENGINE_STEP: 1.0, LOADING_DATA: _FILES, AGREEING: _FILES, SAVING: _FILES, VALIDATING: _FILES}
_ORDER = {LOADING_DATA: 0, ENGINE_STEP: 1, AGREEING: 2}
"""Order of the phases of one step; hooks come after them."""
_STARTUP = (
    *("starting", "verifying a checkpoint", "opening the data", "preparing kernels"),
    *("building the engine", "loading a checkpoint"),
)
"""Order of the phases before the first step."""
_DIGITS = re.compile(r"[\d,.]*\d")


@dataclass(frozen=True)
class HangSettings:
    """When a rank counts as hung.

    Attributes:
        min_s: minimum limit of an engine step; five times as long for phases with file I/O, ten times for hooks.
        most_s: maximum limit of an engine step, whose collectives time out soon after it.
        patience: factor on the limits; larger after a restart for a hang that may have been a false alarm.
        saves_s: durations of saves in earlier starts of the run, by which the first save of this one is judged.
    """

    min_s: float
    most_s: float = UNKNOWN_S
    patience: float = 1.0
    saves_s: Sequence[float] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "saves_s", tuple(self.saves_s))  # JSON gives a list


_MIN_S, _MIN_COMPILING_S = 20.0, 120.0
_OF_TIMEOUT = 0.8
"""Fraction of the collectives' timeout after which a step counts as hung, whatever the learned limit."""


def hang_settings(config: RootConfig, saves_s: Sequence[float] = ()) -> HangSettings | None:
    """Returns the settings of hang detection; None if it is disabled.

    Args:
        config: config of the run.
        saves_s: durations of its saves so far, in seconds.
    """
    cluster = config.cluster
    if cluster.hang_action is HangAction.ignore or cluster.is_debugged:
        return None
    usual_s = _MIN_S if config.ops.compile is Compile.none else _MIN_COMPILING_S
    # Ranks that share a GPU take turns on it.
    least_s = cluster.hang_min_s or usual_s * cluster.ranks_per_gpu
    return HangSettings(least_s, cluster.timeout_s * _OF_TIMEOUT, saves_s=tuple(saves_s))


@dataclass
class _Durations:
    recent: deque[float]
    count: int = 0
    longest_s: float = 0.0


class PhaseLimits:
    """Learns limits for each kind of phase from the durations of a run's phases.

    The limit is 15 times the median or 4 times the longest duration so far, whichever is longer, and higher while few
    durations are known. A step that takes ten times its usual time is not a hang, and a duration that the run has
    already survived does not count as one later.

    Args:
        settings: bounds of the limits.
    """

    def __init__(self, settings: HangSettings) -> None:
        self._settings = settings
        self._kinds: dict[str, _Durations] = {}
        for duration_s in settings.saves_s:
            self.learn(SAVING, duration_s)

    def learn(self, kind: str, duration_s: float) -> None:
        """Records the duration of a finished phase."""
        seen = self._kinds.setdefault(kind, _Durations(deque(maxlen=_REMEMBERED)))
        seen.recent.append(duration_s)
        seen.count += 1
        seen.longest_s = max(seen.longest_s, duration_s)

    def limit_s(self, kind: str) -> float:
        """Seconds after which a phase of this kind counts as hung."""
        settings, seen = self._settings, self._kinds.get(kind)
        floor_s = settings.min_s * _FLOORS.get(kind.partition(",")[0], _HOOKS)
        if seen is None or seen.count < (1 if kind == SAVING and settings.saves_s else _FEWEST):
            # Most phases of a step are too short to be observed: one that is unknown when steps are known is short.
            short = not kind.startswith(SLOW_PHASES) and kind != ENGINE_STEP and self._knows(ENGINE_STEP)
            return (floor_s if short else UNKNOWN_S) * settings.patience
        usual_s = max(_OF_MEDIAN * median(seen.recent), _OF_LONGEST * seen.longest_s)
        limit_s = max(floor_s, usual_s * (1 + _FEWEST / seen.count)) * settings.patience
        return min(limit_s, settings.most_s) if kind == ENGINE_STEP else limit_s

    def _knows(self, kind: str) -> bool:
        return kind in self._kinds and self._kinds[kind].count >= _FEWEST


class HangDetector:
    """Tracks the positions of a node's ranks.

    Args:
        settings: when a rank counts as hung.
    """

    def __init__(self, settings: HangSettings) -> None:
        self.limits = PhaseLimits(settings)
        self._min_s = settings.min_s
        self._patience = settings.patience
        self._last: dict[int, RankPosition] = {}
        self._startup: dict[str, list[float]] = {}
        self._met: set[tuple[int, str]] = set()

    def observe(self, positions: Sequence[RankPosition]) -> tuple[RankPosition, ...]:
        """Learns from one observation of all ranks; returns the ranks that all others wait for and that are overdue.

        Args:
            positions: positions of all ranks, observed at intervals of `INTERVAL_S`.
        """
        for position in positions:
            self._follow(position)
        # A rank that someone debugs must not be killed.
        if any(position.state == "t" for position in positions):
            return ()
        return tuple(at for at in furthest_behind(positions) if self._is_overdue(at))

    def _is_overdue(self, at: RankPosition) -> bool:
        limit_s = self._startup_limit_s(at) if at.step == 0 else self.limits.limit_s(phase_kind(at.phase))
        return at.phase_s >= self._min_s and at.phase_s >= limit_s

    def _startup_limit_s(self, at: RankPosition) -> float:
        """Seconds after which a phase before the first step counts as hung: by what it took the other ranks, if most
        have passed it."""
        passed = sum(other.step > 0 or _place(other) > _place(at) for other in self._last.values())
        if at.phase not in _STARTUP or not passed or 2 * passed < len(self._last) - 1:
            return UNKNOWN_S * self._patience
        # Those who passed it unseen took less than an interval. One rank of a node checks and builds what the others
        # only read.
        usual_s = max(self._startup.get(at.phase, [INTERVAL_S]))
        return max(_HOOKS * self._min_s, _OF_LONGEST * usual_s) * self._patience

    def _follow(self, now: RankPosition) -> None:
        before = self._last.get(now.rank)
        self._last[now.rank] = now
        if before is None or now.phase_s > before.phase_s or before.lost:
            return
        kind = phase_kind(before.phase)
        if before.step == 0:
            self._startup.setdefault(before.phase, []).append(before.phase_s + INTERVAL_S)
        # Phases before the first step and the first phase of each kind include one-time work: opening, compiling,
        # allocating.
        if before.step == 0 or (before.rank, kind) not in self._met:
            self._met.add((before.rank, kind))
            return
        # A phase is observed up to one interval late, and most phases are shorter than an interval.
        self.limits.learn(kind, before.phase_s + INTERVAL_S if before.phase_s else INTERVAL_S / 2)


def phase_kind(phase: str) -> str:
    """Returns a phase's name without counters: `validating, batch 3/20` and `validating, batch 4/20` are one kind."""
    return _DIGITS.sub("#", phase)


def furthest_behind(positions: Sequence[RankPosition]) -> list[RankPosition]:
    """Returns the ranks that the others wait for: those in the earliest step and its earliest phase.

    Among hooks, whose order is unknown, it is the hook that was entered first. All ranks, if all are at the same place.
    """
    if not positions:
        return []
    places = {position.rank: (position.step, _place(position)) for position in positions}
    first = min(places.values())
    behind = [position for position in positions if places[position.rank] == first]
    longest_s = max(position.phase_s for position in behind)
    # Entered within about the same observation.
    return [position for position in behind if position.phase_s >= longest_s - 2 * INTERVAL_S]


def _place(position: RankPosition) -> int:
    """The place of a phase among those of its step, or among those before the first step; hooks come last."""
    if position.step:
        return _ORDER.get(position.phase, len(_ORDER))
    return _STARTUP.index(position.phase) if position.phase in _STARTUP else len(_STARTUP)
