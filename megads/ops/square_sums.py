"""Sums of squares of pieces of a flat fp32 tensor, in fp64: what a gradient norm is made of.

Shape suffixes: e = elements of the flat tensor, p = pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megads.ops.apex import AMP, INT32_ELEMENTS, extension
from megads.ops.eligible import kernel_takes

APEX_CHUNK = 2**16
"""Elements of a block of apex' kernels, as in its own optimizers."""


def square_sums(flat_e: Tensor, bounds_p2: Tensor, fused: bool, *, apex: bool = False) -> Tensor:
    """The sum of squares of every piece, fp64 [p].

    The kernel's is bitwise the same for any number of threads, and neither overflows nor loses small summands.

    Args:
        flat_e: fp32, contiguous.
        bounds_p2: int64 on the CPU, the first element of each piece and the one after its last.
        fused: take the kernel where there is one; `megads.ops.library.load_library` was called.
        apex: take NVIDIA apex' norm on a GPU, summed in fp32 as torch's is; `megads.ops.choice.load` let it pass.
    """
    if fused and kernel_takes(flat_e):
        found: Tensor = torch.ops.megads.square_sums(flat_e, bounds_p2)
        return found
    # Apex leaves out what comes before an empty piece at the end.
    if apex and flat_e.is_cuda and 0 < flat_e.numel() < INT32_ELEMENTS and len(bounds_p2) and _none_empty(bounds_p2):
        non_finite = torch.zeros(1, dtype=torch.int32, device=flat_e.device)  # wanted; the norm says it as well
        pieces = [flat_e[start:stop] for start, stop in bounds_p2.tolist()]
        _, norms_p = extension(AMP).multi_tensor_l2norm(APEX_CHUNK, non_finite, [pieces], True)
        sums_p: Tensor = norms_p.double().square()
        return sums_p
    return square_sums_reference(flat_e, bounds_p2)


def _none_empty(bounds_p2: Tensor) -> bool:
    return bool((bounds_p2[:, 0] < bounds_p2[:, 1]).all())


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
