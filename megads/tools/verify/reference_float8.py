"""Reference of FP8: the formulas, on unsharded linear layers and one group of values at a time.

Written from the definitions and independent of `megads.ops.float8` and `megads.parallel`, whose results in every layout
are compared with these: scales by logarithms, rounding by arithmetic.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megads.api import GPT, Float8, Float8Recipe


class Format(NamedTuple):
    """A float format: bits of its significand after the point, exponent of its smallest normal number, and maximum."""

    mantissa_bits: int
    smallest_exponent: int
    largest: float


E4M3 = Format(3, -6, 448.0)
E5M2 = Format(2, -14, 57344.0)


def rounded(group: Tensor, format_: Format) -> Tensor:
    """The quantized values of the values that share a scale: 2^n with the largest n that keeps them in range."""
    largest = float(group.detach().abs().max())
    if largest == 0.0:
        return group
    scale = 2.0 ** math.floor(math.log2(format_.largest / largest))
    scaled = group.double() * scale
    exponent = torch.frexp(scaled).exponent - 1
    spacing = torch.exp2((exponent.clamp(min=format_.smallest_exponent) - format_.mantissa_bits).double())
    # torch.round takes ties to even multiples of the spacing, as the formats do.
    return ((scaled / spacing).round() * spacing / scale).to(group.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_bsi: Tensor, weight_oi: Tensor, recipe: Float8Recipe) -> Tensor:
        ctx.save_for_backward(x_bsi, weight_oi)
        ctx.recipe = recipe
        return _activations(x_bsi, E4M3, recipe) @ _rows(weight_oi, recipe).t()

    @staticmethod
    def backward(ctx: Any, grad_bso: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x_bsi, weight_oi = ctx.saved_tensors
        grad_x_bsi = _activations(grad_bso, E5M2, ctx.recipe) @ _rows(weight_oi.t(), ctx.recipe).t()
        return grad_x_bsi, grad_bso.flatten(0, 1).t() @ x_bsi.flatten(0, 1), None


def _activations(x_bsk: Tensor, format_: Format, recipe: Float8Recipe) -> Tensor:
    if recipe is Float8Recipe.tensorwise:
        return torch.stack([rounded(sample_sk, format_) for sample_sk in x_bsk])
    return torch.stack([rounded(token_k, format_) for token_k in x_bsk.flatten(0, 1)]).view_as(x_bsk)


def _rows(weight_nk: Tensor, recipe: Float8Recipe) -> Tensor:
    if recipe is Float8Recipe.tensorwise:
        return rounded(weight_nk, E4M3)
    return torch.stack([rounded(row_k, E4M3) for row_k in weight_nk])


def _forward(layer: nn.Linear, recipe: Float8Recipe, x_bsi: Tensor) -> Tensor:
    if not layer.training:
        return nn.functional.linear(x_bsi, layer.weight, layer.bias)
    out_bso: Tensor = _Linear.apply(x_bsi, layer.weight, recipe)
    return out_bso if layer.bias is None else out_bso + layer.bias


def use_reference_float8(model: GPT, float8: Float8) -> None:
    """Makes the linear layers of an unsharded model compute their training passes in FP8.

    Args:
        model: the model; changed in place.
        float8: which layers.
    """
    for index in float8.blocks(model.config.num_layers):
        block = model.layers[model.layer_names.index(f"blocks.{index}")]
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.forward = partial(_forward, module, float8.recipe)  # type: ignore[method-assign]
