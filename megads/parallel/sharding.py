"""Applies a sharding table to a layer: replaces linears by tensor-parallel ones, narrows heads, places parameters.

Independent of the model. Each layer (Shoeybi et al. 2019) holds one rank's shard of the weights. With sequence
parallelism (Korthikanti et al. 2022), activations outside parallel regions are sharded along the sequence instead of
replicated: layers that enter a region all-gather them, layers that leave one reduce-scatter them.

OLMo 2 (2025) normalizes the queries of all heads as one vector, and likewise the keys, by RMSNorm (Zhang and Sennrich
2019). `ColumnParallelNorms` take the mean square over the features of all tensor-parallel ranks: the forward and the
backward pass each all-reduce one number per token and norm.

Shape suffixes: b = batch, s = sequence, t = this rank's share of the sequence (s / size with sequence parallelism, else
s), i = local input features, o = local output features, h = hidden size, w = this rank's features of a sharded norm,
k = norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.errors import ConfigError
from megads.ops.config import TORCH, Float8Recipe, KernelOp, Kernels
from megads.ops.softcap import softcap
from megads.parallel.config import padded_rows
from megads.parallel.embedding import PositionShardEmbedding, VocabParallelEmbedding
from megads.parallel.experts import ALONE, ExpertParallel, shard_experts
from megads.parallel.float8_linear import Float8Linear, column_parallel_float8, row_parallel_float8
from megads.parallel.grid import Axis
from megads.parallel.loss import Targets, head_loss
from megads.parallel.partition import (
    ExpertShard,
    FeatureGroups,
    ParallelStyle,
    ShardingTable,
    first_match,
    rows_multiple,
    sharded_dim,
)
from megads.parallel.region_linear import (
    Region,
    column_parallel_linear,
    column_parallel_linears,
    gather_shared_features,
    row_parallel_linears,
)
from megads.parallel.weight_gradients import SplitLayer, linear


def _sums_over_ranks(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """Stacks tensors [b, s] and all-reduces them at once, to [k, b, s]."""
    sums_kbs = torch.stack(list(parts))
    dist.all_reduce(axis.recorded(sums_kbs), group=axis.group)
    return sums_kbs


class _CutRMSNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, eps: float, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs, weights = tensors[:count], tensors[count:]
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        squares_kbs = _sums_over_ranks([x.square().sum(-1) for x in wide], axis)
        scales = [
            torch.rsqrt(squares_bs / (x.shape[-1] * axis.size) + eps)
            for x, squares_bs in zip(inputs, squares_kbs, strict=True)
        ]
        ctx.axis = axis
        ctx.save_for_backward(*inputs, *weights, *scales)
        return tuple(
            (x_bsw * scale_bs[..., None] * weight).to(given.dtype)
            for given, x_bsw, weight, scale_bs in zip(inputs, wide, weights, scales, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        count, saved = len(grads), ctx.saved_tensors
        inputs, weights, scales = saved[:count], saved[count : 2 * count], saved[2 * count :]
        # y = x r w with r = (sum of x^2 / n + eps)^(-1/2), so dx = r w g - x r^3 / n * (sum of w g x), sums over ranks.
        wide = [x.to(scale.dtype) for x, scale in zip(inputs, scales, strict=True)]
        scaled = [grad * weight.to(x.dtype) for grad, weight, x in zip(grads, weights, wide, strict=True)]
        dots_kbs = _sums_over_ranks([(s * x).sum(-1) for s, x in zip(scaled, wide, strict=True)], ctx.axis)
        grad_inputs, grad_weights = [], []
        for given, weight, x, s, grad, scale_bs, dots_bs in zip(
            inputs, weights, wide, scaled, grads, scales, dots_kbs, strict=True
        ):
            scale_bs1, width = scale_bs[..., None], x.shape[-1] * ctx.axis.size
            pull_bs1 = (scale_bs**3 * dots_bs / width)[..., None]
            grad_inputs.append((scale_bs1 * s - pull_bs1 * x).to(given.dtype))
            grad_weights.append((grad * x * scale_bs1).flatten(0, -2).sum(0).to(weight.dtype))
        return None, None, None, *grad_inputs, *grad_weights


def split_rms_norms(inputs: Sequence[Tensor], weights: Sequence[Tensor], eps: float, axis: Axis) -> tuple[Tensor, ...]:
    """RMSNorm of several tensors of the same tokens, with one all-reduce in each of the forward and backward passes.

    Args:
        inputs: this rank's features of each tensor, [b, s, w]. w may differ between tensors, but not between ranks.
        weights: this rank's gains for each tensor, [w].
        eps: added to each mean square.
        axis: the tensor-parallel axis, of size 2 or more.

    Returns:
        x / sqrt(mean of all ranks' x^2 + eps) * weight for each tensor, [b, s, w] in its dtype; computed in at least
        fp32.
    """
    return _CutRMSNorms.apply(axis, eps, len(inputs), *inputs, *weights)  # type: ignore[no-any-return]


class RegionModule(nn.Module):
    """A module that enters or leaves a parallel region.

    Attributes:
        uses_float8: whether its training passes multiply in FP8; see `use_float8`.
    """

    uses_float8 = False

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    @property
    def untraced(self) -> tuple[str, ...]:
        """Methods excluded from torch.compile: overlapped communication, and megads' GEMMs on CPUs."""
        on_cpu = any(parameter.device.type == "cpu" for parameter in self.parameters(recurse=False))
        own = on_cpu and self.region.kernels.fused(KernelOp.linear)
        return ("forward",) if own or self.uses_float8 or self.region.axis.size > 1 else ()


class SplitLinear(RegionModule, SplitLayer):
    """A linear layer whose rows or columns are sharded over the axis.

    Attributes:
        float8: computes its training passes in FP8; None: as its weights.
    """

    float8: Float8Linear | None = None
    bias: nn.Parameter | None

    def in_float8(self, x_bti: Tensor) -> Tensor | None:
        """The layer's output in FP8; None in evaluation, and if it does not compute in FP8."""
        if self.float8 is None or not self.training:
            return None
        return self.float8(x_bti, self.weight_gradients)


def _in_float8(layers: Sequence[SplitLinear]) -> list[Float8Linear]:
    """The products in FP8 of layers that share collectives; empty in evaluation, and if they do not compute in FP8."""
    return [layer.float8 for layer in layers if layer.float8 is not None and layer.training]


class ColumnParallelLinear(SplitLinear):
    """y = x W^T (+ b) with the rows of W, the output features, sharded over the axis. Enters a parallel region."""

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool = True) -> None:
        super().__init__(region)
        self.weight = nn.Parameter(torch.empty(out_features // region.axis.size, in_features))
        self.bias = nn.Parameter(torch.empty(out_features // region.axis.size)) if bias else None

    def forward(self, x_bti: Tensor) -> Tensor:
        """[b, t, in] -> [b, s, out / size]."""
        out_bso = self.in_float8(x_bti)
        if out_bso is None:
            out_bso = column_parallel_linear(x_bti, self.weight, self.bias, self.region, self.weight_gradients)
        return self.whole(out_bso)

    def whole(self, out_bso: Tensor) -> Tensor:
        """Completes this rank's output features, [b, s, out / size], by those that other ranks compute for it."""
        return out_bso


class SharedColumnParallelLinear(ColumnParallelLinear):
    """A `ColumnParallelLinear` with fewer groups of features than ranks: fewer KV heads than tensor-parallel ranks.

    Every rank needs its group's key and value. Its weights hold an equal part of their rows, after those of its own
    queries; the outputs are all-gathered. Thus every row is held, updated and saved by exactly one rank, as without
    groups, and the gradients of keys and values are summed over the ranks that read them. Megatron-Core all-gathers the
    whole projection instead.

    Args:
        in_features: input features.
        out_features: output features of the unsharded layer.
        region: the region that it enters.
        bias: whether it has a bias.
        groups: groups of its output features, fewer than ranks.
    """

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool, groups: FeatureGroups) -> None:
        super().__init__(in_features, out_features, region, bias)
        axis = region.axis
        self.divided = len(groups.held(out_features, axis.rank, axis.size)[0])
        count = axis.size * (groups.divided + groups.shared) // out_features
        first = axis.rank // count * count
        self.sharers = range(first, first + count)

    def whole(self, out_bso: Tensor) -> Tensor:
        """[b, s, out / size] -> [b, s, own queries, key and value of the group]."""
        return gather_shared_features(out_bso, self.divided, self.sharers, self.region.axis)


class RowParallelLinear(SplitLinear):
    """y = x W^T (+ b) with the columns of W, the input features, sharded over the axis. Leaves a parallel region.

    A bias is added once, after the all-reduce; with sequence parallelism, by every rank to its own tokens.
    """

    def __init__(self, in_features: int, out_features: int, region: Region, bias: bool = True) -> None:
        super().__init__(region)
        self.weight = nn.Parameter(torch.empty(out_features, in_features // region.axis.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_bsi: Tensor) -> Tensor:
        """[b, s, in / size] -> [b, t, out]."""
        out_bto = self.in_float8(x_bsi)
        if out_bto is not None:
            return out_bto
        if self.region.axis.size == 1:
            # The bias is added inside the GEMM, which rounds once, as in nn.Linear.
            return linear(x_bsi, self.weight, self.bias, self.weight_gradients, self.region.kernels)
        out_bto = row_parallel_linears([x_bsi], [self.weight], self.region, self.weight_gradients)
        return out_bto if self.bias is None else out_bto + self.bias


class ColumnParallelBranches(RegionModule):
    """Several `ColumnParallelLinear` of the same input, which share one collective to enter their region.

    In FP8 they share its quantization, too, but each reduces its input gradient.
    """

    def forward(self, x_bti: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
        """[b, t, in] -> [b, s, out / size] of every layer."""
        gradients = layers[0].weight_gradients
        if float8 := _in_float8(layers):
            outs = column_parallel_float8(x_bti, float8, gradients)
        elif self.region.axis.size == 1:
            return tuple(layer(x_bti) for layer in layers)
        else:
            weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
            outs = column_parallel_linears(x_bti, weights, biases, self.region, gradients)
        return tuple(layer.whole(out_bso) for layer, out_bso in zip(layers, outs, strict=True))


class RowParallelBranches(RegionModule):
    """The sum of several `RowParallelLinear`, which share one collective to leave their region.

    Each rank adds its partial outputs before the collective, so that they are communicated and rounded once. With FP8,
    each layer's outputs have their own collective; they share that of their gradient, and its quantization.
    """

    def forward(self, inputs: Sequence[Tensor], layers: Sequence[RowParallelLinear]) -> Tensor:
        """[b, s, in / size] of every layer -> [b, t, out]."""
        gradients = layers[0].weight_gradients
        if float8 := _in_float8(layers):
            return row_parallel_float8(inputs, float8, gradients)
        if self.region.axis.size == 1:
            first_bto, *others = (layer(x_bsi) for layer, x_bsi in zip(layers, inputs, strict=True))
            return sum(others, start=first_bto)
        out_bto = row_parallel_linears(inputs, [layer.weight for layer in layers], self.region, gradients)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return out_bto + sum(biases) if biases else out_bto


class ColumnParallelNorms(RegionModule):
    """Norms of tensors whose features are sharded over the axis, with statistics over the features of all ranks.

    The norm modules, which hold this rank's gains, are arguments of `forward`.
    """

    def forward(self, inputs: Sequence[Tensor], norms: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """[b, s, heads, head dim] of every norm -> the same."""
        flat = [x.flatten(2) for x in inputs]
        if self.region.axis.size == 1:
            normed = tuple(norm(x_bsw) for norm, x_bsw in zip(norms, flat, strict=True))
        else:
            weights: Any = [norm.gain for norm in norms]
            eps: Any = norms[0].eps
            normed = split_rms_norms(flat, weights, eps, self.region.axis)
        return tuple(y_bsw.view_as(x) for y_bsw, x in zip(normed, inputs, strict=True))


class VocabParallelHead(RegionModule, SplitLayer):
    """Output projection whose rows are sharded over the axis. Enters a region that the loss leaves.

    Args:
        rows: rows of the weight on each rank, including padding.
        hidden_size: columns of the weight.
        region: region that it enters.
        cap: softcap of the logits; None: no softcap.
        bias: whether it has a bias.
    """

    def __init__(
        self, rows: int, hidden_size: int, region: Region, cap: float | None = None, bias: bool = False
    ) -> None:
        super().__init__(region)
        self.cap, self.rows = cap, rows
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, hidden_bth: Tensor, info: BatchInfo, targets: Targets | None = None) -> Tensor:
        """[b, t, h] -> logits [b, s, rows] of this rank's rows, including padding.

        Args:
            hidden_bth: hidden states.
            info: description of the micro-batch.
            targets: if given, returns the loss instead, see `megads.parallel.loss.head_loss`, and never holds all
                logits.
        """
        if targets is not None:
            of_logits = replace(targets, softcap=self.cap)
            return head_loss(hidden_bth, self.weight, of_logits, self.region, self.weight_gradients, self.bias)
        logits_bsr = column_parallel_linear(hidden_bth, self.weight, self.bias, self.region, self.weight_gradients)
        return logits_bsr if self.cap is None else softcap(logits_bsr, self.cap)


@dataclass(frozen=True)
class ParameterPlacement:
    """Position of a rank's shard in the unsharded parameter.

    Attributes:
        key: name of the unsharded parameter in the whole model.
        global_shape: shape of the unsharded parameter.
        dim: sharded dim, None for a replicated parameter.
        held: ranges of indices along `dim` that this rank holds, in the order of the local tensor, whose rest is
            vocabulary padding. Several ranges only along dim 0.
        held_by_ranks: `held` of all ranks, in order, if the ranks do not hold consecutive parts.
        partial: whether the parameter is replicated but applied to this rank's share of the sequence or features only,
            so that its gradient must be all-reduced over tensor-parallel ranks.
        experts: the experts whose rows the rank holds, as many of each, in the order of the local tensor; empty: it
            does not belong to experts.
    """

    key: str
    global_shape: tuple[int, ...]
    dim: int | None = None
    held: tuple[range, ...] = ()
    held_by_ranks: tuple[range, ...] = ()
    partial: bool = False
    experts: range = range(0)

    @property
    def expert(self) -> bool:
        """Whether it belongs to experts, whose gradients are reduced over `ParallelGrid.expert_data`."""
        return len(self.experts) > 0

    @property
    def length(self) -> int:
        """Number of indices along `dim` without padding."""
        return sum(map(len, self.held))

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's shard of an unsharded tensor, without padding; a view if it is contiguous along `dim`."""
        if self.dim is None:
            return whole
        parts = [whole.narrow(self.dim, part.start, len(part)) for part in self.held]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor without padding."""
        return tuple(self.length if d == self.dim else size for d, size in enumerate(self.global_shape))


def placement_of(parameter: nn.Parameter) -> ParameterPlacement:
    """Returns the placement of a parameter that `materialise` has allocated."""
    place: ParameterPlacement = parameter.placement  # type: ignore[attr-defined]
    return place


def _parallel_layer(
    layer: nn.Module, path: str, style: ParallelStyle, region: Region, groups: FeatureGroups | None, vocab_multiple: int
) -> nn.Module:
    axis = region.axis
    if style in (ParallelStyle.columns, ParallelStyle.rows):
        return ColumnParallelBranches(region) if style is ParallelStyle.columns else RowParallelBranches(region)
    if style is ParallelStyle.norms:
        return ColumnParallelNorms(region)
    if style in (ParallelStyle.column, ParallelStyle.row):
        assert isinstance(layer, nn.Linear)
        divided = layer.out_features if style is ParallelStyle.column else layer.in_features
        if divided % axis.size:
            raise ConfigError(f"{path}: {divided} features are not divisible by parallel.tp = {axis.size}")
        sizes, bias = (layer.in_features, layer.out_features), layer.bias is not None
        if groups is not None and groups.are_divided(layer.out_features, axis.size):
            return SharedColumnParallelLinear(*sizes, region, bias, groups)
        return (ColumnParallelLinear if style is ParallelStyle.column else RowParallelLinear)(*sizes, region, bias)
    assert isinstance(layer.weight, Tensor)
    if style is ParallelStyle.vector:
        layer.weight = nn.Parameter(torch.empty(len(layer.weight) // axis.size))
        return layer
    rows, hidden_size = layer.weight.shape
    if style is ParallelStyle.sequence:
        return PositionShardEmbedding(rows, hidden_size, axis) if region.sequence_parallel else layer
    rows = padded_rows(rows, axis.size, vocab_multiple)
    if style is ParallelStyle.vocab:
        return VocabParallelEmbedding(rows, hidden_size, axis, region.sequence_parallel)
    biased = getattr(layer, "bias", None) is not None
    return VocabParallelHead(rows, hidden_size, region, getattr(layer, "softcap", None), biased)


def _placement(
    key: str,
    shape: tuple[int, ...],
    style: ParallelStyle | None,
    region: Region,
    groups: FeatureGroups | None,
    vocab_multiple: int,
    experts: ExpertShard | None,
) -> ParameterPlacement:
    axis = region.axis
    if style is ParallelStyle.experts:
        assert experts is not None
        return ParameterPlacement(key, shape, 0, experts.held(shape[0]), experts=experts.experts)
    if style is ParallelStyle.inside:
        return ParameterPlacement(key, shape, partial=axis.size > 1)
    dim = sharded_dim(style, len(shape))
    if dim is None:
        return ParameterPlacement(key, shape, partial=region.sequence_parallel)
    rows = padded_rows(shape[dim], axis.size, rows_multiple(style, vocab_multiple))
    if groups is not None and groups.are_divided(shape[dim], axis.size):
        by_rank = [groups.held(shape[dim], rank, axis.size) for rank in range(axis.size)]
        return ParameterPlacement(key, shape, dim, by_rank[axis.rank], tuple(chain.from_iterable(by_rank)))
    start, stop = (min(rank * rows, shape[dim]) for rank in (axis.rank, axis.rank + 1))
    return ParameterPlacement(key, shape, dim, (range(start, stop),))


def attention_cores(layer: nn.Module, name: str, table: ShardingTable) -> list[nn.Module]:
    """The attention cores of a layer according to a sharding table.

    Args:
        layer: the layer, sharded or not.
        name: prefix of the layer in the whole model.
        table: sharding table of the model.
    """
    paths = ((f"{name}.{path}", module) for path, module in layer.named_modules())
    return [m for path, m in paths if any(fnmatchcase(path, pattern) for pattern in table.attention_cores)]


def shard_layer(
    layer: nn.Module,
    name: str,
    table: ShardingTable,
    axis: Axis,
    *,
    sequence_parallel: bool,
    chunks: int = 1,
    vocab_multiple: int = 1,
    kernels: Kernels = TORCH,
    experts: ExpertParallel = ALONE,
) -> tuple[nn.Module, dict[str, ParameterPlacement]]:
    """Shards a layer over the tensor-parallel axis, on the meta device.

    Args:
        layer: the unsharded layer, on the meta device.
        name: prefix of the layer in the whole model.
        table: sharding table of the model.
        axis: the tensor-parallel axis; size 1 uses the same layers without their collectives.
        sequence_parallel: shard activations outside regions along dim 1; no effect if the axis has size 1.
        chunks: parts by which collectives and GEMMs overlap; see `megads.parallel.region_linear.Region`.
        vocab_multiple: number that divides the rows of the vocabulary on each rank.
        kernels: implementation of the GEMMs.
        experts: expert parallelism of this rank.

    Returns:
        The layer (its root may have been replaced) and the placement of every parameter by its path in the layer.

    Raises:
        ConfigError: a size is not divisible by the axis size.
    """
    region = Region(axis, sequence_parallel and axis.size > 1, chunks, kernels)
    placements = {}
    expert_shard = experts.shard(table.num_experts, axis) if table.num_experts else None
    for path, parameter in layer.named_parameters():
        key = f"{name}.{path}"
        module = key.rpartition(".")[0]
        style, groups = first_match(table.parameters, module), first_match(table.feature_groups, module)
        shape = tuple(parameter.shape)
        placements[path] = _placement(key, shape, style, region, groups, vocab_multiple, expert_shard)

    if expert_shard is not None:
        shard_experts(layer, name, table, region, experts)
    for core in attention_cores(layer, name, table):
        core.narrow(axis.rank, axis.size)  # type: ignore[operator]
    for path, module in list(layer.named_modules()):
        full_path = f"{name}.{path}".rstrip(".")
        if region.sequence_parallel and any(fnmatchcase(full_path, pattern) for pattern in table.dropouts):
            module.shard = (axis.rank, axis.size)
        style = first_match(table.parameters, full_path)
        if style is None or style in (ParallelStyle.inside, ParallelStyle.experts):
            continue
        with torch.device("meta"):
            groups = first_match(table.feature_groups, full_path)
            replacement = _parallel_layer(module, full_path, style, region, groups, vocab_multiple)
        if path:
            layer.set_submodule(path, replacement)
        else:
            layer = replacement
    return layer, placements


def materialise(
    layer: nn.Module,
    placements: dict[str, ParameterPlacement],
    value: Callable[[str, tuple[int, ...]], Tensor] | None,
    device: torch.device,
) -> nn.Module:
    """Allocates a layer's parameters and fills them with slices of the full initial values, one full tensor at a time.

    If `value` is None they are 0, as a checkpoint is going to be loaded into them.

    Each parameter gets its `placement` as an attribute. Sharded ones are marked `tensor_model_parallel`, which
    DeepSpeed's gradient norm uses; those whose gradients must be all-reduced over tensor-parallel ranks are marked
    `gradient_partial`.
    """
    _allocate(layer, device)
    for path, parameter in layer.named_parameters():
        place = placements[path]
        full = None if value is None else value(place.key, place.global_shape)
        with torch.no_grad():
            if full is None:
                parameter.zero_()
            elif place.dim is None:
                parameter.copy_(full)
            else:
                parameter.zero_()
                parameter.narrow(place.dim, 0, place.length).copy_(place.part_of(full))
        parameter.placement = place  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = place.dim is not None  # type: ignore[attr-defined]
        parameter.gradient_partial = place.partial  # type: ignore[attr-defined]
        del full  # frees it before the next one is generated
    return layer


def use_float8(layer: nn.Module, name: str, recipe: Float8Recipe, cp: Axis) -> None:
    """Makes the sharded linear layers of a block compute their training passes in FP8.

    Args:
        layer: the block, materialised; changed in place.
        name: prefix of the block in the whole model.
        recipe: which values share a scale.
        cp: the context-parallel axis.

    Raises:
        ConfigError: the GEMMs do not take the sizes of a layer.
    """
    for path, module in layer.named_modules():
        if isinstance(module, SplitLinear):
            enters, region = isinstance(module, ColumnParallelLinear), module.region
            full_path, weight, bias = f"{name}.{path}", module.weight, module.bias
            module.float8 = Float8Linear(full_path, weight, bias, enters=enters, region=region, cp=cp, recipe=recipe)
            module.float8.check()
        if isinstance(module, SplitLinear | ColumnParallelBranches | RowParallelBranches):
            module.uses_float8 = True


def _allocate(layer: nn.Module, device: torch.device) -> None:
    """Moves parameters off the meta device, leaving their values uninitialized.

    `Module.to_empty` does the same but imports sympy for symbolic shapes, which takes 0.4 s at the start of each rank.
    """
    assert not list(layer.buffers()), "a buffer would stay on the meta device"
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
