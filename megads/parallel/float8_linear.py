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

Shape suffixes: b = batch, s = sequence, t = this rank's share of it, i = local input features, o = local output
features, k = contracted features.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from megads.parallel.region_linear import GatheredOnce, Region, start_gather, start_scatter
from megads.parallel.weight_gradients import WeightGradient, WeightGradients, give


class Float8Linear:
    """The products of one linear layer in FP8.

    Args:
        name: name of the layer in the whole model.
        weight: this rank's shard of its weight, [o, i].
        enters: whether it is column-parallel and enters a region; else it is row-parallel and leaves one.
        region: the region.
        cp: the context-parallel axis.
        recipe: which values share a scale.

    Attributes:
        of_output: the weight as the product of the output takes it, [o, i]; set by `quantize_weights`.
        of_input_gradient: the transposed weight as the product of the input gradient takes it, [i, o].
    """

    def __init__(
        self, name: str, weight: nn.Parameter, *, enters: bool, region: Region, cp: Axis, recipe: Float8Recipe
    ) -> None:
        self.name, self.weight, self.enters, self.region = name, weight, enters, region
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

    def __call__(self, x_bti: Tensor, bias: Tensor | None, gradients: WeightGradients | None) -> Tensor:
        """x W^T + b, as `megads.parallel.region_linear` computes it without FP8.

        Args:
            x_bti: [b, s, i] or, if a column-parallel layer has sequence parallelism, [b, t, i].
            bias: bias of the layer, or None. A row-parallel layer adds it after its collective.
            gradients: handles the weight gradient in the backward pass; None leaves it to autograd.

        Returns:
            [b, s, o] or, if a row-parallel layer has sequence parallelism, [b, t, o].
        """
        inside = self.enters or not self.divided
        out: Tensor = _Float8Linear.apply(x_bti, self.weight, bias if inside else None, self, gradients)
        return out if inside or bias is None else out + bias

    def quantize_activation(self, x_btk: Tensor) -> Float8Tensor:
        """Quantizes the input of the layer; collective over the ranks that hold parts of its groups or of its tokens.

        Args:
            x_btk: the input, [b, s, k] or, if a column-parallel layer has sequence parallelism, this rank's share of
                the tokens, [b, t, k]. The shares are all-gathered in FP8: the same bits as if they were gathered first.

        Returns:
            The quantized input, [b, s, k].
        """
        axis, gathers = self.region.axis, self.enters and self.region.shared_out
        # Ranks that hold shares of a sequence hold parts of a sample, but whole tokens.
        share = self._quantize(x_btk, E4M3, divided=not self.enters or (gathers and not self._rowwise))
        if not gathers:
            return share
        values = start_gather(share.values.view(torch.uint8), axis)  # gloo has no FP8
        inverse = start_gather(share.inverse, axis)() if self._rowwise else share.inverse
        return Float8Tensor(values().view(E4M3), inverse)

    def quantize_gradient(self, grad_bsk: Tensor) -> Float8Tensor:
        """Quantizes the gradient of the output; collective likewise."""
        return self._quantize(grad_bsk, E5M2, divided=self.enters)

    def _quantize(self, x_bsk: Tensor, dtype: torch.dtype, *, divided: bool) -> Float8Tensor:
        kernels = self.region.kernels
        if self._rowwise and not (divided and self.divided):
            return quantize_rows(x_bsk, dtype, kernels)
        bits = magnitude_bits(x_bsk, (2,) if self._rowwise else (1, 2), kernels)
        if divided:
            _agree(bits, self.region.axis)
        if not self._rowwise:
            _agree(bits, self._cp)
        return quantize(x_bsk, bits, dtype, kernels)

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


def _agree(bits: Tensor, axis: Axis) -> None:
    """Replaces magnitudes by their maximum over the ranks of an axis."""
    if axis.size > 1:
        dist.all_reduce(axis.recorded(bits), op=dist.ReduceOp.MAX, group=axis.group)


@torch.no_grad()
def quantize_weights(layers: Sequence[Float8Linear], tp: Axis) -> None:
    """Quantizes the weights of a rank's layers, once in a step; collective over the tensor-parallel ranks.

    Args:
        layers: the layers, in the same order on all tensor-parallel ranks.
        tp: the tensor-parallel axis.
    """
    bits = [layer.weight_bits() for layer in layers]
    if tp.size > 1:
        shared = [group for of_layer in bits for group, agreed in of_layer if agreed]
        flat = torch.cat([group.flatten() for group in shared])
        _agree(flat, tp)
        for group, agreed in zip(shared, flat.split([group.numel() for group in shared]), strict=True):
            group.copy_(agreed.view_as(group))
    for layer, of_layer in zip(layers, bits, strict=True):
        layer.quantize_weight([group for group, _ in of_layer])


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_bti: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        layer: Float8Linear,
        gradients: WeightGradients | None,
    ) -> Tensor:
        ctx.save_for_backward(x_bti)
        # Under activation recomputation, a saved weight would be another tensor with the same values.
        ctx.parameter, ctx.has_bias = weight, bias is not None
        ctx.layer, ctx.gradients = layer, gradients
        region, of_output = layer.region, layer.of_output
        assert of_output is not None, f"the weight of {layer.name} is not quantized"
        quantized_bsi = layer.quantize_activation(x_bti)
        out_bso = scaled_linear(quantized_bsi, of_output, bias, x_bti.dtype, region.kernels)
        if layer.enters or not layer.divided:
            return out_bso
        if region.shared_out:
            return start_scatter(out_bso, region.axis)()
        dist.all_reduce(region.axis.recorded(out_bso), group=region.axis.group)
        return out_bso

    @staticmethod
    def backward(ctx: Any, grad_bto: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        (x_bti,), layer, gradients = ctx.saved_tensors, ctx.layer, ctx.gradients
        region, axis, enters = layer.region, layer.region.axis, layer.enters and layer.divided
        grad_bso = start_gather(grad_bto, axis)() if region.shared_out and not layer.enters else grad_bto
        grad_bias = grad_bso.flatten(0, -2).sum(0) if ctx.has_bias else None
        x_of = GatheredOnce(x_bti, axis, 1) if enters and region.shared_out else None
        if x_of is not None and not (gradients is not None and gradients.defers):
            x_of.start()
        quantized_bso = layer.quantize_gradient(grad_bso)
        grad_x_bsi = scaled_linear(quantized_bso, layer.of_input_gradient, None, x_bti.dtype, region.kernels)
        # The collective of the input gradient is overlapped with the GEMM of the weight gradient.
        if not enters:
            finish = None
        elif region.shared_out:
            finish = start_scatter(grad_x_bsi, axis)
        else:
            finish = dist.all_reduce(axis.recorded(grad_x_bsi), group=axis.group, async_op=True).wait
        x_bsi = x_bti if x_of is None else lambda: x_of(0)
        grad_weight = give(gradients, ctx.parameter, WeightGradient(grad_bso, x_bsi, region.kernels))
        if finish is not None:
            scattered = finish()
            grad_x_bsi = scattered if region.shared_out else grad_x_bsi
        return grad_x_bsi, grad_weight, grad_bias, None, None
