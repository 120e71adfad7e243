"""LayerNorm (Ba, Kiros and Hinton 2016) and RMSNorm (Zhang and Sennrich 2019), also fused with a residual addition.

Shape suffixes: h = hidden size, after any number of leading dims.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.apex import INT32_ELEMENTS
from megads.ops.config import KernelOp, Kernels, kernel_supports


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kernels: Kernels) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim, in x's dtype.

    Args:
        x: [..., h]; megads' kernel supports the dtypes of KERNEL_DTYPES, and computes in fp32 internally.
        weight: [h], in x's dtype; None: no weight, computed by PyTorch.
        bias: [h], in x's dtype; None: no bias.
        eps: added to the variance.
        kernels: selects the implementation; NVIDIA apex has one for GPUs, with a bias.
    """
    if weight is not None and kernels.takes(KernelOp.norm, x):
        return _norm(x, weight, bias, eps, centred=True)
    return _eager_layer_norm(x, weight, bias, eps, kernels)


def _eager_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kernels: Kernels) -> Tensor:
    """LayerNorm by NVIDIA apex if selected and supported, else by PyTorch."""
    if kernels.apex(KernelOp.norm) and bias is not None and _apex_takes(x, weight):
        from apex.normalization.fused_layer_norm import fused_layer_norm_affine

        # By default it saves the input, as megads' kernel does; memory_efficient recomputes the input from the output.
        normed: Tensor = fused_layer_norm_affine(x, weight, bias, x.shape[-1:], eps)
        return normed
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, kernels: Kernels) -> Tensor:
    """x / sqrt(mean of x^2 + eps) * weight over the last dim; arguments as in `layer_norm`."""
    if weight is not None and kernels.takes(KernelOp.norm, x):
        return _norm(x, weight, None, eps, centred=False)
    return _eager_rms_norm(x, weight, eps, kernels)


def _eager_rms_norm(x: Tensor, weight: Tensor | None, eps: float, kernels: Kernels) -> Tensor:
    if kernels.apex(KernelOp.norm) and _apex_takes(x, weight):
        from apex.normalization.fused_layer_norm import fused_rms_norm_affine

        normed: Tensor = fused_rms_norm_affine(x, weight, x.shape[-1:], eps)
        return normed
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """`layer_norm` of x + residual, and that sum; the norm is computed from the rounded sum.

    Args:
        x: [..., h].
        residual: residual, in x's shape and dtype.
        weight: as in `layer_norm`.
        bias: as in `layer_norm`.
        eps: as in `layer_norm`.
        kernels: as in `layer_norm`; with apex's norm, PyTorch computes the sum.

    Returns:
        The norm and the sum.
    """
    if weight is not None and kernels.takes(KernelOp.add_norm, x):
        return _add_norm(x, residual, weight, bias, eps, centred=True)
    added = x + residual
    return _eager_layer_norm(added, weight, bias, eps, kernels), added


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual, and that sum; arguments and results as in `add_layer_norm`."""
    if weight is not None and kernels.takes(KernelOp.add_norm, x):
        return _add_norm(x, residual, weight, None, eps, centred=False)
    added = x + residual
    return _eager_rms_norm(added, weight, eps, kernels), added


def _apex_takes(x: Tensor, weight: Tensor | None) -> bool:
    """Whether apex supports the tensors: it has 32-bit indices and no mixed dtypes, and cannot launch an empty grid."""
    same = weight is not None and weight.dtype == x.dtype
    return same and x.is_cuda and kernel_supports(x) and 0 < x.numel() < INT32_ELEMENTS


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    out: Tensor
    out, _ = torch.ops.megads.norm_forward(_rows(x), weight, bias, eps, centred)
    return out.view(x.shape)


def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    rows = _rows(x), _rows(residual)
    out, added, _ = torch.ops.megads.add_norm_forward(*rows, weight, bias, eps, centred)
    return out.view(x.shape), added.view(x.shape)


def register() -> None:
    """Registers fake implementations and autograd of the operators; requires that the library is loaded."""

    def statistics_of(x: Tensor) -> Tensor:
        return x.new_empty((x.shape[0], 2), dtype=torch.float32)

    @torch.library.register_fake("megads::norm_forward")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), statistics_of(x)

    @torch.library.register_fake("megads::add_norm_forward")
    def _(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(x), statistics_of(x)

    @torch.library.register_fake("megads::norm_backward")
    def _(
        grad: Tensor,
        grad_added: Tensor | None,
        x: Tensor,
        weight: Tensor,
        statistics: Tensor,
        centred: bool,
        has_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(weight.shape[0] if has_bias else 0)

    torch.library.register_autograd("megads::norm_forward", _backward, setup_context=_keep)
    torch.library.register_autograd("megads::add_norm_forward", _add_backward, setup_context=_add_keep)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, ctx.centred = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _grad_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return (*_gradients(ctx, grad, None), None, None)


def _add_keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, _, weight, bias, _, ctx.centred = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.set_materialize_grads(False)


def _add_backward(
    ctx: Any, grad: Tensor | None, grad_added: Tensor | None, _grad_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (grad_added, grad_added, None, None, None, None)
    grad_x, grad_weight, grad_bias = _gradients(ctx, grad, grad_added)
    return grad_x, grad_x, grad_weight, grad_bias, None, None


def _gradients(ctx: Any, grad: Tensor, grad_added: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the norm's input, the weight and the bias."""
    x, weight, statistics = ctx.saved_tensors
    grad_added = None if grad_added is None else grad_added.contiguous()
    grads = torch.ops.megads.norm_backward(
        grad.contiguous(), grad_added, x, weight, statistics, ctx.centred, ctx.has_bias
    )
    grad_x, grad_weight, grad_bias = grads
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None
