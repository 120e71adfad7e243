"""Attention by torch's scaled_dot_product_attention with an additive mask in memory.

Shape suffixes: b = batch, n = heads, m = heads of keys and values, s = query, t = key, d = head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megads.ops.config import shares_keys


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
