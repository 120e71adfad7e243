"""FP8 matrix products of linear layers: dynamic scales, quantization, the GEMM, and its emulation.

Activations and weights are E4M3, gradients E5M2 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). A scale is
the power of two that takes the largest magnitude of its group closest to the format's largest number, from below.
Scaling is therefore exact, nothing saturates, and a quantized value is exact in bf16 and fp32: the emulation, which
multiplies the quantized values in those dtypes, sums the same products as the GEMM on FP8 and differs by the order of
its fp32 additions only. It is what runs on CPUs, and the reference on GPUs.

Magnitudes are compared as the bits of their fp32 value, as integers: these have the order of the magnitudes, and a
maximum over ranks cannot lose an infinity or a NaN, which makes the scale, and so the product, NaN. Casts to E4M3 would
turn an infinity into 448.

megads' kernels compute the same values, with one or two passes over a tensor instead of one for each of PyTorch's
operators (`KernelOp.quantize`).

Shape suffixes: b = batch, s = sequence, m = rows of a product, k = contracted features, n = output features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megads.errors import ConfigError
from megads.ops.config import TORCH, Float8Recipe, KernelOp, Kernels
from megads.ops.linear import linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Format of activations and weights, and of gradients."""
_FORMATS = {E4M3: 0, E5M2: 1}
"""The kernels' numbers of formats."""
_TOP_EXPONENT = {E4M3: 8, E5M2: 15}
"""Exponent of a format's largest number, 1.75 times a power of two in both."""
_CARRY = 0x1FFFFF
"""Added to the bits of an fp32 number, it raises the exponent if the significand is above 1.75."""
_INFINITY = 0x7F800000
"""Bits of fp32 infinity; those of NaN are above."""
_MANTISSA_BITS = 23
_SMALLEST_EXPONENT = 27
"""Biased exponent of the smallest inverse scale, 2^-100: quantized values stay clear of subnormal bf16 numbers. Groups
with magnitudes below about 2^-90 lose precision, and become zero further down."""
GEMM_MULTIPLE = 16
"""Features that CUDA's FP8 GEMMs want a multiple of."""
GEMM_CAPABILITY = (8, 9)
"""Compute capability from which GPUs have FP8 GEMMs: Ada and Hopper."""


class Float8Tensor(NamedTuple):
    """A quantized tensor.

    Attributes:
        values: FP8.
        inverse: what to multiply values by, fp32 powers of two; has the dims of `values`, of size 1 where it is shared,
            or none at all.
    """

    values: Tensor
    inverse: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The quantized values in a wider dtype; exact."""
        return self.values.to(dtype) * self.inverse.to(dtype)


def magnitude_bits(x: Tensor, dims: tuple[int, ...], kernels: Kernels = TORCH) -> Tensor:
    """Largest magnitude over some dims, kept with size 1, as the bits of an fp32 number in int32.

    Args:
        x: values in bf16 or wider.
        dims: the last dims in ascending order or, of a matrix, (0,).
        kernels: selects the implementation.
    """
    if not kernels.takes(KernelOp.quantize, x):
        largest = torch.linalg.vector_norm(x, torch.inf, dim=dims, keepdim=True)
        return largest.float().view(torch.int32)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    if dims[-1] < x.dim() - 1:
        of_columns: Tensor = torch.ops.megads.float8_column_magnitudes(x.contiguous())
        return of_columns.view(shape)
    bits: Tensor = torch.ops.megads.float8_magnitudes(_groups(x, math.prod(shape)))
    return bits.view(shape)


def _groups(x: Tensor, groups: int) -> Tensor:
    return x.reshape(groups, -1).contiguous()


def inverse_scale(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse scale of each group, an fp32 power of two; NaN if the group has a value that is not finite.

    Args:
        bits: output of `magnitude_bits`, the maximum over all parts of each group.
        dtype: FP8 format.
    """
    top = _TOP_EXPONENT[dtype]
    exponent = (bits.clamp(max=_INFINITY) + _CARRY) >> _MANTISSA_BITS
    inverse = ((exponent - top).clamp(min=_SMALLEST_EXPONENT) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(bits >= _INFINITY, torch.nan, inverse)


def quantize(x: Tensor, bits: Tensor, dtype: torch.dtype, kernels: Kernels = TORCH) -> Float8Tensor:
    """Rounds x times the scale of its group to FP8, to nearest, ties to even.

    Args:
        x: values in bf16 or wider.
        bits: `magnitude_bits` of each group, over the last dims of x.
        dtype: FP8 format.
        kernels: selects the implementation.
    """
    if kernels.takes(KernelOp.quantize, x):
        groups = _groups(x, bits.numel())
        values, inverse = torch.ops.megads.float8_quantize(groups, bits.flatten(), _FORMATS[dtype])
        return Float8Tensor(values.view(x.shape), inverse.view(bits.shape))
    inverse = inverse_scale(bits, dtype)
    return Float8Tensor((x * inverse.reciprocal().to(x.dtype)).to(dtype), inverse)


def quantize_rows(x: Tensor, dtype: torch.dtype, kernels: Kernels) -> Float8Tensor:
    """`quantize` with a scale for each row of the last dim, which this rank has whole.

    Args:
        x: values in bf16 or wider, [..., k].
        dtype: FP8 format.
        kernels: selects the implementation; megads' kernel reads x once.
    """
    if kernels.takes(KernelOp.quantize, x):
        values, inverse = torch.ops.megads.float8_quantize_rows(_groups(x, x.shape[:-1].numel()), _FORMATS[dtype])
        return Float8Tensor(values.view(x.shape), inverse.view(*x.shape[:-1], 1))
    return quantize(x, magnitude_bits(x, (x.dim() - 1,)), dtype)


def quantize_weight(weight_nk: Tensor, bits: Sequence[Tensor], kernels: Kernels) -> tuple[Float8Tensor, Float8Tensor]:
    """Quantizes a weight to E4M3 for the product of the output, and its transpose for that of the input gradient.

    Args:
        weight_nk: weight in bf16 or wider.
        bits: `magnitude_bits` of the weight, [1, 1], or of its rows, [n, 1], and of its columns, [1, k].
        kernels: selects the implementation.

    Returns:
        [n, k] and [k, n], both contiguous: FP8 GEMMs on Hopper read operands along the contracted features. Inverse
        scales are [n, 1] and [k, 1] or, of the whole weight, without dims.
    """
    whole = len(bits) == 1
    if kernels.takes(KernelOp.quantize, weight_nk):
        both = torch.ops.megads.float8_quantize_both(weight_nk.contiguous(), bits[0].flatten(), bits[-1].flatten())
        values_nk, values_kn, of_rows, of_columns = both
        shape = () if whole else (-1, 1)
        return Float8Tensor(values_nk, of_rows.view(shape)), Float8Tensor(values_kn, of_columns.view(shape))
    values_nk, inverse = quantize(weight_nk, bits[0], E4M3)
    if whole:
        shared = inverse.view(())
        return Float8Tensor(values_nk, shared), Float8Tensor(values_nk.t().contiguous(), shared)
    by_columns = quantize(weight_nk, bits[1], E4M3)
    return Float8Tensor(values_nk, inverse), Float8Tensor(by_columns.values.t().contiguous(), by_columns.inverse.t())


def register() -> None:
    """Registers fake implementations of the operators; requires that the library is loaded."""

    @torch.library.register_fake("megads::float8_magnitudes")
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], dtype=torch.int32)

    @torch.library.register_fake("megads::float8_column_magnitudes")
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[1], dtype=torch.int32)

    def rounded(x: Tensor, number: int) -> tuple[Tensor, Tensor]:
        dtype = next(dtype for dtype, known in _FORMATS.items() if known == number)
        return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)

    @torch.library.register_fake("megads::float8_quantize")
    def _(x: Tensor, bits: Tensor, format: int) -> tuple[Tensor, Tensor]:  # noqa: A002
        return rounded(x, format)

    torch.library.register_fake("megads::float8_quantize_rows")(rounded)

    @torch.library.register_fake("megads::float8_quantize_both")
    def _(x: Tensor, row_bits: Tensor, column_bits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_rows, of_columns = (x.new_empty(bits.shape, dtype=torch.float32) for bits in (row_bits, column_bits))
        return torch.empty_like(x, dtype=E4M3), x.new_empty(x.shape[::-1], dtype=E4M3), of_rows, of_columns


def scaled_linear(
    x_bsk: Float8Tensor, weight_nk: Float8Tensor, bias_n: Tensor | None, dtype: torch.dtype, kernels: Kernels
) -> Tensor:
    """x W^T + b of quantized operands, accumulated in fp32 and rounded once; [b, s, n].

    Args:
        x_bsk: left operand, with a scale for each sample, [b, 1, 1], or for each token, [b, s, 1].
        weight_nk: E4M3 weight, with one scale without dims, or, beside scales of tokens, one for each row, [n, 1].
        bias_n: bias in `dtype`, or None.
        dtype: dtype of the product.
        kernels: implementation; see `emulates`.
    """
    if emulates(x_bsk.values, kernels):
        return linear(x_bsk.dequantized(dtype), weight_nk.dequantized(dtype), bias_n, kernels)
    if weight_nk.inverse.dim():
        out_mn = _gemm(x_bsk.values.flatten(0, 1), x_bsk.inverse.flatten(0, 1), weight_nk, bias_n, dtype)
        return out_mn.unflatten(0, x_bsk.values.shape[:2])
    # The fast GEMM has one scale for its whole left operand, which is a sample.
    samples = zip(x_bsk.values, x_bsk.inverse.flatten(), strict=True)
    outs = [_gemm(values_sk, inverse, weight_nk, bias_n, dtype) for values_sk, inverse in samples]
    return outs[0].unsqueeze(0) if len(outs) == 1 else torch.stack(outs)


def _gemm(
    values_mk: Tensor, inverse: Tensor, weight_nk: Float8Tensor, bias_n: Tensor | None, dtype: torch.dtype
) -> Tensor:
    # Fast accumulation would keep 14 bits of the sums on Hopper.
    return torch._scaled_mm(
        values_mk,
        weight_nk.values.t(),
        scale_a=inverse,
        scale_b=weight_nk.inverse.t(),
        bias=bias_n,
        out_dtype=dtype,
        use_fast_accum=False,
    )


def emulates(x: Tensor, kernels: Kernels) -> bool:
    """Whether products of tensors on this device are emulated: on CPUs, and on GPUs with ops.fp8_emulation."""
    return x.device.type == "cpu" or kernels.fp8_emulation


def require_float8(recipe: Float8Recipe, device: torch.device, dtype: torch.dtype, kernels: Kernels) -> None:
    """Checks that the device has FP8 GEMMs, unless they are emulated.

    Args:
        recipe: recipe of the run.
        device: device of this rank.
        dtype: dtype of weights and activations.
        kernels: implementation of the operators.

    Raises:
        ConfigError: it has none, or none with this output.
    """
    if device.type == "cpu" or kernels.fp8_emulation or recipe is Float8Recipe.none:
        return
    given = f"train.fp8 = {recipe}"
    remedy = "use train.fp8=none, or ops.fp8_emulation=true, which is slow"
    if torch.version.hip is not None:
        raise ConfigError(f"{given}: FP8 of AMD GPUs is not supported; {remedy}")
    capability = torch.cuda.get_device_capability(device)
    if capability < GEMM_CAPABILITY:
        raise ConfigError(
            f"{given}: {torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, "
            f"and FP8 GEMMs need {GEMM_CAPABILITY[0]}.{GEMM_CAPABILITY[1]} (Ada, Hopper) or higher; {remedy}"
        )
    if recipe is Float8Recipe.rowwise and dtype is not torch.bfloat16:
        raise ConfigError(
            f"{given} with train.precision = fp32: the FP8 GEMM with a scale for each row only returns bf16; use "
            "train.precision=bf16 or train.fp8=tensorwise"
        )
