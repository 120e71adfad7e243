"""Dispatch of tokens to their experts, and the weighted sum of the experts' outputs.

A token has one row for each expert that it chooses. Rows are sorted by expert, stably, so that an expert's rows keep
the order of the tokens. Both directions only gather rows, and sums over a token's experts are in the order of its
choices, in fp32: results and gradients are the same bits from run to run, unlike those of atomic additions.

Shape suffixes: t = tokens, k = choices per token, n = rows (t * k), e = experts, h = features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Order of the rows of some tokens.

    Attributes:
        order: int64 [n], the pair t * k + choice of each row, sorted by expert.
        places: int64 [n], the row of each pair; the inverse of `order`.
        counts: int64 [e], number of rows of each expert.
    """

    order: Tensor
    places: Tensor
    counts: Tensor


def sort_rows(chosen_tk: Tensor, num_experts: int) -> RowOrder:
    """Sorts the rows of tokens by expert; does not synchronize with the device.

    Args:
        chosen_tk: int64 [t, k], experts of each token.
        num_experts: number of experts.
    """
    by_pair_n = chosen_tk.flatten()
    by_row_n, order = torch.sort(by_pair_n, stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    experts = torch.arange(num_experts + 1, device=order.device)
    counts = torch.searchsorted(by_row_n, experts).diff()
    return RowOrder(order, places, counts)


def read_counts(counts: Tensor) -> list[Any]:
    """Numbers of rows as nested lists: the host waits for the device."""
    values: list[Any] = counts.tolist()
    return values


class RowCounts:
    """Numbers of rows of a rank's experts, whose rows are sorted by expert; the host reads them only if it needs them.

    Attributes:
        on_device: int64 [e].
    """

    def __init__(self, on_device: Tensor, on_host: Sequence[int] | None = None) -> None:
        """Stores the numbers.

        Args:
            on_device: int64 [e].
            on_host: the same numbers, if the host has read them.
        """
        self.on_device = on_device
        if on_host is not None:
            self.on_host = on_host

    @classmethod
    def equal(cls, rows: int, experts: int, device: torch.device) -> RowCounts:
        """The numbers if every expert has as many of the rows."""
        count = rows // experts
        return cls(torch.full((experts,), count, device=device), [count] * experts)

    @cached_property
    def on_host(self) -> Sequence[int]:
        """The numbers on the host, which waits for the device at the first call."""
        return read_counts(self.on_device)

    @cached_property
    def ends(self) -> Tensor:
        """End of the rows of each expert, int32 [e] on the device."""
        return self.on_device.cumsum(0, dtype=torch.int32)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_th: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
        ctx.choices = choices
        ctx.save_for_backward(places)
        return x_th.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, grad_nh: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        places_tk = places.view(-1, ctx.choices)
        dtype = torch.promote_types(grad_nh.dtype, torch.float32)
        grad_th = grad_nh.index_select(0, places_tk[:, 0]).to(dtype)
        for choice in range(1, ctx.choices):
            grad_th += grad_nh.index_select(0, places_tk[:, choice])
        return grad_th.to(grad_nh.dtype), None, None, None


def dispatch(x_th: Tensor, rows: RowOrder) -> Tensor:
    """A copy of each token for every expert that it chose, [n, h], sorted by expert."""
    out_nh: Tensor = _Dispatch.apply(x_th, rows.order, rows.places, len(rows.order) // max(1, len(x_th)))
    return out_nh


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_nh: Tensor, weights_tk: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(y_nh, weights_tk, order, places)
        places_tk = places.view(weights_tk.shape)
        dtype = torch.promote_types(y_nh.dtype, torch.float32)
        out_th = y_nh.index_select(0, places_tk[:, 0]).to(dtype) * weights_tk[:, :1]
        for choice in range(1, weights_tk.shape[1]):
            chosen_th = y_nh.index_select(0, places_tk[:, choice]).to(dtype)
            out_th.addcmul_(chosen_th, weights_tk[:, choice, None].to(dtype))
        return out_th.to(y_nh.dtype)

    @staticmethod
    def backward(ctx: Any, grad_th: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        y_nh, weights_tk, order, places = ctx.saved_tensors
        dtype = torch.promote_types(y_nh.dtype, torch.float32)
        grad_nh = grad_th.index_select(0, order // weights_tk.shape[1]).to(dtype)
        grad_weights_n = (grad_nh * y_nh).sum(-1)
        grad_nh *= weights_tk.flatten().index_select(0, order)[:, None]
        grad_weights_tk = grad_weights_n.index_select(0, places).view(weights_tk.shape)
        return grad_nh.to(y_nh.dtype), grad_weights_tk.to(weights_tk.dtype), None, None


def combine(y_nh: Tensor, weights_tk: Tensor, rows: RowOrder) -> Tensor:
    """Sum of the rows of each token times their weights, [t, h] in y's dtype.

    Args:
        y_nh: outputs of the experts for the rows of `dispatch`.
        weights_tk: weight of each choice, in fp32 or wider.
        rows: order of the rows.
    """
    out_th: Tensor = _Combine.apply(y_nh, weights_tk, rows.order, rows.places)
    return out_th


def top_choices(scores_te: Tensor, count: int) -> Tensor:
    """Indices of the highest scores, highest first; of equal scores the lowest index comes first.

    `torch.topk` leaves the order of equal scores undefined.

    Args:
        scores_te: fp32 or fp64 [t, e]; -inf is allowed, NaN is not.
        count: number of indices per row.

    Returns:
        int64 [t, count].
    """
    num = scores_te.shape[-1]
    if scores_te.dtype is not torch.float32:
        return torch.sort(scores_te, dim=-1, descending=True, stable=True).indices[..., :count]
    # Bits of floats, as integers, have the order of the floats, except that negative ones are reversed.
    bits = (scores_te.detach() + 0.0).view(torch.int32)
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    keys = ranks * num - torch.arange(num, device=ranks.device)
    return keys.topk(count, dim=-1).indices
