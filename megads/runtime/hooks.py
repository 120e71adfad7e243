"""Hook protocol of the training loop, and spans: timed actions of a rank within a step. Does not import torch.

Each hook is defined in the package that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
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


CAPACITY_SUMMARY = 3
"""Numbers about the capacity of a layer's experts: `ExpertStatistics.dropped`, `capacity_needed` and `fullest`."""


@dataclass(frozen=True)
class ExpertStatistics:
    """Routing of the tokens of one step in all layers with experts, by layer; the same on every rank.

    Attributes:
        layers: indices of the layers in the model, ascending.
        counts: number of tokens of every expert of each layer; a token counts once for each of its experts.
        balance_loss: balance loss per token of each layer, with its weights.
        z_loss: z-loss of the router per token, with its weight.
        entropy: mean entropy of the router's scores, normalized to sum to 1, in nats; at most log(number of experts).
        dropped: rows beyond the capacity of each layer's experts; empty without model.moe.capacity_factor.
        capacity_needed: capacity_factor that would have held all rows of each layer; likewise.
        fullest: expert of each layer that needed it; likewise.
        recomputed: whether the step was computed again, as rows were beyond the capacity; the other attributes are
            those of the second computation, in which no row is dropped.
    """

    layers: tuple[int, ...]
    counts: tuple[tuple[float, ...], ...]
    balance_loss: tuple[float, ...]
    z_loss: tuple[float, ...]
    entropy: tuple[float, ...]
    dropped: tuple[float, ...] = ()
    capacity_needed: tuple[float, ...] = ()
    fullest: tuple[int, ...] = ()
    recomputed: bool = False

    @classmethod
    def from_sums(
        cls, layers: Sequence[int], top_k: int, rows: Sequence[Sequence[float]], *, capacity: bool = False
    ) -> ExpertStatistics:
        """Converts sums over the tokens of a step.

        Args:
            layers: indices of the layers.
            top_k: experts of a token.
            rows: of each layer: the counts of all experts, followed by balance loss, z-loss and entropy, and by the
                CAPACITY_SUMMARY if experts have a capacity.
            capacity: whether they have.
        """
        of_capacity: list[tuple[float, ...]] = [(), (), ()]
        if capacity:
            of_capacity = [tuple(row[at - CAPACITY_SUMMARY] for row in rows) for at in range(CAPACITY_SUMMARY)]
            rows = [row[:-CAPACITY_SUMMARY] for row in rows]
        counts = tuple(tuple(row[:-3]) for row in rows)
        tokens = [max(sum(of_layer) / top_k, 1.0) for of_layer in counts]
        balance, z_loss, entropy = (
            tuple(row[at] / number for row, number in zip(rows, tokens, strict=True)) for at in (-3, -2, -1)
        )
        dropped, needed, fullest = of_capacity
        experts = tuple(map(int, fullest))
        return cls(tuple(layers), counts, balance, z_loss, entropy, dropped, needed, experts)

    @property
    def max_loads(self) -> list[float]:
        """Tokens of the busiest expert of each layer, divided by the mean over its experts; 1 is perfect balance."""
        return [max(of_layer) * len(of_layer) / max(sum(of_layer), 1.0) for of_layer in self.counts]

    @property
    def dead(self) -> list[list[int]]:
        """The experts of each layer that got no token."""
        return [[expert for expert, count in enumerate(of_layer) if not count] for of_layer in self.counts]

    def summary(self) -> dict[str, float]:
        """Metrics of the step: the largest load and mean entropy of all layers, their dead experts and losses added;
        with a capacity the largest factor needed, whether the step was computed again, and rows dropped."""
        capacity: dict[str, float] = {}
        if self.capacity_needed:
            capacity = {
                "moe/capacity_needed": max(self.capacity_needed),
                "moe/recomputed": int(self.recomputed),
                "moe/dropped_rows": sum(self.dropped),
            }
        return capacity | {
            "moe/max_load": max(self.max_loads),
            "moe/dead_experts": sum(map(len, self.dead)),
            "moe/router_entropy": sum(self.entropy) / len(self.entropy),
            "moe/balance_loss": sum(self.balance_loss),
            "moe/z_loss": sum(self.z_loss),
        }


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
        experts: routing of the step's tokens; None for a model without experts.
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
    experts: ExpertStatistics | None = None

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
