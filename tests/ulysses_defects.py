"""Defects of Ulysses context parallelism, which tests/test_mutants.py applies to the running code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.parallel import context, grid
from megads.parallel.context import UlyssesCore


def heads_dealt_out_to_the_ranks() -> None:
    """Rank r gets heads r, r + cp, ..., as if the all-to-all divided the heads with a stride."""
    inner = context._to_heads

    def to_heads(parts: Any, axis: Any) -> list[Tensor]:
        return inner([x.unflatten(1, (-1, axis.size)).transpose(1, 2).flatten(1, 2) for x in parts], axis)

    context._to_heads = to_heads


def every_rank_takes_the_first_heads_for_its_own() -> None:
    inner = UlyssesCore.__init__

    def init(self: UlyssesCore, core: Any, axis: Any) -> None:
        inner(self, core, replace(axis, rank=0))
        self.axis = axis

    UlyssesCore.__init__ = init


def exchanged_changed(change: Callable[[BatchInfo, int], BatchInfo]) -> None:
    """Makes attention cores see other metadata of the exchanged tokens; `change` gets the number of ranks, too."""
    inner = UlyssesCore.forward

    def forward(self: UlyssesCore, q: Tensor, k: Tensor, v: Tensor, info: BatchInfo, *of_heads: Tensor) -> Tensor:
        assert info.exchanged is not None
        changed = replace(info, exchanged=change(info.exchanged, self.axis.size))
        return inner(self, q, k, v, changed, *of_heads)

    UlyssesCore.forward = forward


def windows_counted_from_the_start_of_a_rank() -> None:
    """Windows, and the causal mask, begin again where the tokens of the next rank would."""

    def change(whole: BatchInfo, size: int) -> BatchInfo:
        assert whole.seq_len is not None
        return replace(whole, sequence_index=torch.arange(whole.seq_len) % (whole.seq_len // size))

    exchanged_changed(change)


def documents_of_whole_samples_lost() -> None:
    exchanged_changed(lambda whole, size: replace(whole, document_starts=None))


def gradients_of_one_copy_of_a_kv_head() -> None:
    def first(grad: Tensor, kv_heads: int) -> Tensor:
        return grad.unflatten(1, (kv_heads, -1))[:, :, 0]

    context._summed_repeats = first


def copies_of_kv_heads_apart() -> None:
    """Copies follow all heads, instead of their own: queries read another group's KV head."""
    context._repeated = lambda x, heads: x.repeat(1, heads // x.shape[1], 1, 1)


def sinks_of_the_first_rank() -> None:
    inner = UlyssesCore.forward

    def forward(self: UlyssesCore, q: Tensor, k: Tensor, v: Tensor, info: BatchInfo, *of_heads: Tensor) -> Tensor:
        own = [x.chunk(self.axis.size)[0].repeat(self.axis.size) for x in of_heads]
        return inner(self, q, k, v, info, *own)

    UlyssesCore.forward = forward


def subgroups_with_a_stride() -> None:
    """Ranks with a stride exchange heads, and adjacent ranks exchange keys and values."""
    inner, swapped = grid.axis_ranks, {"cp_inner": "cp_outer", "cp_outer": "cp_inner"}
    grid.axis_ranks = lambda axis, parallel: inner(swapped.get(axis, axis), parallel)


def positions_counted_in_a_subgroup() -> None:
    """Queries are taken for the first of the sample, as if a subgroup's tokens began it."""

    def change(exchanged: BatchInfo, size: int) -> BatchInfo:
        assert exchanged.sequence_index is not None
        return replace(exchanged, sequence_index=torch.arange(len(exchanged.sequence_index)))

    exchanged_changed(change)
