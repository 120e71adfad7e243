"""Benchmark 2: causal attention with ALiBi, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.model.attention import alibi_slopes, causal_bias
from megads.ops.attention import attention
from scripts.bench.operators.case import OURS, Case, Sizes, Target, compiled, drawn, forward_backward

SDPA = "eager, SDPA with a mask"


def attention_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Causal attention with queries, keys and values as in a model: views of [b, s, n, d]."""
    batch, heads, seq_len, dim = sizes.attention
    leaves = [drawn(batch, seq_len, heads, dim, dtype=dtype) for _ in range(3)]
    grad = torch.randn(batch, seq_len, heads, dim).to(dtype).transpose(1, 2)
    slopes = alibi_slopes(heads)
    place = torch.device("cpu"), torch.float32
    mask = causal_bias(heads, 0, heads, seq_len, True, *place)
    distances = (slopes[:, None] * torch.arange(seq_len)).repeat(batch, 1)[:, None].to(dtype)
    future = causal_bias(heads, 0, 1, seq_len, False, *place).clamp(min=torch.finfo(dtype).min).to(dtype)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), slopes)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)

    def hugging_face(*bsnd: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).reshape(batch * heads, seq_len, dim) for x in bsnd)
        scores = torch.baddbmm(distances, q, k.transpose(1, 2), alpha=dim**-0.5).view(batch, heads, seq_len, seq_len)
        weights = torch.softmax(scores + future, dim=-1, dtype=torch.float32).to(dtype)
        return torch.bmm(weights.view(batch * heads, seq_len, seq_len), v).view(batch, heads, seq_len, dim)

    sides = {
        OURS: forward_backward(ours, leaves, grad),
        SDPA: forward_backward(sdpa, leaves, grad),
        "eager, as Hugging Face": forward_backward(hugging_face, leaves, grad),
        "inductor, as Hugging Face": forward_backward(compiled(hugging_face), leaves, grad),
    }
    # Two products forward and five backward, of the half of the square that causality leaves.
    flops = 7 * 2 * batch * heads * seq_len**2 * dim / 2
    name = f"attention f+b B{batch} H{heads} S{seq_len} D{dim}"
    return Case(name, sides, flops=flops, row=2, targets=(Target(SDPA, 1.5),))
