"""How exact a kernel must be: what it may be off by follows from what torch itself is off by."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(found: Tensor, exact: Tensor) -> float:
    """2-norm of the difference over that of the exact value."""
    return float((found.double() - exact).norm() / exact.norm())


def check_error(found: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most twice the error of torch's eager operators in the same dtype.

    Args:
        found: the kernel's.
        eager: torch's, from the same inputs.
        exact: in fp64, from the same inputs.
    """
    assert found.dtype == eager.dtype and found.shape == eager.shape
    ours, theirs = relative_error(found, exact), relative_error(eager, exact)
    assert ours <= 2 * theirs, f"error {ours:.2e}, torch's operators {theirs:.2e}"


def denormals(x: Tensor) -> int:
    """How many elements are no zeros, but below the normal numbers."""
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())
