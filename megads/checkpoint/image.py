"""State images: a rank's state in shared memory, with the byte layout of its checkpoint file (`rank_file`).

The rank copies its tensors into an image while it runs the next forward and backward passes. Its writer process writes
the image to disk. With checksums and a header, an image in /dev/shm is a safetensors file: a local checkpoint.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from megads.checkpoint.rank_file import NO_CHECKSUM, FileRecord, checksum, describe, encode_header
from megads.engine.interface import Shard

_ALIGNMENT = 64
"""Alignment of the data in an image, in bytes: copies that start at a cache line are faster."""


@dataclass(frozen=True)
class _Place:
    """A tensor's location in an image: the fields of a `Shard`, with its first byte in place of the tensor.

    Attributes:
        owned: whether this rank saves it in a checkpoint on disk.
    """

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    owned: bool

    def view(self, memory: Tensor) -> Shard:
        """The shard as a view of `memory`, a uint8 tensor."""
        count = self.dtype.itemsize * torch.Size(self.shape).numel()
        tensor = memory[self.start : self.start + count].view(self.dtype).reshape(self.shape)
        return Shard(self.key, self.global_shape, self.offset, tensor)


@dataclass(frozen=True)
class ImageLayout:
    """Locations of all tensors in an image.

    Attributes:
        places: locations of the tensors, in file order.
        size: bytes of the image, header included.
    """

    places: tuple[_Place, ...]
    size: int

    @classmethod
    def of(cls, held: Sequence[Shard], owned: Sequence[Shard]) -> ImageLayout:
        """The layout of an image.

        Args:
            held: all shards in the image.
            owned: those of them that this rank saves in a checkpoint on disk.
        """
        kept, speaks_for = in_file_order(held), {(shard.key, tuple(shard.offset)) for shard in owned}
        start, places = 0, []
        if kept:
            layouts, notes = describe(kept)
            start = len(encode_header(layouts, notes([NO_CHECKSUM] * len(kept)), _ALIGNMENT))
        for shard in kept:
            tensor, offset = shard.tensor, tuple(shard.offset)
            owns = (shard.key, offset) in speaks_for
            shape, whole = tuple(tensor.shape), tuple(shard.global_shape)
            places.append(_Place(shard.key, whole, offset, shape, tensor.dtype, start, owns))
            start += tensor.nbytes
        return cls(tuple(places), start)


def in_file_order(shards: Sequence[Shard]) -> list[Shard]:
    """Non-empty shards, widest dtype first: a file has no gaps, so this aligns each tensor to its element size."""
    return sorted((shard for shard in shards if shard.tensor.numel()), key=lambda shard: -shard.tensor.dtype.itemsize)


class StateBuffer:
    """Shared memory that holds a rank's state.

    Args:
        layout: locations of the tensors.
        descriptor: descriptor of a file in memory, at least as large as the layout; it stays open.
        resident: populate all pages now.
    """

    def __init__(self, layout: ImageLayout, descriptor: int, *, resident: bool = False) -> None:
        self.layout, self.descriptor = layout, descriptor
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if resident else 0)
        mapped = mmap.mmap(descriptor, max(layout.size, 1), flags=flags)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.shards = [place.view(self._memory) for place in layout.places]
        self.owned = [shard for place, shard in zip(layout.places, self.shards, strict=True) if place.owned]

    @classmethod
    def anonymous(cls, layout: ImageLayout) -> StateBuffer:
        """An image in anonymous memory, with all pages resident.

        Raises:
            OSError: the machine does not have that much memory.
        """
        return cls.allocated(layout, os.memfd_create("megads-checkpoint", os.MFD_CLOEXEC))

    @classmethod
    def allocated(cls, layout: ImageLayout, descriptor: int) -> StateBuffer:
        """An image in a file in memory, to which it gives its size, with all pages resident.

        Raises:
            OSError: the machine does not have that much memory; the file is closed.
        """
        try:
            allocate(descriptor, layout.size)
            return cls(layout, descriptor, resident=True)
        except OSError:
            os.close(descriptor)
            raise

    def pin(self) -> None:
        """Page-locks the memory, for copies from a GPU at full bus bandwidth. Raises torch.cuda.CudaError."""
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cudart.cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)))

    def start_copy(
        self, shards: Sequence[Shard], then: Callable[[], None], seal: Callable[[], None] = lambda: None
    ) -> StateCopy:
        """Starts an asynchronous copy of the rank's state into the image, see `StateCopy`.

        Args:
            shards: the shards of the layout; they must not change before `StateCopy.before_update` has returned.
            then: called when the copy is complete.
            seal: called after that.
        """
        kept = in_file_order(shards)
        for place, shard in zip(self.layout.places, kept, strict=True):
            assert (place.key, place.offset) == (shard.key, tuple(shard.offset))
        pairs = [(place.tensor, shard.tensor) for place, shard in zip(self.shards, kept, strict=True)]
        return StateCopy(pairs, then, seal)

    def seal(self) -> FileRecord:
        """Writes the header with the checksums of the copied tensors, which completes the image as a rank's file."""
        if not self.shards:
            return FileRecord(0, "")
        layouts, notes = describe(self.shards)
        header = encode_header(layouts, notes([checksum(shard.tensor) for shard in self.shards]), _ALIGNMENT)
        self._memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return FileRecord(self.layout.size, xxhash.xxh3_128_hexdigest(header))


class StateCopy:
    """An asynchronous copy of a rank's state, overlapped with training.

    From a GPU it runs on a separate stream into pinned memory, and the next optimizer step waits for it on the device.
    On a CPU a thread copies, and the next optimizer step waits for the thread.

    Args:
        pairs: destination and source of every tensor.
        then: called by the thread when the copy is complete; training waits for it, so it must be fast.
        seal: called by the thread after that, while training continues.

    Attributes:
        copied: done when `then` has returned; its result raises what the copy or `then` raised.
        sealed: done when `seal` has returned; its result raises what any of them raised.
    """

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor]], then: Callable[[], None], seal: Callable[[], None]
    ) -> None:
        self.copied, self.sealed = Future[None](), Future[None]()
        self._then, self._seal = then, seal
        self._copied_on_gpu: torch.cuda.Event | None = None
        on_cpu = [pair for pair in pairs if not pair[1].is_cuda]
        if len(on_cpu) < len(pairs):
            self._copied_on_gpu = self._on_own_stream([pair for pair in pairs if pair[1].is_cuda])
        # A daemon, so that a failing rank can exit without waiting for it.
        threading.Thread(target=self._run, args=(on_cpu,), name="checkpoint-copy", daemon=True).start()

    @staticmethod
    def _on_own_stream(pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Enqueues the copies on a new stream, after the work that is queued on the current stream."""
        device = pairs[0][1].device
        stream, copied = torch.cuda.Stream(device), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)
            copied.record(stream)
        return copied

    def _run(self, on_cpu: Sequence[tuple[Tensor, Tensor]]) -> None:
        try:
            for destination, source in on_cpu:
                # NumPy copies on one core; PyTorch would use as many threads here as training does.
                np.copyto(_bytes_of(destination), _bytes_of(source))
            if self._copied_on_gpu is not None:
                self._copied_on_gpu.synchronize()
            self._then()
            self.copied.set_result(None)
            self._seal()
            self.sealed.set_result(None)
        except Exception as error:  # raised where the rank waits
            for outcome in (self.copied, self.sealed):
                if not outcome.done():
                    outcome.set_exception(error)

    def before_update(self) -> None:
        """Returns when the state may be modified: on a GPU, by work queued on the current stream from now on."""
        if self._copied_on_gpu is None:
            self.copied.result()
        else:
            torch.cuda.current_stream().wait_event(self._copied_on_gpu)


def _bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous tensor, as a view."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def allocate(descriptor: int, size: int) -> None:
    """Reserves the memory of a file in memory: a page that cannot be allocated later would kill with SIGBUS.

    Raises:
        OSError: the machine or the file system does not have that much.
    """
    os.posix_fallocate(descriptor, 0, max(size, 1))
