"""Soft-capping against its formula, in place and with gradients."""

from __future__ import annotations

import pytest
import torch

from megads.ops.softcap import softcap, softcap_


@pytest.mark.parametrize(("cap", "scale"), [(1.5, 1.0), (50.0, 0.25)])
def test_softcap_values_and_gradients_match_the_reference(cap: float, scale: float) -> None:
    """Catches the scales inside and outside tanh swapped, a derivative at the result instead of the input, and a
    gradient that changes if the result is overwritten."""
    x = torch.linspace(-40.0, 40.0, 33, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: softcap(x, cap, scale), x)  # type: ignore[no-untyped-call]
    expected = cap * torch.tanh(scale * x / cap)
    found = softcap(x, cap, scale)
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    found.detach().zero_()
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], wanted)


def test_softcap_in_place_equals_out_of_place() -> None:
    """Catches a derivative at another point, and a cap that leaves its input unchanged."""
    x = torch.linspace(-9.0, 9.0, 19)
    capped = x.clone()
    slope = softcap_(capped, 3.0)
    torch.testing.assert_close(capped, 3.0 * torch.tanh(x / 3.0))
    torch.testing.assert_close(slope, 1.0 - torch.tanh(x / 3.0).square())


def test_softcap_in_bf16_is_rounded_once() -> None:
    """Catches tanh in bf16: the error must not exceed that of rounding the exact result."""
    x = torch.linspace(-90.0, 90.0, 4001).bfloat16()
    exact = 50.0 * torch.tanh(x.double() / 50.0)
    assert (softcap(x, 50.0).double() - exact).abs().max() <= (exact.bfloat16().double() - exact).abs().max() * 1.01
