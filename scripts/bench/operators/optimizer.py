"""Benchmark of the optimizer step over flat fp32 state: clipping, AdamW, and rounding to the model weights."""

from __future__ import annotations

import torch

from megads.ops.adamw import AdamWStep, adamw
from scripts.bench.operators.case import OURS, Case, Sizes, Target

CLIP = 0.5
HOW = AdamWStep(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, step=10)
EAGER = "eager, torch's fused AdamW"


def adamw_case(sizes: Sizes, dtype: torch.dtype) -> Case:
    """AdamW with fp32 gradients; the dtype is that of the model weights. megads always runs step 10, torch counts."""
    master, exp_avg, exp_avg_sq, grad = (torch.rand(sizes.parameters) for _ in range(4))
    weights = master.to(dtype)
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = torch.empty_like(grad)
    torchs = torch.optim.AdamW([parameter], lr=HOW.lr, betas=HOW.betas, weight_decay=HOW.weight_decay, fused=True)
    torchs_weights, clip = master.to(dtype), torch.tensor(CLIP)

    def eager() -> None:
        assert parameter.grad is not None
        torch.mul(grad, CLIP, out=parameter.grad)
        torchs.step()
        torchs_weights.copy_(parameter.detach())

    sides = {OURS: lambda: adamw(master, exp_avg, exp_avg_sq, weights, grad, clip, HOW), EAGER: eager}
    # Master and moments in and out, gradient in, weights out.
    moved = sizes.parameters * (7 * 4 + dtype.itemsize)
    return Case(f"AdamW {sizes.parameters:,} parameters", sides, moved, in_place=True, targets=(Target(EAGER, 1.0),))
