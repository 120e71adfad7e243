"""Finds finite but wrong values: computations of one step must agree bit for bit, whoever makes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megads.engine.interface import Repeated, TrainEngine
from megads.errors import UnhealthyNode
from megads.parallel.compute_trace import Difference
from megads.resilience.replicas import HEAD_START_S
from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import EventWriter


@dataclass(frozen=True)
class ComputeFault:
    """What computations of one step that differ say.

    Attributes:
        persistent: two more computations differed, too.
        found: ranks that may be at fault, each with what it computed wrongly first.
    """

    persistent: bool
    found: tuple[tuple[int, str], ...]

    @property
    def ranks(self) -> list[int]:
        """At fault; where it may be one of two, both."""
        return sorted({rank for rank, _ in self.found})

    def __str__(self) -> str:
        return "; ".join(f"rank {rank}: {what}" for rank, what in self.found)


_Seen = tuple[int, tuple[int, int], Difference]
"""A rank, its place, and where its computations part."""


def _first_of_each_place(seen: Sequence[_Seen]) -> list[tuple[int, str]]:
    """The ranks that went wrong themselves: what others received, or computed later from that, is a consequence.

    Where nobody computed anything wrong first, a message changed on its way, and who received it is named.
    """
    own = [one for one in seen if not one[2].received] or list(seen)
    first: dict[tuple[int, int], int] = {}
    for _, place, difference in own:
        first[place] = min(difference.place, first.get(place, difference.place))
    return [(rank, difference.what) for rank, place, difference in own if difference.place == first[place]]


def compute_fault(seen: Sequence[Repeated]) -> ComputeFault:
    """Who went wrong in a step that every rank and its peer computed twice, in turns.

    A rank whose own two computations differ is at fault: the last ones agree with each other when it was once, and do
    not when it computes at random. Where every rank repeats itself and peers disagree all the same, one of them makes
    the same mistake each time: the one that disagrees with both of its peers, as far as there are three.

    Args:
        seen: by all ranks.
    """
    between = {one.rank: one.between for one in seen if one.between is not None}
    pipelines = {one.rank: one.place[0] for one in seen}
    data = {one.rank: one.place[1] for one in seen}
    unstable: list[_Seen] = []
    for one in seen:
        for rank, difference in ((one.rank, one.here), (one.peer, one.elsewhere)):
            if difference is not None:
                unstable.append((rank, (pipelines[rank], data[rank]), difference))
    if unstable:
        return ComputeFault(bool(between), tuple(dict.fromkeys(_first_of_each_place(unstable))))
    named = dict(_first_of_each_place([(one.rank, one.place, one.between) for one in seen if one.between is not None]))
    pairs = [(one.rank, one.peer) for one in seen if one.rank in named]
    votes = Counter(rank for pair in pairs for rank in pair)
    most = max(votes.values())
    what = {rank: named[owner] for owner, peer in pairs for rank in (owner, peer)}
    return ComputeFault(True, tuple((rank, what[rank]) for rank in sorted(votes) if votes[rank] == most))


class ComputeHook:
    """Has steps computed again, and ends the run with exit 9 where a processor cannot be trusted.

    Args:
        engine: that computes.
        events: where faults are recorded.
        every_steps: steps from one check to the next; 0: only suspicious steps are checked.
        suspects: whether a loss and a gradient norm are suspicious; None: no step is.
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

    def judge(self, seen: list[Repeated]) -> None:
        """See ComputeCheck.

        Raises:
            UnhealthyNode: the fault is persistent.
        """
        fault = compute_fault(seen)
        kind = "persistent" if fault.persistent else "transient"
        self._events.write(
            "compute_differs",
            level="error" if fault.persistent else "warning",
            step=self._step + 1,
            fault=kind,
            ranks=fault.ranks,
            first=[[rank, what] for rank, what in fault.found],
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

    def confirm(self, first: tuple[float, float], again: tuple[float, float], ranks: list[int]) -> None:
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
