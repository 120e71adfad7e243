"""Benchmark of the GEMMs of a linear layer: the output, and the gradients of input and weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.config import FUSED, Kernels
from megads.ops.linear import input_gradient, linear, weight_gradient
from scripts.bench.operators.case import OURS, Case, Sizes, Target

EAGER = "eager"


def linear_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """The up projection of the model's MLP over a micro-batch, with its bias."""
    batch, heads, seq_len, dim = sizes.attention
    tokens, hidden = batch * seq_len, heads * dim
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(4 * hidden, hidden).to(dtype)
    bias, grad = torch.randn(4 * hidden).to(dtype), torch.randn(tokens, 4 * hidden).to(dtype)

    def products(kernels: Kernels) -> list[Tensor]:
        return [
            linear(x, weight, bias, kernels),
            input_gradient(grad, weight, kernels),
            weight_gradient(grad, x, kernels),
        ]

    def torchs() -> list[Tensor]:
        return [F.linear(x, weight, bias), grad @ weight, grad.t() @ x]

    flops = 3 * 2.0 * tokens * hidden * 4 * hidden
    name = f"linear f+b {tokens}x{hidden}x{4 * hidden}"
    return Case(name, {OURS: lambda: products(FUSED), EAGER: torchs}, flops=flops, targets=(Target(EAGER, 1.0),))
