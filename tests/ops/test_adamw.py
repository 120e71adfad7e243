"""The AdamW kernel against fp64 and against torch's fused AdamW."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from megads.ops.adamw import AdamWStep, adamw, adamw_reference
from tests.ops.accuracy import denormals, relative_error

pytestmark = pytest.mark.usefixtures("kernels")

HOW = AdamWStep(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, step=1)
CLIP = torch.tensor(0.37)


def state(numel: int, weights: torch.dtype) -> list[Tensor]:
    """Master weights, both moments, and an empty tensor for the working weights."""
    master = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    return [master, torch.zeros(numel), torch.zeros(numel), torch.empty(numel, dtype=weights)]


def by_torch(tensors: list[Tensor], grad: Tensor, how: AdamWStep) -> None:
    """The update of ops.impl=torch."""
    master, exp_avg, exp_avg_sq, weights = tensors
    torch_adamw(
        [master], [grad * CLIP], [exp_avg], [exp_avg_sq], [], [torch.tensor(how.step - 1.0)],
        fused=True, amsgrad=False, beta1=how.betas[0], beta2=how.betas[1], lr=how.lr, weight_decay=how.weight_decay,
        eps=how.eps, maximize=False,
    )  # fmt: skip
    weights.copy_(master)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 15, 1031, 70_001])
def test_adamw_is_no_further_from_fp64_than_torch(numel: int, weights: torch.dtype) -> None:
    """Catches a wrong bias correction, weight decay after the update, a gradient that is not clipped or clipped twice,
    a tail after the last full vector that is not updated, and weights that are not the rounded master weights."""
    ours, theirs = state(numel, weights), state(numel, weights)
    exact = [tensor.double() for tensor in ours]
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 13):
        # Gradients of 1e-12 to 1e4: eps dominates the denominator for some elements, the root for others.
        grad = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-12, 5, (numel,), generator=generator)
        how = replace(HOW, step=step)
        adamw(*ours, grad, CLIP, how)
        by_torch(theirs, grad, how)
        adamw_reference(*exact, grad.double(), CLIP, how)
    for found, torchs, right in zip(ours[:3], theirs, exact, strict=False):
        assert relative_error(found, right) <= max(1.05 * relative_error(torchs, right), 1e-7)
    assert torch.equal(ours[3], ours[0].to(weights))


def test_adamw_bits_depend_neither_on_threads_nor_on_pieces() -> None:
    """Catches elements updated twice or not at all at thread boundaries, and replicas that diverge (N8)."""
    grad = torch.randn(50_003)
    whole, cut = state(50_003, torch.bfloat16), state(50_003, torch.bfloat16)
    threads = torch.get_num_threads()
    adamw(*whole, grad, CLIP, HOW)
    try:
        torch.set_num_threads(3)
        for piece in (slice(0, 17_001), slice(17_001, None)):
            adamw(*(tensor[piece] for tensor in cut), grad[piece], CLIP, HOW)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_moments_without_gradients_decay_to_zero() -> None:
    """Catches denormal moments that never reach zero: rows of tokens that do not occur took 5 to 10 times as long."""
    tensors = state(33, torch.bfloat16)
    tensors[1].fill_(1e-3)
    tensors[2].fill_(1e-6)
    for step in range(1, 1901):
        adamw(*tensors, torch.zeros(33), CLIP, replace(HOW, step=step, betas=(0.9, 0.95)))
        assert denormals(tensors[1]) == denormals(tensors[2]) == 0
    assert (tensors[1] == 0).all()
    assert (tensors[2] == 0).all()


def test_mismatched_tensors_are_refused_and_empty_ones_accepted() -> None:
    """Catches a kernel that reads past the end of a shorter or strided tensor, and one that fails on empty tensors."""
    adamw(*state(0, torch.bfloat16), torch.empty(0), CLIP, HOW)
    with pytest.raises(RuntimeError, match="one length"):
        adamw(*state(8, torch.bfloat16), torch.ones(7), CLIP, HOW)
    with pytest.raises(RuntimeError, match="contiguous"):
        adamw(*state(8, torch.bfloat16), torch.ones(16)[::2], CLIP, HOW)
    with pytest.raises(RuntimeError, match="one fp32 number"):
        adamw(*state(8, torch.bfloat16), torch.ones(8), CLIP.double(), HOW)


@pytest.mark.parametrize("clip", [float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(clip: float) -> None:
    """Catches a step that should be skipped but changes a moment or a weight, which cannot be undone."""
    start, grad = state(1031, torch.bfloat16), torch.full((1031,), float("nan"))
    start[3].copy_(start[0])
    for function in (adamw, adamw_reference):
        after = [tensor.clone() for tensor in start]
        function(*after, grad, torch.tensor(clip), HOW)
        assert all(torch.equal(a, b) for a, b in zip(after, start, strict=True))


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a schema that does not declare mutated tensors: torch.compile would drop or reorder the update."""
    arguments = (*state(33, torch.bfloat16), torch.ones(33), torch.ones(()), 1e-3, 0.1, 0.9, 0.95, 1e-8, 2)
    torch.library.opcheck(torch.ops.megads.adamw_step.default, arguments)
