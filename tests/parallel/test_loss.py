"""Vocabulary-parallel cross entropy, and output projection and loss in chunks, against both on the full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megads.ops.config import FUSED, TORCH, Implementation, OpsConfig, chunk_tokens
from megads.ops.linear import linear
from megads.ops.resolve import load
from megads.parallel.config import padded_rows
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import Targets, head_loss, loss_in_place, vocab_parallel_token_losses
from megads.parallel.region_linear import Region
from megads.parallel.weight_gradients import WeightGradients
from tests.distributed import run_ranks
from tests.parallel.main_grads import FlatMainGrads
from tests.parallel.test_region_linear import tensor_axis

HIDDEN, SEQ_LEN = 24, 12
KERNELS = {True: FUSED, False: TORCH}


def logits_of(vocab_size: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(
        2, vocab_size, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def labels_of(vocab_size: int) -> Tensor:
    """Every token is a label, so every rank that has rows holds one."""
    return torch.stack([torch.arange(vocab_size), torch.arange(vocab_size).flip(0)])


def cotangent_of(vocab_size: int) -> Tensor:
    return torch.randn(2, vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _losses(vocab_size: int, scale: float, dtype: str, padding: float, z_loss: float = 0.0) -> dict[str, Any]:
    axis = tensor_axis()
    rows = padded_rows(vocab_size, axis.size)
    whole = F.pad(logits_of(vocab_size, scale), (0, rows * axis.size - vocab_size), value=padding)
    logits = whole[..., axis.rank * rows : (axis.rank + 1) * rows].to(getattr(torch, dtype)).requires_grad_()
    before = logits.detach().clone()
    losses = vocab_parallel_token_losses(logits, labels_of(vocab_size), vocab_size, axis, z_loss)
    (losses * cotangent_of(vocab_size).to(losses.dtype)).sum().backward()
    return {
        "losses": losses.detach().numpy(),
        "grad": logits.grad.double().numpy(),
        "grad_dtype": str(logits.grad.dtype),
        "untouched": bool(torch.equal(logits.detach(), before)),
    }


def expected(
    vocab_size: int, scale: float, dtype: torch.dtype = torch.float64, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Losses and gradient from the full logits in fp64, rounded to `dtype` first; z-loss in the gradient only."""
    logits = logits_of(vocab_size, scale).to(dtype).double().requires_grad_()
    losses = -logits.log_softmax(-1).gather(-1, labels_of(vocab_size)[..., None])[..., 0]
    drift = z_loss * logits.logsumexp(-1).square()
    ((losses + drift) * cotangent_of(vocab_size)).sum().backward()
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
def test_the_loss_is_exact_in_fp64(size: int, vocab_size: int) -> None:
    """Catches wrong offsets, and padding rows that get probability (theirs are the largest logits) or a gradient."""
    results = run_ranks(_losses, size, vocab_size, 3.0, "float64", 50.0)
    check(results, *expected(vocab_size, 3.0), tolerance=1e-13)


@pytest.mark.distributed
@pytest.mark.quick("2-6", "4-5")
@pytest.mark.parametrize(("size", "vocab_size"), SHAPES)
def test_z_loss_is_exact_in_fp64(size: int, vocab_size: int) -> None:
    """Catches a Z of local rows only or without the largest logit, a missing factor, and a loss including z-loss."""
    results = run_ranks(_losses, size, vocab_size, 3.0, "float64", 50.0, 0.1)
    check(results, *expected(vocab_size, 3.0, z_loss=0.1), tolerance=1e-13)


@pytest.mark.distributed
def test_large_logits_do_not_overflow() -> None:
    """Catches a maximum that is not all-reduced over ranks: exp(1e4) is infinite in any dtype."""
    results = run_ranks(_losses, 3, 7, 1e4, "float32", 0.0)
    check(results, *expected(7, 1e4, torch.float32), tolerance=1e-6)


@pytest.mark.distributed
def test_bf16_logits_give_an_fp32_loss() -> None:
    """Catches a softmax computed in bf16; the gradient has the logits' dtype, rounded once."""
    results = run_ranks(_losses, 2, 7, 3.0, "bfloat16", 0.0)
    losses, grad = expected(7, 3.0, torch.bfloat16)
    for found in results:
        assert (found["losses"].dtype, found["grad_dtype"]) == ("float32", "torch.bfloat16")
        torch.testing.assert_close(torch.from_numpy(found["losses"]).double(), losses, rtol=1e-6, atol=1e-6)
    gathered = torch.cat([torch.from_numpy(found["grad"]) for found in results], dim=-1)[..., :7]
    torch.testing.assert_close(gathered, grad, rtol=2**-8, atol=1e-6)


def _in_place(vocab_size: int, dtype: str, z_loss: float) -> dict[str, Any]:
    load(OpsConfig(Implementation.fused), print, cuda=False)
    axis = tensor_axis()
    rows = padded_rows(vocab_size, axis.size)
    whole = F.pad(logits_of(vocab_size), (0, rows * axis.size - vocab_size), value=50.0)
    logits = whole[..., axis.rank * rows : (axis.rank + 1) * rows].to(getattr(torch, dtype)).requires_grad_()
    weights = cotangent_of(vocab_size).float()
    loss = loss_in_place(logits, labels_of(vocab_size), weights, vocab_size, axis, z_loss)
    (gradient,) = torch.autograd.grad(loss, logits)
    return {"loss": loss.item(), "grad": gradient.double().numpy()}


@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.quick("2-6", "4-5")
@pytest.mark.parametrize(("size", "vocab_size"), SHAPES)
def test_kernels_compute_the_loss_over_ranks(size: int, vocab_size: int) -> None:
    """Catches sums over local rows only, padding that counts, and a gradient written before the all-reduce."""
    for dtype, tolerance, z_loss in (("float32", 1e-6, 0.0), ("bfloat16", 2**-8, 0.0), ("float32", 2e-6, 0.1)):
        results = run_ranks(_in_place, size, vocab_size, dtype, z_loss)
        losses, grad = expected(vocab_size, 3.0, getattr(torch, dtype), z_loss)
        loss = (losses * cotangent_of(vocab_size)).sum()
        assert all(
            abs(found["loss"] - loss) <= 1e-6 * (losses * cotangent_of(vocab_size)).abs().sum() for found in results
        )
        gathered = torch.cat([torch.from_numpy(found["grad"]) for found in results], dim=-1)
        torch.testing.assert_close(gathered[..., :vocab_size], grad, rtol=tolerance, atol=1e-6)
        assert (gathered[..., vocab_size:] == 0).all(), "padding rows got a gradient"


def test_one_rank_is_the_plain_cross_entropy() -> None:
    """Catches a collective without a process group, and a gradient that differs from finite differences."""
    axis = single_rank_grid().tp
    logits, labels = logits_of(5).requires_grad_(), labels_of(5)
    torch.testing.assert_close(vocab_parallel_token_losses(logits, labels, 5, axis), expected(5, 3.0)[0])
    assert torch.autograd.gradcheck(lambda x: vocab_parallel_token_losses(x, labels, 5, axis), (logits,))


def drawn(vocab_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, labels, and token weights, some of which are masked."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, SEQ_LEN, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocab_size, HIDDEN, dtype=torch.float64, generator=generator)
    labels = torch.randint(vocab_size, (2, SEQ_LEN), generator=generator)
    weights = torch.rand(2, SEQ_LEN, generator=generator) * (torch.rand(2, SEQ_LEN, generator=generator) < 0.7)
    return x, weight, labels, weights.double()


def expected_loss(vocab_size: int, dtype: torch.dtype, z_loss: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of input and weight, from the full logits in fp64; inputs are rounded to `dtype` first."""
    x, weight, labels, weights = drawn(vocab_size)
    x, weight = (tensor.to(dtype).double().requires_grad_() for tensor in (x, weight))
    logits = (x @ weight.T).flatten(0, 1)
    loss = (F.cross_entropy(logits, labels.flatten(), reduction="none") * weights.flatten()).sum()
    drift = z_loss * (logits.logsumexp(-1).square() * weights.flatten()).sum()
    return loss.detach(), *torch.autograd.grad(loss + drift, (x, weight))


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("chunk", "z_loss"), [(1, 0.0), (7, 0.0), (12, 0.0), (24, 0.0), (7, 0.01)])
@pytest.mark.parametrize(
    ("dtype", "fused"),
    [(torch.float64, False), (torch.float32, False), (torch.bfloat16, False), (torch.float32, True),
     (torch.bfloat16, True)],
)  # fmt: skip
def test_chunked_loss_and_gradients_equal_those_of_full_logits(
    dtype: torch.dtype, fused: bool, chunk: int, z_loss: float
) -> None:
    """Catches a chunk that is lost or counted twice, or overwrites another's gradient, and accumulation in bf16."""
    x, weight, labels, weights = drawn(37)
    x, parameter = x.to(dtype).requires_grad_(), nn.Parameter(weight.to(dtype))
    region = Region(single_rank_grid().tp, kernels=KERNELS[fused])
    loss = head_loss(x, parameter, Targets(labels, weights, 37, chunk, KERNELS[fused], z_loss), region, None)
    wanted, *gradients = expected_loss(37, dtype, z_loss)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(loss, wanted, rtol=min(tolerance, 2e-3), atol=0.0)
    for found, right in zip(torch.autograd.grad(loss, (x, parameter)), gradients, strict=True):
        assert found.dtype is dtype
        assert (found.double() - right).norm() <= tolerance * right.norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fused", [False, True])
def test_a_weights_gradient_goes_straight_to_main_grad(fused: bool) -> None:
    """Catches a gradient that is also returned to autograd, one marked done once per chunk, and a lost micro-batch."""
    x, weight, labels, weights = drawn(37)
    x, parameter = x.float().requires_grad_(), nn.Parameter(weight.float())
    sums, region = FlatMainGrads(parameter), Region(single_rank_grid().tp, kernels=KERNELS[fused])
    for number in (1, 2):
        loss = head_loss(x, parameter, Targets(labels, weights, 37, 5, KERNELS[fused]), region, WeightGradients(sums))
        assert sums.finished == number - 1
        loss.backward()
        assert parameter.grad is None and sums.finished == number
    right = 2 * expected_loss(37, torch.float32)[2]
    assert (sums.sums - right).norm() <= 2e-6 * right.norm()


def test_validation_makes_no_gradients() -> None:
    """Catches validation that adds to main_grad: ctx.needs_input_grad ignores no_grad."""
    x, weight, labels, weights = drawn(37)
    parameter = nn.Parameter(weight.float())
    sums = FlatMainGrads(parameter)
    with torch.no_grad():
        targets, region = Targets(labels, weights, 37, 5), Region(single_rank_grid().tp)
        loss = head_loss(x.float(), parameter, targets, region, WeightGradients(sums))
    torch.testing.assert_close(loss, expected_loss(37, torch.float32)[0], rtol=2e-6, atol=0.0)
    assert sums.sums.isnan().all() and not loss.requires_grad


def test_a_loss_whose_gradient_is_in_main_grad_cannot_be_scaled() -> None:
    """Catches a loss that is scaled after its gradient is in main_grad: only part of the gradients would be scaled."""
    x, weight, labels, weights = drawn(37)
    parameter = nn.Parameter(weight.float())
    gradients = WeightGradients(FlatMainGrads(parameter))
    region, targets = Region(single_rank_grid().tp), Targets(labels, weights, 37, 5)
    loss = head_loss(x.float().requires_grad_(), parameter, targets, region, gradients)
    with pytest.raises(AssertionError, match="cannot be scaled"):
        (3 * loss).backward()
    x = x.requires_grad_()
    (once,) = torch.autograd.grad(head_loss(x, nn.Parameter(weight), targets, region, None), x)
    (tripled,) = torch.autograd.grad(3 * head_loss(x, nn.Parameter(weight), targets, region, None), x)
    torch.testing.assert_close(tripled, 3 * once)


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_full_logits_are_never_allocated(trains: bool, fused: bool) -> None:
    """Catches a tensor as large as the full logits, in the forward or backward pass, in training or validation."""
    x, labels = torch.randn(2, 64, 8), torch.randint(500, (2, 64))
    weight = nn.Parameter(torch.randn(500, 8))
    with _Largest() as seen, torch.set_grad_enabled(trains):
        kernels = KERNELS[fused]
        targets, region = (
            Targets(labels, torch.ones(2, 64), 500, 16, kernels),
            Region(single_rank_grid().tp, kernels=kernels),
        )
        loss = head_loss(x.requires_grad_(trains), weight, targets, region, None)
        if trains:
            loss.backward()
    assert seen.elements == 16 * 500
    whole = F.cross_entropy(linear(x, weight, None, TORCH).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.float(), whole)


def test_chunks_stay_within_their_memory_budget() -> None:
    """Catches logits over their memory budget, more chunks than needed, and an empty chunk if one row exceeds it."""
    assert chunk_tokens(8192, 2 * 32000, "cpu") == 4096
    assert chunk_tokens(2048, 2 * 32000, "cpu") == 2048
    assert chunk_tokens(16384, 2 * 250880, "cuda") == 2048
    assert chunk_tokens(3, 1 << 40, "cpu") == 1
    assert chunk_tokens(100, 1, "cpu", asked=40) == 34
    assert [part.stop - part.start for part in Targets(torch.zeros(2, 50), torch.zeros(2, 50), 9, 34).parts] == [
        33, 33, 34,
    ]  # fmt: skip


def _over_ranks(vocab_size: int, dtype: str, sequence_parallel: bool, fused: bool) -> dict[str, Any]:
    load(OpsConfig(Implementation.fused), print, cuda=False)
    axis = tensor_axis()
    rows, share = padded_rows(vocab_size, axis.size), SEQ_LEN // axis.size
    x, weight, labels, weights = drawn(vocab_size)
    own = F.pad(weight, (0, 0, 0, rows * axis.size - vocab_size), value=50.0)[axis.rank * rows :][:rows]
    x = x[:, axis.rank * share :][:, :share] if sequence_parallel else x
    x, parameter = x.to(getattr(torch, dtype)).requires_grad_(), nn.Parameter(own.to(getattr(torch, dtype)))
    region = Region(axis, sequence_parallel, kernels=KERNELS[fused])
    loss = head_loss(x, parameter, Targets(labels, weights, vocab_size, 5, KERNELS[fused]), region, None)
    of_x, of_weight = torch.autograd.grad(loss, (x, parameter))
    return {"loss": loss.item(), "x": of_x.double().numpy(), "weight": of_weight.double().numpy()}


@pytest.mark.distributed
@pytest.mark.usefixtures("kernels")
@pytest.mark.quick("2-6-True", "4-5-False")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("size", "vocab_size"), SHAPES)
def test_chunked_loss_is_right_over_ranks(size: int, vocab_size: int, sequence_parallel: bool) -> None:
    """Catches softmax statistics of local rows only, an input gradient not all-reduced, and padding that counts."""
    for dtype, fused in ((torch.float64, False), (torch.float32, True)):
        results = run_ranks(_over_ranks, size, vocab_size, str(dtype).removeprefix("torch."), sequence_parallel, fused)
        loss, of_x, of_weight = expected_loss(vocab_size, dtype)
        shares = [torch.from_numpy(found["x"]) for found in results]
        rows = torch.cat([torch.from_numpy(found["weight"]) for found in results])
        tolerance = TOLERANCE[dtype]
        for found in shares if not sequence_parallel else [torch.cat(shares, dim=1)]:
            assert (found - of_x).norm() <= tolerance * of_x.norm()
        assert (rows[:vocab_size] - of_weight).norm() <= tolerance * of_weight.norm()
        assert (rows[vocab_size:] == 0).all(), "padding rows got a gradient"
        assert all(abs(found["loss"] / loss - 1) <= tolerance for found in results)
