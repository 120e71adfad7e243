"""The cross entropy kernels against fp64; over ranks they are tested in tests/parallel/test_loss.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.cross_entropy import gradient_, gradient_reference, loss_, statistics, statistics_reference
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses
from tests.ops.accuracy import check_errors, check_threads

pytestmark = pytest.mark.usefixtures("kernels")

AXIS = single_rank_grid().tp


def weights_of(labels: Tensor) -> Tensor:
    return torch.linspace(0.5, 2.0, labels.numel()).view_as(labels)


def eager(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the losses of the tokens, and the gradient of their weighted sum."""
    logits = logits.detach().requires_grad_()
    losses = vocab_parallel_token_losses(logits, labels, logits.shape[-1], AXIS)
    (losses * weights_of(labels)).sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


def fused(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same from the kernels, on a copy of the logits."""
    vocabulary = logits.shape[-1]
    found = statistics(logits.flatten(0, 1).contiguous(), labels.flatten(), vocabulary, 0)
    largest, total, target = found
    losses = (total.log() - (target - largest)).view_as(labels)
    logits = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    loss = loss_in_place(logits, labels, weights_of(labels), vocabulary, AXIS)
    torch.testing.assert_close(loss, (losses.double() * weights_of(labels)).sum(), equal_nan=True)
    (gradient,) = torch.autograd.grad(loss, logits)
    return losses, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 37, 1024, 5003])
def test_error_is_within_twice_torchs(vocabulary: int, dtype: torch.dtype) -> None:
    """Catches a wrong tail, accumulation in bf16, and a gradient that is rounded more than once."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(2, 9, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 9), generator=generator)
    found = fused(logits, labels)
    if vocabulary == 1:
        assert (found[0] == 0).all() and (found[1] == 0).all()
        return
    check_errors(found, eager(logits, labels), eager(logits.double(), labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_in_place_pass_equals_the_two_pass_one(dtype: torch.dtype) -> None:
    """Catches a row that is overwritten before it is read, and bits that depend on the number of threads.

    Without AVX-512 one pass keeps exponentials that two passes compute twice, so gradients differ by roundings.
    """
    logits, labels = torch.randn(50, 3000).to(dtype), torch.randint(0, 3000, (50,))
    weights = torch.linspace(-1, 1, 50)
    largest, total, target = statistics(logits, labels, 2990, 0)
    expected = logits.clone()
    gradient_(expected, labels, largest, total, weights, 2990, 0)

    def one_pass() -> list[Tensor]:
        gradient = logits.clone()
        return [gradient, *loss_(gradient, labels, weights, 2990, 0)]

    gradient, *found = one_pass()
    assert all(map(torch.equal, found, (largest, total, target)))
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(gradient, expected, rtol=rounding, atol=1e-8)
    check_threads(one_pass, 1, 2, 3)


@pytest.mark.parametrize(("valid", "start"), [(100, 0), (77, 100), (0, 300)])
def test_a_vocabulary_shard_ignores_padding_and_other_labels(valid: int, start: int) -> None:
    """Catches padding that gets probability or a gradient, and a label in another rank's shard that is used."""
    logits, labels = torch.randn(8, 100), torch.tensor([0, 99, 100, 150, 176, 177, 199, 300])
    found = statistics(logits, labels, valid, start)
    for ours, right in zip(found, statistics_reference(logits.double(), labels, valid, start), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=1e-6)
    whole = (torch.full((8,), 3.0), torch.full((8,), 900.0), torch.linspace(-1, 1, 8))
    right = gradient_reference(logits.double(), labels, *(x.double() for x in whole), valid, start)
    gradient_(logits, labels, *whole, valid, start)
    torch.testing.assert_close(logits.double(), right, rtol=1e-6, atol=1e-9)


def test_extreme_logits_stay_finite_or_show() -> None:
    """Catches an overflow of exp, -inf that becomes NaN, and a NaN or an infinity that does not reach the loss."""
    infinity = float("inf")
    logits = torch.tensor([[1e4, 0.0, -1e4], [-infinity, 2.0, 1.0], [0.0, float("nan"), 0.0], [0.0, infinity, 0.0]])
    labels = torch.tensor([0, 1, 0, 0])
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    losses, grad = fused(logits[None].repeat(1, 1, 7)[..., :3], labels[None])
    torch.testing.assert_close(losses[0, :2].double(), expected[:2])
    assert not losses[0, 2:].isfinite().any() and not grad[0, 2:].isfinite().all(-1).any()


def test_the_gradient_takes_the_memory_of_the_logits() -> None:
    """Catches a second tensor of the size of the logits, which the kernel is meant to save."""
    hidden = torch.randn(1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    logits, kept = hidden @ torch.randn(8, 5000).bfloat16(), []
    place = logits.data_ptr()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = loss_in_place(logits, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4), 5000, AXIS)
    assert [x.data_ptr() for x in kept] == [place]
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.data_ptr() == place and gradient.dtype == torch.bfloat16


def test_saved_logits_that_are_overwritten_raise() -> None:
    """Catches a silently wrong gradient if another operation saved the logits for its backward pass."""
    logits = torch.randn(1, 4, 9, requires_grad=True) * 1
    squares = logits.square().sum()
    loss_in_place(logits, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4), 9, AXIS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


def test_without_a_gradient_the_logits_stay() -> None:
    """Catches a validation that overwrites the logits, and a scaled loss whose gradient is not scaled."""
    logits, labels = torch.randn(1, 4, 9), torch.zeros(1, 4, dtype=torch.int64)
    before = logits.clone()
    value = loss_in_place(logits, labels, torch.ones(1, 4), 9, AXIS)
    assert torch.equal(logits, before)
    leaf = logits.clone().requires_grad_()
    (tripled,) = torch.autograd.grad(3 * loss_in_place(leaf, labels, torch.ones(1, 4), 9, AXIS), leaf)
    other = logits.clone().requires_grad_()
    same = F.cross_entropy(other[0], labels[0], reduction="sum")
    torch.testing.assert_close(value.float(), same)
    torch.testing.assert_close(tripled, torch.autograd.grad(3 * same, other)[0])


def test_empty_and_strided_logits_are_valid() -> None:
    """Catches a failure for zero tokens, and non-contiguous logits that are misread."""
    none = loss_in_place(torch.empty(0, 3, 7), torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3), 7, AXIS)
    assert none == 0
    logits, labels = torch.randn(3, 2, 7).transpose(0, 1), torch.tensor([[0, 1, 2], [3, 4, 6]])
    for ours, right in zip(fused(logits, labels), eager(logits, labels), strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema or a fake implementation with which torch.compile fails."""
    logits, labels, row = torch.randn(3, 9), torch.tensor([1, 2, 8]), torch.ones(3)
    torch.library.opcheck(torch.ops.megads.cross_entropy_forward.default, (logits, labels, 9, 0))
    torch.library.opcheck(torch.ops.megads.cross_entropy_gradient_.default, (logits, labels, row, row, row, 9, 0))
    torch.library.opcheck(torch.ops.megads.cross_entropy_loss_.default, (logits, labels, row, 9, 0))
