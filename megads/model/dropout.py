"""Dropout whose mask is a pure function of the sample: the same in every layout and after every resume."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor, nn

from megads.batch import BatchInfo


def stream_seed(seed: int, site: str, stream: int, sample_id: int) -> int:
    """63-bit seed of one sample's mask at one site, of its own for every (seed, site, stream, sample)."""
    message = struct.pack("<qqq", seed, stream, sample_id) + site.encode()
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> 1


class Dropout(nn.Module):
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p), with one random stream per sample.

    Nothing has to be saved for a resume or replayed for recomputation: the mask follows from the run's seed, the
    place in the model, the sample's number and the stream (0, or the tensor-parallel rank where each needs its own).

    Args:
        p: probability of a zero.
        seed: the run's seed.
        site: name of this dropout in the whole model, for example "blocks.3.mlp_dropout".

    Attributes:
        stream: random stream of this rank.
        shard: (rank, size) of the share of dim 1 that the input is; its mask is that share of the whole input's.
    """

    def __init__(self, p: float, seed: int, site: str) -> None:
        super().__init__()
        self.p = p
        self.seed = seed
        self.site = site
        self.stream = 0
        self.shard = (0, 1)

    @property
    def active(self) -> bool:
        return self.training and self.p > 0.0

    def forward(self, x: Tensor, info: BatchInfo) -> Tensor:
        """x: [b, ...], the first dim runs over the micro-batch's samples."""
        if not self.active:
            return x
        keep = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        generator = torch.Generator(device=x.device)
        rank, size = self.shard
        whole = None if size == 1 else keep.new_empty(size, *keep.shape[1:])
        for row, sample_id in zip(keep, info.sample_ids.tolist(), strict=True):
            generator.manual_seed(stream_seed(self.seed, self.site, self.stream, sample_id))
            if whole is None:
                row.bernoulli_(1.0 - self.p, generator=generator)
            else:
                row.copy_(whole.bernoulli_(1.0 - self.p, generator=generator)[rank])
        return x * (keep / (1.0 - self.p)).to(x.dtype)
