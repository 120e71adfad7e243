"""Embedding tables of tensor-parallel ranks: lookups, and their gradients, summed in fp32 in a fixed order.

Shape suffixes: b = batch, s = sequence, t = this rank's share of the sequence, h = hidden size, r = rows of this rank's
table, m = all tokens of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.parallel.grid import Axis
from megads.parallel.region_linear import reduce_from_tp_region, reduce_scatter_to_sp_region
from megads.parallel.weight_gradients import SplitLayer, TiedGradient, WeightGradients, add_whole


class RowGradient:
    """Gradient of an embedding table, from the gradients of the rows that were looked up."""

    def __init__(self, grad_bsh: Tensor, rows_bs: Tensor, foreign_bs: Tensor | None = None) -> None:
        """Stores the operands; `add_to` computes the gradient.

        Args:
            grad_bsh: gradient of the lookup's output.
            rows_bs: indices of the rows, int64; ignored where `foreign_bs`.
            foreign_bs: bool, tokens whose rows are on other ranks; None: none.
        """
        self._grad_mh, self._rows_m = grad_bsh.flatten(0, -2), rows_bs.flatten()
        self._foreign_m = None if foreign_bs is None else foreign_bs.flatten()

    def add_to(self, main_grad_rh: Tensor, first: bool) -> None:
        """Accumulates the gradient into main_grad; bitwise deterministic for any number of threads.

        Args:
            main_grad_rh: main_grad of the table, fp32 or wider.
            first: whether to overwrite main_grad instead.
        """
        if first:
            main_grad_rh.zero_()
        if main_grad_rh.device.type != "cpu":
            rows_m, grad_mh = self._rows_m, self._grad_mh.to(main_grad_rh.dtype)
            if self._foreign_m is not None:
                rows_m, grad_mh = spread(self._foreign_m, rows_m, grad_mh, len(main_grad_rh))
            add_sorted(main_grad_rh, rows_m, grad_mh)
            return
        rows_m, grad_mh = self._rows_m, self._grad_mh
        if self._foreign_m is not None and self._foreign_m.any():
            kept_m = ~self._foreign_m
            rows_m, grad_mh = rows_m[kept_m], grad_mh[kept_m]
        main_grad_rh.index_add_(0, rows_m, grad_mh.to(main_grad_rh.dtype))


def spread(foreign_m: Tensor, rows_m: Tensor, grad_mh: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Gives tokens of other ranks zero gradients to add to rows that are as different as possible.

    Dropping them would need their number on the host. In one row they would be a chain of additions: a GPU adds the
    gradients of a row one after another, and with 8 tensor-parallel ranks 7 of 8 tokens are of other ranks.

    Args:
        foreign_m: bool, tokens of other ranks.
        rows_m: rows of the tokens, int64.
        grad_mh: gradients of the tokens.
        rows: number of rows.

    Returns:
        Rows and gradients to add.
    """
    spread_m = torch.arange(len(rows_m), device=rows_m.device).remainder_(rows)
    return torch.where(foreign_m, spread_m, rows_m), grad_mh.masked_fill(foreign_m[:, None], 0.0)


def add_sorted(main_grad_rh: Tensor, rows_m: Tensor, grad_mh: Tensor) -> None:
    """Adds to rows of main_grad, deterministically on a GPU too: sorts the rows, while index_add_ uses atomics."""
    main_grad_rh.index_put_((rows_m,), grad_mh, accumulate=True)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_bs: Tensor, weight: nn.Parameter, gradients: WeightGradients | None, foreign_bs: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(rows_bs, foreign_bs)
        # Stores the shape, as ZeRO-3 may have freed the weight by the time of the backward pass.
        ctx.weight, ctx.shape, ctx.gradients = weight, weight.shape, gradients
        return _looked_up(rows_bs, weight, foreign_bs)

    @staticmethod
    def backward(ctx: Any, grad_bsh: Tensor) -> tuple[None, Tensor | None, None, None]:  # type: ignore[override]
        (rows_bs, foreign_bs), weight = ctx.saved_tensors, ctx.weight
        gradient = RowGradient(grad_bsh, rows_bs, foreign_bs)
        main_grads = ctx.gradients.main_grads if ctx.gradients is not None else None
        if main_grads is not None:
            add_whole(main_grads, weight, gradient)
            return None, None, None, None
        if isinstance(ctx.gradients, TiedGradient):
            return None, ctx.gradients.take(weight, gradient), None, None
        whole_rh = torch.empty(
            ctx.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=grad_bsh.device
        )
        gradient.add_to(whole_rh, first=True)
        return None, whole_rh.to(weight.dtype), None, None


def _looked_up(rows_bs: Tensor, weight: Tensor, foreign_bs: Tensor | None) -> Tensor:
    if foreign_bs is None:
        return F.embedding(rows_bs, weight)
    return F.embedding(rows_bs.masked_fill(foreign_bs, 0), weight).masked_fill_(foreign_bs[..., None], 0.0)


def lookup(
    rows_bs: Tensor, weight: nn.Parameter, gradients: WeightGradients | None, foreign_bs: Tensor | None = None
) -> Tensor:
    """Embedding lookup, [b, s, h] in the table's dtype.

    Args:
        rows_bs: int64 [b, s].
        weight: [r, h].
        gradients: holds the main_grads that the table's gradient is accumulated into; it is never deferred. None, or
            one without main_grads, leaves the gradient to autograd.
        foreign_bs: bool [b, s], tokens whose rows are on other ranks: they give zeros and have no gradient.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return _looked_up(rows_bs, weight, foreign_bs)
    out_bsh: Tensor = _Lookup.apply(rows_bs, weight, gradients, foreign_bs)
    return out_bsh


class VocabParallelEmbedding(SplitLayer):
    """Embedding table whose rows are sharded over the axis; lookups of all ranks are all-reduced.

    With sequence parallelism, they are reduce-scattered. The gradient is accumulated into main_grad if there is one; it
    is never deferred, since no other stage waits for this backward pass.
    """

    def __init__(self, rows: int, hidden_size: int, axis: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.axis, self.sequence_parallel, self.rows = axis, sequence_parallel, rows
        self.start = axis.rank * self.rows
        self.weight = nn.Parameter(torch.empty(self.rows, hidden_size))

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """int64 [b, s] -> [b, t, h]."""
        if self.axis.size == 1:
            return lookup(tokens_bs, self.weight, self.weight_gradients, None)
        local_bs = tokens_bs - self.start
        foreign_bs = (local_bs < 0) | (local_bs >= self.rows)
        hidden_bsh = lookup(local_bs, self.weight, self.weight_gradients, foreign_bs)
        return (reduce_scatter_to_sp_region if self.sequence_parallel else reduce_from_tp_region)(hidden_bsh, self.axis)


class PositionShardEmbedding(nn.Module):
    """Replicated table of position embeddings; every rank looks up the positions of its share of the sequence.

    Used with sequence parallelism only, where the result is added to sequence-sharded hidden states.
    """

    def __init__(self, num_positions: int, hidden_size: int, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size))

    def forward(self, positions: Tensor) -> Tensor:
        """Positions of all tokens of the region, int64 [..., s] -> [..., t, h]."""
        share = positions.shape[-1] // self.axis.size
        return F.embedding(positions.narrow(-1, self.axis.rank * share, share), self.weight)
