"""Base class of the training engines: the parts that do not depend on the ZeRO stage.

Steps, validation, the state as rectangles of global tensors, and detection of the rank that made a step non-finite.

ZeRO splits flat buffers of parameters at arbitrary elements. A range of a matrix that starts or ends within a row is
up to three rectangles: the rest of a row, whole rows, the start of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megads.batch import MicroBatch
from megads.engine.interface import (
    Culprit,
    EngineSpec,
    EvaluationResult,
    PassTimes,
    Replica,
    Shard,
    StepCheck,
    StepPasses,
    StepResult,
)
from megads.engine.spans import SpanRecorder
from megads.engine.stage_pipeline import local_shape
from megads.model.config import HEAD
from megads.parallel.context import shard_micro_batch
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.loss import TokenMeanLoss, global_tokens, share_loss
from megads.parallel.sharding import ParameterPlacement, placement_of
from megads.parallel.token_scores import PositionLosses, RowScores, ScoreRecorder
from megads.runtime.distributed import ControlPlane
from megads.runtime.hooks import ExpertStatistics, Span

SHOWN = 8


class Symptoms(NamedTuple):
    """Non-finite values of one rank in a skipped step, observed before any reduction combined the ranks.

    Attributes:
        rank: global rank.
        weights: whether a parameter itself is not finite.
        forward_stage: the rank's first virtual stage with a non-finite activation; None if there is none.
        backward_stage: the rank's last virtual stage that has a parameter with a non-finite local accumulated gradient;
            None if there is none.
    """

    rank: int
    weights: bool = False
    forward_stage: int | None = None
    backward_stage: int | None = None


def not_finite(finite: Sequence[Tensor]) -> list[bool]:
    """Returns the negation of bool scalars on one device; synchronizes with the device once."""
    return torch.stack(list(finite)).logical_not().tolist() if finite else []


def finite_weights_by_expert(parameter: Parameter) -> Tensor:
    """Whether a parameter's values are finite, bool [1]; of stacked experts [e], those of each."""
    return torch.isfinite(parameter.detach()).view(max(1, len(placement_of(parameter).experts)), -1).all(1)


def name_with_experts(parameter: Parameter, finite: Tensor) -> str:
    """Name of a parameter in the whole model, and of stacked experts the numbers of those that are not finite, such as
    `blocks.3.mlp.experts.down.weight[expert 5]`.

    Args:
        parameter: a parameter of this rank that is not finite.
        finite: whether each of its experts is finite, bool [e]; synchronizes with the device.
    """
    place = placement_of(parameter)
    broken = [str(expert) for expert, whole in zip(place.experts, finite.tolist(), strict=False) if not whole]
    if not broken:
        return place.key
    more = ", ..." if len(broken) > SHOWN else ""
    return f"{place.key}[expert{'s' if len(broken) > 1 else ''} {', '.join(broken[:SHOWN])}{more}]"


def _to_host(scalars: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(scalars)).tolist() if scalars else []


def find_culprit(ranks: Sequence[Symptoms]) -> Culprit:
    """Returns the rank where non-finite values first appeared, without parameter names.

    Non-finite weights take precedence over the forward pass, and the forward over the backward pass. Activations
    propagate from the first stage to the last and gradients back, so the root cause is the earliest stage in the
    forward pass and the latest in the backward pass. Without any symptom, the gradient norm itself overflowed.
    """
    weights = [s.rank for s in ranks if s.weights]
    if weights:
        return Culprit(min(weights), "weights")
    forward = [(s.forward_stage, s.rank) for s in ranks if s.forward_stage is not None]
    if forward:
        return Culprit(min(forward)[1], "forward")
    backward = [(-s.backward_stage, s.rank) for s in ranks if s.backward_stage is not None]
    if backward:
        return Culprit(min(backward)[1], "backward")
    return Culprit(min(s.rank for s in ranks), "gradient norm")


def agree_on_culprit(
    control: ControlPlane,
    weights: Sequence[str],
    forward_stage: int | None,
    gradients: Sequence[tuple[int, str]],
) -> Culprit:
    """Runs `find_culprit` on the symptoms of all ranks; collective over the world.

    Three numbers per rank are gathered, and only the culprit's parameter names are broadcast: all names of all ranks
    would take 287 MB on each of 10,000 ranks.

    Args:
        control: control plane of all ranks.
        weights: names of this rank's parameters that are not finite themselves.
        forward_stage: see Symptoms.
        gradients: virtual stage and name of this rank's parameters whose local accumulated gradient is not finite.
    """
    backward_stage = max((stage for stage, _ in gradients), default=None)
    found = find_culprit(control.gather(Symptoms(control.rank, bool(weights), forward_stage, backward_stage), Symptoms))
    names = weights if found.where == "weights" else [name for _, name in gradients]
    if found.where == "gradient norm":
        return found
    return replace(found, parameters=control.broadcast(tuple(names[:SHOWN]), tuple[str, ...], source=found.rank))


@dataclass(frozen=True)
class LocalRectangle:
    """Part of a local matrix or vector: its offset and shape, and its range [start, stop) in the flattened tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[LocalRectangle]:
    """Splits elements [start, stop) of a flattened local tensor of one or two dims into rectangles, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield LocalRectangle((start,), (stop - start,), start, stop)
        return
    width = shape[1]
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            rows = (stop - start) // width
            end = start + rows * width
            yield LocalRectangle((row, 0), (rows, width), start, end)
        else:
            end = min(stop, (row + 1) * width)
            yield LocalRectangle((row, column), (1, end - start), start, end)
        start = end


def parameter_shards(
    kind: str, place: ParameterPlacement, local_shape: tuple[int, ...], first: int, flat: Tensor
) -> list[Shard]:
    """Returns the rectangles of one parameter that a range of its flattened elements covers.

    Args:
        kind: first part of the shards' keys.
        place: placement of the local parameter in the global one; padding rows at its end are omitted.
        local_shape: shape of the local parameter, padding included.
        first: index of flat[0] in the flattened local parameter.
        flat: the values, a view.
    """
    shards = []
    for begin, stop, shift in _spans(place, local_shape):
        for part in rectangles(local_shape, max(first, begin), min(first + flat.numel(), stop)):
            offset = tuple(o + (shift if d == place.dim else 0) for d, o in enumerate(part.offset))
            tensor = flat[part.start - first : part.stop - first].view(part.shape)
            shards.append(Shard(f"{kind}/{place.key}", place.global_shape, offset, tensor))
    return shards


def _spans(place: ParameterPlacement, local_shape: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Ranges [begin, stop) of a flattened local parameter's elements without padding.

    Each comes with the difference of global and local index along the sharded dim.
    """
    if place.dim != 0:
        yield 0, prod(local_shape), place.held[0].start if place.held else 0
        return
    row, width = 0, prod(local_shape[1:])
    for part in place.held:
        yield row * width, (row + len(part)) * width, part.start - row
        row += len(part)


class StateTensors(NamedTuple):
    """Optimizer state, or the gradient, of a range of elements of one flattened local parameter.

    Attributes:
        parameter: the parameter.
        first: index of the range's first element in the flattened local parameter.
        owned: whether this rank owns the elements, see NamedParameter.
        tensors: flat views by kind, see `Shard`.
    """

    parameter: Parameter
    first: int
    owned: bool
    tensors: dict[str, Tensor]


class BaseTrainEngine(ABC):
    """Base class of the implementations of `megads.engine.interface.TrainEngine`.

    A subclass computes, reduces and updates; the base class decides when, and counts tokens and shares losses. A step
    calls `_compute`, `_reduce` and `_update`, or `_forget` after a computation that is not applied.

    Args:
        spec: specification of the engine.

    Attributes:
        device: device of this rank.
        grid: the ranks.
        averaged_over: number by which the subclass divides gradients.
    """

    averaged_over: int

    def __init__(self, spec: EngineSpec) -> None:
        self.device, self.grid, self._ulysses = spec.device, spec.grid, spec.parallel.ulysses_size
        self._spans, self._trace = SpanRecorder(spec.device), spec.grid.trace
        # Called by the subclass in every step before the optimizer's state changes.
        self._update_wait: Callable[[], None] | None = None
        self._note_rerun: Callable[[StepResult, StepResult], None] | None = None
        self._check: StepCheck | None = None
        # Called once, in the next step.
        self._gradient_watches: list[Callable[[list[Shard]], None]] = []
        self._span_watches: list[Callable[[list[Span]], None]] = []
        self._watched: list[RemovableHandle] = []
        self._loss = TokenMeanLoss(spec.model.vocabulary, spec.grid, spec.kernels, spec.z_loss)

    @property
    @abstractmethod
    def bounds(self) -> list[int]:
        """See TrainEngine.bounds."""

    @property
    @abstractmethod
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""

    @property
    @abstractmethod
    def _loss_rank(self) -> int:
        """Pipeline rank of the last stage."""

    @abstractmethod
    def _compute(self, micro_batches: Sequence[MicroBatch], *, overlap: bool = True) -> Tensor | None:
        """Runs forward and backward passes; must be followed by `_reduce` and `_update`, or by `_forget`.

        Args:
            micro_batches: micro-batches of the step on this rank.
            overlap: whether gradients may be reduced during the backward passes.

        Returns:
            The sum of the losses on the last stage's rank.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Discards the gradients that `_compute` has accumulated."""

    @abstractmethod
    def _reduce(self) -> None:
        """Reduces the gradients that `_compute` has not reduced yet."""

    @abstractmethod
    def _reduced_norm(self) -> Tensor:
        """Global 2-norm of the reduced gradients before clipping, fp64 scalar on the device; collective over the world.

        `_update` computes it again, after `watch_gradients`.
        """

    @abstractmethod
    def _update(self, learning_rate: float) -> None:
        """Computes the norm, clips, calls `_update_wait`, and runs the optimizer step."""

    @abstractmethod
    def _run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Runs forward passes only; returns the sum of the losses on the last stage's rank."""

    @property
    @abstractmethod
    def _norm(self) -> Tensor:
        """Global 2-norm of the last step's gradients before clipping, fp64 scalar on the device."""

    @property
    @abstractmethod
    def _own_norms(self) -> list[Tensor]:
        """2-norms of this rank's local gradients of the last step, before any reduction."""

    @abstractmethod
    def _finish_step(self, norm: float) -> tuple[float, bool]:
        """Takes the norm of the last step; returns the gradient norm to report and whether the step was skipped."""

    def _routing(self) -> Iterable[Tensor]:
        """Numbers that `_experts` takes, fp64 vectors on the device; collective over the world."""
        return ()

    def _experts(self, routing: Sequence[float]) -> ExpertStatistics | None:
        """Routing of the tokens of the last step; None for a model without experts."""
        return None

    @abstractmethod
    def _culprit(self) -> Culprit:
        """The rank that made the last step non-finite; call after a skipped step only. Collective over the world."""

    @abstractmethod
    def _state(self) -> Iterable[StateTensors]:
        """All optimizer state of this rank."""

    @abstractmethod
    def _gradients(self) -> Iterable[StateTensors]:
        """All reduced gradients of this rank, between the reduction and the optimizer step."""

    @abstractmethod
    def layers(self) -> Iterable[tuple[str, nn.Module]]:
        """See TrainEngine.layers."""

    @abstractmethod
    def replicas(self) -> list[Replica]:
        """See TrainEngine.replicas."""

    @abstractmethod
    def stale_weights(self) -> list[str]:
        """See TrainEngine.stale_weights."""

    @abstractmethod
    def _set_optimizer_steps(self, steps: int) -> None:
        """Sets the optimizer's step count, used for bias correction."""

    @abstractmethod
    def averaged_weights(self) -> AbstractContextManager[None]:
        """See TrainEngine.averaged_weights."""

    @abstractmethod
    def _refresh_weights(self) -> None:
        """Derives the working weights from the master weights; collective."""

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """See TrainEngine.step."""
        first = self._step(micro_batches, learning_rate)
        if not first.skipped or self._note_rerun is None:
            return first
        second = self._step(micro_batches, learning_rate)
        self._note_rerun(first, second)
        return second

    def choose_cuda_graphs(self, choose: Callable[[PassTimes], bool]) -> None:
        """See TrainEngine.choose_cuda_graphs; the launcher replaces auto by false for the other engines."""
        raise NotImplementedError("only the native engine captures passes")

    def rerun_nonfinite(self, note: Callable[[StepResult, StepResult], None] | None) -> None:
        """See TrainEngine.rerun_nonfinite."""
        self._note_rerun = note

    def check_compute(self, check: StepCheck | None) -> None:
        """See TrainEngine.check_compute."""
        self._check = check

    def _step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        # With AdamW under ZeRO-0 and 1 the only device synchronization of a step.
        loss, tokens, norm, *routing = self.launch_step(micro_batches, learning_rate).tolist()
        grad_norm, skipped = self._finish_step(norm)
        culprit = self._culprit() if skipped else None
        return StepResult(loss, int(tokens), grad_norm, skipped, culprit, self._experts(routing))

    def launch_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> Tensor:
        """Launches all device work of a step; with AdamW under ZeRO-0 and 1 without synchronizing with the device.

        Returns:
            fp64 on the device: loss, number of tokens, gradient norm, and the numbers of `_routing`.
        """
        own, tokens = self._own_tokens(micro_batches)
        # In a step without any unmasked token, loss and gradients are zero.
        self._loss.scale = self.averaged_over / tokens.clamp(min=1.0)
        if self._check is None:
            loss_sum = self._compute(own)
            self._reduce()
        else:
            loss_sum = self._check.compute(
                StepPasses(
                    micro_batches,
                    list(self.layers()),
                    run=partial(self._compute, own),
                    run_alone=self._compute_alone,
                    forget=self._forget,
                    reduce=self._reduce,
                    outcome=partial(self._outcome, tokens),
                    own_norms=lambda: _to_host(self._own_norms),
                )
            )
        self._show_gradients()
        self._update(learning_rate)
        self._show_spans()
        return torch.cat((self._shared(loss_sum, tokens), self._norm[None], *self._routing()))

    def _shared(self, loss_sum: Tensor | None, tokens: Tensor) -> Tensor:
        """Loss and number of tokens of a training step, fp64 [2] on every rank."""
        scale = 1.0 / self.averaged_over
        return share_loss(loss_sum, tokens, self.grid, self._loss_rank, scale=scale)

    def _compute_alone(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        own = self._own_parts(micro_batches)
        return self._compute(own, overlap=False)

    def _outcome(self, tokens: Tensor, loss_sum: Tensor | None) -> tuple[float, float]:
        """See StepPasses.outcome."""
        self._reduce()
        norm = self._reduced_norm()
        loss, _, norm_value = torch.cat((self._shared(loss_sum, tokens), norm[None])).tolist()
        return loss, norm_value

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """See TrainEngine.evaluate."""
        micro_batches, tokens = self._own_tokens(micro_batches)
        self._loss.scale = torch.ones_like(tokens)
        loss_sum = self._run_evaluation(micro_batches)
        return EvaluationResult.from_tensor(share_loss(loss_sum, tokens, self.grid, self._loss_rank))

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """See TrainEngine.losses_by_position."""
        recorder = PositionLosses(self._loss.vocab_size, self.grid.tp, positions, self.device)
        with self._loss.recorded_by(recorder):
            self._run_evaluation(self._own_parts(micro_batches))
        return recorder.sums(self.grid, self._loss_rank)

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """See TrainEngine.score."""
        recorder = ScoreRecorder(self._loss.vocab_size, self.grid.tp)
        with self._loss.recorded_by(recorder):
            self._run_evaluation(self._own_parts(micro_batches))
        return recorder.share(num_rows, scoring_row_length(micro_batches), self.grid, self._loss_rank, self.device)

    def _own_parts(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This context-parallel rank's part of whole samples."""
        return [shard_micro_batch(batch, self.grid.cp, self.device, self._ulysses) for batch in micro_batches]

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], Tensor]:
        """This context-parallel rank's part of whole samples, and the number of unmasked tokens on all ranks."""
        own = self._own_parts(micro_batches)
        return own, global_tokens(own, self.grid, self.device, self._loss_rank)

    def watch_gradients(self, watch: Callable[[list[Shard]], None]) -> None:
        """See TrainEngine.watch_gradients."""
        self._gradient_watches.append(watch)

    @torch.no_grad()
    def _show_gradients(self) -> None:
        watches, self._gradient_watches = self._gradient_watches, []
        shards = held_shards(self._gradients()) if watches else []
        for watch in watches:
            watch(shards)

    def before_update(self, wait: Callable[[], None] | None) -> None:
        """See TrainEngine.before_update."""
        self._update_wait = wait

    def watch_activations(self, watch: Callable[[str, Tensor], None] | None) -> None:
        """See TrainEngine.watch_activations."""
        for handle in self._watched:
            handle.remove()
        self._watched = []
        if watch is None:
            return
        for name, layer in self.layers():
            if name != HEAD:
                self._watched.append(layer.register_forward_hook(partial(_show_output, watch, name)))

    def watch_spans(self, watch: Callable[[list[Span]], None]) -> None:
        """See TrainEngine.watch_spans."""
        self._span_watches.append(watch)

    def _show_spans(self) -> None:
        watches, self._span_watches = self._span_watches, []
        spans = self._spans.end() if watches else []
        for watch in watches:
            watch(spans)

    def named_shards(self, owned: bool = True) -> list[Shard]:
        """See TrainEngine.named_shards."""
        return held_shards(self._state(), owned)

    def load_shards(self, fill: Callable[[list[Shard]], None], optimizer_steps: int) -> None:
        """See TrainEngine.load_shards."""
        fill(self.named_shards(owned=False))
        self._set_optimizer_steps(optimizer_steps)
        self._refresh_weights()


def _show_output(
    watch: Callable[[str, Tensor], None], name: str, layer: nn.Module, _inputs: object, output: Tensor
) -> None:
    """Forward hook that passes a layer's output to `watch` in training, but not in validation."""
    if layer.training:
        with torch.no_grad():
            watch(name, output.detach())


def replica_groups(parameter: Parameter, grid: ParallelGrid, over: Mapping[str, Axis]) -> dict[str, Axis]:
    """Returns the groups of several ranks that hold the same copy of a parameter's tensor, by name.

    Args:
        parameter: the parameter; if it is not sharded, all tensor-parallel ranks hold the same copy.
        grid: ranks of the layout.
        over: other groups that hold the same copy.
    """
    tp = {"tp": grid.tp} if placement_of(parameter).dim is None else {}
    return {name: axis for name, axis in {**over, **tp}.items() if axis.size > 1}


def same_bits(first: Tensor, second: Tensor) -> Tensor:
    """Whether two tensors of the same dtype hold the same bits; a bool scalar on their device."""
    words = torch.int16 if first.element_size() == 2 else torch.int32
    return (first.detach().view(words) == second.detach().view(words)).all()


def scoring_row_length(micro_batches: Sequence[MicroBatch]) -> int:
    """Returns the length in tokens of the rows to score, before context parallelism splits them."""
    tokens_bs = micro_batches[0].tokens_bs
    assert tokens_bs is not None, "scoring passes tokens to every stage"
    return tokens_bs.shape[1]


def held_shards(held: Iterable[StateTensors], owned: bool = True) -> list[Shard]:
    """Converts the tensors of a rank to rectangles of global tensors.

    Args:
        held: the tensors.
        owned: whether to omit elements that another rank owns.
    """
    shards: list[Shard] = []
    for part in held:
        if owned and not part.owned:
            continue
        place, shape = placement_of(part.parameter), local_shape(part.parameter)
        for kind, flat in part.tensors.items():
            shards += parameter_shards(kind, place, shape, part.first, flat)
    return shards
