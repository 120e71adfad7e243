"""The kernels of GELU, bias and GELU, and SwiGLU against fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.ops.activation import bias_gelu, gelu, swiglu
from megads.ops.config import FUSED, TORCH, Kernels
from tests.ops.accuracy import check_errors, check_threads, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("kernels")

OPS: dict[str, Callable[..., Tensor]] = {"gelu": gelu, "bias_gelu": bias_gelu, "swiglu": swiglu}
every_op = pytest.mark.parametrize("op", OPS)


def inputs(op: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Input, bias if there is one, and the gradient of the output, which has this shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    columns = 2 * shape[-1] if op == "swiglu" else shape[-1]
    shapes = [(*shape[:-1], columns), *([shape[-1:]] if op == "bias_gelu" else []), shape]
    return [(3 * torch.randn(of, generator=generator, dtype=torch.float64)).to(dtype) for of in shapes]


def both(op: str, tensors: list[Tensor], kernels: Kernels) -> list[Tensor]:
    """The output and the gradients of the inputs."""
    return outputs_and_gradients(lambda *leaves: OPS[op](*leaves, kernels), tensors[:-1], tensors[-1])


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 7), (64, 1031), (1100, 64)])
def test_error_is_within_twice_torchs(shape: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
    """Catches a wrong constant, a wrong tail after the last full vector or of a row, arithmetic in bf16, a bias of the
    wrong column, and a bias gradient that misses a block of rows."""
    tensors = inputs(op, shape, dtype)
    exact = both(op, [x.double() for x in tensors], TORCH)
    check_errors(both(op, tensors, FUSED), both(op, tensors, TORCH), exact)


def test_gates_are_the_even_columns() -> None:
    """Catches gate and up swapped, in the kernel and the reference alike."""
    x = torch.randn(4, 20)
    for kernels in (FUSED, TORCH):
        torch.testing.assert_close(swiglu(x, kernels), F.silu(x[:, 0::2]) * x[:, 1::2])


def test_large_values_do_not_overflow_in_gelu() -> None:
    """Catches exp overflowing to NaN or wrapping around: for large |x|, GELU is 0 or x and its derivative 0 or 1."""
    x = torch.tensor([-1e38, -1e4, -50.0, -0.0, 50.0, 1e4, 1e30, float("inf")])
    out, slope = both("gelu", [x, torch.ones_like(x)], FUSED)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.0, 0.0, 0.0, 50.0, 1e4, 1e30, float("inf")]))
    torch.testing.assert_close(slope, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 1.0]))


def test_large_values_do_not_overflow_in_swiglu() -> None:
    """Catches an exponential that overflows to NaN: for large inputs SiLU is 0 or its input, and its slope 0 or 1."""
    gates = torch.tensor([-1e30, -1e4, -90.0, 90.0, 1e4, 1e30])
    x = torch.stack([gates, torch.full((6,), 2.0)], -1).flatten()
    out, slopes = both("swiglu", [x[None], torch.ones(1, 6)], FUSED)
    torch.testing.assert_close(out[0, 2:], 2.0 * gates.clamp(min=0.0)[2:])
    torch.testing.assert_close(slopes[0, 4::2], torch.tensor([0.0, 2.0, 2.0, 2.0]))
    assert out.isfinite().all() and slopes.isfinite().all()


@every_op
def test_strided_empty_and_nan_inputs_are_right(op: str) -> None:
    """Catches a kernel that reads a view as if it were contiguous, fails on an empty tensor, or hides a NaN."""
    *tensors, grad = inputs(op, (4, 6, 10))
    views = [tensors[0].transpose(0, 1), *tensors[1:], torch.ones(()).expand(6, 4, 10)]
    expected = both(op, [x.contiguous() for x in views], TORCH)
    for ours, right in zip(both(op, views, FUSED), expected, strict=True):
        torch.testing.assert_close(ours, right)
    _, found, *bias = both(op, [tensors[0][:0], *tensors[1:], grad[:0]], FUSED)
    assert found.shape == tensors[0][:0].shape and all((x == 0).all() for x in bias)
    nan = both(op, [torch.full_like(tensors[0], float("nan")), *tensors[1:], grad], FUSED)
    assert all(x.isnan().all() for x in nan)


@every_op
def test_the_same_bits_at_any_number_of_threads(op: str) -> None:
    """Catches one partial sum of the bias gradient per thread: ranks and resumes would diverge."""
    tensors = inputs(op, (900, 130), torch.bfloat16)
    check_threads(lambda: both(op, tensors, FUSED), 1, 2, 3)


@pytest.mark.slow
@every_op
def test_opcheck_passes(op: str) -> None:
    """Catches a schema, fake or gradient registration under which torch.compile or autograd goes wrong."""
    *tensors, grad = inputs(op, (5, 9))
    forward, backward = (
        getattr(torch.ops.megads, f"{op}_{direction}").default for direction in ("forward", "backward")
    )
    torch.library.opcheck(forward, tuple(x.detach().requires_grad_() for x in tensors))
    torch.library.opcheck(backward, (grad, *tensors))


@every_op
def test_fp64_is_left_to_torch(op: str) -> None:
    """Catches an fp64 input that is computed in fp32."""
    tensors = inputs(op, (3, 9), torch.float64)
    assert all(map(torch.equal, both(op, tensors, FUSED), both(op, tensors, TORCH)))
