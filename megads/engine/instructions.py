"""A schedule's actions as DeepSpeed instructions."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import OptimizerStep, PipeInstruction, PipeSchedule, ReduceGrads

from megads.parallel.pipeline_actions import Action, ActionKind, Schedule


class ActionInstruction(PipeInstruction):  # type: ignore[misc]
    """One action; its arguments are the micro-batch and the virtual stage."""


class Load(ActionInstruction):
    """Brings a micro-batch's tokens or labels to the device."""


class Forward(ActionInstruction):
    """Runs a stage forward."""


class Backward(ActionInstruction):
    """Runs a stage backward, gradients of inputs and weights together."""


class BackwardInput(ActionInstruction):
    """Runs a stage backward and puts off the gradients of its linear layers' weights."""


class BackwardWeight(ActionInstruction):
    """Computes the gradients that were put off."""


class SendActivation(ActionInstruction):
    """Starts to send a stage's output."""


class ReceiveActivation(ActionInstruction):
    """Starts to receive a stage's input, unless that has begun."""


class SendGradient(ActionInstruction):
    """Starts to send the gradient of a stage's input."""


class ReceiveGradient(ActionInstruction):
    """Starts to receive the gradient of a stage's output, unless that has begun."""


INSTRUCTIONS: dict[ActionKind, type[ActionInstruction]] = {
    ActionKind.load: Load,
    ActionKind.forward: Forward,
    ActionKind.backward: Backward,
    ActionKind.backward_input: BackwardInput,
    ActionKind.backward_weight: BackwardWeight,
    ActionKind.send_activation: SendActivation,
    ActionKind.receive_activation: ReceiveActivation,
    ActionKind.send_gradient: SendGradient,
    ActionKind.receive_gradient: ReceiveGradient,
}
FORWARD_KINDS = (ActionKind.load, ActionKind.forward, ActionKind.send_activation, ActionKind.receive_activation)
"""What is left of a step when nothing is trained."""


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backward passes: what waits for less cannot wait for ever."""
    rows = tuple(tuple(action for action in row if action.kind in FORWARD_KINDS) for row in schedule.actions)
    return Schedule(schedule.name, schedule.placement, schedule.micro_batches, rows)


class RankInstructions(PipeSchedule):  # type: ignore[misc]
    """What DeepSpeed executes on one pipeline rank in a step.

    Args:
        schedule: of all ranks.
        rank: the pipeline rank.
        trains: gradients are reduced and the optimizer steps in the end.
    """

    def __init__(self, schedule: Schedule, rank: int, *, trains: bool) -> None:
        super().__init__(schedule.micro_batches, schedule.placement.num_ranks, rank)
        self.actions: tuple[Action, ...] = schedule.actions[rank]
        self._trains = trains

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One list an action."""
        for action in self.actions:
            yield [INSTRUCTIONS[action.kind](micro_batch=action.micro_batch, stage=action.stage)]
        if self._trains:
            yield [ReduceGrads(), OptimizerStep()]

    def num_pipe_buffers(self) -> int:
        """None of DeepSpeed's: what a micro-batch leaves on a stage is kept under their numbers."""
        return 0
