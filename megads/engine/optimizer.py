"""Optimizer with fp32 master weights: ZeRO-0 or ZeRO-1 over buckets of flat weights, in bf16 or fp32.

The same code runs in both precisions, so the fp32 parity tests also cover bf16 training. A step: gradients of every
micro-batch are accumulated in fp32 main_grad during the backward pass; in the last backward pass the reduction of each
bucket starts as soon as its last gradient is accumulated; gradient norm, clipping and optimizer run on this rank's
slices; the new weights are all-gathered, at once or during the next forward pass.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megads.engine.bucket import Bucket, WeightGathers
from megads.ops.adamw import Pieces
from megads.ops.config import TORCH, Kernels
from megads.optim.config import OptimConfig
from megads.optim.groups import (
    AVERAGE,
    BucketLayout,
    LrScale,
    Member,
    Role,
    bucket_layouts,
    parameter_rates,
    parameter_role,
    unit_lr_scale,
)
from megads.optim.masters import MasterGroup, MasterLayout, ParameterRun, UpdateRule, clip_factor, update_average
from megads.optim.muon import FusedRows
from megads.optim.optimizers import MasterOptimizer, make_optimizer
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.sharding import placement_of
from megads.parallel.weight_gradients import Addend


@dataclass(frozen=True)
class NamedParameter:
    """A parameter to be trained.

    Attributes:
        name: name in the whole model; parameters of the same name share their memory and their gradient sum.
        parameter: this rank's shard.
        owned: False if another rank owns the same elements: the first tensor-parallel rank owns a replicated parameter,
            the first stage a tied one. Only owned elements count in the gradient norm and are saved in checkpoints.
        pair: group of the two pipeline ranks that hold a copy of a tied embedding; None for other parameters.
        expert: whether it belongs to experts, which the ranks of `ParallelGrid.expert_data` hold.
    """

    name: str
    parameter: Parameter
    owned: bool = True
    pair: ProcessGroup | None = None
    expert: bool = False


class StateRange(NamedTuple):
    """A range of one parameter's elements whose optimizer state this rank holds.

    Attributes:
        parameter: the parameter.
        first: index of the range's first element in the flattened local parameter.
        bucket: bucket whose slice on this rank holds the state, in elements [start, start + length).
        start: index of the first element in that slice.
        length: number of elements.
        owned: see NamedParameter; under ZeRO-0 only the first data-parallel rank owns any elements.
    """

    parameter: Parameter
    first: int
    bucket: Bucket
    start: int
    length: int
    owned: bool

    def view_in(self, slice_of_bucket: Tensor) -> Tensor:
        """View of this range in a tensor of the size of the bucket's slice."""
        return slice_of_bucket.narrow(0, self.start, self.length)


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Wraps a method in a weak reference for use as a parameter hook; it does nothing once its object is freed.

    Python's garbage collector does not see references held by post-accumulate-grad hooks. A reference cycle through
    such a hook, from an object that holds the parameters, would never be freed.

    Args:
        method: method of an object that is kept alive elsewhere.
    """
    of_object = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (bound := of_object()) is not None:
            bound(*arguments)

    return call


class BucketOptimizer:
    """The bucketed optimizer of one rank: AdamW or another update rule.

    With AdamW a step does not synchronize with the device: the kernel itself skips a step with a non-finite norm.
    Other optimizers wait for the clipping factor. The caller reads `norm` after a step and passes its value to
    `record_norm`.

    Attributes:
        buckets: buckets in the order in which a backward pass completes them.
        base: optimizer of the buckets' masters.
        norm: global 2-norm of the last step's gradients before clipping, fp64 scalar on the device.
        grad_norm: value of `norm` on the host, set by `record_norm`; inf if the step was skipped.
        skipped: whether the last step was skipped because its norm was not finite; set by `record_norm`.
        sharded: whether every data-parallel rank holds the state of one slice only (ZeRO-1).
        last_backward: set by the engine before a stage's last backward pass of the step, or its weight-gradient part if
            the pass is split; from then on buckets are reduced as they complete.
        discarded: set by the engine: fp64 scalar that `step` adds to the square of the norm; infinity skips the step.
    """

    discarded: Tensor | None = None
    _gathers: WeightGathers | None = None

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        optim: OptimConfig,
        parallel: ParallelConfig,
        grid: ParallelGrid,
        kernels: Kernels = TORCH,
        fused: FusedRows | None = None,
        width_scale: LrScale = unit_lr_scale,
        adamw_rule: UpdateRule | None = None,
    ) -> None:
        self._grid, self._clip, self._ema_decay = grid, optim.clip_grad, optim.ema_decay
        self._kernels = kernels
        self.sharded = parallel.zero_stage > 0
        self._places: dict[Parameter, tuple[Bucket, int]] = {}
        self.buckets = self._make_buckets(parameters, optim, parallel, width_scale)
        self._owned = {
            named.name for named in parameters if named.owned and (self.sharded or self._copies(named.expert).is_first)
        }
        for bucket in self.buckets if self._ema_decay is not None else ():
            bucket.average = bucket.master.clone()
        self._normed = self._pieces_of_norm()
        groups = [
            {
                "params": [bucket.master],
                "weights": [bucket.own_weights],
                "lr_scale": bucket.layout.rates.lr_scale,
                "weight_decay": bucket.layout.rates.weight_decay,
                "role": bucket.layout.role,
                "layouts": [None if optim.is_adamw else self._master_layout(bucket, parallel)],
            }
            for bucket in self.buckets
        ]
        self.base: MasterOptimizer = make_optimizer(groups, optim, kernels, fused, adamw_rule)
        self.norm = torch.zeros((), dtype=torch.float64, device=self.buckets[0].master.device)
        self.grad_norm, self.skipped = 0.0, False
        self.begin()

    def _make_buckets(
        self,
        parameters: Sequence[NamedParameter],
        optim: OptimConfig,
        parallel: ParallelConfig,
        width_scale: LrScale,
    ) -> list[Bucket]:
        copies: dict[str, list[Parameter]] = {}
        for named in parameters:
            copies.setdefault(named.name, []).append(named.parameter)
        pairs = {named.name: named.pair for named in parameters if named.pair is not None}
        experts = {named.name for named in parameters if named.expert}
        members = []
        for name, same in copies.items():
            role = parameter_role(name, name in pairs or len(same) > 1, muon=optim.is_muon)
            rates = parameter_rates(name, role, optim, width_scale)
            # Whether the gradient of a replicated parameter covers only this rank's sequence shard.
            partial = bool(same[0].gradient_partial)  # type: ignore[attr-defined]
            members.append(Member(name, same[0].numel(), role, partial, rates, name in experts))
        ranks, expert_ranks = (axis.size if self.sharded else 1 for axis in (self._grid.data, self._grid.expert_data))
        on_gradient = _weakly(self._on_gradient)
        buckets = []
        for layout in bucket_layouts(members, ranks, parallel.bucket_elements, expert_ranks):
            of_slots = [copies[slot.member.name] for slot in layout.slots]
            also_over = self._also_over(layout, pairs)
            bucket = Bucket(layout, of_slots, self._copies(layout.expert), self.sharded, also_over, self._kernels)
            for slot, same in enumerate(of_slots):
                for parameter in same:
                    self._places[parameter] = bucket, slot
                    parameter.register_post_accumulate_grad_hook(on_gradient)
            buckets.append(bucket)
        return buckets

    def _copies(self, expert: bool) -> Axis:
        """The ranks that hold the same part of a parameter, over which its gradients are reduced."""
        return self._grid.expert_data if expert else self._grid.data

    def _master_layout(self, bucket: Bucket, parallel: ParallelConfig) -> MasterLayout:
        """Positions of all parameters in a bucket's master, including those outside this rank's slice."""
        mine, runs = bucket.slice, []
        for slot, (parameter, *_) in zip(bucket.layout.slots, bucket.copies, strict=True):
            where = placement_of(parameter)
            dim = where.dim
            counted = dim is not None or self._grid.tp.is_first
            matrices = max(1, len(where.experts))
            shape, size = (len(parameter) // matrices, *parameter.shape[1:]), parameter.numel() // matrices
            for begin in range(slot.start, slot.stop, size):
                start, stop = max(mine.start, begin), min(mine.stop, begin + size)
                length = max(0, stop - start)
                first, at = (start - begin, start - mine.start) if length else (0, 0)
                name, rows = slot.member.name, where.held_by_ranks
                runs.append(ParameterRun(name, shape, dim, counted, first, at, length, rows))
        of_experts = MasterGroup.of_experts(self._grid, sharded=self.sharded, expert_tp=parallel.expert_tp)
        group = of_experts if bucket.layout.expert else MasterGroup.of_zero1(self._grid, sharded=self.sharded)
        return MasterLayout(bucket.layout.role, tuple(runs), group)

    def _also_over(self, layout: BucketLayout, pairs: dict[str, ProcessGroup]) -> ProcessGroup | None:
        if layout.partial:
            assert layout.role is not Role.tied, "a tied embedding is sharded over tensor parallelism, never replicated"
            return self._grid.tp.group
        return pairs.get(layout.slots[0].member.name)

    def overlap_gathers(self, layers: Sequence[nn.Module]) -> Callable[[nn.Module], None]:
        """All-gathers the new weights of every following step during the next forward pass.

        Until a layer has waited, its parameters are NaN; `finish_gathers` waits for all.

        Args:
            layers: all layers, in the order of the forward pass.

        Returns:
            A function that waits for the weights of a layer, to be called just before the layer runs.
        """
        of_layers = {
            layer: [self._places[parameter][0] for parameter in layer.parameters() if parameter in self._places]
            for layer in layers
        }
        assert {bucket for buckets in of_layers.values() for bucket in buckets} == set(self.buckets)
        self._gathers = WeightGathers(of_layers)
        return self._gathers.wait

    def finish_gathers(self) -> None:
        """Waits for the weights of all layers; collective, as it starts all-gathers that have not been started."""
        if self._gathers is not None:
            self._gathers.finish()

    def begin(self, *, overlap: bool = True) -> None:
        """Resets the gradients; call before the first micro-batch of a step.

        Args:
            overlap: whether buckets are reduced as they complete; else only in `reduce`, until which `own_gradients` is
                valid.
        """
        self.last_backward, self._launched, self._overlap = False, 0, overlap
        for bucket in self.buckets:
            bucket.begin()

    def keep_main_grads(self) -> None:
        """Keeps every main_grad at the same address from now on, as CUDA graphs require."""
        for bucket in self.buckets:
            bucket.keep_main_grad()

    def free_main_grads(self) -> None:
        """Frees every main_grad; from now on they are allocated during a step only. Call between steps."""
        for bucket in self.buckets:
            bucket.free_main_grad()

    def unwritten(self) -> list[set[int]]:
        """Slots of every bucket's main_grad without a gradient in this step."""
        return [bucket.unwritten for bucket in self.buckets]

    def update_unwritten(self, slots: list[set[int]]) -> None:
        """Updates the unwritten slots after a CUDA graph replay, which accumulates gradients without running hooks."""
        for bucket, of_bucket in zip(self.buckets, slots, strict=True):
            bucket.unwritten = of_bucket

    def add(self, weight: Parameter, gradient: Addend) -> None:
        """See MainGrads; for weight-gradient GEMMs that are deferred or write directly to main_grad."""
        bucket, slot = self._places[weight]
        bucket.add_product(slot, weight, gradient)

    def done(self, weight: Parameter) -> None:
        """See MainGrads."""
        if self.last_backward:
            self._places[weight][0].missing -= 1
            self._launch_complete()

    def _on_gradient(self, parameter: Parameter) -> None:
        if parameter.grad is None:  # deferred, or already accumulated
            return
        bucket, slot = self._places[parameter]
        bucket.add(slot, parameter)
        self.done(parameter)

    def _launch_complete(self) -> None:
        """Starts reductions in the order of the buckets, which is the same on all ranks of the collective."""
        while self._overlap and self._launched < len(self.buckets) and self.buckets[self._launched].missing <= 0:
            self.buckets[self._launched].launch()
            self._launched += 1

    def reduce(self) -> None:
        """Starts the remaining reductions and waits for all; a parameter without a gradient counts as zero."""
        for bucket in self.buckets[self._launched :]:
            bucket.launch()
        self._launched = len(self.buckets)
        for bucket in self.buckets:
            bucket.finish()

    @torch.no_grad()
    def step(self, learning_rate: float, wait: Callable[[], None] | None = None) -> None:
        """Computes the norm, clips, updates the master weights and all-gathers the new weights.

        A step with a non-finite norm changes nothing. Call `record_norm` before the next step.

        Args:
            learning_rate: learning rate of the step.
            wait: called before master weights and optimizer state change.
        """
        self.norm = self.global_norm(self.discarded)
        if wait is not None:
            wait()
        self._update(learning_rate)
        for bucket in self.buckets:
            bucket.master.grad = bucket.gradient = None

    def record_norm(self, norm: float) -> None:
        """Sets `grad_norm` and `skipped` of the last step, from the value of `norm` on the host."""
        self.skipped = not norm < math.inf
        self.grad_norm = math.inf if self.skipped else norm
        if self.skipped:
            self.base.undo_step_count()

    def _update(self, learning_rate: float) -> None:
        self.finish_gathers()  # of layers that no pass has used; the update overwrites what they send
        for bucket in self.buckets:
            bucket.master.grad = bucket.gradient
        for group in self.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        clip = clip_factor(self.norm, self._clip)
        self.base.step(clip)
        for bucket in self.buckets:
            if bucket.average is not None and self._ema_decay is not None:
                update_average(bucket.average, bucket.master, self._ema_decay, clip.isfinite())
        if self._gathers is not None:
            self._gathers.begin()
            return
        for bucket in self.buckets:
            bucket.gather()

    def _pieces_of_norm(self) -> dict[Bucket, Pieces]:
        """The owned ranges of every bucket; every element of the model counts in the norm on exactly one rank."""
        bounds: dict[Bucket, list[tuple[int, int]]] = {}
        for part in self.state_ranges():
            if part.owned:
                bounds.setdefault(part.bucket, []).append((part.start, part.start + part.length))
        return {bucket: Pieces(of_bucket, bucket.master.device) for bucket, of_bucket in bounds.items()}

    @torch.no_grad()
    def global_norm(self, added: Tensor | None = None) -> Tensor:
        """Global 2-norm of the reduced gradients before clipping, with `added` (see `discarded`) in its square; fp64
        scalar on the device. Collective."""
        squares = [bucket.reduced_squares(pieces) for bucket, pieces in self._normed.items()]
        square = torch.cat(squares).sum() if squares else torch.zeros_like(self.norm)
        if added is not None:
            square = square + added
        if self._grid.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt()

    def publish_weights(self) -> None:
        """Derives the working weights on all ranks from the master weights."""
        self.finish_gathers()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.publish()

    def publish_averages(self) -> None:
        """Makes the running averages the working weights on all ranks, until `publish_weights`."""
        self.finish_gathers()
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.publish_average()

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters of this rank, tied ones once, in the order of `gradient_norms`."""
        return [same[0] for bucket in self.buckets for same in bucket.copies]

    @property
    def gradient_norms(self) -> list[Tensor]:
        """2-norm of every parameter's local gradient, before any reduction; available after `reduce`."""
        return [squares_e.sum().sqrt() for squares_e in self.own_squares()]

    def own_squares(self) -> Iterator[Tensor]:
        """Yields the sums of squares of every parameter's local gradient like `gradient_norms`, [experts], or [1]."""
        for bucket in self.buckets:
            yield from () if bucket.squares is None else bucket.squares.split(bucket.experts)

    def own_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yields name and main_grad of every parameter before any reduction; requires `begin(overlap=False)`."""
        for bucket in self.buckets:
            main_grad = bucket.main_grad()
            for slot in bucket.layout.slots:
                yield slot.member.name, main_grad[slot.start : slot.stop]

    def state_ranges(self) -> Iterator[StateRange]:
        """Yields every range of a parameter whose optimizer state this rank holds."""
        for bucket in self.buckets:
            mine = bucket.slice
            for slot, same in zip(bucket.layout.slots, bucket.copies, strict=True):
                start, stop = max(mine.start, slot.start), min(mine.stop, slot.stop)
                if start < stop:
                    owned = slot.member.name in self._owned
                    yield StateRange(same[0], start - slot.start, bucket, start - mine.start, stop - start, owned)

    def state_of(self, part: StateRange) -> dict[str, Tensor]:
        """Flat views of the fp32 master weight, optimizer state and running average of one range, by kind."""
        master = part.bucket.master
        # AdamW also keeps its step count in the state, on the device.
        state = {kind: tensor for kind, tensor in self.base.state[master].items() if kind != "step"}
        averages = {} if part.bucket.average is None else {AVERAGE: part.bucket.average}
        return {kind: part.view_in(tensor) for kind, tensor in {"weight": master, **state, **averages}.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self.base.param_groups

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, skipped steps excluded."""
        return self.base.steps

    def set_steps(self, steps: int) -> None:
        """Sets the step count used for bias correction."""
        self.base.set_steps(steps)
