"""The model's stages on a rank: cut, filled, wrapped, and put into the virtual stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megads.batch import BatchInfo
from megads.engine.deepspeed_adapter import PipelineStages
from megads.engine.interface import EngineSpec
from megads.engine.optimizer import NamedParameter
from megads.model.config import sharding_of
from megads.model.gpt import StageSpec, stage_specs, use_kernels
from megads.model.stage_names import EMBEDDING, HEAD, TIED_COPY, TIED_PARAMETER, is_block
from megads.ops.config import Compile, KernelOp
from megads.parallel.config import SPLIT_SCHEDULES, ParallelConfig, Recompute
from megads.parallel.context import gather_in_cores
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.partition import ShardingTable, block_modes, stage_bounds
from megads.parallel.rank_order import axis_lines
from megads.parallel.sharding import ParameterPlacement, attention_cores, materialise, shard_stage
from megads.parallel.weight_gradients import SplitLayer


def build_stage(stage_spec: StageSpec, spec: EngineSpec) -> nn.Module:
    """This rank's share of a stage, its parameters' `placement` attribute set: made on the meta device, cut, filled.

    Args:
        stage_spec: the stage.
        spec: what the engine is built from.
    """
    name, grid, parallel = stage_spec.name, spec.grid, spec.parallel
    with torch.device("meta"):
        stage = stage_spec.build()
    use_kernels(stage, spec.kernels)
    stage, placements = shard_stage(
        stage,
        name,
        stage_spec.table,
        grid.tp,
        sequence_parallel=parallel.sequence_parallel,
        chunks=parallel.tp_chunks,
        kernels=spec.kernels,
    )
    gather_in_cores(stage, name, stage_spec.table, grid.cp)
    if spec.model.tie_embeddings and name == HEAD:
        placements = {path: _tied(place) for path, place in placements.items()}
    stage = materialise(stage, placements, spec.initial_value, spec.device)
    for path, parameter in stage.named_parameters():
        parameter.placement = placements[path]  # type: ignore[attr-defined]
    return stage


def _tied(place: ParameterPlacement) -> ParameterPlacement:
    assert place.key == TIED_COPY
    return replace(place, key=TIED_PARAMETER)


def placement_of(parameter: nn.Parameter) -> ParameterPlacement:
    """Where a parameter of a StagePipeline lies in the unsharded model."""
    place: ParameterPlacement = parameter.placement  # type: ignore[attr-defined]
    return place


def run_stages(stages: Iterable[nn.Module], hidden: Tensor, info: BatchInfo) -> Tensor:
    """Calls stages one after the other on the output of the last.

    BatchInfo is an argument: a stage that is recomputed in backward, when `info` is a later micro-batch's, has its own.
    """
    for stage in stages:
        hidden = stage(hidden, info)
    return hidden


def wrap_blocks(
    stages: Mapping[str, nn.Module],
    parallel: ParallelConfig,
    pipeline_rank: int,
    compiled: Compile,
    table: ShardingTable,
    *,
    gradients_in_place: bool = False,
) -> None:
    """Makes the blocks among stages recompute what the config says, compiled if it says so.

    `full` recomputes whole blocks; `selective` the attention cores alone, which hold many activations and few FLOPs
    (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models").

    Args:
        stages: by their names in the whole model, cut already; all that the rank holds.
        parallel: the layout.
        pipeline_rank: the one that holds them.
        compiled: what is compiled.
        table: of the model.
        gradients_in_place: layers add gradients of weights to main_grad themselves.
    """
    blocks = {name: stage for name, stage in stages.items() if is_block(name)}
    modes = block_modes(parallel, pipeline_rank, len(blocks))
    for (name, block), mode in zip(blocks.items(), modes, strict=True):
        if mode is Recompute.selective:
            for core in attention_cores(block, name, table):
                recompute_module(core)
    compile_blocks(list(blocks.values()), compiled, splits=gradients_in_place or parallel.schedule in SPLIT_SCHEDULES)
    for block, mode in zip(blocks.values(), modes, strict=True):
        if mode is Recompute.full:
            recompute_module(block)


def recomputed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function with activation checkpointing: autograd keeps its arguments only, and backward calls it again
    (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

    All that the function depends on and that may have changed until backward must be among its arguments: under 1F1B
    other micro-batches run forward in between. It must be pure; random generators are not restored, as dropout draws
    from the sample's own stream. Without gradients nothing is kept and nothing runs twice.

    Collectives inside run again too, in the same order on all ranks of a tensor-parallel group, which run the same
    schedule.
    """

    def call(*args: Any) -> Tensor:
        output: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return output

    return call


def recompute_module(module: nn.Module) -> None:
    """Makes a module's own forward a recomputed one, wherever it is called."""
    module.forward = recomputed(module.forward)  # type: ignore[method-assign]


def alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """A second parameter over the same memory, with a gradient of its own.

    Where embedding and head share a weight, autograd would add their two gradients in the weight's dtype; as two
    parameters they reach the optimizer apart and are added in fp32, as they are when two stages hold them.
    """
    alias = nn.Parameter(parameter.detach())
    alias.__dict__.update(parameter.__dict__)  # placement and marks
    return alias


class StagePipeline(PipelineStages):
    """This rank's virtual stages, each a run of the model's stages; the embedding's ties and its loss.

    Attributes:
        gradients_in_place: linear layers may compute their weights' gradients in the optimizer's fp32 buffers.
    """

    def __init__(self, spec: EngineSpec, loss: TokenMeanLoss) -> None:
        """Builds this rank's stages.

        Args:
            spec: what the engine is built from.
            loss: of a micro-batch.
        """
        stages = stage_specs(spec.model, spec.seed)
        bounds = stage_bounds([stage.weight for stage in stages], spec.parallel)
        super().__init__([partial(build_stage, stage, spec) for stage in stages], bounds, spec.parallel)
        self.spec, self.token_loss = spec, loss
        self.gradients_in_place = spec.kernels.fused(KernelOp.linear) and spec.device.type == "cpu"
        held: dict[str, Any] = {}
        for number, chunk in self.chunks.items():
            held |= zip((stage.name for stage in stages[bounds[number] : bounds[number + 1]]), chunk, strict=True)
        if spec.model.tie_embeddings and EMBEDDING in held and HEAD in held:
            held[HEAD].weight = alias_of(held[EMBEDDING].word.weight)
        wrap_blocks(
            held,
            spec.parallel,
            self.stage_id,
            spec.kernels.compiled,
            sharding_of(spec.model),
            gradients_in_place=self.gradients_in_place,
        )
        self._tied_pair = self._join_tied_pair()

    def _join_tied_pair(self) -> ProcessGroup | None:
        """The group of the two ranks that hold the copies of a tied embedding; None: one rank, or no tie."""
        ends, grid = self.placement.ends, self.spec.grid
        if not self.spec.model.tie_embeddings or ends[0] == ends[1]:
            return None
        mine: ProcessGroup | None = None
        for line in axis_lines("pp", self.spec.parallel):
            ranks = [line[end] for end in ends]
            group = dist.new_group(ranks, timeout=grid.control.timeout)
            if grid.rank in ranks:
                mine = group
        return mine

    @property
    def ends(self) -> tuple[nn.Module, ...]:
        """Embedding and output projection, those that this rank holds."""
        return self.chunks.get(0, ())[:1] + self.chunks.get(self.placement.num_stages - 1, ())[-1:]

    def trained_parameters(self) -> list[NamedParameter]:
        """What the optimizer trains, in forward order; a tied weight twice where one rank holds both copies."""
        pair = self._tied_pair
        has_embedding = self.stage_id == self.placement.ends[0]
        trained = []
        for parameter in self.parameters():
            place = placement_of(parameter)
            tied = place.key == TIED_PARAMETER and pair is not None
            owned = (place.dim is not None or self.spec.grid.tp.is_first) and (not tied or has_embedding)
            trained.append(NamedParameter(place.key, parameter, owned, pair if tied else None))
        return trained

    def stage_of(self, parameter: nn.Parameter) -> int:
        """The virtual stage that holds a parameter, the first one that does."""
        for number, chunk in self.chunks.items():
            if any(parameter is held for stage in chunk for held in stage.parameters()):
                return number
        raise AssertionError(f"{placement_of(parameter).key} is not on this rank")

    def forward(self, stage: int, hidden: Tensor, info: BatchInfo) -> Tensor:
        """Runs one virtual stage of this rank.

        Args:
            stage: its number.
            hidden: [b, t, h], or tokens [b, s] for the first one.
            info: of the micro-batch.

        Returns:
            [b, t, h], or logits of this rank's rows of the vocabulary from the last one.
        """
        return run_stages(self.chunks[stage], hidden, info)

    def loss(self, hidden: Tensor, info: BatchInfo, targets: tuple[Tensor, Tensor]) -> Tensor:
        """Runs the last virtual stage, which this rank holds, and the loss of its logits.

        Args:
            hidden: as in `forward`.
            info: of the micro-batch.
            targets: labels and mask, [b, s].
        """
        *stages, head = self.chunks[self.placement.num_stages - 1]
        return self.token_loss.of_head(head, run_stages(stages, hidden, info), info, targets)


def compile_blocks(blocks: Sequence[nn.Module], compiled: Compile, *, splits: bool) -> None:
    """Has the forward passes of a rank's blocks compiled when they first run; names of parameters stay as they are.

    Args:
        blocks: cut already, their attention cores wrapped. What runs a whole block again is put around it afterwards.
        compiled: how.
        splits: layers defer gradients of weights, or add them to main_grad, which each backward pass decides.
    """
    if compiled is Compile.none:
        return
    for block in blocks:
        for module in block.modules():
            untraced = ("forward",) if splits and isinstance(module, SplitLayer) else getattr(module, "untraced", ())
            for name in untraced:
                # On the object, as what recomputes a core is: other objects of its class are left alone.
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
