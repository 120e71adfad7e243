"""Asynchronous point-to-point communication between pipeline ranks, with reused receive buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megads.parallel.config import ParallelConfig, axis_ranks
from megads.parallel.grid import ParallelGrid
from megads.parallel.pipeline_actions import (
    P2P_CTAS,
    Action,
    Schedule,
    StagePlacement,
    acknowledged_sends,
    sent_and_received,
)

Shape = tuple[int, ...]


class BufferPool:
    """Pool of receive buffers, which are reused once they are returned.

    Attributes:
        made: number of buffers allocated so far.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free: dict[Shape, list[Tensor]] = {}
        self.made = 0

    def take(self, shape: Shape) -> Tensor:
        """Returns an uninitialized buffer of this shape."""
        free = self._free.get(shape)
        if free:
            return free.pop()
        self.made += 1
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer to the pool; its contents must no longer be needed."""
        self._free.setdefault(tuple(buffer.shape), []).append(buffer)

    def free_other_shapes(self, kept: set[Shape]) -> None:
        """Frees the buffers of all other shapes."""
        self._free = {shape: free for shape, free in self._free.items() if shape in kept}


class P2PCommunicator:
    """Sends and receives of one pipeline rank in a step.

    Sends and receives are issued where the schedule lists them, in an order that all ranks agree on: see
    `megads.parallel.message_order`, which shows that they cannot deadlock. The order of gloo and NCCL is the same.

    Two process groups are used, one for transfers to higher pipeline ranks and one for those to lower ranks. NCCL runs
    all transfers between two ranks of a group in order, so with one group the two directions would take turns.

    Args:
        parallel: the layout.
        grid: the ranks.
        dtype: dtype of all transferred tensors.
        device: device of all transferred tensors.
    """

    def __init__(self, parallel: ParallelConfig, grid: ParallelGrid, dtype: torch.dtype, device: torch.device) -> None:
        self._grid = grid
        self._upward, self._downward = _line_group(parallel, grid), _line_group(parallel, grid)
        self._pool = BufferPool(dtype, device)
        self._arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._leaving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._connect(parallel.placement, device)
        self._schedule: Schedule | None = None
        self._acknowledged: dict[Action, tuple[Action, ...]] = {}
        self._peers: dict[Action, int] = {}

    def _connect(self, placement: StagePlacement, device: torch.device) -> None:
        """Sends one element in each direction between all ranks that will communicate, in the same order on all ranks.

        NCCL connects two ranks in their first call, which blocks the host until the peer calls too. Here it costs no
        waiting for another rank's computation.
        """
        ranks, here = self._grid.pp.ranks, self._grid.pp.rank
        pairs = {tuple(sorted(pair)) for pair in pairwise(placement.ranks)}
        for low, high in sorted(pairs):
            for source, target in ((low, high), (high, low)) if low != high else ():
                group = self._group(source, target)
                if here == source:
                    dist.send(torch.zeros(1, device=device), ranks[target], group=group)
                if here == target:
                    dist.recv(torch.zeros(1, device=device), ranks[source], group=group)

    def begin(self, schedule: Schedule, shape_of: Callable[[int], Shape]) -> None:
        """Starts a step.

        Args:
            schedule: schedule of the step.
            shape_of: returns the shape of the tensors transferred for a micro-batch.
        """
        rank = self._grid.pp.rank
        self._shape_of = shape_of
        if schedule is not self._schedule:
            self._schedule = schedule
            self._acknowledged = acknowledged_sends(schedule, rank)
            sent, received = sent_and_received(schedule, rank)
            self._peers = {m.send: m.receiver for m in sent} | {m.receive: m.sender for m in received}
        self._pool.free_other_shapes({shape_of(index) for index in range(schedule.micro_batches)})

    def _group(self, source: int, target: int) -> ProcessGroup | None:
        return self._upward if target > source else self._downward

    def post(self, action: Action) -> None:
        """Posts a receive."""
        peer = self._peers[action]
        buffer = self._pool.take(self._shape_of(action.micro_batch))
        work = dist.irecv(buffer, self._grid.pp.ranks[peer], group=self._group(peer, self._grid.pp.rank))
        assert work is not None, "this rank is not in its own pipeline"
        self._arriving[action] = work, buffer

    def take(self, action: Action) -> Tensor:
        """Waits for a posted receive.

        Args:
            action: the receive.

        Returns:
            The received tensor, in a buffer to be returned with `release`.
        """
        work, buffer = self._arriving.pop(action)
        work.wait()
        for send in self._acknowledged.get(action, ()):
            self._end(send)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Returns a buffer from `take` to the pool."""
        self._pool.give(buffer)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Starts a send; the tensor is kept alive until the send completes, and must not be modified."""
        peer = self._peers[action]
        group = self._group(self._grid.pp.rank, peer)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self._grid.pp.ranks[peer], group=group)
        assert work is not None, "this rank is not in its own pipeline"
        self._leaving[action] = work, tensor

    def _end(self, send: Action) -> None:
        work, _ = self._leaving.pop(send)
        work.wait()

    def finish(self) -> None:
        """Ends a step: waits until all sends are complete."""
        assert not self._arriving, "receives were not taken"
        for send in list(self._leaving):
            self._end(send)


def p2p_options(timeout: timedelta | None) -> dist.ProcessGroupNCCL.Options:
    """Returns the NCCL options of a p2p process group; see P2P_CTAS."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = P2P_CTAS
    if timeout is not None:
        options._timeout = timeout  # torch warns if it differs from the group's timeout
    return options


def _line_group(parallel: ParallelConfig, grid: ParallelGrid) -> ProcessGroup | None:
    """Creates a new process group over the ranks of this rank's pipeline; collective over the world."""
    mine: ProcessGroup | None = None
    lines: Sequence[tuple[int, ...]] = axis_ranks("pp", parallel) if parallel.pp > 1 else []
    for line in lines:
        options = p2p_options(grid.control.timeout) if dist.get_backend() == "nccl" else None
        group = dist.new_group(list(line), timeout=grid.control.timeout, pg_options=options)
        if grid.rank in line:
            mine = group
    return mine
