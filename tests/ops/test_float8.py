"""Tests of FP8 scales, rounding and products."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megads.ops.config import FUSED, TORCH, Implementation, OpsConfig
from megads.ops.float8 import (
    E4M3,
    E5M2,
    Float8Tensor,
    inverse_scale,
    magnitude_bits,
    quantize,
    quantize_rows,
    quantize_weight,
    scaled_linear,
)
from megads.ops.resolve import load
from megads.tools.verify import reference_float8
from tests.ops.cuda.test_float8 import every_kind

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMATS = {E4M3: reference_float8.E4M3, E5M2: reference_float8.E5M2}
ROWS, WHOLE = (2,), (1, 2)


def draw(*shape: int, spread: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * torch.exp2(-spread * torch.rand(shape, generator=generator))


def quantized(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype = E4M3) -> Float8Tensor:
    return quantize(x, magnitude_bits(x, dims), dtype)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("largest", [1.0, 1.75, 1.7500001, 2.0, 448.0, 57344.0, 3e-9, 1.7e38, 5.3e-20])
def test_a_scale_is_the_largest_power_of_two_without_saturation(largest: float, dtype: torch.dtype) -> None:
    """Catches a scale with which the largest value saturates, or half of the format's range is lost."""
    x = torch.tensor([[[largest, -largest / 3]]])
    scale = 1.0 / float(inverse_scale(magnitude_bits(x, WHOLE), dtype))
    assert math.frexp(scale)[0] == 0.5
    exact = float(x[0, 0, 0])
    assert exact * scale <= LARGEST[dtype] < 2 * exact * scale


@pytest.mark.parametrize("dtype", LARGEST)
def test_rounding_is_to_nearest_even(dtype: torch.dtype) -> None:
    """Catches truncation, ties that are rounded up, and subnormal numbers taken for zero. Checks all finite numbers of
    the format, the points between them, and their neighbors."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = every[every.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(limit)) for limit in (torch.inf, -torch.inf))
    x = torch.cat((numbers, middles, up, down)).view(1, 1, -1)
    expected = reference_float8.rounded(x.double(), FORMATS[dtype]).float()
    assert torch.equal(quantized(x, WHOLE, dtype).dequantized(torch.float32), expected)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("power", [-140, -100, -60, 0, 60, 120])
def test_quantized_values_are_finite_and_exact_in_bf16(power: int, dtype: torch.dtype) -> None:
    """Catches an overflow of scales, and values that the emulation would round a second time."""
    x = (draw(2, 5, 64, spread=20) * 2.0**power).bfloat16()
    found = quantized(x, ROWS, dtype)
    wide = found.dequantized(torch.float64)
    assert wide.isfinite().all()
    assert torch.equal(found.dequantized(torch.bfloat16).double(), wide)
    if power > -80:
        error = (wide - x.double()).abs() / x.double().abs().amax(2, keepdim=True)
        assert float(error.max()) <= (2**-4 if dtype is E4M3 else 2**-3)


def test_zeros_stay_zeros() -> None:
    """Catches 0 / 0 in a masked or padded sample."""
    x = torch.stack((torch.zeros(3, 8), draw(3, 8)))
    for dims in (ROWS, WHOLE):
        values = quantized(x, dims).dequantized(torch.float32)
        assert not values[0].any() and values[1].isfinite().all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dims", [ROWS, WHOLE])
def test_a_value_that_is_not_finite_reaches_the_product(bad: float, dims: tuple[int, ...]) -> None:
    """Catches an infinity that the cast turns into 448, so that nobody notices it. Other groups are not affected."""
    x = draw(2, 3, 16)
    x[1, 2, 5] = bad
    weight = quantized(draw(1, 32, 16), WHOLE)
    out = scaled_linear(
        quantized(x, dims), Float8Tensor(weight.values[0], weight.inverse.view(())), None, torch.float32, TORCH
    )
    broken = out[1, 2] if dims == ROWS else out[1]
    assert broken.isnan().all()
    assert out[0].isfinite().all()
    assert int(out.isnan().sum()) == broken.numel()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dims", [ROWS, WHOLE])
def test_the_emulation_is_torchs_scaled_gemm(
    dims: tuple[int, ...], biased: bool, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Catches an emulation with other scales, other rounding or another dtype than the operator that GPUs run. The sums
    may be in another order, so that a bf16 result may be rounded to the other neighbor."""
    x, given = draw(2, 24, 64, spread=12), draw(1, 48, 64, spread=12, seed=1)
    bias = draw(48, seed=2).to(out_dtype) if biased else None
    left = quantized(x.to(out_dtype), dims, dtype)
    of_rows = quantized(given.to(out_dtype), dims)
    right = Float8Tensor(of_rows.values[0], of_rows.inverse[0] if dims == ROWS else of_rows.inverse.view(()))
    found = scaled_linear(left, right, bias, out_dtype, TORCH)
    rows = [
        torch._scaled_mm(
            left.values[sample],
            right.values.t(),
            scale_a=left.inverse[sample] if dims == ROWS else left.inverse[sample].view(()),
            scale_b=right.inverse.t(),
            bias=bias,
            out_dtype=out_dtype,
        )
        for sample in range(2)
    ]
    expected = torch.stack(rows)
    exact = left.dequantized(torch.float64) @ right.dequantized(torch.float64).t()
    exact = exact if bias is None else exact + bias
    spacing = 2.0**-8 if out_dtype is torch.bfloat16 else 1e-6
    scale = float(exact.abs().max())
    for result in (found, expected):
        assert float(((result.double() - exact).abs() / scale).max()) <= spacing
    differ = found != expected
    if out_dtype is torch.bfloat16:
        assert float(differ.double().mean()) < 0.01
    torch.testing.assert_close(found, expected, rtol=2**-7 if out_dtype is torch.bfloat16 else 1e-5, atol=1e-5 * scale)


def same(found: Float8Tensor, expected: Float8Tensor) -> bool:
    """Whether values, shapes and scales are equal, bit for bit; the sign of a NaN is free."""
    values, right = (x.values.view(torch.uint8) for x in (found, expected))
    right = torch.where(expected.values.float().isnan(), 0x7F, right)
    inverses = (x.inverse.view(torch.int32) for x in (found, expected))
    return torch.equal(values, right) and torch.equal(*inverses) and found.values.dtype == expected.values.dtype


CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")],
)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [5, 64, 1031, 40_000])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_kernels_quantize_as_torchs_operators(device: str, size: int, dtype: torch.dtype) -> None:
    """Catches a kernel that rounds otherwise, takes other groups, or returns other shapes than PyTorch's operators."""
    load(OpsConfig(Implementation.fused), print, cuda=device == "cuda")
    matrix = every_kind(size, dtype).to(device)
    samples = matrix[:12].unflatten(0, (4, 3))
    for x in (matrix, matrix.t(), samples):
        dims = [(x.dim() - 1,), (1, 2)] if x.dim() == 3 else [(1,), (0, 1), (0,)]
        for groups in dims:
            found, expected = (magnitude_bits(x, groups, kernels) for kernels in (FUSED, TORCH))
            assert found.shape == expected.shape
            limited = (bits.clamp(max=0x7F800001) for bits in (found, expected & 0x7FFFFFFF))
            assert torch.equal(*limited)
            if groups == (0,):
                continue
            for of in LARGEST:
                assert same(quantize(x, found, of, FUSED), quantize(x, found, of))
        for of in LARGEST:
            assert same(quantize_rows(x, of, FUSED), quantize_rows(x, of, TORCH))
    for weight in (matrix, torch.cat((matrix[:1], matrix[8:])).t()):
        for groups in ([(0, 1)], [(1,), (0,)]):
            bits = [magnitude_bits(weight, dims, FUSED) for dims in groups]
            both = zip(quantize_weight(weight, bits, FUSED), quantize_weight(weight, bits, TORCH), strict=True)
            assert all(same(*pair) and pair[0].values.is_contiguous() for pair in both)
