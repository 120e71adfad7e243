"""What pipeline schedules are made of: actions, the placement of virtual stages, and a schedule of one step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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

    @property
    def computes(self) -> bool:
        """Whether it runs layers, rather than moves data."""
        return self in _COMPUTATIONS

    @property
    def sends(self) -> bool:
        """Whether it hands a tensor to another rank."""
        return self in (ActionKind.send_activation, ActionKind.send_gradient)

    @property
    def receives(self) -> bool:
        """Whether it takes a tensor from another rank."""
        return self in (ActionKind.receive_activation, ActionKind.receive_gradient)


_COMPUTATIONS = (
    ActionKind.forward,
    ActionKind.backward,
    ActionKind.backward_input,
    ActionKind.backward_weight,
)


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

    def crosses(self, stage: int, other: int) -> bool:
        """Whether what passes between two stages is a message; False where there is no such stage."""
        there = 0 <= stage < self.num_stages and 0 <= other < self.num_stages
        return there and self.ranks[stage] != self.ranks[other]


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
    placement: StagePlacement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
