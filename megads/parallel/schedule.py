"""Pipeline schedules as pure Python: what each pipeline rank does in a step, in program order.

`engine/` executes the lists, `plan/` simulates them on a clock; nothing here knows torch or a process group.

Letters: p pipeline ranks, v virtual stages a rank, m micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


class ActionKind(StrEnum):
    """What an action does.

    `load` takes a micro-batch's tokens (first virtual stage) or labels (last). `backward` is the whole backward pass;
    `backward_input` and `backward_weight` are its two parts. A send names the stage that made the tensor, a receive
    the stage that will use it: send_activation of stage s meets receive_activation of stage s + 1, send_gradient of
    stage s meets receive_gradient of stage s - 1.
    """

    load = "load"
    forward = "forward"
    backward = "backward"
    backward_input = "backward_input"
    backward_weight = "backward_weight"
    send_activation = "send_activation"
    receive_activation = "receive_activation"
    send_gradient = "send_gradient"
    receive_gradient = "receive_gradient"


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    Attributes:
        kind: what.
        micro_batch: for which, 0 to m - 1.
        stage: of which virtual stage, 0 to p * v - 1 in the order of the forward pass.
    """

    kind: ActionKind
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds which virtual stage.

    Attributes:
        ranks: the pipeline rank of each virtual stage: (0, 1, 2, 3) for 1f1b, (0, 1, 0, 1) for interleaved,
            (0, 1, 1, 0) for V shapes.
    """

    ranks: tuple[int, ...]

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a virtual stage."""
        return self.ranks[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a pipeline rank, in the order of the forward pass."""
        return tuple(stage for stage, holder in enumerate(self.ranks) if holder == rank)

    @property
    def ends(self) -> tuple[int, int]:
        """The pipeline ranks of the first and of the last virtual stage; both are one under a V shape."""
        return self.ranks[0], self.ranks[-1]

    @property
    def num_stages(self) -> int:
        """Virtual stages, p * v."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks, p."""
        return max(self.ranks) + 1


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline.

    A receive stands where it must be posted at the latest; it may be posted earlier, in list order for each peer.
    Between two ranks, messages of one direction are received in the order in which they are sent. Tensors that pass
    between virtual stages of one rank are handed over and do not appear. The gradients of a virtual stage's weights are
    summed in the order of the micro-batches.

    Attributes:
        name: of the schedule.
        placement: where the virtual stages are.
        micro_batches: of the step, m.
        actions: of each pipeline rank, in program order.
    """

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]


ScheduleName = StrEnum(
    "ScheduleName",
    {"1f1b": "1f1b", "interleaved": "interleaved", "zb_h1": "zb_h1", "dualpipe_v": "dualpipe_v", "zb_v": "zb_v"},
)
"""The schedules; a class statement could not have 1f1b, which is no identifier."""
_SINGLE_STAGE = ("1f1b", "zb_h1")
_V_SHAPED = ("dualpipe_v", "zb_v")


def stage_placement(name: str, pipeline_ranks: int, virtual_stages: int | None = None) -> Placement:
    """Where a schedule puts its virtual stages; the number of micro-batches does not matter.

    Args:
        name: of the schedule.
        pipeline_ranks: p.
        virtual_stages: v, stages of each rank; None for 1 where the schedule has no more, else 2.

    Raises:
        ConfigError: there is no such schedule, or it cannot have so many virtual stages.
    """
    if name not in list(ScheduleName):
        raise ConfigError(f"parallel.schedule = {name}: must be one of {', '.join(ScheduleName)}")
    if virtual_stages is not None and virtual_stages < 1:
        raise ConfigError(f"parallel.virtual_stages = {virtual_stages}: must be at least 1")
    ranks = tuple(range(pipeline_ranks))
    if name in _SINGLE_STAGE:
        if virtual_stages not in (None, 1):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, which has one stage a "
                "rank: leave it out, or use parallel.schedule=interleaved"
            )
        return Placement(ranks)
    if name in _V_SHAPED:
        if virtual_stages not in (None, 2):
            raise ConfigError(
                f"parallel.virtual_stages = {virtual_stages} with parallel.schedule = {name}, whose V shape has two "
                "stages a rank: leave it out, or use parallel.schedule=interleaved"
            )
        return Placement(ranks + ranks[::-1])
    return Placement(ranks * (2 if virtual_stages is None else virtual_stages))


def build_schedule(
    name: str, pipeline_ranks: int, virtual_stages: int, micro_batches: int, *, contiguous: int | None = None
) -> Schedule:
    """Writes out a schedule.

    Args:
        name: of the schedule.
        pipeline_ranks: p.
        virtual_stages: v, stages of each rank.
        micro_batches: m, at least 1.
        contiguous: micro-batches that an interleaved schedule runs through one virtual stage in a row; None for p.

    Raises:
        ConfigError: there is no such schedule, or it cannot be.
    """
    placement = stage_placement(name, pipeline_ranks, virtual_stages)
    if contiguous is not None:
        raise ConfigError(
            f"parallel.contiguous_micro_batches = {contiguous} with parallel.schedule = {name}: only interleaved takes "
            "it, leave it out"
        )
    computations = [_one_forward_one_backward(rank, pipeline_ranks, micro_batches) for rank in range(pipeline_ranks)]
    return Schedule(name, placement, micro_batches, _with_messages(placement, computations))


def _one_forward_one_backward(rank: int, pipeline_ranks: int, micro_batches: int) -> list[Action]:
    """1F1B (Narayanan et al. 2019, PipeDream-Flush of 2021): rank r runs p - r - 1 forwards ahead."""
    ahead = min(pipeline_ranks - rank - 1, micro_batches)
    row = [Action(ActionKind.forward, micro_batch, rank) for micro_batch in range(ahead)]
    for micro_batch in range(micro_batches):
        if ahead + micro_batch < micro_batches:
            row.append(Action(ActionKind.forward, ahead + micro_batch, rank))
        row.append(Action(ActionKind.backward, micro_batch, rank))
    return row


_SENDS = {
    ActionKind.forward: (ActionKind.send_activation, ActionKind.receive_activation, 1),
    ActionKind.backward: (ActionKind.send_gradient, ActionKind.receive_gradient, -1),
    ActionKind.backward_input: (ActionKind.send_gradient, ActionKind.receive_gradient, -1),
}
"""By what made the tensor: its send, its receive, and how far away in the row of stages it is used."""


def _with_messages(placement: Placement, computations: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Adds loads, sends (right after what makes the tensor) and receives (right before its use, in order of sending).

    Where messages of one peer are used in another order than they are sent, a receive is listed earlier than its use.
    """
    arriving: dict[tuple[int, int], deque[Action]] = {}
    for rank, row in enumerate(computations):
        for action in row:
            for _, receive, peer in _messages(placement, action):
                arriving.setdefault((rank, peer), deque()).append(receive)
    actions = []
    for rank, row in enumerate(computations):
        listed: list[Action] = []
        received: set[Action] = set()
        for action in row:
            needed = _needed(placement, action)
            if needed is not None:
                receive, peer = needed
                while receive not in received:
                    listed.append(arriving[peer, rank].popleft())
                    received.add(listed[-1])
            if action.kind is ActionKind.forward and action.stage in (0, placement.num_stages - 1):
                listed.append(Action(ActionKind.load, action.micro_batch, action.stage))
            listed.append(action)
            listed += [send for send, _, _ in _messages(placement, action)]
        actions.append(tuple(listed))
    return tuple(actions)


def _messages(placement: Placement, action: Action) -> Iterator[tuple[Action, Action, int]]:
    """The send and the receive that carry what an action made, and the peer's rank; nothing if it stays here."""
    if action.kind not in _SENDS:
        return
    send, receive, step = _SENDS[action.kind]
    user = action.stage + step
    if not 0 <= user < placement.num_stages or placement.rank_of(user) == placement.rank_of(action.stage):
        return
    yield (
        Action(send, action.micro_batch, action.stage),
        Action(receive, action.micro_batch, user),
        placement.rank_of(user),
    )


def _needed(placement: Placement, action: Action) -> tuple[Action, int] | None:
    """The receive that an action waits for and the peer's rank; None if it waits for no message."""
    if action.kind not in _SENDS:
        return None
    _, receive, step = _SENDS[action.kind]
    maker = action.stage - step
    if not 0 <= maker < placement.num_stages or placement.rank_of(maker) == placement.rank_of(action.stage):
        return None
    return Action(receive, action.micro_batch, action.stage), placement.rank_of(maker)
