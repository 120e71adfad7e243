"""Loads the compiled operators into torch, with what torch.compile and autograd must know of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megads.ops.build import LIBRARY, KernelsUnavailable


@functools.cache
def load_library(path: Path) -> None:
    """Registers the operators of namespace megads; once in a process.

    Args:
        path: what `megads.ops.build.build` returned.

    Raises:
        KernelsUnavailable: the file does not fit this torch.
    """
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise KernelsUnavailable(f"{path} cannot be loaded ({error}): remove it, and it is built anew") from error
    _register_cross_entropy()
    _register_gelu()
    _register_attention()


def loaded_kernels() -> str:
    """Returns which build of the kernels this process has loaded, or "torch" for none."""
    paths = [Path(path) for path in torch.ops.loaded_libraries]
    return next((path.parent.name for path in paths if path.name == LIBRARY), "torch")


def _register_cross_entropy() -> None:
    @torch.library.register_fake("megads::cross_entropy_forward")
    def _(logits: Tensor, labels: Tensor, valid: int, start: int) -> Tensor:
        return logits.new_empty((logits.shape[0], 3), dtype=torch.float32)

    @torch.library.register_fake("megads::cross_entropy_backward")
    def _(
        logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, grad: Tensor, valid: int, start: int
    ) -> Tensor:
        return torch.empty_like(logits)


def _register_gelu() -> None:
    @torch.library.register_fake("megads::gelu_forward")
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @torch.library.register_fake("megads::gelu_backward")
    def _(grad: Tensor, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = torch.ops.megads.gelu_backward(grad.contiguous(), x)
        return found

    torch.library.register_autograd("megads::gelu_forward", backward, setup_context=keep)


def _register_attention() -> None:
    def like(x_bnsd: Tensor) -> Tensor:
        return x_bnsd.new_empty(x_bnsd.transpose(1, 2).shape).transpose(1, 2)

    @torch.library.register_fake("megads::attention_forward")
    def _(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        return like(q), q.new_empty((*q.shape[:3], 2), dtype=torch.float32)

    @torch.library.register_fake("megads::attention_backward")
    def _(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        statistics: Tensor,
        slopes: Tensor | None,
        places: Tensor | None,
        starts: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return like(q), like(k), like(v)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, slopes, places, starts, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, *output, slopes, places, starts)
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, grad: Tensor | None, _grad_statistics: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = torch.ops.megads.attention_backward(grad, *ctx.saved_tensors, ctx.scale)
        return (*grads, None, None, None, None)

    torch.library.register_autograd("megads::attention_forward", backward, setup_context=keep)
