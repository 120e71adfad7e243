"""DeepSpeed's PipelineEngine, taught what our numerics contract asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils.timer import NoopTimer
from torch import Tensor
from torch.optim import Optimizer

from megads.batch import MicroBatch
from megads.engine.optimizer import Fp32GradientOptimizer
from megads.engine.stage_pipeline import StagePipeline


class StageEngine(PipelineEngine):  # type: ignore[misc]
    """What differs from the stock engine:

    - micro-batches are MicroBatch objects, and every stage gets its BatchInfo;
    - gradients reduce over data parallel first and over the tied pair second, so that both copies of a tied
      embedding see the same bits (the stock order differs at dp >= 3);
    - fp32 weights take the same optimizer as bf16 ones;
    - each rank notes what it did to make a step non-finite.
    """

    optimizer: Fp32GradientOptimizer
    module: StagePipeline

    def __init__(self, module: StagePipeline, optimizer: Optimizer, config: dict[str, Any]) -> None:
        mpu = module.mpu()
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=mpu,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
        # The stock test is for the exact type BF16_Optimizer, which a subclass fails.
        self.using_bf16_optimizer = True
        self.optimizer.initialise_state()
        self.watch: Callable[[], None] | None = None
        self._begin([])

    def _do_optimizer_sanity_check(self, basic_optimizer: Optimizer) -> str:
        return str(BFLOAT16)  # for fp32 weights too: see Fp32GradientOptimizer

    def _configure_bf16_optimizer(self, optimizer: Optimizer) -> Fp32GradientOptimizer:
        # The optimizer asserts that bf16 is enabled but does not otherwise care about the weights' dtype.
        bf16_config = self._config.bfloat16_config.model_copy(update={"enabled": True})
        return Fp32GradientOptimizer(
            optimizer,
            self.param_names,
            bfloat16_config=bf16_config,
            mpu=self.mpu,
            clip_grad=self.gradient_clipping(),
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            timers=NoopTimer(),
            grad_acc_dtype=torch.float32,
        )

    def _begin(self, micro_batches: Sequence[MicroBatch]) -> None:
        self._micro_batches = micro_batches
        self._loaded = self._forwarded = 0
        self.total_loss = self.total_additional_losses = None
        self._compute_loss = True
        self.forward_finite = torch.ones((), dtype=torch.bool, device=self.device)
        self.gradient_norms: list[Tensor] = []

    def run_training_schedule(self, micro_batches: Sequence[MicroBatch]) -> Tensor | None:
        """Forward, backward, reduction and optimizer step; returns the sum of the losses on the last stage."""
        if len(micro_batches) != self.micro_batches:
            self.set_train_batch_size(len(micro_batches) * self.micro_batch_size * self.grid.data_parallel_size)
        self._begin(micro_batches)
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

    def _reduce_gradients(self) -> None:
        # This rank's own gradients, before the reduction spreads a non-finite one.
        self.gradient_norms = list(torch._foreach_norm(self.optimizer.gradients))
        self._exec_reduce_grads()
        self._exec_reduce_tied_grads()
        if self.watch is not None:
            self.watch()

    def _reduce_tied_gradients(self) -> None:
        """Done in `_reduce_gradients`, after the data-parallel reduction."""

    # The stock map holds function objects, so overriding methods alone would change nothing.
    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _load_micro_batch,
        schedule.ForwardPass: _forward_pass,
        schedule.ReduceGrads: _reduce_gradients,
        schedule.ReduceTiedGrads: _reduce_tied_gradients,
    }
