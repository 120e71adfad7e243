"""Expert parallelism: experts are divided over the ranks of an axis, and tokens travel to them and back (GShard,
Lepikhin et al. 2020).

Each rank sorts its rows by expert, sends every other rank the rows of its experts by an all-to-all with unequal splits,
sorts what it receives by expert again, and returns the outputs by the reverse all-to-all. Counts travel first: one
small all-to-all, and one read by the host, for each layer and pass. Where every expert has a fixed number of slots
(`model.moe.capacity_factor`), splits are equal and known: no counts travel, and the host reads nothing. The order of
all rows is defined, so that results are the same bits from run to run.

With tensor parallelism each expert's features are divided over the tensor-parallel ranks, which all process the same
tokens, like those of a dense MLP; or experts are whole (`parallel.expert_tp=false`), and each rank sends its own share
of the sequence.

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, h = hidden size, k = choices of a token, n = rows,
m = rows or slots of this rank's experts, e = experts, r = ranks, l = experts of a rank, c = slots of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.errors import ConfigError
from megads.ops.token_dispatch import RowCounts, read_counts
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.partition import ExpertShard, ShardingTable
from megads.parallel.region_linear import (
    Region,
    reduce_from_tp_region,
    reduce_scatter_to_sp_region,
    start_gather,
    start_scatter,
)


class _EnterRegion(torch.autograd.Function):
    """Identity, with an all-reduce of the gradient; of shares of a sequence: all-gather, and reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: Region) -> Tensor:
        ctx.region = region
        return start_gather(x, region.axis)() if region.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        region = ctx.region
        if region.sequence_parallel:
            return start_scatter(grad, region.axis)(), None
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(region.axis.recorded(grad), group=region.axis.group)
        return grad, None


def _exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    rows = axis.recorded(rows.contiguous())
    dist.all_to_all_single(out, rows, list(receive), list(send), group=axis.group)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> Tensor:
        ctx.send, ctx.receive, ctx.axis = send, receive, axis
        return _exchanged(rows, send, receive, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchanged(grad, ctx.receive, ctx.send, ctx.axis), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order, given with its inverse, so that neither direction adds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _by_expert(received_rl: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Order that sorts rows by expert, of rows sorted by sender and then by expert, and its inverse; int64 [m] each.

    Args:
        received_rl: number of rows from each rank for each of this rank's experts.
        rows: their sum.
    """
    row = torch.arange(rows, device=received_rl.device)
    pair = torch.searchsorted(received_rl.flatten().cumsum(0), row, right=True)
    order = torch.sort(pair % received_rl.shape[1], stable=True).indices
    return order, torch.empty_like(order).scatter_(0, order, row)


class ExpertExchange:
    """How tokens reach the experts of a layer on other ranks; see `megads.model.moe.TokenExchange`.

    Args:
        axis: ranks that together hold all experts.
        region: tensor-parallel region that tokens enter if the features of experts are divided; None: whole experts.
    """

    def __init__(self, axis: Axis, region: Region | None) -> None:
        self._axis = axis
        self._region = region if region is not None and region.axis.size > 1 else None
        # Statistics are added over tensor-parallel ranks only if these have different parts of the sequence.
        self.copies = self._region.axis.size if self._region is not None and self._region.sequence_parallel else 1

    def enter(self, hidden_bth: Tensor, weights_btk: Tensor, chosen_btk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See TokenExchange; [b, t, ...] -> [b, s, ...] if the features of experts are divided."""
        if self._region is None:
            return hidden_bth, weights_btk, chosen_btk
        hidden_bsh = _EnterRegion.apply(hidden_bth, self._region)
        weights_bsk = _EnterRegion.apply(weights_btk, self._region)
        chosen = start_gather(chosen_btk, self._region.axis)() if self._region.sequence_parallel else chosen_btk
        return hidden_bsh, weights_bsk, chosen

    def leave(self, out_bsh: Tensor) -> Tensor:
        """See TokenExchange."""
        if self._region is None:
            return out_bsh
        if self._region.sequence_parallel:
            return reduce_scatter_to_sp_region(out_bsh, self._region.axis)
        return reduce_from_tp_region(out_bsh.clone(memory_format=torch.contiguous_format), self._region.axis)

    def run(
        self, rows: Callable[[], Tensor], counts_e: Tensor, compute: Callable[[Tensor, RowCounts], Tensor]
    ) -> Tensor:
        """See TokenExchange."""
        size = self._axis.size
        if size == 1:
            return compute(rows(), RowCounts(counts_e))
        sent_rl = counts_e.view(size, -1)
        received_rl = sent_rl.clone()
        dist.all_to_all_single(received_rl, sent_rl, group=self._axis.group)
        both = read_counts(torch.cat((sent_rl, received_rl)))
        send, receive = ([sum(of_rank) for of_rank in part] for part in (both[:size], both[size:]))
        counts = RowCounts(received_rl.sum(0), [sum(of_expert) for of_expert in zip(*both[size:], strict=True)])
        order, inverse = _by_expert(received_rl, sum(receive))
        # One name, so that rows are freed as soon as they are exchanged or sorted.
        x = _Exchange.apply(rows(), send, receive, self._axis)
        x = _Permute.apply(x, order, inverse)
        x = compute(x, counts)
        x = _Permute.apply(x, inverse, order)
        out_nh: Tensor = _Exchange.apply(x, receive, send, self._axis)
        return out_nh

    def run_slots(self, slots_mh: Tensor, experts: int, compute: Callable[[Tensor, RowCounts], Tensor]) -> Tensor:
        """See TokenExchange; the numbers of slots are the same on all ranks."""
        size, local = self._axis.size, experts // self._axis.size
        if size > 1:
            equal = [len(slots_mh) // size] * size
            slots_rlch = _Exchange.apply(slots_mh, equal, equal, self._axis).unflatten(0, (size, local, -1))
            slots_mh = slots_rlch.transpose(0, 1).flatten(0, 2)
        out_mh = compute(slots_mh, RowCounts.equal(len(slots_mh), local, slots_mh.device))
        if size > 1:
            out_rlch = out_mh.unflatten(0, (local, size, -1)).transpose(0, 1)
            out_mh = _Exchange.apply(out_rlch.flatten(0, 2), equal, equal, self._axis)
        return out_mh


@dataclass(frozen=True)
class ExpertParallel:
    """Expert parallelism of a rank.

    Attributes:
        axis: ranks that together hold all experts of a layer, in order.
        whole: whether experts are whole; else their features are divided over the tensor-parallel ranks.
        cp: the context-parallel axis.
    """

    axis: Axis
    whole: bool
    cp: Axis

    @classmethod
    def of_grid(cls, grid: ParallelGrid, *, expert_tp: bool) -> ExpertParallel:
        """Expert parallelism of a grid.

        Args:
            grid: the grid.
            expert_tp: parallel.expert_tp.
        """
        return cls(grid.ep, not expert_tp, grid.cp)

    def shard(self, num_experts: int, tp: Axis) -> ExpertShard:
        """The part of a layer's experts on this rank."""
        features = (0, 1) if self.whole else (tp.rank, tp.size)
        return ExpertShard(num_experts, self.axis.rank, self.axis.size, *features)


ALONE = ExpertParallel(Axis(0, (0,), None), False, Axis(0, (0,), None))
"""One rank holds all experts; with tensor parallelism, a share of each."""


def _matching(layer: nn.Module, name: str, patterns: Sequence[str]) -> Iterator[Any]:
    for path, module in layer.named_modules():
        if any(fnmatchcase(f"{name}.{path}", pattern) for pattern in patterns):
            yield module


def shard_experts(layer: nn.Module, name: str, table: ShardingTable, region: Region, parallel: ExpertParallel) -> None:
    """Keeps this rank's experts of a layer, and connects them and their routers to the other ranks.

    Args:
        layer: the layer, on the meta device; changed in place.
        name: prefix of the layer in the whole model.
        table: sharding table of the model.
        region: the tensor-parallel region.
        parallel: expert parallelism of this rank.

    Raises:
        ConfigError: experts, or their features, cannot be divided over the ranks.
    """
    for experts in _matching(layer, name, table.experts):
        shard = parallel.shard(experts.num_experts, region.axis)
        experts.exchange = ExpertExchange(parallel.axis, None if parallel.whole else region)
        for projection in (experts.first, experts.down):
            rows = len(projection.weight) // shard.num_experts
            if shard.num_experts % shard.ranks or rows % shard.parts:
                raise ConfigError(
                    f"{name}: {shard.num_experts} experts of {rows} rows cannot be divided over parallel.ep = "
                    f"{shard.ranks} and {shard.parts} tensor-parallel ranks"
                )
            projection.narrow(shard.num_experts // shard.ranks, rows // shard.parts)
    axes = [axis for axis in (parallel.cp, region.axis if region.sequence_parallel else None) if axis and axis.size > 1]
    for router in _matching(layer, name, table.routers):
        router.sum_over_sequence = _Sum(axes)


@dataclass(frozen=True)
class _Sum:
    """Sums a tensor over the ranks of several axes."""

    axes: Sequence[Axis]

    def __call__(self, counts: Tensor) -> Tensor:
        total = counts.clone()
        for axis in self.axes:
            dist.all_reduce(axis.recorded(total), group=axis.group)
        return total
