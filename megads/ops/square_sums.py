"""Sums of squares of pieces of a flat fp32 tensor, in fp64: what a gradient norm is made of.

Shape suffixes: e = elements of the flat tensor, p = pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megads.ops.apex import AMP, INT32_ELEMENTS, extension
from megads.ops.config import KernelOp
from megads.ops.kernels import TORCH, Kernels

APEX_CHUNK = 2**16
"""Elements of a block of apex' kernels, as in its own optimizers."""


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


def register() -> None:
    """Tells torch the shape of the result; the library is loaded."""

    @torch.library.register_fake("megads::square_sums")
    def _(flat: Tensor, bounds: Tensor) -> Tensor:
        return flat.new_empty((bounds.shape[0],), dtype=torch.float64)
