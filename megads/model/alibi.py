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


@functools.lru_cache(maxsize=8)
def slopes_of(num_heads: int, first_head: int, last_head: int, device: torch.device) -> Tensor:
    """Slopes of heads first_head..last_head - 1 of a model with `num_heads`, fp32; the same tensor every time."""
    return alibi_slopes(num_heads)[first_head:last_head].to(device, copy=True)


@functools.lru_cache(maxsize=4)
def causal_bias(
    num_heads: int,
    first_head: int,
    last_head: int,
    seq_len: int,
    alibi: bool,
    device: torch.device,
    dtype: torch.dtype,
    places_s: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Additive attention mask of a contiguous range of heads, [1, heads, s, seq_len] ([1, 1, ...] without ALiBi).

    Holds slope * (key - query) up to the query's own place, and -inf beyond it and before its window. The relative form
    is used, not slope * key, because its values near the query, where most of the probability lies, stay exact in low
    precision.

    The result is cached, by the identity of `places_s`: give the same tensor every time.

    Args:
        num_heads: heads of the whole model.
        first_head: first head of the range.
        last_head: the one after the last.
        seq_len: keys, at places 0..seq_len-1.
        alibi: False leaves the causal mask alone.
        device: of the result.
        dtype: of the result.
        places_s: integer place of every query; None: all places.
        window: keys that a query sees, the one at its own place being the last; None: all.
    """
    queries_s = torch.arange(seq_len, device=device) if places_s is None else places_s
    keys_t = torch.arange(seq_len, device=device)
    return causal_bias_at(num_heads, first_head, last_head, queries_s[None], keys_t, alibi, dtype, window)


def causal_bias_at(
    num_heads: int,
    first_head: int,
    last_head: int,
    positions_bs: Tensor,
    keys_t: Tensor,
    alibi: bool,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """The same for queries and keys anywhere in their sequences, [b, heads or 1, s, t].

    Args:
        num_heads: heads of the whole model.
        first_head: first head of the range.
        last_head: the one after the last.
        positions_bs: integer position of every query.
        keys_t: integer position of every key; those beyond a query's position are masked.
        alibi: False leaves the causal mask alone.
        dtype: of the result.
        window: keys that a query sees; None: all.
    """
    distance_bst = keys_t.float() - positions_bs[:, :, None]
    hidden_bst = distance_bst > 0
    if window is not None:
        hidden_bst |= distance_bst <= -window
    if not alibi:
        return torch.zeros_like(distance_bst).masked_fill_(hidden_bst, -math.inf)[:, None].to(dtype)
    slopes = alibi_slopes(num_heads)[first_head:last_head].to(positions_bs.device)
    bias_bnst = slopes[:, None, None] * distance_bst[:, None]
    return bias_bnst.masked_fill_(hidden_bst[:, None], -math.inf).to(dtype)


def hide_other_documents(bias_bnst: Tensor, document_starts_bs: Tensor) -> Tensor:
    """The mask with -inf at every key before the query's document, [b, n, s, t].

    Args:
        bias_bnst: a causal mask [b or 1, n or 1, s, t] of keys at places 0..t-1. It must hide later keys: a key up to
            the query's own place that is not before the document is in it, so nothing need be known of the keys.
        document_starts_bs: place at which the document of every query starts.
    """
    keys_t = torch.arange(bias_bnst.shape[-1], device=bias_bnst.device)
    before_bst = keys_t < document_starts_bs[:, :, None]
    return bias_bnst.masked_fill(before_bst[:, None], -math.inf)
