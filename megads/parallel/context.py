"""Context parallelism: the tokens of a sample are sharded over ranks. All operations but attention are per token.

A sample is split into 2 * cp equal chunks and rank i holds chunks i and 2 cp - 1 - i, as in Llama 3 (Dubey et al. 2024,
section 3.3.2). Attention has three implementations (`parallel.cp_kind`):

- allgather (Llama 3): each rank computes attention for its own queries over the all-gathered keys and values of the
  whole sample. The two chunks balance the causal work: queries of an early chunk see few keys, of a late one many.
  Layers with a small window exchange only the keys and values that windows reach; the others are zeros, which the mask
  hides.
- ulysses (Jacobs et al. 2023, DeepSpeed-Ulysses): an all-to-all gives each rank the queries, keys and values of the
  whole sample, in order, for its share of the heads; another one returns the outputs to the ranks that hold the tokens.
  The core is that of one rank without context parallelism, with fewer heads.
- ring (Liu et al. 2023): see `megads.parallel.ring`.

With `parallel.cp_ulysses` = u, allgather and ring have two levels (Fang and Zhao 2024, USP; Megatron's a2a+p2p): groups
of u consecutive ranks exchange tokens for heads as in ulysses, and only the ranks of these groups with the same heads
exchange keys and values. Ranks g u to g u + u - 1 together hold chunks g and 2 cp / u - 1 - g of the 2 cp / u chunks of
a sample: once their tokens are in order, they are those of rank g of cp / u ranks. `cp_inner` and `cp_outer` of the
grid are the two axes. With ulysses `cp_inner` is the whole context axis, with cp_ulysses = 1 `cp_outer` is.

Shape suffixes: b = batch, s = tokens of this rank, t = tokens of all ranks of an axis, those of the whole sample if it
is the context axis, n = query heads, m = KV heads, w = heads of a rank, d = head dim, c = tokens of a chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.batch import BatchInfo, MicroBatch
from megads.parallel.config import ContextParallelKind, exchanged_kv_heads
from megads.parallel.grid import Axis, ParallelGrid
from megads.parallel.partition import ShardingTable
from megads.parallel.ring import ContextCore, RingCore
from megads.parallel.ring_shifts import context_chunks, held_rows, keys_needed, most_window_rows


@functools.lru_cache(maxsize=16)
def context_positions(seq_len: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Indices of a context rank's tokens in the sample, int64 [s].

    Returns the same tensor on every call, since attention masks are cached by its identity.

    Args:
        seq_len: tokens of the whole sample, a multiple of 2 * size.
        rank: context rank.
        size: number of context ranks.
        device: device of the result.
    """
    assert seq_len % (2 * size) == 0
    chunks = torch.arange(seq_len, device=device).view(2 * size, -1)
    return torch.cat([chunks[chunk] for chunk in context_chunks(rank, size)])


def shard_micro_batch(batch: MicroBatch, axis: Axis, device: torch.device, ulysses: int = 1) -> MicroBatch:
    """A context rank's share of a micro-batch of whole samples; returns the batch itself if the axis has size 1.

    Args:
        batch: micro-batch of whole samples. Without tokens and labels, `info.seq_len` must be set.
        axis: the context axis.
        device: the model's device, for `info.sequence_index`. All other tensors stay on their device.
        ulysses: number of consecutive ranks of the axis that exchange tokens for heads, `ParallelConfig.ulysses_size`.
    """
    if axis.size == 1:
        return batch
    info = batch.info
    assert info.sequence_index is None, "cut twice"
    whole = next((x for x in (batch.tokens_bs, batch.labels_bs) if x is not None), None)
    seq_len = info.seq_len if whole is None else whole.shape[1]
    assert seq_len is not None

    def cut(whole_bt: Tensor | None, rank: int = axis.rank, size: int = axis.size) -> Tensor | None:
        if whole_bt is None:
            return None
        return whole_bt.index_select(1, context_positions(seq_len, rank, size, whole_bt.device))

    exchanged, outer, groups = None, axis.rank // ulysses, axis.size // ulysses
    if ulysses > 1:
        exchanged = replace(info, position_ids_bs=None, seq_len=seq_len)
        if groups > 1:
            exchanged = replace(
                exchanged,
                document_starts=cut(info.document_starts, outer, groups),
                sequence_index=context_positions(seq_len, outer, groups, device),
                host_document_starts=None,
            )
    cut_info = replace(
        info,
        position_ids_bs=cut(info.position_ids_bs),
        document_starts=cut(info.document_starts),
        sequence_index=context_positions(seq_len, axis.rank, axis.size, device),
        seq_len=seq_len,
        host_document_starts=None,
        exchanged=exchanged,
    )
    return MicroBatch(cut_info, cut(batch.tokens_bs), cut(batch.labels_bs), cut(batch.loss_mask_bs))


def _in_sample_order(by_rank: Tensor) -> Tensor:
    """Reorders [ranks, ..., s, d], gathered from all ranks of an axis, to [..., t, d]."""
    size, *rest, held, dim = by_rank.shape
    chunks = by_rank.view(size, *rest, 2, held // 2, dim)
    whole = by_rank.new_empty(*rest, 2 * size, held // 2, dim)
    for rank in range(size):
        for half, chunk in enumerate(context_chunks(rank, size)):
            whole[..., chunk, :, :] = chunks[rank, ..., half, :, :]
    return whole.flatten(-3, -2)


def _by_rank(wholes: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
    """Reorders tensors [..., t, d] to [ranks, len(wholes), ..., s, d] of a dtype; the inverse of `_in_sample_order`."""
    *rest, seq_len, dim = wholes[0].shape
    chunks = [whole.unflatten(-2, (2 * size, -1)) for whole in wholes]
    by_rank = wholes[0].new_empty(size, len(wholes), *rest, 2, seq_len // (2 * size), dim, dtype=dtype)
    for rank in range(size):
        for half, chunk in enumerate(context_chunks(rank, size)):
            for part, of_whole in enumerate(chunks):
                by_rank[rank, part, ..., half, :, :] = of_whole[..., chunk, :, :]
    return by_rank.flatten(-3, -2)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k_bnsd: Tensor, v_bnsd: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
        ctx.axis = axis
        held = torch.stack((k_bnsd, v_bnsd))
        by_rank = held.new_empty(axis.size, *held.shape)
        dist.all_gather_into_tensor(by_rank.flatten(0, 1), axis.recorded(held), group=axis.group)
        k_bntd, v_bntd = _in_sample_order(by_rank).unbind()
        return k_bntd, v_bntd

    @staticmethod
    def backward(ctx: Any, grad_k_bntd: Tensor, grad_v_bntd: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        # The queries of every rank contribute to the gradient of every key and value. A single rank accumulates these
        # in fp32 inside its kernel and rounds once, so the reduce-scatter is in fp32, too.
        dtype = torch.promote_types(grad_k_bntd.dtype, torch.float32)
        by_rank = _by_rank((grad_k_bntd, grad_v_bntd), ctx.axis.size, dtype)
        held = torch.empty_like(by_rank[0])
        dist.reduce_scatter_tensor(held, ctx.axis.recorded(by_rank.flatten(0, 1)), group=ctx.axis.group)
        grad_k_bnsd, grad_v_bnsd = held.to(grad_k_bntd.dtype).unbind()
        return grad_k_bnsd, grad_v_bnsd, None


class _WindowParts:
    """The rows of keys and values that context ranks exchange because their queries' windows reach them.

    Args:
        axis: the ranks.
        tokens: tokens of a rank.
        window: number of keys that a query sees.
    """

    def __init__(self, axis: Axis, tokens: int, window: int) -> None:
        self._axis, chunk = axis, tokens // 2
        self.own = tuple(range(held * chunk, (held + 1) * chunk) for held in context_chunks(axis.rank, axis.size))
        # By rank: positions that arrive from it and that leave to it, and rows of the latter among this rank's tokens.
        needed = functools.partial(keys_needed, size=axis.size, chunk=chunk, window=window)
        others = [other if other != axis.rank else None for other in range(axis.size)]
        self.arriving = [() if other is None else needed(axis.rank, other) for other in others]
        self.leaving = [() if other is None else needed(other, axis.rank) for other in others]
        self.rows = [[held_rows(part, axis.rank, axis.size, chunk) for part in parts] for parts in self.leaving]

    def exchange(
        self, sent: Sequence[Tensor], leaving: Sequence[Sequence[range]], arriving: Sequence[Sequence[range]]
    ) -> list[Tensor]:
        """Sends the parts [2, b, m, r, d] for all ranks, in their order; returns those that arrive, likewise."""
        counts_out, counts_in = ([sum(map(len, parts)) for parts in ranks] for ranks in (leaving, arriving))
        *outer, _, dim = sent[0].shape
        width = math.prod(outer) * dim
        flat = self._axis.recorded(torch.cat([part.reshape(-1) for part in sent]))
        received = flat.new_empty(sum(counts_in) * width)
        sizes = [count * width for count in counts_in], [count * width for count in counts_out]
        dist.all_to_all_single(received, flat, *sizes, group=self._axis.group)
        parts = received.split(sizes[0])
        return [part.view(*outer, count, dim) for part, count in zip(parts, counts_in, strict=True)]


def _joined(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """Concatenates some of the rows [..., s, d]."""
    return torch.cat([x[..., some, :] for some in rows], dim=-2) if rows else x[..., :0, :]


class _GatherWindows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k_bnsd: Tensor, v_bnsd: Tensor, axis: Axis, window: int) -> tuple[Tensor, Tensor]:
        parts = ctx.parts = _WindowParts(axis, k_bnsd.shape[2], window)
        held = torch.stack((k_bnsd, v_bnsd))
        *outer, tokens, dim = held.shape
        received = parts.exchange([_joined(held, rows) for rows in parts.rows], parts.leaving, parts.arriving)
        whole = held.new_zeros(*outer, tokens * axis.size, dim)
        for positions, of_rank in [(parts.own, held), *zip(parts.arriving, received, strict=True)]:
            for place, rows in zip(positions, of_rank.split([len(place) for place in positions], -2), strict=True):
                whole[..., place.start : place.stop, :] = rows
        k_bntd, v_bntd = whole.unbind()
        return k_bntd, v_bntd

    @staticmethod
    def backward(ctx: Any, grad_k_bntd: Tensor, grad_v_bntd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parts: _WindowParts = ctx.parts
        dtype = torch.promote_types(grad_k_bntd.dtype, torch.float32)

        def of(positions: Sequence[range]) -> Tensor:
            """Gradients of some keys and values, [2, b, n, r, d]."""
            rows = [slice(place.start, place.stop) for place in positions]
            return torch.stack([_joined(grad, rows) for grad in (grad_k_bntd, grad_v_bntd)]).to(dtype)

        returned = parts.exchange([of(positions) for positions in parts.arriving], parts.arriving, parts.leaving)
        held = of(parts.own)
        # In the order of the ranks, after this one.
        for of_rank, positions, rows in zip(returned, parts.leaving, parts.rows, strict=True):
            for some, grad in zip(rows, of_rank.split([len(place) for place in positions], -2), strict=True):
                held[..., some, :] += grad
        grad_k_bnsd, grad_v_bnsd = held.to(grad_k_bntd.dtype).unbind()
        return grad_k_bnsd, grad_v_bnsd, None, None


class ContextParallelCore(ContextCore):
    """Runs an attention core on this rank's queries and the whole sample's keys and values.

    The forward pass all-gathers keys and values over the axis; the backward pass reduce-scatters their gradients in at
    least fp32. With a small window (`most_window_rows`) an all-to-all exchanges the rows that windows reach, and all
    other rows of the core's keys and values are zeros.

    Args:
        core: takes the queries of some tokens, the keys and values of all tokens of a sample, and a BatchInfo with the
            indices of the queries. Its `window`, if it has one, is the number of keys that a query sees; None: all.
        axis: the ranks that together hold the tokens of a sample, `ParallelGrid.cp_outer`.
    """

    def forward(self, q_bnsd: Tensor, k_bnsd: Tensor, v_bnsd: Tensor, info: BatchInfo, *of_heads: Tensor) -> Tensor:
        """Returns [b, n, s, d]; further arguments of the core are those of this rank's heads."""
        window: int | None = getattr(self.core, "window", None)
        if most_window_rows(self.axis.size, k_bnsd.shape[2] // 2, window) is None:
            k_bntd, v_bntd = _GatherSequence.apply(k_bnsd, v_bnsd, self.axis)
        else:
            k_bntd, v_bntd = _GatherWindows.apply(k_bnsd, v_bnsd, self.axis, window)
        # Copies the queries if they are a view: saving a view for backward would also keep this rank's keys and values
        # alive. The output inherits the queries' memory layout, which is then that of the next projection.
        own_q_bnsd = q_bnsd.transpose(1, 2).contiguous().transpose(1, 2)
        out_bnsd: Tensor = self.core(own_q_bnsd, k_bntd, v_bntd, info, *of_heads)
        return out_bnsd


def _repeated(x_bmsd: Tensor, heads: int) -> Tensor:
    """Repeats each KV head, next to itself, to a number of heads."""
    return x_bmsd if heads == x_bmsd.shape[1] else x_bmsd.repeat_interleave(heads // x_bmsd.shape[1], dim=1)


def _summed_repeats(grad_bmsd: Tensor, kv_heads: int) -> Tensor:
    """Sums the gradients of the copies of each KV head in at least fp32, in a fixed order."""
    if kv_heads == grad_bmsd.shape[1]:
        return grad_bmsd
    dtype = torch.promote_types(grad_bmsd.dtype, torch.float32)
    return grad_bmsd.unflatten(1, (kv_heads, -1)).sum(2, dtype=dtype).to(grad_bmsd.dtype)


def _exchanged(sent: Tensor, axis: Axis) -> Tensor:
    """All-to-all with equal splits: sends sent[i] to rank i of the axis, and returns what each rank sent, in order."""
    received = torch.empty_like(sent)
    dist.all_to_all_single(received.flatten(0, 1), axis.recorded(sent.flatten(0, 1)), group=axis.group)
    return received


def _to_heads(parts: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """All heads of this rank's tokens -> its share of the heads of all tokens, in sample order.

    Args:
        parts: tensors [b, n, s, d]; their numbers of heads may differ.
        axis: the ranks that exchange heads; their number divides each number of heads.

    Returns:
        Views [b, w, t, d] of one tensor [b, t, all w, d].
    """
    by_rank = (x.transpose(1, 2).unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4) for x in parts)
    sent = torch.cat(list(by_rank), dim=3).contiguous()
    held, widths = _exchanged(sent, axis), [x.shape[1] // axis.size for x in parts]
    del sent
    whole_btwd = _in_sample_order(held.flatten(-2)).unflatten(-1, (sum(widths), -1))
    return [x_btwd.transpose(1, 2) for x_btwd in whole_btwd.split(widths, dim=2)]


def _to_tokens(parts: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """The inverse of `_to_heads`: tensors [b, w, t, d] -> [b, n, s, d], whose memory layout is [b, s, n, d]."""
    by_token = [x.transpose(1, 2) for x in parts]
    whole_btwd = by_token[0] if len(by_token) == 1 else torch.cat(by_token, dim=2)
    heads = whole_btwd.shape[2]
    sent = _by_rank([whole_btwd.flatten(2)], axis.size, whole_btwd.dtype).squeeze(1)
    del whole_btwd
    held = _exchanged(sent, axis).unflatten(-1, (heads, -1))
    del sent
    by_part = held.split([x.shape[1] for x in parts], dim=3)
    return [x.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2) for x in by_part]


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, axis: Axis) -> tuple[Tensor, ...]:
        ctx.axis, ctx.kv_heads = axis, k_bmsd.shape[1]
        heads = exchanged_kv_heads(ctx.kv_heads, axis.size)
        return tuple(_to_heads((q_bnsd, _repeated(k_bmsd, heads), _repeated(v_bmsd, heads)), axis))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_bnsd, k_bmsd, v_bmsd = _to_tokens(grads, ctx.axis)
        return q_bnsd, _summed_repeats(k_bmsd, ctx.kv_heads), _summed_repeats(v_bmsd, ctx.kv_heads), None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_bwtd: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _to_tokens([out_bwtd], axis)[0]

    @staticmethod
    def backward(ctx: Any, grad_bnsd: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _to_heads([grad_bnsd], ctx.axis)[0], None


class UlyssesCore(ContextCore):
    """Runs an attention core on the tokens of all ranks of an axis for this rank's share of the heads.

    Jacobs et al. 2023. The forward and the backward pass each call two all-to-alls over the axis, in the tensors'
    dtype. With KV heads that do not divide over the ranks, copies are sent, and the gradients of copies are summed in
    at least fp32.

    Args:
        core: attention core of a tensor-parallel rank's heads; its `narrow` is called. It gets whole samples if the
            axis is the context axis; else it is the one of another kind for the tokens of this axis.
        axis: the ranks that exchange heads, `ParallelGrid.cp_inner`; their number divides that of query heads.
    """

    def __init__(self, core: nn.Module, axis: Axis) -> None:
        super().__init__(core, axis)
        core.narrow(axis.rank, axis.size)  # type: ignore[operator]

    def forward(self, q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, info: BatchInfo, *of_heads: Tensor) -> Tensor:
        """Returns [b, n, s, d]; further arguments of the core have one element for each query head."""
        assert info.exchanged is not None, "shard_micro_batch was called for another kind"
        wholes = _TokensToHeads.apply(q_bnsd, k_bmsd, v_bmsd, self.axis)
        own = (x.chunk(self.axis.size)[self.axis.rank] for x in of_heads)
        out_bwtd = self.core(*wholes, info.exchanged, *own)
        out_bnsd: Tensor = _HeadsToTokens.apply(out_bwtd, self.axis)
        return out_bnsd


_CORES = {ContextParallelKind.allgather: ContextParallelCore, ContextParallelKind.ring: RingCore}
"""Cores for ranks that hold the queries of some tokens of a sample."""


def wrap_attention_cores(
    layer: nn.Module, name: str, table: ShardingTable, grid: ParallelGrid, kind: ContextParallelKind
) -> None:
    """Wraps every attention core of a layer in those of its context parallelism, if samples are divided.

    Args:
        layer: the layer, changed in place.
        name: prefix of the layer in the whole model.
        table: sharding table, which lists the attention cores.
        grid: the ranks.
        kind: implementation of attention over `cp_outer`.
    """
    inner, outer = grid.cp_inner, grid.cp_outer
    for path, module in list(layer.named_modules()):
        if any(fnmatchcase(f"{name}.{path}", pattern) for pattern in table.attention_cores):
            core = module if outer.size == 1 else _CORES[kind](module, outer)
            core = core if inner.size == 1 else UlyssesCore(core, inner)
            if core is not module:
                layer.set_submodule(path, core)
