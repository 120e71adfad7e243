"""Stock DeepSpeed on megads' stages: its PipelineEngine and BF16_Optimizer, as the baseline for megads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from megads.batch import BatchInfo, MicroBatch
from megads.engine.deepspeed_adapter import prepare_deepspeed
from megads.engine.interface import EngineSpec
from megads.engine.stage_pipeline import build_layer, run_layers
from megads.model.gpt import ModelLayerSpec, layer_specs
from megads.optim.groups import parameter_groups
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from megads.parallel.loss import TokenMeanLoss
from megads.parallel.partition import stage_bounds
from megads.parallel.sharding import placement_of
from tests.parity import Scenario, initial_weights, step_batches


class BuiltByMegads(LayerSpec):
    """A layer of megads' model, which DeepSpeed builds only on the ranks that hold it."""

    def __init__(self, layer: ModelLayerSpec, spec: EngineSpec) -> None:
        super().__init__(nn.Module)
        self._layer, self._spec = layer, spec

    def build(self, log: bool = False) -> nn.Module:
        return build_layer(self._layer, self._spec)


class StockPipeline(PipelineModule):
    """DeepSpeed's pipeline module of megads' stages, in megads' partition; DeepSpeed calls it with one argument.

    Attributes:
        info: of the micro-batch in flight; the engine sets it before each forward pass.
    """

    info: BatchInfo

    def __init__(self, spec: EngineSpec, loss: TokenMeanLoss) -> None:
        assert spec.parallel.pp == 1 or spec.parallel.dp == 1, "the order of DeepSpeed's ranks may be another one"
        layers = layer_specs(spec.model, spec.seed)
        self._bounds = stage_bounds([layer.cost for layer in layers], spec.parallel)
        topology = PipeModelDataParallelTopology(num_pp=spec.parallel.pp, num_mp=1, num_dp=spec.parallel.dp)
        super().__init__([BuiltByMegads(layer, spec) for layer in layers], topology=topology, loss_fn=loss)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def forward(self, hidden: Tensor) -> Tensor:
        return run_layers(self.forward_funcs, hidden, self.info)


class StockEngine(PipelineEngine):
    """DeepSpeed's engine that reads megads' micro-batches."""

    module: StockPipeline

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Runs one step."""
        self._micro_batches, self._loaded, self._forwarded = micro_batches, 0, 0
        self.micro_batches = len(micro_batches)
        self.total_loss = self.total_additional_losses = None
        self._compute_loss = True
        self.module.train()
        self._exec_schedule(self._train_schedule())

    def _load_micro_batch(self, buffer_id: int) -> None:
        batch = self._micro_batches[self._loaded]
        self._loaded += 1
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = batch.tokens_bs.to(self.device)
        if self.is_last_stage():
            labels = (batch.labels_bs.to(self.device), batch.loss_mask_bs.to(self.device))
            self.pipe_buffers["labels"][buffer_id] = labels

    def _forward_pass(self, buffer_id: int) -> None:
        # 1F1B runs the forwards of a stage in order, so the n-th one belongs to micro-batch n.
        self.module.info = self._micro_batches[self._forwarded].info.to(self.device)
        self._forwarded += 1
        self._exec_forward_pass(buffer_id)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _load_micro_batch,
        schedule.ForwardPass: _forward_pass,
    }


def build_stock(scenario: Scenario, parallel: ParallelConfig) -> StockEngine:
    """Builds DeepSpeed's engine; only for data- and pipeline-parallel layouts and untied models.

    In bf16 it is ZeRO-1 with gradients accumulated and reduced in fp32; in fp32 it is plain AdamW.
    """
    assert not scenario.model.tie_embeddings
    prepare_deepspeed()
    low = scenario.dtype is torch.bfloat16
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    loss = TokenMeanLoss(scenario.model.vocabulary, grid)
    spec = EngineSpec(
        scenario.model,
        parallel,
        scenario.optim,
        grid,
        precision=scenario.dtype,
        micro_batch_size=scenario.micro_batch_size,
        seed=scenario.seed,
        device=torch.device("cpu"),
        value=initial_weights(scenario) or (lambda name, shape: torch.zeros(shape)),
    )
    module = StockPipeline(spec, loss)
    named = [(placement_of(p).key, p) for p in module.parameters()]
    groups = parameter_groups(named, tied_name=None, optim=scenario.optim)
    config = {
        "train_batch_size": scenario.global_batch_size,
        "train_micro_batch_size_per_gpu": scenario.micro_batch_size,
        "gradient_clipping": scenario.clip_grad,
        "zero_optimization": {"stage": 1 if low else 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": low},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "steps_per_print": None,
    }
    mpu = module.mpu()
    adamw = torch.optim.AdamW(groups, lr=scenario.lr, fused=True)
    engine = StockEngine(
        args=None, model=module, optimizer=adamw, mpu=mpu, config=config, config_class=DeepSpeedConfig(config, mpu)
    )
    assert not low or type(engine.optimizer) is BF16_Optimizer
    return engine


def train_stock(scenario: Scenario, dp: int, steps: int = 2) -> None:
    """Builds the engine and trains."""
    engine = build_stock(scenario, ParallelConfig(dp=dp))
    for step in range(steps):
        engine.train(step_batches(scenario, step, dist.get_rank() % dp, dp))
