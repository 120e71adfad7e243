"""Rotary position embedding (Su et al. 2021, RoFormer).

Feature i of a head and feature i + d/2 are one point in the plane, turned by the angle position * theta^(-2i/d); so the
product of a query and a key depends on the distance of their positions. The paper pairs neighbouring features; halves,
as Llama and GPT-NeoX pair them, are the same up to the order of a head's features.

Shape suffixes: b = batch, s = sequence, n = heads, d = head dim, r = d/2 pairs.
"""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor, nn

from megads.batch import BatchInfo, PerBatch
from megads.ops.kernels import TORCH, Kernels
from megads.ops.rotary import rotate

Tables = tuple[Tensor, Tensor]
_RESTARTED: PerBatch[Tables] = PerBatch()


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tables:
    """Cosine and sine of every angle, each [..., s, 1, r] for integer positions [..., s].

    Angles are fp64 whatever the result's dtype: near position 10^6 neighbouring fp32 numbers are 0.06 radians apart.
    """
    pairs_r = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions[..., None, None] * theta**-pairs_r
    return angles.cos().to(dtype), angles.sin().to(dtype)


@functools.lru_cache(maxsize=4)
def _place_tables(
    seq_len: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype, places_s: Tensor | None
) -> Tables:
    """Tables of a sample whose positions are places; cached by the identity of `places_s`."""
    places_s = torch.arange(seq_len, device=device) if places_s is None else places_s
    return rotary_tables(places_s, head_dim, theta, dtype)


class Rotary(nn.Module):
    """Rotary position embedding of one attention layer; no parameters.

    Args:
        head_dim: features of a head, an even number.
        theta: the base of the angles.
    """

    untraced: ClassVar = ("tables",)

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta

    def forward(
        self, q_bsnd: Tensor, k_bsnd: Tensor, info: BatchInfo, kernels: Kernels = TORCH
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by the positions of the tokens that this rank holds.

        Args:
            q_bsnd: queries.
            k_bsnd: keys.
            info: of the micro-batch.
            kernels: whose kernel computes.
        """
        tables = self.tables(q_bsnd.shape[1], q_bsnd.device, torch.promote_types(q_bsnd.dtype, torch.float32), info)
        return rotate(q_bsnd, *tables, kernels), rotate(k_bsnd, *tables, kernels)

    def tables(self, count: int, device: torch.device, dtype: torch.dtype, info: BatchInfo) -> Tables:
        """Cosine and sine for so many tokens, made once for all layers."""
        positions_bs = info.position_ids_bs
        if positions_bs is None:
            return _place_tables(count, self.head_dim, self.theta, device, dtype, info.sequence_index)
        key = (self.head_dim, self.theta, dtype)
        return _RESTARTED.get(info, key, lambda: rotary_tables(positions_bs, self.head_dim, self.theta, dtype))
