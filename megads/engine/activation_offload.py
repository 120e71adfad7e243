"""Offloads activations to pinned host memory between the forward and the backward pass (parallel.offload).

What autograd saves in a block, or the input alone if the block is recomputed, is copied to the host by a stream of its
own while the next block runs. It is copied back when the backward pass of the next block begins. As in vDNN (Rhu et al.
2016), the device then holds the activations of two blocks of a micro-batch, however many blocks there are.

Each storage is moved once, whatever number of views of it autograd saves. These stay on the device:

- parameters, results of caches (masks, rotary tables) and tensors of BatchInfo, which live longer than a pass;
- an input that was received from another pipeline stage, which the engine holds;
- storages below `SMALLEST_OFFLOADED_BYTES`;
- the last block before the loss, whose backward pass begins at once.

Streams are ordered by events, and the host never waits. A device tensor is freed after the compute stream has waited
for its copy, so that the allocator, which reuses memory in the order of the compute stream, may hand it out at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megads.batch import BatchInfo, cached_for
from megads.ops.device_cache import record_cached_results
from megads.parallel.config import SMALLEST_OFFLOADED_BYTES

SLAB_BYTES = 1 << 28
"""Bytes of pinned memory that are allocated at once: PyTorch rounds pinned allocations up to a power of two."""
_ALIGNMENT = 512

Forward = Callable[[Tensor, BatchInfo], Tensor]


class _HostStream:
    """The only stream of a CPU: everything runs when it is called."""

    def wait_event(self, event: None) -> None:
        """Does nothing."""

    def record_event(self) -> None:
        """Returns nothing that could be waited for."""


@dataclass(frozen=True)
class Streams:
    """The streams of a device on which activations move, with the methods of torch.cuda.Stream.

    Attributes:
        to_host: stream of the copies to the host.
        to_device: stream of the copies back, which run at the same time.
        current: returns the stream on which the calling thread computes.
        on: context in which work is launched on a stream.
        pinned: whether host memory must be pinned, for copies that the host does not wait for.
    """

    to_host: Any
    to_device: Any
    current: Callable[[], Any]
    on: Callable[[Any], AbstractContextManager[Any]]
    pinned: bool

    @classmethod
    def of(cls, device: torch.device) -> Streams:
        """The streams of a device."""
        if device.type != "cuda":
            only = _HostStream()
            return cls(only, only, lambda: only, lambda _: nullcontext(), pinned=False)
        copying = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return cls(*copying, lambda: torch.cuda.current_stream(device), torch.cuda.stream, pinned=True)


class HostBuffers:
    """Host memory for activations, reused by later micro-batches and steps.

    Sizes are rounded up to eight classes per power of two: at most 12.5% is lost, and layers whose sizes vary, such as
    experts', find buffers of earlier micro-batches.

    Args:
        pinned: whether to pin the memory.

    Attributes:
        allocated_bytes: memory of all slabs.
        in_use: buffers that hold activations.
        most_bytes: most bytes of buffers in use at a time.
    """

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[Tensor] = []
        self._place = 0, 0  # slab, and offset of its first unused byte
        self._free: dict[int, list[Tensor]] = {}
        self.allocated_bytes = self.in_use = self.most_bytes = self._bytes = 0

    def take(self, size: int) -> Tensor:
        """Returns a buffer of at least `size` bytes, uint8; it may be written in the order of the compute stream."""
        granule = max(_ALIGNMENT, 1 << max(0, size.bit_length() - 4))
        size = -(-size // granule) * granule
        free = self._free.get(size)
        if not free:
            if not self.in_use:
                # Sizes have changed, for example in a new training phase: cuts the slabs anew.
                self._free, self._place = {}, (0, 0)
            free = [self._cut(size)]
        self.in_use += 1
        self._bytes += size
        self.most_bytes = max(self.most_bytes, self._bytes)
        return free.pop()

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back; the compute stream must have waited for all copies from it."""
        self.in_use -= 1
        self._bytes -= len(buffer)
        self._free.setdefault(len(buffer), []).append(buffer)

    def _cut(self, size: int) -> Tensor:
        slab, start = self._place
        while slab < len(self._slabs) and start + size > len(self._slabs[slab]):
            slab, start = slab + 1, 0
        if slab == len(self._slabs):
            whole = max(SLAB_BYTES, 1 << (size - 1).bit_length()) if self._pinned else size
            self._slabs.append(self._allocate(whole))
            self.allocated_bytes += whole
        self._place = slab, start + size
        return self._slabs[slab][start : start + size]

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)


class _Storage:
    """A storage that autograd saves, on the device, on the host, or on its way; freed with its last view.

    Attributes:
        on_device: all of its elements, [n]; None while only the host has them.
        on_host: buffer with the same bytes; None until it is moved.
        arrived: event after the copy back to the device, until the compute stream has waited for it.
    """

    def __init__(self, block_pass: BlockPass, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._block_pass = block_pass  # kept alive for the block after it, which prefetches
        self._numel, self._dtype = storage.nbytes() // tensor.element_size(), tensor.dtype
        self.on_device: Tensor | None = tensor.detach().as_strided((self._numel,), (1,), 0)
        self.on_host: Tensor | None = None
        self.arrived: Any = None

    @property
    def nbytes(self) -> int:
        return self._numel * self._dtype.itemsize

    def host_view(self) -> Tensor:
        """The bytes on the host as elements, [n]."""
        assert self.on_host is not None
        return self.on_host[: self.nbytes].view(self._dtype)

    def empty(self, device: torch.device) -> Tensor:
        """Returns memory for it on the device, [n]."""
        return torch.empty(self._numel, dtype=self._dtype, device=device)

    def __del__(self) -> None:
        offload = self._block_pass.offload
        if self.arrived is not None:  # both memories are about to be reused in the order of the compute stream
            offload.streams.current().wait_event(self.arrived)
        if self.on_host is not None:
            offload.host.give(self.on_host)


@dataclass(frozen=True)
class _View:
    """A saved tensor as a view of its storage."""

    storage: _Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self, streams: Streams) -> Tensor:
        """The tensor, on the device; the compute stream waits for its arrival."""
        storage = self.storage
        if storage.arrived is not None:
            streams.current().wait_event(storage.arrived)
            storage.arrived = None
        assert storage.on_device is not None
        return storage.on_device.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class BlockPass:
    """The activations of one block for one micro-batch.

    Args:
        offload: moves them.
        block: the block.
        index: position of the block in the model.
        hidden: input of the block.
        info: description of the micro-batch.
        previous: pass of the block that computed the input, which is prefetched; None if there is none.
        moves: whether the activations leave the device.

    Attributes:
        left: event after the copies to the host; None before.
    """

    def __init__(
        self,
        offload: ActivationOffload,
        block: nn.Module,
        index: int,
        hidden: Tensor,
        info: BatchInfo,
        previous: BlockPass | None,
        moves: bool,
    ) -> None:
        self.offload, self.index, self.moves = offload, index, moves
        self.info, self.previous = weakref.ref(info), None if previous is None else weakref.ref(previous)
        self._block, self._hidden, self._cached = weakref.ref(block), weakref.ref(hidden), list[Any]()
        self._storages: dict[int, weakref.ref[_Storage]] = {}
        self._copied: list[Tensor] = []
        self.left: Any = None
        self._opened = self._fetched = False

    def run(self, forward: Forward, hidden: Tensor, info: BatchInfo) -> Tensor:
        """Runs the block's forward pass and notes what autograd saves."""
        with record_cached_results() as self._cached, saved_tensors_hooks(self._pack, self._unpack):
            return forward(hidden, info)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if not self.moves or tensor.layout is not torch.strided or tensor.device.type != self.offload.device.type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALLEST_OFFLOADED_BYTES:
            return tensor
        key = storage._cdata
        known = self._storages.get(key)
        saved = None if known is None else known()
        if saved is None:  # also if the address is that of a storage that has been freed since
            if key in self._staying():
                return tensor
            saved = _Storage(self, tensor)
            self._storages[key] = weakref.ref(saved)
        return _View(saved, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _staying(self) -> set[int]:
        """Addresses of storages that live longer than the pass."""
        block, hidden, info = self._block(), self._hidden(), self.info()
        assert block is not None and info is not None
        # Under ZeRO-3 the storages of parameters change with every call.
        held: list[Any] = [*block.parameters(), *block.buffers(), self._cached, cached_for(info), *_parts(info)]
        if hidden is not None and hidden.is_leaf:
            held.append(hidden)
        return {tensor.untyped_storage()._cdata for tensor in _tensors(held)}

    def _unpack(self, packed: Tensor | _View) -> Tensor:
        if not self._opened:
            self._opened = True
            self.fetch()
            previous = None if self.previous is None else self.previous()
            if previous is not None:
                previous.fetch()
        return packed.tensor(self.offload.streams) if isinstance(packed, _View) else packed

    def leave(self) -> None:
        """Starts the copies to the host; call after the forward pass."""
        self._cached = []
        storages = self._alive()
        if not storages:
            return
        streams, host = self.offload.streams, self.offload.host
        streams.to_host.wait_event(streams.current().record_event())
        with streams.on(streams.to_host):
            for storage in storages:
                storage.on_host = host.take(storage.nbytes)
                assert storage.on_device is not None
                storage.host_view().copy_(storage.on_device, non_blocking=True)
                self._copied.append(storage.on_device)
                self.offload.to_host_bytes += storage.nbytes
        self.left = streams.to_host.record_event()

    def arrive_on_host(self, free: bool) -> None:
        """Makes the compute stream wait for the copies to the host.

        Args:
            free: whether to free the tensors on the device; else they are used there.
        """
        if self._copied:
            self.offload.streams.current().wait_event(self.left)
        self._copied = []
        if free:
            for storage in self._alive():
                storage.on_device = None

    def fetch(self) -> None:
        """Starts the copies back to the device, unless they were started before or the tensors are still there."""
        if self._fetched or not self.moves:
            return
        self._fetched = True
        self.offload.finish_leaving(self)
        away = [storage for storage in self._alive() if storage.on_device is None]
        if not away:
            return
        streams = self.offload.streams
        # Allocated in the order of the compute stream, which may still use the memory for something else.
        arriving = [storage.empty(self.offload.device) for storage in away]
        streams.to_device.wait_event(streams.current().record_event())
        with streams.on(streams.to_device):
            for storage, place in zip(away, arriving, strict=True):
                place.copy_(storage.host_view(), non_blocking=True)
                self.offload.to_device_bytes += storage.nbytes
        arrived = streams.to_device.record_event()
        for storage, place in zip(away, arriving, strict=True):
            storage.on_device, storage.arrived = place, arrived

    def _alive(self) -> list[_Storage]:
        return [storage for reference in self._storages.values() if (storage := reference()) is not None]


def _parts(info: BatchInfo) -> Iterator[Any]:
    for part in fields(info):
        value = getattr(info, part.name)
        yield from _parts(value) if isinstance(value, BatchInfo) else (value,)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif hasattr(value, "__dict__"):  # such as FlexAttention's BlockMask
            yield from _tensors(vars(value).values())


class ActivationOffload:
    """Moves the activations of a rank's blocks to the host and back.

    Args:
        device: the rank's device. On a CPU activations are copied to other host memory, when they are moved.

    Attributes:
        streams: streams of the copies.
        host: host memory of the activations.
        to_host_bytes: bytes copied to the host so far.
        to_device_bytes: bytes copied back so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, Streams.of(device)
        self.host = HostBuffers(self.streams.pinned)
        self.to_host_bytes = self.to_device_bytes = 0
        self._leaving: BlockPass | None = None
        self._last: weakref.ref[BlockPass] | None = None

    def wrap(self, block: nn.Module, index: int, *, moves: bool) -> None:
        """Makes a block offload its activations: replaces its forward method.

        Args:
            block: the block; recomputation must be applied before.
            index: position of the block in the model.
            moves: whether its activations leave the device. Either way its backward pass prefetches those of the block
                before it.
        """
        forward = block.forward

        def call(hidden: Tensor, info: BatchInfo) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden, info)  # type: ignore[no-any-return]
            block_pass = BlockPass(self, block, index, hidden, info, self._before(index, hidden, info), moves)
            output = block_pass.run(forward, hidden, info)
            self.finish_leaving()
            if moves:
                block_pass.leave()
                self._leaving = block_pass
            self._last = weakref.ref(block_pass)
            return output

        block.forward = call  # type: ignore[method-assign]

    def _before(self, index: int, hidden: Tensor, info: BatchInfo) -> BlockPass | None:
        """The pass that computed the input of a block, unless the input comes from elsewhere than the block before."""
        last = None if self._last is None else self._last()
        follows = last is not None and last.index == index - 1 and last.info() is info and not hidden.is_leaf
        return last if follows else None

    def finish_leaving(self, used: BlockPass | None = None) -> None:
        """Makes the compute stream wait for the copies to the host that are in progress, and frees their tensors on the
        device.

        Args:
            used: a pass whose tensors are needed on the device; nothing happens if others are in progress. None: any.
        """
        leaving = self._leaving
        if leaving is not None and used in (None, leaving):
            self._leaving = None
            leaving.arrive_on_host(free=used is None)
