"""The loss head on one process."""

from __future__ import annotations

import pytest
import torch

from megads.model.gpt import token_losses


def example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 11, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    return logits, torch.randint(0, 11, (2, 5), generator=generator)


def test_equals_log_softmax_written_out() -> None:
    """Catches a wrong row, a base other than e, and a mean where each token's loss is wanted."""
    logits, labels = example(torch.float64)
    losses = token_losses(logits, labels)
    assert losses.dtype is torch.float64 and losses.shape == (2, 5)
    for b in range(2):
        for s in range(5):
            row = logits[b, s]
            expected = row.exp().sum().log() - row[labels[b, s]]
            torch.testing.assert_close(losses[b, s], expected, rtol=1e-14, atol=1e-14)


def test_gradient_is_probability_minus_one_hot() -> None:
    """Catches a gradient that is averaged or scaled."""
    logits, labels = example(torch.float64)
    token_losses(logits, labels).sum().backward()
    expected = logits.detach().softmax(-1) - torch.nn.functional.one_hot(labels, 11)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp32_inside(dtype: torch.dtype) -> None:
    """Catches a softmax in bf16: the loss of bf16 logits is fp32 and as exact as fp32 allows."""
    logits, labels = example(dtype)
    losses = token_losses(logits, labels)
    assert losses.dtype is torch.float32
    torch.testing.assert_close(losses.double(), token_losses(logits.double(), labels), rtol=1e-6, atol=1e-6)


def test_uniform_logits_cost_the_log_of_the_vocabulary() -> None:
    """Catches bits for nats."""
    losses = token_losses(torch.zeros(1, 3, 250), torch.tensor([[0, 1, 249]]))
    torch.testing.assert_close(losses, torch.full((1, 3), 250.0).log())
