"""LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019).

Shape suffixes: h = hidden size; what comes before it is any number of dims.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, fused: bool) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim, in x's dtype.

    Args:
        x: [..., h].
        weight: [h], of x's dtype.
        bias: likewise; None: no bias.
        eps: added to the variance.
        fused: take the kernel, where there is one.
    """
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, fused: bool) -> Tensor:
    """x / sqrt(mean of x^2 + eps) * weight over the last dim; arguments as in `layer_norm`."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)
