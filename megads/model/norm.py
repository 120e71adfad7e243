"""Norms of hidden states, and of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megads.model.config import ModelConfig, NormKind
from megads.ops.config import TORCH
from megads.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class Norms(nn.Module):
    """Applies norms over the features of all heads, one per tensor; replaced by sharding, see `Cut.norms`.

    The norm modules are arguments of `forward`.
    """

    def forward(self, inputs: Sequence[Tensor], norms: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """[b, s, heads, head dim] of every norm -> the same."""
        return tuple(norm(x.flatten(2)).view_as(x) for norm, x in zip(norms, inputs, strict=True))


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dim, with gains.

    Args:
        config: configuration of the model, which selects the norm.
        width: size of the last dim; None: the hidden size.

    Attributes:
        kernels: kernel implementation.
    """

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        self.kernels = TORCH
        self.eps = config.norm_eps
        width = config.hidden_size if width is None else width
        self.weight = nn.Parameter(torch.empty(width))
        self.centred = config.norm is NormKind.layernorm
        biased = self.centred and config.bias
        self.bias = nn.Parameter(torch.empty(width)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        if not self.centred:
            return rms_norm(x, self.weight, self.eps, self.kernels)
        return layer_norm(x, self.weight, self.bias, self.eps, self.kernels)

    def of_sum(self, hidden_bsh: Tensor, residual_bsh: Tensor) -> tuple[Tensor, Tensor]:
        """Returns norm(hidden + residual) and hidden + residual, computed in one pass by megads' kernel."""
        if not self.centred:
            return add_rms_norm(hidden_bsh, residual_bsh, self.weight, self.eps, self.kernels)
        weight, bias = self.weight, self.bias
        return add_layer_norm(hidden_bsh, residual_bsh, weight, bias, self.eps, self.kernels)
