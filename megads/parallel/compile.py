"""Blocks compiled by torch.compile, one by one: what is between the matrix products becomes few kernels.

Blocks of one shape share their code, so the compiler runs once for each shape of hidden states, with and without
gradients, whatever the number of blocks. It is called by the first micro-batch, on every rank.

What a compiler cannot look into is called as it is, between compiled pieces: a module names such methods of its own in
`untraced`. Those are attention cores (they choose kernels, gather over context ranks, or are recomputed), the drawing
of dropout masks, tables made once for a micro-batch, and layers with collectives of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megads.ops.config import Compile
from megads.parallel.weight_gradients import SplitLayer


def compile_blocks(blocks: Sequence[nn.Module], compiled: Compile, *, splits: bool) -> None:
    """Has the forward passes of a rank's blocks compiled when they first run; names of parameters stay as they are.

    Args:
        blocks: cut already, their attention cores wrapped. What runs a whole block again is put around it afterwards.
        compiled: how.
        splits: layers put off gradients of weights, or add them to their sums, which each backward pass decides.
    """
    if compiled is Compile.none:
        return
    mode = "reduce-overhead" if compiled is Compile.graphs else None
    for block in blocks:
        for module in block.modules():
            untraced = ("forward",) if splits and isinstance(module, SplitLayer) else getattr(module, "untraced", ())
            for name in untraced:
                # On the object, as what recomputes a core is: other objects of its class are left alone.
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        block.forward = torch.compile(block.forward, dynamic=False, mode=mode)  # type: ignore[method-assign]
    if compiled is Compile.graphs and blocks:
        blocks[0].forward = _new_iteration(blocks[0].forward)  # type: ignore[method-assign]


def _new_iteration(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tells CUDA graphs that a micro-batch begins: what the last one left in their memory may be overwritten."""

    def call(*args: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(*args)

    return call
