"""AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101) in one pass over flat fp32 state.

Gradient, master and moments are read once; clipping and the rounding to the working weights happen on the way.

Shape suffix: e = elements of a flat piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    Needs `megads.ops.library.load_library`; `adamw_reference` is the same in plain torch.

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
    """Tells torch that nothing is returned; the library is loaded."""

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
