"""Benchmark 5: LayerNorm and RMSNorm, also of a residual sum that is kept, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.config import FUSED
from megads.ops.norm import add_layer_norm, layer_norm, rms_norm
from scripts.bench.operators.case import OURS, Case, Sizes, Target, compiled, drawn, forward_backward

EPS = 1e-5


def _case(
    name: str,
    sizes: Sizes,
    dtype: torch.dtype,
    ours: Callable[..., Tensor],
    torchs: Callable[..., Tensor],
    wide: int = 1,
    vectors: int = 2,
) -> Case:
    """A norm of the sum of `wide` inputs, with a gain and, if there are two vectors, a bias."""
    shape = (sizes.rows, sizes.width)
    inputs = [drawn(*shape, dtype=dtype) for _ in range(wide)]
    inputs += [torch.ones(sizes.width).to(dtype).requires_grad_() for _ in range(vectors)]
    grad = torch.randn(shape).to(dtype)
    sides = {
        OURS: forward_backward(ours, inputs, grad),
        "eager": forward_backward(torchs, inputs, grad),
        "inductor": forward_backward(compiled(torchs), inputs, grad),
    }
    # Forward in and out, backward input and gradient in, gradient out; a sum has one more input, and is written.
    moved = (5 if wide == 1 else 7) * grad.numel() * grad.itemsize
    targets = (Target("eager", 1.0), Target("inductor", 1.0))
    return Case(f"{name} f+b {sizes.rows}x{sizes.width}", sides, moved, row=5, targets=targets)


def layer_norm_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """LayerNorm of one input."""

    def ours(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x, gain, bias, EPS, FUSED)

    def torchs(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (sizes.width,), gain, bias, EPS)

    return _case("LayerNorm", sizes, dtype, ours, torchs)


def add_layer_norm_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """LayerNorm of a residual sum, which is also an output."""

    def ours(x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        normed, added = add_layer_norm(x, residual, gain, bias, EPS, FUSED)
        return normed + added

    def torchs(x: Tensor, residual: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        added = x + residual
        return F.layer_norm(added, (sizes.width,), gain, bias, EPS) + added

    return _case("residual + LayerNorm", sizes, dtype, ours, torchs, wide=2)


def rms_norm_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """RMSNorm of one input, without bias."""

    def ours(x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain, EPS, FUSED)

    def torchs(x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, (sizes.width,), gain, EPS)

    return _case("RMSNorm", sizes, dtype, ours, torchs, vectors=1)
