"""Data types of a micro-batch, from the loader to the model.

Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to a device; to a GPU asynchronously, through pinned memory."""
    return _pinned(x, device).to(device, non_blocking=device.type == "cuda")


def copy_into(place: Tensor, x: Tensor) -> None:
    """Copies a tensor into another one of the same shape; to a GPU asynchronously, through pinned memory."""
    place.copy_(_pinned(x, place.device), non_blocking=place.is_cuda)


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    return x.contiguous().pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x


@dataclass(frozen=True, eq=False)
class OnHost:
    """A tensor that stays on the host when its micro-batch is copied to a device."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """Metadata of a micro-batch for every pipeline stage; created by its own loader, not sent through the pipeline.

    Two objects are equal only if they are identical: values cached for a micro-batch are keyed by the object.

    A place is an index into the whole sample. With context parallelism, s is the number of tokens on this rank.

    Attributes:
        sample_ids: int64 [b], number of each sample in the run's global order. Unique over the run, so that dropout is
            the same in every layout. Only read on the device.
        position_ids_bs: int64 [b, s], position of each token, if positions restart with every document; None if
            positions are places.
        document_starts: int64 [b, s], place where each token's document starts (0 if before the sample); None if
            attention crosses document boundaries. The token that ends a document belongs to it.
        sequence_index: int64 [s], place of each token on this rank, the same in every row; None for 0..s-1.
        seq_len: tokens of a whole sample. Required with sequence_index, and to split a sample on a stage that has no
            tokens.
        host_document_starts: `document_starts` before the copy to a device, for kernels whose arguments depend on their
            values; None if they were never on the host. Set by `to`.
        step_tokens: tokens of the step's global batch, masked ones included, over which the balance losses of experts
            are averaged; None outside of training. Set by the engine.
        row_lengths: tokens so far of each row's sequence, for incremental inference if rotary frequencies depend on
            them; None: `seq_len`.
        exchanged: metadata, without `position_ids_bs`, of the tokens that this rank's attention cores see after
            all-to-alls from tokens to heads: whole samples with parallel.cp_kind=ulysses, those of
            parallel.cp_ulysses ranks with the other kinds; None without all-to-alls.
    """

    sample_ids: Tensor
    position_ids_bs: Tensor | None = None
    document_starts: Tensor | None = None
    sequence_index: Tensor | None = None
    seq_len: int | None = None
    host_document_starts: OnHost | None = None
    step_tokens: int | None = None
    row_lengths: tuple[int, ...] | None = None
    exchanged: BatchInfo | None = None

    def to(self, device: torch.device) -> BatchInfo:
        """Copies to another device, asynchronously."""
        starts, on_host = self.document_starts, self.host_document_starts
        if starts is not None and starts.device.type == "cpu":
            on_host = OnHost(starts)
        return BatchInfo(
            copy_to(self.sample_ids, device),
            None if self.position_ids_bs is None else copy_to(self.position_ids_bs, device),
            None if self.document_starts is None else copy_to(self.document_starts, device),
            None if self.sequence_index is None else copy_to(self.sequence_index, device),
            self.seq_len,
            on_host,
            self.step_tokens,
            self.row_lengths,
            None if self.exchanged is None else self.exchanged.to(device),
        )

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's `count` tokens, int64 [b, s], or [s] if all rows have the same."""
        if self.position_ids_bs is not None:
            return self.position_ids_bs
        return torch.arange(count, device=device) if self.sequence_index is None else self.sequence_index


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one data-parallel rank for one forward and backward pass.

    Attributes:
        tokens_bs: int64 [b, s] input tokens; None on stages that are neither first nor last.
        labels_bs: int64 [b, s] next tokens; None on the same stages.
        loss_mask_bs: float32 [b, s], 1 for tokens that count in the loss, else 0; None on the same stages.
        info: metadata for every stage.
    """

    info: BatchInfo
    tokens_bs: Tensor | None = None
    labels_bs: Tensor | None = None
    loss_mask_bs: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """Copies to another device, asynchronously."""
        whole = (self.tokens_bs, self.labels_bs, self.loss_mask_bs)
        return MicroBatch(self.info.to(device), *(None if x is None else copy_to(x, device) for x in whole))

    def targets_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copies labels and loss mask, which the last stage has, to another device, asynchronously."""
        assert self.labels_bs is not None and self.loss_mask_bs is not None
        return copy_to(self.labels_bs, device), copy_to(self.loss_mask_bs, device)


T = TypeVar("T")


class MicroBatchCache(Generic[T]):
    """Cache of values per micro-batch: computed at the first request, freed with the micro-batch.

    Keyed weakly by the BatchInfo object itself, so that a recomputed forward pass, which gets the same object, reuses
    the value.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[BatchInfo, dict[Hashable, T]] = WeakKeyDictionary()
        _CACHES.add(self)

    def get(self, info: BatchInfo, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the cached value of a micro-batch; `make` may depend on the micro-batch and `key` only."""
        values = self._values.setdefault(info, {})
        if key not in values:
            values[key] = make()
        return values[key]

    def cached(self, info: BatchInfo) -> list[T]:
        """Returns the values that are cached for a micro-batch."""
        return list(self._values.get(info, {}).values())


_CACHES: WeakSet[MicroBatchCache[Any]] = WeakSet()


def cached_for(info: BatchInfo) -> list[Any]:
    """Returns the values that all caches hold for a micro-batch."""
    return [value for cache in _CACHES for value in cache.cached(info)]
