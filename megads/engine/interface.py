"""The interface of a training engine to the training loop, checkpoints and resilience; does not import DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megads.batch import MicroBatch
from megads.model.config import ModelConfig
from megads.model.gpt import InitialValue, initial_value
from megads.ops.config import TORCH, Float8, Kernels
from megads.optim.config import OptimConfig
from megads.parallel.config import EngineKind, ParallelConfig
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.token_scores import RowScores
from megads.runtime.hooks import ExpertStatistics, Span


@dataclass(frozen=True)
class EngineSpec:
    """Everything needed to build an engine.

    Attributes:
        model: model architecture.
        parallel: parallel layout, checked.
        optim: optimizer config.
        grid: ranks of the layout.
        precision: dtype of weights and activations.
        micro_batch_size: samples in one forward pass.
        seed: seed of initial weights and dropout.
        device: device of this rank.
        value: initial weights; None is `megads.model.gpt.initial_value`.
        draws: whether weights are initialized; else they are 0 until `TrainEngine.load_shards` loads all of them.
        kernels: implementation of each operator, as loaded by `megads.ops.resolve.load`.
        engine: native or deepspeed, see `megads.parallel.config.resolve_engine`; ZeRO-2 and 3 always use DeepSpeed.
        deepspeed: extra DeepSpeed settings for DeepSpeed's engines, checked.
        z_loss: weight of the z-loss, see `megads.parallel.loss`.
        float8: which linear layers multiply in FP8; native engine only.
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
    engine: EngineKind = EngineKind.native
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    z_loss: float = 0.0
    float8: Float8 = field(default_factory=Float8)

    @property
    def initial_value(self) -> InitialValue | None:
        """Initial weights; None if weights are not initialized."""
        if not self.draws:
            return None
        return self.value or initial_value(self.model, self.seed)


@dataclass(frozen=True)
class PassTimes:
    """Times of this rank's passes of a micro-batch, with and without launches, in milliseconds.

    Attributes:
        micro_batches: micro-batches of a step on this rank.
        host_ms: time that the host takes to launch forward and backward pass.
        device_ms: time that the device takes for both if it does not wait for launches: of replayed CUDA graphs. None
            if they were not captured.
        reduce_ms: time of the gradient reduction, which cannot be overlapped with captured passes; 0 on a single
            data-parallel rank.
        failure: why the passes were not captured; empty if they were.
    """

    micro_batches: int
    host_ms: float
    device_ms: float | None
    reduce_ms: float = 0.0
    failure: str = ""


@dataclass(frozen=True)
class Culprit:
    """The rank that made a step non-finite.

    Attributes:
        rank: first global rank, in the order of computation, with a non-finite value.
        where: "weights", "forward", "backward" or "gradient norm".
        parameters: names of up to eight local parameters whose weight or gradient is not finite.
    """

    rank: int
    where: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f" ({', '.join(self.parameters)})" if self.parameters else ""
        return f"rank {self.rank} in its {self.where}{names}"


@dataclass(frozen=True)
class StepResult:
    """Result of one training step, the same on every rank.

    Attributes:
        loss: mean over the unmasked tokens of the global batch, in nats.
        tokens: unmasked tokens of the global batch.
        grad_norm: global 2-norm of the gradients before clipping; inf if the step was skipped.
        skipped: True if the step was skipped because of a non-finite gradient; weights and optimizer are unchanged.
        culprit: rank that made the step non-finite; set if the step was skipped.
        experts: routing of the step's tokens; None for a model without experts.
    """

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool = False
    culprit: Culprit | None = None
    experts: ExpertStatistics | None = None


@dataclass(frozen=True)
class StepPasses:
    """The forward and backward passes of one step, as a StepCheck runs them.

    Attributes:
        micro_batches: micro-batches of this rank, with whole samples.
        layers: layers of this rank, with their names in the whole model.
        run: runs the passes as in an unchecked step.
        run_alone: runs the passes of any micro-batches with whole samples, and reduces no gradient meanwhile.
        forget: discards the gradients that were accumulated and not reduced.
        reduce: reduces the accumulated gradients; the update of the step applies them.
        outcome: the same, and returns loss and gradient norm of the step; synchronizes with the device.
        own_norms: 2-norms of this rank's gradients before the reduction.

    `run` and `run_alone` return the sum of the losses on ranks of the last stage, which `outcome` takes.
    """

    micro_batches: Sequence[MicroBatch]
    layers: Sequence[tuple[str, nn.Module]]
    run: Callable[[], Tensor | None]
    run_alone: Callable[[Sequence[MicroBatch]], Tensor | None]
    forget: Callable[[], None]
    reduce: Callable[[], None]
    outcome: Callable[[Tensor | None], tuple[float, float]]
    own_norms: Callable[[], list[float]]


class StepCheck(Protocol):
    """Runs the passes of each step in place of the engine, some of them several times; the same on every rank."""

    def compute(self, step: StepPasses) -> Tensor | None:
        """Runs the passes and reduces the gradients; returns the sum of the losses on ranks of the last stage.

        Raises:
            UnhealthyNode: training must not continue.
        """
        ...


@dataclass(frozen=True)
class EvaluationResult:
    """Sum of losses and number of tokens over the micro-batches of all ranks in one `evaluate` call."""

    loss_sum: float
    tokens: int

    @classmethod
    def from_tensor(cls, shared: Tensor) -> EvaluationResult:
        """Converts [loss, tokens] on a device; synchronizes with the device."""
        loss_sum, tokens = shared.tolist()
        return cls(loss_sum, int(tokens))


@dataclass(frozen=True)
class Shard:
    """A rectangle of one named global tensor, held by this rank.

    Attributes:
        key: "<kind>/<parameter name>"; kind is "weight" (fp32 master weight), "exp_avg", "exp_avg_sq" or another
            optimizer's state, "average" (running average of the weights), or "gradient" in `watch_gradients`.
        global_shape: shape of the unsharded tensor, vocabulary padding excluded.
        offset: start of the rectangle in the global tensor, one entry per dim.
        tensor: fp32 values in the shape of the rectangle, a view into the optimizer's memory.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Replica:
    """A tensor of this rank that other ranks may also hold.

    Attributes:
        key: "<kind>/<parameter name>"; kind as in Shard, or "working_weight" for the weights that layers compute with.
        tensor: the values, a flat and contiguous view.
        lines: groups of ranks that must hold the same bits, by name: the axes "data", "expert_data", "replica" and
            "tp", and the "pair" of a tied embedding.
    """

    key: str
    tensor: Tensor
    lines: Mapping[str, Axis] = field(default_factory=dict)


class TrainEngine(Protocol):
    """A training engine; every rank makes the same calls in the same order."""

    device: torch.device
    grid: ParallelGrid

    @property
    def bounds(self) -> list[int]:
        """Pipeline partition: virtual stage s holds the model's layers bounds[s] to bounds[s + 1]."""
        ...

    def layers(self) -> Iterable[tuple[str, nn.Module]]:
        """The layers of this rank, with their names in the whole model, such as `blocks.3`.

        With parallel.overlap_param_gather the weights of a layer are NaN from the update of a step until the layer runs
        in the next one: read them in hooks of the layer, or after `replicas`, which waits on all ranks.
        """
        ...

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """Runs forward and backward passes, gradient reduction and the optimizer on this rank's part of a global batch.

        Micro-batches hold whole samples, the same on all context-parallel ranks of a data-parallel rank; the engine
        splits them.
        """
        ...

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """Computes the sum of the losses without dropout or gradients; every rank gets the total over all ranks."""
        ...

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """Like `evaluate`, with a separate sum for each position id.

        Args:
            micro_batches: micro-batches of this rank.
            positions: number of position ids; larger than any that occurs.

        Returns:
            fp64 [2, positions] on the CPU, the same on every rank: sum of the losses in nats, and number of tokens.
        """
        ...

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """Scores every unmasked label without dropout; every rank gets the scores of all ranks' rows.

        Args:
            micro_batches: micro-batches of this rank, as in `evaluate`, with rows of equal length. Their sample_ids
                number the rows of all ranks from 0.
            num_rows: number of real rows; rows with this id or a higher one are padding.
        """
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the working weights are the running averages (optim.ema_decay), for `evaluate` and
        `score`.

        On exit the working weights are restored bit for bit. Collective; do not train or save inside. After an
        exception inside, no rank waits for another, and the weights are not restored.
        """
        ...

    def named_shards(self, owned: bool = True) -> list[Shard]:
        """This rank's optimizer state as rectangles of global tensors.

        Args:
            owned: True omits copies that another rank owns (replicated over TP, tied over stages), so that the union
                over ranks covers every tensor exactly once; False lists everything that this rank holds.
        """
        ...

    def replicas(self) -> list[Replica]:
        """Working weights and optimizer state of this rank, and the ranks that must hold the same bits (N8). The order
        is the same on all ranks of a group. ZeRO-3 has no working weights."""
        ...

    def stale_weights(self) -> list[str]:
        """Names of the parameters whose working weights on this rank differ in any bit from the rounded master weights.
        Empty under ZeRO-3, which has no working weights."""
        ...

    def watch_gradients(self, watch: Callable[[list[Shard]], None]) -> None:
        """Calls `watch` once, in the next step, with this rank's reduced gradients, before the norm and clipping.

        If the step is computed several times (check_compute), these are the gradients that are applied. Several
        callers may watch the same step.

        Args:
            watch: called with the owned fp32 shards of kind "gradient". They are views that the step overwrites; copy
                them to keep them.
        """
        ...

    def before_update(self, wait: Callable[[], None] | None) -> None:
        """Calls `wait` in every following step before the optimizer's state changes; `wait` blocks until the state may
        change. None removes it."""
        ...

    def watch_activations(self, watch: Callable[[str, Tensor], None] | None) -> None:
        """Calls `watch` in every following training forward pass with the name and the output of each layer of this
        rank, except the head.

        Args:
            watch: called with the layer's name and this rank's part of the output, [b, t, h], detached. Do not keep
                the tensor; its memory is reused. None removes the callback.
        """
        ...

    def rerun_nonfinite(self, note: Callable[[StepResult, StepResult], None] | None) -> None:
        """Recomputes every following non-finite step once, from the same weights and micro-batches.

        The update of the first computation was skipped; the second one is the result of the step. Unlike
        `check_compute`, this adds no device synchronization to finite steps.

        Args:
            note: called with both results. None disables reruns.
        """
        ...

    def check_compute(self, check: StepCheck | None) -> None:
        """Lets `check` run the passes of every following step, and apply the result of which it is sure. A result of
        `StepPasses` is bitwise identical to that of an unchecked step. None disables the checks."""
        ...

    def watch_spans(self, watch: Callable[[list[Span]], None]) -> None:
        """Times the next step, and calls `watch` at its end with the spans of this rank. Several callers may watch the
        same step."""
        ...

    def choose_cuda_graphs(self, choose: Callable[[PassTimes], bool]) -> None:
        """Under ops.cuda_graphs=auto, times passes in eager mode and as CUDA graphs, and lets `choose` decide how the
        following steps run.

        Call it after every step, on all ranks: it measures after the last step that runs without graphs anyway. Weights
        and optimizer state do not change.

        Args:
            choose: called with the times on this rank; returns whether to use the graphs, the same on all ranks, and
                never if any of them has no graphs.
        """
        ...

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps taken, skipped steps excluded."""
        ...

    def load_shards(self, fill: Callable[[list[Shard]], None], optimizer_steps: int) -> None:
        """Calls `fill` to write every shard that this rank holds, then derives the working weights from the master
        weights."""
        ...
