"""Operators of megads with their inputs, which `scripts.bench.ops` times on a CPU and `gpu_kernels` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megads.model.attention import alibi_slopes, causal_bias
from megads.model.rotary import rotary_tables
from megads.ops.activation import bias_gelu, gelu, swiglu
from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of
from megads.ops.float8 import E4M3, E5M2, Float8Tensor, magnitude_bits, quantize, quantize_rows, quantize_weight
from megads.ops.norm import add_layer_norm, layer_norm, rms_norm
from megads.ops.rotary import rotate
from megads.ops.softmax import masked_softmax
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AXIS = single_rank_grid().tp
EPS, SCALE = 1e-5, 0.1

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases; the defaults are for a CPU.

    Attributes:
        rows, width: shape of row-wise operators.
        scores: batch, heads and sequence length of the softmax.
        tokens, vocabulary: shape of cross entropy.
        heads: batch, sequence length, heads and head dim of attention, also of the model.
        parameters: number of parameters of the optimizer.
        layers, model_vocabulary: size of the model.
    """

    rows: int = 4096
    width: int = 2048
    scores: tuple[int, int, int] = (2, 8, 1024)
    tokens: int = 1024
    vocabulary: int = 50304
    heads: tuple[int, int, int, int] = (4, 512, 8, 64)
    parameters: int = 20_000_000
    layers: int = 8
    model_vocabulary: int = 32000


GPU = Sizes(16384, 4096, (4, 16, 2048), 4096, 50304, (16, 2048, 16, 128))
"""Every tensor is more than twice the size of a GPU's L2 cache, so that repeated calls do not measure the cache."""
SMALL = Sizes(12, 40, (1, 3, 48), 7, 130, (2, 5, 3, 8), 3000, 1, 512)


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        name: name of the operator.
        function: takes the kernels and the inputs, in any floating dtype.
        inputs: leaves that get gradients.
        moved: minimum of elements read and written, forward and backward; backward 0: the gradient comes with the loss.
        peer: what users of torch write, if that is not `function` with torch's operators.
        peer_inputs: inputs of `peer`, if it has others.
    """

    name: str
    function: Function
    inputs: list[Tensor]
    moved: tuple[int, int]
    peer: Function | None = None
    peer_inputs: list[Tensor] | None = None

    def using(self, kernels: Kernels) -> Function:
        """Returns the operator as a function of its inputs only."""
        return partial(self.function, kernels)


def operators(sizes: Sizes, dtype: torch.dtype, device: str) -> list[Operator]:
    """Returns all operators."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    rows, width, (batch, heads, length) = sizes.rows, sizes.width, sizes.scores
    x, residual, weight, bias = draw(rows, width), draw(rows, width), draw(width), draw(width)
    gates, scores, query = draw(rows, width), draw(batch, heads, length, length), draw(*sizes.heads)
    halves = gates.detach().unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).contiguous().requires_grad_()
    count, seen = x.numel(), batch * heads * length * (length + 1) // 2
    slopes = alibi_slopes(heads).to(device)
    scores_bias = causal_bias(heads, range(heads), length, True, torch.device(device), torch.float32)
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens), generator=generator, device=device)
    weights = torch.rand(labels.shape, generator=generator, device=device, dtype=torch.float64)
    tables = rotary_tables(torch.arange(sizes.heads[1], device=device), sizes.heads[3], 1e4, torch.float32)
    mask = DropoutMask(site_key(0, "dropout"), threshold_of(0.1), torch.zeros(1, dtype=torch.int64, device=device))

    def softmax(kernels: Kernels, x: Tensor) -> Tensor:
        return masked_softmax(x, SCALE, slopes.to(x.dtype) if x.dtype == torch.float64 else slopes, kernels=kernels)

    def precomputed_softmax(x: Tensor) -> Tensor:
        return torch.softmax(x.float() * SCALE + scores_bias, dim=-1).to(dtype)

    def normed_sum(kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, added = add_layer_norm(x, residual, weight, bias, EPS, kernels)
        return out + added

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def turned(kernels: Kernels, x: Tensor) -> Tensor:
        cos, sin = (table.double() if x.dtype == torch.float64 else table for table in tables)
        return rotate(x, cos, sin, kernels)

    def hugging_face_rotary(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        cos, sin = (torch.cat((table, table), dim=-1).to(dtype) for table in tables)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def dropped(kernels: Kernels, x: Tensor, residual: Tensor) -> Tensor:
        return dropout(x[None], mask, None, residual[None], kernels).squeeze(0)

    def loss(kernels: Kernels, x: Tensor) -> Tensor:
        if kernels is FUSED:
            # The kernel writes the gradient over the logits, in the forward pass.
            logits = x.clone() if torch.is_grad_enabled() else x
            return loss_in_place(logits, labels, weights, sizes.vocabulary, AXIS)
        return (vocab_parallel_token_losses(x, labels, sizes.vocabulary, AXIS) * weights).sum()

    def norm(kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x, weight, bias, EPS, kernels)

    return [
        Operator("ALiBi softmax", softmax, [scores], (seen + scores.numel(), 2 * seen + scores.numel()),
                 precomputed_softmax),
        Operator("LayerNorm", norm, [x, weight, bias], (2 * count, 3 * count)),
        Operator("RMSNorm", lambda kernels, x, w: rms_norm(x, w, EPS, kernels), [x, weight], (2 * count, 3 * count),
                 lambda x, w: F.rms_norm(x, (width,), w, EPS)),
        Operator("residual + LayerNorm + sum", normed_sum, [x, residual, weight, bias], (7 * count, 4 * count)),
        Operator("GELU", lambda kernels, x: gelu(x, kernels), [x], (2 * count, 3 * count)),
        Operator("bias GELU", lambda kernels, x, b: bias_gelu(x, b, kernels), [x, bias], (2 * count, 3 * count),
                 lambda x, b: F.gelu(x + b, approximate="tanh")),
        # Gate and up are column pairs in megads, halves in the peers.
        Operator("SwiGLU", lambda kernels, x: swiglu(x, kernels), [gates], (3 * count // 2, 5 * count // 2), gated,
                 [halves]),
        Operator("dropout + residual", dropped, [x, residual], (3 * count, 2 * count)),
        Operator("rotary", turned, [query], (2 * query.numel(), 2 * query.numel()), hugging_face_rotary),
        Operator("cross entropy, no gradient", loss, [draw(1, sizes.tokens, sizes.vocabulary)],
                 (sizes.tokens * sizes.vocabulary, 0)),
    ]  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """Quantization of a tensor to FP8, which has no gradient and is the same in every implementation, bit for bit.

    Attributes:
        name: name of the row.
        function: takes the kernels and the tensor.
        x: the tensor.
        moved_bytes: minimum of bytes read and written, by a kernel that cannot keep a group on the chip.
    """

    name: str
    function: Callable[[Kernels, Tensor], Sequence[Float8Tensor]]
    x: Tensor
    moved_bytes: int

    def is_exact(self) -> bool:
        """Whether megads' kernels give the bits of torch's operators."""
        ours, eager = (
            [
                part
                for found in self.function(kernels, self.x)
                for part in (found.values.view(torch.uint8), found.inverse)
            ]
            for kernels in (FUSED, TORCH)
        )
        return all(torch.equal(mine, theirs) for mine, theirs in zip(ours, eager, strict=True))


def quantizations(sizes: Sizes, dtype: torch.dtype, device: str) -> list[Quantization]:
    """Returns what train.fp8 quantizes: activations and gradients, by rows or by samples, and a weight's two copies."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(sizes.rows, sizes.width, generator=generator, device=device).to(dtype)
    samples, count, read = x.unflatten(0, (4, -1)), x.numel(), x.numel() * dtype.itemsize

    def of_samples(kernels: Kernels, x: Tensor) -> Sequence[Float8Tensor]:
        return (quantize(x, magnitude_bits(x, (1, 2), kernels), E5M2, kernels),)

    def of_weight(kernels: Kernels, x: Tensor) -> Sequence[Float8Tensor]:
        return quantize_weight(x, [magnitude_bits(x, dims, kernels) for dims in ((1,), (0,))], kernels)

    return [
        Quantization("FP8 of rows", lambda kernels, x: (quantize_rows(x, E4M3, kernels),), x, read + count),
        Quantization("FP8 of samples", of_samples, samples, 2 * read + count),
        Quantization("FP8 weight, both copies", of_weight, x, 3 * read + 2 * count),
    ]


def results(operator: Operator, kernels: Kernels, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, with inputs in `dtype`."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in operator.inputs]
    out = operator.function(kernels, *leaves)
    generator = torch.Generator(out.device).manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, device=out.device)
    out.backward(grad.to(operator.inputs[0].dtype).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors(operator: Operator) -> tuple[float, float]:
    """Error of megads' kernel against fp64 in the dtype of the inputs, the maximum over output and gradients.

    Returns:
        The norm of the difference over that of the exact result, and over the difference of torch's operators.
    """
    dtype = operator.inputs[0].dtype
    ours, eager = results(operator, FUSED, dtype), results(operator, TORCH, dtype)
    relative = ratio = 0.0
    for mine, theirs, exact in zip(ours, eager, results(operator, TORCH, torch.float64), strict=True):
        if exact.numel() == 1:
            continue  # the error of a single number is random
        off, measure = ((found.double() - exact).norm().item() for found in (mine, theirs))
        found = off / measure if measure else (0.0 if off == 0 else float("inf"))
        # max() may ignore a NaN.
        ratio = found if not found <= ratio else ratio
        relative = max(relative, off / max(exact.norm().item(), 1e-300))
    return relative, ratio
