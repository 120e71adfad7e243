"""Every operator's Python interface on a GPU, forward and backward, against fp64.

Runs on a CPU show that the tests work. fp16 is for GPUs only: the CPU kernels do not support it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megads.model.attention import alibi_slopes, causal_bias_at, mask_other_documents
from megads.model.rotary import rotary_tables
from megads.ops.activation import bias_gelu, gelu, swiglu
from megads.ops.adamw import AdamWStep, Pieces, adamw, adamw_reference, square_sums
from megads.ops.config import FUSED, TORCH, Implementation, Kernels, OpsConfig, kernel_supports
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of
from megads.ops.linear import add_weight_gradient
from megads.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megads.ops.resolve import load
from megads.ops.rotary import rotate
from megads.ops.softmax import MaskedSoftmax, explicit_attention, masked_softmax
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses
from tests.ops.accuracy import check_error, relative_error

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")],
)
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.parametrize("device", ["cpu", CUDA]),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
AXIS = single_rank_grid().tp

Face = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""An operator, called with the kernels and its inputs."""


def prepare(device: str, dtype: torch.dtype) -> torch.Generator:
    """Compiles and loads the kernels; returns the generator for the inputs."""
    load(OpsConfig(Implementation.fused), print, cuda=device == "cuda")
    if not kernel_supports(torch.empty(0, dtype=dtype, device=device)):
        pytest.skip(f"the kernels of a {device} do not take {dtype}")
    return torch.Generator(device).manual_seed(0)


def outputs_and_gradients(face: Face, kernels: Kernels, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and input gradients, computed in `dtype`; the output gradients are rounded to the inputs' own dtype."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    found = face(kernels, *leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    arriving = [
        torch.randn(out.shape, generator=generator, device=out.device).to(inputs[0].dtype).to(out.dtype)
        if out.dim()
        else torch.ones_like(out)
        for out in outputs
    ]
    torch.autograd.backward(outputs, arriving)
    # The relative error of a single number is random.
    return [x.detach() for x in (*outputs, *(leaf.grad for leaf in leaves)) if x is not None and x.numel() > 1]


def check(face: Face, inputs: list[Tensor]) -> None:
    """Checks that the kernel's error is at most twice that of torch's operators, for every output and gradient."""
    dtype = inputs[0].dtype
    ours, eager = (outputs_and_gradients(face, kernels, inputs, dtype) for kernels in (FUSED, TORCH))
    exact = outputs_and_gradients(face, TORCH, inputs, torch.float64)
    assert len(ours) == len(exact) > len(inputs) - 1
    for mine, theirs, right in zip(ours, eager, exact, strict=True):
        check_error(mine, theirs, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_weight_gradients_accumulate_without_rounding(dtype: torch.dtype, device: str) -> None:
    """Catches gradients rounded before they are added to main_grad, a first one added to old contents, and a second
    one that overwrites the first."""
    generator = prepare(device, dtype)
    grad_mo, x_mi = (torch.randn(120, width, generator=generator, device=device).to(dtype) for width in (70, 50))
    sums_oi = torch.full((70, 50), float("nan"), device=device)
    add_weight_gradient(sums_oi, grad_mo, x_mi, True, FUSED)
    add_weight_gradient(sums_oi, grad_mo, x_mi, False, FUSED)
    assert relative_error(sums_oi, 2 * (grad_mo.double().t() @ x_mi.double())) <= 1e-6


@pytest.mark.quick(
    "5-37-torch.float32-cuda", "300-1031-torch.bfloat16-cpu", "300-1031-torch.float16-cuda", "64-9000-torch.float32-cpu"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(5, 37), (300, 1031), (64, 9000)])
def test_row_kernels_get_the_right_arguments(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    """Catches wrong arguments to a kernel of the device, and gradients that are returned for the wrong inputs."""
    generator = prepare(device, dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, residual, weight, bias = draw(rows, width), draw(rows, width), draw(width), draw(width)
    mask = DropoutMask(site_key(0, "site"), threshold_of(0.1), torch.tensor([9], device=device))
    check(lambda kernels, x, w, b: layer_norm(x, w, b, EPS, kernels), [x, weight, bias])
    check(lambda kernels, x, w: rms_norm(x, w, EPS, kernels), [x, weight])
    check(lambda kernels, x, r, w, b: add_layer_norm(x, r, w, b, EPS, kernels), [x, residual, weight, bias])
    check(lambda kernels, x, r, w: add_rms_norm(x, r, w, EPS, kernels), [x, residual, weight])
    check(lambda kernels, x: gelu(x, kernels), [x])
    check(lambda kernels, x, b: bias_gelu(x, b, kernels), [x, bias])
    check(lambda kernels, x: swiglu(x, kernels), [draw(rows, 2 * width)])
    check(lambda kernels, x: dropout(x[None], mask, None, None, kernels), [x])
    check(lambda kernels, x, r: dropout(x[None], mask, None, r[None], kernels), [x, residual])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [45, 300])
def test_softmax_and_rotary_get_the_right_arguments(length: int, dtype: torch.dtype, device: str) -> None:
    """Catches ALiBi slopes, positions or document starts that do not reach the kernel, and RoPE tables of another
    dtype."""
    generator = prepare(device, dtype)
    scores = torch.randn(2, 3, length, length, generator=generator, device=device).to(dtype)
    slopes = alibi_slopes(3).to(device)
    places = torch.arange(length, device=device).flip(0)
    starts = (torch.arange(length, device=device) // 2).repeat(2, 1)
    check(lambda kernels, x: masked_softmax(x, 0.3, slopes, kernels=kernels), [scores])
    check(lambda kernels, x: masked_softmax(x, 0.3, slopes, places, kernels=kernels), [scores])
    check(lambda kernels, x: masked_softmax(x, 0.3, None, None, starts, kernels=kernels), [scores])
    mask = DropoutMask(site_key(0, "core"), threshold_of(0.1), torch.tensor([9, 2**40], device=device), first_head=4)
    starts = (places // 2).repeat(2, 1)  # every query attends to a key: else torch gives NaN
    bias = mask_other_documents(causal_bias_at(3, range(3), places[None], places.flip(0), True, torch.float32), starts)
    value = torch.randn(2, 3, length, 8, generator=generator, device=device).to(dtype)

    def attended(kernels: Kernels, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        softmax = (
            MaskedSoftmax(0.3, None, slopes, places, starts)
            if kernels is FUSED
            else MaskedSoftmax(0.3, lambda: bias, places_s=places)
        )
        return explicit_attention(q, k, v, softmax, mask)

    check(attended, [value, value.flip(1), value.flip(2)])
    tables = rotary_tables(torch.arange(length, device=device), 16, 1e4, torch.float32)

    def turned(kernels: Kernels, x: Tensor) -> Tensor:
        wide = x.dtype == torch.float64
        return rotate(x, *(table.double() if wide else table for table in tables), kernels)

    check(turned, [torch.randn(2, length, 3, 16, generator=generator, device=device).to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [130, 5003])
def test_cross_entropy_returns_the_gradient_of_overwritten_logits(rows: int, dtype: torch.dtype, device: str) -> None:
    """Catches a wrong gradient of the loss whose kernels overwrite the logits."""
    generator = prepare(device, dtype)
    logits = torch.randn(2, 9, rows, generator=generator, device=device).to(dtype)
    labels = torch.randint(0, rows - 3, (2, 9), generator=generator, device=device)
    weights = torch.rand(2, 9, generator=generator, device=device)

    def loss(kernels: Kernels, x: Tensor) -> Tensor:
        if kernels is FUSED:
            return loss_in_place(x.clone(), labels, weights, rows, AXIS)
        return (vocab_parallel_token_losses(x, labels, rows, AXIS) * weights).sum()

    check(loss, [logits])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_optimizer_kernels_read_their_scalars_from_the_device(dtype: torch.dtype, device: str) -> None:
    """Catches bounds or a clip factor that are read from host memory, and a skipped step that changes the state."""
    generator = prepare(device, dtype)
    # The starts of buckets are not aligned.
    state = [torch.rand(70_001, generator=generator, device=device)[1:] for _ in range(3)]
    grad = torch.randn(70_000, generator=generator, device=device)
    weights, clip = torch.empty(70_000, dtype=dtype, device=device), torch.tensor(0.37, device=device)
    how = AdamWStep(lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, step=1)
    sides = [[x.to(of, copy=True) for x in state] for of in (torch.float32, torch.float64)]
    for step in range(1, 4):
        now = replace(how, step=step)
        for tensors in ([*state, weights], [*sides[0], weights.clone()], [*sides[1], weights.clone()]):
            function = adamw if tensors[0] is state[0] else adamw_reference
            function(*tensors, grad.to(tensors[0].dtype), clip if function is adamw else clip.to(tensors[0].dtype), now)
    for ours, eager, exact in zip(state, *sides, strict=True):
        assert relative_error(ours, exact) <= max(2 * relative_error(eager, exact), 1e-7)
    assert torch.equal(weights, state[0].to(dtype))
    before = [x.clone() for x in state]
    adamw(*state, weights, grad, torch.tensor(float("nan"), device=device), how)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
    pieces = Pieces([(0, 40_003), (40_003, 40_003), (40_010, 70_000)], torch.device(device))
    exact = torch.stack([grad[start:stop].double().square().sum() for start, stop in pieces.bounds])
    torch.testing.assert_close(square_sums(grad, pieces, FUSED), exact, rtol=1e-13, atol=0.0)
