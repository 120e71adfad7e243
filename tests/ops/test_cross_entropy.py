"""The cross entropy kernels against fp64; over ranks they are tested in tests/parallel/test_cross_entropy.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.cross_entropy import gradient, gradient_reference, statistics, statistics_reference
from megads.parallel.cross_entropy import vocab_parallel_token_losses
from megads.parallel.grid import single_rank_grid
from tests.ops.accuracy import check_error

pytestmark = pytest.mark.usefixtures("kernels")

AXIS = single_rank_grid().tp


def losses_and_gradient(logits: Tensor, labels: Tensor, fused: bool) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    losses = vocab_parallel_token_losses(logits, labels, logits.shape[-1], AXIS, fused)
    (losses * torch.linspace(0.5, 2.0, labels.numel()).view_as(labels)).sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1, 37, 1024, 5003])
def test_error_is_that_of_the_dtype(vocabulary: int, dtype: torch.dtype) -> None:
    """Catches a wrong tail, a sum in bf16, and a gradient that is rounded more than once."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (4 * torch.randn(2, 9, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, vocabulary, (2, 9), generator=generator)
    exact = losses_and_gradient(logits.double(), labels, True)
    found, eager = losses_and_gradient(logits, labels, True), losses_and_gradient(logits, labels, False)
    if vocabulary == 1:
        assert (found[0] == 0).all() and (found[1] == 0).all()
        return
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        check_error(ours, theirs, right)


@pytest.mark.parametrize(("valid", "start"), [(100, 0), (77, 100), (0, 300)])
def test_a_part_of_the_vocabulary(valid: int, start: int) -> None:
    """Catches padding that takes probability or gets a gradient, and a label that is another rank's."""
    logits, labels = torch.randn(8, 100), torch.tensor([0, 99, 100, 150, 176, 177, 199, 300])
    found = statistics(logits, labels, valid, start)
    for ours, right in zip(found, statistics_reference(logits.double(), labels, valid, start), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=1e-6)
    whole = (torch.full((8,), 3.0), torch.full((8,), 900.0), torch.linspace(-1, 1, 8))
    ours = gradient(logits, labels, *whole, valid, start)
    right = gradient_reference(logits.double(), labels, *(x.double() for x in whole), valid, start)
    torch.testing.assert_close(ours.double(), right, rtol=1e-6, atol=1e-9)


def test_extreme_logits() -> None:
    """Catches exp of a large logit, -inf that becomes NaN, and a NaN or an infinity that the loss does not show."""
    infinity = float("inf")
    logits = torch.tensor([[1e4, 0.0, -1e4], [-infinity, 2.0, 1.0], [0.0, float("nan"), 0.0], [0.0, infinity, 0.0]])
    labels = torch.tensor([0, 1, 0, 0])
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    losses, grad = losses_and_gradient(logits[None].repeat(1, 1, 7)[..., :3], labels[None], True)
    torch.testing.assert_close(losses[0, :2].double(), expected[:2])
    assert not losses[0, 2:].isfinite().any() and not grad[0, 2:].isfinite().all(-1).any()


def test_keeps_the_logits_alone_and_leaves_them_as_they_are() -> None:
    """Catches an fp32 copy of the logits kept for backward, which is what the kernel is there to save."""
    logits = torch.randn(1, 4, 5000, dtype=torch.bfloat16, requires_grad=True)
    before, kept = logits.detach().clone(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        losses = vocab_parallel_token_losses(logits, torch.zeros(1, 4, dtype=torch.int64), 5000, AXIS, True)
    assert sum(x.numel() * x.itemsize for x in kept if x.data_ptr() != logits.data_ptr()) < 100
    losses.sum().backward()
    assert torch.equal(logits.detach(), before) and logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_nothing_and_views() -> None:
    """Catches a batch of no tokens, and logits that are not contiguous."""
    assert vocab_parallel_token_losses(
        torch.empty(0, 3, 7), torch.empty(0, 3, dtype=torch.int64), 7, AXIS, True
    ).shape == (0, 3)
    logits, labels = torch.randn(3, 2, 7).transpose(0, 1), torch.tensor([[0, 1, 2], [3, 4, 6]])
    for ours, right in zip(
        losses_and_gradient(logits, labels, True), losses_and_gradient(logits, labels, False), strict=True
    ):
        torch.testing.assert_close(ours, right)


def test_what_torch_must_know() -> None:
    """Catches a schema or a fake implementation under which torch.compile goes wrong."""
    logits, labels, row = torch.randn(3, 9), torch.tensor([1, 2, 8]), torch.ones(3)
    torch.library.opcheck(torch.ops.megads.cross_entropy_forward.default, (logits, labels, 9, 0))
    torch.library.opcheck(torch.ops.megads.cross_entropy_backward.default, (logits, labels, row, row, row, 9, 0))
