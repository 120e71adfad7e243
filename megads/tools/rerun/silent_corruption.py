"""Silent data corruption: finite but wrong results, flipped bits in the state, and transient non-finite steps.

Repeated computations of a step must agree bit for bit on any rank. Replicated state must be equal on all ranks, and no
state may change between two updates (docs/numerics.md, N8).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megads.api import EventWriter, Hook, Shard, StepInfo, TrainEngine, TrainState, UnhealthyNode
from megads.engine.interface import Replica, StepPasses, StepResult
from megads.resilience.config import ResilienceConfig
from megads.tools.rerun.repeated_step import ComputeComparison, Difference, RepeatedStep

_LINES = ("data", "expert_data", "replica", "tp", "pair")
"""Order of the comparisons, the same on every rank."""
_NAMED = 8
HEAD_START_S = 2.0
"""Delay of the other ranks, so that ranks at fault exit first: the launcher blames the earliest failure, and excludes
its node if the fault recurs."""


class BitSymptom(NamedTuple):
    """Inconsistency of a tensor as one rank observes it.

    Attributes:
        rank: observing rank.
        key: tensor key, see Replica.
        line: ranks that should hold the same bits; empty if the rank compared its own state.
        digest: digest of the rank's own tensor, hexadecimal; empty without a line.
        what: "differs", "changed" or "stale", see BitFault.
    """

    rank: int
    key: str
    line: tuple[int, ...]
    digest: str
    what: str


@dataclass(frozen=True)
class BitFault:
    """A corrupt tensor.

    Attributes:
        key: tensor key, see Replica.
        ranks: ranks at fault; if two replicas differ and it is unknown which one is wrong, both.
        copies: ranks that should hold the same bits; a single rank if it compared its own state.
        what: "differs" between replicas, "changed" between two steps, or "stale": a working weight that is not its
            rounded master weight.
    """

    key: str
    ranks: tuple[int, ...]
    copies: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        ranks = " or ".join(f"rank {rank}" for rank in self.ranks)
        if self.what == "differs":
            return f"{self.key} of {ranks} differs from its copies on ranks {', '.join(map(str, self.copies))}"
        if self.what == "changed":
            return f"{self.key} of {ranks} changed between two steps"
        return f"{self.key} of {ranks} is not its rounded master weight"


def digests(replicas: Sequence[Replica]) -> Tensor:
    """Returns the sum of the words of each tensor modulo 2**64, int64 [tensors]; any flipped bit changes it."""
    sums = [_words(replica.tensor).sum(dtype=torch.int64) for replica in replicas]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _words(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def differing(replicas: Sequence[Replica], found: Tensor, rank: int) -> list[BitSymptom]:
    """Compares digests with those of the ranks that should hold the same bits; collective over each line of ranks.

    Args:
        replicas: tensors of this rank.
        found: digests of the tensors, int64 [tensors].
        rank: this rank.
    """
    wrong: list[BitSymptom] = []
    for name in _LINES:
        places = [place for place, replica in enumerate(replicas) if name in replica.lines]
        if not places:
            continue
        axis = replicas[places[0]].lines[name]
        own = found[places]
        low, high = own.clone(), own.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=axis.group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=axis.group)
        for place, digest, differs in zip(places, own.tolist(), (low != high).tolist(), strict=True):
            if differs:
                wrong.append(BitSymptom(rank, replicas[place].key, axis.ranks, f"{digest % 2**64:016x}", "differs"))
    return wrong


def bit_faults(findings: Iterable[BitSymptom]) -> list[BitFault]:
    """Combines the findings of all ranks: among replicas that differ, those in the minority are at fault.

    Args:
        findings: findings of all ranks; a tensor may be compared along several lines.
    """
    faults: dict[BitFault, None] = {}
    copies: dict[tuple[str, tuple[int, ...]], dict[int, str]] = {}
    alone: dict[str, set[int]] = {}
    for one in findings:
        if one.line:
            copies.setdefault((one.key, one.line), {})[one.rank] = one.digest
        else:
            alone.setdefault(one.key, set()).add(one.rank)
            faults[BitFault(one.key, (one.rank,), (one.rank,), one.what)] = None
    for (key, line), by_rank in copies.items():
        values = list(by_rank.values())
        most = max(values.count(value) for value in values)
        usual = {value for value in values if values.count(value) == most}
        odd = {rank for rank, value in by_rank.items() if len(usual) > 1 or value not in usual}
        # If some of these ranks also failed their own check of the tensor, only they are at fault.
        odd = (odd & alone.get(key, set())) or odd
        faults[BitFault(key, tuple(sorted(odd)), line, "differs")] = None
    return list(faults)


class ReplicaHook:
    """Checks for flipped bits every `every_steps` steps, before the state of the step is saved.

    After such a step, working weights, master weights and optimizer state are compared with their replicas on other
    ranks, and working weights with their master weights. All of this state, including ZeRO shards without a replica,
    must be unchanged right before the next update. A fault ends the run with exit 9 and names the rank; the launcher
    restarts the run from the last checkpoint.

    Args:
        engine: training engine.
        events: event log for faults.
        every_steps: interval of the checks in steps.
    """

    def __init__(self, engine: TrainEngine, events: EventWriter, every_steps: int) -> None:
        self._engine, self._events, self._every = engine, events, every_steps
        self._rank = engine.grid.rank
        self._before: Tensor | None = None
        self._changed: list[BitSymptom] = []
        self._watched = False

    def on_start(self, state: TrainState) -> None:
        self._before, self._changed, self._watched = None, [], False

    def on_step(self, info: StepInfo) -> None:
        found, due = self._changed, info.step % self._every == 0
        if not due and not self._watched:
            return
        self._changed, self._watched = [], False
        if due:
            replicas = self._engine.replicas()
            self._before = digests(replicas)
            found = found + differing(replicas, self._before, self._rank)
            stale = [f"working_weight/{name}" for name in self._engine.stale_weights()]
            found += [BitSymptom(self._rank, key, (), "", "stale") for key in dict.fromkeys(stale)]
        control = self._engine.grid.control
        if control.any(bool(found)):
            everything = control.gather(found, list[tuple[int, str, tuple[int, ...], str, str]])
            self._end(info.step, bit_faults(BitSymptom(*one) for of_rank in everything for one in of_rank))
        if due and not info.last:
            self._engine.watch_gradients(self._compare_with_before)

    def on_end(self, state: TrainState) -> None:
        pass

    def _compare_with_before(self, _gradients: list[Shard]) -> None:
        """Compares the state with its digests; called right before the update of the next step."""
        self._watched = True
        assert self._before is not None
        replicas = self._engine.replicas()
        same = (digests(replicas) == self._before).tolist()
        keys = dict.fromkeys(replica.key for replica, equal in zip(replicas, same, strict=True) if not equal)
        self._changed = [BitSymptom(self._rank, key, (), "", "changed") for key in keys]
        self._before = None

    def _end(self, step: int, faults: Sequence[BitFault]) -> None:
        named = "; ".join(map(str, faults[:_NAMED]))
        more = f" (and {len(faults) - _NAMED} more)" if len(faults) > _NAMED else ""
        ranks = sorted({rank for fault in faults for rank in fault.ranks})
        self._events.write(
            "replicas_differ",
            level="error",
            step=step,
            ranks=ranks,
            tensors=[[fault.key, list(fault.ranks), fault.what] for fault in faults],
            message=named + more,
        )
        if self._rank not in ranks:
            time.sleep(HEAD_START_S)
        raise UnhealthyNode(
            f"the state of the run is corrupt at step {step}: {named}{more}. A bit flipped in memory, or a device "
            "computed wrongly. The run continues from the last checkpoint; exclude the node if this happens again"
        )


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
    """Recomputes steps and compares the results; a persistent fault ends the run with exit 9. A StepCheck.

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

    def compute(self, step: StepPasses) -> Tensor | None:
        """See StepCheck.

        Raises:
            UnhealthyNode: a fault is persistent.
        """
        repeated = RepeatedStep(self._engine.grid, self._engine.device, step)
        if self.should_check():
            loss_sum = repeated.run(self.judge)
            step.reduce()
            return loss_sum
        loss_sum = step.run()
        first = step.outcome(loss_sum)
        if self._suspects is None or not self._suspects(self._step + 1, *first):
            return loss_sum
        norms = step.own_norms()
        loss_sum = repeated.run(self.judge)
        again = step.outcome(loss_sum)
        differ = self._engine.grid.control.gather(step.own_norms() != norms, bool)
        self._report_suspicious(first, again, [rank for rank, differs in enumerate(differ) if differs])
        return loss_sum

    def should_check(self) -> bool:
        """Whether the next step is computed twice, regardless of its loss and gradient norm."""
        return self._every > 0 and (self._step + 1) % self._every == 0

    def judge(self, comparisons: list[ComputeComparison]) -> None:
        """Called with the comparisons of all ranks if computations differ.

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
            f"step {self._step + 1} gives another result when it is recomputed from the same weights and samples: "
            f"{fault}. The run continues from the last checkpoint; exclude the node if this happens again"
        )

    def _report_suspicious(self, first: tuple[float, float], again: tuple[float, float], ranks: list[int]) -> None:
        """Records that a suspicious step was computed again.

        Args:
            first: the suspicious loss and gradient norm.
            again: loss and gradient norm of the last computation, which is applied.
            ranks: ranks whose local gradients, before any reduction, differ between the two computations.
        """
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


class RerunHook:
    """Recomputes every non-finite step once, and records whether the fault was transient or persistent.

    Args:
        engine: training engine.
        events: event log for reruns.
    """

    def __init__(self, engine: TrainEngine, events: EventWriter) -> None:
        self._engine, self._events = engine, events
        self._step = 0

    def on_start(self, state: TrainState) -> None:
        self._step = state.step
        self._engine.rerun_nonfinite(self._note)

    def on_step(self, info: StepInfo) -> None:
        self._step = info.step

    def on_end(self, state: TrainState) -> None:
        pass

    def _note(self, first: StepResult, second: StepResult) -> None:
        self._events.write(
            "step_rerun",
            level="warning",
            step=self._step + 1,
            fault="persistent" if second.skipped else "transient",
            rank=first.culprit.rank if first.culprit is not None else None,
            culprit=str(first.culprit or ""),
            culprit_of_rerun=str(second.culprit or ""),
        )


def corruption_hooks(
    config: ResilienceConfig,
    engine: TrainEngine,
    events: EventWriter,
    suspects: Callable[[int, float, float], bool] | None,
) -> list[Hook]:
    """Creates the hooks that the config enables.

    Args:
        config: enabled checks.
        engine: training engine.
        events: event log for faults.
        suspects: see `ComputeHook`.
    """
    found: list[Hook] = []
    if config.rerun_nonfinite:
        found.append(RerunHook(engine, events))
    if config.checks_compute:
        found.append(ComputeHook(engine, events, config.check_compute_every_steps, suspects))
    if config.check_replicas_every_steps:
        found.append(ReplicaHook(engine, events, config.check_replicas_every_steps))
    return found
