"""Defects in FP8, which tests/test_mutants.py applies to the running code."""

from __future__ import annotations

import torch
from torch import Tensor

import megads.parallel.float8_linear
from megads.engine.stage_pipeline import StagePipeline
from megads.ops.config import Kernels
from megads.ops.float8 import E4M3, E5M2, Float8Tensor, magnitude_bits, quantize_rows
from megads.parallel.float8_linear import Float8Linear
from megads.parallel.grid import Axis
from megads.parallel.region_linear import start_gather


def a_scale_of_each_tensor_parallel_rank() -> None:
    inner = Float8Linear._quantize
    Float8Linear._quantize = lambda self, x_bsk, dtype, *, divided: inner(self, x_bsk, dtype, divided=False)


def a_scale_of_each_share_of_a_sequence() -> None:
    inner = Float8Linear._quantize

    def quantize(self: Float8Linear, x_bsk: Tensor, dtype: torch.dtype, *, divided: bool) -> Float8Tensor:
        return inner(self, x_bsk, dtype, divided=divided and not (self.enters and dtype is E4M3))

    Float8Linear._quantize = quantize


def scales_of_this_ranks_tokens() -> None:
    inner = Float8Linear.quantize_activation

    def quantize_activation(self: Float8Linear, x_btk: Tensor) -> Float8Tensor:
        found = inner(self, x_btk)
        if found.inverse.shape[1] == x_btk.shape[1]:
            return found
        own = quantize_rows(x_btk, E4M3, self.region.kernels).inverse
        return Float8Tensor(found.values, own.repeat(1, self.region.axis.size, 1))

    Float8Linear.quantize_activation = quantize_activation


def inputs_gathered_unquantized() -> None:
    """Twice the bytes, and the same bits."""

    def quantize_activation(self: Float8Linear, x_btk: Tensor) -> Float8Tensor:
        gathers = self.enters and self.region.shared_out
        x_bsk = start_gather(x_btk, self.region.axis)() if gathers else x_btk
        return self._quantize(x_bsk, E4M3, divided=not self.enters)

    Float8Linear.quantize_activation = quantize_activation


def a_scale_of_each_part_of_a_weight() -> None:
    def quantize_weights(layers: list[Float8Linear], tp: Axis) -> None:
        for layer in layers:
            layer.quantize_weight([group for group, _ in layer.weight_bits()])

    megads.engine.stage_pipeline.quantize_weights = quantize_weights


def a_scale_of_each_context_parallel_rank() -> None:
    inner = megads.parallel.float8_linear._agree

    def agree(bits: Tensor, axis: Axis) -> None:
        if bits.dim() == 1:  # of weights
            inner(bits, axis)

    megads.parallel.float8_linear._agree = agree


def a_scale_of_the_previous_step() -> None:
    inner, last = megads.parallel.float8_linear.quantize, dict[tuple[torch.Size, torch.dtype], Tensor]()

    def quantize(x: Tensor, bits: Tensor, dtype: torch.dtype, kernels: Kernels) -> Float8Tensor:
        before = last.get((x.shape, dtype), bits)
        last[x.shape, dtype] = bits.clone()
        return inner(x, before, dtype, kernels)

    megads.parallel.float8_linear.quantize = quantize


def a_scale_of_the_micro_batch() -> None:
    def quantize(self: Float8Linear, x_bsk: Tensor, dtype: torch.dtype, *, divided: bool) -> Float8Tensor:
        bits = magnitude_bits(x_bsk, (0, 1, 2)).expand(len(x_bsk), 1, 1)
        return megads.parallel.float8_linear.quantize(x_bsk, bits, dtype)

    Float8Linear._quantize = quantize


def activations_in_the_format_of_gradients() -> None:
    inner = Float8Linear._quantize
    Float8Linear._quantize = lambda self, x_bsk, dtype, *, divided: inner(self, x_bsk, E5M2, divided=divided)


def gradients_in_the_format_of_activations() -> None:
    inner = Float8Linear._quantize
    Float8Linear._quantize = lambda self, x_bsk, dtype, *, divided: inner(self, x_bsk, E4M3, divided=divided)


def weights_of_the_first_step() -> None:
    inner = StagePipeline.quantize_weights

    def quantize_weights(self: StagePipeline) -> None:
        if self._float8 and self._float8[0].of_output is None:
            inner(self)

    StagePipeline.quantize_weights = quantize_weights
