"""DeepSpeed's own pipeline engine on megads' layers: PipelineModule, PipelineEngine and BF16_Optimizer (ZeRO-0 and 1).

DeepSpeed runs 1F1B, p2p communication, the backward pass, gradient accumulation and reduction, clipping, the optimizer
step and the all-gather of the updated weights. megads provides the layers, the partition into stages, the loss and the
micro-batches. Four things differ from a stock run:

- A layer also gets the BatchInfo of its micro-batch, which DeepSpeed does not send between stages.
- The last layer returns the loss: in bf16 DeepSpeed drops the gradients of layers that its loss_fn calls.
- `train_batch` ends after the last backward pass; `reduce` and `step` run the last instructions of the schedule,
  so that gradients can be checked in between.
- The gradients of tied weights are summed over their two stages after the reduction over data-parallel ranks. In
  DeepSpeed's order the copies drift apart with three or more data-parallel ranks: an all-reduce sums in an order that
  depends on the position in its buffer, which differs between the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megads.batch import BatchInfo, MicroBatch
from megads.engine.deepspeed_adapter import FlatPartitions, ZeroPiece, ZeroState, freeze_gc, zero_settings
from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import activation_shape
from megads.parallel.config import ParallelConfig, axis_ranks, place_of
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.pipeline_actions import ActionKind

TIED_KEY = "embedding"


class GridTopology(ProcessTopology):  # type: ignore[misc]
    """The process grid mapped to DeepSpeed's three axes; its data axis combines context and data parallelism.

    With a separate axis for context parallelism the gradient norm would be too large by a factor of sqrt(cp).
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        super().__init__(axes=["data", "pipe", "model"], dims=[parallel.dp * parallel.cp, parallel.pp, parallel.tp])
        self.mapping = {}
        for line in axis_ranks("data", parallel):
            for data, rank in enumerate(line):
                place = place_of(rank, parallel)
                self.mapping[self.ProcessCoord(data=data, pipe=place.pp, model=place.tp)] = rank


@dataclass
class CurrentBatch:
    """The micro-batch of the forward pass that runs now, for layers that DeepSpeed calls with activations only.

    Attributes:
        loss: loss of a micro-batch.
        info: description of the micro-batch.
        targets: labels and loss mask, [b, s] each; on the last stage.
    """

    loss: TokenMeanLoss
    info: BatchInfo = field(default_factory=lambda: BatchInfo(torch.zeros(0)))
    targets: tuple[Tensor, Tensor] | None = None


class PipelineLayer(nn.Module):
    """A layer as PipelineModule calls it: with the output of the previous one.

    Args:
        make: builds the layer.
        current: the micro-batch of the forward pass.
        is_head: whether this is the output projection, whose forward pass returns the loss. In DeepSpeed's loss_fn it
            would lose its gradient in bf16: DeepSpeed clears gradients when the backward pass enters the module, after
            the loss.
    """

    def __init__(self, make: Callable[[], nn.Module], current: CurrentBatch, *, is_head: bool) -> None:
        super().__init__()
        self.layer, self.is_head = make(), is_head
        self._current = current

    def forward(self, hidden: Tensor) -> Tensor:
        """Runs the layer on hidden, [b, t, h], or on tokens, [b, s]."""
        current = self._current
        if self.is_head:
            assert current.targets is not None
            return current.loss.of_head(self.layer, hidden, current.info, current.targets)
        output: Tensor = self.layer(hidden, current.info)
        return output

    @property
    def tied_weight(self) -> Tensor:
        """The weight that embedding and output projection share; DeepSpeed reads it by this name."""
        weight: Tensor = self.layer.weight if self.is_head else self.layer.word.weight  # type: ignore[union-attr, assignment]
        return weight


class LayerPipeline(PipelineModule):  # type: ignore[misc]
    """The layers of a pipeline rank, built by DeepSpeed from LayerSpec and TiedLayerSpec; megads decides the partition.

    Attributes:
        current: the micro-batch of the forward pass.
        layers: this rank's layers by their index in the model.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], nn.Module]],
        bounds: list[int],
        parallel: ParallelConfig,
        loss: TokenMeanLoss,
        *,
        tied: bool,
    ) -> None:
        """Builds this rank's layers.

        Args:
            makers: functions that build the layers of the model, in order; the first builds the embedding, the last the
                output projection.
            bounds: stage s holds layers bounds[s] to bounds[s + 1].
            parallel: the layout.
            loss: loss of a micro-batch.
            tied: whether embedding and output projection share their weight on two stages.
        """
        self._bounds, current = bounds, CurrentBatch(loss)
        specs = []
        for index, make in enumerate(makers):
            is_head = index == len(makers) - 1
            arguments = (PipelineLayer, make, current)
            if tied and index in (0, len(makers) - 1):
                specs.append(TiedLayerSpec(TIED_KEY, *arguments, tied_weight_attr="tied_weight", is_head=is_head))
            else:
                specs.append(LayerSpec(*arguments, is_head=is_head))
        super().__init__(specs, topology=GridTopology(parallel))
        self.current = current

    def _partition_layers(self, method: str = "") -> None:
        """See PipelineModule; replaces its partition by number of parameters."""
        self.parts = self._bounds
        rank = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[rank], stop=self.parts[rank + 1])

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():
            super()._synchronize_tied_weights()

    @property
    def layers(self) -> dict[int, nn.Module]:
        """This rank's layers, by their index in the model."""
        return {self._local_start + place: wrapper.layer for place, wrapper in enumerate(self.forward_funcs)}

    @property
    def tied_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline that hold a copy of the tied weight; empty if they are not two."""
        return tuple(self.tied_comms[TIED_KEY]["ranks"]) if TIED_KEY in self.tied_comms else ()

    @property
    def tied_group(self) -> Any:
        """Process group of `tied_ranks`."""
        return self.tied_comms[TIED_KEY]["group"]


def pipeline_settings(spec: EngineSpec, bucket_elements: int) -> dict[str, Any]:
    """Returns the DeepSpeed settings of ZeRO-0 and ZeRO-1, see `zero_settings`."""
    # Without sharding tensors over tensor-parallel ranks on the way between stages.
    whole = {"pipe_partitioned": False, "grad_partitioned": False}
    return zero_settings(spec, bucket_elements) | {"pipeline": whole}


class Bf16Partitions(FlatPartitions):
    """State of BF16_Optimizer: like ZeRO-2's, with fp32 gradients of all parameters on every rank."""

    @property
    def masters(self) -> list[Tensor]:
        """See ZeroState.masters."""
        return list(self._optimizer.fp32_groups_flat_partition)

    @property
    def parameters(self) -> list[list[Parameter]]:
        """See ZeroState.parameters."""
        return [list(group) for group in self._optimizer.bf16_groups]

    def gradients(self) -> list[Tensor]:
        """See ZeroState.gradients."""
        flat = self._optimizer.fp32_groups_gradient_flat_partition
        return [flat[piece.master].narrow(0, piece.start, piece.length) for piece in self.pieces()]

    def local_gradients(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yields every parameter of this rank with its fp32 gradient, accumulated over micro-batches."""
        for parameters, gradients in zip(
            self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients, strict=True
        ):
            yield from zip(parameters, gradients, strict=True)


class WholeParameters:
    """State of ZeRO-0 in fp32: every parameter is its own master weight, on every data-parallel rank.

    Args:
        optimizer: a torch optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def masters(self) -> list[Tensor]:
        """See ZeroState.masters; not flat."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def parameters(self) -> list[list[Parameter]]:
        """See ZeroState.parameters."""
        return [[master] for master in self.masters]  # type: ignore[list-item]

    def pieces(self) -> Iterator[ZeroPiece]:
        """See ZeroState.pieces."""
        for number, (parameter,) in enumerate(self.parameters):
            yield ZeroPiece(parameter, 0, number, 0, parameter.numel())

    def gradients(self) -> list[Tensor]:
        """See ZeroState.gradients."""
        return [_gradient_of(parameter).view(-1) for (parameter,) in self.parameters]

    def refresh_weights(self) -> None:
        """See ZeroState.refresh_weights; the weights are the masters."""


def _gradient_of(parameter: Parameter) -> Tensor:
    """The gradient of a parameter, zeros if no backward pass has set one."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


class _Passes(schedule.TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B without the reductions and the optimizer step at its end."""

    _LAST = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)

    def steps(self) -> Iterator[list[Any]]:
        for instructions in super().steps():
            yield [instruction for instruction in instructions if not isinstance(instruction, self._LAST)]


@dataclass
class Observer:
    """Called around DeepSpeed's instructions.

    Attributes:
        span: context manager that times an instruction, called with kind, micro-batch and stage.
        forward: called with the output of every forward pass, [b, t, h], or with the loss.
    """

    span: Callable[[str, int, int], Any]
    forward: Callable[[Tensor], None]


class DeepSpeedPipeline:
    """DeepSpeed's PipelineEngine, as `deepspeed.initialize` returns it, driven by megads' micro-batches.

    Attributes:
        module: this rank's layers.
        state: master weights and gradients.
        averaged_over: number by which DeepSpeed divides gradients.
    """

    _KINDS: ClassVar[Mapping[type, ActionKind]] = {
        schedule.LoadMicroBatch: ActionKind.load,
        schedule.ForwardPass: ActionKind.forward,
        schedule.BackwardPass: ActionKind.backward,
        schedule.SendActivation: ActionKind.send_activation,
        schedule.RecvActivation: ActionKind.receive_activation,
        schedule.SendGrad: ActionKind.send_gradient,
        schedule.RecvGrad: ActionKind.receive_gradient,
    }

    def __init__(
        self,
        module: LayerPipeline,
        optimizer: Optimizer,
        spec: EngineSpec,
        settings: dict[str, Any],
    ) -> None:
        """Casts the weights and wraps the optimizer.

        Args:
            module: this rank's layers.
            optimizer: optimizer of their parameters.
            spec: specification of the engine.
            settings: see `pipeline_settings`.
        """
        self.module, self._spec = module, spec
        self._stage = spec.grid.pp.rank
        self._micro_batches: Sequence[MicroBatch] = ()
        self._shape: tuple[int, ...] | None = None
        self.observer: Observer | None = None
        self._done: dict[ActionKind, int] = {}
        freeze_gc()
        self.engine: PipelineEngine = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]
        # The map belongs to the class: this object gets its own.
        self.engine._INSTRUCTION_MAP = {
            kind: self._observed(kind, run) for kind, run in PipelineEngine._INSTRUCTION_MAP.items()
        }
        self.engine._train_schedule = self._schedule
        self.state: ZeroState = self._make_state()
        self.averaged_over = spec.grid.data.size

    def _make_state(self) -> ZeroState:
        optimizer = self.engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            return Bf16Partitions(optimizer)
        return FlatPartitions(optimizer) if self._spec.parallel.zero_stage else WholeParameters(optimizer)

    @property
    def accumulates_in_bf16_optimizer(self) -> bool:
        """Whether BF16_Optimizer accumulates gradients; else autograd does, in fp32."""
        return isinstance(self.state, Bf16Partitions)

    @property
    def _is_zero1_in_fp32(self) -> bool:
        return isinstance(self.state, FlatPartitions) and not self.accumulates_in_bf16_optimizer

    def _schedule(self) -> schedule.TrainSchedule:
        return _Passes(len(self._micro_batches), self._spec.parallel.pp, self._stage)

    def _observed(self, kind: type, run: Callable[..., None]) -> Callable[..., None]:
        """Wraps DeepSpeed's handler of an instruction; instructions of a kind run in the order of micro-batches."""
        name = self._KINDS.get(kind)
        if name is None:
            return run

        def call(engine: PipelineEngine, buffer_id: int) -> None:
            number = self._done.get(name, 0)
            self._done[name] = number + 1
            if name is ActionKind.forward:
                self.module.current.info = self._micro_batches[number].info.to(self._spec.device)
                self.module.current.targets = engine.pipe_buffers["labels"][buffer_id]
            assert self.observer is not None
            with self.observer.span(name, number, self._stage):
                run(engine, buffer_id)
            if name is ActionKind.forward:
                is_last = engine.is_last_stage()
                self.observer.forward((engine.loss if is_last else engine.pipe_buffers["outputs"][buffer_id]).detach())

        return call

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> Iterator[tuple[Any, Any]]:
        """Prepares a call with new micro-batches; returns the data iterator."""
        self._micro_batches, self._done = micro_batches, dict[ActionKind, int]()
        self.engine.micro_batches = len(micro_batches)
        shapes = {activation_shape(batch, self._spec) for batch in micro_batches}
        # DeepSpeed sends the shape of activations only once, unless it is told that it changes.
        self.engine.dynamic_shape = len(shapes) > 1
        shape = max(shapes)
        if self.engine.dynamic_shape or shape != self._shape:
            self.engine.reset_activation_shape()
        self._shape = None if self.engine.dynamic_shape else shape
        return iter([(batch.tokens_bs, (batch.labels_bs, batch.loss_mask_bs)) for batch in micro_batches])

    def train(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Runs forward and backward passes of a step.

        Returns:
            The sum of the losses on the last stage.
        """
        self.engine.train_batch(self._begin(micro_batches))
        total: Tensor | None = self.engine.total_loss
        return total

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Runs forward passes without gradients.

        Returns:
            The sum of the losses on the last stage.
        """
        batches = self._begin(micro_batches)
        losses = self.engine.eval_batch(
            batches, reduce_output=None, bcast_loss=False, num_micro_batches=len(micro_batches)
        )
        return torch.stack(losses).sum() if losses else None

    def local_gradients(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Yields every parameter of this rank with its gradient, accumulated over micro-batches, before `reduce`."""
        if isinstance(self.state, Bf16Partitions):
            yield from self.state.local_gradients()
        else:
            for parameter in self.module.parameters():
                yield parameter, _gradient_of(parameter)

    def reduce(self) -> None:
        """Averages gradients over data-parallel ranks and sums those of the tied weight over its two stages."""
        if self._is_zero1_in_fp32:  # which leaves no whole gradient
            self.engine._exec_reduce_tied_grads()
            self.engine._exec_reduce_grads()
        else:
            self.engine._exec_reduce_grads()
            self.engine._exec_reduce_tied_grads()

    def step(self, learning_rate: float) -> None:
        """Clips the gradients and runs the optimizer step; BF16_Optimizer skips it if the norm is not finite."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        self.engine._exec_optimizer_step()

    def drop_gradients(self) -> None:
        """Drops the accumulated gradients."""
        self.engine.optimizer.zero_grad()
        if self._is_zero1_in_fp32:
            averaged = self.engine.optimizer.averaged_gradients
            for group in averaged:
                averaged[group] = None

    @property
    def norm(self) -> Tensor:
        """Global 2-norm of the last step's gradients before clipping, fp64 scalar; only of BF16_Optimizer."""
        norm = self.engine.get_global_grad_norm()
        return torch.as_tensor(norm, dtype=torch.float64, device=self._spec.device).detach()

    @property
    def skipped(self) -> bool:
        """Whether BF16_Optimizer skipped the last step because of a gradient norm that is not finite."""
        return self.accumulates_in_bf16_optimizer and bool(self.engine.optimizer.overflow)
