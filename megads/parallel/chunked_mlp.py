"""An MLP in chunks of the sequence, each recomputed in the backward pass: its intermediate features are never whole.

An MLP treats every token alone, so that a chunk needs no other. With L chunks, T tokens and f intermediate features the
pass holds T f / L of them instead of T f, as in Liu and Abbeel 2023, "Blockwise Parallel Transformer", section 3. Only
the input is saved; the backward pass runs the MLP's forward pass again, chunk by chunk.

Weight gradients are sums over chunks, always from the first to the last, in fp32: in main_grad where layers accumulate
their gradients there, else in a temporary that is rounded once to the weight's dtype. They are complete after the last
chunk, and are never deferred to a later part of a split backward pass, which would keep the intermediate features.

Shape suffixes: b = batch, t = tokens of the sequence on this rank, h = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megads.ops.config import mlp_chunks
from megads.parallel.region_linear import even_parts
from megads.parallel.sharding import RegionModule
from megads.parallel.weight_gradients import SplitLayer

Whole = Callable[[Tensor], Tensor]


def in_chunks(module: nn.Module, first: nn.Module, whole: Whole, x_bth: Tensor, most: int | None) -> Tensor:
    """An MLP's output, computed in chunks.

    Args:
        module: the MLP.
        first: its first layer; with sequence parallelism it sees the tokens of all tensor-parallel ranks.
        whole: the MLP's forward pass.
        x_bth: input, [b, t, h].
        most: most tokens of a micro-batch in a chunk; None: all.

    Returns:
        [b, t, h].
    """
    batch, sequence = x_bth.shape[0], x_bth.shape[1]
    shared = isinstance(first, RegionModule) and first.region.shared_out
    ranks = first.region.axis.size if isinstance(first, RegionModule) and shared else 1
    count = mlp_chunks(batch * sequence * ranks, sequence, most)
    if count <= 1:
        return whole(x_bth)
    parts = even_parts(sequence, count)
    if not torch.is_grad_enabled():
        return _forward(whole, x_bth, parts)
    out_bth: Tensor = _InChunks.apply(x_bth, module, whole, parts, *module.parameters())
    return out_bth


def _forward(whole: Whole, x_bth: Tensor, parts: Sequence[slice]) -> Tensor:
    out_bth = torch.empty_like(x_bth, memory_format=torch.contiguous_format)
    for part in parts:
        out_bth[:, part] = whole(x_bth[:, part].contiguous())
    return out_bth


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_bth: Tensor, module: nn.Module, whole: Whole, parts: Sequence[slice], *parameters: nn.Parameter
    ) -> Tensor:
        ctx.save_for_backward(x_bth)
        ctx.module, ctx.whole, ctx.parts = module, whole, parts
        return _forward(whole, x_bth, parts)

    @staticmethod
    def backward(ctx: Any, grad_bth: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x_bth,) = ctx.saved_tensors
        grad_x_bth = torch.empty_like(x_bth, memory_format=torch.contiguous_format)
        with _aliased(ctx.module) as aliases, _accumulating(ctx.module, aliases):
            sums: list[Tensor | None] = [None] * len(aliases)
            for part in ctx.parts:
                x_bch = x_bth[:, part].contiguous().detach().requires_grad_()
                with torch.enable_grad():
                    out_bch = ctx.whole(x_bch)
                grad_bch = grad_bth[:, part].contiguous()
                grad_x_bth[:, part], *found = torch.autograd.grad(
                    out_bch, (x_bch, *aliases), grad_bch, allow_unused=True
                )
                del out_bch  # with its graph
                sums = [_added(total, gradient) for total, gradient in zip(sums, found, strict=True)]
            rounded = [
                None if total is None else total.to(alias.dtype) for total, alias in zip(sums, aliases, strict=True)
            ]
        return grad_x_bth, None, None, None, *rounded


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None or total is not None:
        return total if gradient is None or total is None else total.add_(gradient)
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


@contextmanager
def _aliased(module: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Context in which a module has other parameters on the same memory, so that no hook sees a chunk's gradients.

    Yields:
        The module's own parameters by those that stand for them, in the order of `module.parameters()`.
    """
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]
    aliases = [nn.Parameter(parameter.detach()) for _, _, parameter in places]
    for (owner, name, _), alias in zip(places, aliases, strict=True):
        owner._parameters[name] = alias
    try:
        yield {alias: parameter for alias, (_, _, parameter) in zip(aliases, places, strict=True)}
    finally:
        for owner, name, parameter in places:
            owner._parameters[name] = parameter


@contextmanager
def _accumulating(module: nn.Module, aliases: dict[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Context in which the layers of a module compute the weight gradients of one chunk after the other."""
    layers = (layer for layer in module.modules() if isinstance(layer, SplitLayer))
    handlers = {layer.weight_gradients for layer in layers} - {None}
    with ExitStack() as stack:
        for handler in handlers:
            assert handler is not None
            stack.enter_context(handler.in_chunks(aliases))
        yield
