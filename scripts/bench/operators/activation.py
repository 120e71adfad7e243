"""Benchmark 4: GELU with and without its bias; SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.activation import bias_gelu, gelu, swiglu
from megads.ops.config import FUSED, TORCH
from scripts.bench.operators.case import LIMIT, OURS, Case, Sizes, Target, compiled, drawn, forward, forward_backward

NO_SLOWER = (Target("eager", 1.0), Target("inductor", 1.0))


def bias_gelu_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Bias and GELU, forward."""
    inputs = [drawn(sizes.rows, sizes.width, dtype=dtype), drawn(sizes.width, dtype=dtype)]

    def torchs(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    sides = {
        OURS: forward(lambda x, bias: bias_gelu(x, bias, FUSED), inputs),
        "eager": forward(torchs, inputs),
        "inductor": forward(compiled(torchs), inputs),
    }
    # 3 ms where the copy takes 2.
    targets = (Target(LIMIT, 2 / 3, ("fp32",)), *NO_SLOWER)
    moved = 2 * inputs[0].numel() * dtype.itemsize
    return Case(f"bias + GELU forward {sizes.rows}x{sizes.width}", sides, moved, row=4, targets=targets)


def gelu_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """GELU, forward and backward; the bias was added by a GEMM."""
    x, grad = drawn(sizes.rows, sizes.width, dtype=dtype), torch.randn(sizes.rows, sizes.width).to(dtype)
    sides = {
        OURS: forward_backward(lambda x: gelu(x, FUSED), [x], grad),
        "eager": forward_backward(lambda x: gelu(x, TORCH), [x], grad),
        "inductor": forward_backward(compiled(lambda x: gelu(x, TORCH)), [x], grad),
    }
    moved = 5 * x.numel() * x.itemsize
    return Case(f"GELU f+b {sizes.rows}x{sizes.width}", sides, moved, row=4, targets=NO_SLOWER)


def swiglu_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """The gate of SwiGLU, forward and backward; gate and up are column pairs in megads, halves in the peers."""
    x, grad = drawn(sizes.rows, 2 * sizes.width, dtype=dtype), torch.randn(sizes.rows, sizes.width).to(dtype)
    halves = x.detach().unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).contiguous().requires_grad_()

    def torchs(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    sides = {
        OURS: forward_backward(lambda x: swiglu(x, FUSED), [x], grad),
        "eager": forward_backward(torchs, [halves], grad),
        "inductor": forward_backward(compiled(torchs), [halves], grad),
    }
    # Forward 2 in, 1 out; backward 3 in, 2 out.
    moved = 8 * grad.numel() * grad.itemsize
    return Case(f"SwiGLU f+b {sizes.rows}x{sizes.width}", sides, moved, targets=NO_SLOWER)
