"""Detects finite but wrong results: repeated computations of a step must agree bit for bit on any rank."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megads.engine.interface import ComputeComparison, TrainEngine
from megads.errors import UnhealthyNode
from megads.parallel.compute_trace import Difference
from megads.resilience.replicas import HEAD_START_S
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter


@dataclass(frozen=True)
class ComputeFault:
    """Ranks that computed a step wrongly.

    Attributes:
        persistent: whether the last two computations of the step differ, too.
        found: ranks that may be at fault, each with the name of the first tensor that it computed wrongly.
    """

    persistent: bool
    found: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> list[int]:
        """Ranks at fault; both ranks of a pair if it is unknown which one is."""
        return sorted({rank for rank, _ in self.found})

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {name}" for rank, name in self.found)


class _Deviation(NamedTuple):
    """Difference between computations of a rank.

    Attributes:
        rank: global rank.
        coordinates: pipeline and data-parallel rank, see ComputeComparison.
        difference: first difference.
    """

    rank: int
    coordinates: tuple[int, int]
    difference: Difference


def _origins(deviations: Sequence[_Deviation]) -> list[tuple[int, str]]:
    """Returns the ranks that computed a wrong value themselves instead of receiving it, with the name of its tensor.

    If all deviating values were received, the data was corrupted in transit; then the receivers are returned.
    """
    computed = [deviation for deviation in deviations if not deviation.difference.received] or list(deviations)
    first: dict[tuple[int, int], int] = {}
    for _, coordinates, difference in computed:
        first[coordinates] = min(difference.entry, first.get(coordinates, difference.entry))
    return [
        (rank, difference.name) for rank, coordinates, difference in computed if difference.entry == first[coordinates]
    ]


def compute_fault(comparisons: Sequence[ComputeComparison]) -> ComputeFault:
    """Finds the ranks that computed a step wrongly.

    A rank whose own two computations differ is at fault. The fault is transient if the last computations of rank and
    peer agree, else persistent. If every rank reproduces its own result but a rank and its peer disagree, one of the
    two makes the same mistake every time: with three ranks or more, the one that disagrees with both of its neighbours.

    Args:
        comparisons: comparisons of all ranks; at least one contains a difference.
    """
    coordinates = {comparison.rank: comparison.coordinates for comparison in comparisons}
    unstable = [
        _Deviation(rank, coordinates[rank], difference)
        for comparison in comparisons
        for rank, difference in ((comparison.rank, comparison.by_rank), (comparison.peer, comparison.by_peer))
        if difference is not None
    ]
    across = [
        _Deviation(comparison.rank, comparison.coordinates, comparison.across)
        for comparison in comparisons
        if comparison.across is not None
    ]
    if unstable:
        return ComputeFault(bool(across), tuple(dict.fromkeys(_origins(unstable))))
    names = dict(_origins(across))
    pairs = [(comparison.rank, comparison.peer) for comparison in comparisons if comparison.rank in names]
    votes = Counter(rank for pair in pairs for rank in pair)
    most = max(votes.values())
    name_of = {rank: names[owner] for owner, peer in pairs for rank in (owner, peer)}
    return ComputeFault(True, tuple((rank, name_of[rank]) for rank in sorted(votes) if votes[rank] == most))


class ComputeHook:
    """Recomputes steps and compares the results; a persistent fault ends the run with exit 9. Is a ComputeCheck.

    Args:
        engine: training engine.
        events: event log for faults.
        every_steps: interval of the checks in steps; 0 checks suspicious steps only.
        suspects: whether a step is suspicious, from its number, loss and gradient norm; None: no step is.
    """

    def __init__(
        self,
        engine: TrainEngine,
        events: EventWriter,
        every_steps: int,
        suspects: Callable[[int, float, float], bool] | None = None,
    ) -> None:
        self._engine, self._events, self._every, self._suspects = engine, events, every_steps, suspects
        self._step = 0

    def on_start(self, state: TrainState) -> None:
        self._step = state.step
        self._engine.check_compute(self)

    def on_step(self, info: StepInfo) -> None:
        self._step = info.step

    def on_end(self, state: TrainState) -> None:
        self._engine.check_compute(None)

    def is_due(self) -> bool:
        """See ComputeCheck."""
        return self._every > 0 and (self._step + 1) % self._every == 0

    def suspects(self, loss: float, grad_norm: float) -> bool:
        """See ComputeCheck."""
        return self._suspects is not None and self._suspects(self._step + 1, loss, grad_norm)

    def judge(self, comparisons: list[ComputeComparison]) -> None:
        """See ComputeCheck.

        Raises:
            UnhealthyNode: The fault is persistent.
        """
        fault = compute_fault(comparisons)
        kind = "persistent" if fault.persistent else "transient"
        self._events.write(
            "compute_differs",
            level="error" if fault.persistent else "warning",
            step=self._step + 1,
            fault=kind,
            ranks=fault.ranks,
            first=[[rank, name] for rank, name in fault.found],
            message=f"computations of step {self._step + 1} from the same weights and samples differ ({kind}): {fault}",
        )
        if not fault.persistent:
            return
        if self._engine.grid.rank not in fault.ranks:
            time.sleep(HEAD_START_S)
        raise UnhealthyNode(
            f"step {self._step + 1} gives another result when it is recomputed from the same weights and samples: "
            f"{fault}. The run continues from the last checkpoint; exclude the node if this happens again"
        )

    def report_suspicious(self, first: tuple[float, float], again: tuple[float, float], ranks: list[int]) -> None:
        """See ComputeCheck."""
        named = {"step": self._step + 1, "loss": first[0], "grad_norm": first[1]}
        if not ranks and first[0] == again[0]:
            self._events.write("suspicious_step", **named, message="a suspicious step, recomputed with the same result")
            return
        self._events.write(
            "compute_differs",
            level="warning",
            **named,
            fault="transient",
            ranks=ranks,
            first=[[rank, "a gradient, before any reduction"] for rank in ranks],
            message=f"step {self._step + 1} had a loss of {first[0]:.4g} and a gradient norm of {first[1]:.4g}; "
            f"recomputed: {again[0]:.4g} and {again[1]:.4g}, which are used. A transient fault on one of ranks {ranks}",
        )
