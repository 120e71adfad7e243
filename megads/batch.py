"""What travels from the sampler to the model, the same types in every room.

Shape suffixes: b = micro-batch size, s = sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchInfo:
    """What every pipeline stage must know of a micro-batch; made by the sampler, never sent through the pipeline.

    Attributes:
        sample_ids: int64 [b], the number of each sample in the run's global order. Unique over the run, so
            it seeds dropout identically in every layout.
        position_ids_bs: int64 [b, s], position of each token, or None for 0..s-1 in every row.
        document_starts: int64 [b, s], place in the sample at which each token's document starts (0 for one that
            started before the sample), or None when attention crosses document boundaries. The token that ends a
            document belongs to it.
    """

    sample_ids: Tensor
    position_ids_bs: Tensor | None = None
    document_starts: Tensor | None = None

    def to(self, device: torch.device) -> BatchInfo:
        """A copy on another device."""
        return BatchInfo(
            self.sample_ids.to(device),
            None if self.position_ids_bs is None else self.position_ids_bs.to(device),
            None if self.document_starts is None else self.document_starts.to(device),
        )


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
