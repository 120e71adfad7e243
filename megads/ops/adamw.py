"""The optimizer's operators over flat fp32 state: AdamW in one pass, and the sums of squares of a gradient norm.

AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) reads gradient, master and moments once; clipping
and the rounding to the working weights happen on the way. Sums of squares are those of pieces of a tensor, in fp64.

Shape suffixes: e = elements of a flat tensor, p = pieces of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megads.ops.apex import AMP, INT32_ELEMENTS, extension
from megads.ops.config import TORCH, KernelOp, Kernels

APEX_CHUNK = 2**16
"""Elements of a block of apex' kernels, as in its own optimizers."""


@dataclass(frozen=True)
class AdamWStep:
    """What all elements of a step share.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled: the weight loses lr * weight_decay of itself.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        step: number of the step, from 1.
    """

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    step: int


def adamw(
    master_e: Tensor,
    exp_avg_e: Tensor,
    exp_avg_sq_e: Tensor,
    weights_e: Tensor,
    grad_e: Tensor,
    clip: Tensor,
    how: AdamWStep,
) -> None:
    """Updates master and moments in place and rounds the master to the weights; no host waits for a GPU.

    Needs `megads.ops.resolve.load_library`; `adamw_reference` is the same in plain torch.

    Args:
        master_e: fp32 weights, contiguous, as is all else.
        exp_avg_e: fp32 first moment.
        exp_avg_sq_e: fp32 second moment.
        weights_e: fp32 or bf16, on a GPU also fp16; overwritten.
        grad_e: fp32.
        clip: fp32, one number on the same device: factor of the gradient. Where it is not finite there is no step, and
            everything stays as it was.
        how: the step.
    """
    torch.ops.megads.adamw_step(
        master_e, exp_avg_e, exp_avg_sq_e, weights_e, grad_e, clip,
        how.lr, how.weight_decay, *how.betas, how.eps, how.step,
    )  # fmt: skip


def adamw_reference(
    master_e: Tensor,
    exp_avg_e: Tensor,
    exp_avg_sq_e: Tensor,
    weights_e: Tensor,
    grad_e: Tensor,
    clip: Tensor,
    how: AdamWStep,
) -> None:
    """The same by the formula, in the dtype of the master; see `adamw`."""
    if not clip.isfinite():
        return
    beta1, beta2 = how.betas
    grad_e = grad_e * clip
    exp_avg_e.mul_(beta1).add_(grad_e, alpha=1 - beta1)
    exp_avg_sq_e.mul_(beta2).addcmul_(grad_e, grad_e, value=1 - beta2)
    mean_e, variance_e = exp_avg_e / (1 - beta1**how.step), exp_avg_sq_e / (1 - beta2**how.step)
    master_e.mul_(1 - how.lr * how.weight_decay).sub_(how.lr * mean_e / (variance_e.sqrt() + how.eps))
    weights_e.copy_(master_e)


def register() -> None:
    """Tells torch the shapes of the results; the library is loaded."""
    _register_square_sums()

    @torch.library.register_fake("megads::adamw_step")
    def _(
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        weights: Tensor,
        grad: Tensor,
        clip: Tensor,
        lr: float,
        weight_decay: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: int,
    ) -> None:
        return None


class Pieces:
    """Pieces of a flat tensor: for torch on the host, for the kernel where the tensor is, so that nobody copies them.

    Args:
        bounds: of every piece its first element and the one after its last.
        device: of the flat tensor.

    Attributes:
        bounds: the same.
        bounds_p2: the same, int64 on the device.
        none_empty: every piece has an element.
    """

    def __init__(self, bounds: Iterable[tuple[int, int]], device: torch.device) -> None:
        self.bounds = tuple(bounds)
        self.none_empty = all(start < stop for start, stop in self.bounds)
        self.bounds_p2 = torch.tensor(self.bounds, dtype=torch.int64).reshape(-1, 2).to(device)


def square_sums(flat_e: Tensor, pieces: Pieces, kernels: Kernels = TORCH) -> Tensor:
    """The sum of squares of every piece, fp64 [p] on the tensor's device; no host waits for a GPU.

    The kernel's is bitwise the same for any number of threads, and neither overflows nor loses small summands.

    Args:
        flat_e: fp32, contiguous.
        pieces: of it.
        kernels: whose kernel computes; NVIDIA apex' on a GPU sums in fp32, as torch's does.
    """
    if kernels.takes(KernelOp.square_sums, flat_e):
        found: Tensor = torch.ops.megads.square_sums(flat_e, pieces.bounds_p2)
        return found
    # Apex leaves out what comes before an empty piece at the end.
    apex = kernels.apex(KernelOp.square_sums) and flat_e.is_cuda and 0 < flat_e.numel() < INT32_ELEMENTS
    if apex and pieces.bounds and pieces.none_empty:
        non_finite = torch.zeros(1, dtype=torch.int32, device=flat_e.device)  # wanted; the norm says it as well
        cut = [flat_e[start:stop] for start, stop in pieces.bounds]
        _, norms_p = extension(AMP).multi_tensor_l2norm(APEX_CHUNK, non_finite, [cut], True)
        sums_p: Tensor = norms_p.double().square()
        return sums_p
    return square_sums_reference(flat_e, pieces)


def square_sums_reference(flat_e: Tensor, pieces: Pieces) -> Tensor:
    """The same in plain torch: the squares of 2-norms, computed in the dtype of `flat_e`."""
    cut = [flat_e[start:stop] for start, stop in pieces.bounds]
    if not cut:
        return torch.zeros(0, dtype=torch.float64, device=flat_e.device)
    return torch.stack(torch._foreach_norm(cut)).double().square()


def _register_square_sums() -> None:
    """Tells torch the shape of the result; the library is loaded."""

    @torch.library.register_fake("megads::square_sums")
    def _(flat: Tensor, bounds: Tensor) -> Tensor:
        return flat.new_empty((bounds.shape[0],), dtype=torch.float64)
