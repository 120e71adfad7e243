"""Finds finite but wrong values: all computations of a step must agree bit for bit, whichever rank makes them."""

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
    """Which ranks computed a step wrongly.

    Attributes:
        persistent: the last two computations of the step differ, too.
        found: ranks that may be at fault, each with the name of the first tensor that it computed wrongly.
    """

    persistent: bool
    found: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> list[int]:
        """Ranks at fault; both of two if it may be either."""
        return sorted({rank for rank, _ in self.found})

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {name}" for rank, name in self.found)


class _Deviation(NamedTuple):
    """A rank whose computations differ.

    Attributes:
        rank: global rank.
        coordinates: see ComputeComparison.
        difference: the first one.
    """

    rank: int
    coordinates: tuple[int, int]
    difference: Difference


def _origins(deviations: Sequence[_Deviation]) -> list[tuple[int, str]]:
    """Ranks that computed a wrong value themselves, not from one that they received, and the name of its tensor.

    If all deviations were received, a message was corrupted in transit; then its receivers are returned.
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
    peer agree, else persistent. If every rank reproduces its own result but peers disagree, one of the two makes the
    same mistake every time: with three peers or more, the one that disagrees with both of its neighbours.

    Args:
        comparisons: of all ranks; computations differ in at least one.
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
    """Computes steps again and compares the results; a persistent fault ends the run with exit 9. A ComputeCheck.

    Args:
        engine: that computes.
        events: where faults are recorded.
        every_steps: interval of the checks; 0: only suspicious steps are checked.
        suspects: whether the loss and the gradient norm of a step are suspicious; None: no step is.
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
            UnhealthyNode: the fault is persistent.
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
            f"step {self._step + 1} does not come out the same when it is computed again from the same weights and "
            f"samples: {fault}. The run goes on from the last checkpoint; leave the node out if this comes again"
        )

    def report_suspicious(self, first: tuple[float, float], again: tuple[float, float], ranks: list[int]) -> None:
        """See ComputeCheck."""
        named = {"step": self._step + 1, "loss": first[0], "grad_norm": first[1]}
        if not ranks and first[0] == again[0]:
            self._events.write(
                "suspicious_step", **named, message="a suspicious step, computed again with the same result"
            )
            return
        self._events.write(
            "compute_differs",
            level="warning",
            **named,
            fault="transient",
            ranks=ranks,
            first=[[rank, "a gradient, before any reduction"] for rank in ranks],
            message=f"step {self._step + 1} had a loss of {first[0]:.4g} and a gradient norm of {first[1]:.4g}; "
            f"computed again, {again[0]:.4g} and {again[1]:.4g}, which count. One of the ranks {ranks} was wrong once",
        )
