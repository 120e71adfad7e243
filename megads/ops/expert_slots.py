"""Rows of tokens in slots: every expert has the same number, so that shapes do not depend on what routers choose.

A group of tokens has `capacity` slots for each expert (Lepikhin et al. 2020, GShard; Fedus et al. 2022, Switch
Transformer). A group's first rows fill them in the order of the tokens; slots without a row are zeros, and rows beyond
the capacity have no slot. Both directions only gather, as in `token_dispatch`. Nothing synchronizes with the device.

Shape suffixes: n = rows, m = slots (experts * groups * capacity), g = groups, e = experts, h = features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megads.ops.token_dispatch import RowOrder, sort_rows


@dataclass(frozen=True, eq=False)
class Slots:
    """Rows and slots of some tokens.

    Attributes:
        rows: order of the rows, sorted by group, then by expert.
        row_of_slot: int64 [m], the row in each slot; any row if it has none. Slots are sorted by expert, then by group.
        filled: bool [m, 1], whether a slot has a row.
        slot_of_row: int64 [n], the slot of each row; any slot if it has none.
        kept: bool [n, 1], whether a row has a slot.
        counts: int64 [g, e], number of rows, those without a slot included.
    """

    rows: RowOrder
    row_of_slot: Tensor
    filled: Tensor
    slot_of_row: Tensor
    kept: Tensor
    counts: Tensor


def assign_slots(chosen_gtk: Tensor, num_experts: int, capacity: int) -> Slots:
    """Assigns rows to slots.

    Args:
        chosen_gtk: int64 [g, tokens, choices], experts of each token of each group.
        num_experts: number of experts.
        capacity: slots of an expert for each group, at least 1.
    """
    groups, device = chosen_gtk.shape[0], chosen_gtk.device
    group = torch.arange(groups, device=device)[:, None, None]
    bins_tk = (chosen_gtk + group * num_experts).flatten(0, 1)
    rows = sort_rows(bins_tk, groups * num_experts)
    starts = rows.counts.cumsum(0) - rows.counts
    bin_n = bins_tk.flatten().index_select(0, rows.order)
    place_n = torch.arange(len(bin_n), device=device) - starts.index_select(0, bin_n)
    first_n = (bin_n % num_experts * groups + bin_n // num_experts) * capacity
    slot_of_row = first_n + place_n.clamp(max=capacity - 1)
    place = torch.arange(capacity, device=device)
    counts_ge, starts_ge = rows.counts.view(groups, -1), starts.view(groups, -1)
    row_of_slot = (starts_ge.T[..., None] + place).flatten().clamp(max=len(bin_n) - 1)
    filled = (place < counts_ge.T[..., None]).flatten()
    return Slots(rows, row_of_slot, filled[:, None], slot_of_row, (place_n < capacity)[:, None], counts_ge)


class _Gather(torch.autograd.Function):
    """Rows of x by index, zeros where it is not valid; `back` and `back_valid` are its inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, valid: Tensor, back: Tensor, back_valid: Tensor) -> Tensor:
        ctx.save_for_backward(back, back_valid)
        return x.index_select(0, index).masked_fill_(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        back, back_valid = ctx.saved_tensors
        return grad.index_select(0, back).masked_fill_(~back_valid, 0.0), None, None, None, None


def into_slots(rows_nh: Tensor, slots: Slots) -> Tensor:
    """Rows in their slots, [m, h]."""
    out_mh: Tensor = _Gather.apply(rows_nh, slots.row_of_slot, slots.filled, slots.slot_of_row, slots.kept)
    return out_mh


def from_slots(slots_mh: Tensor, slots: Slots) -> Tensor:
    """Rows from their slots, [n, h]; rows without one are zeros. Inverse of `into_slots` for the others."""
    out_nh: Tensor = _Gather.apply(slots_mh, slots.slot_of_row, slots.kept, slots.row_of_slot, slots.filled)
    return out_nh
