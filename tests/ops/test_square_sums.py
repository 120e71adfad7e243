"""Sums of squares against fp64."""

from __future__ import annotations

import pytest
import torch

from megads.ops.adamw import Pieces, square_sums
from megads.ops.config import FUSED, TORCH
from tests.ops.accuracy import check_threads

pytestmark = pytest.mark.usefixtures("kernels")
CPU = torch.device("cpu")


def test_square_sums_are_exact_in_pieces_of_all_sizes() -> None:
    """Catches a piece that starts or ends at the wrong element, one that is lost because it is empty or small, and sums
    in fp32, which are off by 1e-6 here."""
    flat = torch.randn(70_001, generator=torch.Generator().manual_seed(0))
    pieces = Pieces([(0, 40_003), (40_003, 40_003), (40_010, 40_011), (40_064, 70_001), (5, 20)], CPU)
    found = square_sums(flat, pieces, kernels=FUSED)
    exact = torch.stack([flat[start:stop].double().square().sum() for start, stop in pieces.bounds])
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0.0)
    for kernels in (FUSED, TORCH):
        assert square_sums(flat, Pieces([], CPU), kernels).shape == (0,)


def test_square_sums_by_torch_are_as_exact() -> None:
    """Catches a norm under ops.impl=torch whose error grows with the model: 1e-4 here if all is added up in fp32."""
    flat = torch.randn(5_000_123, generator=torch.Generator().manual_seed(0))
    pieces = Pieces([(0, 17), (17, 5_000_100)], CPU)
    torch.testing.assert_close(square_sums(flat, pieces, TORCH), square_sums(flat, pieces, FUSED), rtol=2e-7, atol=0.0)


def test_bits_do_not_depend_on_threads() -> None:
    """Catches partial sums per thread: the norm, and with it every weight, would change with the number of cores."""
    flat, pieces = torch.randn(100_000), Pieces([(3, 99_000)], CPU)
    check_threads(lambda: [square_sums(flat, pieces, kernels=FUSED)], 1, 3)


def test_square_sums_do_not_overflow_and_show_infinities() -> None:
    """Catches a norm that overflows although it is finite, and one that hides a non-finite gradient."""
    whole = Pieces([(0, 40)], CPU)
    assert square_sums(torch.full((40,), 1e30), whole, kernels=FUSED).item() == pytest.approx(4e61)
    for broken in (float("inf"), float("nan")):
        flat = torch.ones(40)
        flat[37] = broken
        assert not torch.isfinite(square_sums(flat, whole, kernels=FUSED)).item()


def test_opcheck_passes() -> None:
    """Catches a fake result of another dtype, and bounds outside of the tensor, which would be read."""
    flat, pieces = torch.randn(100), Pieces([(0, 10), (20, 100)], CPU)
    torch.library.opcheck(torch.ops.megads.square_sums.default, (flat, pieces.bounds_p2))
    with pytest.raises(RuntimeError, match="within flat"):
        square_sums(flat, Pieces([(20, 101)], CPU), kernels=FUSED)
