"""The model's stages as DeepSpeed layer specs in a PipelineModule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.engine.optimizer import NamedParameter
from megads.engine.token_mean import TokenMeanLoss
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue
from megads.model.sharding import sharding_of
from megads.model.stages import (
    EMBEDDING,
    HEAD,
    TIED_COPY,
    TIED_PARAMETER,
    StageSpec,
    is_block,
    stage_specs,
    use_kernels,
)
from megads.ops.choice import TORCH, Kernels
from megads.ops.config import Compile, KernelOp
from megads.parallel.compile import compile_blocks
from megads.parallel.config import SPLIT_SCHEDULES, ParallelConfig
from megads.parallel.context import gather_in_cores
from megads.parallel.grid import ParallelGrid, axis_lines, place_of
from megads.parallel.partition import stage_bounds
from megads.parallel.recompute import block_modes, recompute_cores, recompute_whole
from megads.parallel.sharding import Placement, materialise, shard_stage
from megads.parallel.table import ShardingTable


class StageLayerSpec(LayerSpec):  # type: ignore[misc]
    """A stage that DeepSpeed builds on the ranks that hold it: made on the meta device, cut, then filled."""

    def __init__(
        self,
        spec: StageSpec,
        grid: ParallelGrid,
        value: InitialValue,
        device: torch.device,
        *,
        tied: bool,
        parallel: ParallelConfig,
        ops: Kernels,
    ) -> None:
        super().__init__(nn.Module)
        self.spec, self.grid, self.value, self.device = spec, grid, value, device
        self.tied, self.parallel, self.ops = tied, parallel, ops

    def __repr__(self) -> str:
        return self.spec.name

    def build(self, log: bool = False) -> nn.Module:
        """This rank's share of the stage, its parameters' `placement` attribute set."""
        with torch.device("meta"):
            stage = self.spec.build()
        use_kernels(stage, self.ops)
        stage, placements = shard_stage(
            stage,
            self.spec.name,
            self.spec.table,
            self.grid.tp,
            sequence_parallel=self.parallel.sequence_parallel,
            chunks=self.parallel.tp_chunks,
            fused=self.ops.fused(KernelOp.linear),
        )
        gather_in_cores(stage, self.spec.name, self.spec.table, self.grid.cp)
        if self.tied and self.spec.name == HEAD:
            placements = {path: self._tied(place) for path, place in placements.items()}
        stage = materialise(stage, placements, self.value, self.device)
        for path, parameter in stage.named_parameters():
            parameter.placement = placements[path]  # type: ignore[attr-defined]
        return stage

    @staticmethod
    def _tied(place: Placement) -> Placement:
        assert place.key == TIED_COPY
        return replace(place, key=TIED_PARAMETER)


def placement_of(parameter: nn.Parameter) -> Placement:
    """Where a parameter of a StagePipeline lies in the unsharded model."""
    place: Placement = parameter.placement  # type: ignore[attr-defined]
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

    Args:
        stages: by their names in the whole model, cut already; all that the rank holds.
        parallel: the layout.
        pipeline_rank: the one that holds them.
        compiled: what is compiled.
        table: of the model.
        gradients_in_place: layers add gradients of weights to their sums themselves.
    """
    blocks = {name: stage for name, stage in stages.items() if is_block(name)}
    modes = block_modes(parallel, pipeline_rank, len(blocks))
    recompute_cores(blocks, modes, table)
    compile_blocks(list(blocks.values()), compiled, splits=gradients_in_place or parallel.schedule in SPLIT_SCHEDULES)
    recompute_whole(blocks.values(), modes)


def alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """A second parameter over the same memory, with a gradient of its own.

    Where embedding and head share a weight, autograd would add their two gradients in the weight's dtype; as two
    parameters they reach the optimizer apart and are added in fp32, as they are when two stages hold them.
    """
    alias = nn.Parameter(parameter.detach())
    alias.__dict__.update(parameter.__dict__)  # placement and marks
    return alias


class GridTopology(ProcessTopology):  # type: ignore[misc]
    """Our grid in the three axes that DeepSpeed knows: its data axis is context and data parallelism together.

    An axis of their own for context ranks would count the gradient norm sqrt(cp) times.
    """

    def __init__(self, parallel: ParallelConfig) -> None:
        super().__init__(axes=["data", "pipe", "model"], dims=[parallel.dp * parallel.cp, parallel.pp, parallel.tp])
        self.mapping = {}
        for line in axis_lines("data", parallel):
            for data, rank in enumerate(line):
                place = place_of(rank, parallel)
                self.mapping[self.ProcessCoord(data=data, pipe=place.pp, model=place.tp)] = rank


class StagePipeline(PipelineModule):  # type: ignore[misc]
    """This rank's virtual stages, each a run of the model's stages.

    DeepSpeed keeps what it is good at (building on demand, process groups); the partition, the tie between embedding
    and head, and BatchInfo on every stage are ours.

    Attributes:
        bounds: virtual stage s holds the model's stages bounds[s] to bounds[s + 1].
        placement: which pipeline rank holds which virtual stage.
        chunks: the model's stages of each virtual stage of this rank, by its number, in the order of the forward pass.
        gradients_in_place: linear layers may compute their weights' gradients in the optimizer's sums.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        grid: ParallelGrid,
        seed: int,
        value: InitialValue,
        device: torch.device,
        loss: TokenMeanLoss,
        ops: Kernels = TORCH,
    ) -> None:
        specs = stage_specs(model, seed)
        tied = model.tie_embeddings
        # Before super().__init__(): PipelineModule's constructor calls the overrides below.
        self.bounds = stage_bounds([spec.weight for spec in specs], parallel)
        self.placement = parallel.placement
        self.chunks: dict[int, tuple[nn.Module, ...]] = {}
        self.tied, self.hidden_size, self.table = tied, model.hidden_size, sharding_of(model)
        self.grid, self.parallel, self.ops = grid, parallel, ops
        self.gradients_in_place = ops.fused(KernelOp.linear) and device.type == "cpu"
        super().__init__(
            [StageLayerSpec(spec, grid, value, device, tied=tied, parallel=parallel, ops=ops) for spec in specs],
            topology=GridTopology(parallel),
            loss_fn=loss,
        )

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self.bounds
        self._set_bounds(start=0, stop=0)

    def _build(self) -> None:
        stages: dict[str, Any] = {}
        for number in self.placement.stages_of(self.stage_id):
            self._set_bounds(start=self.bounds[number], stop=self.bounds[number + 1])
            self.forward_funcs: list[nn.Module] = []
            super()._build()
            self.chunks[number] = tuple(self.forward_funcs)
            names = [spec.spec.name for spec in self._layer_specs[self._local_start : self._local_stop]]
            stages |= zip(names, self.forward_funcs, strict=True)
        if self.tied and EMBEDDING in stages and HEAD in stages:
            stages[HEAD].weight = alias_of(stages[EMBEDDING].word.weight)
        wrap_blocks(
            stages,
            self.parallel,
            self.stage_id,
            self.ops.compiled,
            self.table,
            gradients_in_place=self.gradients_in_place,
        )

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Groups of the ranks that hold the two copies of a tied embedding."""
        pair = self.placement.ends
        if not self.tied or pair[0] == pair[1]:
            return {}
        comms = {}
        for dp in range(self._grid.data_parallel_size):
            for tp in range(self._grid.model_parallel_size):
                ranks = [self._grid.stage_to_global(stage_id=s, data=dp, model=tp) for s in pair]
                group = dist.new_group(ranks, timeout=self.grid.control.timeout)
                if self.global_rank in ranks:
                    weight = next(p for p in self.parameters() if placement_of(p).key == TIED_PARAMETER)
                    holder = nn.ParameterList([weight])
                    comms["embedding"] = {"ranks": ranks, "group": group, "weight_attr": ["0"], "module": holder}
        return comms

    @property
    def ends(self) -> tuple[nn.Module, ...]:
        """Embedding and output projection, those that this rank holds."""
        return self.chunks.get(0, ())[:1] + self.chunks.get(self.placement.num_stages - 1, ())[-1:]

    def trained_parameters(self) -> list[NamedParameter]:
        """What the optimizer trains, in forward order; a tied weight twice where one rank holds both copies."""
        pair = next((comm["group"] for comm in self.tied_comms.values()), None)
        has_embedding = self.stage_id == self.placement.ends[0]
        trained = []
        for parameter in self.parameters():
            place = placement_of(parameter)
            tied = place.key == TIED_PARAMETER and pair is not None
            owned = (place.dim is not None or self.grid.tp.is_first) and (not tied or has_embedding)
            trained.append(NamedParameter(place.key, parameter, owned, pair if tied else None))
        return trained

    def stage_of(self, parameter: nn.Parameter) -> int:
        """The virtual stage that holds a parameter, the first one that does."""
        for number, chunk in self.chunks.items():
            if any(parameter is held for stage in chunk for held in stage.parameters()):
                return number
        raise AssertionError(f"{placement_of(parameter).key} is not on this rank")

    def _synchronize_tied_weights(self) -> None:
        """Nothing to send: both copies are drawn from the same random stream."""

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
        return self.loss_fn.of_head(head, run_stages(stages, hidden, info), info, targets)  # type: ignore[no-any-return]
