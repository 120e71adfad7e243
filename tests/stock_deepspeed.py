"""Stock DeepSpeed on our stages: its PipelineEngine and BF16_Optimizer, what ours is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from megads.batch import MicroBatch
from megads.engine.deepspeed_setup import prepare_deepspeed
from megads.engine.pipeline_engine import StageEngine
from megads.engine.stage_pipeline import StagePipeline, placement_of
from megads.engine.token_mean import TokenMeanLoss
from megads.optim.groups import parameter_groups
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import build_grid
from tests.parity import Scenario, initial_weights, step_batches


class StockEngine(PipelineEngine):
    """DeepSpeed's engine but for reading our micro-batches."""

    optimizer: BF16_Optimizer
    module: StagePipeline

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        """One step."""
        StageEngine._begin(self, micro_batches)
        self.module.train()
        self._exec_schedule(self._train_schedule())

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: StageEngine._load_micro_batch,
        schedule.ForwardPass: StageEngine._forward_pass,
    }


def build_stock(scenario: Scenario, dp: int) -> StockEngine:
    """ZeRO-1 in bf16 with gradients that accumulate and reduce in fp32, over `dp` ranks; untied models only."""
    assert scenario.dtype is torch.bfloat16 and not scenario.model.tie_embeddings
    prepare_deepspeed()
    parallel = ParallelConfig(dp=dp)
    grid = build_grid(parallel, dist.get_rank(), dist.get_world_size())
    loss = TokenMeanLoss(scenario.model.vocabulary, grid)
    value = initial_weights(scenario) or (lambda name, shape: torch.zeros(shape))
    module = StagePipeline(scenario.model, parallel, grid, scenario.seed, value, torch.device("cpu"), loss)
    named = [(placement_of(p).key, p) for p in module.parameters()]
    groups = parameter_groups(named, tied_name=None, weight_decay=scenario.optim.weight_decay)
    config = {
        "train_batch_size": scenario.global_batch_size,
        "train_micro_batch_size_per_gpu": scenario.micro_batch_size,
        "gradient_clipping": scenario.clip_grad,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
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
    assert type(engine.optimizer) is BF16_Optimizer
    return engine


def train_stock(scenario: Scenario, dp: int, steps: int = 2) -> None:
    """Builds the engine and trains."""
    engine = build_stock(scenario, dp)
    for step in range(steps):
        engine.train(step_batches(scenario, step, dist.get_rank() % dp, dp))
