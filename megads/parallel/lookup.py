"""Rows of an embedding table, looked up; their gradients are added up in fp32, straight into those of the step.

torch adds the gradients of all tokens that read the same row in the table's dtype, on a CPU and for up to 3,072 tokens
on a GPU: in bf16 the row of a token that comes 2,048 times is 5% off. And it makes a whole table of gradients for the
rows of a few tokens.

Shape suffixes: b = batch, s = sequence, m = tokens, h = hidden size, r = rows of the table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.parallel.weight_gradients import TiedGradient, WeightGradients, add_whole


class RowGradient:
    """The gradient of a table from those of the rows that were read."""

    def __init__(self, grad_bsh: Tensor, rows_bs: Tensor) -> None:
        """Computes nothing yet.

        Args:
            grad_bsh: of what was read.
            rows_bs: int64, the rows that were.
        """
        self._grad_mh, self._rows_m = grad_bsh.flatten(0, -2), rows_bs.flatten()

    def add_to(self, sums_rh: Tensor, first: bool) -> None:
        """Adds it to sums; the bits are the same for any number of threads, and on every run.

        Args:
            sums_rh: fp32 or wider.
            first: what they hold does not count.
        """
        if first:
            sums_rh.zero_()
        grad_mh = self._grad_mh.to(sums_rh.dtype)
        if sums_rh.device.type == "cuda":
            add_sorted(sums_rh, self._rows_m, grad_mh)
        else:
            sums_rh.index_add_(0, self._rows_m, grad_mh)


def add_sorted(sums_rh: Tensor, rows_m: Tensor, grad_mh: Tensor) -> None:
    """Adds to rows of the sums in one order on a GPU, too: it sorts them, where index_add_ has atomics."""
    sums_rh.index_put_((rows_m,), grad_mh, accumulate=True)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_bs: Tensor, weight: nn.Parameter, gradients: WeightGradients | None) -> Tensor:
        ctx.save_for_backward(rows_bs)
        # Where weights are cut over ranks, this one may be empty by the time of the backward pass.
        ctx.weight, ctx.shape, ctx.gradients = weight, weight.shape, gradients
        return F.embedding(rows_bs, weight)

    @staticmethod
    def backward(ctx: Any, grad_bsh: Tensor) -> tuple[None, Tensor | None, None]:  # type: ignore[override]
        (rows_bs,), weight = ctx.saved_tensors, ctx.weight
        gradient = RowGradient(grad_bsh, rows_bs)
        sums = ctx.gradients.sums if ctx.gradients is not None else None
        if sums is not None:
            add_whole(sums, weight, gradient)
            return None, None, None
        if isinstance(ctx.gradients, TiedGradient):
            return None, ctx.gradients.take(weight, gradient), None
        whole_rh = torch.empty(
            ctx.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=grad_bsh.device
        )
        gradient.add_to(whole_rh, first=True)
        return None, whole_rh.to(weight.dtype), None


def lookup(rows_bs: Tensor, weight: nn.Parameter, gradients: WeightGradients | None) -> Tensor:
    """The rows of a table, [b, s, h] in its dtype.

    Args:
        rows_bs: int64 [b, s].
        weight: [r, h].
        gradients: whose sums the table's gradient goes to, never put off; None, or without sums, leaves it to autograd.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.embedding(rows_bs, weight)
    out_bsh: Tensor = _Lookup.apply(rows_bs, weight, gradients)
    return out_bsh
