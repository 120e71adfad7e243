"""Optimizer operators on flat fp32 state: fused AdamW, and the sums of squares for a gradient norm.

AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) reads gradient, master weights and moments once,
and fuses gradient clipping and rounding to the model weights. Sums of squares are in fp64, one per piece of a tensor.

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
"""Elements per block of apex's kernels, as in its own optimizers."""
NORM_BLOCK = 4096
"""Elements whose squares are added up in fp32 on CPUs: as fast as one sum of all, which loses digits."""


@dataclass(frozen=True)
class AdamWStep:
    """Hyperparameters of an AdamW step.

    Attributes:
        lr: learning rate.
        weight_decay: decoupled weight decay; weights are multiplied by 1 - lr * weight_decay.
        betas: decay rates of the moments.
        eps: added to the square root of the second moment.
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
    """Updates master weights and moments in place and rounds the master weights to the model weights.

    Does not synchronize with a GPU. Requires `megads.ops.resolve.load_library`; `adamw_reference` is the same in plain
    PyTorch. All tensors are contiguous.

    Args:
        master_e: master weights, fp32.
        exp_avg_e: first moment, fp32.
        exp_avg_sq_e: second moment, fp32.
        weights_e: model weights, fp32 or bf16, on a GPU also fp16; overwritten.
        grad_e: gradient, fp32.
        clip: factor of the gradient, a single fp32 element on the same device. If it is not finite, the step is skipped
            and nothing changes.
        how: hyperparameters of the step.
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
    """Reference implementation of `adamw` in plain PyTorch, in the dtype of the master weights."""
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
    """Registers fake implementations of the operators; requires that the library is loaded."""
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
    """Pieces of a flat tensor, both on the host for PyTorch and on the device for the kernel, which avoids copies.

    Args:
        bounds: first element of every piece, and one past its last.
        device: device of the flat tensor.

    Attributes:
        bounds: as passed, as a tuple.
        bounds_p2: the same as an int64 tensor on the device.
        none_empty: whether no piece is empty.
    """

    def __init__(self, bounds: Iterable[tuple[int, int]], device: torch.device) -> None:
        self.bounds = tuple(bounds)
        self.none_empty = all(start < stop for start, stop in self.bounds)
        self.bounds_p2 = torch.tensor(self.bounds, dtype=torch.int64).reshape(-1, 2).to(device)


def square_sums(flat_e: Tensor, pieces: Pieces, kernels: Kernels = TORCH) -> Tensor:
    """The sum of squares of every piece, fp64 [p] on the tensor's device; does not synchronize with a GPU.

    The result of megads' kernel is bitwise the same for any number of threads; it does not overflow and does not lose
    small summands.

    Args:
        flat_e: fp32, contiguous.
        pieces: pieces of flat_e.
        kernels: selects the implementation; NVIDIA apex's on a GPU accumulates in fp32, as PyTorch's does.
    """
    if kernels.takes(KernelOp.square_sums, flat_e):
        found: Tensor = torch.ops.megads.square_sums(flat_e, pieces.bounds_p2)
        return found
    # If the last piece is empty, apex ignores the pieces before it.
    apex = kernels.apex(KernelOp.square_sums) and flat_e.is_cuda and 0 < flat_e.numel() < INT32_ELEMENTS
    if apex and pieces.bounds and pieces.none_empty:
        non_finite = torch.zeros(1, dtype=torch.int32, device=flat_e.device)  # required by apex; unused here
        cut = [flat_e[start:stop] for start, stop in pieces.bounds]
        _, norms_p = extension(AMP).multi_tensor_l2norm(APEX_CHUNK, non_finite, [cut], True)
        sums_p: Tensor = norms_p.double().square()
        return sums_p
    return square_sums_reference(flat_e, pieces)


def square_sums_reference(flat_e: Tensor, pieces: Pieces) -> Tensor:
    """`square_sums` in plain PyTorch: the squares of 2-norms, which are computed in the dtype of `flat_e`.

    On CPUs the norms are those of blocks: torch adds up a whole piece in fp32 there, which is off by 4e-3 at 50 million
    elements on one thread.
    """
    cut = [flat_e[start:stop] for start, stop in pieces.bounds]
    if not cut:
        return torch.zeros(0, dtype=torch.float64, device=flat_e.device)
    if flat_e.device.type != "cpu":
        return torch.stack(torch._foreach_norm(cut)).double().square()
    return torch.stack([_square_sum_in_blocks(piece) for piece in cut])


def _square_sum_in_blocks(piece_e: Tensor) -> Tensor:
    """The sum of squares of a piece, fp64 scalar: fp32 within blocks, fp64 over them."""
    blocks = piece_e.numel() // NORM_BLOCK
    whole_bk, rest = piece_e[: blocks * NORM_BLOCK].view(blocks, NORM_BLOCK), piece_e[blocks * NORM_BLOCK :]
    squares_b = torch.linalg.vector_norm(whole_bk, dim=1).double().square()
    return squares_b.sum() + torch.linalg.vector_norm(rest).double().square()


def _register_square_sums() -> None:
    """Registers the fake implementation of `square_sums`."""

    @torch.library.register_fake("megads::square_sums")
    def _(flat: Tensor, bounds: Tensor) -> Tensor:
        return flat.new_empty((bounds.shape[0],), dtype=torch.float64)
