"""Straggler detection: finds ranks that compute more slowly than their peers and so slow down the whole job.

In synchronous training every rank's step takes as long as the slowest rank's, so step times do not identify a
straggler. Every n-th step each rank therefore times only its forward and backward passes, without receives, reductions
and waiting for them, and rank 0 compares ranks of the same pipeline stage (like MegaScale, arXiv 2402.15627, section
5.1).

Tensor- and context-parallel ranks wait for each other within a forward pass, so a slow rank slows down its whole group,
and all ranks of the group are reported.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megads.api import ActionKind, EventWriter, ParallelGrid, Span, StepInfo, TrainState, node_name, slowdowns_path

WINDOW = 9
"""Number of timed steps in the detection window."""
SLOWER_BY = 0.10
"""Minimum relative slowdown of a straggler."""
LEAST_SCORE = 6.0
"""Minimum slowdown of a straggler in standard errors. At 1% noise a healthy rank never has a slowdown of 10%; with more
noise, a score of 6 occurs by chance once in 10^9 windows."""
_MEDIAN_ERROR = 1.2533
"""Ratio of the standard error of a median of n normal values to that of their mean."""
_DIFFERENCE_TO_DEVIATION = 1.4826 / math.sqrt(2)
"""Ratio of the standard deviation of normal values to the median absolute difference of two of them."""
_NOISE_STEPS = 100
_LEAST_NOISE = 1e-3
_MOST_CELLS = 4_000_000
"""Maximum numbers in the slowdowns file after 100,000 timed steps; with more ranks, fewer steps are written."""
_COMPUTE = (ActionKind.forward, ActionKind.backward, ActionKind.backward_input, ActionKind.backward_weight)

FloatArray = npt.NDArray[np.float64]


def compute_seconds(spans: Sequence[Span]) -> float:
    """Returns the seconds that a rank spent in its forward and backward passes of a step."""
    return sum(span.end_s - span.start_s for span in spans if span.kind in _COMPUTE)


@dataclass(frozen=True)
class Straggler:
    """A rank that became a straggler, or recovered.

    Attributes:
        rank: the rank.
        slowdown: compute time relative to its peers, minus 1.
        score: slowdown in standard errors.
        over: whether the rank has recovered.
    """

    rank: int
    slowdown: float
    score: float
    over: bool = False

    @property
    def confidence(self) -> float:
        """Probability, by the normal distribution, that the slowdown is not due to chance."""
        return 1 - 0.5 * math.erfc(self.score / math.sqrt(2))


class StragglerDetector:
    """Detects stragglers from the ranks' compute times; a pure function of the inputs of `add`.

    Each time is divided by the median of the rank's peers in the same step, which removes common effects: the batch,
    throttling of all ranks, longer sequences. A rank's slowdown is the median of these ratios over the window, so a
    single slow step does not make a straggler. The noise is the median difference between the ratios of two steps, over
    all ranks and more steps than the window, so that the slowdown of one rank does not count as noise.

    Args:
        peers: group number of every rank; ranks with the same work have the same number.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self._groups = [np.flatnonzero(np.asarray(peers) == group) for group in sorted(set(peers))]
        self._window: deque[FloatArray] = deque(maxlen=WINDOW)
        self._differences: deque[float] = deque(maxlen=_NOISE_STEPS)
        self._known: set[int] = set()

    def add(self, slowdown: FloatArray) -> list[Straggler]:
        """Adds the measurements of one step.

        Args:
            slowdown: [ranks], see `relative`.

        Returns:
            Ranks that became stragglers with this step, and those that recovered.
        """
        if self._window:
            self._differences.append(float(np.median(np.abs(slowdown - self._window[-1]))))
        self._window.append(slowdown)
        if len(self._window) < WINDOW:
            return []
        slowdown = np.median(np.stack(self._window), axis=0)
        noise = max(_DIFFERENCE_TO_DEVIATION * float(np.median(self._differences)), _LEAST_NOISE)
        score = slowdown / (_MEDIAN_ERROR * noise / math.sqrt(WINDOW))
        found = []
        for rank in np.flatnonzero((slowdown >= SLOWER_BY) & (score >= LEAST_SCORE)).tolist():
            if rank not in self._known:
                self._known.add(rank)
                found.append(Straggler(rank, float(slowdown[rank]), float(score[rank])))
        for rank in sorted(self._known):
            if slowdown[rank] < SLOWER_BY / 2:
                self._known.remove(rank)
                found.append(Straggler(rank, float(slowdown[rank]), float(score[rank]), over=True))
        return found

    def relative(self, compute_s: FloatArray) -> FloatArray:
        """Returns each rank's compute time relative to the median of its peers, minus 1; 0 for a rank without peers.

        Args:
            compute_s: [ranks] seconds, see `compute_seconds`.
        """
        relative = np.zeros_like(compute_s)
        for members in self._groups:
            if len(members) < 2:
                continue
            times = compute_s[members]
            # The median excludes the rank itself: with two ranks, its own time would count for half of the median.
            order = np.argsort(times, kind="stable")
            rank_of = np.empty_like(order)
            rank_of[order] = np.arange(len(order))
            ordered, half = times[order], (len(times) - 1) / 2
            low, high = math.floor(half - 0.5), math.ceil(half - 0.5)
            others = (ordered[low + (rank_of <= low)] + ordered[high + (rank_of <= high)]) / 2
            relative[members] = np.divide(times, others, out=np.ones_like(times), where=others > 0) - 1
        return relative


class StragglerHook:
    """Hook that times every n-th step and reports ranks that are slower than their peers.

    Args:
        watch_spans: `TrainEngine.watch_spans` of the engine.
        run_dir: the run directory.
        every_steps: interval n in steps.
        grid: the ranks.
        events: writer of the events that report stragglers.
    """

    def __init__(
        self,
        watch_spans: Callable[[Callable[[list[Span]], None]], None],
        run_dir: Path,
        every_steps: int,
        grid: ParallelGrid,
        events: EventWriter,
    ) -> None:
        self._watch_spans, self._path, self._every_steps = watch_spans, slowdowns_path(run_dir), every_steps
        self._grid, self._events = grid, events
        self._detector: StragglerDetector | None = None
        self._nodes: list[str] = []
        self._compute_s = 0.0
        self._write_every = every_steps * -(-grid.world_size * 100_000 // _MOST_CELLS)

    def on_start(self, state: TrainState) -> None:
        control = self._grid.control
        self._nodes = control.gather(node_name(), str)
        peers = control.gather(self._grid.pp.rank, int)
        self._detector = StragglerDetector(peers) if self._grid.rank == 0 else None
        self._prepare(state.step + 1)

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._every_steps == 0:
            self._compare(info.step)
        if not info.last:
            self._prepare(info.step + 1)

    def on_end(self, state: TrainState) -> None:
        pass

    def _prepare(self, step: int) -> None:
        if step % self._every_steps == 0:
            self._watch_spans(self._note)

    def _note(self, spans: list[Span]) -> None:
        self._compute_s = compute_seconds(spans)

    def _compare(self, step: int) -> None:
        rows = self._grid.control.gather_numbers(torch.tensor([self._compute_s], dtype=torch.float64))
        if rows is None or self._detector is None:
            return
        slowdown = self._detector.relative(rows[:, 0].numpy())
        for found in self._detector.add(slowdown):
            event, level = ("straggler_over", "info") if found.over else ("straggler", "warning")
            self._events.write(
                event,
                level=level,
                step=step,
                rank=found.rank,
                node=self._nodes[found.rank],
                slowdown=round(found.slowdown, 4),
                score=round(found.score, 1),
                confidence=round(found.confidence, 6),
                message=_message(found, self._nodes[found.rank]),
            )
        if step % self._write_every == 0:
            self._write(step, slowdown)

    def _write(self, step: int, slowdown: FloatArray) -> None:
        line = {"step": step, "slowdown": [round(share, 4) for share in slowdown.tolist()]}
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            # A full disk must not end the run.
            logging.getLogger(__name__).warning("the slowdowns of step %d were not written: %s", step, error)


def _message(found: Straggler, node: str) -> str:
    share = f"{100 * abs(found.slowdown):.0f}%"
    if found.over:
        return f"rank {found.rank} on {node} computes as fast as its peers again"
    return (
        f"rank {found.rank} on {node} computes {share} longer than its peers over the last {WINDOW} timed steps: every "
        "step waits for it. Check its node: other processes, clocks and temperature of its GPU, its memory bandwidth"
    )
