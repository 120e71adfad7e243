"""Dropout whose mask is a pure function of the sample: the same in every layout and after every resume."""

from __future__ import annotations

import hashlib
import struct
from typing import ClassVar

import torch
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.ops.dropout import apply_mask


def stream_seed(seed: int, site: str, stream: int, sample_id: int) -> int:
    """63-bit seed of one sample's mask at one site, of its own for every (seed, site, stream, sample)."""
    message = struct.pack("<qqq", seed, stream, sample_id) + site.encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p), with one random stream per sample.

    Nothing has to be saved for a resume or replayed for recomputation: the mask follows from the run's seed, the
    place in the model, the sample's number and the stream (0, or the tensor-parallel rank where each needs its own).
    A rank that holds a part of the sample draws the mask of the whole one and takes the rows of its tokens.

    Args:
        p: probability of a zero.
        seed: the run's seed.
        site: name of this dropout in the whole model, for example "blocks.3.mlp_dropout".

    Attributes:
        stream: random stream of this rank.
        shard: (rank, size) of the share of dim 1 that the input is; its mask is that share of the whole input's.
        fused: take megads' own kernel to apply the mask.
    """

    untraced: ClassVar = ("_mask",)

    def __init__(self, p: float, seed: int, site: str) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.site = site
        self.stream = 0
        self.shard = (0, 1)
        self.fused = False

    @property
    def active(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x: Tensor, info: BatchInfo, sequence_dim: int = 1) -> Tensor:
        """x: [b, ...], the first dim runs over the micro-batch's samples, `sequence_dim` over a sample's tokens."""
        if not self.active:
            return x
        return apply_mask(x, self._mask(x, info, sequence_dim), 1.0 / (1.0 - self.p), None, self.fused)

    def add(self, x: Tensor, residual: Tensor, info: BatchInfo) -> Tensor:
        """residual + `forward` of x, [b, s, ...]; the kernel makes it in one pass."""
        if not self.active:
            return residual + x
        return apply_mask(x, self._mask(x, info, 1), 1.0 / (1.0 - self.p), residual, self.fused)

    def _mask(self, x: Tensor, info: BatchInfo, sequence_dim: int) -> Tensor:
        """1 for what stays, 0 for what is dropped, uint8 of x's shape."""
        # One byte an element: it is what backward keeps.
        keep = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        part = self._part(keep[0], sequence_dim - 1, info)
        generator = torch.Generator(device=x.device)
        for kept, sample_id in zip(keep, info.sample_ids.tolist(), strict=True):
            generator.manual_seed(stream_seed(self.seed, self.site, self.stream, sample_id))
            if part is None:
                kept.bernoulli_(1.0 - self.p, generator=generator)
            else:
                whole, rows = part
                whole.bernoulli_(1.0 - self.p, generator=generator)
                torch.index_select(whole, sequence_dim - 1, rows, out=kept)
        return keep

    def _part(self, kept: Tensor, dim: int, info: BatchInfo) -> tuple[Tensor, Tensor] | None:
        """Room for the mask of a whole sample, and the places along `dim` that the input holds; None for all of them.

        Args:
            kept: mask of the input's part of one sample.
            dim: along which tokens lie.
            info: of the micro-batch.
        """
        (rank, size), count = self.shard, kept.shape[dim]
        if info.sequence_index is not None:
            assert info.seq_len is not None
            length, rows = info.seq_len, info.sequence_index.chunk(size)[rank]
        elif size > 1:
            length, rows = size * count, torch.arange(rank * count, (rank + 1) * count, device=kept.device)
        else:
            return None
        return kept.new_empty([*kept.shape[:dim], length, *kept.shape[dim + 1 :]]), rows
