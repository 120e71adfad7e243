"""The TrainEngine over DeepSpeed: what the loop drives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from megads.batch import MicroBatch
from megads.engine.culprit import agree_on_culprit, not_finite
from megads.engine.deepspeed_setup import prepare_deepspeed
from megads.engine.interface import Culprit, EvaluationResult, Shard, StepResult
from megads.engine.optimizer import BucketAdamW, StateRange, gradient_of
from megads.engine.partition_shards import parameter_shards
from megads.engine.pipeline_engine import StageEngine
from megads.engine.stage_pipeline import StagePipeline, placement_of
from megads.engine.token_mean import TokenMeanLoss, global_tokens, share_loss
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue, initial_value
from megads.ops.choice import TORCH, Kernels
from megads.optim.config import OptimConfig
from megads.parallel.config import ParallelConfig
from megads.parallel.context import cut_micro_batch
from megads.parallel.grid import ParallelGrid
from megads.runtime.spans import Span


def deepspeed_config(precision: torch.dtype, micro_batch_size: int, replicas: int) -> dict[str, Any]:
    """The DeepSpeed settings of a run: it casts the weights and executes instructions; everything else is ours.

    Args:
        precision: dtype of weights and activations.
        micro_batch_size: samples in one forward pass.
        replicas: ranks with the same weights.
    """
    return {
        "train_batch_size": micro_batch_size * replicas,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": precision is torch.bfloat16},
        "steps_per_print": None,
    }


class PipelineTrainEngine:
    """ZeRO-0 or 1 x pipeline x tensor parallel training of one model; see `megads.engine.interface.TrainEngine`."""

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        optim: OptimConfig,
        grid: ParallelGrid,
        *,
        precision: torch.dtype,
        micro_batch_size: int,
        seed: int,
        device: torch.device,
        value: InitialValue | None = None,
        ops: Kernels = TORCH,
    ) -> None:
        prepare_deepspeed()
        self.device, self.grid = device, grid
        self._loss = TokenMeanLoss(model.vocabulary, grid, ops)
        value = value or initial_value(model, seed)
        module = StagePipeline(model, parallel, grid, seed, value, device, self._loss, ops)

        def optimizer(stages: StagePipeline) -> BucketAdamW:
            return BucketAdamW(stages.trained_parameters(), optim, parallel, grid, ops)

        # DeepSpeed may force a garbage collection while it builds: half a second each over all that has been imported
        # by now, which lives as long as the process anyway.
        gc.freeze()
        self._engine = StageEngine(module, optimizer, deepspeed_config(precision, micro_batch_size, grid.data.size))

    @property
    def bounds(self) -> list[int]:
        """See TrainEngine.bounds."""
        return list(self._engine.module.bounds)

    @property
    def _loss_rank(self) -> int:
        """Pipeline rank that holds the last stage."""
        return self._engine.module.placement.ends[1]

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """See TrainEngine.step."""
        # The one time that a step waits for the device.
        loss, tokens, norm = self.launch_step(micro_batches, learning_rate).tolist()
        optimizer = self._engine.optimizer
        optimizer.settle(norm)
        return StepResult(
            loss=loss,
            tokens=int(tokens),
            grad_norm=optimizer.grad_norm,
            skipped=optimizer.skipped,
            culprit=self._culprit() if optimizer.skipped else None,
        )

    def launch_step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> Tensor:
        """Everything of a step that the device does; the host waits for none of it.

        Returns:
            fp64 [3] on the device: loss, tokens, and the norm, with which the optimizer must be settled.
        """
        micro_batches = self._own_tokens(micro_batches)
        tokens = global_tokens(micro_batches, self.grid, self.device, self._loss_rank)
        # A step without a single unmasked token has nothing to learn: its loss and gradients are zero.
        self._loss.scale = 1.0 / tokens.clamp(min=1.0)
        loss_sum = self._engine.run_training_schedule(micro_batches, learning_rate)
        shared = share_loss(loss_sum, tokens, self.grid, self._loss_rank)
        return torch.cat((shared, self._engine.optimizer.norm[None]))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """See TrainEngine.evaluate."""
        micro_batches = self._own_tokens(micro_batches)
        tokens = global_tokens(micro_batches, self.grid, self.device, self._loss_rank)
        self._loss.scale = torch.ones_like(tokens)
        loss_sum = self._engine.run_inference_schedule(micro_batches)
        return EvaluationResult.of(share_loss(loss_sum, tokens, self.grid, self._loss_rank))

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This context rank's share of whole samples."""
        return [cut_micro_batch(batch, self.grid.cp, self.device) for batch in micro_batches]

    def _culprit(self) -> Culprit:
        """Collective over the world; only after a skipped step."""
        engine = self._engine
        parameters = engine.optimizer.parameters
        whole = not_finite([torch.isfinite(p).all() for p in parameters])
        gradients = not_finite([torch.isfinite(norm) for norm in engine.optimizer.gradient_norms])
        stages = not_finite(list(engine.forward_finite.values()))
        weights = [placement_of(p).key for p in compress(parameters, whole)]
        forward_stage = min(compress(engine.forward_finite, stages), default=None)
        named = [(engine.module.stage_of(p), placement_of(p).key) for p in compress(parameters, gradients)]
        return agree_on_culprit(self.grid.control, weights, forward_stage, named)

    def named_shards(self, owned: bool = True) -> list[Shard]:
        """See TrainEngine.named_shards."""
        return self._shards(self._engine.optimizer.state_of, owned)

    def _shards(self, tensors_of: Callable[[StateRange], dict[str, Tensor]], owned: bool) -> list[Shard]:
        shards: list[Shard] = []
        for part in self._engine.optimizer.state_ranges():
            if owned and not part.owned:
                continue
            place, local_shape = placement_of(part.parameter), tuple(part.parameter.shape)
            for kind, flat in tensors_of(part).items():
                shards += parameter_shards(kind, place, local_shape, part.first, flat)
        return shards

    def watch_gradients(self, watch: Callable[[list[Shard]], None] | None) -> None:
        """See TrainEngine.watch_gradients."""

        def gradient(part: StateRange) -> dict[str, Tensor]:
            return {"gradient": part.of(gradient_of(part.bucket))}

        self._engine.optimizer.watch = None if watch is None else lambda: watch(self._shards(gradient, owned=True))

    def watch_spans(self, watch: Callable[[list[Span]], None]) -> None:
        """See TrainEngine.watch_spans."""
        self._engine.watch_spans = watch

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self._engine.optimizer.steps

    def load_shards(self, fill: Callable[[list[Shard]], None], optimizer_steps: int) -> None:
        """See TrainEngine.load_shards."""
        fill(self.named_shards(owned=False))
        self._engine.optimizer.set_steps(optimizer_steps)
        self._engine.optimizer.publish_weights()
