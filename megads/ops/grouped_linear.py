"""GEMMs of several linear layers of the same size, each applied to its own rows: the experts of a mixture.

Rows are sorted by expert. On Hopper GPUs one kernel can compute the bf16 GEMMs of all experts (`torch._grouped_mm`,
KernelOp.grouped_linear): it finds the rows of each by their ends on the device, so that the host does not wait for the
numbers of rows. It rounds weight gradients to bf16 before they are accumulated. On Blackwell it leaves the gradients of
experts without rows undefined (pytorch/pytorch#172439), and elsewhere PyTorch computes it in a loop.

Everywhere else the GEMMs are a loop over the experts with rows, whose numbers the host reads; each is one of
`ops.linear`: on CPUs megads' kernels where these are faster, on GPUs cuBLAS. There, GEMMs can accumulate weight
gradients in fp32 themselves.

Shape suffixes: n = rows, e = experts, i = input features, o = output features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megads.ops import linear as gemm
from megads.ops.config import KernelOp, Kernels
from megads.ops.token_dispatch import RowCounts

HOPPER = 9
"""Major compute capability of the GPUs on which one kernel computes the GEMMs of all experts."""
_ALIGNED = 8
"""Features of which the sizes of bf16 matrices are multiples for that kernel: 16 bytes."""


def is_one_kernel(left: Tensor, right: Tensor, kernels: Kernels) -> bool:
    """Whether one kernel computes the GEMMs of all experts.

    Args:
        left: rows, [n, ...].
        right: the weights, or other rows.
        kernels: implementation of the GEMMs.
    """
    if not (kernels.fused(KernelOp.grouped_linear) and left.device.type == "cuda" and torch.version.hip is None):
        return False
    low = left.dtype is right.dtype is torch.bfloat16
    aligned = left.shape[0] and not any(size % _ALIGNED for size in (left.shape[-1], *right.shape[1:]))
    return bool(low and aligned) and torch.cuda.get_device_capability(left.device)[0] == HOPPER


def _of_experts(counts: RowCounts) -> Iterator[tuple[int, slice]]:
    """Yields every expert that has rows, with its rows."""
    start = 0
    for expert, count in enumerate(counts.on_host):
        if count:
            yield expert, slice(start, start + count)
        start += count


def grouped_linear(x_ni: Tensor, weights_eoi: Tensor, counts: RowCounts, kernels: Kernels) -> Tensor:
    """Each row times the transposed weight of its expert, [n, o] in x's dtype.

    Args:
        x_ni: rows, sorted by expert.
        weights_eoi: weights, in x's dtype; may be a transposed view.
        counts: number of rows of each expert.
        kernels: implementation of the GEMMs.
    """
    if is_one_kernel(x_ni, weights_eoi, kernels):
        return linear_in_one_kernel(x_ni, weights_eoi, counts)
    out_no = x_ni.new_empty(x_ni.shape[0], weights_eoi.shape[1])
    for expert, rows in _of_experts(counts):
        gemm.linear_into(out_no[rows], x_ni[rows], weights_eoi[expert], kernels)
    return out_no


def linear_in_one_kernel(x_ni: Tensor, weights_eoi: Tensor, counts: RowCounts) -> Tensor:
    """`grouped_linear` by `torch._grouped_mm`."""
    out_no: Tensor = torch._grouped_mm(x_ni, weights_eoi.mT, offs=counts.ends)
    return out_no


def add_grouped_weight_gradient(
    main_grad_eoi: Tensor, grad_no: Tensor, x_ni: Tensor, counts: RowCounts, first: bool, kernels: Kernels
) -> None:
    """Accumulates the weight gradient of every expert, grad^T x over its rows.

    Args:
        main_grad_eoi: fp32 gradients, contiguous.
        grad_no: gradient of the outputs, sorted by expert.
        x_ni: inputs, sorted by expert.
        counts: number of rows of each expert.
        first: overwrite main_grad instead of adding to it; experts without rows become 0.
        kernels: implementation of the GEMMs.
    """
    if is_one_kernel(grad_no, x_ni, kernels):
        gradients_eoi = weight_gradient_in_one_kernel(grad_no, x_ni, counts)
        if first:
            main_grad_eoi.copy_(gradients_eoi)
        else:
            main_grad_eoi.add_(gradients_eoi)
        return
    for expert, rows in _of_experts(counts):
        gemm.add_weight_gradient(main_grad_eoi[expert], grad_no[rows], x_ni[rows], first, kernels)
    if first:
        for expert, count in enumerate(counts.on_host):
            if not count:
                main_grad_eoi[expert].zero_()


def grouped_weight_gradient(grad_no: Tensor, x_ni: Tensor, counts: RowCounts, kernels: Kernels) -> Tensor:
    """The weight gradients, [e, o, i] in x's dtype; see `add_grouped_weight_gradient`."""
    if is_one_kernel(grad_no, x_ni, kernels):
        return weight_gradient_in_one_kernel(grad_no, x_ni, counts)
    gradients_eoi = x_ni.new_zeros(len(counts.on_device), grad_no.shape[1], x_ni.shape[1])
    for expert, rows in _of_experts(counts):
        gradients_eoi[expert] = gemm.weight_gradient(grad_no[rows], x_ni[rows], kernels)
    return gradients_eoi


def weight_gradient_in_one_kernel(grad_no: Tensor, x_ni: Tensor, counts: RowCounts) -> Tensor:
    """`grouped_weight_gradient` by `torch._grouped_mm`."""
    gradients_eoi: Tensor = torch._grouped_mm(grad_no.mT, x_ni, offs=counts.ends)
    return gradients_eoi


def fuses_accumulation(grad_no: Tensor, x_ni: Tensor, kernels: Kernels) -> bool:
    """Whether the GEMMs accumulate weight gradients without rounding them first, see `ops.linear`."""
    separate = kernels.fused(KernelOp.linear) and not is_one_kernel(grad_no, x_ni, kernels)
    return separate and gemm.fuses_accumulation(grad_no, x_ni)
