"""The protocol between the loop and everything that watches it. Each hook lives with its owner."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol


@dataclass
class TrainState:
    """The loop's only counters.

    Attributes:
        step: optimizer steps done, skipped ones included.
        samples: samples consumed.
        tokens: unmasked tokens consumed.
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
    """What one step did; the same on every rank but for the timings.

    Attributes:
        step, samples, tokens: the state after the step.
        loss: mean over the step's unmasked tokens, nats.
        grad_norm: global 2-norm before clipping.
        lr: learning rate of the step.
        global_batch_size: samples in the step.
        seq_len: tokens a sample.
        step_time_s: wall time of the step, data waiting included.
        data_time_s: share of it spent waiting for data.
        skipped: a non-finite step that changed no weight.
        culprit: who made it so, as text; empty otherwise.
        batch_hash: hash of the step's global sample ids.
        last: the loop ends after this step.
        stop_reason: why it ends early; empty at the planned end.
        ends_stage: it is the last step of a training stage that another one follows.
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
    ends_stage: bool = False


class Hook(Protocol):
    """Called on every rank, in the order of registration; a hook may use collectives if it does so on all ranks.

    A subclass inherits the methods that it leaves out; they do nothing.
    """

    def on_start(self, state: TrainState) -> None: ...

    def on_step(self, info: StepInfo) -> None: ...

    def on_end(self, state: TrainState) -> None: ...
