"""The CUDA kernels of quantization to FP8, lane by lane: bit for bit what PyTorch's operators compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megads.ops.config import TORCH
from megads.ops.float8 import E4M3, E5M2, Float8Tensor, magnitude_bits, quantize, quantize_weight
from tests.ops.cuda.lanes import Lanes

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = {E4M3: 0, E5M2: 1}
NAN = 0x7F
"""The kernels' NaN in both formats; PyTorch's may have a sign."""

Change = Callable[[str], str] | None


def every_kind(size: int, dtype: torch.dtype) -> Tensor:
    """Groups of `size` values, one a row: usual ones, and those at the limits of the formats."""
    generator = torch.Generator().manual_seed(size)
    usual = torch.randn(13, size, generator=generator) * torch.exp2(-20 * torch.rand(13, size, generator=generator))
    x = usual.to(dtype)
    x[1] = torch.where(x[1] > 0, 0.0, -0.0)
    x[2] = (usual[2] * 2.0**-130).to(dtype)  # subnormal numbers
    x[3] = (usual[3] / usual[3].abs().max() * torch.finfo(dtype).max).to(dtype)
    x[4, size // 2], x[5, -1], x[6, 0] = torch.inf, -torch.inf, torch.nan
    x[7, 0], x[7, -1] = torch.nan, torch.inf
    for row, largest in ((8, 1.75), (9, 2.0)):  # the largest significand of a scale, and the next numbers
        border = torch.tensor(8 * largest, dtype=dtype)
        x[row] = torch.minimum(x[row].abs(), border) * x[row].sign()
        x[row, 0] = border if row == 9 else torch.nextafter(border, torch.tensor(torch.inf, dtype=dtype))
    # The numbers of each format, the points between them, and their neighbors.
    for row, of_format in ((10, E4M3), (11, E5M2)):
        numbers = torch.arange(0x7F if of_format is E4M3 else 0x7C, dtype=torch.uint8).view(of_format).double()
        middles = (numbers[1:] + numbers[:-1]) / 2
        near = torch.cat((numbers, middles, middles * (1 + 2.0**-20), middles * (1 - 2.0**-20), middles * -1))
        x[row] = near[torch.randint(len(near), (size,), generator=generator)].to(dtype)
        x[row, 0] = numbers[-1].to(dtype)
    return x


def check(values: Tensor, inverse: Tensor, expected: Float8Tensor) -> None:
    """Requires the same bits of values and scales, NaNs apart."""
    right = expected.values.view(torch.uint8)
    assert torch.equal(values, torch.where(expected.values.float().isnan(), NAN, right))
    assert torch.equal(inverse.view(torch.int32), expected.inverse.flatten().view(torch.int32))


def magnitudes(x: Tensor, change: Change = None, **how: int) -> Tensor:
    """Magnitudes of the rows of x."""
    with Lanes("float8", change=change, **how) as lanes:
        parts, bits = lanes.count("float8_parts", *x.shape), lanes.empty((len(x),), torch.int32)
        partial = lanes.empty((parts, len(x)), torch.int32) if parts > 1 else None
        lanes.call("float8_magnitudes", x.dtype, *x.shape, x, partial, bits)
        return bits.clone()


def column_magnitudes(x: Tensor, change: Change = None, **how: int) -> Tensor:
    """Magnitudes of the columns of x."""
    with Lanes("float8", change=change, **how) as lanes:
        parts, bits = lanes.count("float8_column_parts", len(x)), lanes.empty((x.shape[1],), torch.int32)
        partial = lanes.empty((parts, x.shape[1]), torch.int32) if parts > 1 else None
        lanes.call("float8_column_magnitudes", x.dtype, *x.shape, x, partial, bits)
        return bits.clone()


def check_magnitudes(found: Tensor, expected: Tensor) -> None:
    """Requires equal bits; those of NaNs are above those of an infinity."""
    largest = expected.flatten() & 0x7FFFFFFF
    infinity = 0x7F800000
    assert torch.equal(found.clamp(max=infinity + 1), largest.clamp(max=infinity + 1))


def check_quantize(x: Tensor, dtype: torch.dtype, change: Change = None, **how: int) -> None:
    with Lanes("float8", change=change, **how) as lanes:
        values, inverse = lanes.empty(x.shape, torch.uint8), lanes.empty((len(x),), torch.float32)
        bits = magnitude_bits(x, (1,)) & 0x7FFFFFFF
        lanes.call("float8_quantize", x.dtype, FORMATS[dtype], *x.shape, x, bits, values, inverse)
        check(values, inverse, quantize(x, bits, dtype))


def check_rows(x: Tensor, dtype: torch.dtype, change: Change = None, **how: int) -> None:
    with Lanes("float8", change=change, **how) as lanes:
        values, inverse = lanes.empty(x.shape, torch.uint8), lanes.empty((len(x),), torch.float32)
        lanes.call("float8_quantize_rows", x.dtype, FORMATS[dtype], *x.shape, x, values, inverse)
        check(values, inverse, quantize(x, magnitude_bits(x, (1,)) & 0x7FFFFFFF, dtype))


def check_both(x: Tensor, whole: bool, change: Change = None, **how: int) -> None:
    groups = [magnitude_bits(x, dims) & 0x7FFFFFFF for dims in ([(0, 1)] if whole else [(1,), (0,)])]
    expected = quantize_weight(x, groups, TORCH)
    with Lanes("float8", change=change, **how) as lanes:
        values, transposed = lanes.empty(x.shape, torch.uint8), lanes.empty(x.T.shape, torch.uint8)
        counts = groups[0].numel(), groups[-1].numel()
        inverses = [lanes.empty((count,), torch.float32) for count in counts]
        bits = groups[0], groups[-1]
        lanes.call("float8_quantize_both", x.dtype, *x.shape, *counts, x, *bits, values, transposed, *inverses)
        for found, inverse, right in zip((values, transposed), inverses, expected, strict=True):
            check(found, inverse, right)


SIZES = [5, 16, 337, 1031, 4096, 9000]


@pytest.mark.always("337-dtype0")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_magnitudes_are_those_of_torch(size: int, dtype: torch.dtype) -> None:
    """Catches values left out at borders of packs, chunks and parts, those of another group, and a lost NaN."""
    x = every_kind(size, dtype)
    how = {"order": size, "residue": size % 3, "at_end": size % 2}
    for rows in (x, x[:3]):
        check_magnitudes(magnitudes(rows, **how), magnitude_bits(rows, (1,)))
    for matrix in (x, x.T.contiguous()):
        check_magnitudes(column_magnitudes(matrix, **how), magnitude_bits(matrix, (0,)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_values_and_scales_are_those_of_torch(size: int, dtype: torch.dtype, format: torch.dtype) -> None:  # noqa: A002
    """Catches other rounding, a scale of another group or format, an overflow of a scale, and values of a group with an
    infinity or a NaN that are not NaN."""
    x = every_kind(size, dtype)
    for residue, at_end in ((0, 1), (size % 3, 0)):
        check_quantize(x, format, order=size, residue=residue, at_end=at_end)
        check_rows(x, format, order=size, residue=residue, at_end=at_end)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 64, 136, 337])
def test_both_copies_of_a_weight_are_those_of_torch(size: int, dtype: torch.dtype, whole: bool) -> None:
    """Catches a copy that is not transposed, scales of rows and columns swapped, and tiles at the edges."""
    kinds = every_kind(size, dtype)
    usual = torch.cat((kinds[:1], kinds[8:])).repeat(17, 1)[:72]
    for x in (usual, kinds, kinds.T.contiguous()):
        for residue in (0, size % 2):
            check_both(x, whole, order=size, residue=residue, at_end=size % 2)


def test_empty_inputs_launch_no_kernel() -> None:
    """Catches a launch with zero blocks, and a group without values whose magnitude is uninitialized memory."""
    for shape in ((0, 8), (2, 0)):
        x = torch.empty(shape)
        assert not magnitudes(x).any() and not column_magnitudes(x).any()
        with Lanes("float8") as lanes:
            values, inverse = lanes.empty(shape, torch.uint8), lanes.empty(shape[:1], torch.float32)
            bits = torch.zeros(shape[0], dtype=torch.int32)
            lanes.call("float8_quantize", x.dtype, 0, *shape, x, bits, values, inverse)
            lanes.call("float8_quantize_rows", x.dtype, 0, *shape, x, values, inverse)
            assert torch.equal(inverse, torch.full(shape[:1], 2.0**-100))
