"""megads' own training engine: ZeRO-0 and ZeRO-1, any pipeline schedule, on this rank's virtual stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megads.batch import BatchInfo, MicroBatch, copy_to
from megads.engine.bucket import gradient_of
from megads.engine.deepspeed_adam import deepspeed_adamw
from megads.engine.expert_balance import ExpertBalance
from megads.engine.interface import Culprit, EngineSpec, PassTimes, Replica, StepResult
from megads.engine.micro_batch_graphs import EAGER_STEPS, MicroBatchGraphs, time_passes, use_side_stream
from megads.engine.optimizer import BucketOptimizer
from megads.engine.p2p import P2PCommunicator
from megads.engine.stage_pipeline import StagePipeline, activation_shape
from megads.engine.train_engine import (
    BaseTrainEngine,
    StateTensors,
    agree_on_culprit,
    finite_weights_by_expert,
    name_with_experts,
    not_finite,
    replica_groups,
    same_bits,
)
from megads.engine.warm_up import WarmUp
from megads.model.gpt import layer_specs
from megads.model.sharding import fused_rows
from megads.parallel.grid import ParallelGrid
from megads.parallel.message_order import add_communication
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule
from megads.parallel.sharding import placement_of
from megads.parallel.weight_gradients import DeferredWgrads, WeightGradients, split_backward
from megads.runtime.hooks import ExpertStatistics

Key = tuple[int, int]
"""Micro-batch index and virtual stage."""


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the schedule of an evaluation: the forward passes in the same order, and their messages."""
    rows = [[action for action in row if action.kind is ActionKind.forward] for row in schedule.actions]
    return replace(schedule, actions=add_communication(schedule.placement, rows))


def cast_weights(module: nn.Module, precision: torch.dtype) -> None:
    """Casts the parameters in place; buffers, such as the frequencies of rotary embeddings, keep their dtype."""
    for parameter in module.parameters():
        if parameter.requires_grad:  # a router's own state stays in fp32
            parameter.data = parameter.data.to(precision)


def broadcast_weights(module: nn.Module, grid: ParallelGrid) -> None:
    """Broadcasts the parameters, as bytes, from the first of the ranks that hold the same weights; collective."""
    for parameter in module.parameters():
        replicas = grid.expert_data if placement_of(parameter).expert else grid.data
        if replicas.size > 1:
            dist.broadcast(parameter.data.view(torch.uint8), replicas.ranks[0], replicas.group)


def make_bucket_optimizer(module: StagePipeline) -> BucketOptimizer:
    """Builds the optimizer of a rank's stages, whose weights have their final dtype.

    Raises:
        ConfigError: DeepSpeed's kernels are configured and cannot be compiled or loaded.
    """
    spec = module.spec
    width_scale = spec.model.width_scale(muon=spec.optim.is_muon)
    rule = deepspeed_adamw(spec.optim, spec.device)
    named, fused = module.trained_parameters(), fused_rows(spec.model)
    return BucketOptimizer(named, spec.optim, spec.parallel, spec.grid, spec.kernels, fused, width_scale, rule)


@dataclass
class InFlight:
    """State of a micro-batch on a virtual stage between its forward and its backward pass.

    Attributes:
        input: input of the stage; holds its gradient after the backward pass.
        root: start of the backward pass: the loss, or the gradient edge of the output, whose values are not kept.
        buffer: receive buffer of the input; None if the input was computed on this rank.
    """

    input: Tensor
    root: Tensor | GradientEdge
    buffer: Tensor | None


@dataclass
class DeferredBackward:
    """Deferred part of a split backward pass: weight gradients, and the p2p receive buffers that they read."""

    gradients: DeferredWgrads
    buffers: list[Tensor]


class NativeEngine(BaseTrainEngine):
    """TrainEngine for ZeRO-0 and ZeRO-1: runs any schedule of `megads.parallel.schedule` on a rank's virtual stages.

    Losses, activations and gradients are stored by micro-batch and stage. P2p communication is asynchronous. Every
    stage gets the BatchInfo of its MicroBatch. Gradient reduction is overlapped with the last backward pass, and the
    all-gather of new weights with the next forward pass (parallel.overlap_param_gather): whatever else reads weights
    first calls `finish_gathers` of the optimizer. Each rank records where non-finite values appear.

    Args:
        spec: specification of the engine.

    Attributes:
        module: this rank's stages.
        optimizer: optimizer of their parameters.
        warm_up: runs the passes of new shapes before the first message of a step.
        total_loss: sum of the losses of the last step or evaluation; None on ranks without the last stage.
        forward_peaks: largest absolute value of the forward outputs of every virtual stage without the loss, on the
            device; not finite if any output was not. Tells where a loss that is not finite comes from.
    """

    averaged_over = 1

    def __init__(self, spec: EngineSpec) -> None:
        if spec.kernels.cuda_graphs is not False and spec.device.type == "cuda":
            use_side_stream(spec.device)
        super().__init__(spec)
        module = self.module = StagePipeline(spec, self._loss)
        cast_weights(module, spec.precision)
        broadcast_weights(module, spec.grid)
        self.optimizer = make_bucket_optimizer(module)
        if spec.parallel.overlap_param_gather:
            layers = [layer for chunk in module.chunks.values() for layer in chunk]
            module.before_layer = self.optimizer.overlap_gathers(layers)
        self._parallel, self._rank = spec.parallel, spec.grid.pp.rank
        self._p2p = P2PCommunicator(spec.parallel, spec.grid, next(module.parameters()).dtype, self.device)
        self._schedules: dict[int, Schedule] = {}
        self._forward_schedules: dict[int, Schedule] = {}
        self._balance = ExpertBalance(module, spec) if spec.model.moe.enabled else None
        self._weight_gradients = WeightGradients(self.optimizer)
        # Embedding and chunked head accumulate into main_grad regardless of the GEMM implementation.
        for part in (module,) if module.gradients_in_place else module.ends:
            split_backward(part, self._weight_gradients)
        self.warm_up = WarmUp(module, self.optimizer, self._weight_gradients)
        self._begin([])
        self._eager_steps = EAGER_STEPS
        self._graphs = (
            MicroBatchGraphs(self, self.optimizer, self._loss, self.device) if spec.kernels.cuda_graphs else None
        )

    def choose_cuda_graphs(self, choose: Callable[[PassTimes], bool]) -> None:
        """See TrainEngine.choose_cuda_graphs."""
        # Calls are counted, since with resilience.check_compute_every_steps ranks compute unequally often.
        self._eager_steps -= 1
        if self._eager_steps:
            return
        self.module.train()
        if self._balance is not None:
            self._balance.begin()
        with self._trace.paused(), self.warm_up.unwatched():
            times, graphs = time_passes(
                *(self, self.optimizer, self._loss, self.device, self._micro_batches),
                reduces=self._parallel.data_size > 1,
            )
        self._begin([])
        if choose(times):
            assert graphs is not None
            self._graphs = graphs
            return
        self.optimizer.free_main_grads()
        del graphs
        if self.device.type == "cuda":  # the graphs' memory pool
            torch.cuda.empty_cache()

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._infos: dict[int, BatchInfo] = {}
        self._tokens: dict[int, Tensor] = {}
        self._targets: dict[int, tuple[Tensor, Tensor]] = {}
        self._in_flight: dict[Key, InFlight] = {}
        self._outputs: dict[Key, Tensor] = {}
        self._input_gradients: dict[Key, Tensor] = {}
        self._deferred: dict[Key, DeferredBackward] = {}
        self.total_loss: Tensor | None = None
        self.forward_peaks: dict[int, Tensor] = {}

    def _schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._schedules:
            schedule = self._schedules[micro_batches] = self._parallel.schedule_of(micro_batches)
            if any(action.kind is ActionKind.backward_weight for action in schedule.actions[self._rank]):
                split_backward(self.module, self._weight_gradients)
        return self._schedules[micro_batches]

    def _forward_schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._forward_schedules:
            self._forward_schedules[micro_batches] = forward_only(self._schedule(micro_batches))
        return self._forward_schedules[micro_batches]

    def _run(self, schedule: Schedule) -> None:
        self._p2p.begin(schedule, lambda number: activation_shape(self._micro_batches[number], self.module.spec))
        for action in schedule.actions[self._rank]:
            self._HANDLERS[action.kind](self, action.micro_batch, action.stage)
        self._p2p.finish()

    def _compute(self, micro_batches: Sequence[MicroBatch], *, overlap: bool = True) -> Tensor | None:
        if self._span_watches:
            self._spans.begin()
        self._begin(self._counted(micro_batches))
        if not overlap:  # of any micro-batches, perhaps fewer than other ranks'
            self.optimizer.finish_gathers()
        self.module.train()
        self.module.quantize_weights()
        if self._graphs is not None and self._graphs.should_check() and not self._needs_eager():
            self.optimizer.begin(overlap=False)
            if self._balance is not None:
                self._balance.begin()
            self.total_loss = self._graphs.run(self._micro_batches, self._spans)
            return self.total_loss
        schedule = self._schedule(len(micro_batches))
        self.warm_up.run(schedule.actions[self._rank], self._micro_batches)
        self.optimizer.begin(overlap=overlap)
        if self._balance is not None:
            self._balance.begin()
        self._run(schedule)
        if self._trace.recording:
            self._trace.context = "before any reduction"
            for name, gradient in self.optimizer.own_gradients():
                self._trace.record(f"the gradient of {name}", gradient)
        return self.total_loss

    def _step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        balance = self._balance
        if balance is None or balance.is_dropless:
            return super()._step(micro_batches, learning_rate)
        if self._gradient_watches:  # must not see the gradients of a step that is discarded
            with balance.without_capacity():
                return super()._step(micro_batches, learning_rate)
        result = super()._step(micro_batches, learning_rate)
        if not balance.must_repeat(result.experts):
            return result
        with balance.without_capacity():
            result = super()._step(micro_batches, learning_rate)
        assert result.experts is not None
        return replace(result, experts=replace(result.experts, recomputed=True))

    def _counted(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches with the number of tokens of the step, if the model has experts."""
        if self._balance is None:
            return micro_batches
        spec, cut = self.module.spec, self._parallel.tp if self._parallel.sequence_parallel else 1
        shapes = [activation_shape(batch, spec) for batch in micro_batches]
        tokens = sum(rows * share for rows, share, _ in shapes) * cut * self._parallel.data_size
        return [replace(batch, info=replace(batch.info, step_tokens=tokens)) for batch in micro_batches]

    def _needs_eager(self) -> bool:
        """Whether a trace or a forward hook observes the passes, or a step without a capacity is computed again: what a
        CUDA graph would not do."""
        if self._balance is not None and self._balance.is_dropless:
            return True
        layers = (layer for chunk in self.module.chunks.values() for layer in chunk)
        return self._trace.recording or any(layer._forward_hooks for layer in layers)

    def forward_alone(self, batch: MicroBatch) -> Tensor:
        """See `micro_batch_graphs.Passes`."""
        self._begin([batch])
        self._load(0, 0)
        self._run_forward(0, 0, *self._input(0, 0))
        assert self.total_loss is not None
        return self.total_loss

    def backward_alone(self) -> None:
        """See `micro_batch_graphs.Passes`."""
        torch.autograd.backward(self._in_flight.pop((0, 0)).root)

    def _forget(self) -> None:
        """Does nothing, as `_compute` resets the gradients."""

    def _reduce(self) -> None:
        with self._spans.span("reduce_gradients"):
            self.optimizer.reduce()
        if self._balance is not None:
            self.optimizer.discarded = self._balance.discarded()

    def _reduced_norm(self) -> Tensor:
        return self.optimizer.global_norm()

    def _update(self, learning_rate: float) -> None:
        with self._spans.span("optimizer_step"):
            self.optimizer.step(learning_rate, self._update_wait)
            if self._balance is not None:
                self._balance.update(self.optimizer.norm)

    @property
    def _norm(self) -> Tensor:
        return self.optimizer.norm

    @property
    def _own_norms(self) -> list[Tensor]:
        return self.optimizer.gradient_norms

    def _run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        self.optimizer.finish_gathers()
        self._begin(micro_batches)
        self.module.eval()
        with torch.no_grad():
            schedule = self._forward_schedule(len(micro_batches))
            self.warm_up.run(schedule.actions[self._rank], self._micro_batches)
            self._run(schedule)
        return self.total_loss

    @property
    def bounds(self) -> list[int]:
        """See TrainEngine.bounds."""
        return list(self.module.bounds)

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self.optimizer.steps

    @property
    def _loss_rank(self) -> int:
        return self.module.placement.ends[1]

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """See TrainEngine.layers."""
        module = self.module
        names = [layer.name for layer in layer_specs(module.spec.model, module.spec.seed)]
        for number, chunk in module.chunks.items():
            yield from zip(names[self.bounds[number] : self.bounds[number + 1]], chunk, strict=True)

    def _finish_step(self, norm: float) -> tuple[float, bool]:
        optimizer = self.optimizer
        optimizer.record_norm(norm)
        return optimizer.grad_norm, optimizer.skipped

    def _routing(self) -> Iterator[Tensor]:
        if self._balance is not None:
            yield self._balance.all_layers().flatten()

    def _experts(self, routing: Sequence[float]) -> ExpertStatistics | None:
        return self._balance.read(routing) if self._balance is not None else None

    def _culprit(self) -> Culprit:
        self.optimizer.finish_gathers()
        parameters = self.optimizer.parameters
        whole = not_finite([torch.isfinite(p).all() for p in parameters])
        gradients = not_finite([torch.isfinite(norm) for norm in self.optimizer.gradient_norms])
        peaks = (
            self.forward_peaks
            if self.total_loss is None
            else self.forward_peaks | {max(self.module.chunks): self.total_loss}
        )
        stages = not_finite([peak.isfinite() for peak in peaks.values()])
        weights = [name_with_experts(p, finite_weights_by_expert(p)) for p in compress(parameters, whole)]
        forward_stage = min(compress(peaks, stages), default=None)
        own = zip(parameters, self.optimizer.own_squares(), strict=True)
        named = [
            (self.module.stage_of(p), name_with_experts(p, of_p.isfinite())) for p, of_p in compress(own, gradients)
        ]
        return agree_on_culprit(self.grid.control, weights, forward_stage, named)

    def _state(self) -> Iterator[StateTensors]:
        optimizer = self.optimizer
        for part in optimizer.state_ranges():
            yield StateTensors(part.parameter, part.first, part.owned, optimizer.state_of(part))
        owned = self.grid.data.is_first and self.grid.tp.is_first
        for parameter in self._fixed_parameters():
            yield StateTensors(parameter, 0, owned, {"weight": parameter.data})

    def _fixed_parameters(self) -> list[nn.Parameter]:
        """Parameters that the optimizer does not update: the state of routers, the same on all ranks of a stage."""
        return [parameter for parameter in self.module.parameters() if not parameter.requires_grad]

    def replicas(self) -> list[Replica]:
        """See TrainEngine.replicas."""
        self.optimizer.finish_gathers()
        optimizer, grid, found = self.optimizer, self.grid, list[Replica]()
        for bucket in optimizer.buckets:
            over = bucket.holders | ({} if bucket.pair is None else {"pair": bucket.pair})
            for slot, same in zip(bucket.layout.slots, bucket.copies, strict=True):
                lines = replica_groups(same[0], grid, over)
                key = f"working_weight/{placement_of(same[0]).key}"
                found.append(Replica(key, bucket.weights[slot.start : slot.stop], lines))
        for part in optimizer.state_ranges():
            pair = {} if part.bucket.pair is None else {"pair": part.bucket.pair}
            lines = replica_groups(part.parameter, grid, pair if optimizer.sharded else part.bucket.holders | pair)
            name = placement_of(part.parameter).key
            found += [Replica(f"{kind}/{name}", flat, lines) for kind, flat in optimizer.state_of(part).items()]
        for parameter in self._fixed_parameters():
            lines = replica_groups(parameter, grid, {"data": grid.data})
            found.append(Replica(f"weight/{placement_of(parameter).key}", parameter.data, lines))
        return found

    def stale_weights(self) -> list[str]:
        """See TrainEngine.stale_weights."""
        self.optimizer.finish_gathers()
        parts, whole = list(self.optimizer.state_ranges()), []
        for part in parts:
            own = part.view_in(part.bucket.own_weights)
            whole.append(same_bits(own, part.view_in(part.bucket.master).to(own.dtype)))
        return [placement_of(part.parameter).key for part in compress(parts, not_finite(whole))]

    def _gradients(self) -> Iterator[StateTensors]:
        for part in self.optimizer.state_ranges():
            tensors = {"gradient": part.view_in(gradient_of(part.bucket))}
            yield StateTensors(part.parameter, part.first, part.owned, tensors)

    def _set_optimizer_steps(self, steps: int) -> None:
        self.optimizer.set_steps(steps)

    def _refresh_weights(self) -> None:
        self.optimizer.publish_weights()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See TrainEngine.averaged_weights."""
        self.optimizer.publish_averages()
        yield
        self._refresh_weights()

    def _load(self, micro_batch: int, stage: int) -> None:
        batch = self._micro_batches[micro_batch]
        if self.module.is_first(stage):
            assert batch.tokens_bs is not None
            self._tokens[micro_batch] = copy_to(batch.tokens_bs, self.device)
        if self.module.is_last(stage):
            self._targets[micro_batch] = batch.targets_on(self.device)

    def _info(self, micro_batch: int, stage: int) -> BatchInfo:
        """BatchInfo on the device; the same object for all stages of this rank, so that they share cached values."""
        info = self._infos.get(micro_batch)
        if info is None:
            info = self._infos[micro_batch] = self._micro_batches[micro_batch].info.to(self.device)
        if stage == max(self.module.chunks):
            del self._infos[micro_batch]
        return info

    def _input(self, micro_batch: int, stage: int) -> tuple[Tensor, Tensor | None]:
        """The input of a stage, and its receive buffer if it came from another rank."""
        if self.module.is_first(stage):
            return self._tokens.pop(micro_batch), None
        made_here = self._outputs.pop((micro_batch, stage - 1), None)
        if made_here is not None:
            return made_here.detach().requires_grad_(torch.is_grad_enabled()), None
        buffer = self._take(ActionKind.receive_activation, micro_batch, stage)
        return buffer.detach().requires_grad_(torch.is_grad_enabled()), buffer

    def _take(self, receive: ActionKind, micro_batch: int, stage: int) -> Tensor:
        """Waits for a receive; its span measures the wait."""
        with self._spans.span(receive, micro_batch, stage):
            buffer = self._p2p.take(Action(receive, micro_batch, stage))
        self._set_context(receive, micro_batch, stage)
        self._trace.record("a received p2p tensor", buffer, received=True)
        return buffer

    def _set_context(self, kind: ActionKind, micro_batch: int, stage: int) -> None:
        if self._trace.recording:
            self._trace.context = f"{kind.value.replace('_', ' ')} of micro-batch {micro_batch}, stage {stage}"

    def _forward(self, micro_batch: int, stage: int) -> None:
        hidden, buffer = self._input(micro_batch, stage)
        with self._spans.span(ActionKind.forward, micro_batch, stage):
            self._run_forward(micro_batch, stage, hidden, buffer)

    def _run_forward(self, micro_batch: int, stage: int, hidden: Tensor, buffer: Tensor | None) -> None:
        info = self._info(micro_batch, stage)
        self._set_context(ActionKind.forward, micro_batch, stage)
        root: Tensor | GradientEdge
        if self.module.is_last(stage):
            output = root = self.module.loss(hidden, info, self._targets.pop(micro_batch))
            self._trace.record("the loss", output)
            self.total_loss = output.detach().clone() if self.total_loss is None else self.total_loss + output.detach()
        else:
            output = self.module(stage, hidden, info)
            self._outputs[micro_batch, stage] = output.detach()
            root = get_gradient_edge(output) if torch.is_grad_enabled() else output
            if torch.is_grad_enabled():
                # Stays on the device, so that the step does not synchronize.
                peak, before = torch.linalg.vector_norm(output.detach(), math.inf), self.forward_peaks.get(stage)
                self.forward_peaks[stage] = peak if before is None else torch.maximum(before, peak)
        if torch.is_grad_enabled():
            self._in_flight[micro_batch, stage] = InFlight(hidden, root, buffer)
        elif buffer is not None:
            self._p2p.release(buffer)

    def _output_gradient(self, micro_batch: int, stage: int) -> tuple[Tensor | None, Tensor | None]:
        """The output gradient of a stage, and its receive buffer if it came from another rank."""
        if self.module.is_last(stage):
            return None, None
        made_here = self._input_gradients.pop((micro_batch, stage + 1), None)
        if made_here is not None:
            return made_here, None
        buffer = self._take(ActionKind.receive_gradient, micro_batch, stage)
        return buffer, buffer

    def _backward(self, micro_batch: int, stage: int) -> None:
        for buffer in self._run_backward(ActionKind.backward, micro_batch, stage):
            self._p2p.release(buffer)

    def _backward_input(self, micro_batch: int, stage: int) -> None:
        with self._weight_gradients.defer() as gradients:
            buffers = self._run_backward(ActionKind.backward_input, micro_batch, stage)
        # The deferred weight gradients may read tensors in these buffers.
        self._deferred[micro_batch, stage] = DeferredBackward(gradients, buffers)

    def _backward_weight(self, micro_batch: int, stage: int) -> None:
        self._note_last(micro_batch)
        deferred = self._deferred.pop((micro_batch, stage))
        self._set_context(ActionKind.backward_weight, micro_batch, stage)
        with torch.no_grad(), self._spans.span(ActionKind.backward_weight, micro_batch, stage):
            deferred.gradients.compute(self.optimizer)
        for buffer in deferred.buffers:
            self._p2p.release(buffer)

    def _note_last(self, micro_batch: int) -> None:
        # Every schedule accumulates gradients in the order of the micro-batches, which `schedule_faults` verifies.
        self.optimizer.last_backward = micro_batch == len(self._micro_batches) - 1

    def _run_backward(self, kind: ActionKind, micro_batch: int, stage: int) -> list[Tensor]:
        """Runs a stage's backward pass; returns the receive buffers that it read."""
        self._note_last(micro_batch)
        passed = self._in_flight.pop((micro_batch, stage))
        gradient, buffer = self._output_gradient(micro_batch, stage)
        self._set_context(kind, micro_batch, stage)
        with self._spans.span(kind, micro_batch, stage):
            torch.autograd.backward(passed.root, gradient)
        if not self.module.is_first(stage):
            assert passed.input.grad is not None
            self._trace.record("the gradient of a stage's input", passed.input.grad)
            self._input_gradients[micro_batch, stage] = passed.input.grad
        return [used for used in (passed.buffer, buffer) if used is not None]

    def _send_activation(self, micro_batch: int, stage: int) -> None:
        action = Action(ActionKind.send_activation, micro_batch, stage)
        with self._spans.span(action.kind, micro_batch, stage):
            self._p2p.send(action, self._outputs.pop((micro_batch, stage)))

    def _send_gradient(self, micro_batch: int, stage: int) -> None:
        action = Action(ActionKind.send_gradient, micro_batch, stage)
        with self._spans.span(action.kind, micro_batch, stage):
            self._p2p.send(action, self._input_gradients.pop((micro_batch, stage)))

    def _receive_activation(self, micro_batch: int, stage: int) -> None:
        self._p2p.post(Action(ActionKind.receive_activation, micro_batch, stage))

    def _receive_gradient(self, micro_batch: int, stage: int) -> None:
        self._p2p.post(Action(ActionKind.receive_gradient, micro_batch, stage))

    _HANDLERS: ClassVar[dict[ActionKind, Callable[[NativeEngine, int, int], None]]] = {
        ActionKind.load: _load,
        ActionKind.forward: _forward,
        ActionKind.backward: _backward,
        ActionKind.backward_input: _backward_input,
        ActionKind.backward_weight: _backward_weight,
        ActionKind.send_activation: _send_activation,
        ActionKind.receive_activation: _receive_activation,
        ActionKind.send_gradient: _send_gradient,
        ActionKind.receive_gradient: _receive_gradient,
    }
