"""Two-way mapping between the parameters of a model and the tensors of Hugging Face's format.

A `WeightMapping` is the smallest set of tensors that can be converted independently. They are in the order of the
model's layers, so that a model can be read and written layer by layer.

The weights of experts are converted one expert at a time, as the stacked weights of a layer may be larger than memory.

Shape letters: k = key/value heads, g = query heads that share one, d = head dim, h = hidden size, f = MLP width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megads.api import ModelConfig, Shard, parameter_shapes, router_state_shapes

Convert = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class WeightMapping:
    """Parameters of a model and the Hugging Face tensors with the same values.

    Attributes:
        layer: layer of the model: "embedding", "blocks.3", "final_norm" or "head".
        ours: names of the parameters.
        theirs: names of the tensors.
        to_hugging_face: converts the parameters, in the order of `ours`, to the tensors.
        to_megads: inverse of `to_hugging_face`.
        rows: first row and end of the part of each parameter; None: all of it.
    """

    layer: str
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_hugging_face: Convert
    to_megads: Convert
    rows: tuple[int, int] | None = None

    def shards(self, kind: str, shapes: Mapping[str, tuple[int, ...]], device: str = "cpu") -> list[Shard]:
        """Uninitialized fp32 shards of a checkpoint with the parameters, or with these rows of them.

        Args:
            kind: "weight", "average", or a kind of optimizer state.
            shapes: shapes of all parameters by name.
            device: device of the shards' tensors.
        """
        found = []
        for name in self.ours:
            first, *rest = shape = shapes[name]
            start, end = (0, first) if self.rows is None else self.rows
            tensor = torch.empty(end - start, *rest, device=device)
            found.append(Shard(f"{kind}/{name}", shape, (start, *(0 for _ in rest)), tensor))
        return found


def same(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the tensors unchanged."""
    return tensors


def transposed(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Transposes matrices between [inputs, outputs] and [outputs, inputs]; leaves vectors unchanged."""
    return [tensor.t().contiguous() for tensor in tensors]


class SeparateHeads:
    """Converts between megads' fused QKV with rows [k, (g queries, key, value), d] and three separate projections."""

    def __init__(self, model: ModelConfig) -> None:
        self._groups, self._queries, self._dim = model.kv_heads, model.queries_per_kv, model.head_dim

    def to_hugging_face(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (fused,) = tensors
        rest = fused.shape[1:]
        grouped = fused.reshape(self._groups, self._queries + 2, self._dim, *rest)
        queries, keys, values = grouped.split((self._queries, 1, 1), dim=1)
        return [part.reshape(-1, *rest) for part in (queries, keys, values)]

    def to_megads(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        rest = tensors[0].shape[1:]
        parts = [part.reshape(self._groups, -1, self._dim, *rest) for part in tensors]
        return [torch.cat(parts, dim=1).reshape(-1, *rest)]


class StackedHeads:
    """Converts to one projection with all queries, then all keys, then all values (GPT-2, Phi-3, MPT)."""

    def __init__(self, model: ModelConfig) -> None:
        self._separate = SeparateHeads(model)
        self._rows = tuple(heads * model.head_dim for heads in (model.num_heads, model.kv_heads, model.kv_heads))

    def to_hugging_face(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(self._separate.to_hugging_face(tensors)))]

    def to_megads(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        (stacked,) = tensors
        return self._separate.to_megads(stacked.split(self._rows))


def split_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Splits megads' gate_up projection, with gate i in row 2 i and up i in row 2 i + 1, into gate and up."""
    (fused,) = tensors
    return [fused[0::2].contiguous(), fused[1::2].contiguous()]


def interleave_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inverse of `split_gate_up`."""
    gates, ups = tensors
    return [torch.stack((gates, ups), dim=1).reshape(-1, *gates.shape[1:])]


def stack_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """All gates, then all ups, in one projection (Phi-3)."""
    return [torch.cat(list(split_gate_up(tensors)))]


def interleave_stacked_gate_up(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inverse of `stack_gate_up`."""
    return interleave_gate_up(tensors[0].chunk(2))


@dataclass(frozen=True)
class Names:
    """Module names of an architecture.

    Attributes:
        outer: names of the modules outside the blocks, by megads' name.
        block: names of the modules of a block, by megads' name; several if the architecture splits the projection.
            Those of experts have {} for the expert's number. STATE_OF_BIAS is a tensor, not a module.
        prefix: prefix of a block's modules, with {} for the block's number.
        head: name of the output projection.
        inputs_first: whether matrices are [inputs, outputs].
        stacked_qkv: whether a fused QKV has all queries, then all keys, then all values, not one group of heads after
            the other.
        unused_positions: rows before that of the first position.
    """

    outer: Mapping[str, str]
    block: Mapping[str, tuple[str, ...]]
    prefix: str
    head: str = "lm_head"
    inputs_first: bool = False
    stacked_qkv: bool = False
    unused_positions: int = 0


STATE_OF_BIAS = "mlp.router.expert_bias"
"""The bias that only selects experts, in `Names.block` of architectures that have it (DeepSeek-V3)."""


def shapes_of(model: ModelConfig, names: Names) -> dict[str, tuple[int, ...]]:
    """Shapes, by name, of the parameters that an architecture stores: the trained ones, and its bias of experts."""
    state = router_state_shapes(model) if STATE_OF_BIAS in names.block else {}
    return parameter_shapes(model) | {name: shape for name, shape in state.items() if name.endswith(STATE_OF_BIAS)}


def is_router_state(link: WeightMapping) -> bool:
    """Whether a link is of parameters that the balance of experts updates: always fp32, without moments or average."""
    return link.ours[0].endswith(STATE_OF_BIAS)


def links(model: ModelConfig, names: Names) -> list[WeightMapping]:
    """Returns the links of all parameters of a model; a tied head has no link.

    Args:
        model: the model.
        names: module names of its architecture.
    """
    found = []
    for parameter, shape in shapes_of(model, names).items():
        module, _, kind = parameter.rpartition(".")
        if not module.startswith("blocks."):
            theirs = names.head if module == "head" else names.outer[module]
            unused = names.unused_positions if module == "embedding.position" else 0
            convert = _with_unused_rows(unused) if unused else (same, same)
            found.append(WeightMapping(module.partition(".")[0], (parameter,), (f"{theirs}.{kind}",), *convert))
            continue
        _, number, inner = module.split(".", 2)
        layer, prefix = f"blocks.{number}", names.prefix.format(number)
        if f"{inner}.{kind}" == STATE_OF_BIAS:
            found.append(WeightMapping(layer, (parameter,), (f"{prefix}.{names.block[STATE_OF_BIAS][0]}",), same, same))
            continue
        tensors = tuple(f"{prefix}.{name}.{kind}" for name in names.block[inner])
        mapping = WeightMapping(layer, (parameter,), tensors, *_conversion(model, names, inner, kind))
        found += _of_each_expert(mapping, model.moe.num_experts, shape[0]) if "mlp.experts." in inner else [mapping]
    return found


def _of_each_expert(mapping: WeightMapping, experts: int, rows: int) -> list[WeightMapping]:
    size = rows // experts
    return [
        replace(
            mapping,
            theirs=tuple(name.format(expert) for name in mapping.theirs),
            rows=(expert * size, (expert + 1) * size),
        )
        for expert in range(experts)
    ]


def mappings_by_layer(model: ModelConfig, names: Names) -> list[list[WeightMapping]]:
    """Returns the links of each layer of the model, in order; see `links`."""
    layers: dict[str, list[WeightMapping]] = {}
    for link in links(model, names):
        layers.setdefault(link.layer, []).append(link)
    return list(layers.values())


def to_hugging_face(model: ModelConfig, names: Names, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts all parameters of a model in memory to an architecture's tensors, by name.

    Args:
        model: the model.
        names: module names of the architecture.
        weights: all parameters by name.

    Raises:
        KeyError: the architecture lacks a module, or a parameter is missing.
    """
    found: dict[str, Tensor] = {}
    for link in links(model, names):
        rows = slice(None) if link.rows is None else slice(*link.rows)
        tensors = link.to_hugging_face([weights[name][rows] for name in link.ours])
        found |= dict(zip(link.theirs, tensors, strict=True))
    return found


def _with_unused_rows(count: int) -> tuple[Convert, Convert]:
    """Zeros before the first row, as for OPT's positions of padding."""

    def to_hugging_face(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat((table.new_zeros(count, table.shape[1]), table)) for table in tensors]

    return to_hugging_face, lambda tensors: [table[count:].contiguous() for table in tensors]


def _conversion(model: ModelConfig, names: Names, module: str, kind: str) -> tuple[Convert, Convert]:
    apart = len(names.block[module]) > 1
    convert: tuple[Convert, Convert] = same, same
    if module == "attention.qkv" and (apart or names.stacked_qkv):
        heads = SeparateHeads(model) if apart else StackedHeads(model)
        convert = heads.to_hugging_face, heads.to_megads
    if module == "mlp.experts.down":
        convert = transposed, transposed
    if module.endswith(".gate_up"):
        convert = (split_gate_up, interleave_gate_up) if apart else (stack_gate_up, interleave_stacked_gate_up)
    if names.inputs_first and kind == "weight" and "norm" not in module:
        to_theirs, to_ours = convert
        return lambda tensors: transposed(to_theirs(tensors)), lambda tensors: to_ours(transposed(tensors))
    return convert


def missing_biases(model: ModelConfig, biased: ModelConfig, names: Names) -> dict[str, tuple[int, ...]]:
    """Returns the shapes, by name, of the biases that the architecture has and a model lacks.

    Args:
        model: the model.
        biased: the model with all biases of the architecture.
        names: module names of the architecture.
    """
    own = {name for link in links(model, names) for name in link.theirs}
    shapes = shapes_of(biased, names)
    every = {name: shape for link in links(biased, names) for name, shape in tensor_shapes(shapes, link).items()}
    return {name: shape for name, shape in every.items() if name not in own}


def tensor_shapes(shapes: Mapping[str, tuple[int, ...]], link: WeightMapping) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a link's tensors by name, without allocating memory.

    Args:
        shapes: shapes of all parameters by name.
        link: the link.
    """
    parameters = [shard.tensor for shard in link.shards("", shapes, "meta")]
    return {
        name: tuple(tensor.shape) for name, tensor in zip(link.theirs, link.to_hugging_face(parameters), strict=True)
    }
