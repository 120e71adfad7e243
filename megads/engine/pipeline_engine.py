"""DeepSpeed's PipelineEngine, taught what our numerics contract asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from megads.batch import MicroBatch
from megads.engine.optimizer import BucketAdamW
from megads.engine.stage_pipeline import StagePipeline


class StageEngine(PipelineEngine):  # type: ignore[misc]
    """What differs from the stock engine:

    - micro-batches are MicroBatch objects, and every stage gets its BatchInfo;
    - the optimizer is ours, for both precisions, and reduces gradients while the last backward pass runs; DeepSpeed
      runs the schedule and knows neither ZeRO nor gradient accumulation;
    - each rank notes what it did to make a step non-finite.
    """

    optimizer: BucketAdamW
    module: StagePipeline

    def __init__(
        self, module: StagePipeline, optimizer: Callable[[StagePipeline], BucketAdamW], config: dict[str, Any]
    ) -> None:
        """Builds the engine over a stage.

        Args:
            module: this rank's stages.
            optimizer: makes the optimizer of the stages; called once their weights are in their final dtype.
            config: DeepSpeed's settings.
        """
        mpu = module.mpu()
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=mpu,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
        self._begin([])

    def _configure_optimizer(self, client_optimizer: Callable[[StagePipeline], BucketAdamW], _parameters: Any) -> None:
        # DeepSpeed's own choice of a wrapper goes by dtype and ZeRO stage, and refuses what it does not know.
        self.optimizer = client_optimizer(self.module)
        self.basic_optimizer = self.optimizer.adamw

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._loaded = self._forwarded = self._backwarded = 0
        self.total_loss = self.total_additional_losses = None
        self._compute_loss = True
        self.forward_finite = torch.ones((), dtype=torch.bool, device=self.device)

    def run_training_schedule(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> Tensor | None:
        """Forward, backward, reduction and optimizer step; returns the sum of the losses on the last stage."""
        self.micro_batches, self._learning_rate = len(micro_batches), learning_rate
        self._begin(micro_batches)
        self.optimizer.begin()
        self.module.train()
        self._exec_schedule(self._train_schedule())
        return self.total_loss

    def run_inference_schedule(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Forward only; returns the sum of the losses on the last stage."""
        self._begin(micro_batches)
        self.module.eval()
        with torch.no_grad():
            self._exec_schedule(self._inference_schedule(len(micro_batches)))
        return self.total_loss

    def _load_micro_batch(self, buffer_id: int) -> None:
        batch = self._micro_batches[self._loaded]
        self._loaded += 1
        if self.is_first_stage():
            assert batch.tokens_bs is not None
            self.pipe_buffers["inputs"][buffer_id] = batch.tokens_bs.to(self.device)
        if self.is_last_stage():
            assert batch.labels_bs is not None and batch.loss_mask_bs is not None
            labels = (batch.labels_bs.to(self.device), batch.loss_mask_bs.to(self.device))
            self.pipe_buffers["labels"][buffer_id] = labels

    def _forward_pass(self, buffer_id: int) -> None:
        # 1F1B runs the forwards of a stage in order, so the n-th one belongs to micro-batch n.
        self.module.info = self._micro_batches[self._forwarded].info.to(self.device)
        self._forwarded += 1
        self._exec_forward_pass(buffer_id)
        output = self.loss if self.is_last_stage() else self.pipe_buffers["outputs"][buffer_id]
        if self.is_last_stage():
            # DeepSpeed would keep the logits of every buffer until its next use; only the loss is needed of them.
            self.pipe_buffers["outputs"][buffer_id] = None
        # Stays on the device: no synchronisation in the step.
        self.forward_finite &= torch.isfinite(output.detach()).all()

    def _backward_pass(self, buffer_id: int) -> None:
        self._backwarded += 1
        self.optimizer.last_backward = self._backwarded == len(self._micro_batches)
        self._exec_backward_pass(buffer_id)

    def _reduce_gradients(self) -> None:
        self.optimizer.reduce()

    def _reduce_tied_gradients(self) -> None:
        """Done by the optimizer, after the reduction over data parallel."""

    def _optimizer_step(self) -> None:
        self.optimizer.step(self._learning_rate)

    # The stock map holds function objects, so overriding methods alone would change nothing.
    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _load_micro_batch,
        schedule.ForwardPass: _forward_pass,
        schedule.BackwardPass: _backward_pass,
        schedule.ReduceGrads: _reduce_gradients,
        schedule.ReduceTiedGrads: _reduce_tied_gradients,
        schedule.OptimizerStep: _optimizer_step,
    }
