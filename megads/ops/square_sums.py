"""Sums of squares of pieces of a flat fp32 tensor, in fp64: what a gradient norm is made of.

Shape suffixes: e = elements of the flat tensor, p = pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megads.ops.eligible import kernel_takes


def square_sums(flat_e: Tensor, bounds_p2: Tensor, fused: bool) -> Tensor:
    """The sum of squares of every piece, fp64 [p].

    The kernel's is bitwise the same for any number of threads, and neither overflows nor loses small summands.

    Args:
        flat_e: fp32, contiguous.
        bounds_p2: int64 on the CPU, the first element of each piece and the one after its last.
        fused: take the kernel where there is one; `megads.ops.library.load_library` was called.
    """
    if fused and kernel_takes(flat_e):
        found: Tensor = torch.ops.megads.square_sums(flat_e, bounds_p2)
        return found
    return square_sums_reference(flat_e, bounds_p2)


def square_sums_reference(flat_e: Tensor, bounds_p2: Tensor) -> Tensor:
    """The same in plain torch: the squares of 2-norms, computed in the dtype of `flat_e`."""
    pieces = [flat_e[start:stop] for start, stop in bounds_p2.tolist()]
    if not pieces:
        return torch.zeros(0, dtype=torch.float64, device=flat_e.device)
    return torch.stack(torch._foreach_norm(pieces)).double().square()


def register() -> None:
    """Tells torch the shape of the result; the library is loaded."""

    @torch.library.register_fake("megads::square_sums")
    def _(flat: Tensor, bounds: Tensor) -> Tensor:
        return flat.new_empty((bounds.shape[0],), dtype=torch.float64)
