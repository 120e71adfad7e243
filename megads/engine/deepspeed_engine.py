"""Training engine for ZeRO-0 and ZeRO-1 that runs DeepSpeed's pipeline engine (engine=deepspeed)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from megads.batch import MicroBatch
from megads.engine.deepspeed_adapter import ZeroPiece
from megads.engine.deepspeed_pipeline import DeepSpeedPipeline, LayerPipeline, Observer, pipeline_settings
from megads.engine.deepspeed_state import (
    PartitionedEngine,
    ZeroMasterState,
    make_optimizer,
    master_layouts,
    tie_weights,
)
from megads.engine.interface import Culprit, EngineSpec
from megads.engine.stage_pipeline import build_layer, wrap_blocks
from megads.engine.train_engine import agree_on_culprit, not_finite
from megads.model.config import EMBEDDING, HEAD, TIED_PARAMETER
from megads.model.gpt import layer_specs
from megads.optim.groups import bucket_elements, parameter_groups
from megads.parallel.grid import Axis
from megads.parallel.partition import stage_bounds
from megads.parallel.sharding import placement_of


class DeepSpeedEngine(PartitionedEngine):
    """TrainEngine that runs DeepSpeed's PipelineEngine with ZeRO-0 or ZeRO-1, over one or more pipeline stages.

    In bf16 DeepSpeed's BF16_Optimizer holds fp32 master weights and accumulates gradients in fp32. In fp32 autograd
    accumulates them, and ZeRO-1 is DeepSpeed's DeepSpeedZeroOptimizer.

    Args:
        spec: specification of the engine.

    Attributes:
        module: this rank's layers.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._spec = spec
        layers = layer_specs(spec.model, spec.seed)
        self._names = [layer.name for layer in layers]
        self._bounds = stage_bounds([layer.cost for layer in layers], spec.parallel)
        tied = spec.model.tie_embeddings
        makers = [partial(build_layer, layer, spec) for layer in layers]
        self.module = LayerPipeline(makers, self._bounds, spec.parallel, self._loss, tied=tied and spec.parallel.pp > 1)
        held = dict(self.layers())
        if tied and spec.parallel.pp == 1:
            tie_weights(held[EMBEDDING].word, held[HEAD], tuple(held[HEAD].weight.shape))  # type: ignore[arg-type]
        self.module.offload = wrap_blocks(held, spec)
        self._tied_copy = bool(self.module.tied_ranks) and spec.grid.rank != self.module.tied_ranks[0]
        self._mark_counted()
        # In fp32 DeepSpeed's ZeRO-1 reduces the norm of each group over all stages: all need the same groups.
        self._tied_alone = tied and (spec.precision is not torch.float32 or not spec.parallel.zero_stage)
        tied_key = TIED_PARAMETER if self._tied_alone else None
        groups = parameter_groups(
            ((placement_of(p).key, p) for p in self.module.parameters()),
            tied_name=tied_key,
            optim=spec.optim,
            width_scale=spec.model.width_scale(muon=spec.optim.is_muon),
        )
        optimizer = make_optimizer(groups, spec)
        settings = pipeline_settings(spec, bucket_elements([p.numel() for p in self.module.parameters()]))
        self._pipeline = DeepSpeedPipeline(self.module, optimizer, spec, settings)
        self._pipeline.observer = Observer(self._spans.span, self._note_forward)
        self.partitions = self._pipeline.state
        layouts = master_layouts(self.partitions, spec.grid, tied_key, muon=spec.optim.is_muon)
        self.masters = ZeroMasterState(optimizer, self.partitions.masters, layouts, spec.optim)
        self.averaged_over = self._pipeline.averaged_over
        self._skipped, self._last_norm = False, torch.zeros((), dtype=torch.float64, device=spec.device)

    def _mark_counted(self) -> None:
        """Marks the parameters that count in DeepSpeed's gradient norm on this rank, all of them once in the model."""
        for parameter in self.module.parameters():
            place = placement_of(parameter)
            copy = self._tied_copy and place.key == TIED_PARAMETER
            parameter.tensor_model_parallel = not copy and (place.dim is not None or self.grid.tp.is_first)  # type: ignore[attr-defined]

    @property
    def bounds(self) -> list[int]:
        """See TrainEngine.bounds."""
        return list(self._bounds)

    @property
    def _loss_rank(self) -> int:
        return self.grid.pp.size - 1

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """See TrainEngine.layers."""
        for index, layer in self.module.layers.items():
            yield self._names[index], layer

    def _note_forward(self, output: Tensor) -> None:
        # Stays on the device, so that the step does not synchronize.
        self._forward_finite &= torch.isfinite(output).all()
        if self.grid.pp.is_last:
            self._trace.record("the loss", output)

    def _compute(self, micro_batches: Sequence[MicroBatch], *, overlap: bool = True) -> Tensor | None:
        """See BaseTrainEngine. Gradients are reduced after the last backward pass, regardless of `overlap`."""
        if self._span_watches:
            self._spans.begin()
        self._forward_finite.fill_(True)
        loss = self._pipeline.train(micro_batches)
        local = list(self._pipeline.local_gradients())
        self._local = [parameter for parameter, _ in local]
        self._local_norms = torch._foreach_norm([gradient for _, gradient in local])
        if self._trace.recording:
            self._trace.context = "before any reduction"
            for parameter, gradient in local:
                self._trace.record(f"the gradient of {placement_of(parameter).key}", gradient)
        return loss

    @property
    def _own_norms(self) -> list[Tensor]:
        return list(self._local_norms)

    def _forget(self) -> None:
        self._pipeline.drop_gradients()

    def _reduce(self) -> None:
        with self._spans.span("reduce_gradients"):
            self._sum_partial_gradients()
            self._pipeline.reduce()

    def _sum_partial_gradients(self) -> None:
        """All-reduces the gradients of parameters that sequence parallelism replicates over tensor-parallel ranks."""
        local = self._pipeline.local_gradients()
        parts = [gradient for parameter, gradient in local if getattr(parameter, "gradient_partial", False)]
        if parts:
            total = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(self.grid.tp.recorded(total), group=self.grid.tp.group)
            for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed.view_as(part))

    def _update(self, learning_rate: float) -> None:
        if self._update_wait is not None:
            self._update_wait()
        with self._spans.span("optimizer_step"):
            self._step_and_finish(learning_rate)
        if not self._skipped:
            self.masters.update_averages()

    def _step_and_finish(self, learning_rate: float) -> None:
        if self._pipeline.accumulates_in_bf16_optimizer:
            self._pipeline.step(learning_rate)
            self._skipped = self._pipeline.skipped
            self._last_norm = self._pipeline.norm
            return
        # In fp32 DeepSpeed neither skips a step whose norm is not finite nor says the norm without ZeRO.
        self._last_norm = self._reduced_norm()
        self._skipped = not bool(self._last_norm.isfinite())
        if self._skipped:
            self._pipeline.drop_gradients()
            self._last_norm = torch.full_like(self._last_norm, inf)
        else:
            self._pipeline.step(learning_rate)

    @property
    def _norm(self) -> Tensor:
        return self._last_norm

    def _finish_step(self, norm: float) -> tuple[float, bool]:
        return norm, self._skipped

    def _run_evaluation(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        return self._pipeline.evaluate(micro_batches)

    def _culprit(self) -> Culprit:
        stage = self.grid.pp.rank
        parameters = list(self.module.parameters())
        whole = not_finite([torch.isfinite(p).all() for p in parameters])
        broken = not_finite([torch.isfinite(norm) for norm in self._local_norms])
        forward_stage = None if self._forward_finite.item() else stage
        weights = [placement_of(p).key for p in compress(parameters, whole)]
        gradients = [(stage, placement_of(p).key) for p in compress(self._local, broken)]
        return agree_on_culprit(self.grid.control, weights, forward_stage, gradients)

    def _owns(self, piece: ZeroPiece) -> bool:
        place = placement_of(piece.parameter)
        if self._tied_copy and place.key == TIED_PARAMETER:
            return False
        sharded = self._spec.parallel.zero_stage > 0
        return (place.dim is not None or self.grid.tp.is_first) and (sharded or self.grid.data.is_first)

    def _parameters(self) -> Iterator[Parameter]:
        return self.module.parameters()

    def _copies(self, parameter: Parameter, *, working: bool) -> dict[str, Axis]:
        partitioned = self._spec.parallel.zero_stage > 0 and not working
        # Only in a group of its own a tied weight is cut in the same way on both stages.
        pair = self._pair(parameter) if working or self._tied_alone else {}
        return pair if partitioned else {"data": self.grid.data} | pair

    def _pair(self, parameter: Parameter) -> dict[str, Axis]:
        ranks = self.module.tied_ranks
        if not ranks or placement_of(parameter).key != TIED_PARAMETER:
            return {}
        return {"pair": Axis(ranks.index(self.grid.rank), ranks, self.module.tied_group, self.grid.trace)}
