"""The GEMMs of a linear layer, with CPU kernels for the cases in which PyTorch's are slow.

PyTorch uses MKL for fp32, which on AMD CPUs uses half of AVX-512: megads' kernel is twice as fast (measured on a core
of a Zen 5: 186 to 226 GFLOP/s against 94 to 103). For bf16 PyTorch uses oneDNN, which is fast, but rounds weight
gradients before they are accumulated: megads' kernel accumulates them in fp32 main_grad, and is also faster on a Zen 4
or 5. Elsewhere oneDNN's inner product adds a bias in the same pass, while PyTorch's linear layer needs a second one. On
CPUs for which oneDNN has no bf16 GEMM (x86 without AVX-512, Arm without BF16), PyTorch falls back to plain loops:
megads' kernel converts the operands to fp32 when it packs them, and is 4 to 100 times as fast. Without megads' kernels
the operands are converted before PyTorch's fp32 GEMM. `megads.ops.processor.gemm` chooses among these.

No other GEMM of training or generation may reach those loops (tests/ops/test_processors.py).

On GPUs, cuBLAS adds the product of two bf16 or fp16 matrices to an fp32 one (torch >= 2.10, `out_dtype`): weight
gradients are accumulated without being rounded and without a second pass over main_grad, as by Megatron-LM's
gradient_accumulation_fusion. There, KernelOp.linear stands for this alone. On CPUs PyTorch's fp32 GEMM adds to
main_grad, too, where megads' kernel does not.

Shape suffixes: m = tokens (any leading dims in `...`), i = input features, o = output features; gemm's are its own.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops import processor
from megads.ops.config import KernelOp, Kernels
from megads.ops.processor import GemmBackend

THINNEST = 16
"""Minimum rows and columns of the output for megads' kernels; PyTorch's dot products are faster below."""

DOT_PRODUCTS = 3
"""Rows of a bf16 output up to which PyTorch's linear layer computes vectorized dot products, which read each weight
once, even on CPUs for which it has no bf16 GEMM."""

WIDEST = 16
"""Columns per row of the output from which the bf16 kernel would mostly pack; oneDNN is faster for few tokens and a
large weight."""


def linear(x_mi: Tensor, weight_oi: Tensor, bias_o: Tensor | None, kernels: Kernels) -> Tensor:
    """x W^T + b, [..., o] in x's dtype.

    Args:
        x_mi: input, [..., i].
        weight_oi: weight, in x's dtype.
        bias_o: bias in x's dtype, or None.
        kernels: selects the implementation.
    """
    rows = prod(x_mi.shape[:-1])
    if needs_widening(x_mi) and rows <= DOT_PRODUCTS:
        return F.linear(x_mi, weight_oi, bias_o)
    if kernels.fused(KernelOp.linear) and _gemm_takes(x_mi, weight_oi, rows, weight_oi.shape[0]):
        return _gemm(x_mi, weight_oi, bias_o)
    if needs_widening(x_mi):
        wide_bias_o = None if bias_o is None else bias_o.float()
        return F.linear(x_mi.float(), weight_oi.float(), wide_bias_o).to(x_mi.dtype)
    if kernels.fused(KernelOp.linear) and bias_o is not None and _inner_product_takes(x_mi, weight_oi):
        out_mo = torch.ops.mkldnn._linear_pointwise(x_mi.flatten(0, -2), weight_oi, bias_o, "none", [], "")
        return _unflattened(out_mo, x_mi)
    return F.linear(x_mi, weight_oi, bias_o)


def linear_into(
    out_mo: Tensor, x_mi: Tensor, weight_oi: Tensor, kernels: Kernels, bias_o: Tensor | None = None, add: bool = False
) -> None:
    """Writes x W^T + b to a 2-D output with contiguous rows, or adds it to the output; see `linear`."""
    # Accumulation into a bf16 output is left to PyTorch, which also rounds once.
    in_kernel = not add or out_mo.dtype is torch.float32
    if kernels.fused(KernelOp.linear) and in_kernel and _gemm_takes(x_mi, weight_oi, *out_mo.shape):
        _gemm_into(out_mo, x_mi, weight_oi, bias_o, add)
    elif needs_widening(x_mi):
        product_mo = x_mi.float() @ weight_oi.float().t()
        if add:
            out_mo.add_(product_mo)
        else:
            out_mo.copy_(product_mo if bias_o is None else product_mo.add_(bias_o))
    elif add:
        assert bias_o is None
        out_mo.addmm_(x_mi, weight_oi.t())
    elif bias_o is None:
        torch.mm(x_mi, weight_oi.t(), out=out_mo)
    else:
        torch.addmm(bias_o, x_mi, weight_oi.t(), out=out_mo)


def input_gradient(grad_mo: Tensor, weight_oi: Tensor, kernels: Kernels) -> Tensor:
    """dL/dy W, [..., i]: the gradient of the input of `linear`."""
    if kernels.fused(KernelOp.linear) and _gemm_takes(grad_mo, weight_oi, prod(grad_mo.shape[:-1]), weight_oi.shape[1]):
        return _gemm(grad_mo, weight_oi.t(), None)
    return _unflattened(matmul(grad_mo.flatten(0, -2), weight_oi), grad_mo)


def weight_gradient(grad_mo: Tensor, x_mi: Tensor, kernels: Kernels) -> Tensor:
    """(dL/dy)^T x over all tokens, [o, i]: the gradient of the weight of `linear`."""
    grad_mo, x_mi = grad_mo.flatten(0, -2), x_mi.flatten(0, -2)
    if kernels.fused(KernelOp.linear) and _gemm_takes(grad_mo, x_mi, grad_mo.shape[1], x_mi.shape[1]):
        return _gemm(grad_mo.t(), x_mi.t(), None)
    return matmul(grad_mo.t(), x_mi)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """torch.matmul, computed in fp32 where PyTorch only has plain loops for the operands' dtype.

    Args:
        a: [..., m, k].
        b: [..., k, n], with the same leading dims.
    """
    if not needs_widening(a):
        return a @ b
    out: Tensor = _WidenedMatmul.apply(a, b)  # type: ignore[no-untyped-call]
    return out


class _WidenedMatmul(torch.autograd.Function):
    """a b of bf16 operands, computed in fp32 and rounded; keeps the operands, not their fp32 copies."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a.float() @ b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return matmul(grad, b.mT), matmul(a.mT, grad)


def needs_widening(x: Tensor) -> bool:
    """Whether PyTorch multiplies matrices of this dtype on this CPU in plain loops, so that fp32 is faster."""
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and _torch_loops()


def fuses_accumulation(grad_mo: Tensor, x_mi: Tensor) -> bool:
    """Whether a fused `add_weight_gradient` accumulates inside the GEMM; else it computes the gradient first."""
    by_torch = _cublas_adds(grad_mo, x_mi) or _torch_adds(grad_mo, x_mi)
    return by_torch or _gemm_takes(grad_mo, x_mi, grad_mo.shape[-1], x_mi.shape[-1])


def add_weight_gradient(main_grad_oi: Tensor, grad_mo: Tensor, x_mi: Tensor, first: bool, kernels: Kernels) -> None:
    """Adds `weight_gradient` to main_grad; if `fuses_accumulation`, without rounding it to its dtype first.

    Args:
        main_grad_oi: fp32, contiguous.
        grad_mo: gradient of the output, [..., o].
        x_mi: input, [..., i].
        first: overwrite main_grad instead of adding to it.
        kernels: see `linear`.
    """
    if kernels.fused(KernelOp.linear) and _cublas_adds(grad_mo, x_mi):
        grad_om, x_mi = grad_mo.flatten(0, -2).t(), x_mi.flatten(0, -2)
        if first:
            torch.mm(grad_om, x_mi, out_dtype=torch.float32, out=main_grad_oi)
        else:
            torch.addmm(main_grad_oi, grad_om, x_mi, out_dtype=torch.float32, out=main_grad_oi)
    elif kernels.fused(KernelOp.linear) and _gemm_takes(grad_mo, x_mi, grad_mo.shape[-1], x_mi.shape[-1]):
        _gemm_into(main_grad_oi, grad_mo.flatten(0, -2).t(), x_mi.flatten(0, -2).t(), None, not first)
    elif kernels.fused(KernelOp.linear) and _torch_adds(grad_mo, x_mi):
        grad_om, x_mi = grad_mo.flatten(0, -2).t(), x_mi.flatten(0, -2)
        if first:
            torch.mm(grad_om, x_mi, out=main_grad_oi)
        else:
            main_grad_oi.addmm_(grad_om, x_mi)
    elif first:
        main_grad_oi.copy_(weight_gradient(grad_mo, x_mi, kernels))
    else:
        main_grad_oi.add_(weight_gradient(grad_mo, x_mi, kernels))


def register() -> None:
    """Registers fake implementations; callers implement autograd. Requires that the library is loaded."""
    for name in ("gemm", "gemm_bf16"):

        @torch.library.register_fake(f"megads::{name}")
        def _(c: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, add: bool) -> None:
            return None


def _cublas_adds(grad_mo: Tensor, x_mi: Tensor) -> bool:
    half = grad_mo.dtype is x_mi.dtype and grad_mo.dtype.itemsize == 2
    return half and grad_mo.device.type == "cuda" and torch.version.hip is None and x_mi.numel() > 0


def _torch_adds(grad_mo: Tensor, x_mi: Tensor) -> bool:
    return grad_mo.dtype is x_mi.dtype is torch.float32 and grad_mo.device.type == "cpu"


def _gemm_takes(left: Tensor, right: Tensor, rows: int, columns: int) -> bool:
    if left.device.type != "cpu" or left.dtype is not right.dtype or not (left.numel() and right.numel()):
        return False
    if left.dtype not in (torch.float32, torch.bfloat16):
        return False
    low = left.dtype is torch.bfloat16
    if not _is_ours_faster(low):
        return False
    if low and _torch_loops():
        return True
    return min(rows, columns) >= THINNEST and (not low or columns < WIDEST * rows)


def _is_ours_faster(low: bool) -> bool:
    return processor.gemm(bf16=low, kernels=True) is GemmBackend.megads


def _torch_loops() -> bool:
    return processor.torch_loops_over_bf16()


def make_choices_constant() -> None:
    """Makes torch.compile call what chooses among GEMMs for this processor, instead of tracing how it reads /proc."""
    for choice in (_is_ours_faster, _torch_loops):
        torch.compiler.assume_constant_result(choice)


def _gemm(a_mk: Tensor, b_nk: Tensor, bias_n: Tensor | None) -> Tensor:
    """a b^T + bias, [..., n], for any strides. Bitwise the same for any number of threads."""
    flat_mk = a_mk.flatten(0, -2)
    out_mn = flat_mk.new_empty(flat_mk.shape[0], b_nk.shape[0])
    _gemm_into(out_mn, flat_mk, b_nk, bias_n, False)
    return _unflattened(out_mn, a_mk)


def _gemm_into(out_mn: Tensor, a_mk: Tensor, b_nk: Tensor, bias_n: Tensor | None, add: bool) -> None:
    gemm = torch.ops.megads.gemm if a_mk.dtype is torch.float32 else torch.ops.megads.gemm_bf16
    gemm(out_mn, a_mk, b_nk, bias_n, add)


def _unflattened(out_mo: Tensor, like: Tensor) -> Tensor:
    """Restores the leading dims of `like`. Not a view to autograd, since the collective after a row-parallel layer
    writes into it."""
    out: Tensor = torch.ops.aten._unsafe_view(out_mo, [*like.shape[:-1], out_mo.shape[-1]])
    return out


def _inner_product_takes(x_mi: Tensor, weight_oi: Tensor) -> bool:
    # Inductor supports it with constant weights only.
    eager = x_mi.device.type == "cpu" and not torch.compiler.is_compiling()
    bf16 = eager and x_mi.dtype is torch.bfloat16 and weight_oi.dtype is torch.bfloat16
    return bf16 and x_mi.numel() > 0 and weight_oi.numel() > 0 and _has_inner_product()


@functools.cache
def _has_inner_product() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
