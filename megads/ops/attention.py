"""The attention core on one device, by any of four kernels. Softmax attention with scores in memory is in `softmax`.

`attention` is megads' CPU kernel: causal, with ALiBi and document masking, computed in blocks (Dao et al. 2022,
FlashAttention). Scores and mask are never materialized as a whole; blocks of keys that no query of a block sees are
skipped.

`masked_attention`, `cudnn_attention` and `augmented_attention` call PyTorch's scaled_dot_product_attention: with an
additive mask in memory, or with ALiBi and no mask. ALiBi without a mask works with any plain causal kernel, because
slope * t is a product of a factor that depends on the query's head only and one that depends on the key's position
only. The slope is appended to the features of queries and the position to those of keys, so the kernel adds the bias to
the scores. It adds slope * t instead of slope * (t - position); the difference is the same for all keys of a query, and
softmax is invariant to it. bf16 has 8 bits of mantissa: a position t < 65,536 is the sum 256 * (t // 256) + t % 256 of
two exact terms, and a slope is the sum of its rounded value and the remainder. The kernel multiplies exactly and adds
in fp32. With fp32 inputs this would lose precision, since slope * t grows to hundreds where slope * (t - position) is
small near the query; bf16 inputs have less precision to lose.

`flash_attention` calls the package flash-attn (Dao 2023, FlashAttention-2) if it is installed; on GPUs, in bf16. It
supports ALiBi, sliding windows and grouped-query attention; documents become sequences of variable length.

`flex_attention` calls PyTorch's FlexAttention (Dong et al. 2024), which generates a kernel that includes ALiBi and
masks. On a GPU the kernel is compiled once per shape. On a CPU there is only a forward pass by plain operators, which
serves for tests. Which blocks of keys a block of queries sees is computed from the first and last visible key of each
query; scores and masks are never materialized as a whole.

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

from megads.batch import copy_to
from megads.ops import compiler
from megads.ops.config import AUGMENTED_FEATURES, AUGMENTED_LONGEST, shares_kv_heads
from megads.ops.device_cache import device_cache
from megads.ops.dropout import DropoutMask
from megads.ops.linear import matmul, needs_widening

NOTHING_DROPPED = (None, 0, 0, 0)
"""Arguments of the operators if there is no dropout mask."""
FLASH_INSTALLED = importlib.util.find_spec("flash_attn_2_cuda") is not None
"""Whether the compiled kernels of flash-attn are installed; a folder flash_attn alone may be of another package."""
FLEX_BLOCK = 128
"""Queries and keys per block of FlexAttention."""
_BASE = 256
"""Base of the two digits that represent a position in augmented attention."""


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

    Query head i reads keys and values of head i // (n / m) (Ainslie et al. 2023, grouped-query attention). The memory
    layout of the result is [b, s, n, d]. A query that sees no key gets zeros. Requires
    `megads.ops.resolve.load_library`; `attention_reference` is the same in plain PyTorch.

    Args:
        q_bnsd: queries, fp32 or bf16, on a CPU. Softmax and accumulation are fp32; bf16 inputs are multiplied in bf16
            if the CPU supports it.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        places_s: int64 position of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key that each query sees; None: 0.
        mask: dropout mask of the probabilities; its rows are positions of queries, its elements keys. The backward pass
            generates it again. None: no dropout.
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
    """Reference implementation of `attention` in plain PyTorch, in the dtype of the queries."""
    queries, keys, group = q_bnsd.shape[2], k_bmtd.shape[2], q_bnsd.shape[1] // k_bmtd.shape[1]
    k_bntd, v_bntd = (x.repeat_interleave(group, 1) for x in (k_bmtd, v_bmtd))
    places_s = torch.arange(queries) if places_s is None else places_s
    distance_st = torch.arange(keys) - places_s[:, None]
    hidden_bst = (distance_st > 0)[None]
    if starts_bs is not None:
        hidden_bst = hidden_bst | (torch.arange(keys) < starts_bs[:, :, None])
    scores_bnst = matmul(q_bnsd, k_bntd.transpose(-1, -2)) * q_bnsd.shape[-1] ** -0.5
    if slopes_n is not None:
        scores_bnst = scores_bnst + (slopes_n[:, None, None] * distance_st).to(q_bnsd.dtype)
    scores_bnst = scores_bnst.masked_fill(hidden_bst[:, None], float("-inf"))
    weights_bnst = scores_bnst.softmax(-1).masked_fill(hidden_bst[:, None], 0.0)
    if mask is not None:
        weights_bnst = weights_bnst * mask.keep(q_bnsd.shape[1], places_s, keys) * mask.scale
    return matmul(weights_bnst, v_bntd)


def register() -> None:
    """Registers fake implementations and autograd of the operators; requires that the library is loaded."""

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
    """Dtype of the additive mask that PyTorch's kernels require for these queries.

    The CPU kernel takes an fp32 mask with bf16 queries, but returns wrong results for an fp32 mask with fp64 queries;
    CUDA kernels require the queries' dtype.
    """
    low = queries.device.type == "cpu" and queries.dtype.itemsize < 4
    return torch.float32 if low else queries.dtype


def masked_attention(
    q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor | None, repeat: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v with PyTorch's kernel, [b, n, s, d].

    Args:
        q_bnsd: queries.
        k_bmtd: keys; m divides n.
        v_bmtd: values.
        bias: [b or 1, n or 1, s, t] of dtype `bias_dtype`, -inf where masked; None: causal attention without a bias.
        repeat: always repeat the keys and values of grouped-query attention on a GPU.
    """
    group = q_bnsd.shape[1] // k_bmtd.shape[1]
    alone = bias is None and not repeat and shares_kv_heads(low=q_bnsd.dtype.itemsize < 4, head_dim=q_bnsd.shape[-1])
    if group > 1 and q_bnsd.device.type != "cpu" and not alone:
        k_bmtd, v_bmtd = k_bmtd.repeat_interleave(group, dim=1), v_bmtd.repeat_interleave(group, dim=1)
    shared = k_bmtd.shape[1] != q_bnsd.shape[1]
    return _torch_attention(q_bnsd, k_bmtd, v_bmtd, attn_mask=bias, is_causal=bias is None, enable_gqa=shared)


def _torch_attention(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, **options: Any) -> Tensor:
    """PyTorch's scaled_dot_product_attention, in fp32 where its backward pass multiplies bf16 in plain loops.

    Its forward pass alone is as fast in bf16 as in fp32 there, and does not copy a KV cache for every token.
    """
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q_bnsd, k_bmtd, v_bmtd))
    if not (trained and needs_widening(q_bnsd)):
        return F.scaled_dot_product_attention(q_bnsd, k_bmtd, v_bmtd, **options)
    if options.get("attn_mask") is not None:
        options["attn_mask"] = options["attn_mask"].float()
    wide = F.scaled_dot_product_attention(q_bnsd.float(), k_bmtd.float(), v_bmtd.float(), **options)
    return wide.to(q_bnsd.dtype)


def cudnn_attention(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor | None) -> Tensor:
    """`masked_attention` with cuDNN's kernel only, bf16 on GPUs; PyTorch raises RuntimeError if it is not supported."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return masked_attention(q_bnsd, k_bmtd, v_bmtd, bias, repeat=True)


def augmented_attention(q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, slopes_n: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - s)) v over the keys up to a query's own position, [b, n, s, d].

    Calls PyTorch's scaled_dot_product_attention without a mask, so its flash kernels can be used on GPUs too. Query
    head i reads keys and values of head i // (n / m).

    Args:
        q_bnsd: queries, bf16.
        k_bmsd: keys at the same positions; at most AUGMENTED_LONGEST.
        v_bmsd: values.
        slopes_n: ALiBi slope of every query head; cached by identity, so pass the same tensor every time.
    """
    assert k_bmsd.shape[2] == q_bnsd.shape[2] <= AUGMENTED_LONGEST and q_bnsd.dtype is torch.bfloat16
    dim, dtype = q_bnsd.shape[-1], q_bnsd.dtype
    queries, keys = (
        _query_features(slopes_n, dim, q_bnsd.device, dtype),
        _key_features(k_bmsd.shape[2], q_bnsd.device, dtype),
    )
    q_bnse = torch.cat([q_bnsd, queries[:, None].expand(*q_bnsd.shape[:3], AUGMENTED_FEATURES)], dim=-1)
    k_bmse = torch.cat([k_bmsd, keys.expand(*k_bmsd.shape[:3], AUGMENTED_FEATURES)], dim=-1)
    out_bnse = _torch_attention(
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
    """[n, 8]: slope * sqrt(d), since the kernel divides by sqrt(d), as two terms for each of the keys' two terms."""
    wanted_n = slopes_n.double() * dim**0.5
    rounded_n = wanted_n.to(dtype)
    rest_n = (wanted_n - rounded_n.double()).to(dtype)
    zero_n = torch.zeros_like(rest_n)
    return torch.stack([rounded_n, rounded_n, rest_n, rest_n, *[zero_n] * (AUGMENTED_FEATURES - 4)], dim=-1).to(device)


@device_cache(4)
def _key_features(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[t, 8]: each position as a multiple of 256 and the remainder, twice."""
    places_t = torch.arange(count, device=device)
    rest_t = places_t % _BASE
    parts = [places_t - rest_t, rest_t]
    zero_t = torch.zeros_like(rest_t)
    return torch.stack([*parts, *parts, *[zero_t] * (AUGMENTED_FEATURES - 4)], dim=-1).to(dtype)


@dataclass(frozen=True)
class DocumentBounds:
    """The documents of a micro-batch, for a kernel that takes concatenated sequences of variable length.

    Attributes:
        bounds: int32 [c + 1], cumulative sequence lengths: first token of each document, then the number of tokens.
        longest: tokens of the longest document.
    """

    bounds: Tensor
    longest: int


def flash_document_bounds(starts_bs: Tensor, device: torch.device) -> DocumentBounds:
    """Computes the bounds of documents on the host, since their number and length determine shapes.

    Args:
        starts_bs: int64 position at which each token's document starts; samples are complete. On the host, else this
            function synchronizes with their device.
        device: device of the bounds.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would replay the documents of this micro-batch.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("flash-attn takes the number of documents of a micro-batch from the host")
    starts_bs = starts_bs.cpu()
    batch, length = starts_bs.shape
    begins = (starts_bs == torch.arange(length)).flatten().nonzero().flatten()
    bounds = torch.cat([begins, torch.tensor([batch * length])])
    return DocumentBounds(copy_to(bounds.to(torch.int32), device), int(bounds.diff().max()))


def flash_attention(
    q_bnsd: Tensor,
    k_bmsd: Tensor,
    v_bmsd: Tensor,
    slopes_n: Tensor | None = None,
    window: int | None = None,
    documents: DocumentBounds | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(d) + slope * (t - s)) v over the keys up to a query's own position, [b, n, s, d].

    Gradients are deterministic. The memory layout of the result is [b, s, n, d].

    Args:
        q_bnsd: queries, bf16 on a GPU; head dim at most 256.
        k_bmsd: keys at the same positions; m divides n.
        v_bmsd: values.
        slopes_n: fp32 ALiBi slope of every head, on the device; None: no bias.
        window: number of keys that a query sees, up to its own position; None: all.
        documents: documents, across which tokens do not attend; None: every sample is one document.
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
        mask: result of `document_block_mask` for the same positions.
        slopes_n: fp32 ALiBi slope of every head, on the device; pass the same tensor every time. None: no bias.
        places_s: int64 position of every query among the keys; pass the same tensor every time. None: 0..s-1.
    """
    # In a compiled block, the kernel is a part of the block's graph.
    attend: Callable[..., Any] = flex.flex_attention
    alibi: Callable[..., Callable[..., Tensor]] = _alibi.__wrapped__
    if not torch.compiler.is_compiling():
        attend, alibi = _attend(q_bnsd.is_cuda), _alibi
    out_bnsd: Tensor = attend(
        q_bnsd,
        k_bmtd,
        v_bmtd,
        score_mod=None if slopes_n is None else alibi(slopes_n, places_s),
        block_mask=mask,
        enable_gqa=q_bnsd.shape[1] != k_bmtd.shape[1],
    )
    return out_bnsd


def document_block_mask(
    queries: int,
    keys: int,
    device: torch.device,
    window: int | None = None,
    places_s: Tensor | None = None,
    starts_bs: Tensor | None = None,
) -> BlockMask:
    """Block mask in which each query sees the keys from its document's start, or within its window, up to its position.

    Does not synchronize with the device.

    Args:
        queries: number of queries.
        keys: number of keys.
        device: device of the mask.
        window: number of keys that a query sees, up to its own position; None: all.
        places_s: int64 position of every query among the keys; None: 0..s-1.
        starts_bs: int64 first key of each query's document; None: 0.
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
    """Blocks that may contain a visible key, and blocks in which all queries see all keys, each bool [b, i, j].

    The first may include blocks without a visible key, since masking inside a block is per key. An incomplete block at
    the end does not count as full: kernels mask keys beyond the end only in blocks that are masked per key.
    """
    queries = len(last_s)
    # Pad an incomplete last block with the last query.
    rows = torch.arange(-(-queries // FLEX_BLOCK) * FLEX_BLOCK, device=last_s.device).clamp_(max=queries - 1)
    first_bi, last_i = first_bs[:, rows].unflatten(1, (-1, FLEX_BLOCK)), last_s[rows].unflatten(0, (-1, FLEX_BLOCK))
    begin_j = torch.arange(0, keys, FLEX_BLOCK, device=last_s.device)
    end_j = begin_j + FLEX_BLOCK - 1
    some_bij = (last_i.amax(-1)[:, None] >= begin_j) & (first_bi.amin(-1)[..., None] <= end_j)
    whole_bij = (last_i.amin(-1)[:, None] >= end_j) & (first_bi.amax(-1)[..., None] <= begin_j)
    full_i = torch.arange(1, len(last_i) + 1, device=last_s.device) * FLEX_BLOCK <= queries
    return some_bij, whole_bij & full_i[:, None] & (end_j < keys)


def _listed(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Number of visible blocks of keys, int32 [b, 1, i], and block indices, visible ones first, int32 [b, 1, i, j]."""
    order = seen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return seen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _visible(window: int | None, places_s: Tensor | None, starts_bs: Tensor | None) -> Callable[..., Tensor]:
    """FlexAttention's mask_mod: whether a query sees a key."""

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
    """FlexAttention's score_mod: adds the ALiBi bias to a score."""

    def add(score: Tensor, sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = query if places_s is None else places_s[query]
        return score + slopes_n[head] * (key - place)

    return add


@functools.cache
def _attend(compiled: bool) -> Callable[..., Any]:
    attend: Callable[..., Any] = flex.flex_attention
    return compiler.compiled(attend) if compiled else attend
