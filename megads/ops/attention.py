"""The attention core on one device, by any of four kernels. Softmax attention with scores in memory is in `softmax`.

`attention` is megads' own: causal, with ALiBi and document borders, block by block (Dao et al. 2022, FlashAttention).
Neither scores nor mask are ever in memory as a whole; blocks of keys that no query of a block sees are left out.

`masked_attention`, `cudnn_attention` and `augmented_attention` take torch's scaled_dot_product_attention: with an
additive mask in memory, or with ALiBi and no mask. ALiBi without a mask works through any plain causal kernel: the bias
rides along as more features of queries and keys. slope * t is a product of something that only the query's head knows
and something that only the key's place does. So queries get the slope, keys their place, and a kernel that knows no
bias adds it to the scores. Instead of slope * (t - place) it is slope * t: what differs is the same for all keys of a
query, and softmax does not feel it. bf16 has 8 bits of mantissa: a place t < 65,536 is 256 * (t // 256) + t % 256, both
exact, and a slope is the sum of its rounding and what that leaves. The kernel multiplies exactly and adds in fp32. That
would cost fp32 inputs digits, as slope * t grows to hundreds where slope * (t - place) is small near the query; bf16
has not so many to lose.

`flash_attention` is that of the package flash-attn (Dao 2023, FlashAttention-2), where it is installed; on GPUs, in
bf16. It knows ALiBi, windows and shared keys; documents become sequences of their own length, one after another.

`flex_attention` is torch's FlexAttention (Dong et al. 2024): ALiBi and masks become part of a kernel that it writes. On
a GPU the kernel is compiled, for every shape once. On a CPU torch has a forward pass only, by plain operators, which is
good for checks. Which blocks of keys a block of queries sees is computed from the first and the last key of each of its
queries; scores and masks of all queries and keys are never in memory.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim, e = d + 8, c =
documents of all samples together, i = blocks of queries, j = blocks of keys.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask

from megads.ops.config import AUGMENTED_FEATURES, AUGMENTED_LONGEST, shares_keys
from megads.ops.device_cache import device_cache
from megads.ops.dropout import DropoutMask

NOTHING_DROPPED = (None, 0, 0, 0)
"""In the place of a mask's arguments."""
FLASH_INSTALLED = importlib.util.find_spec("flash_attn_2_cuda") is not None
"""The compiled kernels of flash-attn are there: other packages bring a folder flash_attn, too."""
FLEX_BLOCK = 128
"""Queries and keys of a block of FlexAttention."""
_BASE = 256
"""Of the two digits in which augmented attention says a place."""


def attention(
    q_bnsd: Tensor,
    k_bmtd: Tensor,
    v_bmtd: Tensor,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
    mask: DropoutMask | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - place)) v over the keys from a query's start to its place, [b, n, s, d].

    Query head i reads keys and values of head i // (n / m) (Ainslie et al. 2023, grouped-query attention). In memory
    the result is [b, s, n, d]. A query that sees no key gets zeros. Needs
    `megads.ops.resolve.load_library`; `attention_reference` is the same in plain torch.

    Args:
        q_bnsd: queries, fp32 or bf16 on a CPU. Softmax and sums are fp32; bf16 is multiplied as bf16 where the
            processor can.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 place of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key that a query sees; None: 0.
        mask: of the probabilities: its rows are the places of queries, its elements keys; backward draws it again.
            None: nothing is dropped.
    """
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in (q_bnsd, k_bmtd, v_bmtd)]
    starts_bs = None if starts_bs is None else starts_bs.contiguous()
    out: Tensor
    drawn = NOTHING_DROPPED if mask is None else mask.arguments
    out, _ = torch.ops.megads.attention_forward(*rows, slopes_n, places_s, starts_bs, q_bnsd.shape[-1] ** -0.5, *drawn)
    return out


def attention_reference(
    q_bnsd: Tensor,
    k_bmtd: Tensor,
    v_bmtd: Tensor,
    slopes_n: Tensor | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
    mask: DropoutMask | None = None,
) -> Tensor:
    """The same by the formula, in the dtype of the queries; see `attention`."""
    queries, keys, group = q_bnsd.shape[2], k_bmtd.shape[2], q_bnsd.shape[1] // k_bmtd.shape[1]
    k_bntd, v_bntd = (x.repeat_interleave(group, 1) for x in (k_bmtd, v_bmtd))
    places_s = torch.arange(queries) if places_s is None else places_s
    distance_st = torch.arange(keys) - places_s[:, None]
    hidden_bst = (distance_st > 0)[None]
    if starts_bs is not None:
        hidden_bst = hidden_bst | (torch.arange(keys) < starts_bs[:, :, None])
    scores_bnst = q_bnsd @ k_bntd.transpose(-1, -2) * q_bnsd.shape[-1] ** -0.5
    if slopes_n is not None:
        scores_bnst = scores_bnst + (slopes_n[:, None, None] * distance_st).to(q_bnsd.dtype)
    scores_bnst = scores_bnst.masked_fill(hidden_bst[:, None], float("-inf"))
    weights_bnst = scores_bnst.softmax(-1).masked_fill(hidden_bst[:, None], 0.0)
    if mask is not None:
        weights_bnst = weights_bnst * mask.keep(q_bnsd.shape[1], places_s, keys) * mask.scale
    return weights_bnst @ v_bntd


def register() -> None:
    """Tells torch the shapes of the results and the gradients; the library is loaded."""

    def like(x_bnsd: Tensor) -> Tensor:
        return x_bnsd.new_empty(x_bnsd.transpose(1, 2).shape).transpose(1, 2)

    @torch.library.register_fake("megads::attention_forward")
    def _(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        scale: float,
        samples: Tensor | None,
        key: int,
        threshold: int,
        first_head: int,
    ) -> tuple[Tensor, Tensor]:
        return like(q), q.new_empty((*q.shape[:3], 2), dtype=torch.float32)

    @torch.library.register_fake("megads::attention_backward")
    def _(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        statistics: Tensor,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        scale: float,
        samples: Tensor | None,
        key: int,
        threshold: int,
        first_head: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return like(q), like(k), like(v)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, slopes, places, starts, ctx.scale, samples, *ctx.mask = inputs
        ctx.save_for_backward(samples, q, k, v, *output, slopes, places, starts)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, _grad_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 11
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        samples, *saved = ctx.saved_tensors
        grads = torch.ops.megads.attention_backward(grad, *saved, ctx.scale, samples, *ctx.mask)
        return (*grads, *(None,) * 8)

    torch.library.register_autograd("megads::attention_forward", backward, setup_context=keep)


def bias_dtype(queries: Tensor) -> torch.dtype:
    """Dtype of the additive mask that torch's kernels want beside these queries.

    The CPU kernel takes an fp32 mask beside bf16 queries, but computes garbage with one beside fp64 queries; CUDA
    kernels want the queries' dtype.
    """
    low = queries.device.type == "cpu" and queries.dtype.itemsize < 4
    return torch.float32 if low else queries.dtype


def masked_attention(
    q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor | None, repeat: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v with torch's kernel, [b, n, s, d].

    Args:
        q_bnsd: queries.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        bias: [b or 1, n or 1, s, t] of dtype `bias_dtype`, -inf where nothing is seen; None: every query sees the keys
            up to its own place, and nothing is added.
        repeat: keys and values that heads share are repeated on a GPU, whatever the kernel.
    """
    group = q_bnsd.shape[1] // k_bmtd.shape[1]
    alone = bias is None and not repeat and shares_keys(low=q_bnsd.dtype.itemsize < 4, head_dim=q_bnsd.shape[-1])
    if group > 1 and q_bnsd.device.type != "cpu" and not alone:
        k_bmtd, v_bmtd = k_bmtd.repeat_interleave(group, dim=1), v_bmtd.repeat_interleave(group, dim=1)
    shared = k_bmtd.shape[1] != q_bnsd.shape[1]
    return F.scaled_dot_product_attention(
        q_bnsd, k_bmtd, v_bmtd, attn_mask=bias, is_causal=bias is None, enable_gqa=shared
    )


def cudnn_attention(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor | None) -> Tensor:
    """The same by cuDNN's kernel and no other; torch raises RuntimeError where it cannot: bf16 on GPUs."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return masked_attention(q_bnsd, k_bmtd, v_bmtd, bias, repeat=True)


def augmented_attention(q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, slopes_n: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - s)) v over the keys up to a query's own place, [b, n, s, d].

    Through torch's scaled_dot_product_attention without a mask: its flash kernels apply on GPUs too. Head i of the
    queries sees head i // g of the keys.

    Args:
        q_bnsd: queries, bf16.
        k_bmsd: keys of the same places; at most AUGMENTED_LONGEST.
        v_bmsd: their values.
        slopes_n: ALiBi slope of every head of the queries; cached by its identity: give the same tensor every time.
    """
    assert k_bmsd.shape[2] == q_bnsd.shape[2] <= AUGMENTED_LONGEST and q_bnsd.dtype is torch.bfloat16
    dim, dtype = q_bnsd.shape[-1], q_bnsd.dtype
    queries, keys = (
        _query_features(slopes_n, dim, q_bnsd.device, dtype),
        _key_features(k_bmsd.shape[2], q_bnsd.device, dtype),
    )
    q_bnse = torch.cat([q_bnsd, queries[:, None].expand(*q_bnsd.shape[:3], AUGMENTED_FEATURES)], dim=-1)
    k_bmse = torch.cat([k_bmsd, keys.expand(*k_bmsd.shape[:3], AUGMENTED_FEATURES)], dim=-1)
    out_bnse = F.scaled_dot_product_attention(
        q_bnse,
        k_bmse,
        F.pad(v_bmsd, (0, AUGMENTED_FEATURES)),
        is_causal=True,
        scale=dim**-0.5,
        enable_gqa=q_bnsd.shape[1] != k_bmsd.shape[1],
    )
    return out_bnse[..., :dim]


@device_cache(16)
def _query_features(slopes_n: Tensor, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, 8]: slope * sqrt(d), as the kernel divides by that, in two parts for each of the keys' two."""
    wanted_n = slopes_n.double() * dim**0.5
    rounded_n = wanted_n.to(dtype)
    rest_n = (wanted_n - rounded_n.double()).to(dtype)
    zero_n = torch.zeros_like(rest_n)
    return torch.stack([rounded_n, rounded_n, rest_n, rest_n, *[zero_n] * (AUGMENTED_FEATURES - 4)], dim=-1).to(device)


@device_cache(4)
def _key_features(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[t, 8]: each place as a multiple of 256 and the rest, twice."""
    places_t = torch.arange(count, device=device)
    rest_t = places_t % _BASE
    parts = [places_t - rest_t, rest_t]
    zero_t = torch.zeros_like(rest_t)
    return torch.stack([*parts, *parts, *[zero_t] * (AUGMENTED_FEATURES - 4)], dim=-1).to(dtype)


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch, for a kernel that takes sequences of any length one after another.

    Attributes:
        bounds: int32 [c + 1], where each begins among all tokens of the batch, and their number.
        longest: tokens of the longest.
    """

    bounds: Tensor
    longest: int


def documents_of(starts_bs: Tensor) -> Documents:
    """Reads off where documents begin; waits for the device once, so it is made once for a micro-batch.

    Args:
        starts_bs: int64 place at which each token's document starts; every sample is whole.
    """
    batch, length = starts_bs.shape
    # One copy to the host: how many documents there are decides shapes.
    begins = (starts_bs == torch.arange(length, device=starts_bs.device)).flatten().cpu().nonzero().flatten()
    bounds = torch.cat([begins, torch.tensor([batch * length])])
    return Documents(bounds.to(starts_bs.device, torch.int32), int(bounds.diff().max()))


def flash_attention(
    q_bnsd: Tensor,
    k_bmsd: Tensor,
    v_bmsd: Tensor,
    slopes_n: Tensor | None = None,
    window: int | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - s)) v over the keys up to a query's own place, [b, n, s, d].

    Gradients are the same bits on every run. In memory the result is [b, s, n, d].

    Args:
        q_bnsd: queries, bf16 on a GPU; at most 256 features a head.
        k_bmsd: keys of the same places; m divides n.
        v_bmsd: their values.
        slopes_n: fp32 ALiBi slope of every head, on the device; None: no bias.
        window: keys that a query sees, the one at its own place being the last; None: all.
        documents: tokens see only their own; None: every sample is one.
    """
    package = importlib.import_module("flash_attn")
    q_bsnd, k_bsmd, v_bsmd = (x.transpose(1, 2) for x in (q_bnsd, k_bmsd, v_bmsd))
    options = {
        "softmax_scale": q_bnsd.shape[-1] ** -0.5,
        "causal": True,
        "window_size": (-1 if window is None else window - 1, 0),
        "alibi_slopes": slopes_n,
        "deterministic": True,
    }
    if documents is None:
        out_bsnd: Tensor = package.flash_attn_func(q_bsnd, k_bsmd, v_bsmd, **options)
        return out_bsnd.transpose(1, 2)
    bounds, longest = documents.bounds, documents.longest
    rows = (x.flatten(0, 1) for x in (q_bsnd, k_bsmd, v_bsmd))
    out = package.flash_attn_varlen_func(*rows, bounds, bounds, longest, longest, **options)
    return out.view(q_bsnd.shape).transpose(1, 2)


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
    return BlockMask.from_kv_blocks(*some, *whole, BLOCK_SIZE=FLEX_BLOCK, mask_mod=visible, seq_lengths=(queries, keys))


def _seen_blocks(first_bs: Tensor, last_s: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Blocks of which some key may be seen, and those of which all queries see all keys, each bool [b, i, j].

    The first is generous: what a block does not show is hidden key by key. A block that is cut off by the end is not
    whole: kernels hide what is beyond the end where they look at every key.
    """
    queries = len(last_s)
    # The last query once more, where the last block is not full.
    rows = torch.arange(-(-queries // FLEX_BLOCK) * FLEX_BLOCK, device=last_s.device).clamp_(max=queries - 1)
    first_bi, last_i = first_bs[:, rows].unflatten(1, (-1, FLEX_BLOCK)), last_s[rows].unflatten(0, (-1, FLEX_BLOCK))
    begin_j = torch.arange(0, keys, FLEX_BLOCK, device=last_s.device)
    end_j = begin_j + FLEX_BLOCK - 1
    some_bij = (last_i.amax(-1)[:, None] >= begin_j) & (first_bi.amin(-1)[..., None] <= end_j)
    whole_bij = (last_i.amin(-1)[:, None] >= end_j) & (first_bi.amax(-1)[..., None] <= begin_j)
    full_i = torch.arange(1, len(last_i) + 1, device=last_s.device) * FLEX_BLOCK <= queries
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
