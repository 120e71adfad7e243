"""One bucket of parameters at work: flat weights, fp32 gradient sums, this rank's slice of the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megads.optim.buckets import BucketLayout
from megads.parallel.grid import Axis


class Bucket:
    """Parameters whose gradients travel together.

    Attributes:
        layout: where each parameter lies.
        copies: the parameters of every slot: one, or the embedding and the head that share it on one stage.
        master: fp32 weights of this rank's slice, which AdamW updates.
        gradient: fp32, this rank's slice of the sum over all ranks; from the reduction to the end of the step.
        missing: gradients that the running backward pass still owes.
        norms: of every slot's own sum, before the reduction mixes it with other ranks'.
    """

    def __init__(
        self,
        layout: BucketLayout,
        copies: Sequence[Sequence[Parameter]],
        data: Axis,
        sharded: bool,
        also_over: ProcessGroup | None,
    ) -> None:
        """Moves the parameters into the bucket's flat buffer.

        Args:
            layout: of the bucket.
            copies: parameters of every slot, in the order of layout.slots.
            data: ranks with the same weights and other tokens.
            sharded: True gives each of them a slice of the bucket (ZeRO-1), False all of it to all (ZeRO-0).
            also_over: group over which the slice is summed once more: of both copies of a tied embedding, or of the
                ranks that each saw a part of the sequence.
        """
        self.layout, self.copies, self._also_over = layout, copies, also_over
        self._data, self._sharded = data, sharded
        first = copies[0][0]
        self.weights = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        for slot, parameters in zip(layout.slots, copies, strict=True):
            place = self.weights[slot.start : slot.stop].view(parameters[0].shape)
            place.copy_(parameters[0].detach())
            for parameter in parameters:
                parameter.data = place
        self.slice = layout.slice_of(data.rank, data.size) if sharded else range(layout.numel)
        self.master = self._own(self.weights).to(torch.float32, copy=True)
        self.gradient: Tensor | None = None
        self._sums: Tensor | None = None
        self._reduction: dist.Work | None = None
        self.begin()

    def _own(self, flat: Tensor) -> Tensor:
        return flat[self.slice.start : self.slice.stop]

    def begin(self) -> None:
        """Forgets everything about the last step."""
        self.missing = sum(len(parameters) for parameters in self.copies)
        self.gradient = self._sums = self._reduction = None
        self.norms: list[Tensor] = []

    def add(self, slot: int, parameter: Parameter) -> None:
        """Adds a parameter's gradient to the fp32 sums and frees it.

        The sums come into being with the first gradient of a step: during the first forward passes, when most
        activations are alive, there are none.
        """
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._sums is None:
            self._sums = torch.zeros(self.layout.numel, dtype=torch.float32, device=self.weights.device)
        place = self.layout.slots[slot]
        self._sums[place.start : place.stop].add_(gradient.reshape(-1))

    def launch(self) -> None:
        """Starts the reduction over data parallel and returns at once."""
        if self._sums is None:
            self._sums = torch.zeros(self.layout.numel, dtype=torch.float32, device=self.weights.device)
        self.norms = list(torch._foreach_norm([self._sums[slot.start : slot.stop] for slot in self.layout.slots]))
        if self._data.size == 1 or not self._sharded:
            self.gradient = self._sums
            if self._data.size > 1:
                self._reduction = dist.all_reduce(self._sums, group=self._data.group, async_op=True)
        else:
            self.gradient = torch.empty_like(self.master)
            self._reduction = dist.reduce_scatter_tensor(
                self.gradient, self._sums, group=self._data.group, async_op=True
            )

    def finish(self) -> None:
        """Waits for the reduction and frees all but this rank's slice.

        The sum over `also_over` comes second, so that its ranks add the same bits: the order in which a collective
        sums depends on the place in its buffer, and the first sum has already mixed the data-parallel ranks'.
        """
        if self._reduction is not None:
            self._reduction.wait()
        self._sums = self._reduction = None
        if self._also_over is not None:
            dist.all_reduce(self.gradient, group=self._also_over)

    def publish(self) -> None:
        """Rounds the masters to the weights' dtype and gathers every rank's slice of them."""
        own = self._own(self.weights)
        own.copy_(self.master)
        if self._sharded and self._data.size > 1:
            dist.all_gather_into_tensor(self.weights, own, group=self._data.group)
