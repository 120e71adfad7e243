"""The half of a TrainEngine that does not depend on who reduces the gradients.

Steps, validation, the state as rectangles of global tensors, and the rank that made a step non-finite.

ZeRO cuts flat buffers of parameters at arbitrary elements. A range of a matrix that starts or ends in mid-row is up to
three rectangles: the rest of a row, whole rows, the start of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megads.batch import MicroBatch
from megads.engine.deepspeed_adapter import local_shape, prepare_deepspeed
from megads.engine.interface import ComputeCheck, Culprit, EngineSpec, EvaluationResult, Replica, Shard, StepResult
from megads.engine.repeated_step import RepeatedStep
from megads.engine.stage_pipeline import placement_of
from megads.model.stage_names import HEAD
from megads.parallel.context import cut_micro_batch
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.loss import TokenMeanLoss, global_tokens, share_loss
from megads.parallel.sharding import ParameterPlacement
from megads.parallel.token_scores import PositionLosses, RowScores, ScoreRecorder
from megads.runtime.distributed import ControlPlane
from megads.runtime.span import Span

SHOWN = 8


class Symptoms(NamedTuple):
    """What one rank saw in a skipped step, before any reduction mixed it with the others'.

    Attributes:
        rank: global rank.
        weights: whether a parameter is not finite itself.
        forward_stage: the first of its virtual stages that computed an activation that is not finite; None if none did.
        backward_stage: the last of its virtual stages that has a parameter whose own accumulated gradient is not
            finite; None if none has.
    """

    rank: int
    weights: bool = False
    forward_stage: int | None = None
    backward_stage: int | None = None


def not_finite(finite: Sequence[Tensor]) -> list[bool]:
    """Which of some bool scalars on one device are False; waits for it once."""
    return torch.stack(list(finite)).logical_not().tolist() if finite else []


def _to_host(scalars: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(scalars)).tolist() if scalars else []


def find_culprit(ranks: Sequence[Symptoms]) -> Culprit:
    """The rank that went wrong first, no parameters named yet: bad weights before a bad forward before a bad backward.

    Forward passes flow from the first stage to the last and backward passes return, so the earliest stage is to blame
    for the forward and the latest for the backward. When nobody saw anything the norm itself overflowed.
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
    """`find_culprit` over the symptoms of all ranks; collective over the world.

    Three numbers of every rank travel, and the names that are shown of one: all names of all ranks would be 287 MB on
    each of 10,000.

    Args:
        control: of all ranks.
        weights: names of this rank's parameters that are not finite themselves.
        forward_stage: see Symptoms.
        gradients: virtual stage and name of this rank's parameters whose own accumulated gradient is not finite.
    """
    backward_stage = max((stage for stage, _ in gradients), default=None)
    found = find_culprit(control.gather(Symptoms(control.rank, bool(weights), forward_stage, backward_stage), Symptoms))
    names = weights if found.where == "weights" else [name for _, name in gradients]
    if found.where == "gradient norm":
        return found
    return replace(found, parameters=control.broadcast(tuple(names[:SHOWN]), tuple[str, ...], source=found.rank))


@dataclass(frozen=True)
class LocalRectangle:
    """Part of a local matrix or vector: where it lies and which elements of the flattened local tensor it takes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[LocalRectangle]:
    """Cuts elements [start, stop) of a flattened local tensor of one or two dims into rectangles, in order."""
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
    """Rectangles of one parameter that `flat`, holding its flattened elements from `first` on, covers.

    Args:
        kind: first part of the shards' keys.
        place: where the local parameter lies in the global one; padding rows at its end are left out.
        local_shape: shape of the local parameter, padding included.
        first: index in the flattened local parameter of flat[0].
        flat: the values, a view.
    """
    real = place.length * (local_shape[1] if len(local_shape) == 2 else 1) if place.dim == 0 else None
    stop = first + flat.numel() if real is None else min(first + flat.numel(), real)
    shards = []
    for part in rectangles(local_shape, first, stop):
        offset = tuple(o + (place.start if d == place.dim else 0) for d, o in enumerate(part.offset))
        tensor = flat[part.start - first : part.stop - first].view(part.shape)
        shards.append(Shard(f"{kind}/{place.key}", place.global_shape, offset, tensor))
    return shards


class HeldTensors(NamedTuple):
    """Optimizer state, or the gradient, of a run of elements of one flattened local parameter.

    Attributes:
        parameter: the parameter.
        first: index of the run's first element in the flattened local parameter.
        owned: no other rank owns these elements, see NamedParameter.
        tensors: flat views by kind, see `Shard`.
    """

    parameter: Parameter
    first: int
    owned: bool
    tensors: dict[str, Tensor]


class StepEngine(Protocol):
    """Runs forward and backward passes and the optimizer of one rank.

    Attributes:
        watch_gradients: called first in every `update`: gradients are reduced, their norm is not computed yet.
        watch_spans: called once, at the end of the next step, with what the rank did in it.
        before_update: called in every step before the optimizer's state changes.
    """

    watch_gradients: Callable[[], None] | None
    before_update: Callable[[], None] | None
    watch_spans: Callable[[list[Span]], None] | None

    @property
    def averaged_over(self) -> int:
        """By what the engine divides gradients on its own."""
        ...

    @property
    def own_norms(self) -> list[Tensor]:
        """2-norms of this rank's own gradients of the last step, before any reduction."""
        ...

    @property
    def norm(self) -> Tensor:
        """Global 2-norm of the last step before clipping, fp64 scalar on the device."""
        ...

    def compute(self, micro_batches: Sequence[MicroBatch], *, overlap: bool = True) -> Tensor | None:
        """Forward and backward passes; `reduce` and `update` are to follow, or `forget`.

        Args:
            micro_batches: of the step.
            overlap: gradients may be reduced during the backward passes.

        Returns:
            The sum of the losses on the last stage's rank.
        """
        ...

    def forget(self) -> None:
        """Drops the gradients that `compute` has accumulated."""
        ...

    def reduce(self) -> None:
        """Reduces the gradients that `compute` has not reduced."""
        ...

    def reduced_norm(self) -> Tensor:
        """Global 2-norm of the reduced gradients before clipping, fp64 scalar on the device; collective over the world.

        `update` computes it again: after `watch_gradients`.
        """
        ...

    def update(self, learning_rate: float) -> None:
        """Calls `watch_gradients`, computes the norm, clips, and steps the optimizer."""
        ...

    def run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Forward only; returns the sum of the losses on the last stage's rank."""
        ...


class BaseTrainEngine(ABC):
    """See `megads.engine.interface.TrainEngine`.

    Args:
        spec: what it is built from.
    """

    _engine: StepEngine

    def __init__(self, spec: EngineSpec) -> None:
        prepare_deepspeed()
        self.device, self.grid = spec.device, spec.grid
        self._note_rerun: Callable[[StepResult, StepResult], None] | None = None
        self._check: ComputeCheck | None = None
        self._gradient_watches: list[Callable[[list[Shard]], None]] = []
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
        """Pipeline rank that holds the last stage."""

    @abstractmethod
    def _settle(self, norm: float) -> tuple[float, bool]:
        """The gradient norm to report of a step whose norm is known now, and whether the step was skipped."""

    @abstractmethod
    def _culprit(self) -> Culprit:
        """Collective over the world; only after a skipped step."""

    @abstractmethod
    def _state(self) -> Iterable[HeldTensors]:
        """All optimizer state of this rank."""

    @abstractmethod
    def _gradients(self) -> Iterable[HeldTensors]:
        """All reduced gradients of this rank, while there are any."""

    @abstractmethod
    def _layers(self) -> Iterable[tuple[str, nn.Module]]:
        """The layers of this rank, by their names in the whole model."""

    @abstractmethod
    def replicas(self) -> list[Replica]:
        """See TrainEngine.replicas."""

    @abstractmethod
    def stale_weights(self) -> list[str]:
        """See TrainEngine.stale_weights."""

    @abstractmethod
    def _set_optimizer_steps(self, steps: int) -> None:
        """Sets AdamW's bias-correction counter."""

    @abstractmethod
    def averaged_weights(self) -> AbstractContextManager[None]:
        """See TrainEngine.averaged_weights."""

    @abstractmethod
    def _refresh_weights(self) -> None:
        """Derives the working weights from the masters; collective."""

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """See TrainEngine.step."""
        first = self._step(micro_batches, learning_rate)
        if not first.skipped or self._note_rerun is None:
            return first
        second = self._step(micro_batches, learning_rate)
        self._note_rerun(first, second)
        return second

    def rerun_nonfinite(self, note: Callable[[StepResult, StepResult], None] | None) -> None:
        """See TrainEngine.rerun_nonfinite."""
        self._note_rerun = note

    def check_compute(self, check: ComputeCheck | None) -> None:
        """See TrainEngine.check_compute."""
        self._check = check

    def _step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        # The one time that a step waits for the device.
        loss, tokens, norm = self.launch_step(micro_batches, learning_rate).tolist()
        grad_norm, skipped = self._settle(norm)
        culprit = self._culprit() if skipped else None
        return StepResult(loss, int(tokens), grad_norm, skipped=skipped, culprit=culprit)

    def launch_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> Tensor:
        """Everything of a step that the device does; under ZeRO-0 and 1 the host waits for none of it.

        Returns:
            fp64 [3] on the device: loss, tokens, and the norm.
        """
        own, tokens = self._own_tokens(micro_batches)
        # A step without a single unmasked token has nothing to learn: its loss and gradients are zero.
        self._loss.scale = self._engine.averaged_over / tokens.clamp(min=1.0)
        if self._check is None:
            loss_sum = self._engine.compute(own)
            self._engine.reduce()
        else:
            loss_sum = self._compute_checked(self._check, micro_batches, own, tokens)
        self._engine.update(learning_rate)
        return torch.cat((self._shared(loss_sum, tokens), self._engine.norm[None]))

    def _shared(self, loss_sum: Tensor | None, tokens: Tensor) -> Tensor:
        """fp64 [2] on every rank: loss and tokens of a training step."""
        scale = 1.0 / self._engine.averaged_over
        return share_loss(loss_sum, tokens, self.grid, self._loss_rank, scale=scale)

    def _compute_checked(
        self, check: ComputeCheck, micro_batches: Sequence[MicroBatch], own: Sequence[MicroBatch], tokens: Tensor
    ) -> Tensor | None:
        """Computes the step once or several times, and reduces the gradients; waits for the device.

        Args:
            check: decides how often.
            micro_batches: whole samples.
            own: this context rank's share of them.
            tokens: unmasked tokens of all ranks.

        Returns:
            See StepEngine.compute.
        """
        repeated = RepeatedStep(self.grid, list(self._layers()), self._compute_alone, self._engine.forget, self.device)
        if check.is_due():
            loss_sum = repeated.run(micro_batches, check.judge)
            self._engine.reduce()
            return loss_sum
        loss_sum = self._engine.compute(own)
        first = self._outcome(loss_sum, tokens)
        if not check.suspects(*first):
            return loss_sum
        norms = _to_host(self._engine.own_norms)
        loss_sum = repeated.run(micro_batches, check.judge)
        again = self._outcome(loss_sum, tokens)
        differ = self.grid.control.gather(_to_host(self._engine.own_norms) != norms, bool)
        check.report_suspicious(first, again, [rank for rank, differs in enumerate(differ) if differs])
        return loss_sum

    def _compute_alone(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        own = [cut_micro_batch(batch, self.grid.cp, self.device) for batch in micro_batches]
        return self._engine.compute(own, overlap=False)

    def _outcome(self, loss_sum: Tensor | None, tokens: Tensor) -> tuple[float, float]:
        """Reduces the gradients; returns loss and gradient norm of the step, which has not changed the weights yet."""
        self._engine.reduce()
        norm = self._engine.reduced_norm()
        loss, _, norm_value = torch.cat((self._shared(loss_sum, tokens), norm[None])).tolist()
        return loss, norm_value

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """See TrainEngine.evaluate."""
        micro_batches, tokens = self._own_tokens(micro_batches)
        self._loss.scale = torch.ones_like(tokens)
        loss_sum = self._engine.run_evaluation(micro_batches)
        return EvaluationResult.of(share_loss(loss_sum, tokens, self.grid, self._loss_rank))

    def losses_by_position(self, micro_batches: Sequence[MicroBatch], positions: int) -> Tensor:
        """See TrainEngine.losses_by_position."""
        axis = self.grid.tp
        recorder = self._loss.recorder = PositionLosses(self._loss.vocab_size, axis, positions, self.device)
        try:
            self._engine.run_evaluation([cut_micro_batch(batch, self.grid.cp, self.device) for batch in micro_batches])
        finally:
            self._loss.recorder = None
        return recorder.sums(self.grid, self._loss_rank)

    def score(self, micro_batches: Sequence[MicroBatch], num_rows: int) -> RowScores:
        """See TrainEngine.score."""
        recorder = self._loss.recorder = ScoreRecorder(self._loss.vocab_size, self.grid.tp)
        length = row_length(micro_batches)
        try:
            self._engine.run_evaluation([cut_micro_batch(batch, self.grid.cp, self.device) for batch in micro_batches])
        finally:
            self._loss.recorder = None
        return recorder.share(num_rows, length, self.grid, self._loss_rank, self.device)

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], Tensor]:
        """This context rank's share of whole samples, and the unmasked tokens of all ranks."""
        own = [cut_micro_batch(batch, self.grid.cp, self.device) for batch in micro_batches]
        return own, global_tokens(own, self.grid, self.device, self._loss_rank)

    def watch_gradients(self, watch: Callable[[list[Shard]], None]) -> None:
        """See TrainEngine.watch_gradients."""
        self._gradient_watches.append(watch)
        self._engine.watch_gradients = self._show_gradients

    def _show_gradients(self) -> None:
        watches, self._gradient_watches = self._gradient_watches, []
        self._engine.watch_gradients = None
        shards = held_shards(self._gradients())
        for watch in watches:
            watch(shards)

    def before_update(self, wait: Callable[[], None] | None) -> None:
        """See TrainEngine.before_update."""
        self._engine.before_update = wait

    def watch_activations(self, watch: Callable[[str, Tensor], None] | None) -> None:
        """See TrainEngine.watch_activations."""
        for handle in self._watched:
            handle.remove()
        self._watched = []
        if watch is None:
            return
        for name, layer in self._layers():
            if name != HEAD:
                self._watched.append(layer.register_forward_hook(partial(_show_output, watch, name)))

    def watch_spans(self, watch: Callable[[list[Span]], None]) -> None:
        """See TrainEngine.watch_spans."""
        earlier = self._engine.watch_spans

        def both(spans: list[Span]) -> None:
            if earlier is not None:
                earlier(spans)
            watch(spans)

        self._engine.watch_spans = both

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
    """A forward hook; a validation in between is not shown."""
    if layer.training:
        with torch.no_grad():
            watch(name, output.detach())


def replica_lines(parameter: Parameter, grid: ParallelGrid, over: Mapping[str, Axis]) -> dict[str, Axis]:
    """The lines of several ranks along which a tensor of a parameter is the same.

    Args:
        parameter: what it belongs to; one that is not cut is the same along tensor parallelism.
        grid: of the layout.
        over: other lines along which it is the same.
    """
    tp = {"tp": grid.tp} if placement_of(parameter).dim is None else {}
    return {name: axis for name, axis in {**over, **tp}.items() if axis.size > 1}


def same_bits(first: Tensor, second: Tensor) -> Tensor:
    """Whether two tensors of one dtype hold the same bits; a scalar on their device."""
    words = torch.int16 if first.element_size() == 2 else torch.int32
    return (first.detach().view(words) == second.detach().view(words)).all()


def row_length(micro_batches: Sequence[MicroBatch]) -> int:
    """Tokens of each of the whole rows that are scored together."""
    tokens_bs = micro_batches[0].tokens_bs
    assert tokens_bs is not None, "every stage is given the tokens of what is scored"
    return tokens_bs.shape[1]


def held_shards(held: Iterable[HeldTensors], owned: bool = True) -> list[Shard]:
    """What a rank holds as rectangles of global tensors.

    Args:
        held: all of it.
        owned: leaves out what another rank speaks for.
    """
    shards: list[Shard] = []
    for part in held:
        if owned and not part.owned:
            continue
        place, shape = placement_of(part.parameter), local_shape(part.parameter)
        for kind, flat in part.tensors.items():
            shards += parameter_shards(kind, place, shape, part.first, flat)
    return shards
