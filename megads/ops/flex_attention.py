"""Attention by torch's FlexAttention (Dong et al. 2024): ALiBi and masks become part of a kernel that it writes.

On a GPU the kernel is compiled, for every shape once. On a CPU torch has a forward pass only, by plain operators, which
is good for checks.

Which blocks of keys a block of queries sees is computed from the first and the last key of each of its queries; scores
and masks of all queries and keys are never in memory.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim, i = blocks of
queries, j = blocks of keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Queries and keys of a block."""


def flex_attention(
    q_bnsd: Tensor,
    k_bmtd: Tensor,
    v_bmtd: Tensor,
    mask: BlockMask,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - place)) v over the keys that the mask shows, [b, n, s, d].

    Args:
        q_bnsd: queries; on a CPU without gradients.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        mask: what `visible_blocks` returned for these places.
        slopes_n: fp32 ALiBi slope of every head, on the device, the same tensor every time; None: no bias.
        places_s: int64 place of every query among the keys, the same tensor every time; None: 0..s-1.
    """
    out_bnsd: Tensor = _attend(q_bnsd.is_cuda)(
        q_bnsd,
        k_bmtd,
        v_bmtd,
        score_mod=None if slopes_n is None else _alibi(slopes_n, places_s),
        block_mask=mask,
        enable_gqa=q_bnsd.shape[1] != k_bmtd.shape[1],
    )
    return out_bnsd


def visible_blocks(
    queries: int,
    keys: int,
    device: torch.device,
    window: int | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
) -> BlockMask:
    """The mask of queries that see the keys from their start or window to their own place; nothing waits for a GPU.

    Args:
        queries: their number.
        keys: their number.
        device: of the mask.
        window: keys that a query sees, the one at its own place being the last; None: all.
        places_s: int64 place of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key that a query sees, its document's; None: 0.
    """
    last_s = torch.arange(queries, device=device) if places_s is None else places_s
    first_bs = torch.zeros_like(last_s)[None] if window is None else (last_s - (window - 1)).clamp(min=0)[None]
    if starts_bs is not None:
        first_bs = torch.maximum(first_bs, starts_bs)
    some_bij, whole_bij = _seen_blocks(first_bs, last_s, keys)
    some, whole = (_listed(x_bij[:, None]) for x_bij in (some_bij & ~whole_bij, whole_bij))
    visible = _visible(window, places_s, starts_bs)
    return BlockMask.from_kv_blocks(*some, *whole, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(queries, keys))


def _seen_blocks(first_bs: Tensor, last_s: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Blocks of which some key may be seen, and those of which all queries see all keys, each bool [b, i, j].

    The first is generous: what a block does not show is hidden key by key. A block that is cut off by the end is not
    whole: kernels hide what is beyond the end where they look at every key.
    """
    queries = len(last_s)
    # The last query once more, where the last block is not full.
    rows = torch.arange(-(-queries // BLOCK) * BLOCK, device=last_s.device).clamp_(max=queries - 1)
    first_bi, last_i = first_bs[:, rows].unflatten(1, (-1, BLOCK)), last_s[rows].unflatten(0, (-1, BLOCK))
    begin_j = torch.arange(0, keys, BLOCK, device=last_s.device)
    end_j = begin_j + BLOCK - 1
    some_bij = (last_i.amax(-1)[:, None] >= begin_j) & (first_bi.amin(-1)[..., None] <= end_j)
    whole_bij = (last_i.amin(-1)[:, None] >= end_j) & (first_bi.amax(-1)[..., None] <= begin_j)
    full_i = torch.arange(1, len(last_i) + 1, device=last_s.device) * BLOCK <= queries
    return some_bij, whole_bij & full_i[:, None] & (end_j < keys)


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys are seen, int32 [b, 1, i], and which, those first, int32 [b, 1, i, j]."""
    order = seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _visible(window: int | None, places_s: Tensor | None, starts_bs: Tensor | None) -> Callable[..., Tensor]:
    """Tells whether a query sees a key, as FlexAttention asks."""

    def visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        last = query if places_s is None else places_s[query]
        seen = key <= last
        if window is not None:
            seen = seen & (key > last - window)
        if starts_bs is not None:
            seen = seen & (key >= starts_bs[sample, query])
        return seen

    return visible


@functools.lru_cache(maxsize=8)
def _alibi(slopes_n: Tensor, places_s: Tensor | None) -> Callable[..., Tensor]:
    """Adds the bias to a score, as FlexAttention asks."""

    def add(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if places_s is None else places_s[query]
        return score + slopes_n[head] * (key - place)

    return add


@functools.cache
def _attend(compiled: bool) -> Callable[..., Any]:
    attend: Callable[..., Any] = flex.flex_attention
    return torch.compile(attend, dynamic=False) if compiled else attend
