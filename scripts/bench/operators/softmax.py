"""Benchmark 3: softmax of scaled attention scores with ALiBi and causality, forward."""

from __future__ import annotations

import torch
from torch import Tensor

from megads.model.attention import alibi_slopes, causal_bias
from megads.ops.config import FUSED
from megads.ops.softmax import masked_softmax
from scripts.bench.operators.case import LIMIT, OURS, Case, Sizes, Target, compiled, drawn, forward


def softmax_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """Softmax of attention scores; for eager and inductor the sum of bias and mask is precomputed."""
    batch, heads, seq_len = sizes.scores
    scores = drawn(batch, heads, seq_len, seq_len, dtype=dtype)
    slopes, scale = alibi_slopes(heads), 0.125
    bias = causal_bias(heads, 0, heads, seq_len, True, torch.device("cpu"), torch.float32)

    def torchs(scores: Tensor) -> Tensor:
        return torch.softmax(scores.float() * scale + bias, dim=-1).to(dtype)

    sides = {
        OURS: forward(lambda scores: masked_softmax(scores, scale, slopes, kernels=FUSED), [scores]),
        "eager": forward(torchs, [scores]),
        "inductor": forward(compiled(torchs), [scores]),
    }
    moved = 2 * scores.numel() * scores.itemsize
    name = f"scale + ALiBi + mask + softmax forward B{batch} H{heads} S{seq_len}"
    # 6 ms where the copy takes 4.
    targets = (Target(LIMIT, 2 / 3, ("fp32",)), Target("eager", 1.0), Target("inductor", 1.0))
    return Case(name, sides, moved, row=3, targets=targets)
