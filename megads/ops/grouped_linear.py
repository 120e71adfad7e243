"""GEMMs of several linear layers of the same size, each applied to its own rows: the experts of a mixture.

Rows are sorted by expert, and the number of rows of each is known on the host. The GEMMs are those of `ops.linear`: on
CPUs megads' kernels where these are faster, on GPUs cuBLAS, one call for each expert with rows. Weight gradients can be
accumulated in fp32 by the GEMM itself.

Shape suffixes: n = rows, e = experts, i = input features, o = output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megads.ops import linear as gemm
from megads.ops.config import Kernels


def _of_experts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yields every expert that has rows, with its rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def grouped_linear(x_ni: Tensor, weights_eoi: Tensor, counts: Sequence[int], kernels: Kernels) -> Tensor:
    """Each row times the transposed weight of its expert, [n, o] in x's dtype.

    Args:
        x_ni: rows, sorted by expert.
        weights_eoi: weights, in x's dtype; may be a transposed view.
        counts: number of rows of each expert.
        kernels: implementation of the GEMMs.
    """
    out_no = x_ni.new_empty(x_ni.shape[0], weights_eoi.shape[1])
    for expert, rows in _of_experts(counts):
        gemm.linear_into(out_no[rows], x_ni[rows], weights_eoi[expert], kernels)
    return out_no


def add_grouped_weight_gradient(
    main_grad_eoi: Tensor, grad_no: Tensor, x_ni: Tensor, counts: Sequence[int], first: bool, kernels: Kernels
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
    for expert, rows in _of_experts(counts):
        gemm.add_weight_gradient(main_grad_eoi[expert], grad_no[rows], x_ni[rows], first, kernels)
    if first:
        for expert, count in enumerate(counts):
            if not count:
                main_grad_eoi[expert].zero_()


def grouped_weight_gradient(grad_no: Tensor, x_ni: Tensor, counts: Sequence[int], kernels: Kernels) -> Tensor:
    """The weight gradients, [e, o, i] in x's dtype; see `add_grouped_weight_gradient`."""
    gradients_eoi = torch.zeros(len(counts), grad_no.shape[1], x_ni.shape[1], dtype=x_ni.dtype, device=x_ni.device)
    for expert, rows in _of_experts(counts):
        gradients_eoi[expert] = gemm.weight_gradient(grad_no[rows], x_ni[rows], kernels)
    return gradients_eoi


def fuses_accumulation(grad_no: Tensor, x_ni: Tensor) -> bool:
    """Whether the GEMMs accumulate weight gradients without rounding them first, see `ops.linear`."""
    return gemm.fuses_accumulation(grad_no, x_ni)
