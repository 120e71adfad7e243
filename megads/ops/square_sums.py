"""Sums of squares of pieces of a flat fp32 tensor, in fp64: what a gradient norm is made of.

Shape suffixes: e = elements of the flat tensor, p = pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megads.ops.eligible import kernel_takes


class Pieces:
    """Pieces of a flat tensor: for torch on the host, for the kernel where the tensor is, so that nobody copies them.

    Args:
        bounds: of every piece its first element and the one after its last.
        device: of the flat tensor.

    Attributes:
        bounds: the same.
        bounds_p2: the same, int64 on the device.
    """

    def __init__(self, bounds: Iterable[tuple[int, int]], device: torch.device) -> None:
        self.bounds = tuple(bounds)
        self.bounds_p2 = torch.tensor(self.bounds, dtype=torch.int64).reshape(-1, 2).to(device)


def square_sums(flat_e: Tensor, pieces: Pieces, fused: bool) -> Tensor:
    """The sum of squares of every piece, fp64 [p] on the tensor's device; no host waits for a GPU.

    The kernel's is bitwise the same for any number of threads, and neither overflows nor loses small summands.

    Args:
        flat_e: fp32, contiguous.
        pieces: of it.
        fused: take the kernel where there is one; `megads.ops.library.load_library` was called.
    """
    if fused and kernel_takes(flat_e, gpu=True):
        found: Tensor = torch.ops.megads.square_sums(flat_e, pieces.bounds_p2)
        return found
    return square_sums_reference(flat_e, pieces)


def square_sums_reference(flat_e: Tensor, pieces: Pieces) -> Tensor:
    """The same in plain torch: the squares of 2-norms, computed in the dtype of `flat_e`."""
    cut = [flat_e[start:stop] for start, stop in pieces.bounds]
    if not cut:
        return torch.zeros(0, dtype=torch.float64, device=flat_e.device)
    return torch.stack(torch._foreach_norm(cut)).double().square()


def register() -> None:
    """Tells torch the shape of the result; the library is loaded."""

    @torch.library.register_fake("megads::square_sums")
    def _(flat: Tensor, bounds: Tensor) -> Tensor:
        return flat.new_empty((bounds.shape[0],), dtype=torch.float64)
