"""Linear layers' products against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megads.ops import linear as products
from tests.ops.accuracy import check_error

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor on which MKL is slow."""
    monkeypatch.setattr(products, "mkl_is_slow", lambda: True)


def tensors(dtype: torch.dtype, tokens: tuple[int, ...], out: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*tokens, width), (out, width), (out,), (*tokens, out))
    x, weight, bias, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return x, weight, bias, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [((2, 24), 80, 48), ((1, 1), 1, 7), ((3, 5), 67, 33), ((1, 129), 3, 257), ((5, 400), 130, 9)]
)
def test_error_is_that_of_the_dtype(dtype: torch.dtype, sizes: tuple[tuple[int, ...], int, int]) -> None:
    """Catches a transposed operand read as if it were not, a bias lost or added in every pass, sums of other
    blocks, a wrong tile at an edge, and sums too long for fp32."""
    x, weight, bias, grad = tensors(dtype, *sizes)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (products.linear, (x, weight, bias)),
        (products.input_gradient, (grad, weight)),
        (products.weight_gradient, (grad, x)),
    ]
    for product, operands in cases:
        exact = product(*(operand.double() for operand in operands), False)
        check_error(product(*operands, True), product(*operands, False), exact)


def test_layouts_of_memory() -> None:
    """Catches operands read as if they were contiguous, and no tokens at all."""
    x, weight, _, grad = tensors(torch.float32, (4, 6), 30, 20)
    right = products.weight_gradient(grad, x, False)
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(products.weight_gradient(strided, x, True), right)
    torch.testing.assert_close(products.input_gradient(strided, weight, True), grad @ weight)
    ones = torch.ones(()).expand(4, 6, 30)
    torch.testing.assert_close(products.input_gradient(ones, weight, True), ones @ weight)
    assert products.linear(x[:0], weight, None, True).shape == (0, 6, 30)
    assert products.weight_gradient(grad[:0], x[:0], True).eq(0).all()
    every_other = torch.randn(40, 50)[::2, ::2]
    torch.testing.assert_close(products.linear(every_other, every_other, None, True), every_other @ every_other.T)


def test_bits_do_not_depend_on_threads() -> None:
    """Catches blocks of rows that overlap or leave out rows where threads meet, and sums cut by thread (N8)."""
    x, weight, bias, _ = tensors(torch.float32, (7, 97), 70, 600)
    threads, alone = torch.get_num_threads(), products.linear(x, weight, bias, True)
    try:
        torch.set_num_threads(3)
        assert torch.equal(products.linear(x, weight, bias, True), alone)
    finally:
        torch.set_num_threads(threads)


def test_what_torch_must_know() -> None:
    """Catches a schema that hides what is written, and operands that do not fit, which would be read out of bounds."""
    a, b, c = torch.randn(5, 7), torch.randn(3, 7), torch.zeros(5, 3)
    torch.library.opcheck(torch.ops.megads.gemm.default, (c, a, b, None, True))
    torch.ops.megads.gemm(c.zero_().add_(1.0), a, b, None, True)
    torch.testing.assert_close(c, 1.0 + a @ b.T)
    with pytest.raises(RuntimeError, match="same k"):
        torch.ops.megads.gemm(c, a, b[:, :6], None, False)


def test_thin_products_go_to_torch() -> None:
    """Catches one new token that runs through tiles of six rows: torch's dot products are faster, and more exact."""
    x, weight, bias, _ = tensors(torch.float32, (1, 3), 40, 50)
    assert torch.equal(products.linear(x, weight, bias, True), torch.nn.functional.linear(x, weight, bias))


def test_fp64_goes_to_torch() -> None:
    """Catches a reference in fp64 that is computed in fp32 on the way."""
    x, weight, bias, _ = tensors(torch.float64, (2, 3), 4, 5)
    assert torch.equal(products.linear(x, weight, bias, True), torch.nn.functional.linear(x, weight, bias))
