"""Activation recomputation: which blocks, and the wrapper that does it. Knows no model.

A recomputed function keeps only its arguments for backward, which runs it once more (Chen et al. 2016, "Training Deep
Nets with Sublinear Memory Cost"). `full` does that to whole blocks; `selective` to the attention cores alone, which
hold much and cost little (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megads.parallel.config import Recompute
from megads.parallel.partition import ShardingTable
from megads.parallel.sharding import attention_cores


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, of which autograd keeps the arguments only; backward calls it again with them.

    All that the function depends on and that may have changed until backward must be among its arguments: under 1F1B
    other micro-batches run forward in between. It must be pure; generators are not rewound, as our dropout draws from
    the sample's own stream. Without gradients nothing is kept and nothing runs twice.

    Collectives inside run again too, in the same order on all ranks of a tensor-parallel group, which run the same
    schedule.
    """

    def call(*args: Any) -> Tensor:
        output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return output

    return call


def recompute_module(module: nn.Module) -> None:
    """Makes a module's own forward a recomputed one, wherever it is called."""
    module.forward = recomputed(module.forward)  # type: ignore[method-assign]


def recompute_cores(blocks: Mapping[str, nn.Module], modes: Sequence[Recompute], table: ShardingTable) -> None:
    """Makes the attention cores of `selective` blocks recomputed ones.

    Args:
        blocks: by their names in the whole model, cut already.
        modes: one for each block.
        table: names the attention cores.
    """
    for (name, block), mode in zip(blocks.items(), modes, strict=True):
        if mode is Recompute.selective:
            for core in attention_cores(block, name, table):
                recompute_module(core)


def recompute_whole(blocks: Iterable[nn.Module], modes: Sequence[Recompute]) -> None:
    """Makes `full` blocks recomputed ones: what runs inside of them, compiled or not, runs again.

    Args:
        blocks: of a rank.
        modes: one for each block.
    """
    for block, mode in zip(blocks, modes, strict=True):
        if mode is Recompute.full:
            recompute_module(block)
