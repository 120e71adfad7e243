"""Defects in FP8, which tests/test_mutants.py applies to the running code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import megads.parallel.float8_linear
from megads.engine.stage_pipeline import StagePipeline
from megads.ops.config import Kernels
from megads.ops.float8 import E4M3, E5M2, Float8Tensor, magnitude_bits, quantize_rows
from megads.parallel.float8_linear import Float8Linear
from megads.parallel.grid import Axis
from megads.parallel.region_linear import start_gather
from megads.parallel.sharding import (
    ColumnParallelBranches,
    ColumnParallelLinear,
    RowParallelBranches,
    RowParallelLinear,
)


def a_scale_of_each_tensor_parallel_rank() -> None:
    inner = Float8Linear._quantize
    Float8Linear._quantize = lambda self, tensors, dtype, *, divided: inner(self, tensors, dtype, divided=False)


def a_scale_of_each_share_of_a_sequence() -> None:
    inner = Float8Linear._quantize

    def quantize(
        self: Float8Linear, tensors: Sequence[Tensor], dtype: torch.dtype, *, divided: bool
    ) -> list[Float8Tensor]:
        return inner(self, tensors, dtype, divided=divided and not (self.enters and dtype is E4M3))

    Float8Linear._quantize = quantize


def scales_of_this_ranks_tokens() -> None:
    inner = Float8Linear.quantize_activations

    def quantize_activations(self: Float8Linear, inputs: Sequence[Tensor]) -> list[Float8Tensor]:
        found = inner(self, inputs)
        if found[0].inverse.shape[1] == inputs[0].shape[1]:
            return found
        own = quantize_rows(inputs[0], E4M3, self.region.kernels).inverse
        return [Float8Tensor(found[0].values, own.repeat(1, self.region.axis.size, 1))]

    Float8Linear.quantize_activations = quantize_activations


def inputs_gathered_unquantized() -> None:
    """Twice the bytes, and the same bits."""

    def quantize_activations(self: Float8Linear, inputs: Sequence[Tensor]) -> list[Float8Tensor]:
        if self.enters and self.region.shared_out:
            inputs = [start_gather(x_btk, self.region.axis)() for x_btk in inputs]
        return self._quantize(inputs, E4M3, divided=not self.enters)

    Float8Linear.quantize_activations = quantize_activations


def branches_that_share_nothing() -> None:
    """More quantizations and collectives of blocks in FP8, and the same bits."""
    shared_enter, shared_leave = ColumnParallelBranches.forward, RowParallelBranches.forward

    def enter(self: ColumnParallelBranches, x_bti: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
        return tuple(layer(x_bti) for layer in layers) if self.uses_float8 else shared_enter(self, x_bti, *layers)

    def leave(self: RowParallelBranches, inputs: Sequence[Tensor], layers: Sequence[RowParallelLinear]) -> Tensor:
        if not self.uses_float8:
            return shared_leave(self, inputs, layers)
        first, second = (layer(x_bsi) for layer, x_bsi in zip(layers, inputs, strict=True))
        return first + second

    ColumnParallelBranches.forward, RowParallelBranches.forward = enter, leave


def a_scale_of_both_branches() -> None:
    inner = megads.parallel.float8_linear._agreed

    def agreed(bits: Sequence[Tensor], axes: Sequence[Axis]) -> list[Tensor]:
        found = inner(bits, axes)
        of_branches = len(found) == 2 and found[0].dim() == 3
        return [torch.maximum(*found)] * 2 if of_branches else found

    megads.parallel.float8_linear._agreed = agreed


def a_scale_of_each_part_of_a_weight() -> None:
    def quantize_weights(layers: list[Float8Linear], tp: Axis) -> None:
        for layer in layers:
            layer.quantize_weight([group for group, _ in layer.weight_bits()])

    megads.engine.stage_pipeline.quantize_weights = quantize_weights


def a_scale_of_each_context_parallel_rank() -> None:
    inner = megads.parallel.float8_linear._agreed

    def agreed(bits: Sequence[Tensor], axes: Sequence[Axis]) -> list[Tensor]:
        return inner(bits, axes if bits[0].dim() == 2 else [])  # of weights

    megads.parallel.float8_linear._agreed = agreed


def a_scale_of_the_previous_step() -> None:
    inner, last = megads.parallel.float8_linear.quantize, dict[tuple[torch.Size, torch.dtype], Tensor]()

    def quantize(x: Tensor, bits: Tensor, dtype: torch.dtype, kernels: Kernels) -> Float8Tensor:
        before = last.get((x.shape, dtype), bits)
        last[x.shape, dtype] = bits.clone()
        return inner(x, before, dtype, kernels)

    megads.parallel.float8_linear.quantize = quantize


def a_scale_of_the_micro_batch() -> None:
    def quantize(
        self: Float8Linear, tensors: Sequence[Tensor], dtype: torch.dtype, *, divided: bool
    ) -> list[Float8Tensor]:
        bits = [magnitude_bits(x_bsk, (0, 1, 2)).expand(len(x_bsk), 1, 1) for x_bsk in tensors]
        return [
            megads.parallel.float8_linear.quantize(x_bsk, of_x, dtype)
            for x_bsk, of_x in zip(tensors, bits, strict=True)
        ]

    Float8Linear._quantize = quantize


def activations_in_the_format_of_gradients() -> None:
    inner = Float8Linear._quantize
    Float8Linear._quantize = lambda self, tensors, dtype, *, divided: inner(self, tensors, E5M2, divided=divided)


def gradients_in_the_format_of_activations() -> None:
    inner = Float8Linear._quantize
    Float8Linear._quantize = lambda self, tensors, dtype, *, divided: inner(self, tensors, E4M3, divided=divided)


def weights_of_the_first_step() -> None:
    inner = StagePipeline.quantize_weights

    def quantize_weights(self: StagePipeline) -> None:
        if self._float8 and self._float8[0].of_output is None:
            inner(self)

    StagePipeline.quantize_weights = quantize_weights
