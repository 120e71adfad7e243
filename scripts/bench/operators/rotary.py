"""Benchmark of rotary embedding of queries, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from megads.ops.config import FUSED, TORCH
from megads.ops.rotary import rotate
from scripts.bench.operators.case import OURS, Case, Sizes, Target, compiled, drawn, forward_backward


def rotary_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Rotary embedding with precomputed angles in fp32."""
    batch, heads, seq_len, dim = sizes.attention
    x, grad = drawn(batch, seq_len, heads, dim, dtype=dtype), torch.randn(batch, seq_len, heads, dim).to(dtype)
    angles = torch.arange(seq_len)[:, None, None] * 1e4 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()

    def by_halves(x: Tensor) -> Tensor:
        return rotate(x, cos, sin, TORCH)

    def hugging_face(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        doubled_cos, doubled_sin = (torch.cat((table, table), dim=-1).to(dtype) for table in (cos, sin))
        return x * doubled_cos + torch.cat((-second, first), dim=-1) * doubled_sin

    sides = {
        OURS: forward_backward(lambda x: rotate(x, cos, sin, FUSED), [x], grad),
        "eager, as Hugging Face": forward_backward(hugging_face, [x], grad),
        "eager, ops.impl=torch": forward_backward(by_halves, [x], grad),
        "inductor": forward_backward(compiled(by_halves), [x], grad),
    }
    targets = (Target("eager, as Hugging Face", 1.0), Target("inductor", 1.0))
    return Case(f"rotary f+b B{batch} H{heads} S{seq_len} D{dim}", sides, 4 * x.numel() * x.itemsize, targets=targets)
