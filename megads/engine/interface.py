"""What the loop, the checkpoints and the resilience rooms see of an engine: one interface, no deepspeed in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megads.batch import MicroBatch
from megads.model.config import ModelConfig
from megads.model.gpt import InitialValue, initial_value
from megads.ops.config import TORCH, Kernels
from megads.optim.config import OptimConfig
from megads.parallel.compute_trace import Difference
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.token_scores import RowScores
from megads.runtime.span import Span


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from.

    Attributes:
        model: the model's shape.
        parallel: the layout, checked.
        optim: the optimizer.
        grid: the ranks of the layout.
        precision: dtype of weights and activations.
        micro_batch_size: samples in one forward pass.
        seed: of initial weights and dropout.
        device: where this rank computes.
        value: initial weights; None is `megads.model.gpt.initial_value`.
        draws: weights get their initial values; else they are 0 until `TrainEngine.load_shards` gives all of them.
        kernels: which implementation computes each operator, as `megads.ops.resolve.load` has made them ready.
        deepspeed: extra DeepSpeed settings of ZeRO-2 and ZeRO-3, checked.
        z_loss: weight of the z-loss, see `megads.parallel.loss`.
    """

    model: ModelConfig
    parallel: ParallelConfig
    optim: OptimConfig
    grid: ParallelGrid
    precision: torch.dtype
    micro_batch_size: int
    seed: int
    device: torch.device
    value: InitialValue | None = None
    draws: bool = True
    kernels: Kernels = TORCH
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    z_loss: float = 0.0

    @property
    def initial_value(self) -> InitialValue | None:
        """Initial weights; None where they are not drawn."""
        if not self.draws:
            return None
        return self.value or initial_value(self.model, self.seed)


@dataclass(frozen=True)
class Culprit:
    """Who made a step non-finite.

    Attributes:
        rank: global rank that went non-finite first in the order of computation.
        where: "weights", "forward" or "backward".
        parameters: up to eight names of local parameters whose weight or gradient is not finite.
    """

    rank: int
    where: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f" ({', '.join(self.parameters)})" if self.parameters else ""
        return f"rank {self.rank} in its {self.where}{names}"


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on every rank.

    Attributes:
        loss: mean over the unmasked tokens of the global batch, in nats.
        tokens: unmasked tokens of the global batch.
        grad_norm: global 2-norm before clipping; inf when skipped.
        skipped: True when a non-finite gradient left weights and optimizer untouched.
        culprit: set when skipped.
    """

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool = False
    culprit: Culprit | None = None


class ComputeComparison(NamedTuple):
    """Four computations of one rank's samples in a step: by its peer, by itself, and both once more.

    Attributes:
        rank: whose samples they are.
        peer: the other rank that computed them; the rank itself if no other one holds the same weights.
        coordinates: pipeline and data-parallel rank. Ranks of the same coordinates run the same collectives in the same
            order, so the indices of their traces are comparable.
        by_rank: how the two computations of the rank differ; None: they do not.
        by_peer: how the two computations of the peer differ.
        across: how the last computations of the two differ.
    """

    rank: int
    peer: int
    coordinates: tuple[int, int]
    by_rank: Difference | None
    by_peer: Difference | None
    across: Difference | None


class ComputeCheck(Protocol):
    """Decides which steps are computed twice, and what happens if the two differ; the same on every rank."""

    def is_due(self) -> bool:
        """Whether the next step is computed twice whatever its loss and gradient norm."""
        ...

    def suspects(self, loss: float, grad_norm: float) -> bool:
        """Whether a step of this loss and gradient norm is computed again before it changes the weights."""
        ...

    def judge(self, comparisons: list[ComputeComparison]) -> None:
        """Called with the comparisons of all ranks when computations differ; raises if training must end."""
        ...

    def report_suspicious(self, first: tuple[float, float], again: tuple[float, float], ranks: list[int]) -> None:
        """Called when a suspicious step has been computed again.

        Args:
            first: the suspicious loss and gradient norm.
            again: loss and gradient norm of the last computation, which is applied.
            ranks: whose own gradients, before any reduction, differ between the two.
        """
        ...


@dataclass(frozen=True)
class EvaluationResult:
    """Sum over all ranks of the micro-batches given to one `evaluate` call."""

    loss_sum: float
    tokens: int

    @classmethod
    def of(cls, shared: Tensor) -> EvaluationResult:
        """From [loss, tokens] on a device; waits for it."""
        loss_sum, tokens = shared.tolist()
        return cls(loss_sum, int(tokens))


@dataclass(frozen=True)
class Shard:
    """A rectangle of one named global tensor, held by this rank.

    Attributes:
        key: "<kind>/<parameter name>", kind one of "weight" (fp32 master), "exp_avg", "exp_avg_sq" or what another
            optimizer keeps, "average" (the running average of the weights), and "gradient" for those that are watched.
        global_shape: shape of the unsharded tensor, vocabulary padding excluded.
        offset: where the rectangle starts in it, one entry per dim.
        tensor: the values, fp32, a view into the optimizer's memory, shaped as the rectangle.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Replica:
    """A tensor of this rank that other ranks may hold, too.

    Attributes:
        key: "<kind>/<parameter name>", kind as in Shard, or "working_weight" for what layers compute with.
        tensor: the values, flat and contiguous, a view.
        lines: ranks that must hold the same bits: along "data", "replica" or "tp", or the "pair" of a tied embedding.
    """

    key: str
    tensor: Tensor
    lines: Mapping[str, Axis] = field(default_factory=dict)


class TrainEngine(Protocol):
    """One training engine, driven identically on every rank."""

    device: torch.device
    grid: ParallelGrid

    @property
    def bounds(self) -> list[int]:
        """Virtual stage s of the pipeline holds the model's stages bounds[s] to bounds[s + 1]."""
        ...

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Runs forward, backward, reduction and optimizer over this rank's micro-batches of one global batch.

        They hold whole samples, the same on all context ranks of a data-parallel rank; the engine cuts them.
        """
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """Sums the loss without dropout or gradients; every rank gets the total over all ranks."""
        ...

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """Like `evaluate`, with a sum for each position id.

        Args:
            micro_batches: of this rank.
            positions: number of position ids; larger than any that occurs.

        Returns:
            fp64 [2, positions] on the CPU, the same on every rank: the sum of the losses in nats, and the tokens.
        """
        ...

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """Scores every unmasked label without dropout; every rank gets the scores of all ranks' rows.

        Args:
            micro_batches: of this rank, as in `evaluate`, all rows of one length. Their sample_ids number the rows of
                all ranks from 0.
            num_rows: rows of this number and above are padding.
        """
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """While it is open, the working weights are the running averages (optim.ema_decay), for `evaluate` and `score`;
        afterwards they are bit for bit what they were. Collective; nothing is trained or saved inside. Where what is
        inside raises, no rank waits for another, and the weights are left as they are.
        """
        ...

    def named_shards(self, owned: bool = True) -> list[Shard]:
        """This rank's optimizer state as rectangles of global tensors.

        Args:
            owned: True leaves out copies that another rank also holds (replicated over TP, tied over stages), so
                that the union over ranks covers every tensor exactly once; False lists all this rank holds.
        """
        ...

    def replicas(self) -> list[Replica]:
        """Working weights and optimizer state of this rank, and the ranks that must hold the same bits (N8). The order
        is the same on all ranks of a line. Under ZeRO-3 there are no working weights."""
        ...

    def stale_weights(self) -> list[str]:
        """Names of the parameters whose working weights on this rank are not its master weights, rounded, bit for bit.
        Empty under ZeRO-3, which has no working weights."""
        ...

    def watch_gradients(self, watch: Callable[[list[Shard]], None]) -> None:
        """Calls `watch` once, in the next step, with this rank's reduced gradients: before their norm is computed and
        they are clipped. If the step is computed several times (check_compute), these are the gradients that are
        applied. Several callers may watch the same step.

        Args:
            watch: gets owned shards of kind "gradient", fp32; they are views that the step overwrites, so copy what is
                to be kept.
        """
        ...

    def before_update(self, wait: Callable[[], None] | None) -> None:
        """Calls `wait` in every following step before the optimizer's state changes; it returns when the state may
        change. None ends the calls."""
        ...

    def watch_activations(self, watch: Callable[[str, Tensor], None] | None) -> None:
        """Calls `watch` in every following training forward pass with the name and the output of each layer of this
        rank, but the head.

        Args:
            watch: gets this rank's share of the output, [b, t, h], detached; do not keep it: its memory is reused. None
                ends the calls.
        """
        ...

    def rerun_nonfinite(self, note: Callable[[StepResult, StepResult], None] | None) -> None:
        """Computes every step that is not finite once more, from the same weights and micro-batches: its update was
        skipped. The second result is that of the step. Finite steps do not wait for the device, unlike `check_compute`.

        Args:
            note: called with both results. None ends the reruns.
        """
        ...

    def check_compute(self, check: ComputeCheck | None) -> None:
        """Computes the steps that the check chooses at least twice before the weights change, and compares bit for bit
        what each rank computed. The last computation is applied; it equals that of an unchecked step bit for bit. None
        ends the checks.
        """
        ...

    def watch_spans(self, watch: Callable[[list[Span]], None]) -> None:
        """Times the next step, and calls `watch` at its end with what this rank did in it. Several callers may watch
        the same step."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Steps the optimizer has taken; skipped ones are not counted."""
        ...

    def load_shards(self, fill: Callable[[list[Shard]], None], optimizer_steps: int) -> None:
        """Lets `fill` write into every shard this rank holds, then derives the working weights from the masters."""
        ...
