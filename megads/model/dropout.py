"""Dropout whose mask is a pure function of place: the same in every layout, on every device and after every resume."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from megads.batch import BatchInfo, copy_to
from megads.ops.config import TORCH
from megads.ops.device_cache import device_cache
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the rest.

    Whether an element is dropped follows from the run's seed, the site, the sample's number, the token's place in the
    sample and the feature; of attention probabilities from those, the head's number in the whole model, and the places
    of query and key (`megads.ops.dropout`). Nothing has to be saved for a resume or replayed for recomputation.

    Args:
        p: probability of a zero, in steps of 2^-16; what stays is scaled by what that leaves.
        seed: the run's seed.
        site: name of this dropout in the whole model, for example "blocks.3.mlp_dropout".

    Attributes:
        shard: (rank, size) of the share of dim 1 that the input is.
        kernels: whose kernel computes.
    """

    untraced: ClassVar = ("_drop",)
    """What differs from block to block, of which the compiler would make code for each."""

    def __init__(self, p: float, seed: int, site: str) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.site = site
        self.shard = (0, 1)
        self.kernels = TORCH

    @property
    def active(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        return self._drop(x_bsh, None, info) if self.active else x_bsh

    def add(self, x_bsh: Tensor, residual_bsh: Tensor, info: BatchInfo) -> Tensor:
        """residual + `forward` of x, [b, s, h]; the kernel makes it in one pass."""
        return self._drop(x_bsh, residual_bsh, info) if self.active else residual_bsh + x_bsh

    def mask(self, info: BatchInfo, device: torch.device, first_head: int = 0) -> DropoutMask:
        """The mask of a micro-batch at this site.

        Args:
            info: of the micro-batch.
            device: of what is dropped.
            first_head: number in the whole model of the first head that is dropped of.
        """
        samples_b = copy_to(info.sample_ids, device)
        return DropoutMask(site_key(self.seed, self.site), threshold_of(self.p), samples_b, first_head)

    def _drop(self, x_bsh: Tensor, residual_bsh: Tensor | None, info: BatchInfo) -> Tensor:
        mask = self.mask(info, x_bsh.device)
        return dropout(x_bsh, mask, self._places(x_bsh, info), residual_bsh, self.kernels)

    def _places(self, x_bsh: Tensor, info: BatchInfo) -> Tensor | None:
        """Place of each token of the input in its sample, int64 [s]; None: 0..s-1."""
        rank, size = self.shard
        if info.sequence_index is not None:
            return info.sequence_index.chunk(size)[rank]
        return _range(rank * x_bsh.shape[1], x_bsh.shape[1], x_bsh.device) if size > 1 else None


@device_cache(8)
def _range(start: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(start, start + count, device=device)
