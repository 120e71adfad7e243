"""Turns queries and keys by the angles of their positions (Su et al. 2021, RoFormer).

Feature i of a head and feature i + d/2 are one point in the plane, as in `megads.model.rotary`.

Shape suffixes: b = batch, s = sequence, n = heads, d = head dim, r = d/2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_bsnd: Tensor, cos: Tensor, sin: Tensor, fused: bool) -> Tensor:
    """x turned by the angles, computed in the tables' dtype, [b, s, n, d] in x's dtype.

    Args:
        x_bsnd: queries or keys; fp32 and bf16 on a CPU go to the kernel.
        cos: cosines of every angle, [s, 1, r] or [b, s, 1, r], fp32 beside fp32 and bf16.
        sin: sines, likewise.
        fused: take the kernel; `megads.ops.library.load_library` was called.
    """
    first_bsnr, second_bsnr = x_bsnd.to(cos.dtype).chunk(2, dim=-1)
    turned = (first_bsnr * cos - second_bsnr * sin, second_bsnr * cos + first_bsnr * sin)
    return torch.cat(turned, dim=-1).to(x_bsnd.dtype)
