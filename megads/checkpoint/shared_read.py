"""Reads a checkpoint into all ranks of a layout; state that several ranks share can be read by one and broadcast.

Data-parallel replicas hold the same state unless ZeRO shards it. The shared state is divided into blocks, which are
assigned to the replicas in turn: each reads its blocks from disk and broadcasts them over the replicas' process group.
So every byte is read once for all replicas, and all replicas read in parallel; MegaScale (Jiang et al. 2024) has one
reader per group. A thread reads the next blocks while one is broadcast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from megads.checkpoint.config import CheckpointRead
from megads.checkpoint.read import CheckpointHandle, read_into
from megads.checkpoint.store import agreed
from megads.engine.interface import Shard
from megads.parallel.grid import Axis, ParallelGrid
from megads.runtime.environment import rank_environment

BLOCK_BYTES = 32 * 2**20
"""Maximum bytes of a broadcast, unless a single row of a tensor is larger."""
_BLOCKS_AHEAD = 2
_ALIGNMENT = 16


@dataclass(frozen=True)
class ReadReport:
    """How a checkpoint was read, over all ranks.

    Attributes:
        read: all or one, see `CheckpointRead`.
        replicas: largest number of ranks that shared what one of them read; 1: every rank read all of its state.
        read_bytes: bytes of stored tensors read by all ranks together.
        seconds: seconds on this rank.
    """

    read: CheckpointRead
    replicas: int
    read_bytes: int
    seconds: float


def read_shards(
    handle: CheckpointHandle, shards: Sequence[Shard], grid: ParallelGrid, how: CheckpointRead
) -> ReadReport:
    """Fills the shards of all ranks; collective over the world.

    Args:
        handle: the checkpoint.
        shards: all shards that this rank holds; filled in place.
        grid: parallel grid of all ranks.
        how: which ranks read the state that they share.

    Raises:
        CheckpointError: a key is missing or has another shape, or a file has disappeared. Raised on every rank if
            replicas may share what they read, else on the ranks that failed.
    """
    begin = time.perf_counter()
    spans_nodes = rank_environment().local_world_size < grid.world_size
    axis: Axis | None = None
    if handle.is_shared and (how is CheckpointRead.one or (how is CheckpointRead.auto and spans_nodes)):
        axis = shared_axis(shards, grid)
        # Ranks that share nothing take part in `agreed`, too, since it is collective.
        action = partial(read_into, handle, shards, grid.rank)
        if axis is not None:
            action = partial(_read_in_turns, handle, shards, axis, grid.rank)
        read_bytes = agreed(grid.control, action)
    else:
        read_bytes = read_into(handle, shards, grid.rank)
    found = grid.control.gather((read_bytes, axis.size if axis is not None else 1), tuple[int, int])
    total, replicas = sum(count for count, _ in found), max(size for _, size in found)
    used = CheckpointRead.one if replicas > 1 else CheckpointRead.all
    return ReadReport(used, replicas, total, time.perf_counter() - begin)


def shared_axis(shards: Sequence[Shard], grid: ParallelGrid) -> Axis | None:
    """The axis whose ranks hold the same shards as this rank: the data axis, the replicas of a ZeRO shard, or the ranks
    with the same experts.

    Collective over the world.

    Returns:
        None if there is none, as when ZeRO shards the state over the whole data axis.
    """
    parts = [(shard.key, shard.offset, tuple(shard.tensor.shape), str(shard.tensor.dtype)) for shard in shards]
    digests = grid.control.gather(xxhash.xxh3_128_hexdigest(repr(parts).encode()), str)
    for axis in (grid.data, grid.replica, grid.expert_data):
        if axis.size > 1 and len({digests[rank] for rank in axis.ranks}) == 1:
            return axis
    return None


@dataclass(frozen=True)
class _Block:
    """Parts of tensors that are broadcast together, as bytes.

    Attributes:
        parts: parts, each with its first byte in the block.
        size: bytes of the block, including a last byte that is nonzero if the parts could not be read.
    """

    parts: tuple[tuple[Shard, int], ...]
    size: int

    def views(self, buffer: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """Each part with its view of a buffer, in the part's dtype and shape."""
        for shard, start in self.parts:
            values = buffer[start : start + shard.tensor.nbytes].view(shard.tensor.dtype)
            yield shard, values.view(shard.tensor.shape)


def _blocks(shards: Iterable[Shard]) -> Iterator[_Block]:
    """Divides tensors into blocks: large ones are split into rows, small ones are combined."""
    parts, end = list[tuple[Shard, int]](), 0
    for shard in shards:
        for part in _rows(shard):
            if parts and end + part.tensor.nbytes > BLOCK_BYTES:
                yield _Block(tuple(parts), end + 1)
                parts, end = [], 0
            parts.append((part, end))
            end += -(-part.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if parts:
        yield _Block(tuple(parts), end + 1)


def _rows(shard: Shard) -> Iterator[Shard]:
    tensor = shard.tensor
    if tensor.nbytes <= BLOCK_BYTES or tensor.dim() == 0:
        yield shard
        return
    rows = max(1, BLOCK_BYTES * tensor.shape[0] // tensor.nbytes)
    for start in range(0, tensor.shape[0], rows):
        offset = (shard.offset[0] + start, *shard.offset[1:])
        yield replace(shard, offset=offset, tensor=tensor[start : start + rows])


class _ReadBlock(NamedTuple):
    """A block in host memory, the bytes read from files, and the error if it could not be read."""

    buffer: Tensor
    read_bytes: int
    error: Exception | None


def _read_block(handle: CheckpointHandle, block: _Block, rank: int, pinned: bool) -> _ReadBlock:
    """Reads a block; runs in the reader thread."""
    buffer, read_bytes, error = torch.empty(block.size, dtype=torch.uint8, pin_memory=pinned), 0, None
    try:
        read_bytes = read_into(handle, [replace(shard, tensor=view) for shard, view in block.views(buffer)], rank)
    except Exception as found:  # any exception: the other ranks wait for this block
        error = found
    buffer[-1] = error is not None
    return _ReadBlock(buffer, read_bytes, error)


def _read_in_turns(handle: CheckpointHandle, shards: Sequence[Shard], axis: Axis, rank: int) -> int:
    """Reads this rank's blocks and receives the others; returns the bytes that this rank read.

    If a block cannot be read, all ranks of the axis stop at it, and the rank that failed raises the error.
    """
    cuda = dist.get_backend(axis.group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    blocks = list(_blocks(shards))
    received = torch.empty(max((block.size for block in blocks), default=0), dtype=torch.uint8, device=device)
    to_read, ahead = iter(blocks[axis.rank :: axis.size]), deque[Future[_ReadBlock]]()
    read_bytes = 0
    # A new thread starts on the first GPU, where pinning memory would create a CUDA context for each rank.
    prepare = partial(torch.cuda.set_device, device) if cuda else None
    with ThreadPoolExecutor(1, "checkpoint-reader", prepare) as reader:

        def read_one_more() -> None:
            if (block := next(to_read, None)) is not None:
                ahead.append(reader.submit(_read_block, handle, block, rank, cuda))

        for _ in range(_BLOCKS_AHEAD):
            read_one_more()
        for number, block in enumerate(blocks):
            source, buffer, error = number % axis.size, received[: block.size], None
            if source == axis.rank:
                own = ahead.popleft().result()
                read_one_more()
                read_bytes, error = read_bytes + own.read_bytes, own.error
                buffer = buffer.copy_(own.buffer, non_blocking=True) if cuda else own.buffer
            dist.broadcast(buffer, src=axis.ranks[source], group=axis.group)
            if error is not None:
                raise error
            if buffer[-1]:
                return read_bytes
            for shard, values in block.views(buffer):
                shard.tensor.copy_(values)
    return read_bytes
