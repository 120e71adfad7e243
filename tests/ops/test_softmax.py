"""The masked softmax kernel against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.softmax import masked_softmax
from tests.ops.accuracy import check_errors, check_threads, denormals, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("kernels")

SLOPES = torch.tensor([0.5, 0.01, 0.002])
PLACES = torch.cat([torch.arange(0, 10), torch.arange(60, 75)])
STARTS = torch.stack([torch.arange(41) // 7 * 7, torch.arange(41) // 30 * 30])
CASES: dict[str, tuple[int, int, Tensor | None, Tensor | None, Tensor | None]] = {
    "one token": (1, 1, SLOPES, None, None),
    "odd sizes": (67, 67, SLOPES, None, None),
    "whole vectors, no bias": (64, 64, None, None, None),
    "context rank": (25, 77, SLOPES, PLACES, None),
    "documents": (41, 41, SLOPES, None, STARTS),
    "beyond Megatron's longest": (2, 20011, SLOPES, torch.tensor([16500, 20010]), None),
}


def inputs(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores and the gradient of the probabilities."""
    generator = torch.Generator().manual_seed(queries + keys)
    x, y = (torch.randn(2, 3, queries, keys, dtype=torch.float64, generator=generator) for _ in range(2))
    return (4 * x).to(dtype), y.to(dtype)


def both(
    scores: Tensor, grad: Tensor, rest: tuple[Tensor | None, ...], kernels: Kernels, scale: float = 0.7
) -> list[Tensor]:
    """Probabilities and the gradient of the scores."""
    return outputs_and_gradients(lambda leaf: masked_softmax(leaf, scale, *rest, kernels=kernels), [scores], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_error_is_within_twice_torchs(name: str, dtype: torch.dtype) -> None:
    """Catches a wrong slope, document boundary, position or vector tail, and a sum in bf16."""
    queries, keys, *rest = CASES[name]
    scores, grad = inputs(queries, keys, dtype)
    exact = both(scores.double(), grad.double(), tuple(rest), TORCH)
    found = both(scores, grad, tuple(rest), FUSED)
    probabilities = masked_softmax(scores, 0.7, *rest)
    # torch's and megads' softmax save their output: in bf16 the gradient is computed from rounded probabilities.
    kept = torch.ops.aten._softmax_backward_data(grad, probabilities, -1, dtype)
    check_errors(found, [probabilities, 0.7 * kept], exact)
    assert all((ours[right == 0] == 0).all() for ours, right in zip(found, exact, strict=True))


def test_the_reference_is_torchs_masked_softmax() -> None:
    """Catches a reference that is wrong in the same way as the kernel."""
    scores, _ = inputs(41, 41, torch.float64)
    distance = torch.arange(41) - torch.arange(41)[:, None]
    biased = 0.7 * scores + SLOPES[:, None, None] * distance
    seen = (distance <= 0) & (torch.arange(41) >= STARTS[:, :, None])
    expected = biased.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(masked_softmax(scores, 0.7, SLOPES.double(), None, STARTS), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_rows_without_keys_are_zero(fused: bool) -> None:
    """Catches NaN from a softmax over no keys: such a row and its gradient must be zero."""
    scores, grad = inputs(40, 40, torch.float32)
    starts = torch.zeros(2, 40, dtype=torch.int64)
    starts[1, 3:39] = 40
    for found in both(scores, grad, (SLOPES, None, starts), FUSED if fused else TORCH):
        assert (found[1, :, 3:39] == 0).all() and found.isfinite().all()
        assert (found[0, :, 5, :6] != 0).all()


def test_far_keys_under_alibi_have_no_denormal_probabilities() -> None:
    """Catches denormal probabilities, which make the GEMMs around the softmax many times slower."""
    scores, grad = inputs(600, 600, torch.float32)
    assert [denormals(x) for x in both(scores, grad, (SLOPES, None, None), FUSED)] == [0, 0]


def test_large_scores_are_exact_and_infinities_show() -> None:
    """Catches exp without subtraction of the largest score, and a NaN or infinity that reaches rows which mask it."""
    scores, grad = inputs(50, 50, torch.float32)
    rest = (SLOPES, None, None)
    exact = both(1e3 * scores.double(), grad.double(), rest, TORCH)
    for ours, right in zip(both(1e3 * scores, grad, rest, FUSED), exact, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-3, atol=1e-3)
    for value in (float("nan"), float("inf")):
        broken = scores.clone()
        broken[0, 1, :, 30] = value
        out, grad_scores = both(broken, grad, rest, FUSED)
        assert out[0, 1, 30:, :31].isnan().all() and out[0, 1, :30].isfinite().all() and out[1].isfinite().all()
        assert (out.triu(1) == 0).all() and (grad_scores.triu(1) == 0).all()
    low = scores.clone()
    low[0, 1, 20, 3:] = float("-inf")
    expected = both(low.double(), grad.double(), rest, TORCH)
    for ours, right in zip(both(low, grad, rest, FUSED), expected, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-6)


def test_strided_and_empty_inputs_are_valid() -> None:
    """Catches a kernel that reads a view as if it were contiguous, and one that fails on an empty tensor."""
    scores, grad = inputs(24, 24, torch.float32)
    rest = (SLOPES, None, STARTS[:, :24])
    expected = both(scores, grad, rest, TORCH)
    found = both(scores.mT.contiguous().mT, grad.mT.contiguous().mT, rest, FUSED)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right)
    assert both(scores[:0], grad[:0], (SLOPES, None, None), FUSED)[1].shape == (0, 3, 24, 24)


def test_the_same_bits_at_any_number_of_threads() -> None:
    """Catches sums whose order depends on how rows are split over threads."""
    scores, grad = inputs(130, 130, torch.bfloat16)
    check_threads(lambda: both(scores, grad, (SLOPES, None, None), FUSED), 1, 2, 3)


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema, fake or gradient registration under which torch.compile or autograd goes wrong."""
    scores, grad = inputs(20, 20, torch.float32)
    starts = STARTS[:, :20].contiguous()
    leaf = scores.detach().requires_grad_()
    torch.library.opcheck(torch.ops.megads.softmax_forward.default, (leaf, 0.7, SLOPES, None, starts))
    out = torch.ops.megads.softmax_forward(scores, 0.7, SLOPES, None, starts)
    torch.library.opcheck(torch.ops.megads.softmax_backward.default, (grad, out, 0.7, None, starts))
    drawn = (torch.arange(len(scores)), 7, 9000, 2)
    for operator, tensors in (
        (torch.ops.megads.softmax_dropout_forward.default, (scores, 0.7, SLOPES)),
        (torch.ops.megads.softmax_dropout_backward.default, (grad, out, 0.7)),
    ):
        torch.library.opcheck(operator, (*tensors, None, starts, *drawn))
    compiled = torch.compile(lambda x: masked_softmax(x, 0.7, SLOPES, None, starts, kernels=FUSED))(leaf)
    compiled.backward(grad)
    assert leaf.grad is not None
    for ours, right in zip((compiled, leaf.grad), both(scores, grad, (SLOPES, None, starts), FUSED), strict=True):
        assert torch.equal(ours, right)
