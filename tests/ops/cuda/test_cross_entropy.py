"""The CUDA cross-entropy kernels, run lane by lane on the CPU, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.cross_entropy import gradient_reference, statistics_reference
from tests.ops.accuracy import check_error
from tests.ops.cuda.lanes import Lanes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ours(logits: Tensor, labels: Tensor, valid: int, start: int, grad: Tensor, **how: int) -> tuple[Tensor, Tensor]:
    """Returns the statistics, and the gradient with this part as the whole vocabulary; it overwrites the logits."""
    with Lanes("cross_entropy", **how) as lanes:
        rows, columns = logits.shape
        shape = (logits.dtype, rows, columns, valid, start)
        statistics = lanes.empty((rows, 3), torch.float32)
        lanes.call("cross_entropy_forward", *shape, logits, labels, statistics)
        largest, total = statistics[:, 0].contiguous(), statistics[:, 1].contiguous()
        found = lanes.place(logits)
        lanes.call("cross_entropy_backward", *shape, found, labels, largest, total, grad, found)
        return statistics.clone(), found.clone()


def reference(logits: Tensor, labels: Tensor, valid: int, start: int, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same results of plain torch, in the dtype of the logits."""
    found = statistics_reference(logits, labels, valid, start)
    return torch.stack(found, 1), gradient_reference(logits, labels, *found[:2], grad.to(logits.dtype), valid, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "valid", "residue"), [(1, 1, 1), (37, 37, 5), (1024, 1000, 0), (1024, 1003, 3), (8203, 8203, 3)]
)
def test_error_is_within_twice_torchs(columns: int, valid: int, residue: int, dtype: torch.dtype) -> None:
    """Catches wrong tails, padding that gets probability, and sums that are not rescaled when the maximum grows."""
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(24, columns, generator=generator, dtype=torch.float64)).to(dtype)
    logits[0] = torch.linspace(-20, 20, columns).to(dtype)  # increasing, so that the maximum changes often
    labels = torch.randint(0, valid, (24,), generator=generator)
    labels[-1] = valid  # on another rank
    grad = torch.linspace(0.5, 2.0, 24)
    exact = reference(logits.double(), labels, valid, 0, grad.double())
    eager = reference(logits, labels, valid, 0, grad)
    statistics, gradient = ours(logits, labels + 7, valid, 7, grad, order=columns, residue=residue)
    assert torch.equal(statistics[:, [0, 2]].double(), exact[0][:, [0, 2]])
    torch.testing.assert_close(statistics[:, 1].double(), exact[0][:, 1], rtol=1e-6, atol=0)
    if columns > 1:
        check_error(gradient, eager[1], exact[1])
    else:
        assert torch.equal(gradient.double(), exact[1])
    assert not gradient[:, valid:].any()


def test_extreme_logits_stay_finite_or_show() -> None:
    """Catches exp of a large logit, -inf that becomes NaN, and a NaN or an infinity that the sum does not show."""
    infinity = float("inf")
    logits = torch.tensor([[1e4, 0.0, -1e4], [-infinity, 2.0, 1.0], [0.0, float("nan"), 0.0], [0.0, infinity, 0.0]])
    statistics, gradient = ours(logits, torch.tensor([0, 1, 0, 0]), 3, 0, torch.ones(4))
    exact = (logits.double().softmax(-1) - torch.tensor([[1.0, 0, 0], [0, 1.0, 0]] * 2))[:2]
    torch.testing.assert_close(gradient[:2].double(), exact, rtol=1e-6, atol=1e-7)
    assert statistics[2:, 1].isnan().all() and gradient[2:].isnan().any(-1).all()
    nothing = ours(torch.full((1, 4), -infinity), torch.tensor([0]), 4, 0, torch.ones(1))[0]
    assert nothing[0, 0] == -infinity and nothing[0, 1] == 0


def test_empty_rows_and_all_padding_columns_are_valid() -> None:
    """Catches a launch of zero blocks, and wrong results on a rank whose columns are all padding."""
    assert ours(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), 7, 0, torch.empty(0))[1].shape == (0, 7)
    statistics, gradient = ours(torch.randn(2, 7), torch.tensor([0, 1]), 0, 300, torch.ones(2))
    assert statistics.tolist() == [[-float("inf"), 0.0, 0.0]] * 2 and not gradient.any()
