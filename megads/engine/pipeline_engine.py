"""Training engine for ZeRO-0 and ZeRO-1, with or without pipeline parallelism; runs schedules on virtual stages."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megads.batch import BatchInfo, MicroBatch, copy_to
from megads.engine.deepspeed_adam import deepspeed_adamw
from megads.engine.deepspeed_adapter import PipelineExecutor
from megads.engine.interface import Culprit, EngineSpec, Replica
from megads.engine.micro_batch_graphs import MicroBatchGraphs, leave_default_stream
from megads.engine.optimizer import BucketAdamW, gradient_of
from megads.engine.p2p import P2PCommunicator
from megads.engine.stage_pipeline import StagePipeline, placement_of
from megads.engine.timeline import SpanRecorder
from megads.engine.train_engine import (
    BaseTrainEngine,
    HeldTensors,
    agree_on_culprit,
    not_finite,
    replica_lines,
    same_bits,
)
from megads.model.config import fused_rows
from megads.model.gpt import stage_specs
from megads.parallel.message_order import with_messages
from megads.parallel.pipeline_actions import Action, ActionKind, Schedule
from megads.parallel.schedule import build_schedule
from megads.parallel.weight_gradients import DeferredWgrads, WeightGradients, split_backward
from megads.runtime.hooks import Span

_BACKWARDS = (ActionKind.backward, ActionKind.backward_input)
"""Kinds of backward passes; the second includes the deferred weight gradients."""
Key = tuple[int, int]
"""Micro-batch index and virtual stage."""


def forward_only(schedule: Schedule) -> Schedule:
    """Returns the schedule of an evaluation: the forward passes in the same order, and their messages."""
    rows = [[action for action in row if action.kind is ActionKind.forward] for row in schedule.actions]
    return replace(schedule, actions=with_messages(schedule.placement, rows))


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


class StageEngine:
    """Runs any schedule of `megads.parallel.schedule` on the virtual stages of a rank.

    Losses, activations and gradients are stored by micro-batch and stage. P2p communication is asynchronous. Every
    stage gets the BatchInfo of its MicroBatch. Gradient reduction is overlapped with the last backward pass. Each rank
    records where non-finite values appear.

    Attributes:
        module: this rank's stages.
        optimizer: optimizer of their parameters.
        watch_spans: called once, at the end of the next step, with the spans of this rank.
        forward_finite: whether all forward outputs of a virtual stage were finite, by stage; on the device.
        warms_up: whether every pass of a new shape runs once before the first message of its step, see `_warm_up`.
    """

    averaged_over = 1

    def __init__(self, spec: EngineSpec, module: StagePipeline) -> None:
        """Builds the engine over this rank's stages.

        Args:
            spec: specification of the engine.
            module: this rank's stages.
        """

        def make_optimizer() -> BucketAdamW:
            named, fused = module.trained_parameters(), fused_rows(spec.model)
            width_scale = spec.model.width_scale(muon=spec.optim.is_muon)
            rule = deepspeed_adamw(spec.optim, spec.device)
            return BucketAdamW(named, spec.optim, spec.parallel, spec.grid, spec.kernels, fused, width_scale, rule)

        self.module, self.device, self._parallel = module, spec.device, spec.parallel
        self._executor = PipelineExecutor(module, make_optimizer, spec.precision, spec.grid.data)
        self.optimizer = self._executor.optimizer
        self._rank, self._hidden_size = spec.grid.pp.rank, spec.model.hidden_size
        self._p2p = P2PCommunicator(spec.parallel, spec.grid, next(module.parameters()).dtype, self.device)
        self._schedules: dict[int, Schedule] = {}
        self._forward_schedules: dict[int, Schedule] = {}
        self._weight_gradients = WeightGradients(self.optimizer)
        # Embedding and chunked head accumulate into main_grad regardless of the GEMM implementation.
        for part in (module,) if module.gradients_in_place else module.ends:
            split_backward(part, self._weight_gradients)
        self.warms_up = spec.device.type == "cuda" and spec.parallel.pp > 1
        self._warm: set[tuple[bool, tuple[int, ...]]] = set()
        self.watch_spans: Callable[[list[Span]], None] | None = None
        self._spans, self._trace = SpanRecorder(self.device), spec.grid.trace
        self._begin([])
        self._graphs = (
            MicroBatchGraphs(self, self.optimizer, module.token_loss, self.device) if spec.kernels.cuda_graphs else None
        )

    @property
    def watch_gradients(self) -> Callable[[], None] | None:
        """See StepEngine."""
        return self.optimizer.watch

    @watch_gradients.setter
    def watch_gradients(self, watch: Callable[[], None] | None) -> None:
        self.optimizer.watch = watch

    @property
    def before_update(self) -> Callable[[], None] | None:
        """See StepEngine."""
        return self.optimizer.before_update

    @before_update.setter
    def before_update(self, wait: Callable[[], None] | None) -> None:
        self.optimizer.before_update = wait

    @property
    def norm(self) -> Tensor:
        """See StepEngine; its value must be passed to the optimizer's `settle`."""
        return self.optimizer.norm

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
        self.forward_finite = {
            stage: torch.ones((), dtype=torch.bool, device=self.device) for stage in self.module.chunks
        }

    def _schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._schedules:
            parallel = self._parallel
            schedule = self._schedules[micro_batches] = build_schedule(
                parallel.schedule,
                parallel.pp,
                parallel.placement.num_stages // parallel.pp,
                micro_batches,
                contiguous=parallel.contiguous_micro_batches,
            )
            if any(action.kind is ActionKind.backward_weight for action in schedule.actions[self._rank]):
                split_backward(self.module, self._weight_gradients)
        return self._schedules[micro_batches]

    def _forward_schedule(self, micro_batches: int) -> Schedule:
        if micro_batches not in self._forward_schedules:
            self._forward_schedules[micro_batches] = forward_only(self._schedule(micro_batches))
        return self._forward_schedules[micro_batches]

    def _warm_up(self, schedule: Schedule) -> None:
        """Runs every kind of pass of this rank's stages once for each new shape, before the first message of the step.

        The first pass of a shape compiles and loads its kernels. Here all ranks do so at the same time, instead of each
        when the first message reaches it, and no message waits meanwhile. Inputs from other stages are zeros. Results
        and gradients are discarded: the caller must reset the optimizer's gradients, as at the start of every step. The
        only communication is that inside of a stage, over tensor- and context-parallel ranks: they run the same passes.
        """
        trains = torch.is_grad_enabled()
        shapes = {
            (trains, self._activation_shape(number)): number for number in reversed(range(len(self._micro_batches)))
        }
        new = {shape: number for shape, number in shapes.items() if shape not in self._warm}
        if not self.warms_up or not new:
            return
        begin = time.perf_counter()
        used = {action.kind for action in schedule.actions[self._rank]}
        kinds = [kind for kind in _BACKWARDS if kind in used] if trains else [None]
        self.optimizer.begin(overlap=False)
        with self._trace.paused(), self._unwatched():
            for number in new.values():
                for stage in self.module.chunks:
                    for kind in kinds:
                        self._run_unused(kind, number, stage)
        self._warm |= set(new)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        what = "training" if trains else "evaluation"
        shapes_text = ", ".join("x".join(map(str, shape)) for _, shape in new)
        took = time.perf_counter() - begin
        sys.stdout.write(f"warmed up the passes of {what} for activations of {shapes_text} in {took:.1f} s\n")

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Context in which neither forward hooks nor the loss' recorder see the passes."""
        layers = [layer for chunk in self.module.chunks.values() for layer in chunk]
        hooks = [layer._forward_hooks for layer in layers]
        loss = self.module.token_loss
        recorder, loss.recorder = loss.recorder, None
        try:
            for layer in layers:
                layer._forward_hooks = OrderedDict()
            yield
        finally:
            loss.recorder = recorder
            for layer, own in zip(layers, hooks, strict=True):
                layer._forward_hooks = own

    def _run_unused(self, kind: ActionKind | None, micro_batch: int, stage: int) -> None:
        """Runs a stage's passes on zeros, or on the micro-batch's own tokens and labels; the results are discarded.

        Args:
            kind: kind of the backward pass; None: only a forward pass.
            micro_batch: number of the micro-batch.
            stage: the virtual stage.
        """
        self._load(micro_batch, stage)
        info = self._micro_batches[micro_batch].info.to(self.device)
        if self._is_first(stage):
            hidden = self._tokens.pop(micro_batch)
        else:
            dtype = next(self.module.parameters()).dtype
            hidden = torch.zeros(self._activation_shape(micro_batch), dtype=dtype, device=self.device)
            hidden.requires_grad_(kind is not None)
        if self._is_last(stage):
            output = self.module.loss(hidden, info, self._targets.pop(micro_batch))
        else:
            output = self.module(stage, hidden, info)
        torch.isfinite(output.detach()).all()
        gradient = None if self._is_last(stage) else torch.zeros_like(output)
        if kind is ActionKind.backward:
            torch.autograd.backward(output, gradient)
        elif kind is ActionKind.backward_input:
            with self._weight_gradients.defer() as gradients:
                torch.autograd.backward(output, gradient)
            with torch.no_grad():
                gradients.compute(self.optimizer)

    def _run(self, schedule: Schedule) -> None:
        self._p2p.begin(schedule, self._activation_shape)
        self._executor.execute(schedule, self._run_action)
        self._p2p.finish()

    def compute(self, micro_batches: Sequence[MicroBatch], *, overlap: bool = True) -> Tensor | None:
        """See StepEngine."""
        if self.watch_spans is not None:
            self._spans.begin()
        self._begin(micro_batches)
        self.module.train()
        if self._graphs is not None and self._graphs.is_due() and not self._is_watched():
            self.optimizer.begin(overlap=False)
            self.total_loss, self.forward_finite[0] = self._graphs.run(micro_batches, self._spans)
            return self.total_loss
        schedule = self._schedule(len(micro_batches))
        self._warm_up(schedule)
        self.optimizer.begin(overlap=overlap)
        self._run(schedule)
        if self._trace.recording:
            self._trace.context = "before any reduction"
            for name, gradient in self.optimizer.own_gradients():
                self._trace.record(f"the gradient of {name}", gradient)
        return self.total_loss

    def _is_watched(self) -> bool:
        """Whether a trace or a forward hook observes the passes; a CUDA graph would not run them."""
        layers = (layer for chunk in self.module.chunks.values() for layer in chunk)
        return self._trace.recording or any(layer._forward_hooks for layer in layers)

    def forward_alone(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """See `micro_batch_graphs.Passes`."""
        self._begin([batch])
        self._load(0, 0)
        self._run_forward(0, 0, *self._input(0, 0))
        assert self.total_loss is not None
        return self.total_loss, self.forward_finite[0]

    def backward_alone(self) -> None:
        """See `micro_batch_graphs.Passes`."""
        torch.autograd.backward(self._in_flight.pop((0, 0)).root)

    def forget(self) -> None:
        """See StepEngine; nothing to do, as `compute` resets the gradients."""

    def reduce(self) -> None:
        """See StepEngine."""
        with self._spans.span("reduce_gradients"):
            self.optimizer.reduce()

    def reduced_norm(self) -> Tensor:
        """See StepEngine."""
        return self.optimizer.global_norm()

    def update(self, learning_rate: float) -> None:
        """See StepEngine."""
        with self._spans.span("optimizer_step"):
            self.optimizer.step(learning_rate)
        if self.watch_spans is not None:
            self.watch_spans(self._spans.end())
            self.watch_spans = None

    @property
    def own_norms(self) -> list[Tensor]:
        """See StepEngine."""
        return self.optimizer.gradient_norms

    def run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Runs forward passes only; returns the sum of the losses on the last stage's rank."""
        self._begin(micro_batches)
        self.module.eval()
        with torch.no_grad():
            schedule = self._forward_schedule(len(micro_batches))
            self._warm_up(schedule)
            self._run(schedule)
        return self.total_loss

    def _activation_shape(self, micro_batch: int) -> tuple[int, ...]:
        """Shape [b, t, h] of the activations between stages; every rank computes it, so it is not communicated."""
        batch, parallel = self._micro_batches[micro_batch], self._parallel
        if batch.info.sequence_index is not None:
            tokens = len(batch.info.sequence_index)
        elif batch.tokens_bs is not None:
            tokens = batch.tokens_bs.shape[1]
        else:
            assert batch.info.seq_len is not None, "a stage without tokens needs info.seq_len"
            tokens = batch.info.seq_len
        share = tokens // parallel.tp if parallel.sequence_parallel else tokens
        return len(batch.info.sample_ids), share, self._hidden_size

    def _is_first(self, stage: int) -> bool:
        return stage == 0

    def _is_last(self, stage: int) -> bool:
        return stage == self.module.placement.num_stages - 1

    def _load(self, micro_batch: int, stage: int) -> None:
        batch = self._micro_batches[micro_batch]
        if self._is_first(stage):
            assert batch.tokens_bs is not None
            self._tokens[micro_batch] = copy_to(batch.tokens_bs, self.device)
        if self._is_last(stage):
            assert batch.labels_bs is not None and batch.loss_mask_bs is not None
            targets = copy_to(batch.labels_bs, self.device), copy_to(batch.loss_mask_bs, self.device)
            self._targets[micro_batch] = targets

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
        if self._is_first(stage):
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
        if self._is_last(stage):
            output = root = self.module.loss(hidden, info, self._targets.pop(micro_batch))
            self._trace.record("the loss", output)
            self.total_loss = output.detach().clone() if self.total_loss is None else self.total_loss + output.detach()
        else:
            output = self.module(stage, hidden, info)
            self._outputs[micro_batch, stage] = output.detach()
            root = get_gradient_edge(output) if torch.is_grad_enabled() else output
        # Stays on the device, so that the step does not synchronize.
        self.forward_finite[stage] &= torch.isfinite(output.detach()).all()
        if torch.is_grad_enabled():
            self._in_flight[micro_batch, stage] = InFlight(hidden, root, buffer)
        elif buffer is not None:
            self._p2p.release(buffer)

    def _output_gradient(self, micro_batch: int, stage: int) -> tuple[Tensor | None, Tensor | None]:
        """The output gradient of a stage, and its receive buffer if it came from another rank."""
        if self._is_last(stage):
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
        self.optimizer.last_backward = micro_batch == len(self._micro_batches) - 1

    def _run_backward(self, kind: ActionKind, micro_batch: int, stage: int) -> list[Tensor]:
        """Runs a stage's backward pass; returns the receive buffers that it read."""
        self._note_last(micro_batch)
        passed = self._in_flight.pop((micro_batch, stage))
        gradient, buffer = self._output_gradient(micro_batch, stage)
        self._set_context(kind, micro_batch, stage)
        with self._spans.span(kind, micro_batch, stage):
            torch.autograd.backward(passed.root, gradient)
        if not self._is_first(stage):
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

    def _run_action(self, action: Action) -> None:
        self._HANDLERS[action.kind](self, action.micro_batch, action.stage)

    _HANDLERS: ClassVar[dict[ActionKind, Callable[[StageEngine, int, int], None]]] = {
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


class PipelineTrainEngine(BaseTrainEngine):
    """TrainEngine for ZeRO-0 or 1 with pipeline and tensor parallelism."""

    _engine: StageEngine

    def __init__(self, spec: EngineSpec) -> None:
        if spec.kernels.cuda_graphs and spec.device.type == "cuda":
            leave_default_stream(spec.device)
        super().__init__(spec)
        self._engine = StageEngine(spec, StagePipeline(spec, self._loss))

    @property
    def bounds(self) -> list[int]:
        """See TrainEngine.bounds."""
        return list(self._engine.module.bounds)

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self._engine.optimizer.steps

    @property
    def _loss_rank(self) -> int:
        return self._engine.module.placement.ends[1]

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        module = self._engine.module
        names = [stage.name for stage in stage_specs(module.spec.model, module.spec.seed)]
        for number, chunk in module.chunks.items():
            yield from zip(names[self.bounds[number] : self.bounds[number + 1]], chunk, strict=True)

    def _settle(self, norm: float) -> tuple[float, bool]:
        optimizer = self._engine.optimizer
        optimizer.settle(norm)
        return optimizer.grad_norm, optimizer.skipped

    def _culprit(self) -> Culprit:
        engine = self._engine
        parameters = engine.optimizer.parameters
        whole = not_finite([torch.isfinite(p).all() for p in parameters])
        gradients = not_finite([torch.isfinite(norm) for norm in engine.optimizer.gradient_norms])
        stages = not_finite(list(engine.forward_finite.values()))
        weights = [placement_of(p).key for p in compress(parameters, whole)]
        forward_stage = min(compress(engine.forward_finite, stages), default=None)
        named = [(engine.module.stage_of(p), placement_of(p).key) for p in compress(parameters, gradients)]
        return agree_on_culprit(self.grid.control, weights, forward_stage, named)

    def _state(self) -> Iterator[HeldTensors]:
        optimizer = self._engine.optimizer
        for part in optimizer.state_ranges():
            yield HeldTensors(part.parameter, part.first, part.owned, optimizer.state_of(part))

    def replicas(self) -> list[Replica]:
        """See TrainEngine.replicas."""
        optimizer, grid, found = self._engine.optimizer, self.grid, list[Replica]()
        for bucket in optimizer.buckets:
            over = {"data": grid.data} | ({} if bucket.pair is None else {"pair": bucket.pair})
            for slot, same in zip(bucket.layout.slots, bucket.copies, strict=True):
                lines = replica_lines(same[0], grid, over)
                key = f"working_weight/{placement_of(same[0]).key}"
                found.append(Replica(key, bucket.weights[slot.start : slot.stop], lines))
        for part in optimizer.state_ranges():
            pair = {} if part.bucket.pair is None else {"pair": part.bucket.pair}
            lines = replica_lines(part.parameter, grid, pair if optimizer.sharded else {"data": grid.data} | pair)
            name = placement_of(part.parameter).key
            found += [Replica(f"{kind}/{name}", flat, lines) for kind, flat in optimizer.state_of(part).items()]
        return found

    def stale_weights(self) -> list[str]:
        """See TrainEngine.stale_weights."""
        parts, whole = list(self._engine.optimizer.state_ranges()), []
        for part in parts:
            own = part.of(part.bucket.own_weights)
            whole.append(same_bits(own, part.of(part.bucket.master).to(own.dtype)))
        return [placement_of(part.parameter).key for part in compress(parts, not_finite(whole))]

    def _gradients(self) -> Iterator[HeldTensors]:
        for part in self._engine.optimizer.state_ranges():
            tensors = {"gradient": part.of(gradient_of(part.bucket))}
            yield HeldTensors(part.parameter, part.first, part.owned, tensors)

    def _set_optimizer_steps(self, steps: int) -> None:
        self._engine.optimizer.set_steps(steps)

    def _refresh_weights(self) -> None:
        self._engine.optimizer.publish_weights()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See TrainEngine.averaged_weights."""
        self._engine.optimizer.publish_averages()
        yield
        self._refresh_weights()
