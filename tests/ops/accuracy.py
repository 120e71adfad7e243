"""Error bounds of kernels, relative to the error of torch's own operators, and what else every operator must do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def check_errors(found: Iterable[Tensor], eager: Iterable[Tensor], exact: Iterable[Tensor]) -> None:
    """Calls `check_error` for each of several results; where torch's is exact, the kernel's must be, too."""
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        if torch.equal(theirs.double(), right):
            assert torch.equal(ours, theirs)
        else:
            check_error(ours, theirs, right)


def outputs_and_gradients(function: Callable[..., object], tensors: Iterable[Tensor], *grads: Tensor) -> list[Tensor]:
    """Calls the function; returns its outputs and the gradients of the tensors that it uses."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    outputs = [out] if isinstance(out, Tensor) else list(out)  # type: ignore[call-overload]
    torch.autograd.backward(outputs, grads)
    return [x.detach() for x in outputs] + [leaf.grad for leaf in leaves if leaf.grad is not None]


def check_threads(compute: Callable[[], Iterable[Tensor]], *counts: int) -> None:
    """Asserts that the results are the same, bit for bit, at each number of threads; restores the number."""
    before, expected = torch.get_num_threads(), list(compute())
    try:
        for count in counts:
            torch.set_num_threads(count)
            assert all(map(torch.equal, compute(), expected)), f"{count} threads"
    finally:
        torch.set_num_threads(before)


def denormals(x: Tensor) -> int:
    """Number of denormal elements: nonzero, but smaller than the smallest normal number."""
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())
