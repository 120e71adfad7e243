"""Tensors between pipeline ranks: asynchronous, in buffers that are used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megads.parallel.config import ParallelConfig
from megads.parallel.grid import ParallelGrid
from megads.parallel.pipeline_actions import (
    P2P_CTAS,
    Action,
    Schedule,
    StagePlacement,
    acknowledged_sends,
    sent_and_received,
)
from megads.parallel.rank_order import axis_lines

Shape = tuple[int, ...]


class BufferPool:
    """Memory that messages arrive in, used again once it is given back.

    Attributes:
        made: buffers that were allocated so far.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._free: dict[Shape, list[Tensor]] = {}
        self.made = 0

    def take(self, shape: Shape) -> Tensor:
        """A buffer of this shape; its contents are what they were."""
        free = self._free.get(shape)
        if free:
            return free.pop()
        self.made += 1
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Gives a buffer back that nobody reads any more."""
        self._free.setdefault(tuple(buffer.shape), []).append(buffer)

    def drop_other_shapes(self, kept: set[Shape]) -> None:
        """Frees what messages of other shapes were received in."""
        self._free = {shape: free for shape, free in self._free.items() if shape in kept}


@dataclass
class _Link:
    """Receives from one peer.

    Attributes:
        peer: its global rank.
        due: those not posted yet, in the order of sending.
        posted: how many are posted and not taken.
    """

    peer: int
    due: deque[Action] = field(default_factory=deque)
    posted: int = 0


class P2PCommunicator:
    """What one pipeline rank sends and receives in a step.

    Two process groups carry the messages, one to higher pipeline ranks and one to lower ones: NCCL runs all between
    two ranks of a group in order, so a receive that is posted ahead would hold up the send on which its own message
    depends. Within a group messages between two ranks go one way and meet in the order of the schedule.

    Args:
        parallel: the layout.
        grid: the ranks.
        dtype: of all messages.
        device: where they are.
    """

    def __init__(self, parallel: ParallelConfig, grid: ParallelGrid, dtype: torch.dtype, device: torch.device) -> None:
        self._grid = grid
        self._upward, self._downward = _line_group(parallel, grid), _line_group(parallel, grid)
        self._pool = BufferPool(dtype, device)
        self._links: dict[int, _Link] = {}
        self._arriving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._leaving: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._ahead = receives_ahead(parallel.placement, device)
        self._connect(parallel.placement, device)
        self._schedule: Schedule | None = None
        self._acknowledged: dict[Action, tuple[Action, ...]] = {}
        self._peers: dict[Action, int] = {}

    def _connect(self, placement: StagePlacement, device: torch.device) -> None:
        """Sends one element each way between all ranks that will talk, in one order on all of them.

        NCCL connects two ranks in the first call of both, which waits for the other's: a receive that is posted ahead
        would wait for a send that comes after what depends on this rank.
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
        """Before a step: posts the first receives.

        Args:
            schedule: of the step.
            shape_of: shape of the messages of a micro-batch.
        """
        rank = self._grid.pp.rank
        self._shape_of = shape_of
        if schedule is not self._schedule:
            self._schedule = schedule
            self._acknowledged = acknowledged_sends(schedule, rank)
            sent, received = sent_and_received(schedule, rank)
            self._peers = {m.send: m.receiver for m in sent} | {m.receive: m.sender for m in received}
        self._links = {}
        for action in schedule.actions[rank]:
            if action.kind.receives:
                peer = self._peers[action]
                self._links.setdefault(peer, _Link(self._grid.pp.ranks[peer])).due.append(action)
        self._pool.drop_other_shapes({shape_of(index) for index in range(schedule.micro_batches)})
        for peer in self._links:
            self._post_ahead(peer)

    def _group(self, source: int, target: int) -> ProcessGroup | None:
        return self._upward if target > source else self._downward

    def _post_ahead(self, peer: int) -> None:
        link = self._links[peer]
        while link.due and link.posted < self._ahead:
            self._post_next(peer)

    def _post_next(self, peer: int) -> None:
        link = self._links[peer]
        action = link.due.popleft()
        buffer = self._pool.take(self._shape_of(action.micro_batch))
        work = dist.irecv(buffer, link.peer, group=self._group(peer, self._grid.pp.rank))
        assert work is not None, "this rank is not in its own pipeline"
        self._arriving[action] = work, buffer
        link.posted += 1

    def post(self, action: Action) -> None:
        """Posts a receive and all that come before it from the same peer, as far as they are not posted."""
        while action not in self._arriving:
            self._post_next(self._peers[action])

    def take(self, action: Action) -> Tensor:
        """Waits for a message and posts the next one of the same peer.

        Args:
            action: its receive, posted.

        Returns:
            A buffer to be given back with `release`.
        """
        work, buffer = self._arriving.pop(action)
        work.wait()
        for send in self._acknowledged.get(action, ()):
            self._end(send)
        peer = self._peers[action]
        self._links[peer].posted -= 1
        self._post_ahead(peer)
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Gives back what `take` returned."""
        self._pool.give(buffer)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Starts a send; the tensor is kept until the peer has it, and must not change."""
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
        """After a step: waits until everything that was sent is gone."""
        assert not self._arriving and not any(link.due for link in self._links.values()), "messages nobody took"
        for send in list(self._leaving):
            self._end(send)


def receives_ahead(placement: StagePlacement, device: torch.device) -> int:
    """Receives that are posted to each peer before they are due.

    On CPUs one: a message that comes early finds its place. On GPUs such a receive is a kernel that holds
    multiprocessors all the while, and one that a computation may have to wait for: where CUDA loads a kernel at its
    first use, or the allocator gives memory back, it may wait for all that runs. So receives are posted at the point of
    need. Only where the stages turn back on a rank, as in a V shape, one must be posted ahead: with one hardware queue
    for all streams (CUDA_DEVICE_MAX_CONNECTIONS=1) two sends to one peer, one behind the other, would hold up what the
    peer needs first. tests/engine/test_stream_order.py shows both.

    Args:
        placement: of the stages.
        device: where messages are.
    """
    turns = any(stage == following for stage, following in pairwise(placement.ranks))
    return 1 if device.type == "cpu" or turns else 0


def p2p_options(timeout: timedelta | None) -> dist.ProcessGroupNCCL.Options:
    """NCCL's settings of a group that carries messages; see P2P_CTAS."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = P2P_CTAS
    if timeout is not None:
        options._timeout = timeout  # torch warns where it differs from the group's
    return options


def _line_group(parallel: ParallelConfig, grid: ParallelGrid) -> ProcessGroup | None:
    """A group of its own over this rank's pipeline; collective over the world."""
    mine: ProcessGroup | None = None
    lines: Sequence[tuple[int, ...]] = axis_lines("pp", parallel) if parallel.pp > 1 else []
    for line in lines:
        options = p2p_options(grid.control.timeout) if dist.get_backend() == "nccl" else None
        group = dist.new_group(list(line), timeout=grid.control.timeout, pg_options=options)
        if grid.rank in line:
            mine = group
    return mine
