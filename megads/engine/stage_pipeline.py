"""Builds the layers of a pipeline rank: sharding, initialization, recomputation, offloading and virtual stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megads.batch import BatchInfo, MicroBatch
from megads.engine.activation_offload import ActivationOffload
from megads.engine.interface import EngineSpec
from megads.engine.optimizer import NamedParameter
from megads.model.config import EMBEDDING, HEAD, TIED_COPY, TIED_PARAMETER, is_block
from megads.model.gpt import ModelLayerSpec, layer_specs, use_kernels
from megads.model.sharding import sharding_of
from megads.ops import compiler
from megads.ops.config import Compile, KernelOp
from megads.ops.float8 import require_float8
from megads.ops.linear import make_choices_constant
from megads.parallel.config import Offload, Recompute, axis_ranks
from megads.parallel.context import wrap_attention_cores
from megads.parallel.experts import ExpertParallel
from megads.parallel.float8_linear import quantize_weights
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.partition import block_modes, stage_bounds
from megads.parallel.schedule import SPLIT_SCHEDULES
from megads.parallel.sharding import (
    ParameterPlacement,
    RegionModule,
    SplitLinear,
    attention_cores,
    materialise,
    placement_of,
    shard_layer,
    use_float8,
)
from megads.parallel.weight_gradients import SplitLayer, note_compiled, register_compiled_backward


def build_layer(layer_spec: ModelLayerSpec, spec: EngineSpec) -> nn.Module:
    """Builds this rank's shard of a layer: on the meta device, then sharded, then initialized.

    Args:
        layer_spec: the layer.
        spec: specification of the engine.
    """
    name, grid, parallel = layer_spec.name, spec.grid, spec.parallel
    with torch.device("meta"):
        layer = layer_spec.build()
    use_kernels(layer, spec.kernels)
    layer, placements = shard_layer(
        layer,
        name,
        layer_spec.table,
        grid.tp,
        sequence_parallel=parallel.sequence_parallel,
        chunks=parallel.tp_chunks,
        vocab_multiple=parallel.rows_multiple(cuda=spec.device.type == "cuda"),
        kernels=spec.kernels,
        experts=ExpertParallel.of_grid(grid, expert_tp=parallel.expert_tp),
    )
    wrap_attention_cores(layer, name, layer_spec.table, grid, parallel.cp_kind)
    if spec.model.tie_embeddings and name == HEAD:
        placements = {path: _tied(place) for path, place in placements.items()}
    layer = materialise(layer, placements, spec.initial_value, spec.device)
    if name in {f"blocks.{index}" for index in spec.float8.blocks(spec.model.num_layers)}:
        use_float8(layer, name, spec.float8.recipe, grid.cp)
    return layer


def _tied(place: ParameterPlacement) -> ParameterPlacement:
    assert place.key == TIED_COPY
    return replace(place, key=TIED_PARAMETER)


def activation_shape(batch: MicroBatch, spec: EngineSpec) -> tuple[int, ...]:
    """Returns the shape [b, t, h] of a micro-batch's activations between stages on this rank.

    Every rank computes it, so it is not communicated.
    """
    if batch.info.sequence_index is not None:
        tokens = len(batch.info.sequence_index)
    elif batch.tokens_bs is not None:
        tokens = batch.tokens_bs.shape[1]
    else:
        assert batch.info.seq_len is not None, "a stage without tokens needs info.seq_len"
        tokens = batch.info.seq_len
    share = tokens // spec.parallel.tp if spec.parallel.sequence_parallel else tokens
    return len(batch.info.sample_ids), share, spec.model.hidden_size


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Returns the shape of a parameter before ZeRO-3 partitions it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def run_layers(layers: Iterable[nn.Module], hidden: Tensor, info: BatchInfo) -> Tensor:
    """Calls layers in order, each on the output of the previous one.

    BatchInfo is an argument, so that a layer recomputed in the backward pass uses that of its own micro-batch.
    """
    for layer in layers:
        hidden = layer(hidden, info)
    return hidden


def wrap_blocks(
    layers: Mapping[str, nn.Module],
    spec: EngineSpec,
    *,
    gradients_in_place: bool = False,
) -> ActivationOffload | None:
    """Applies recomputation, torch.compile and offloading to the transformer blocks among the layers, as configured.

    `full` recomputes whole blocks; `selective` only the attention cores, which have many activations and few FLOPs
    (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

    Args:
        layers: all layers of this rank by their names in the whole model, already sharded.
        spec: specification of the engine.
        gradients_in_place: whether layers accumulate weight gradients in main_grad themselves.

    Returns:
        What offloads the activations; None if they stay on the device.
    """
    parallel, compiled, table = spec.parallel, spec.kernels.compiled, sharding_of(spec.model)
    blocks = {name: layer for name, layer in layers.items() if is_block(name)}
    modes = block_modes(parallel, spec.grid.pp.rank, len(blocks))
    for (name, block), mode in zip(blocks.items(), modes, strict=True):
        if mode is Recompute.selective:
            for core in attention_cores(block, name, table):
                recompute_module(core)
    compile_blocks(
        list(blocks.values()),
        compiled,
        in_place=gradients_in_place and parallel.schedule not in SPLIT_SCHEDULES,
        splits=parallel.schedule in SPLIT_SCHEDULES,
        whole=parallel.tp == parallel.cp == 1,
    )
    for block, mode in zip(blocks.values(), modes, strict=True):
        if mode is Recompute.full:
            recompute_module(block)
    if parallel.offload is Offload.none:
        return None
    offload, num_layers = ActivationOffload(spec.device), spec.model.num_layers
    for name, block in blocks.items():
        index = int(name.rpartition(".")[2])
        moves = parallel.leaves_device(index, num_layers, with_head=HEAD in layers)
        offload.wrap(block, index, moves=moves)
    return offload


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adds activation recomputation to a function: autograd saves only its arguments, and the backward pass calls it
    again (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

    State that may change before the backward pass must be passed as an argument: under 1F1B, forward passes of other
    micro-batches run in between. The function must be pure. Random generators are not restored, as dropout uses a
    random stream per sample. Without gradients nothing is saved or recomputed.

    Collectives inside are also recomputed, in the same order on all ranks of a tensor-parallel group, which run the
    same schedule.
    """

    def call(*args: Any) -> Tensor:
        output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return output

    return call


def recompute_module(module: nn.Module) -> None:
    """Replaces a module's forward method by one with activation recomputation."""
    module.forward = recomputed(module.forward)  # type: ignore[method-assign]


def alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a second parameter on the same memory, with its own gradient.

    With one shared parameter, autograd would add the gradients of embedding and head in the weight's dtype. With two
    parameters the optimizer accumulates them in fp32, as it does when two stages hold them.
    """
    alias = nn.Parameter(parameter.detach())
    alias.__dict__.update(parameter.__dict__)  # placement and marks
    return alias


class StagePipeline(nn.Module):
    """This rank's virtual stages, each a range of the model's layers, with tied embeddings and the loss.

    The model's layers are submodules whose names are their numbers in the whole model.

    Attributes:
        spec: specification of the engine.
        token_loss: loss of a micro-batch.
        bounds: partition: virtual stage s holds the model's layers bounds[s] to bounds[s + 1].
        placement: pipeline rank of every virtual stage.
        chunks: the model's layers of each virtual stage of this rank, by its number, in the order of the forward pass.
        gradients_in_place: whether linear layers compute their weight gradients directly in the optimizer's main_grad.
        offload: offloads the blocks' activations; None if they stay on the device.
        before_layer: called with every layer just before it runs; None if its weights need not be waited for.
    """

    before_layer: Callable[[nn.Module], None] | None = None

    def __init__(self, spec: EngineSpec, loss: TokenMeanLoss) -> None:
        """Builds this rank's stages.

        Args:
            spec: specification of the engine.
            loss: loss of a micro-batch.
        """
        super().__init__()
        require_float8(spec.float8.recipe, spec.device, spec.precision, spec.kernels)
        layers, rank = layer_specs(spec.model, spec.seed), spec.grid.pp.rank
        self.spec, self.token_loss = spec, loss
        self.bounds = stage_bounds([layer.cost for layer in layers], spec.parallel)
        self.placement = spec.parallel.placement
        self.gradients_in_place = spec.kernels.fused(KernelOp.linear)
        self.chunks: dict[int, tuple[nn.Module, ...]] = {}
        held: dict[str, Any] = {}
        for number in self.placement.stages_of(rank):
            indices = range(self.bounds[number], self.bounds[number + 1])
            self.chunks[number] = tuple(build_layer(layers[index], spec) for index in indices)
            for index, layer in zip(indices, self.chunks[number], strict=True):
                self.add_module(str(index), layer)
                held[layers[index].name] = layer
        if spec.model.tie_embeddings and EMBEDDING in held and HEAD in held:
            held[HEAD].weight = alias_of(held[EMBEDDING].word.weight)
        self.offload = wrap_blocks(held, spec, gradients_in_place=self.gradients_in_place)
        self._tied_pair = self._join_tied_pair()
        linears = (module for module in self.modules() if isinstance(module, SplitLinear))
        self._float8 = [linear.float8 for linear in linears if linear.float8 is not None]

    def quantize_weights(self) -> None:
        """Quantizes the weights that multiply in FP8; call at the start of every step. Collective over the
        tensor-parallel ranks."""
        if self._float8:
            quantize_weights(self._float8, self.spec.grid.tp)

    def _join_tied_pair(self) -> ProcessGroup | None:
        """The group of the two ranks with a copy of the tied embedding; None if it is on one rank or not tied."""
        ends, grid = self.placement.ends, self.spec.grid
        if not self.spec.model.tie_embeddings or ends[0] == ends[1]:
            return None
        mine: ProcessGroup | None = None
        for line in axis_ranks("pp", self.spec.parallel):
            ranks = [line[end] for end in ends]
            group = dist.new_group(ranks, timeout=grid.control.timeout)
            if grid.rank in ranks:
                mine = group
        return mine

    def is_first(self, stage: int) -> bool:
        """Whether a virtual stage begins with the embedding."""
        return stage == 0

    def is_last(self, stage: int) -> bool:
        """Whether a virtual stage ends with the output projection and the loss."""
        return stage == self.placement.num_stages - 1

    @property
    def ends(self) -> tuple[nn.Module, ...]:
        """Embedding and output projection, if this rank holds them."""
        return self.chunks.get(0, ())[:1] + self.chunks.get(self.placement.num_stages - 1, ())[-1:]

    def trained_parameters(self) -> list[NamedParameter]:
        """Parameters that the optimizer updates, in forward order; a tied weight appears twice if one rank holds both
        copies."""
        pair = self._tied_pair
        has_embedding = self.spec.grid.pp.rank == self.placement.ends[0]
        trained = []
        for parameter in self.parameters():
            if not parameter.requires_grad:
                continue
            place = placement_of(parameter)
            tied = place.key == TIED_PARAMETER and pair is not None
            owned = (place.dim is not None or self.spec.grid.tp.is_first) and (not tied or has_embedding)
            trained.append(NamedParameter(place.key, parameter, owned, pair if tied else None, place.expert))
        return trained

    def stage_of(self, parameter: nn.Parameter) -> int:
        """Returns the first virtual stage that holds a parameter."""
        for number, chunk in self.chunks.items():
            if any(parameter is held for layer in chunk for held in layer.parameters()):
                return number
        raise AssertionError(f"{placement_of(parameter).key} is not on this rank")

    def forward(self, stage: int, hidden: Tensor, info: BatchInfo) -> Tensor:
        """Runs one virtual stage of this rank.

        Args:
            stage: number of the virtual stage.
            hidden: [b, t, h]; tokens [b, s] for the first stage.
            info: BatchInfo of the micro-batch.

        Returns:
            [b, t, h]; for the last stage the logits of this rank's rows of the vocabulary.
        """
        return run_layers(self._ready(self.chunks[stage]), hidden, info)

    def _ready(self, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
        """Yields each layer once its weights may be read."""
        for layer in layers:
            if self.before_layer is not None:
                self.before_layer(layer)
            yield layer

    def loss(self, hidden: Tensor, info: BatchInfo, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Runs the last virtual stage, which this rank holds, and computes the loss.

        Args:
            hidden: as in `forward`.
            info: BatchInfo of the micro-batch.
            targets: labels and loss mask, [b, s] each.
        """
        *layers, head = self.chunks[self.placement.num_stages - 1]
        hidden = run_layers(self._ready(layers), hidden, info)
        (head,) = self._ready([head])
        return self.token_loss.of_head(head, hidden, info, targets)


def compile_blocks(
    blocks: Sequence[nn.Module], compiled: Compile, *, in_place: bool, splits: bool, whole: bool
) -> None:
    """Compiles the forward passes of a rank's blocks at their first call; parameter names do not change.

    Args:
        blocks: sharded blocks. Recomputation of attention cores must be applied before, of whole blocks afterwards.
        compiled: what to compile.
        in_place: whether layers accumulate weight gradients in main_grad themselves.
        splits: whether layers defer weight gradients: these are excluded from torch.compile, which would reuse the
            memory of their operands.
        whole: whether a rank holds all heads and tokens; else attention is excluded from torch.compile.
    """
    if compiled is Compile.none:
        return
    make_choices_constant()
    register_compiled_backward()
    for block in blocks:
        prepared, in_graph = list[Callable[[Tensor, BatchInfo], None]](), list[SplitLayer]()
        for module in block.modules():
            if isinstance(module, SplitLayer) and splits:
                untraced: Sequence[str] = ("forward",)
            elif in_place and isinstance(module, SplitLayer) and _is_alone(module):
                untraced = ()
                in_graph.append(module)
            else:
                untraced = getattr(module, "untraced", ())
            prepare: Any = getattr(module, "prepare", None)
            if prepare is not None:
                if whole and "forward" not in {*untraced, *vars(module)}:
                    prepared.append(prepare)
                else:
                    untraced = ("forward",)
            for name in untraced:
                # Set on the object, like the recomputation of a core: other objects of the class are unaffected.
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        block.forward = _prepared(compiler.compiled(block.forward), prepared, in_graph)  # type: ignore[method-assign]


def _is_alone(layer: SplitLayer) -> bool:
    return isinstance(layer, RegionModule) and layer.region.axis.size == 1 and not layer.uses_float8


def _prepared(
    forward: Callable[[Tensor, BatchInfo], Tensor],
    prepare: Sequence[Callable[[Tensor, BatchInfo], None]],
    in_graph: list[SplitLayer],
) -> Callable[[Tensor, BatchInfo], Tensor]:
    """A compiled forward pass of a block, before which modules look up masks and tables of the micro-batch: their
    caches are not traced.

    Args:
        forward: the compiled forward pass.
        prepare: methods that look up masks and tables.
        in_graph: layers whose weight gradients the graph accumulates in main_grad.
    """

    def call(hidden: Tensor, info: BatchInfo) -> Tensor:
        while in_graph:  # at the first call, when the optimizer has moved the weights into its buckets
            note_compiled(in_graph.pop())
        # Otherwise no gradient of the block's input, on which those in main_grad depend, would be computed.
        assert hidden.requires_grad or not torch.is_grad_enabled()
        for of_module in prepare:
            of_module(hidden, info)
        return forward(hidden, info)

    return call
