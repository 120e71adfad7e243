"""Elements of pipeline schedules: actions, the placement of virtual stages, and p2p messages between stages.

A sent tensor may be freed once a later message shows that its receiver has used it. Backends differ in how a sender
learns that a send is complete; gloo requires a blocking wait. The schedule implies it at no cost: the gradient of an
activation cannot arrive before the activation has been received.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum

P2P_CTAS = 8
"""Maximum number of thread blocks of NCCL's send and receive kernels, and thus of channels of their communicators. Each
block occupies an SM of the GPU until the peer arrives, which is lost to concurrent compute. Not measured."""


class ActionKind(StrEnum):
    """Kinds of actions.

    `load` loads a micro-batch's tokens (first virtual stage) or labels (last). `backward` is the whole backward pass;
    `backward_input` and `backward_weight` are its two parts, the input and the weight gradients. A send names the stage
    that produced the tensor, a receive the stage that uses it: send_activation of stage s matches receive_activation of
    stage s + 1, send_gradient of stage s matches receive_gradient of stage s - 1.
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

    @property
    def computes(self) -> bool:
        """Whether the action is a forward or backward pass."""
        return self in _COMPUTATIONS

    @property
    def sends(self) -> bool:
        """Whether the action sends a tensor to another rank."""
        return self in (ActionKind.send_activation, ActionKind.send_gradient)

    @property
    def receives(self) -> bool:
        """Whether the action receives a tensor from another rank."""
        return self in (ActionKind.receive_activation, ActionKind.receive_gradient)


_COMPUTATIONS = (
    ActionKind.forward,
    ActionKind.backward,
    ActionKind.backward_input,
    ActionKind.backward_weight,
)
_MESSAGES = {
    ActionKind.forward: (ActionKind.send_activation, ActionKind.receive_activation, 1),
    ActionKind.backward: (ActionKind.send_gradient, ActionKind.receive_gradient, -1),
    ActionKind.backward_input: (ActionKind.send_gradient, ActionKind.receive_gradient, -1),
}
"""For each pass: the send of its output, the receive of its input, and the stage offset from producer to consumer."""


@dataclass(frozen=True)
class Action:
    """One action of a rank in a schedule.

    Attributes:
        kind: kind of action.
        micro_batch: index of the micro-batch, 0 to m - 1.
        stage: index of the virtual stage, 0 to p * v - 1 in the order of the forward pass.
    """

    kind: ActionKind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch} on stage {self.stage}"


@dataclass(frozen=True)
class StagePlacement:
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
        """The pipeline ranks of the first and of the last virtual stage; the same rank in a V shape."""
        return self.ranks[0], self.ranks[-1]

    @property
    def num_stages(self) -> int:
        """Number of virtual stages, p * v."""
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks, p."""
        return max(self.ranks) + 1

    def crosses(self, stage: int, other: int) -> bool:
        """Whether two stages are on different ranks; False if one of them does not exist."""
        there = 0 <= stage < self.num_stages and 0 <= other < self.num_stages
        return there and self.ranks[stage] != self.ranks[other]


@dataclass(frozen=True)
class Schedule:
    """The actions of one step of a pipeline.

    A receive is listed where it is posted, which may be several passes before its tensor is used. Sends and receives
    are listed in an order that all ranks agree on, see `message_order`. Tensors that pass between virtual stages of one
    rank are not listed. The weight gradients of a virtual stage are accumulated in the order of the micro-batches.

    Attributes:
        name: name of the schedule.
        placement: placement of the virtual stages.
        micro_batches: number of micro-batches of the step, m.
        actions: actions of each pipeline rank, in program order.
    """

    name: str
    placement: StagePlacement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Message:
    """A p2p transfer of a tensor between pipeline ranks.

    Attributes:
        send: action of the sender.
        receive: action of the receiver.
        sender: pipeline rank that sends.
        receiver: pipeline rank that receives.
    """

    send: Action
    receive: Action
    sender: int
    receiver: int


def message_from(placement: StagePlacement, computation: Action) -> Message | None:
    """The message with the output of a computation; None if the output stays on the rank or no stage uses it."""
    if computation.kind not in _MESSAGES:
        return None
    return _message(placement, computation, computation.stage, computation.stage + _MESSAGES[computation.kind][2])


def message_to(placement: StagePlacement, computation: Action) -> Message | None:
    """The message with the input of a computation; None if it needs none."""
    if computation.kind not in _MESSAGES:
        return None
    return _message(placement, computation, computation.stage - _MESSAGES[computation.kind][2], computation.stage)


def _message(placement: StagePlacement, computation: Action, maker: int, user: int) -> Message | None:
    if not placement.crosses(maker, user):
        return None
    send, receive, _ = _MESSAGES[computation.kind]
    return Message(
        Action(send, computation.micro_batch, maker),
        Action(receive, computation.micro_batch, user),
        placement.rank_of(maker),
        placement.rank_of(user),
    )


def sent_and_received(schedule: Schedule, rank: int) -> tuple[list[Message], list[Message]]:
    """Messages that a pipeline rank sends and those that it receives, each in program order."""
    placement, row = schedule.placement, schedule.actions[rank]
    made = {m.send: m for m in (message_from(placement, action) for action in row) if m is not None}
    used = {m.receive: m for m in (message_to(placement, action) for action in row) if m is not None}
    sent, received = ([of[action] for action in row if action in of] for of in (made, used))
    return sent, received


def acknowledged_sends(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    """Sends of a pipeline rank that are known to be complete once one of its receives is complete.

    Args:
        schedule: schedule of the step.
        rank: the pipeline rank.

    Returns:
        For each such receive of this rank, its sends to the same peer that the peer used before it sent the received
        message. Sends that no message of the peer follows are missing.
    """
    sent, received = sent_and_received(schedule, rank)
    found: dict[Action, list[Action]] = {}
    for peer in {message.receiver for message in sent}:
        row = schedule.actions[peer]
        uses = {m.receive: place for place, action in enumerate(row) if (m := message_to(schedule.placement, action))}
        places = {action: place for place, action in enumerate(row) if action.kind.sends}
        replies = [message for message in received if message.sender == peer]
        sent_at = [places[reply.send] for reply in replies]
        for message in sent:
            if message.receiver == peer:
                following = bisect_right(sent_at, uses[message.receive])
                if following < len(replies):
                    found.setdefault(replies[following].receive, []).append(message.send)
    return {receive: tuple(sends) for receive, sends in found.items()}
