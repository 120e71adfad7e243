"""Hook protocol of the training loop, and spans: timed actions of a rank within a step. Does not import torch.

Each hook is defined in the package that it belongs to.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass
class TrainState:
    """Counters of the training loop.

    Attributes:
        step: number of completed optimizer steps, skipped ones included.
        samples: number of samples consumed.
        tokens: number of unmasked tokens consumed.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.samples, self.tokens = state["step"], state["samples"], state["tokens"]


@dataclass(frozen=True)
class StepInfo:
    """Results of one step; the same on every rank except for the timings.

    Attributes:
        step, samples, tokens: counters after the step.
        loss: mean loss over the unmasked tokens of the step, in nats.
        grad_norm: global L2 norm of the gradient before clipping.
        lr: learning rate of the step.
        global_batch_size: number of samples in the step.
        seq_len: tokens per sample.
        step_time_s: wall time of the step, including waiting for data.
        data_time_s: part of step_time_s spent waiting for data.
        skipped: whether the step was skipped as non-finite, leaving the weights unchanged.
        culprit: rank that made the step non-finite, as text; empty if the step was not skipped.
        batch_hash: hash of which text the step's samples are, over all ranks (`megads.data.sampling`).
        last: whether the loop ends after this step.
        stop_reason: why the loop ends early; empty at the planned end.
        ends_phase: whether this is the last step of a training phase that is followed by another.
        save_due: whether it is time to save (checkpoint.every_minutes).
    """

    step: int
    samples: int
    tokens: int
    loss: float
    grad_norm: float
    lr: float
    global_batch_size: int
    seq_len: int
    step_time_s: float
    data_time_s: float
    skipped: bool
    culprit: str
    batch_hash: str
    last: bool = False
    stop_reason: str = ""
    ends_phase: bool = False
    save_due: bool = False

    @property
    def ends_stage(self) -> bool:
        """Former name of ends_phase, for plugins."""
        return self.ends_phase


class Hook(Protocol):
    """Hook called on every rank, in registration order; it may use collectives if all ranks do.

    Methods that a subclass does not define do nothing.
    """

    def on_start(self, state: TrainState) -> None: ...

    def on_step(self, info: StepInfo) -> None: ...

    def on_end(self, state: TrainState) -> None: ...


@dataclass(frozen=True)
class Span:
    """One timed action of a rank.

    Attributes:
        kind: action of the pipeline schedule, or work after the schedule; a receive is the wait for it.
        micro_batch: index of the micro-batch; None for actions on all of them.
        stage: index of the virtual stage; None for actions on all of them.
        start_s: start in seconds: as measured, on the rank's monotonic clock; when ranks are compared, relative to the
            first action of any rank in the step.
        end_s: end in seconds, likewise.
    """

    kind: str
    micro_batch: int | None
    stage: int | None
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        """For example `forward 3`."""
        words = self.kind.replace("_", " ")
        return words if self.micro_batch is None else f"{words} {self.micro_batch}"
