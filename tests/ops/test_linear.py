"""GEMMs of linear layers against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megads.ops import linear as products
from megads.ops import processor
from megads.ops.config import FUSED, TORCH, Kernels
from tests.ops.accuracy import check_error, check_threads

pytestmark = pytest.mark.usefixtures("kernels")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects megads' kernels, as on a CPU on which PyTorch's GEMMs are slow."""
    monkeypatch.setattr(processor, "is_mkl_slow", lambda: True)
    monkeypatch.setattr(processor, "bf16_pairs_are_fast", lambda: True)


def tensors(dtype: torch.dtype, tokens: tuple[int, ...], out: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*tokens, width), (out, width), (out,), (*tokens, out))
    x, weight, bias, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return x, weight, bias, grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [((2, 24), 80, 48), ((1, 1), 1, 7), ((3, 5), 67, 33), ((1, 129), 3, 257), ((5, 400), 130, 9)]
)
def test_error_is_within_twice_torchs(dtype: torch.dtype, sizes: tuple[tuple[int, ...], int, int]) -> None:
    """Catches a transposed operand read as if it were not, a bias lost or added in every pass, partial sums of the
    wrong block, a wrong tile at an edge, and sums too long for fp32."""
    x, weight, bias, grad = tensors(dtype, *sizes)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (products.linear, (x, weight, bias)),
        (products.input_gradient, (grad, weight)),
        (products.weight_gradient, (grad, x)),
    ]
    for product, operands in cases:
        exact = product(*(operand.double() for operand in operands), TORCH)
        check_error(product(*operands, FUSED), product(*operands, TORCH), exact)


def test_strided_and_empty_operands_are_valid() -> None:
    """Catches operands read as if they were contiguous, and a failure for zero tokens."""
    x, weight, _, grad = tensors(torch.float32, (4, 6), 30, 20)
    right = products.weight_gradient(grad, x, TORCH)
    strided = grad.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(products.weight_gradient(strided, x, FUSED), right)
    torch.testing.assert_close(products.input_gradient(strided, weight, FUSED), grad @ weight)
    ones = torch.ones(()).expand(4, 6, 30)
    torch.testing.assert_close(products.input_gradient(ones, weight, FUSED), ones @ weight)
    assert products.linear(x[:0], weight, None, FUSED).shape == (0, 6, 30)
    assert products.weight_gradient(grad[:0], x[:0], FUSED).eq(0).all()
    every_other = torch.randn(40, 50)[::2, ::2]
    torch.testing.assert_close(products.linear(every_other, every_other, None, FUSED), every_other @ every_other.T)


def test_bits_do_not_depend_on_threads() -> None:
    """Catches row blocks that overlap or omit rows between threads, and a sum that depends on their number (N8)."""
    x, weight, bias, _ = tensors(torch.float32, (7, 97), 70, 600)
    check_threads(lambda: [products.linear(x, weight, bias, FUSED)], 1, 3)


def test_opcheck_passes() -> None:
    """Catches a schema that hides the mutated output, and mismatched operands, which would be read out of bounds."""
    a, b, c = torch.randn(5, 7), torch.randn(3, 7), torch.zeros(5, 3)
    torch.library.opcheck(torch.ops.megads.gemm.default, (c, a, b, None, True))
    torch.ops.megads.gemm(c.zero_().add_(1.0), a, b, None, True)
    torch.testing.assert_close(c, 1.0 + a @ b.T)
    with pytest.raises(RuntimeError, match="same k"):
        torch.ops.megads.gemm(c, a, b[:, :6], None, False)


def test_thin_products_are_left_to_torch() -> None:
    """Catches a GEMM of a single token in tiles of six rows: PyTorch's dot products are faster, and more exact."""
    x, weight, bias, _ = tensors(torch.float32, (1, 3), 40, 50)
    assert torch.equal(products.linear(x, weight, bias, FUSED), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("kernels", [FUSED, TORCH])
@pytest.mark.parametrize("tokens", [1, 3, 4, 40])
def test_bf16_linear_is_right_where_torch_loops(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, tokens: int) -> None:
    """Catches a bias lost, a transposed operand, or a result rounded twice where bf16 products are computed in fp32."""
    monkeypatch.setattr(processor, "torch_loops_over_bf16", lambda: True)
    x, weight, bias, grad = tensors(BF16, (1, tokens), 70, 50)
    wide_x, wide_weight, wide_grad = x.double(), weight.double(), grad.double()
    added = torch.full((tokens, 70), 3.0)
    products.linear_into(added, x[0], weight, kernels, add=True)
    assert (added - (wide_x[0] @ wide_weight.t() + 3.0)).norm() <= 4e-3 * added.norm()
    written = torch.empty(tokens, 70, dtype=BF16)
    products.linear_into(written, x[0], weight, kernels, bias)
    for found, exact in (
        (products.linear(x, weight, bias, kernels), wide_x @ wide_weight.t() + bias.double()),
        (products.linear(x, weight, None, kernels), wide_x @ wide_weight.t()),
        (written, wide_x[0] @ wide_weight.t() + bias.double()),
        (products.input_gradient(grad, weight, kernels), wide_grad @ wide_weight),
        (products.weight_gradient(grad, x, kernels), wide_grad[0].t() @ wide_x[0]),
    ):
        check_error(found, exact.to(BF16), exact)


def test_bf16_matmul_is_right_where_torch_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches wrong gradients of a batched product that is computed in fp32, and fp32 copies kept for them."""
    monkeypatch.setattr(processor, "torch_loops_over_bf16", lambda: True)
    generator = torch.Generator().manual_seed(0)
    a, b, grad = (
        torch.randn(size, generator=generator).to(BF16) for size in ((2, 3, 7, 5), (2, 3, 5, 4), (2, 3, 7, 4))
    )
    kept: list[Tensor] = []
    operands = [x.clone().requires_grad_() for x in (a, b)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = products.matmul(*operands)
    out.backward(grad)
    exact = [x.double().requires_grad_() for x in (a, b)]
    wide = exact[0] @ exact[1]
    wide.backward(grad.double())
    for found, right in zip((out, *(x.grad for x in operands)), (wide, *(x.grad for x in exact)), strict=True):
        check_error(found.detach(), right.detach().to(BF16), right.detach())
    assert {x.dtype for x in kept} == {BF16}


def test_fp64_is_left_to_torch() -> None:
    """Catches an fp64 reference that is computed in fp32."""
    x, weight, bias, _ = tensors(torch.float64, (2, 3), 4, 5)
    assert torch.equal(products.linear(x, weight, bias, FUSED), torch.nn.functional.linear(x, weight, bias))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.t().contiguous().t(),
    "a view": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "any strides": lambda x: x.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
}


@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    # Partial tile; odd k; more rows than are packed at once; several passes over k into fp32, and into bf16.
    [(1, 1, 1), (8, 48, 2), (9, 49, 3), (7, 97, 33), (300, 20, 31), (18, 33, 1250), (10, 17, 4099), (9, 20, 8194)],
)
def test_bf16_products_are_right_at_every_edge(left: str, right: str, m: int, n: int, k: int) -> None:
    """Catches bf16 pairs along k that do not match, a lost element of an odd k, wrong tiles at the edges, and passes
    that lose or round earlier partial sums. Sums in fp32 may have an fp32 rounding error."""
    generator = torch.Generator().manual_seed(m)
    a, b, bias = (torch.randn(*size, generator=generator).to(BF16) for size in ((m, k), (n, k), (n,)))
    exact = a.double() @ b.double().t()
    a, b = LAYOUTS[left](a), LAYOUTS[right](b)
    bound = 1e-6 * exact.norm()
    sums = torch.full((m, n), 3.0)
    torch.ops.megads.gemm_bf16(sums, a, b, bias, False)
    assert (sums - (exact + bias.double())).norm() <= bound + 1e-6 * bias.double().norm() * m**0.5
    sums.fill_(3.0)
    torch.ops.megads.gemm_bf16(sums, a, b, None, True)
    assert (sums - (exact + 3.0)).norm() <= bound + 1e-6 * 3.0 * (m * n) ** 0.5
    rounded = torch.full((m, n), float("nan"), dtype=BF16)
    torch.ops.megads.gemm_bf16(rounded, a, b, bias, False)
    check_error(rounded, (exact + bias.double()).to(BF16), exact + bias.double())


def test_bf16_products_are_right_beyond_one_block_of_columns() -> None:
    """Catches a block of packed columns that starts at the wrong column, or at the wrong element of the bias."""
    generator = torch.Generator().manual_seed(0)
    a, b, bias = (torch.randn(*size, generator=generator).to(BF16) for size in ((4, 4000), (1200, 4000), (1200,)))
    found = a.new_empty(4, 1200)
    torch.ops.megads.gemm_bf16(found, a, b, bias, False)
    exact = a.double() @ b.double().t() + bias.double()
    check_error(found, exact.to(BF16), exact)


def test_bf16_bits_do_not_depend_on_threads() -> None:
    """Catches rows that threads share, and a sum that depends on their number (N8)."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, 2300, generator=generator).to(BF16).t().contiguous().t() for size in (333, 101))

    def product() -> list[Tensor]:
        found = torch.empty(333, 101)
        torch.ops.megads.gemm_bf16(found, a, b, None, False)
        return [found]

    check_threads(product, 1, 2, 3)


def test_bf16_infinity_stays_in_its_row() -> None:
    """Catches padding of a tile that is multiplied with a non-finite value, which makes valid results NaN."""
    a, b = torch.ones(9, 3, dtype=BF16), torch.ones(50, 3, dtype=BF16)
    a[8, 2] = float("inf")
    for of_a in (a, a.t().contiguous().t()):
        found = torch.empty(9, 50)
        torch.ops.megads.gemm_bf16(found, of_a, b, None, False)
        assert found[:8].eq(3.0).all() and found[8].isinf().all()


def test_opcheck_passes_in_bf16() -> None:
    """Catches a schema that hides the mutated output, and operands read out of bounds or as another dtype."""
    a, b, c = torch.randn(5, 7).to(BF16), torch.randn(3, 7).to(BF16), torch.zeros(5, 3)
    torch.library.opcheck(torch.ops.megads.gemm_bf16.default, (c, a, b, None, True))
    for arguments, complaint in [
        ((c, a, b[:, :6], None, False), "same k"),
        ((c.t(), a, b, None, False), "contiguous"),
        ((c, a.float(), b, None, False), "must be bf16"),
        ((c.to(BF16), a, b, None, True), "fp32 c"),
        ((c, a, b, torch.zeros(3), False), "bias must be"),
    ]:
        with pytest.raises(RuntimeError, match=complaint):
            torch.ops.megads.gemm_bf16(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("fused", [False, True])
def test_weight_gradients_accumulate_in_fp32(dtype: torch.dtype, fused: bool) -> None:
    """Catches a first gradient added to old contents of main_grad, a second one that overwrites the first, and, in the
    kernels, a gradient rounded before it is accumulated."""
    x, _, _, grad = tensors(dtype, (3, 40), 70, 50)
    exact = 2 * (grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1))
    sums = torch.full((70, 50), float("nan"))
    products.add_weight_gradient(sums, grad, x, True, FUSED if fused else TORCH)
    products.add_weight_gradient(sums, grad, x, False, FUSED if fused else TORCH)
    straight = dtype is torch.float32 or fused
    assert (sums - exact).norm() <= (1e-6 if straight else 4e-3) * exact.norm()
    assert products.fuses_accumulation(grad, x)
    products.add_weight_gradient(sums, grad[:0], x[:0], False, FUSED if fused else TORCH)
    assert (sums - exact).norm() <= 4e-3 * exact.norm()


def test_accumulation_is_fused_by_the_weights_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches fused accumulation decided by the sequence length: two tokens per sample would be too few."""
    monkeypatch.setattr(processor, "torch_loops_over_bf16", lambda: False)
    x, _, _, grad = tensors(BF16, (40, 2), 70, 50)
    assert products.fuses_accumulation(grad, x) and products.fuses_accumulation(grad.flatten(0, 1), x.flatten(0, 1))
    x, _, _, grad = tensors(BF16, (2, 40), 3, 50)
    assert not products.fuses_accumulation(grad, x)


def test_torchs_fp32_gemm_adds_to_main_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a pass over memory for every fp32 weight gradient on CPUs with fast GEMMs of PyTorch's, and a second
    gradient that overwrites the first."""
    monkeypatch.setattr(processor, "is_mkl_slow", lambda: False)
    x, _, _, grad = tensors(torch.float32, (3, 40), 70, 50)
    assert products.fuses_accumulation(grad, x)
    exact = grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    sums = torch.full((70, 50), float("nan"))
    for repeat in (1, 2):
        products.add_weight_gradient(sums, grad, x, repeat == 1, FUSED)
        assert (sums - repeat * exact).norm() <= 1e-6 * exact.norm() * repeat
