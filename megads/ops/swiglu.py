"""The gated linear unit of SwiGLU (Shazeer 2020): silu(gate) * up.

One projection makes both. Its columns are pairs: column 2 i is gate i, column 2 i + 1 is up i. So a contiguous share
of the columns (rows of the weight), as tensor parallelism and checkpoints cut them, holds matching gates and ups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor, fused: bool) -> Tensor:
    """gate * sigmoid(gate) * up, [..., f] of x's dtype.

    Args:
        gate_up: [..., 2 f], gates in the even columns, ups in the odd ones; fp32 and bf16 on a CPU go to the kernel,
            which computes in fp32 inside.
        fused: take the kernel; `megads.ops.library.load_library` was called.
    """
    gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
    return F.silu(gate) * up
