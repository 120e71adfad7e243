"""Attention of some queries over some of their keys, with the log-sum-exp by which such parts are combined.

The softmax over all keys is a mean of the softmaxes over blocks of keys, weighted by the exponentials of their
log-sum-exps (Liu et al. 2023, Ring Attention; Dao et al. 2022, FlashAttention):

    lse = log(sum of exp(lse_i)),  out = sum of exp(lse_i - lse) out_i

The backward pass needs the log-sum-exp over all keys only: it computes the probabilities of a block again.

Where attention is only causal, PyTorch's FlashAttention computes a block in which each query sees all keys, or whose
queries and keys are at the same positions: on GPUs in bf16, whose parts are rounded to bf16 before they are added in
fp32, and on CPUs in fp32. Other blocks are computed by plain operators in fp32.

Shape suffixes: b = batch, n = query heads, m = heads of keys and values, s = query, t = key, d = head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megads.ops.config import KEYS_AT_ONCE, TORCH_FLASH_WIDEST
from megads.ops.dropout import DropoutMask


def wide_dtype(x: Tensor) -> torch.dtype:
    """Dtype of scores, sums and gradients: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in at least fp32; on GPUs, tensor cores multiply bf16 factors (`dtype`) and add in fp32."""
    if a.is_cuda and dtype.itemsize < 4:
        flat_a, flat_b = (x.to(dtype).flatten(0, 1) for x in (a, b))
        return torch.bmm(flat_a, flat_b, torch.float32).unflatten(0, a.shape[:2])
    wide = torch.promote_types(dtype, torch.float32)
    return a.to(wide) @ b.to(wide)


def flash_takes(q_bnsd: Tensor) -> bool:
    """Whether PyTorch's FlashAttention takes tensors of this kind and returns the log-sum-exp."""
    dim = q_bnsd.shape[-1]
    if not q_bnsd.is_cuda:
        return q_bnsd.dtype is torch.float32
    recent = torch.cuda.get_device_capability(q_bnsd.device) >= (8, 0)
    return recent and q_bnsd.dtype is torch.bfloat16 and dim % 8 == 0 and dim <= TORCH_FLASH_WIDEST


def _flash_forward(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    aten = torch.ops.aten
    kernel = (
        aten._scaled_dot_product_flash_attention if q_bnsd.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    )
    out_bnsd, lse_bns = kernel(q_bnsd, k_bmtd, v_bmtd, 0.0, causal)[:2]
    return out_bnsd.to(lse_bns.dtype), lse_bns


def _flash_backward(
    grad_bnsd: Tensor, q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, out_bnsd: Tensor, lse_bns: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    aten, tensors = torch.ops.aten, (grad_bnsd, q_bnsd, k_bmtd, v_bmtd, out_bnsd, lse_bns.contiguous())
    grads: tuple[Tensor, Tensor, Tensor]
    if not q_bnsd.is_cuda:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal)
        return grads
    # The state of a random generator, which is only read with dropout.
    unused = torch.zeros(2, dtype=torch.int64, device=q_bnsd.device)
    lengths = q_bnsd.shape[2], k_bmtd.shape[2]
    grads = aten._scaled_dot_product_flash_attention_backward(
        *tensors, None, None, *lengths, 0.0, causal, unused, unused
    )
    return grads


class RunningSoftmax:
    """Attention over the blocks that have been added, in the order in which they were added.

    Attributes:
        out_bnsd: output over the blocks so far, in at least fp32; its memory layout is [b, s, n, d].
        lse_bns: log-sum-exp of the scores so far, in the same dtype.
    """

    def __init__(self, q_bnsd: Tensor, sinks_n: Tensor | None) -> None:
        """Starts without keys.

        Args:
            q_bnsd: queries.
            sinks_n: attention sink logit of each head, which is like a key whose value is zero; None: no sinks.
        """
        batch, heads, queries, dim = q_bnsd.shape
        dtype = wide_dtype(q_bnsd)
        self.out_bnsd = q_bnsd.new_zeros(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
        if sinks_n is None:
            self.lse_bns = q_bnsd.new_full((batch, heads, queries), -torch.inf, dtype=dtype)
        else:
            self.lse_bns = sinks_n.to(dtype)[:, None].expand(batch, heads, queries).clone()

    def add(self, rows: slice, out_bnsd: Tensor, lse_bns: Tensor) -> None:
        """Combines the queries in `rows` with their attention over another block of keys.

        Args:
            rows: queries.
            out_bnsd: output over the block alone.
            lse_bns: log-sum-exp of its scores; -inf where a query sees none of its keys.
        """
        sum_bnsd, before_bns = self.out_bnsd[:, :, rows], self.lse_bns[:, :, rows]
        after_bns = torch.logaddexp(before_bns, lse_bns)
        shift_bns = after_bns.masked_fill(after_bns == -torch.inf, 0.0)
        sum_bnsd.mul_((before_bns - shift_bns).exp_()[..., None])
        sum_bnsd.add_(out_bnsd.mul_((lse_bns - shift_bns).exp_()[..., None]))
        before_bns.copy_(after_bns)


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """softmax(q k^T / sqrt(d) + bias) v of one layer and micro-batch, for any block of queries and of keys.

    Positions are indices into the whole sample. A query sees the keys up to its own position, in its window and in its
    document.

    Attributes:
        slopes_n: fp32 ALiBi slope of every head; None: no bias.
        window: number of keys that a query sees, ending with the one at its own position; None: all.
        softcap: bound of the scaled scores, before the bias; None: none.
        dropout: dropout mask of the probabilities; its rows are positions of queries, its elements those of keys. None:
            no dropout.
    """

    slopes_n: Tensor | None = None
    window: int | None = None
    softcap: float | None = None
    dropout: DropoutMask | None = None

    def is_flash(self, q_bnsd: Tensor, starts_bs: Tensor | None) -> bool:
        """Whether FlashAttention computes blocks that `pairs` leaves whole; arguments as in `forward`."""
        others = (self.slopes_n, self.window, self.softcap, self.dropout, starts_bs)
        return all(x is None for x in others) and flash_takes(q_bnsd)

    def pairs(self, queries: range, keys: range, flash: bool = False) -> list[tuple[range, range]]:
        """Pairs of queries and keys whose scores fit into memory and that contain all visible scores.

        Args:
            queries: positions of consecutive queries.
            keys: positions of consecutive keys.
            flash: `is_flash`, whose scores are not in memory.
        """
        if flash and _is_whole(queries, keys):
            return [(queries, keys)]
        found = []
        for first in range(keys.start, keys.stop, KEYS_AT_ONCE):
            some = range(first, min(first + KEYS_AT_ONCE, keys.stop))
            end = queries.stop if self.window is None else min(queries.stop, some.stop - 1 + self.window)
            seeing = range(max(queries.start, some.start), end)
            if seeing:
                found.append((seeing, some))
        return found

    def forward(
        self, q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, queries: range, keys: range, starts_bs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output over these keys alone, [b, n, s, d], and log-sum-exp of the scores, [b, n, s]; both at least fp32.

        A query that sees none of the keys gets zeros and -inf.

        Args:
            q_bnsd: queries.
            k_bmtd: keys; m divides n.
            v_bmtd: values.
            queries: positions of the queries.
            keys: positions of the keys.
            starts_bs: position at which each query's document starts; None: 0.
        """
        if _is_whole(queries, keys) and self.is_flash(q_bnsd, starts_bs):
            return _flash_forward(q_bnsd, k_bmtd, v_bmtd, queries == keys)
        logits_bnst, _ = self._logits(q_bnsd, k_bmtd, queries, keys, starts_bs)
        lse_bns = logits_bnst.logsumexp(-1)
        shift_bns = lse_bns.masked_fill(lse_bns == -torch.inf, 0.0)
        weights_bnst = logits_bnst.sub_(shift_bns[..., None]).exp_()
        if self.dropout is not None:
            weights_bnst.mul_(self._keep(weights_bnst, queries, keys)).mul_(self.dropout.scale)
        out = _product(_by_kv_head(weights_bnst, k_bmtd), v_bmtd, q_bnsd.dtype)
        return out.view(q_bnsd.shape), lse_bns

    def backward(
        self,
        grad_bnsd: Tensor,
        q_bnsd: Tensor,
        k_bmtd: Tensor,
        v_bmtd: Tensor,
        out_bnsd: Tensor,
        lse_bns: Tensor,
        delta_bns: Tensor,
        queries: range,
        keys: range,
        starts_bs: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What these keys contribute to the gradient of the queries, and the queries to that of keys and values.

        All are at least fp32, except FlashAttention's.

        Args:
            grad_bnsd: gradient of the output.
            q_bnsd: queries.
            k_bmtd: keys.
            v_bmtd: values.
            out_bnsd: output of the queries over all keys, in their dtype.
            lse_bns: log-sum-exp of each query's scores of all keys.
            delta_bns: product of each query's output and its gradient.
            queries: positions of the queries.
            keys: positions of the keys.
            starts_bs: see `forward`.
        """
        if _is_whole(queries, keys) and self.is_flash(q_bnsd, starts_bs):
            return _flash_backward(grad_bnsd, q_bnsd, k_bmtd, v_bmtd, out_bnsd, lse_bns, queries == keys)
        dtype = q_bnsd.dtype
        logits_bnst, slope_bnst = self._logits(q_bnsd, k_bmtd, queries, keys, starts_bs)
        weights_bnst = logits_bnst.sub_(lse_bns[..., None]).exp_()
        grad_bmrd = grad_bnsd.reshape(*k_bmtd.shape[:2], -1, grad_bnsd.shape[-1])
        grad_weights_bnst = _product(grad_bmrd, v_bmtd.transpose(-1, -2), dtype).view(weights_bnst.shape)
        dropped_bnst = weights_bnst
        if self.dropout is not None:
            keep_bnst = self._keep(weights_bnst, queries, keys)
            grad_weights_bnst.mul_(keep_bnst).mul_(self.dropout.scale)
            dropped_bnst = (weights_bnst * keep_bnst).mul_(self.dropout.scale)
        grad_v_bmtd = _product(_by_kv_head(dropped_bnst, k_bmtd).transpose(-1, -2), grad_bmrd, dtype)
        grad_scores_bnst = grad_weights_bnst.sub_(delta_bns[..., None]).mul_(weights_bnst)
        if slope_bnst is not None:
            grad_scores_bnst.mul_(slope_bnst)
        rows_bmrt = _by_kv_head(grad_scores_bnst.mul_(q_bnsd.shape[-1] ** -0.5), k_bmtd)
        grad_q_bnsd = _product(rows_bmrt, k_bmtd, dtype).view(q_bnsd.shape)
        q_bmrd = q_bnsd.reshape(*k_bmtd.shape[:2], -1, q_bnsd.shape[-1])
        return grad_q_bnsd, _product(rows_bmrt.transpose(-1, -2), q_bmrd, dtype), grad_v_bmtd

    def _logits(
        self, q_bnsd: Tensor, k_bmtd: Tensor, queries: range, keys: range, starts_bs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Scores with bias and mask, [b, n, s, t], and the derivative of the softcap; None without one."""
        batch, heads, _, dim = q_bnsd.shape
        q_bmrd = q_bnsd.reshape(batch, k_bmtd.shape[1], -1, dim)
        logits_bnst = _product(q_bmrd, k_bmtd.transpose(-1, -2), q_bnsd.dtype).view(
            batch, heads, len(queries), len(keys)
        )
        logits_bnst.mul_(dim**-0.5)
        slope_bnst = None
        if self.softcap is not None:
            bent_bnst = logits_bnst.div_(self.softcap).tanh_()
            slope_bnst = bent_bnst.square().neg_().add_(1.0)
            logits_bnst = bent_bnst.mul_(self.softcap)
        device, dtype = q_bnsd.device, logits_bnst.dtype
        keys_t = torch.arange(keys.start, keys.stop, device=device)
        distance_st = keys_t - torch.arange(queries.start, queries.stop, device=device)[:, None]
        if self.slopes_n is not None:
            logits_bnst.add_(self.slopes_n.to(dtype)[:, None, None] * distance_st)
        hidden_bst = None
        if keys[-1] > queries[0]:
            hidden_bst = (distance_st > 0)[None]
        if self.window is not None and queries[-1] - keys[0] >= self.window:
            before_bst = (distance_st <= -self.window)[None]
            hidden_bst = before_bst if hidden_bst is None else hidden_bst | before_bst
        if starts_bs is not None:
            before_bst = keys_t < starts_bs[:, :, None]
            hidden_bst = before_bst if hidden_bst is None else hidden_bst | before_bst
        if hidden_bst is not None:
            logits_bnst.masked_fill_(hidden_bst[:, None], -torch.inf)
        return logits_bnst, slope_bnst

    def _keep(self, weights_bnst: Tensor, queries: range, keys: range) -> Tensor:
        assert self.dropout is not None
        places_s = torch.arange(queries.start, queries.stop, device=weights_bnst.device)
        return self.dropout.keep(weights_bnst.shape[1], places_s, len(keys), first=keys.start)


def _is_whole(queries: range, keys: range) -> bool:
    """Whether the causal mask of the sample hides nothing, or what that of a square block hides."""
    return queries == keys or queries.start >= keys.stop


def _by_kv_head(weights_bnst: Tensor, k_bmtd: Tensor) -> Tensor:
    """Concatenates the rows of all heads that share keys, [b, m, n / m s, t]."""
    return weights_bnst.view(*k_bmtd.shape[:2], -1, weights_bnst.shape[-1])
