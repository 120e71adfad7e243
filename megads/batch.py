"""What travels from the sampler to the model, the same types in every room.

Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the host does not wait for a GPU, for which memory is pinned."""
    return _pinned(x, device).to(device, non_blocking=device.type == "cuda")


def copy_into(place: Tensor, x: Tensor) -> None:
    """Copies a tensor to where another one of its shape is; the host does not wait for a GPU."""
    place.copy_(_pinned(x, place.device), non_blocking=place.is_cuda)


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    return x.contiguous().pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """What every pipeline stage must know of a micro-batch; made by the sampler, never sent through the pipeline.

    Two of them are equal only if they are the same object: what layers share for a micro-batch is kept by it.

    A place is an index into the whole sample. Where context parallelism cuts samples, s counts the tokens that this
    rank holds.

    Attributes:
        sample_ids: int64 [b], the number of each sample in the run's global order. Unique over the run, so
            dropout is the same in every layout. Read on the device only.
        position_ids_bs: int64 [b, s], position of each token where positions restart with every document, or None
            where positions are places.
        document_starts: int64 [b, s], place at which each token's document starts (0 for one that started before the
            sample), or None when attention crosses document boundaries. The token that ends a document belongs to it.
        sequence_index: int64 [s], place of each token that this rank holds, the same in every row; None for 0..s-1.
        seq_len: tokens of a whole sample. Must be given with sequence_index, and where a sample is to be cut on a
            stage that has no tokens.
    """

    sample_ids: Tensor
    position_ids_bs: Tensor | None = None
    document_starts: Tensor | None = None
    sequence_index: Tensor | None = None
    seq_len: int | None = None

    def to(self, device: torch.device) -> BatchInfo:
        """A copy on another device; does not wait for it."""
        return BatchInfo(
            copy_to(self.sample_ids, device),
            None if self.position_ids_bs is None else copy_to(self.position_ids_bs, device),
            None if self.document_starts is None else copy_to(self.document_starts, device),
            None if self.sequence_index is None else copy_to(self.sequence_index, device),
            self.seq_len,
        )

    def positions(self, count: int, device: torch.device) -> Tensor:
        """Position of each of this rank's `count` tokens, int64 [b, s], or [s] where all rows have the same."""
        if self.position_ids_bs is not None:
            return self.position_ids_bs
        return torch.arange(count, device=device) if self.sequence_index is None else self.sequence_index


@dataclass(frozen=True)
class MicroBatch:
    """The share of one data-parallel rank in one forward and backward pass.

    Attributes:
        tokens_bs: int64 [b, s] input tokens; None on stages that are neither first nor last.
        labels_bs: int64 [b, s] next tokens; None likewise.
        loss_mask_bs: float32 [b, s], 1 where the loss counts, 0 elsewhere; None likewise.
        info: what every stage gets.
    """

    info: BatchInfo
    tokens_bs: Tensor | None = None
    labels_bs: Tensor | None = None
    loss_mask_bs: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """A copy on another device; does not wait for it."""
        whole = (self.tokens_bs, self.labels_bs, self.loss_mask_bs)
        return MicroBatch(self.info.to(device), *(None if x is None else copy_to(x, device) for x in whole))


T = TypeVar("T")


class PerBatch(Generic[T]):
    """Makes a value when the first layer asks for it and forgets it with the micro-batch.

    Held weakly by the BatchInfo object itself: a recomputed forward pass, which is given the same object, finds the
    value again.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[BatchInfo, dict[Hashable, T]] = WeakKeyDictionary()

    def get(self, info: BatchInfo, key: Hashable, make: Callable[[], T]) -> T:
        """The value of this micro-batch under `key`, which says all that `make` depends on beside the micro-batch."""
        values = self._values.setdefault(info, {})
        if key not in values:
            values[key] = make()
        return values[key]
