"""Attention with linear biases (Press, Smith and Lewis 2021)."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


def alibi_slopes(num_heads: int) -> Tensor:
    """Slope of every head, fp32 [num_heads].

    For n a power of two the slopes are 2^(-8 i / n), i = 1..n. Any other count takes those of the largest power of two
    below it, then every other slope of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


@functools.lru_cache(maxsize=4)
def causal_bias(
    num_heads: int, first_head: int, last_head: int, seq_len: int, alibi: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Additive attention mask of a contiguous range of heads, [1, heads, seq_len, seq_len] ([1, 1, ...] without ALiBi).

    Holds slope * (key - query) up to the diagonal and -inf above it. The relative form is used, not slope * key,
    because its values near the diagonal, where most of the probability lies, stay exact in low precision.
    """
    positions = torch.arange(seq_len, device=device)[None]
    return causal_bias_at(num_heads, first_head, last_head, positions, seq_len, alibi, dtype)


def causal_bias_at(
    num_heads: int,
    first_head: int,
    last_head: int,
    positions_bs: Tensor,
    num_keys: int,
    alibi: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The same for queries anywhere in their sequences and keys at 0..num_keys-1, [b, heads or 1, s, num_keys].

    Args:
        num_heads: heads of the whole model.
        first_head: first head of the range.
        last_head: the one after the last.
        positions_bs: integer position of every query.
        num_keys: keys of every sequence; those beyond a query's position are masked.
        alibi: False leaves the causal mask alone.
        dtype: of the result.
    """
    keys = torch.arange(num_keys, device=positions_bs.device, dtype=torch.float32)
    distance_bst = keys - positions_bs[:, :, None]
    future_bst = distance_bst > 0
    if not alibi:
        return torch.zeros_like(distance_bst).masked_fill_(future_bst, -math.inf)[:, None].to(dtype)
    slopes = alibi_slopes(num_heads)[first_head:last_head].to(positions_bs.device)
    bias_bnst = slopes[:, None, None] * distance_bst[:, None]
    return bias_bnst.masked_fill_(future_bst[:, None], -math.inf).to(dtype)
