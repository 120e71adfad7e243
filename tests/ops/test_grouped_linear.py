"""GEMMs of experts: a loop over them, and one kernel of PyTorch's, which also runs on CPUs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megads.ops.config import FUSED, TORCH, Implementation, KernelOp, Kernels
from megads.ops.grouped_linear import (
    add_grouped_weight_gradient,
    grouped_linear,
    grouped_weight_gradient,
    is_one_kernel,
    linear_in_one_kernel,
    weight_gradient_in_one_kernel,
)
from megads.ops.token_dispatch import RowCounts

BF16 = torch.bfloat16
AUTO = Kernels(Implementation.auto, Implementation.auto)
COUNTS = [3, 0, 5, 1, 0]
ROWS, EXPERTS = sum(COUNTS), len(COUNTS)


def row_counts() -> RowCounts:
    return RowCounts(torch.tensor(COUNTS))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(inputs: int, outputs: int, transposed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    stored = draw(EXPERTS, *((inputs, outputs) if transposed else (outputs, inputs)), seed=1, dtype=dtype)
    return stored.mT if transposed else stored


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_are_those_of_each_expert(transposed: bool) -> None:
    """Catches rows multiplied by another expert's weight, and experts without rows whose gradient stays undefined."""
    x, grad, weights = draw(ROWS, 6), draw(ROWS, 8, seed=2), weights_of(6, 8, transposed)
    parts, of_grads = x.split(COUNTS), grad.split(COUNTS)
    out = grouped_linear(x, weights, row_counts(), TORCH)
    torch.testing.assert_close(out, torch.cat([parts[e] @ weights[e].T for e in range(EXPERTS)]))
    expected = torch.stack([of_grads[e].T @ parts[e] for e in range(EXPERTS)])
    torch.testing.assert_close(grouped_weight_gradient(grad, x, row_counts(), TORCH), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kernels", [TORCH, FUSED], ids=["torch", "fused"])
def test_weight_gradients_of_experts_accumulate_in_main_grad(kernels: Kernels) -> None:
    """Catches a first gradient added to old contents, a second one that overwrites it, and experts without rows whose
    main_grad is not zeroed by the first."""
    x, grad = draw(ROWS, 24), draw(ROWS, 40, seed=2)
    expected = torch.stack([g.T @ part for g, part in zip(grad.split(COUNTS), x.split(COUNTS), strict=True)])
    main_grad = torch.full((EXPERTS, 40, 24), torch.nan)
    for repeat in (1, 2):
        add_grouped_weight_gradient(main_grad, grad, x, row_counts(), repeat == 1, kernels)
        torch.testing.assert_close(main_grad, repeat * expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_kernel_computes_what_the_loop_does(transposed: bool, dtype: torch.dtype) -> None:
    """Catches ends of rows shifted by an expert, operands transposed the wrong way, and gradients of experts without
    rows that are not zero."""
    x, grad = draw(ROWS, 16, dtype=dtype), draw(ROWS, 24, seed=2, dtype=dtype)
    weights = weights_of(16, 24, transposed, dtype)
    close = partial(torch.testing.assert_close, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-3)
    counts = row_counts()
    close(linear_in_one_kernel(x, weights, counts), grouped_linear(x, weights, counts, TORCH))
    close(linear_in_one_kernel(grad, weights.mT, counts), grouped_linear(grad, weights.mT, counts, TORCH))
    found = weight_gradient_in_one_kernel(grad, x, counts)
    close(found, grouped_weight_gradient(grad, x, counts, TORCH))
    assert not found[[1, 4]].any()


def test_one_kernel_is_for_aligned_bf16_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the kernel used where its gradients of experts without rows are undefined, where PyTorch computes it in a
    loop, on sizes that it refuses, and where autotuning chose the loop."""
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    mode, gpu = FakeTensorMode(), torch.device("cuda", 0)

    def is_one(
        rows: int = 9, inputs: int = 16, dtype: torch.dtype = BF16, kernels: Kernels = FUSED, major: int = 9
    ) -> bool:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, 0))
        shapes = (rows, inputs), (4, 24, inputs)
        meta = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        x, weights = (FakeTensor(mode, each, gpu) for each in meta)
        return is_one_kernel(x, weights, kernels)

    assert is_one() and is_one(kernels=replace(AUTO, tuned=frozenset({KernelOp.grouped_linear})))
    assert not is_one(rows=0) and not is_one(inputs=12) and not is_one(dtype=torch.float32)
    assert not is_one(kernels=TORCH) and not is_one(kernels=replace(AUTO, tuned=frozenset({KernelOp.linear})))
    assert not is_one(major=8) and not is_one(major=10)
    assert not is_one_kernel(draw(9, 16, dtype=BF16), draw(4, 24, 16, dtype=BF16), FUSED)
