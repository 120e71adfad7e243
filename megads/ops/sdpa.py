"""Attention by torch's scaled_dot_product_attention: with an additive mask in memory, or with ALiBi and no mask.

ALiBi without a mask works through any plain causal kernel: the bias rides along as more features of queries and keys.
slope * t is a product of something that only the query's head knows and something that only the key's place does. So
queries get the slope, keys their place, and a kernel that knows no bias adds it to the scores. Instead of
slope * (t - place) it is slope * t: what differs is the same for all keys of a query, and softmax does not feel it.

bf16 has 8 bits of mantissa: a place t < 65,536 is 256 * (t // 256) + t % 256, both exact, and a slope is the sum of its
rounding and what that leaves. The kernel multiplies exactly and adds in fp32. That would cost fp32 inputs digits, as
slope * t grows to hundreds where slope * (t - place) is small near the query; bf16 has not so many to lose.

Shape suffixes: b = batch, n = heads, m = heads of keys and values (n / g of them), s = query, t = key, d = head dim,
e = d + 8.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megads.ops.config import AUGMENTED_FEATURES, AUGMENTED_LONGEST, shares_keys


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


_BASE = 256


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


@functools.lru_cache(maxsize=16)
def _query_features(slopes_n: Tensor, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[n, 8]: slope * sqrt(d), as the kernel divides by that, in two parts for each of the keys' two."""
    wanted_n = slopes_n.double() * dim**0.5
    rounded_n = wanted_n.to(dtype)
    rest_n = (wanted_n - rounded_n.double()).to(dtype)
    zero_n = torch.zeros_like(rest_n)
    return torch.stack([rounded_n, rounded_n, rest_n, rest_n, *[zero_n] * (AUGMENTED_FEATURES - 4)], dim=-1).to(device)


@functools.lru_cache(maxsize=4)
def _key_features(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[t, 8]: each place as a multiple of 256 and the rest, twice."""
    places_t = torch.arange(count, device=device)
    rest_t = places_t % _BASE
    parts = [places_t - rest_t, rest_t]
    zero_t = torch.zeros_like(rest_t)
    return torch.stack([*parts, *parts, *[zero_t] * (AUGMENTED_FEATURES - 4)], dim=-1).to(dtype)
