"""Ring attention (Liu et al. 2023): a rank keeps its queries, and receives one block of keys and values after another.

In step j of cp - 1, each rank receives the keys and values of the rank j places before it and sends its own to the rank
j places after it: a cyclic shift. While it computes with one block, the next one is on its way, so that a rank never
holds the whole sample. The parts of the output are combined by their log-sum-exps (`megads.ops.block_attention`). The
backward pass shifts keys and values in the same way, computes each block's probabilities again, and returns the
gradients of keys and values to their rank, which adds them in fp32.

The context axis here is `ParallelGrid.cp_outer`: with `parallel.cp_ulysses`, one rank of each group that has exchanged
tokens for heads.

What is sent in each shift is in `megads.parallel.ring_shifts`. Blocks are sent by their owner instead of being passed
on from neighbour to neighbour: receivers need different parts of them, and gradients travel once, not with the block.

Deadlocks: a shift is one all-to-all over the context-parallel group, in which most parts are empty. NCCL runs it as one
group call of a send and a receive, and all ranks call the same shifts in the same order, like any other collective. The
ring therefore needs no order of point-to-point messages, no communicator of two ranks, and no warm-up of its own.

All sums have a fixed order: own keys first, then those of the rank before, and so on.

Shape suffixes: b = batch, s = tokens of this rank, r = rows of a block, n = query heads, m = KV heads, d = head dim.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.ops.block_attention import BlockAttention, RunningSoftmax, wide_dtype
from megads.parallel.grid import Axis
from megads.parallel.ring_shifts import Shift, context_chunks, held_rows, ring_shifts


class _Transfer:
    """A block on its way from one rank of a context axis to another; each rank sends one and receives one.

    Args:
        axis: the context axis.
        sent: block for the target, [2, b, m, r, d].
        target: context rank that it is sent to.
        source: context rank that sends to this one.
        rows: rows of the block that arrives.
    """

    def __init__(self, axis: Axis, sent: Tensor, target: int, source: int, rows: int) -> None:
        self._sent = axis.recorded(sent.contiguous())
        self._received = sent.new_empty(*sent.shape[:3], rows, sent.shape[-1])
        of_sources, of_targets = [0] * axis.size, [0] * axis.size
        of_sources[source], of_targets[target] = self._received.numel(), sent.numel()
        buffers = self._received.view(-1), self._sent.view(-1)
        self._work = dist.all_to_all_single(*buffers, of_sources, of_targets, group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """Returns the block from the source, [2, b, m, r, d]."""
        assert self._work is not None, "this rank is not in its own context axis"
        self._work.wait()
        return self._received


class _Ring:
    """The exchange of one layer and micro-batch on one rank.

    Args:
        axis: the context axis.
        tokens: tokens of this rank.
        block: attention of the layer.
        flash: `BlockAttention.is_flash`.
    """

    def __init__(self, axis: Axis, tokens: int, block: BlockAttention, flash: bool) -> None:
        self.axis, self.block, self._flash = axis, block, flash
        self._chunk = tokens // 2
        chunks = context_chunks(axis.rank, axis.size)
        self.own = tuple(range(held * self._chunk, (held + 1) * self._chunk) for held in chunks)
        self.shifts = ring_shifts(axis.rank, axis.size, self._chunk, block.window)

    def rows(self, positions: range) -> slice:
        """Indices of consecutive positions of one of this rank's chunks among its tokens."""
        return held_rows(positions, self.axis.rank, self.axis.size, self._chunk)

    def send_keys(self, index: int, k_bmsd: Tensor, v_bmsd: Tensor) -> _Transfer | None:
        """Starts a shift of keys and values; None after the last one."""
        if index >= len(self.shifts):
            return None
        shift = self.shifts[index]
        parts = [torch.stack([x[:, :, self.rows(part)] for x in (k_bmsd, v_bmsd)]) for part in shift.leaving]
        sent = torch.cat(parts, dim=3) if parts else k_bmsd.new_empty(2, *k_bmsd.shape[:2], 0, k_bmsd.shape[-1])
        return _Transfer(self.axis, sent, shift.target, shift.source, sum(map(len, shift.arriving)))

    def return_gradients(self, shift: Shift, grads: Tensor) -> _Transfer:
        """Starts to return the gradients of a block, [2, b, m, r, d], to its owner."""
        return _Transfer(self.axis, grads, shift.source, shift.target, sum(map(len, shift.leaving)))

    def pairs(self, keys: tuple[range, ...]) -> list[tuple[range, range, slice]]:
        """Queries of this rank, the keys that they see, and the rows of these keys in their block, in order."""
        found, first = [], 0
        for part in keys:
            for queries in self.own:
                for seeing, seen in self.block.pairs(queries, part, self._flash):
                    at = first + seen.start - part.start
                    found.append((seeing, seen, slice(at, at + len(seen))))
            first += len(part)
        return found


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_bnsd: Tensor,
        k_bmsd: Tensor,
        v_bmsd: Tensor,
        sinks_n: Tensor | None,
        starts_bs: Tensor | None,
        axis: Axis,
        block: BlockAttention,
    ) -> Tensor:
        ring = _Ring(axis, q_bnsd.shape[2], block, block.is_flash(q_bnsd, starts_bs))
        softmax = RunningSoftmax(q_bnsd, sinks_n)

        def attend(k_bmrd: Tensor, v_bmrd: Tensor, keys: tuple[range, ...]) -> None:
            for queries, seen, at in ring.pairs(keys):
                rows = ring.rows(queries)
                starts = None if starts_bs is None else starts_bs[:, rows]
                part = block.forward(q_bnsd[:, :, rows], k_bmrd[:, :, at], v_bmrd[:, :, at], queries, seen, starts)
                softmax.add(rows, *part)

        arriving = ring.send_keys(0, k_bmsd, v_bmsd)
        attend(k_bmsd, v_bmsd, ring.own)
        for index, shift in enumerate(ring.shifts):
            assert arriving is not None
            k_bmrd, v_bmrd = arriving.wait().unbind()
            arriving = ring.send_keys(index + 1, k_bmsd, v_bmsd)
            attend(k_bmrd, v_bmrd, shift.arriving)
        out_bnsd = softmax.out_bnsd.to(q_bnsd.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q_bnsd, k_bmsd, v_bmsd, sinks_n, starts_bs, out_bnsd, softmax.lse_bns)
        return out_bnsd

    @staticmethod
    def backward(ctx: Any, grad_bnsd: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_bnsd, k_bmsd, v_bmsd, sinks_n, starts_bs, out_bnsd, lse_bns = ctx.saved_tensors
        ring: _Ring = ctx.ring
        dtype = wide_dtype(q_bnsd)
        delta_bns = (grad_bnsd.to(dtype) * out_bnsd).sum(-1)
        grad_q_bnsd = torch.zeros_like(q_bnsd, dtype=dtype)

        def contribute(k_bmrd: Tensor, v_bmrd: Tensor, keys: tuple[range, ...]) -> Tensor:
            """Adds to the gradient of the queries; returns that of the keys and values, [2, b, m, r, d]."""
            grads = k_bmrd.new_zeros(2, *k_bmrd.shape, dtype=dtype)
            for queries, seen, at in ring.pairs(keys):
                rows = ring.rows(queries)
                of_rows = out_bnsd[:, :, rows], lse_bns[:, :, rows], delta_bns[:, :, rows]
                of_block = q_bnsd[:, :, rows], k_bmrd[:, :, at], v_bmrd[:, :, at]
                starts = None if starts_bs is None else starts_bs[:, rows]
                found = ring.block.backward(grad_bnsd[:, :, rows], *of_block, *of_rows, queries, seen, starts)
                grad_q_bnsd[:, :, rows] += found[0]
                for grad, part in zip(grads, found[1:], strict=True):
                    grad[:, :, at] += part
            return grads

        arriving = ring.send_keys(0, k_bmsd, v_bmsd)
        own = contribute(k_bmsd, v_bmsd, ring.own)
        returning: tuple[Shift, _Transfer] | None = None

        def add_returned() -> None:
            if returning is None:
                return
            first, grads = 0, returning[1].wait()
            for part in returning[0].leaving:
                own[:, :, :, ring.rows(part)] += grads[:, :, :, first : first + len(part)]
                first += len(part)

        for index, shift in enumerate(ring.shifts):
            assert arriving is not None
            k_bmrd, v_bmrd = arriving.wait().unbind()
            arriving = ring.send_keys(index + 1, k_bmsd, v_bmsd)
            grads = contribute(k_bmrd, v_bmrd, shift.arriving)
            add_returned()
            returning = shift, ring.return_gradients(shift, grads)
        add_returned()
        grad_k_bmsd, grad_v_bmsd = own.to(k_bmsd.dtype).unbind()
        grad_sinks_n = None
        if sinks_n is not None:
            shares_bns = (sinks_n.to(dtype)[:, None] - lse_bns).exp_()
            grad_sinks_n = -(shares_bns * delta_bns).sum((0, 2)).to(sinks_n.dtype)
        return grad_q_bnsd.to(q_bnsd.dtype), grad_k_bmsd, grad_v_bmsd, grad_sinks_n, None, None, None


class ContextCore(nn.Module):
    """Base class of the modules that run an attention core on the tokens of several context ranks.

    Args:
        core: the attention core of one rank.
        axis: the context ranks.
    """

    untraced: ClassVar = ("forward",)

    def __init__(self, core: nn.Module, axis: Axis) -> None:
        super().__init__()
        self.core = core
        self.axis = axis

    def narrow(self, rank: int, size: int) -> None:
        """Keeps only share `rank` of `size` equal contiguous shares of the core's heads."""
        self.core.narrow(rank, size)  # type: ignore[operator]


class RingCore(ContextCore):
    """Runs attention on this rank's queries and, one block after another, the keys and values of all context ranks.

    Args:
        core: attention core of a tensor-parallel rank's heads; its `blockwise` is called instead of `forward`.
        axis: the context axis.
    """

    def forward(
        self, q_bnsd: Tensor, k_bmsd: Tensor, v_bmsd: Tensor, info: BatchInfo, sinks_n: Tensor | None = None
    ) -> Tensor:
        """Returns [b, n, s, d]; `sinks_n` are the attention sink logits of the core's heads."""
        block: BlockAttention = self.core.blockwise(info, q_bnsd.device)  # type: ignore[operator]
        inputs = q_bnsd, k_bmsd, v_bmsd, sinks_n, info.document_starts
        out_bnsd: Tensor = _RingAttention.apply(*inputs, self.axis, block)
        return out_bnsd
