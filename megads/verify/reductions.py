"""Sees every gradient reduction as torch dispatches it, whoever starts it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.parallel.grid import ParallelGrid

_ACTIVATION_DIMS = 3
"""Activations have a batch, a sequence and a width at least; gradients travel flat or as the weights they belong to."""


class RecordedReductions(TorchDispatchMode):
    """Notes dtype and elements of every reduction over the ranks that share weights; a context manager.

    These are ranks of the data axis, all or some, and the first and the last pipeline stage, which share a tied
    embedding.

    Args:
        grid: this rank's place.
        seen: (dtype, elements) of each, added to.
    """

    def __init__(self, grid: ParallelGrid, seen: set[tuple[str, int]]) -> None:
        super().__init__()
        self._seen = seen
        self._data = set(grid.data.ranks)
        self._tied = {grid.pp.ranks[0], grid.pp.ranks[-1]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes the operation on."""
        if func.namespace == "c10d" and "reduce" in func.__name__:
            self._note(args)
        return func(*args, **(kwargs or {}))

    def _note(self, args: Any) -> None:
        ranks = next(_ranks(args), set())
        if len(ranks) < 2 or not (ranks <= self._data or ranks == self._tied):
            return
        for tensor in _tensors(args):
            # Context parallel attention sums its keys' and values' gradients over ranks of the data axis too.
            if ranks == self._tied or tensor.dim() < _ACTIVATION_DIMS:
                self._seen.add((str(tensor.dtype), tensor.numel()))


def _ranks(args: Any) -> Iterator[set[int]]:
    """The global ranks of the process group among a collective's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            # A reduce operation is such an object too.
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:
                continue
            yield set(dist.get_process_group_ranks(group))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
