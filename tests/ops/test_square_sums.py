"""The sums of squares against fp64."""

from __future__ import annotations

import pytest
import torch

from megads.ops.square_sums import square_sums

pytestmark = pytest.mark.usefixtures("kernels")


def test_exact_in_pieces_of_all_sizes() -> None:
    """Catches a piece that begins or ends at the wrong element, one that is lost because it is empty or small, and sums
    in fp32, which are off by 1e-6 here."""
    flat = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([[0, 40_003], [40_003, 40_003], [40_010, 40_011], [40_064, 70_001], [5, 20]])
    found = square_sums(flat, bounds, fused=True)
    exact = torch.stack([flat[start:stop].double().square().sum() for start, stop in bounds.tolist()])
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0.0)
    assert square_sums(flat, torch.empty(0, 2, dtype=torch.int64), fused=True).shape == (0,)


def test_bits_do_not_depend_on_threads() -> None:
    """Catches partial sums by thread: the norm, and with it every weight, would change with the number of cores."""
    flat, bounds, threads = torch.randn(100_000), torch.tensor([[3, 99_000]]), torch.get_num_threads()
    alone = square_sums(flat, bounds, fused=True)
    try:
        torch.set_num_threads(3)
        assert torch.equal(square_sums(flat, bounds, fused=True), alone)
    finally:
        torch.set_num_threads(threads)


def test_extreme_values() -> None:
    """Catches a norm that overflows where it is finite, and one that hides a non-finite gradient."""
    whole = torch.tensor([[0, 40]])
    assert square_sums(torch.full((40,), 1e30), whole, fused=True).item() == pytest.approx(4e61)
    for broken in (float("inf"), float("nan")):
        flat = torch.ones(40)
        flat[37] = broken
        assert not torch.isfinite(square_sums(flat, whole, fused=True)).item()


def test_what_torch_must_know() -> None:
    """Catches a fake result of another dtype, and bounds outside of the tensor, which would be read."""
    flat, bounds = torch.randn(100), torch.tensor([[0, 10], [20, 100]])
    torch.library.opcheck(torch.ops.megads.square_sums.default, (flat, bounds))
    with pytest.raises(RuntimeError, match="within flat"):
        square_sums(flat, bounds + 1, fused=True)
