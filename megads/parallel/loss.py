"""Vocabulary-parallel loss: the mean cross entropy over the unmasked tokens of the global batch.

A z-loss (Chowdhery et al. 2022, PaLM, section 5) adds z_loss * log(Z)^2 to every token's loss, where Z is the sum of
exp(logit) over the whole vocabulary. All gradients here include its gradient, 2 * z_loss * log(Z) * softmax. Returned
losses are the cross entropy alone, so that they are comparable with those of runs without z-loss.

No rank ever holds a full [b, s, v] tensor. Tokens are counted before the first backward pass (docs/numerics.md, N9).

If the logits of a micro-batch are large, output projection and loss are computed together in chunks of tokens: with a
vocabulary of 250,000, the logits would be the largest tensor by far. A chunk's logits are overwritten with their
gradient as soon as its losses are known, and the gradients of input and weight are computed from it in the forward pass
(as in Hsu et al. 2024, Liger kernel), so nothing is recomputed. The weight gradient is accumulated into main_grad.

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, h = hidden size, m = all tokens of the batch, c =
tokens of a chunk, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.batch import BatchInfo, MicroBatch
from megads.ops import cross_entropy
from megads.ops import linear as gemm
from megads.ops.config import FUSED, TORCH, KernelOp, Kernels, chunk_tokens
from megads.ops.softcap import softcap_
from megads.parallel.grid import Axis, ParallelGrid, vocab_range
from megads.parallel.region_linear import Region, even_parts, start_gather, start_scatter
from megads.parallel.weight_gradients import MainGrads, TiedGradient, WeightGradient, WeightGradients


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType, axis: Axis) -> None:
    if axis.size > 1:
        dist.all_reduce(axis.recorded(x), op=op, group=axis.group)


class _VocabParallelTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis, z_loss: float) -> Tensor:
        low = logits_bsr.dtype.itemsize < 4
        losses_bs, *saved = _probabilities_(
            logits_bsr.float() if low else logits_bsr.clone(), labels_bs, vocab_size, axis
        )
        ctx.save_for_backward(*saved)
        ctx.z_loss = z_loss
        return losses_bs

    @staticmethod
    def backward(ctx: Any, grad_bs: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        probabilities_bsr, local_bs, foreign_bs, log_z_bs = ctx.saved_tensors
        grad_bsr = _gradient_(probabilities_bsr.clone(), local_bs, foreign_bs, log_z_bs, grad_bs, ctx.z_loss)
        return grad_bsr, None, None, None, None


def _probabilities_(
    logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plain PyTorch: losses, softmax (overwrites the logits), local labels, mask of labels on other ranks, log Z."""
    start, valid = vocab_range(vocab_size, axis, logits_bsr.shape[-1])
    logits_bsr[..., valid:] = float("-inf")

    peak_bs = logits_bsr.amax(dim=-1)
    _all_reduce(peak_bs, dist.ReduceOp.MAX, axis)
    logits_bsr -= peak_bs[..., None]

    local_bs = labels_bs - start
    foreign_bs = (local_bs < 0) | (local_bs >= valid)
    local_bs = local_bs.masked_fill(foreign_bs, 0)
    target_bs = logits_bsr.gather(-1, local_bs[..., None])[..., 0].masked_fill(foreign_bs, 0.0)
    exp_bsr = logits_bsr.exp_()
    total_bs = exp_bsr.sum(dim=-1)
    # One all-reduce for both sums.
    sums_2bs = torch.stack([target_bs, total_bs])
    _all_reduce(sums_2bs, dist.ReduceOp.SUM, axis)
    target_bs, total_bs = sums_2bs.unbind()
    log_total_bs = total_bs.log()
    probabilities_bsr = exp_bsr.div_(total_bs[..., None])
    return log_total_bs - target_bs, probabilities_bsr, local_bs, foreign_bs, peak_bs + log_total_bs


def _gradient_(
    probabilities_bsr: Tensor, local_bs: Tensor, foreign_bs: Tensor, log_z_bs: Tensor, grad_bs: Tensor, z_loss: float
) -> Tensor:
    """((1 + 2 z_loss log Z) softmax - one_hot(label)) * gradient of the loss; overwrites the softmax."""
    if z_loss:
        probabilities_bsr *= 1.0 + 2.0 * z_loss * log_z_bs[..., None]
    one_hot_bs1 = (~foreign_bs).to(probabilities_bsr.dtype)[..., None]
    return probabilities_bsr.scatter_add_(-1, local_bs[..., None], -one_hot_bs1).mul_(grad_bs[..., None])


class _LossInPlace(torch.autograd.Function):
    """megads' fused kernels; the forward pass, which already knows the weights, overwrites logits with the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits_bsr: Tensor, labels_bs: Tensor, weights_bs: Tensor, vocab_size: int, axis: Axis, z_loss: float
    ) -> Tensor:
        logits_mr, trains = logits_bsr.flatten(0, 1).contiguous(), ctx.needs_input_grad[0]
        labels_m, weights_m = labels_bs.flatten(), weights_bs.flatten()
        loss = weighted_loss_(
            logits_mr, labels_m, weights_m, vocab_size, axis, trains=trains, kernels=FUSED, z_loss=z_loss
        )
        if trains:
            # Autograd then raises if another function has saved the logits for its backward pass.
            torch.autograd.graph.increment_version(logits_bsr)
            ctx.save_for_backward(logits_mr.detach().view_as(logits_bsr))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:  # type: ignore[override]
        (grad_bsr,) = ctx.saved_tensors
        return grad_bsr if is_backward_root(grad) else grad_bsr.mul_(grad), None, None, None, None, None


def is_backward_root(grad: Tensor) -> bool:
    """Whether the loss is known to be the root of its backward pass, i.e. its gradient is 1.

    Always False on a GPU, where reading the value would synchronize.
    """
    return grad.device.type == "cpu" and grad.item() == 1.0


def weighted_loss_(
    logits_mr: Tensor,
    labels_m: Tensor,
    weights_m: Tensor,
    vocab_size: int,
    axis: Axis,
    *,
    trains: bool,
    kernels: Kernels,
    z_loss: float = 0.0,
) -> Tensor:
    """sum(weight * cross entropy), fp64 scalar, the same on all ranks of the axis.

    Args:
        logits_mr: logits of this rank's rows, contiguous; overwritten with their gradient if `trains`, else undefined
            afterwards.
        labels_m: int64, global token ids.
        weights_m: weight of each token's loss.
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
        trains: whether to compute the gradient.
        kernels: kernel implementation.
        z_loss: coefficient of log(Z)^2 in the gradient.
    """
    if kernels.takes(KernelOp.cross_entropy, logits_mr):
        weights_m = weights_m.float().contiguous()
        losses_m = _fused_losses_(logits_mr, labels_m, weights_m, vocab_size, axis, trains=trains, z_loss=z_loss)
    else:
        wide_mr = logits_mr.float() if logits_mr.dtype.itemsize < 4 else logits_mr
        losses_m, probabilities_mr, local_m, foreign_m, log_z_m = _probabilities_(wide_mr, labels_m, vocab_size, axis)
        if trains:
            logits_mr.copy_(_gradient_(probabilities_mr, local_m, foreign_m, log_z_m, weights_m, z_loss))
    return (losses_m * weights_m).sum(dtype=torch.float64)


def _fused_losses_(
    logits_mr: Tensor,
    labels_m: Tensor,
    weights_m: Tensor,
    vocab_size: int,
    axis: Axis,
    *,
    trains: bool,
    z_loss: float,
) -> Tensor:
    start, valid = vocab_range(vocab_size, axis, logits_mr.shape[-1])
    # A single pass, as a row fits into the cache of the CPU core that reads it.
    if trains and axis.size == 1 and logits_mr.device.type == "cpu" and not z_loss:
        largest_m, total_m, target_m = cross_entropy.loss_(logits_mr, labels_m, weights_m, valid, start)
    else:
        found = cross_entropy.statistics(logits_mr, labels_m, valid, start)
        largest_m, total_m, target_m = _over_ranks(*found, axis)
        if trains:
            pull_m = 2.0 * z_loss * (largest_m + total_m.log()) * weights_m if z_loss else None
            grad_m = weights_m if pull_m is None else weights_m + pull_m
            cross_entropy.gradient_(logits_mr, labels_m, largest_m, total_m, grad_m, valid, start)
            if pull_m is not None:
                # The kernel scales the one-hot term by grad_m, too; the z-loss has no such term, so it is added back.
                _add_at_labels_(logits_mr, labels_m, pull_m, start, valid)
    return total_m.log() - (target_m - largest_m)


def _add_at_labels_(logits_mr: Tensor, labels_m: Tensor, values_m: Tensor, start: int, valid: int) -> None:
    """Adds values to the columns of the labels that this rank holds, without a host-device synchronization."""
    local_m = labels_m - start
    foreign_m = (local_m < 0) | (local_m >= valid)
    values_m = values_m.masked_fill(foreign_m, 0.0).to(logits_mr.dtype)
    logits_mr.scatter_add_(-1, local_m.masked_fill(foreign_m, 0)[:, None], values_m[:, None])


def _over_ranks(own_largest_m: Tensor, total_m: Tensor, target_m: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Combines the softmax statistics of this rank's rows into those of the whole vocabulary."""
    if axis.size == 1:
        return own_largest_m, total_m, target_m
    largest_m = own_largest_m.clone()
    _all_reduce(largest_m, dist.ReduceOp.MAX, axis)
    # A rank whose logits are all -inf has total 0, and exp(-inf - -inf) would be NaN.
    total_m = torch.where(total_m == 0, 0.0, total_m * (own_largest_m - largest_m).exp())
    # One all-reduce for both sums.
    sums_2m = torch.stack([target_m, total_m])
    _all_reduce(sums_2m, dist.ReduceOp.SUM, axis)
    target_m, total_m = sums_2m.unbind()
    return largest_m, total_m, target_m


def loss_in_place(
    logits_bsr: Tensor, labels_bs: Tensor, weights_bs: Tensor, vocab_size: int, axis: Axis, z_loss: float = 0.0
) -> Tensor:
    """sum(weight * cross entropy) by megads' kernels, fp64 scalar, the same on all ranks of the axis.

    If a gradient is required, it overwrites the logits, which must not be read afterwards. `loss_in_place` thus needs
    no further tensor of their size; `vocab_parallel_token_losses` allocates two in fp32.

    Args:
        logits_bsr: logits of this rank's rows, supported by the kernels; see `vocab_parallel_token_losses`.
        labels_bs: int64 [b, s], global token ids.
        weights_bs: fp32 [b, s], weight of each token's loss; not differentiable.
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
        z_loss: coefficient of log(Z)^2 in the gradient.
    """
    loss: Tensor = _LossInPlace.apply(logits_bsr, labels_bs, weights_bs, vocab_size, axis, z_loss)
    return loss


def vocab_parallel_token_losses(
    logits_bsr: Tensor, labels_bs: Tensor, vocab_size: int, axis: Axis, z_loss: float = 0.0
) -> Tensor:
    """Cross entropy of every token in nats, the same on all ranks of the axis; fp32 (fp64 for fp64 logits) [b, s].

    Args:
        logits_bsr: logits of this rank's rows, as many on every rank. Padding rows are masked: they get neither
            probability nor gradient.
        labels_bs: int64 [b, s], global token ids.
        vocab_size: vocabulary size without padding.
        axis: the tensor-parallel axis.
        z_loss: coefficient of log(Z)^2 in the gradient.
    """
    losses_bs: Tensor = _VocabParallelTokenLosses.apply(logits_bsr, labels_bs, vocab_size, axis, z_loss)
    return losses_bs


@dataclass(frozen=True)
class Targets:
    """Labels, token weights and settings of a loss.

    Attributes:
        labels_bs: int64, global token ids.
        weights_bs: fp32 or fp64, weight of each token's loss; not differentiable.
        vocab_size: vocabulary size without padding.
        chunk: maximum number of tokens whose logits are in memory at a time.
        kernels: kernel implementation of the loss.
        z_loss: coefficient of log(Z)^2 in the gradient.
        softcap: softcap that the loss applies to the logits; None: no softcap.
    """

    labels_bs: Tensor
    weights_bs: Tensor
    vocab_size: int
    chunk: int
    kernels: Kernels = TORCH
    z_loss: float = 0.0
    softcap: float | None = None

    @property
    def parts(self) -> list[slice]:
        """Ranges of tokens of the chunks, whose sizes differ by at most one; the same on all ranks."""
        tokens = self.labels_bs.numel()
        return even_parts(tokens, -(-tokens // self.chunk))


class _ChunkedWgrad:
    """Gradient of one weight, accumulated over chunks in fp32 (fp64 for fp64) and returned to autograd."""

    def __init__(self, weight: Tensor) -> None:
        self._sum = torch.empty_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        self._first = True

    def add(self, _weight: nn.Parameter, gradient: WeightGradient) -> None:
        gradient.add_to(self._sum, self._first)
        self._first = False

    def scale(self, factor: Tensor) -> None:
        self._sum *= factor

    def add_to(self, main_grad: Tensor, first: bool) -> None:
        if first:
            main_grad.copy_(self._sum)
        else:
            main_grad.add_(self._sum)

    def to_dtype(self, dtype: torch.dtype) -> Tensor:
        return self._sum.to(dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_bth: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        targets: Targets,
        region: Region,
        gradients: WeightGradients | None,
    ) -> Tensor:
        main_grads = gradients.main_grads if gradients is not None else None
        own = _ChunkedWgrad(weight) if main_grads is None else None
        loss, grad_bsh, grad_r = _chunked(_whole(x_bth, region), weight, bias, targets, region, own or main_grads)
        ctx.save_for_backward(start_scatter(grad_bsh, region.axis)() if region.shared_out else grad_bsh, grad_r)
        ctx.weight, ctx.own, ctx.main_grads, ctx.gradients = weight, own, main_grads, gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_bth, grad_r = ctx.saved_tensors
        scales = not is_backward_root(grad)
        if ctx.own is None:
            assert not scales or grad.device.type != "cpu", "gradients that are in main_grad already cannot be scaled"
            ctx.main_grads.done(ctx.weight)
            return grad_bth, None, grad_r, None, None, None
        if scales:
            grad_bth, grad_r = grad_bth * grad, None if grad_r is None else (grad_r * grad).to(grad_r.dtype)
            ctx.own.scale(grad)
        if isinstance(ctx.gradients, TiedGradient):
            ctx.gradients.give(ctx.weight, ctx.own)
            return grad_bth, None, grad_r, None, None, None
        return grad_bth, ctx.own.to_dtype(ctx.weight.dtype), grad_r, None, None, None


def _whole(x_bth: Tensor, region: Region) -> Tensor:
    """Hidden states of all tokens, [b, s, h]; all-gathers them under sequence parallelism."""
    return start_gather(x_bth, region.axis)() if region.shared_out else x_bth


def _chunked(
    x_bsh: Tensor,
    weight: nn.Parameter,
    bias_r: nn.Parameter | None,
    targets: Targets,
    region: Region,
    main_grads: MainGrads | _ChunkedWgrad | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss and the gradients of input and bias; the gradients are undefined if `main_grads` is None."""
    x_mh, kernels = x_bsh.flatten(0, 1), region.kernels
    labels_m, weights_m = targets.labels_bs.flatten(), targets.weights_bs.flatten()
    grad_mh = torch.empty_like(x_mh) if main_grads is not None else x_mh
    room_cr = x_mh.new_empty(targets.chunk, weight.shape[0])
    wide = torch.promote_types(x_mh.dtype, torch.float32)
    grad_r = None if bias_r is None else torch.zeros_like(bias_r, dtype=wide)
    loss = torch.zeros((), dtype=torch.float64, device=x_mh.device)
    leaving: list[dist.Work] = []
    for part in targets.parts:
        logits_cr = room_cr[: part.stop - part.start]
        gemm.linear_into(logits_cr, x_mh[part], weight, kernels)
        if bias_r is not None:
            logits_cr += bias_r
        slope_cr = None if targets.softcap is None else softcap_(logits_cr, targets.softcap)
        loss += weighted_loss_(
            logits_cr,
            labels_m[part],
            weights_m[part],
            targets.vocab_size,
            region.axis,
            trains=main_grads is not None,
            kernels=targets.kernels,
            z_loss=targets.z_loss,
        )
        if main_grads is None:
            continue
        if slope_cr is not None:
            logits_cr *= slope_cr
        if grad_r is not None:
            grad_r += logits_cr.sum(0, dtype=wide)
        gemm.linear_into(grad_mh[part], logits_cr, weight.t(), kernels)
        if region.axis.size > 1 and not region.sequence_parallel:
            leaving.append(dist.all_reduce(region.axis.recorded(grad_mh[part]), group=region.axis.group, async_op=True))
        # Overlapped with the all-reduce.
        main_grads.add(weight, WeightGradient(logits_cr, x_mh[part], kernels))
    for work in leaving:
        work.wait()
    return loss, grad_mh.view_as(x_bsh), None if grad_r is None else grad_r.to(x_mh.dtype)


def head_loss(
    x_bth: Tensor,
    weight: nn.Parameter,
    targets: Targets,
    region: Region,
    gradients: WeightGradients | None,
    bias: nn.Parameter | None = None,
) -> Tensor:
    """sum(weight * cross entropy) of the logits x W^T + b, fp64 scalar, the same on all ranks of the region's axis.

    If there is a main_grad, this forward pass accumulates the weight gradient into it, and the result must be the root
    of the backward pass.

    Args:
        x_bth: hidden states of this rank's share of the tokens with sequence parallelism, else of all.
        weight: this rank's rows of the output projection, including padding.
        targets: labels, token weights and settings of the loss.
        region: the tensor-parallel region that the projection enters.
        gradients: holds the main_grads; None, or one without main_grads, returns the weight gradient to autograd.
        bias: this rank's rows of the bias; None: no bias.
    """
    # Checked here because ctx.needs_input_grad ignores no_grad.
    if not torch.is_grad_enabled():
        return _chunked(_whole(x_bth, region), weight, bias, targets, region, None)[0]
    loss: Tensor = _HeadLoss.apply(x_bth, weight, bias, targets, region, gradients)
    return loss


LossRecorder = Callable[[nn.Module, Tensor, BatchInfo, tuple[Tensor, Tensor]], Tensor]
"""Replaces `TokenMeanLoss.of_head` and takes its arguments."""


class TokenMeanLoss:
    """sum(mask * cross entropy) * scale of one micro-batch.

    Attributes:
        scale: 1 / (unmasked tokens of the global batch), times the factor by which the engine divides losses and
            gradients. An fp64 scalar on the engine's device, so that setting it does not synchronize.
        recorder: replaces the loss while tokens are scored, see `megads.parallel.token_scores`.

    Args:
        vocab_size: vocabulary size without padding.
        grid: the grid of ranks.
        kernels: kernel implementation, and the chunk size of the loss.
        z_loss: coefficient of log(Z)^2 in the gradient.
    """

    def __init__(self, vocab_size: int, grid: ParallelGrid, kernels: Kernels = TORCH, z_loss: float = 0.0) -> None:
        self.vocab_size, self.grid, self.kernels, self.z_loss = vocab_size, grid, kernels, z_loss
        self.scale = torch.ones((), dtype=torch.float64)
        self.recorder: LossRecorder | None = None

    @contextmanager
    def recorded_by(self, recorder: LossRecorder | None) -> Iterator[None]:
        """Context in which a recorder, or with None no recorder, replaces the loss."""
        before, self.recorder = self.recorder, recorder
        try:
            yield
        finally:
            self.recorder = before

    def __call__(self, logits_bsr: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Computes the loss; may overwrite the logits."""
        labels_bs, mask_bs = targets
        if self.kernels.takes(KernelOp.cross_entropy, logits_bsr):
            weights_bs = mask_bs * self.scale
            return loss_in_place(logits_bsr, labels_bs, weights_bs, self.vocab_size, self.grid.tp, self.z_loss)
        losses_bs = vocab_parallel_token_losses(logits_bsr, labels_bs, self.vocab_size, self.grid.tp, self.z_loss)
        return (losses_bs * mask_bs).sum() * self.scale

    def of_head(self, head: nn.Module, hidden_bth: Tensor, info: BatchInfo, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Computes output projection and loss, in chunks of tokens if the logits are large.

        Args:
            head: a `VocabParallelHead`.
            hidden_bth: input of the head.
            info: description of the micro-batch.
            targets: labels and mask, [b, s].
        """
        labels_bs, mask_bs = targets
        if self.recorder is not None:
            return self.recorder(head, hidden_bth, info, targets)
        tokens, rows = labels_bs.numel(), rows_of(head)
        chunk = chunk_tokens(tokens, rows * hidden_bth.element_size(), hidden_bth.device.type, self.kernels.loss_chunk)
        if chunk >= tokens:
            return self(head(hidden_bth, info), targets)
        of_logits = Targets(labels_bs, mask_bs * self.scale, self.vocab_size, chunk, self.kernels, self.z_loss)
        loss: Tensor = head(hidden_bth, info, of_logits)
        return loss


def rows_of(head: nn.Module) -> int:
    """Rows of a `VocabParallelHead`'s weight on this rank, including padding; known while ZeRO-3 has freed it."""
    rows: Any = head.rows
    assert isinstance(rows, int)
    return rows


def global_tokens(
    micro_batches: Sequence[MicroBatch], grid: ParallelGrid, device: torch.device, loss_rank: int
) -> Tensor:
    """Number of unmasked tokens over the data axis, fp64 scalar; 0 on pipeline ranks without the last stage.

    Args:
        micro_batches: micro-batches of the step.
        grid: the grid of ranks.
        device: device of the result.
        loss_rank: pipeline rank that holds the last stage.
    """
    if grid.pp.rank != loss_rank:
        return torch.zeros((), dtype=torch.float64, device=device)
    # The masks are on the host and torch.full copies nothing to the device, so this does not synchronize with a GPU.
    masks = [batch.loss_mask_bs for batch in micro_batches if batch.loss_mask_bs is not None]
    assert len(masks) == len(micro_batches)
    counted = sum(mask.sum(dtype=torch.float64).item() for mask in masks)
    total = torch.full((), counted, dtype=torch.float64, device=device)
    if grid.data.size > 1:
        dist.all_reduce(total, group=grid.data.group)
    return total


def share_loss(
    loss_sum: Tensor | None, tokens: Tensor, grid: ParallelGrid, loss_rank: int, scale: float = 1.0
) -> Tensor:
    """All-reduces the last stage's loss over the data axis and broadcasts it over the pipeline; does not synchronize.

    Args:
        loss_sum: scalar on ranks that hold the last stage, None elsewhere.
        tokens: result of `global_tokens`.
        grid: the grid of ranks.
        loss_rank: pipeline rank that holds the last stage.
        scale: factor of the loss.

    Returns:
        Loss and number of tokens on every rank, fp64 [2] on the device.
    """
    values = torch.zeros(2, dtype=torch.float64, device=tokens.device)
    if grid.pp.rank == loss_rank:
        assert loss_sum is not None
        values[0] = loss_sum.double() * scale
        if grid.data.size > 1:
            dist.all_reduce(values, group=grid.data.group)
        values[1] = tokens
    if grid.pp.size > 1:
        dist.broadcast(values, src=grid.pp.ranks[loss_rank], group=grid.pp.group)
    return values
