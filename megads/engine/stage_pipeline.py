"""The model's stages as DeepSpeed layer specs in a PipelineModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import deepspeed.comm as ds_dist
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue
from megads.model.sharding import SHARDING
from megads.model.stages import EMBEDDING, HEAD, TIED_COPY, TIED_PARAMETER, StageSpec, stage_specs
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import ParallelGrid, axis_lines, place_of
from megads.parallel.partition import partition
from megads.parallel.sharding import Placement, materialise, shard_stage


class StageLayerSpec(LayerSpec):  # type: ignore[misc]
    """A stage that DeepSpeed builds on the ranks that hold it: made on the meta device, cut, then filled."""

    def __init__(
        self, spec: StageSpec, grid: ParallelGrid, value: InitialValue, device: torch.device, tied: bool
    ) -> None:
        super().__init__(nn.Module)
        self.spec, self.grid, self.value, self.device, self.tied = spec, grid, value, device, tied

    def __repr__(self) -> str:
        return self.spec.name

    def build(self, log: bool = False) -> nn.Module:
        """This rank's share of the stage, its parameters' `placement` attribute set."""
        with torch.device("meta"):
            stage = self.spec.build()
        stage, placements = shard_stage(stage, self.spec.name, SHARDING, self.grid.tp)
        if self.tied and self.spec.name == HEAD:
            placements = {path: self._tied(place) for path, place in placements.items()}
        stage = materialise(stage, placements, self.value, self.device)
        for path, parameter in stage.named_parameters():
            parameter.placement = placements[path]  # type: ignore[attr-defined]
        return stage

    @staticmethod
    def _tied(place: Placement) -> Placement:
        assert place.key == TIED_COPY
        return Placement(TIED_PARAMETER, place.global_shape, place.dim, place.start, place.length)


def placement_of(parameter: nn.Parameter) -> Placement:
    """Where a parameter of a StagePipeline lies in the unsharded model."""
    place: Placement = parameter.placement  # type: ignore[attr-defined]
    return place


def run_stages(stages: Iterable[nn.Module], hidden: Tensor, info: BatchInfo) -> Tensor:
    """Calls stages one after the other on the output of the last."""
    for stage in stages:
        hidden = stage(hidden, info)
    return hidden


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
    """This rank's run of stages.

    DeepSpeed keeps what it is good at (building on demand, process groups, schedule); the partition, the tie between
    embedding and head, and BatchInfo on every stage are ours.

    Attributes:
        info: BatchInfo of the micro-batch in flight; the engine sets it before each forward.
    """

    info: BatchInfo

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        grid: ParallelGrid,
        seed: int,
        value: InitialValue,
        device: torch.device,
        loss: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor],
    ) -> None:
        specs = stage_specs(model, seed)
        # Before super().__init__(): PipelineModule's constructor calls the overrides below.
        self.bounds = partition([spec.weight for spec in specs], parallel.pp)
        self.tied = model.tie_embeddings
        super().__init__(
            [StageLayerSpec(spec, grid, value, device, model.tie_embeddings) for spec in specs],
            topology=GridTopology(parallel),
            loss_fn=loss,
        )

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self.bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _build(self) -> None:
        super()._build()
        names = [spec.spec.name for spec in self._layer_specs[self._local_start : self._local_stop]]
        stages = dict(zip(names, self.forward_funcs, strict=True))
        if self.tied and EMBEDDING in stages and HEAD in stages:
            stages[HEAD].weight = stages[EMBEDDING].word.weight

    def _index_tied_modules(self) -> dict[str, dict[str, Any]]:
        """Groups of the ranks that hold the two copies of a tied embedding."""
        if not self.tied or self.num_stages == 1:
            return {}
        comms = {}
        for dp in range(self._grid.data_parallel_size):
            for tp in range(self._grid.model_parallel_size):
                ranks = [self._grid.stage_to_global(stage_id=s, data=dp, model=tp) for s in (0, self.num_stages - 1)]
                group = ds_dist.new_group(ranks=ranks)
                if self.global_rank in ranks:
                    weight = self._tied_weight()
                    weight.ds_pipe_replicated = self.global_rank != ranks[0]  # counted once in the norm
                    holder = nn.ParameterList([weight])
                    comms["embedding"] = {"ranks": ranks, "group": group, "weight_attr": ["0"], "module": holder}
        return comms

    @property
    def tied_key(self) -> str | None:
        """Name of the tied parameter, None when nothing is tied."""
        return TIED_PARAMETER if self.tied else None

    def _tied_weight(self) -> Any:
        return next(p for p in self.parameters() if placement_of(p).key == TIED_PARAMETER)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """This rank's copy of the tied embedding and the group of both copies; empty where there is one or none."""
        return [(self._tied_weight(), comm["group"]) for comm in self.tied_comms.values()]

    def _synchronize_tied_weights(self) -> None:
        """Nothing to send: both copies are drawn from the same random stream."""

    def forward(self, hidden: Tensor) -> Tensor:
        return run_stages(self.forward_funcs, hidden, self.info)
