"""One bucket of parameters at work: flat weights, fp32 main_grad, this rank's slice of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megads.ops.kernels import TORCH, Kernels
from megads.ops.square_sums import Pieces, square_sums
from megads.optim.groups import BucketLayout
from megads.parallel.grid import Axis
from megads.parallel.weight_gradients import Addend


class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        layout: where each parameter lies.
        copies: the parameters of every slot: one, or the embedding and the head that share it on one stage.
        master: fp32 weights of this rank's slice, which AdamW updates.
        gradient: fp32, this rank's slice of the sum over all ranks; from the reduction to the end of the step.
        missing: gradients that the running backward pass still owes.
        squares: of every slot's own sum, the sum of squares before the reduction mixes it with other ranks'; fp64.
        own_weights: this rank's slice of the working weights.
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
            layout: of the bucket.
            copies: parameters of every slot, in the order of layout.slots.
            data: ranks with the same weights and other tokens.
            sharded: True gives each of them a slice of the bucket (ZeRO-1), False all of it to all (ZeRO-0).
            also_over: group over which the slice is summed once more: of both copies of a tied embedding, or of the
                ranks that each saw a part of the sequence.
            kernels: whose kernel sums squares.
        """
        self.layout, self.copies, self._also_over, self._kernels = layout, copies, also_over, kernels
        self._data, self._sharded = data, sharded
        first = copies[0][0]
        self.weights = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        for slot, parameters in zip(layout.slots, copies, strict=True):
            place = self.weights[slot.start : slot.stop].view(parameters[0].shape)
            place.copy_(parameters[0].detach())
            for parameter in parameters:
                parameter.data = place
        self.slice = layout.slice_of(data.rank, data.size) if sharded else range(layout.numel)
        self.own_weights = self.weights[self.slice.start : self.slice.stop]
        self.master = self.own_weights.to(torch.float32, copy=True)
        self._slots = Pieces(((slot.start, slot.stop) for slot in layout.slots), first.device)
        self.gradient: Tensor | None = None
        self._main_grad: Tensor | None = None
        self._reduction: dist.Work | None = None
        self.begin()

    def begin(self) -> None:
        """Forgets everything about the last step."""
        self.missing = sum(len(parameters) for parameters in self.copies)
        self.gradient = self._main_grad = self._reduction = None
        self._empty = set(range(len(self.copies)))
        self.squares: Tensor | None = None

    def add(self, slot: int, parameter: Parameter) -> None:
        """Adds a parameter's gradient to its fp32 main_grad and frees it.

        main_grad is allocated with the first gradient of a step: during the first forward passes, when most
        activations are alive, there is none. The first gradient of a parameter is written, not added to zeros.
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        main_grad, first = self._place(slot, parameter)
        if first:
            main_grad.copy_(gradient)
        else:
            main_grad.add_(gradient)

    def add_product(self, slot: int, parameter: Parameter, gradient: Addend) -> None:
        """Computes the gradient of a layer's weight in main_grad; like `add`, but it is never rounded."""
        gradient.add_to(*self._place(slot, parameter))

    def _place(self, slot: int, parameter: Parameter) -> tuple[Tensor, bool]:
        """A parameter's main_grad, which is about to get a gradient, and whether it is the first."""
        place = self.layout.slots[slot]
        first = slot in self._empty
        self._empty.discard(slot)
        return self._room()[place.start : place.stop].view(parameter.shape), first

    def _room(self) -> Tensor:
        """The whole main_grad; slots that are still empty are undefined, gaps between slots are zero."""
        if self._main_grad is None:
            self._main_grad = torch.empty(self.layout.numel, dtype=torch.float32, device=self.weights.device)
            stops = [slot.stop for slot in self.layout.slots]
            starts = [slot.start for slot in self.layout.slots[1:]]
            for stop, start in zip(stops, [*starts, self.layout.numel], strict=True):
                self._main_grad[stop:start] = 0.0
        return self._main_grad

    def launch(self) -> None:
        """Starts the reduction over data parallel and returns at once."""
        main_grad = self._room()
        for slot in self._empty:
            main_grad[self.layout.slots[slot].start : self.layout.slots[slot].stop] = 0.0
        self._empty = set()
        self.squares = square_sums(main_grad, self._slots, self._kernels)
        if self._data.size == 1 or not self._sharded:
            self.gradient = main_grad
            if self._data.size > 1:
                self._reduction = dist.all_reduce(main_grad, group=self._data.group, async_op=True)
        else:
            self.gradient = torch.empty_like(self.master)
            self._reduction = dist.reduce_scatter_tensor(
                self.gradient, main_grad, group=self._data.group, async_op=True
            )

    def finish(self) -> None:
        """Waits for the reduction and frees all but this rank's slice.

        The sum over `also_over` comes second, so that its ranks add the same bits: the order in which a collective
        sums depends on the place in its buffer, and the first sum has already mixed the data-parallel ranks'.
        """
        if self._reduction is not None:
            self._reduction.wait()
        self._main_grad = self._reduction = None
        if self._also_over is not None:
            dist.all_reduce(self.gradient, group=self._also_over)

    def publish(self) -> None:
        """Rounds the masters to the weights' dtype and gathers every rank's slice of them."""
        self.own_weights.copy_(self.master)
        self.gather()

    def gather(self) -> None:
        """Gathers every rank's slice of the working weights."""
        if self._sharded and self._data.size > 1:
            dist.all_gather_into_tensor(self.weights, self.own_weights, group=self._data.group)
