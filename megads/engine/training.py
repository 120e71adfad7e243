"""The TrainEngine over DeepSpeed: what the loop drives."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megads.batch import MicroBatch
from megads.engine.culprit import Symptoms, agree_on_culprit
from megads.engine.deepspeed_setup import prepare_deepspeed
from megads.engine.interface import Culprit, EvaluationResult, Shard, StepResult
from megads.engine.partition_shards import parameter_shards
from megads.engine.pipeline_engine import StageEngine
from megads.engine.stage_pipeline import StagePipeline, placement_of
from megads.engine.token_mean import TokenMeanLoss, global_tokens, share_loss
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue, initial_value
from megads.optim.config import OptimConfig
from megads.optim.groups import parameter_groups
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import ParallelGrid


def deepspeed_config(
    precision: torch.dtype, micro_batch_size: int, micro_batches: int, dp: int, clip: float
) -> dict[str, Any]:
    """The DeepSpeed settings of a run; everything else is decided by our own config."""
    return {
        "train_batch_size": micro_batch_size * micro_batches * dp,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision is torch.bfloat16},
        # Without this DeepSpeed would reduce in bf16 what was accumulated in fp32.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        # Whole activations travel between stages; their shape is then the same for all.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "steps_per_print": None,
    }


class PipelineTrainEngine:
    """ZeRO-1 x pipeline x tensor parallel training of one model; see `megads.engine.interface.TrainEngine`."""

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
    ) -> None:
        prepare_deepspeed()
        self.device, self.grid = device, grid
        self._loss = TokenMeanLoss(model.vocabulary, grid)
        value = value or initial_value(model, seed)
        module = StagePipeline(model, parallel, grid, seed, value, device, self._loss)
        groups = parameter_groups(
            ((placement_of(p).key, p) for p in module.parameters()),
            tied_name=module.tied_key,
            weight_decay=optim.weight_decay,
        )
        beta1, beta2 = optim.betas
        adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)
        # DeepSpeed forces a garbage collection at every stage of its optimizer's construction: half a second each over
        # all that has been imported by now, which lives as long as the process anyway.
        gc.freeze()
        settings = deepspeed_config(precision, micro_batch_size, 1, grid.data.size, optim.clip_grad)
        self._engine = StageEngine(module, adamw, settings)

    @property
    def bounds(self) -> list[int]:
        """Stage s holds layers bounds[s] to bounds[s + 1]."""
        return list(self._engine.module.bounds)

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """See TrainEngine.step."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = global_tokens(micro_batches, self.grid, self.device)
        # DeepSpeed divides each micro-batch's loss by their number and the gradients by the data-parallel size.
        replicas = len(micro_batches) * self.grid.data.size
        # A step without a single unmasked token has nothing to learn: its loss and gradients are zero.
        self._loss.scale = replicas / tokens.clamp(min=1.0)
        loss_sum = self._engine.run_training_schedule(micro_batches)
        loss, tokens_all = share_loss(loss_sum, tokens, self.grid, 1.0 / replicas)
        optimizer = self._engine.optimizer
        skipped = bool(optimizer.overflow)
        return StepResult(
            loss=loss,
            tokens=tokens_all,
            grad_norm=float(self._engine.get_global_grad_norm()),
            skipped=skipped,
            culprit=self._culprit() if skipped else None,
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """See TrainEngine.evaluate."""
        tokens = global_tokens(micro_batches, self.grid, self.device)
        self._loss.scale = torch.ones_like(tokens)
        return EvaluationResult(*share_loss(self._engine.run_inference_schedule(micro_batches), tokens, self.grid))

    def _culprit(self) -> Culprit:
        """Collective over the world; only after a skipped step."""
        engine = self._engine
        pairs = list(zip(engine.optimizer.parameters, engine.gradient_norms, strict=True))
        mine = Symptoms(
            rank=self.grid.rank,
            stage=self.grid.pp.rank,
            weights=tuple(placement_of(p).key for p, _ in pairs if not torch.isfinite(p).all()),
            forward=not bool(engine.forward_finite.item()),
            gradients=tuple(placement_of(p).key for p, norm in pairs if not torch.isfinite(norm)),
        )
        return agree_on_culprit(mine)

    def named_shards(self, owned: bool = True) -> list[Shard]:
        """See TrainEngine.named_shards."""
        optimizer = self._engine.optimizer
        shards: list[Shard] = []
        for parameter, first, part in optimizer.partition_ranges():
            place = placement_of(parameter)
            replicated_copy = place.dim is None and not self.grid.tp.is_first
            if owned and (replicated_copy or parameter.ds_pipe_replicated):  # type: ignore[attr-defined]
                continue
            for kind, flat in optimizer.state_of(part).items():
                shards += parameter_shards(kind, place, tuple(parameter.shape), first, flat)
        return shards

    def watch_gradients(self, watch: Callable[[list[Shard]], None] | None) -> None:
        """See TrainEngine.watch_gradients."""
        self._engine.watch = None if watch is None else lambda: watch(self._gradient_shards())

    def _gradient_shards(self) -> list[Shard]:
        optimizer = self._engine.optimizer
        shards: list[Shard] = []
        for parameter, first, part in optimizer.partition_ranges():
            place = placement_of(parameter)
            if not (place.dim is None and not self.grid.tp.is_first) and not parameter.ds_pipe_replicated:  # type: ignore[attr-defined]
                flat = optimizer.gradient_of(part)
                shards += parameter_shards("gradient", place, tuple(parameter.shape), first, flat)
        return shards

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self._engine.optimizer.steps

    def load_shards(self, fill: Callable[[list[Shard]], None], optimizer_steps: int) -> None:
        """See TrainEngine.load_shards."""
        fill(self.named_shards(owned=False))
        self._engine.optimizer.set_steps(optimizer_steps)
        self._engine.optimizer.update_lp_params()
