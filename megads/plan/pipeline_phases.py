"""The fullest moments of a pipeline rank: its schedule replayed, pass by pass, over the operations of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule
from megads.plan.tape import (
    Moment,
    Op,
    backward_moments,
    deferred_bytes,
    early_bytes,
    forward_moments,
    kept_bytes,
    weight_moments,
)


@dataclass(frozen=True)
class GradientSums:
    """The fp32 sums over micro-batches, and how a gradient gets into them.

    Attributes:
        begun: bytes of the sums that are there once a step's first backward passes have made gradients of so many
            bytes in fp32.
        full: bytes of all of them.
        widening: fp32 bytes for every byte of a gradient in the weights' dtype.
        cast: a gradient is copied to fp32 before it is added, as a CPU does.
        straight: gradients of linear layers may be computed in the sums, as our own products do.
    """

    begun: Callable[[int], int]
    full: int
    widening: int
    cast: bool
    straight: bool


@dataclass(frozen=True)
class _Pass:
    """A computation of a rank, as far as its memory goes; passes of one kind that differ in `others` only are alike.

    Attributes:
        kind: of the computation.
        stage: virtual stage.
        made: bytes in fp32 of the gradients that the step's earlier passes of this stage made.
        elsewhere: likewise, of the rank's other stages.
        later: every weight has its first gradient.
    """

    kind: ActionKind
    stage: int
    made: int
    elsewhere: int
    later: bool

    @property
    def phase(self) -> str:
        return "later micro-batch" if self.later else "first micro-batch"


def most_waiting(schedule: Schedule, rank: int) -> int:
    """Most passes of a rank's virtual stages between their forward and the end of their backward pass."""
    return max(waiting for _, waiting, _ in _replay(schedule, rank, {}))


def pipeline_phases(
    schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]], sums: GradientSums
) -> list[Moment]:
    """The fullest moments of a rank: until every weight has its first gradient, and after.

    Args:
        schedule: of a step.
        rank: of the pipeline.
        stages: operations of each of the rank's virtual stages, by number.
        sums: of gradients.
    """
    most: dict[_Pass, int] = {}
    widening = sums.widening
    made: dict[int, int] = {}
    done: set[int] = set()
    for action, _, others in _replay(schedule, rank, stages):
        stage, ops = action.stage, stages[action.stage]
        own, later = made.get(stage, 0), len(done) == len(stages)
        key = _Pass(action.kind, stage, own, sum(made.values()) - own, later)
        most[key] = max(most.get(key, 0), others)
        made[stage] = max(own, early_bytes(ops, widening))
        if action.kind in (ActionKind.backward, ActionKind.backward_weight):
            made[stage] = early_bytes(ops, widening) + widening * sum(op.gradient for op in ops if not op.shared)
            done.add(stage)
    fullest: dict[str, Moment] = {}
    for key, others in most.items():
        moment = max(_moments(key, stages[key.stage], others, sums), key=lambda moment: moment.total, default=None)
        if moment is not None and (key.phase not in fullest or moment.total > fullest[key.phase].total):
            fullest[key.phase] = moment
    return [replace(moment, name=f"{phase}: {moment.name}") for phase, moment in fullest.items()]


def _replay(schedule: Schedule, rank: int, stages: Mapping[int, Sequence[Op]]) -> Iterator[tuple[Action, int, int]]:
    """Each computation of a rank with the passes that wait and the bytes that others than its own hold."""
    kept = {stage: kept_bytes(ops) for stage, ops in stages.items()}
    deferred = {stage: deferred_bytes(ops) for stage, ops in stages.items()}
    waiting = held = 0
    for action in schedule.actions[rank]:
        if not action.kind.computes:
            continue
        own, left = kept.get(action.stage, 0), deferred.get(action.stage, 0)
        match action.kind:
            case ActionKind.forward:
                waiting += 1
                yield action, waiting, held
                held += own
            case ActionKind.backward_input:
                held -= own
                yield action, waiting, held
                held += left
            case _:
                held -= left if action.kind is ActionKind.backward_weight else own
                yield action, waiting, held
                waiting -= 1


def _moments(of: _Pass, ops: Sequence[Op], others: int, sums: GradientSums) -> Iterator[Moment]:
    """The moments of a pass, operation by operation."""

    def begun(made: int) -> int:
        return sums.full if of.later else sums.begun(of.elsewhere + max(of.made, made))

    match of.kind:
        case ActionKind.forward:
            yield from forward_moments(ops, held=others, sums=begun, widening=sums.widening)
        case ActionKind.backward_weight:
            yield from weight_moments(ops, held=others, sums=begun, widening=sums.widening, cast=sums.cast)
        case _:
            split = of.kind is ActionKind.backward_input
            yield from backward_moments(
                ops,
                held=others,
                sums=begun,
                widening=sums.widening,
                cast=sums.cast,
                straight=sums.straight,
                split=split,
            )
