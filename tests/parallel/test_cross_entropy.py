"""The vocabulary-parallel cross entropy against log-softmax of the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.config import Implementation, OpsConfig
from megads.ops.resolve import load
from megads.parallel.cross_entropy import loss_in_place, vocab_parallel_token_losses
from megads.parallel.grid import padded_rows, single_rank_grid
from tests.distributed import run_ranks
from tests.parallel.test_collectives import tensor_axis


def logits_of(vocab_size: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(
        2, vocab_size, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def labels_of(vocab_size: int) -> Tensor:
    """Every token is a label, so every rank that has a row holds one."""
    return torch.stack([torch.arange(vocab_size), torch.arange(vocab_size).flip(0)])


def cotangent_of(vocab_size: int) -> Tensor:
    return torch.randn(2, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _losses(vocab_size: int, scale: float, dtype: str, padding: float) -> dict[str, Any]:
    axis = tensor_axis()
    rows = padded_rows(vocab_size, axis.size)
    whole = F.pad(logits_of(vocab_size, scale), (0, rows * axis.size - vocab_size), value=padding)
    logits = whole[..., axis.rank * rows : (axis.rank + 1) * rows].to(getattr(torch, dtype)).requires_grad_()
    before = logits.detach().clone()
    losses = vocab_parallel_token_losses(logits, labels_of(vocab_size), vocab_size, axis)
    (losses * cotangent_of(vocab_size).to(losses.dtype)).sum().backward()
    return {
        "losses": losses.detach().numpy(),
        "grad": logits.grad.double().numpy(),
        "grad_dtype": str(logits.grad.dtype),
        "untouched": bool(torch.equal(logits.detach(), before)),
    }


def expected(vocab_size: int, scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Losses and gradient from the whole logits in fp64, rounded to `dtype` first."""
    logits = logits_of(vocab_size, scale).to(dtype).double().requires_grad_()
    losses = -logits.log_softmax(-1).gather(-1, labels_of(vocab_size)[..., None])[..., 0]
    (losses * cotangent_of(vocab_size)).sum().backward()
    return losses.detach(), logits.grad


def check(results: list[dict[str, Any]], losses: Tensor, grad: Tensor, tolerance: float) -> None:
    vocab_size = grad.shape[-1]
    for found in results:
        assert found["untouched"], "the caller's logits were overwritten"
        torch.testing.assert_close(torch.from_numpy(found["losses"]).double(), losses, rtol=tolerance, atol=tolerance)
    gathered = torch.cat([torch.from_numpy(found["grad"]) for found in results], dim=-1)
    torch.testing.assert_close(gathered[..., :vocab_size], grad, rtol=tolerance, atol=tolerance)
    assert (gathered[..., vocab_size:] == 0).all(), "padding rows got a gradient"


# Ranks and vocabulary: divisible; a rank half padding; one that starts where the vocabulary ends; one beyond its end.
SHAPES = [(2, 6), (3, 7), (3, 4), (4, 5)]


@pytest.mark.distributed
@pytest.mark.parametrize(("size", "vocab_size"), SHAPES)
def test_exact_in_fp64(size: int, vocab_size: int) -> None:
    """Catches wrong offsets, padding rows that take probability (theirs are the largest logits here) or a gradient."""
    results = run_ranks(_losses, size, vocab_size, 3.0, "float64", 50.0)
    check(results, *expected(vocab_size, 3.0), tolerance=1e-13)


@pytest.mark.distributed
def test_large_logits_do_not_overflow() -> None:
    """Catches a maximum taken per rank only: exp(1e4) is infinite in any dtype."""
    results = run_ranks(_losses, 3, 7, 1e4, "float32", 0.0)
    check(results, *expected(7, 1e4, torch.float32), tolerance=1e-6)


@pytest.mark.distributed
def test_bf16_logits_give_an_fp32_loss() -> None:
    """Catches a softmax in bf16; the gradient returns in the logits' dtype, rounded once."""
    results = run_ranks(_losses, 2, 7, 3.0, "bfloat16", 0.0)
    losses, grad = expected(7, 3.0, torch.bfloat16)
    for found in results:
        assert (found["losses"].dtype, found["grad_dtype"]) == ("float32", "torch.bfloat16")
        torch.testing.assert_close(torch.from_numpy(found["losses"]).double(), losses, rtol=1e-6, atol=1e-6)
    gathered = torch.cat([torch.from_numpy(found["grad"]) for found in results], dim=-1)[..., :7]
    torch.testing.assert_close(gathered, grad, rtol=2**-8, atol=1e-6)


def _in_place(vocab_size: int, dtype: str) -> dict[str, Any]:
    load(OpsConfig(Implementation.fused), print, cuda=False)
    axis = tensor_axis()
    rows = padded_rows(vocab_size, axis.size)
    whole = F.pad(logits_of(vocab_size), (0, rows * axis.size - vocab_size), value=50.0)
    logits = whole[..., axis.rank * rows : (axis.rank + 1) * rows].to(getattr(torch, dtype)).requires_grad_()
    weights = cotangent_of(vocab_size).float()
    loss = loss_in_place(logits, labels_of(vocab_size), weights, vocab_size, axis)
    (gradient,) = torch.autograd.grad(loss, logits)
    return {"loss": loss.item(), "grad": gradient.double().numpy()}


@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("size", "vocab_size"), SHAPES)
def test_kernels_over_ranks(size: int, vocab_size: int) -> None:
    """Catches sums over own rows only, padding that counts, and a gradient written before the ranks' sums are known."""
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 2**-8)):
        results = run_ranks(_in_place, size, vocab_size, dtype)
        losses, grad = expected(vocab_size, 3.0, getattr(torch, dtype))
        loss = (losses * cotangent_of(vocab_size)).sum()
        assert all(
            abs(found["loss"] - loss) <= 1e-6 * (losses * cotangent_of(vocab_size)).abs().sum() for found in results
        )
        gathered = torch.cat([torch.from_numpy(found["grad"]) for found in results], dim=-1)
        torch.testing.assert_close(gathered[..., :vocab_size], grad, rtol=tolerance, atol=1e-6)
        assert (gathered[..., vocab_size:] == 0).all(), "padding rows got a gradient"


def test_one_rank_is_the_plain_cross_entropy() -> None:
    """Catches a collective without a group, and a gradient that finite differences disprove."""
    axis = single_rank_grid().tp
    logits, labels = logits_of(5).requires_grad_(), labels_of(5)
    torch.testing.assert_close(vocab_parallel_token_losses(logits, labels, 5, axis), expected(5, 3.0)[0])
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_token_losses(x, labels, 5, axis), (logits,))
