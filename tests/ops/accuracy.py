"""Error bounds of kernels, relative to the error of torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """2-norm of the difference divided by the 2-norm of the exact value."""
    return float((found.double() - exact).norm() / exact.norm())


def check_error(found: Tensor, eager: Tensor, exact: Tensor, factor: float = 2.0) -> None:
    """Asserts at most twice the error of torch's eager operators in the same dtype.

    Args:
        found: result of the kernel.
        eager: result of torch in the same dtype, from the same inputs.
        exact: result in fp64, from the same inputs.
        factor: another bound than twice, for a kernel of another library whose error was measured.
    """
    assert found.dtype == eager.dtype and found.shape == eager.shape
    ours, theirs = relative_error(found, exact), relative_error(eager, exact)
    assert ours <= factor * theirs, f"error {ours:.2e}, torch's operators {theirs:.2e}"


def denormals(x: Tensor) -> int:
    """Number of denormal elements: nonzero, but smaller than the smallest normal number."""
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())
