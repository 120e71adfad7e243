"""Output projection and loss at once, tokens chunk by chunk: the logits of a micro-batch are never in memory together.

With a vocabulary of 250,000 they would be its largest tensor by far. A chunk's logits become their gradient as soon as
its losses are known, and the gradients of input and weight are computed from it in the forward pass (as in Hsu et al.
2024, Liger kernel), so nothing is computed twice. The weight's goes straight to main_grad.

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, h = hidden size, m = all tokens, c = tokens of a
chunk, r = this rank's rows of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.ops import linear as products
from megads.ops.kernels import TORCH, Kernels
from megads.parallel import collectives
from megads.parallel.cross_entropy import is_root, weighted_loss_
from megads.parallel.region_linear import Region, even_parts
from megads.parallel.weight_gradients import MainGrads, TiedGradient, WeightGradient, WeightGradients

CPU_CHUNK_BYTES, GPU_CHUNK_BYTES = 256 << 20, 1 << 30
"""Of a rank's logits that are in memory at once where nothing else is asked for. Smaller chunks are slower: each reads
the weight and its main_grad once more (docs/performance.md)."""


def chunk_tokens(tokens: int, bytes_a_token: int, device: str, asked: int | None = None) -> int:
    """Tokens of the largest chunk of a micro-batch; all of them where its logits need not be cut.

    Args:
        tokens: of the micro-batch.
        bytes_a_token: of this rank's logits.
        device: type of the device.
        asked: at most so many tokens; None goes by the bytes of their logits.
    """
    room = CPU_CHUNK_BYTES if device == "cpu" else GPU_CHUNK_BYTES
    most = asked if asked is not None else max(1, room // bytes_a_token)
    chunks = -(-tokens // most)
    return -(-tokens // max(1, chunks))


@dataclass(frozen=True)
class Targets:
    """What the loss compares the logits with.

    Attributes:
        labels_bs: int64, global token ids.
        weights_bs: fp32 or fp64, the gradient of the result with respect to each token's loss; has none itself.
        vocab_size: true size of the vocabulary.
        chunk: tokens whose logits are in memory at a time.
        kernels: whose kernel computes the loss.
    """

    labels_bs: Tensor
    weights_bs: Tensor
    vocab_size: int
    chunk: int
    kernels: Kernels = TORCH

    @property
    def parts(self) -> list[slice]:
        """The chunks, of equal size but for one token; the same on all ranks."""
        tokens = self.labels_bs.numel()
        return even_parts(tokens, -(-tokens // self.chunk))


class _OwnSum:
    """The gradient of one weight, added up over chunks in fp32 (fp64 for fp64), for autograd to take."""

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

    def of(self, dtype: torch.dtype) -> Tensor:
        return self._sum.to(dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_bth: Tensor,
        weight: nn.Parameter,
        targets: Targets,
        region: Region,
        gradients: WeightGradients | None,
    ) -> Tensor:
        main_grads = gradients.main_grads if gradients is not None else None
        own = _OwnSum(weight) if main_grads is None else None
        loss, grad_bsh = _chunked(_whole(x_bth, region), weight, targets, region, own or main_grads)
        ctx.save_for_backward(collectives.start_scatter(grad_bsh, region.axis)() if region.shared_out else grad_bsh)
        ctx.weight, ctx.own, ctx.main_grads, ctx.gradients = weight, own, main_grads, gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:  # type: ignore[override]
        (grad_bth,) = ctx.saved_tensors
        scales = not is_root(grad)
        if ctx.own is None:
            assert not scales or grad.device.type != "cpu", "gradients that are in main_grad already cannot be scaled"
            ctx.main_grads.done(ctx.weight)
            return grad_bth, None, None, None, None
        if scales:
            grad_bth = grad_bth * grad
            ctx.own.scale(grad)
        if isinstance(ctx.gradients, TiedGradient):
            ctx.gradients.give(ctx.weight, ctx.own)
            return grad_bth, None, None, None, None
        return grad_bth, ctx.own.of(ctx.weight.dtype), None, None, None


def _whole(x_bth: Tensor, region: Region) -> Tensor:
    """All tokens, [b, s, h]."""
    return collectives.start_gather(x_bth, region.axis)() if region.shared_out else x_bth


def _chunked(
    x_bsh: Tensor, weight: nn.Parameter, targets: Targets, region: Region, main_grads: MainGrads | _OwnSum | None
) -> tuple[Tensor, Tensor]:
    """The loss and, where there is a main_grad for the weight's, the gradient of the input (else undefined)."""
    x_mh, kernels = x_bsh.flatten(0, 1), region.kernels
    labels_m, weights_m = targets.labels_bs.flatten(), targets.weights_bs.flatten()
    grad_mh = torch.empty_like(x_mh) if main_grads is not None else x_mh
    room_cr = x_mh.new_empty(targets.chunk, weight.shape[0])
    loss = torch.zeros((), dtype=torch.float64, device=x_mh.device)
    leaving: list[dist.Work] = []
    for part in targets.parts:
        logits_cr = room_cr[: part.stop - part.start]
        products.linear_into(logits_cr, x_mh[part], weight, kernels)
        loss += weighted_loss_(
            logits_cr,
            labels_m[part],
            weights_m[part],
            targets.vocab_size,
            region.axis,
            trains=main_grads is not None,
            kernels=targets.kernels,
        )
        if main_grads is None:
            continue
        products.linear_into(grad_mh[part], logits_cr, weight.t(), kernels)
        if region.axis.size > 1 and not region.sequence_parallel:
            leaving.append(dist.all_reduce(grad_mh[part], group=region.axis.group, async_op=True))
        # Beside the message.
        main_grads.add(weight, WeightGradient(logits_cr, x_mh[part], kernels))
    for message in leaving:
        message.wait()
    return loss, grad_mh.view_as(x_bsh)


def head_loss(
    x_bth: Tensor, weight: nn.Parameter, targets: Targets, region: Region, gradients: WeightGradients | None
) -> Tensor:
    """sum(weight * cross entropy) of the logits x W^T, fp64 scalar, the same on all ranks of the region's axis.

    Where gradients go to main_grad, they do so in this forward pass, and the result must be the root of the
    backward pass.

    Args:
        x_bth: this rank's share of the tokens with sequence parallelism, else all.
        weight: this rank's rows of the output projection, padding included.
        targets: what the logits are compared with.
        region: how the projection enters its region.
        gradients: whose main_grad the weight's gradient goes to; None, or without one, leaves it to autograd.
    """
    # Autograd's own answer to who wants a gradient does not ask whether anybody trains.
    if not torch.is_grad_enabled():
        return _chunked(_whole(x_bth, region), weight, targets, region, None)[0]
    loss: Tensor = _HeadLoss.apply(x_bth, weight, targets, region, gradients)
    return loss
