"""Linear layers in FP8 inside and outside of tensor-parallel regions, with scales that all ranks of a tensor agree on.

A linear layer has three products. Those with the weight are in FP8: the output, E4M3 x E4M3, and the gradient of the
input, E5M2 x E4M3. The weight gradient sums over tokens: it is computed from the unquantized input and gradient and
accumulated in fp32, as without FP8. A scale of that product would depend on which tokens share a micro-batch, and what
the FP8 GEMM saves over bf16 it mostly loses, since it cannot add to an fp32 main_grad.

Which values share a scale (`Float8Recipe`):

|            | activations and gradients         | weights                                                 |
|------------|-----------------------------------|---------------------------------------------------------|
| tensorwise | a sample: its tokens and features | the weight                                              |
| rowwise    | a token: its features             | an output feature, and for input gradients an input one |

These are groups of the unsharded model, so layout, micro-batch size and order of the samples do not change a scale.
Where ranks hold parts of a group they all-reduce the maximum of its magnitudes, one int32 for each group: of tokens and
samples over tensor-parallel ranks if the contracted features are divided over them (inputs of row-parallel layers,
gradients of column-parallel ones), of samples also if their tokens are, over context-parallel ranks or by sequence
parallelism (inputs of column-parallel layers). All weights of a rank share one all-reduce in a step, at its start, when
they are quantized.

With sequence parallelism, each rank quantizes its share of a column-parallel layer's input, and the shares are gathered
in FP8. The backward pass gathers bf16: its gathered tensors are operands of the weight gradient.

Layers that read one input, and layers whose outputs are added (those of a parallel block), share what is the same for
all: one quantization and gather of that input, and of the gradient of that sum. Their other tensors have scales of
their own, whose magnitudes are agreed on in one all-reduce. What ranks add up is not shared: without FP8, a GEMM adds
to the output of another one in fp32, which FP8 GEMMs cannot.

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, i = local input features, o = local output
features, k = contracted features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.errors import ConfigError
from megads.ops.config import Float8Recipe
from megads.ops.float8 import (
    E4M3,
    E5M2,
    GEMM_MULTIPLE,
    Float8Tensor,
    emulates,
    magnitude_bits,
    quantize,
    quantize_rows,
    quantize_weight,
    scaled_linear,
)
from megads.parallel.grid import Axis
from megads.parallel.region_linear import GatheredOnce, Pending, Region, start_gather, start_scatter
from megads.parallel.weight_gradients import WeightGradient, WeightGradients, give


class Float8Linear:
    """The products of one linear layer in FP8.

    Args:
        name: name of the layer in the whole model.
        weight: this rank's shard of its weight, [o, i].
        bias: its bias or, of a column-parallel layer, this rank's shard; or None.
        enters: whether it is column-parallel and enters a region; else it is row-parallel and leaves one.
        region: the region.
        cp: the context-parallel axis.
        recipe: which values share a scale.

    Attributes:
        of_output: the weight as the product of the output takes it, [o, i]; set by `quantize_weights`.
        of_input_gradient: the transposed weight as the product of the input gradient takes it, [i, o].
    """

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        enters: bool,
        region: Region,
        cp: Axis,
        recipe: Float8Recipe,
    ) -> None:
        self.name, self.weight, self.bias, self.enters, self.region = name, weight, bias, enters, region
        self._cp, self._rowwise = cp, recipe is Float8Recipe.rowwise
        self.of_output: Float8Tensor | None = None
        self.of_input_gradient: Float8Tensor | None = None

    @property
    def divided(self) -> bool:
        """Whether its features are divided over several ranks."""
        return self.region.axis.size > 1

    def check(self) -> None:
        """Raises ConfigError if the GEMMs do not take this rank's features; call with the weight on its device."""
        if not emulates(self.weight, self.region.kernels) and any(n % GEMM_MULTIPLE for n in self.weight.shape):
            outs, ins = self.weight.shape
            raise ConfigError(
                f"{self.name}: FP8 GEMMs need multiples of {GEMM_MULTIPLE} features, but a rank has {ins} input and "
                f"{outs} output features; change the width of the model or parallel.tp, or use train.fp8=none"
            )

    def __call__(self, x_bti: Tensor, gradients: WeightGradients | None) -> Tensor:
        """x W^T + b, as `megads.parallel.region_linear` computes it without FP8; see `column_parallel_float8` and
        `row_parallel_float8`."""
        if self.enters:
            return column_parallel_float8(x_bti, [self], gradients)[0]
        return row_parallel_float8([x_bti], [self], gradients)

    def output(self, x_bsi: Float8Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The product of the output, [b, s, o] in `dtype`."""
        assert self.of_output is not None, f"the weight of {self.name} is not quantized"
        return scaled_linear(x_bsi, self.of_output, bias, dtype, self.region.kernels)

    def input_gradient(self, grad_bso: Float8Tensor, dtype: torch.dtype) -> Tensor:
        """The product of the input gradient, [b, s, i] in `dtype`."""
        assert self.of_input_gradient is not None, f"the weight of {self.name} is not quantized"
        return scaled_linear(grad_bso, self.of_input_gradient, None, dtype, self.region.kernels)

    def quantize_activations(self, inputs: Sequence[Tensor]) -> list[Float8Tensor]:
        """Quantizes inputs of layers like this one; collective over ranks that hold parts of their groups or tokens.

        Args:
            inputs: the inputs, [b, s, k] or, if column-parallel layers have sequence parallelism, this rank's share of
                the tokens, [b, t, k]. The shares are all-gathered in FP8: the same bits as if they were gathered first.

        Returns:
            The quantized inputs, [b, s, k].
        """
        gathers = self.enters and self.region.shared_out
        # Ranks that hold shares of a sequence hold parts of a sample, but whole tokens.
        shares = self._quantize(inputs, E4M3, divided=not self.enters or (gathers and not self._rowwise))
        return [self._gathered(share) for share in shares] if gathers else shares

    def _gathered(self, share: Float8Tensor) -> Float8Tensor:
        axis = self.region.axis
        values = start_gather(share.values.view(torch.uint8), axis)  # gloo has no FP8
        inverse = start_gather(share.inverse, axis)() if self._rowwise else share.inverse
        return Float8Tensor(values().view(E4M3), inverse)

    def quantize_gradients(self, grads: Sequence[Tensor]) -> list[Float8Tensor]:
        """Quantizes gradients of the outputs of layers like this one, [b, s, k]; collective likewise."""
        return self._quantize(grads, E5M2, divided=self.enters)

    def _quantize(self, tensors: Sequence[Tensor], dtype: torch.dtype, *, divided: bool) -> list[Float8Tensor]:
        kernels, axis = self.region.kernels, self.region.axis
        if self._rowwise and not (divided and self.divided):
            return [quantize_rows(x_bsk, dtype, kernels) for x_bsk in tensors]
        dims, axes = ((2,), [axis]) if self._rowwise else ((1, 2), [axis, self._cp] if divided else [self._cp])
        bits = _agreed([magnitude_bits(x_bsk, dims, kernels) for x_bsk in tensors], axes)
        return [quantize(x_bsk, of_x, dtype, kernels) for x_bsk, of_x in zip(tensors, bits, strict=True)]

    def weight_bits(self) -> list[tuple[Tensor, bool]]:
        """Magnitudes of the groups of the weight: of the product of the output, and if they are others of the input
        gradient's; each with whether ranks hold parts of them."""
        weight_oi, kernels = self.weight.detach(), self.region.kernels
        if not self._rowwise:
            return [(magnitude_bits(weight_oi, (0, 1), kernels), True)]
        of_outputs, of_inputs = (magnitude_bits(weight_oi, dims, kernels) for dims in ((1,), (0,)))
        return [(of_outputs, not self.enters), (of_inputs, self.enters)]

    def quantize_weight(self, bits: Sequence[Tensor]) -> None:
        """Quantizes the weight.

        Args:
            bits: the agreed magnitudes of the groups, in the order of `weight_bits`.
        """
        both = quantize_weight(self.weight.detach(), bits, self.region.kernels)
        self.of_output, self.of_input_gradient = both


def _agreed(bits: Sequence[Tensor], axes: Sequence[Axis]) -> list[Tensor]:
    """The maxima of magnitudes over the ranks of axes: one all-reduce over each axis, of the magnitudes of all tensors.

    Args:
        bits: magnitudes of several tensors; may be overwritten.
        axes: the axes.
    """
    across = [axis for axis in axes if axis.size > 1]
    if not across:
        return list(bits)
    flat = bits[0].flatten() if len(bits) == 1 else torch.cat([of_tensor.flatten() for of_tensor in bits])
    for axis in across:
        dist.all_reduce(axis.recorded(flat), op=dist.ReduceOp.MAX, group=axis.group)
    parts = flat.split([of_tensor.numel() for of_tensor in bits])
    return [part.view_as(of_tensor) for part, of_tensor in zip(parts, bits, strict=True)]


@torch.no_grad()
def quantize_weights(layers: Sequence[Float8Linear], tp: Axis) -> None:
    """Quantizes the weights of a rank's layers, once in a step; collective over the tensor-parallel ranks.

    Args:
        layers: the layers, in the same order on all tensor-parallel ranks.
        tp: the tensor-parallel axis.
    """
    bits = [layer.weight_bits() for layer in layers]
    agreed = iter(_agreed([group for of_layer in bits for group, divided in of_layer if divided], [tp]))
    for layer, of_layer in zip(layers, bits, strict=True):
        layer.quantize_weight([next(agreed) if divided else group for group, divided in of_layer])


def _start_sum(x_bsk: Tensor, region: Region) -> Pending:
    """Starts the sum of the addends of a region's ranks.

    Args:
        x_bsk: this rank's addend, for all tokens; may be overwritten.
        region: the region.

    Returns:
        Handle of the sum, with sequence parallelism of this rank's share of the tokens.
    """
    axis = region.axis
    if axis.size == 1:
        return lambda: x_bsk
    if region.shared_out:
        return start_scatter(x_bsk, axis)
    work = dist.all_reduce(axis.recorded(x_bsk), group=axis.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return x_bsk

    return finish


def _keep(
    ctx: Any, layers: Sequence[Float8Linear], gradients: WeightGradients | None, parameters: Sequence[Any]
) -> tuple[Any, ...]:
    """Keeps for the backward pass what is not a tensor of its own; returns the biases.

    Args:
        ctx: autograd context.
        layers: the layers.
        gradients: handles their weight gradients.
        parameters: their weights, then the biases that the GEMMs add, or None.
    """
    weights, biases = parameters[: len(layers)], parameters[len(layers) :]
    # Under activation recomputation, a saved weight would be another tensor with the same values.
    ctx.parameters, ctx.has_bias = weights, [bias is not None for bias in biases]
    ctx.layers, ctx.gradients = layers, gradients
    return tuple(biases)


def _bias_gradient(grad_bso: Tensor, has_bias: bool) -> Tensor | None:
    return grad_bso.flatten(0, -2).sum(0) if has_bias else None


class _ColumnParallelFloat8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_bti: Tensor, layers: Sequence[Float8Linear], gradients: WeightGradients | None, *parameters: Any
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_bti)
        biases = _keep(ctx, layers, gradients, parameters)
        (quantized_bsi,) = layers[0].quantize_activations([x_bti])
        return tuple(layer.output(quantized_bsi, bias, x_bti.dtype) for layer, bias in zip(layers, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (x_bti,), layers, gradients = ctx.saved_tensors, ctx.layers, ctx.gradients
        region = layers[0].region
        quantized = layers[0].quantize_gradients(grads)
        whole = GatheredOnce(x_bti, region.axis, len(layers)) if region.shared_out else None
        # After the all-reduce of magnitudes, which the GEMMs need: on the same ranks, it would wait for this gather.
        if whole is not None and not (gradients is not None and gradients.defers):
            whole.start()
        # The sums of input gradients are overlapped with the next GEMMs, last with those of the weight gradients.
        sums = [
            _start_sum(layer.input_gradient(grad_bso, x_bti.dtype), region)
            for layer, grad_bso in zip(layers, quantized, strict=True)
        ]
        inputs = [x_bti if whole is None else partial(whole, number) for number in range(len(layers))]
        of_weights = [
            give(gradients, weight, WeightGradient(grad_bso, x_bsi, region.kernels))
            for weight, grad_bso, x_bsi in zip(ctx.parameters, grads, inputs, strict=True)
        ]
        of_biases = [*map(_bias_gradient, grads, ctx.has_bias)]
        first_bti, *others = (finish() for finish in sums)
        return sum(others, start=first_bti), None, None, *of_weights, *of_biases


class _RowParallelFloat8(torch.autograd.Function):
    """Its outputs must be added: all have the same gradient, which is gathered and quantized once."""

    @staticmethod
    def forward(
        ctx: Any, layers: Sequence[Float8Linear], gradients: WeightGradients | None, *tensors: Any
    ) -> tuple[Tensor, ...]:
        inputs, parameters = tensors[: len(layers)], tensors[len(layers) :]
        ctx.save_for_backward(*inputs)
        biases = _keep(ctx, layers, gradients, parameters)
        quantized = layers[0].quantize_activations(inputs)
        sums = [
            _start_sum(layer.output(x_bsi, bias, inputs[0].dtype), layer.region)
            for layer, x_bsi, bias in zip(layers, quantized, biases, strict=True)
        ]
        return tuple(finish() for finish in sums)

    @staticmethod
    def backward(ctx: Any, grad_bto: Tensor, *_same: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        inputs, layers = ctx.saved_tensors, ctx.layers
        region = layers[0].region
        grad_bso = start_gather(grad_bto, region.axis)() if region.shared_out else grad_bto
        (quantized_bso,) = layers[0].quantize_gradients([grad_bso])
        of_inputs = [layer.input_gradient(quantized_bso, inputs[0].dtype) for layer in layers]
        of_weights = [
            give(ctx.gradients, weight, WeightGradient(grad_bso, x_bsi, region.kernels))
            for weight, x_bsi in zip(ctx.parameters, inputs, strict=True)
        ]
        of_biases = [_bias_gradient(grad_bso, has_bias) for has_bias in ctx.has_bias]
        return None, None, *of_inputs, *of_weights, *of_biases


def column_parallel_float8(
    x_bti: Tensor, layers: Sequence[Float8Linear], gradients: WeightGradients | None
) -> tuple[Tensor, ...]:
    """Column-parallel linear layers of the same input, which quantize it once and enter a region.

    Args:
        x_bti: [b, s, i] or, with sequence parallelism, this rank's share of the tokens, [b, t, i].
        layers: the layers.
        gradients: handles the weight gradients in the backward pass; None leaves them to autograd.

    Returns:
        Each layer's output, [b, s, o], in x's dtype.
    """
    parameters = [layer.weight for layer in layers], [layer.bias for layer in layers]
    outs: tuple[Tensor, ...] = _ColumnParallelFloat8.apply(x_bti, layers, gradients, *parameters[0], *parameters[1])
    return outs


def row_parallel_float8(
    inputs: Sequence[Tensor], layers: Sequence[Float8Linear], gradients: WeightGradients | None
) -> Tensor:
    """The sum of row-parallel linear layers that leave a region. Each has a collective of its own.

    Args:
        inputs: this rank's input features of each layer, [b, s, i].
        layers: the layers.
        gradients: handles the weight gradients in the backward pass; None leaves them to autograd.

    Returns:
        [b, s, o] in the inputs' dtype; with sequence parallelism this rank's share of the tokens, [b, t, o].
    """
    biases = [layer.bias for layer in layers]
    after = biases if layers[0].divided else [None] * len(layers)  # on one rank, the GEMMs add them
    inside = [None] * len(layers) if layers[0].divided else biases
    weights = [layer.weight for layer in layers]
    outs = _RowParallelFloat8.apply(layers, gradients, *inputs, *weights, *inside)
    first_bto, *others = (out if bias is None else out + bias for out, bias in zip(outs, after, strict=True))
    return sum(others, start=first_bto)
