"""Buckets of the optimizer: flat weights of several parameters, their fp32 main_grad, and its reduction.

Gradients of every micro-batch are accumulated in main_grad during the backward pass; its reduction over the ranks that
hold the same weights starts with `launch`, and the new weights are all-gathered by `publish`, or during the next
forward pass by `WeightGathers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megads.ops.adamw import Pieces, square_sums
from megads.ops.config import TORCH, Kernels
from megads.optim.groups import BucketLayout
from megads.parallel.grid import Axis
from megads.parallel.sharding import placement_of
from megads.parallel.weight_gradients import Addend, SmallGradients


class Bucket:
    """Parameters whose gradients are reduced in one collective.

    Attributes:
        layout: positions of the parameters in the bucket.
        data: ranks that hold the same weights, over which gradients are reduced.
        copies: parameters of every slot: one, or two if embedding and head are tied on one stage.
        master: fp32 master weights of this rank's slice.
        gradient: fp32, this rank's slice of the reduced gradient; set from the reduction to the end of the step.
        experts: number of experts stacked in the parameter of every slot; 1 for others.
        missing: number of gradients that the current backward pass has not computed yet.
        squares: fp64, sums of squares of this rank's local gradient per slot, or per expert, before the reduction.
        own_weights: this rank's slice of the working weights.
        pair: the ranks that hold the copies of a tied embedding; None for other buckets.
        average: fp32, this rank's slice of the running average of the weights; None if no average is kept.
    """

    def __init__(
        self,
        layout: BucketLayout,
        copies: Sequence[Sequence[Parameter]],
        data: Axis,
        sharded: bool,
        also_over: ProcessGroup | None,
        kernels: Kernels = TORCH,
    ) -> None:
        """Moves the parameters into the bucket's flat buffer.

        Args:
            layout: layout of the bucket.
            copies: parameters of every slot, in the order of layout.slots.
            data: ranks that hold the same weights: data-parallel ones, or those with the same experts.
            sharded: True gives each of them a slice of the bucket (ZeRO-1), False the whole bucket (ZeRO-0).
            also_over: group of a second all-reduce of the slice: the two ranks with a copy of a tied embedding, or the
                tensor-parallel ranks that each saw a part of the sequence.
            kernels: kernels to compute sums of squares with.
        """
        self.layout, self.copies, self._also_over, self._kernels = layout, copies, also_over, kernels
        self.data, self._sharded = data, sharded
        self.pair: Axis | None = None
        if also_over is not None and not layout.partial:
            ranks = tuple(dist.get_process_group_ranks(also_over))
            self.pair = Axis(dist.get_rank(also_over), ranks, also_over)
        first = copies[0][0]
        self._weights = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        for slot, parameters in zip(layout.slots, copies, strict=True):
            place = self._weights[slot.start : slot.stop].view(parameters[0].shape)
            place.copy_(parameters[0].detach())
            for parameter in parameters:
                parameter.data = place
        self._pending = False
        self._gather: dist.Work | None = None
        self.slice = layout.slice_of(data.rank, data.size) if sharded else range(layout.numel)
        self.own_weights = self._weights[self.slice.start : self.slice.stop]
        self.master = self.own_weights.to(torch.float32, copy=True)
        self.average: Tensor | None = None
        self._keeps = False
        self.experts = [max(1, len(placement_of(same[0]).experts)) for same in copies]
        sizes = ((slot.stop - slot.start) // number for slot, number in zip(layout.slots, self.experts, strict=True))
        pieces = (range(slot.start, slot.stop, size) for slot, size in zip(layout.slots, sizes, strict=True))
        self._pieces = Pieces(((start, start + each.step) for each in pieces for start in each), first.device)
        self.gradient: Tensor | None = None
        self._main_grad: Tensor | None = None
        self._reduction: dist.Work | None = None
        self.begin()

    @property
    def weights(self) -> Tensor:
        """Working weights of the whole bucket; must not be pending, see `WeightGathers`."""
        assert not self._pending, "read before their all-gather was waited for"
        return self._weights

    @property
    def is_gathered(self) -> bool:
        """Whether the working weights are all-gathered after an update, as other ranks hold slices of them."""
        return self._sharded and self.data.size > 1

    @property
    def holders(self) -> dict[str, Axis]:
        """The ranks that hold the same weights, by the name of their axis in the grid."""
        return {"expert_data" if self.layout.expert else "data": self.data}

    def begin(self) -> None:
        """Resets the state of the previous step."""
        self.missing = sum(len(parameters) for parameters in self.copies)
        self.gradient = self._reduction = None
        self._release()
        self._empty = set(range(len(self.copies)))
        self._small = SmallGradients()
        self.squares: Tensor | None = None

    def add(self, slot: int, parameter: Parameter) -> None:
        """Accumulates a parameter's gradient in its fp32 main_grad and frees it; a small one later, with others.

        main_grad is allocated at the first gradient of a step, so it takes no memory during the first forward passes,
        when most activations are alive. The first gradient of a parameter is copied, not added to zeros.
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        main_grad, first = self._main_grad_of(slot, parameter)
        if gradient.numel() <= SmallGradients.MOST:
            self._small.add(slot, main_grad, gradient, first)
        elif first:
            main_grad.copy_(gradient)
        else:
            main_grad.add_(gradient)

    def add_product(self, slot: int, parameter: Parameter, gradient: Addend) -> None:
        """Computes a weight gradient directly in main_grad: like `add`, but without rounding to the weights' dtype."""
        gradient.add_to(*self._main_grad_of(slot, parameter))

    def _main_grad_of(self, slot: int, parameter: Parameter) -> tuple[Tensor, bool]:
        """A parameter's main_grad, marked as written, and whether this is its first gradient."""
        if self._small.holds(slot):
            self._small.accumulate()
        place = self.layout.slots[slot]
        first = slot in self._empty
        self._empty.discard(slot)
        return self._allocated()[place.start : place.stop].view(parameter.shape), first

    def _allocated(self) -> Tensor:
        """The main_grad of the whole bucket; unwritten slots are undefined, gaps between slots are zero."""
        if self._main_grad is None:
            self._main_grad = torch.empty(self.layout.numel, dtype=torch.float32, device=self._weights.device)
            edges = [edge for slot in self.layout.slots for edge in (slot.start, slot.stop)]
            for stop, start in zip(edges[1::2], [*edges[2::2], self.layout.numel], strict=True):
                if stop < start:
                    self._main_grad[stop:start] = 0.0
        return self._main_grad

    def keep_main_grad(self) -> None:
        """Keeps main_grad allocated, at the same address, across steps."""
        self._keeps = True
        self._allocated()

    def free_main_grad(self) -> None:
        """Frees main_grad, which steps then allocate again."""
        self._keeps = False
        self._release()

    def _release(self) -> None:
        if not self._keeps:
            self._main_grad = None

    @property
    def unwritten(self) -> set[int]:
        """Slots of main_grad without a gradient in this step; a copy. All others are complete."""
        self._small.accumulate()
        return set(self._empty)

    @unwritten.setter
    def unwritten(self, slots: set[int]) -> None:
        self._empty = set(slots)

    def main_grad(self) -> Tensor:
        """This rank's accumulated fp32 gradients, before any reduction; zeros for parameters without a gradient."""
        main_grad = self._allocated()
        self._small.accumulate()
        for slot in self._empty:
            main_grad[self.layout.slots[slot].start : self.layout.slots[slot].stop] = 0.0
        self._empty = set()
        return main_grad

    def launch(self) -> None:
        """Starts the asynchronous reduction over the data-parallel ranks."""
        main_grad = self.main_grad()
        self.squares = square_sums(main_grad, self._pieces, self._kernels)
        if self.data.size == 1 or not self._sharded:
            self.gradient = main_grad
            if self.data.size > 1:
                self._reduction = dist.all_reduce(main_grad, group=self.data.group, async_op=True)
        else:
            self.gradient = torch.empty_like(self.master)
            self._reduction = dist.reduce_scatter_tensor(self.gradient, main_grad, group=self.data.group, async_op=True)

    def finish(self) -> None:
        """Waits for the reduction and frees everything except this rank's slice.

        The all-reduce over `also_over` comes second, so that its ranks get bitwise identical sums: the summation order
        of a collective depends on the position in its buffer, and the first reduction has already combined the
        data-parallel ranks.
        """
        if self._reduction is not None:
            self._reduction.wait()
        self._reduction = None
        self._release()
        if self._also_over is not None:
            dist.all_reduce(self.gradient, group=self._also_over)

    def reduced_squares(self, pieces: Pieces) -> Tensor:
        """Sums of squares of pieces of this rank's slice of the reduced gradient, fp64."""
        alone = self.data.size == 1 and self._also_over is None
        if alone and self.squares is not None and pieces.bounds == self._pieces.bounds:
            return self.squares  # of the same gradient
        return square_sums(gradient_of(self), pieces, self._kernels)

    def publish(self) -> None:
        """Copies the master weights to the working weights, rounded to their dtype, and all-gathers the slices."""
        self.own_weights.copy_(self.master)
        self.gather()

    def publish_average(self) -> None:
        """Makes the running average the working weights, until `publish`."""
        assert self.average is not None
        self.own_weights.copy_(self.average)
        self.gather()

    def gather(self) -> None:
        """All-gathers every rank's slice of the working weights."""
        if self.is_gathered:
            dist.all_gather_into_tensor(self.weights, self.own_weights, group=self.data.group)

    @cached_property
    def _views(self) -> list[tuple[Parameter, Tensor, Tensor]]:
        """Every parameter with its place in the working weights, and with NaNs of its shape, which take no memory."""
        nan = torch.full((), math.nan, dtype=self._weights.dtype, device=self._weights.device)
        parameters = [parameter for same in self.copies for parameter in same]
        return [(parameter, parameter.data, nan.expand(parameter.shape)) for parameter in parameters]

    def invalidate_weights(self) -> None:
        """Makes every parameter NaN from the update to `end_gather`: who reads one without waiting gets NaNs, not the
        former weights of other ranks' slices."""
        for parameter, _, nans in self._views:
            parameter.data = nans
        self._pending = True

    def launch_gather(self) -> None:
        """Starts the asynchronous all-gather of weights that are pending."""
        self._gather = dist.all_gather_into_tensor(
            self._weights, self.own_weights, group=self.data.group, async_op=True
        )

    def end_gather(self) -> None:
        """Waits for the all-gather: on GPUs the current stream waits, not the host."""
        assert self._gather is not None
        self._gather.wait()
        self._gather, self._pending = None, False
        for parameter, place, _ in self._views:
            parameter.data = place


class WeightGathers:
    """All-gathers of the updated working weights during the next forward pass (Megatron-LM's overlap-param-gather).

    `begin` makes the weights pending and starts the all-gathers of the first two layers; `wait`, just before a layer
    runs, starts those of the next layer and waits for the layer's own. The order is that of the forward pass.

    All-gathers are started at places of the step that are the same on all ranks of a collective: at the end of the
    update, before a layer of the first training micro-batch, and in `finish`. So the collectives of all communicators
    have one order, as those of the overlapped gradient reduction, and NCCL cannot deadlock. They are not all started at
    the end of the update, because with one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) no kernel starts before all
    that was launched earlier has started, and the all-gathers of a communicator start one after the other.
    """

    def __init__(self, layers: Mapping[nn.Module, Sequence[Bucket]]) -> None:
        """Makes all weights ready.

        Args:
            layers: the buckets of every layer's parameters, in the order of the forward pass.
        """
        self._order = [bucket for bucket in dict.fromkeys(chain(*layers.values())) if bucket.is_gathered]
        places = {bucket: place for place, bucket in enumerate(self._order, 1)}
        last = (max((places.get(bucket, 0) for bucket in buckets), default=0) for buckets in layers.values())
        ends = list(accumulate(last, max))
        # For every layer, the number of buckets that it and the layers before it need, and the next one as well.
        self._needed = dict(zip(layers, zip(ends, [*ends[1:], *ends[-1:]], strict=True), strict=True))
        self._launched = self._ended = len(self._order)

    def begin(self) -> None:
        """Makes the working weights of all buckets pending, after the optimizer has written this rank's slices."""
        assert self._ended == len(self._order), "the last step's all-gathers have not been waited for"
        for bucket in self._order:
            bucket.invalidate_weights()
        self._launched = self._ended = 0
        _, first_two = next(iter(self._needed.values()), (0, 0))
        self._launch(first_two)

    def wait(self, layer: nn.Module) -> None:
        """Waits for a layer's weights, and starts the all-gathers of the next layer's."""
        own, with_next = self._needed[layer]
        self._launch(with_next)
        self._end(own)

    def finish(self) -> None:
        """Waits for all weights; the same calls on all ranks of a collective."""
        self._launch(len(self._order))
        self._end(len(self._order))

    def _launch(self, count: int) -> None:
        for bucket in self._order[self._launched : count]:
            bucket.launch_gather()
        self._launched = max(self._launched, count)

    def _end(self, count: int) -> None:
        for bucket in self._order[self._ended : count]:
            bucket.end_gather()
        self._ended = max(self._ended, count)


def gradient_of(bucket: Bucket) -> Tensor:
    """Returns the bucket's reduced gradient, which exists from `reduce` to the end of `step`."""
    assert bucket.gradient is not None
    return bucket.gradient
