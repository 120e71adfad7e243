"""The TrainEngine of ZeRO-2, ZeRO-3 and hierarchical sharding: no pipeline."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import compress
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from megads.batch import MicroBatch
from megads.engine.culprit import agree_on_culprit, not_finite
from megads.engine.deepspeed_options import with_options
from megads.engine.deepspeed_setup import prepare_deepspeed
from megads.engine.interface import Culprit, EvaluationResult, Shard, StepResult
from megads.engine.partition_shards import parameter_shards
from megads.engine.sharded_engine import ShardedEngine, shard_weights, sharded_config
from megads.engine.stage_pipeline import placement_of
from megads.engine.token_mean import TokenMeanLoss, global_tokens, share_loss
from megads.engine.whole_model import WholeModel
from megads.engine.zero_state import AdamState, Piece, local_shape
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue, initial_value
from megads.ops.choice import TORCH, Kernels
from megads.optim.config import OptimConfig
from megads.optim.groups import parameter_groups
from megads.parallel.config import ParallelConfig
from megads.parallel.context import cut_micro_batch
from megads.parallel.grid import ParallelGrid
from megads.parallel.shard_buckets import BUCKET_ELEMENTS, bucket_elements
from megads.runtime.spans import Span


class ShardedTrainEngine:
    """ZeRO-2 or ZeRO-3 x tensor parallel training of one model; see `megads.engine.interface.TrainEngine`."""

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
        deepspeed: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        prepare_deepspeed()
        self.device, self.grid = device, grid
        self._loss = TokenMeanLoss(model.vocabulary, grid, ops)
        self._watch: Callable[[list[Shard]], None] | None = None
        self._watch_spans: Callable[[list[Span]], None] | None = None
        value = value or initial_value(model, seed)

        def config(bucket_elements: int) -> dict[str, Any]:
            settings = (parallel.zero_stage, precision, micro_batch_size, optim.clip_grad, bucket_elements)
            return with_options(sharded_config(*settings), deepspeed)

        shard = partial(shard_weights, grid=grid, precision=precision, config=config(BUCKET_ELEMENTS))
        module = WholeModel(
            model,
            parallel,
            grid,
            seed,
            value,
            device,
            precision,
            self._loss,
            shard if parallel.zero_stage == 3 else None,
            ops,
        )
        groups = parameter_groups(
            ((placement_of(p).key, p) for p in module.parameters()),
            tied_name=module.tied_key,
            weight_decay=optim.weight_decay,
        )
        beta1, beta2 = optim.betas
        adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=(beta1, beta2), eps=optim.eps, fused=True)
        bucket = bucket_elements([prod(local_shape(p)) for p in module.parameters()])
        gc.freeze()  # see PipelineTrainEngine
        self._engine = ShardedEngine(module, adamw, config(bucket), grid)
        self._adam = AdamState(adamw, self._engine.state.masters)

    @property
    def bounds(self) -> list[int]:
        """One stage holds all layers."""
        return [0, len(self._engine.module.stages)]

    def step(self, micro_batches: Sequence[MicroBatch], learning_rate: float) -> StepResult:
        """See TrainEngine.step."""
        engine = self._engine
        if self._watch_spans is not None:
            engine.spans.begin()
        micro_batches = self._own_tokens(micro_batches)
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate
        tokens = global_tokens(micro_batches, self.grid, self.device, loss_rank=0)
        # A step without a single unmasked token has nothing to learn: its loss and gradients are zero.
        self._loss.scale = engine.averaged_over / tokens.clamp(min=1.0)
        shared = share_loss(
            engine.accumulate(micro_batches), tokens, self.grid, loss_rank=0, scale=1.0 / engine.averaged_over
        )
        if self._watch is not None:
            self._watch(self._gradient_shards())
        with engine.spans.span("optimizer_step"):
            engine.step()
        if self._watch_spans is not None:
            self._watch_spans(engine.spans.end())
            self._watch_spans = None
        skipped = bool(engine.optimizer.overflow)
        loss, tokens_all = shared.tolist()
        return StepResult(
            loss=loss,
            tokens=int(tokens_all),
            grad_norm=float(engine.get_global_grad_norm()),
            skipped=skipped,
            culprit=self._culprit() if skipped else None,
        )

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> EvaluationResult:
        """See TrainEngine.evaluate."""
        micro_batches = self._own_tokens(micro_batches)
        tokens = global_tokens(micro_batches, self.grid, self.device, loss_rank=0)
        self._loss.scale = torch.ones_like(tokens)
        loss_sum = self._engine.evaluate_sum(micro_batches)
        return EvaluationResult.of(share_loss(loss_sum, tokens, self.grid, loss_rank=0))

    def _own_tokens(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This context rank's share of whole samples."""
        return [cut_micro_batch(batch, self.grid.cp, self.device) for batch in micro_batches]

    def _culprit(self) -> Culprit:
        """Collective over the world; only after a skipped step."""
        engine = self._engine
        pieces = list(engine.state.pieces())
        cut = not_finite([torch.isfinite(self._adam.of(piece)["weight"]).all() for piece in pieces])
        # Of a parameter there may be several pieces.
        weights = dict.fromkeys(placement_of(piece.parameter).key for piece in compress(pieces, cut))
        broken = not_finite([torch.isfinite(norm) for norm in engine.gradient_norms.values()])
        forward_stage = None if engine.forward_finite.item() else 0
        gradients = [(0, placement_of(p).key) for p in compress(engine.gradient_norms, broken)]
        return agree_on_culprit(self.grid.control, list(weights), forward_stage, gradients)

    def watch_gradients(self, watch: Callable[[list[Shard]], None] | None) -> None:
        """See TrainEngine.watch_gradients."""
        self._watch = watch

    def watch_spans(self, watch: Callable[[list[Span]], None]) -> None:
        """See TrainEngine.watch_spans."""
        self._watch_spans = watch

    def _owned(self, piece: Piece) -> bool:
        replicated = placement_of(piece.parameter).dim is None
        return self.grid.replica.is_first and (self.grid.tp.is_first or not replicated)

    def _gradient_shards(self) -> list[Shard]:
        shards: list[Shard] = []
        state = self._engine.state
        for piece, gradient in zip(state.pieces(), state.gradients(), strict=True):
            if self._owned(piece):
                place, shape = placement_of(piece.parameter), local_shape(piece.parameter)
                shards += parameter_shards("gradient", place, shape, piece.first, gradient)
        return shards

    def named_shards(self, owned: bool = True) -> list[Shard]:
        """See TrainEngine.named_shards."""
        shards: list[Shard] = []
        for piece in self._engine.state.pieces():
            if owned and not self._owned(piece):
                continue
            place, shape = placement_of(piece.parameter), local_shape(piece.parameter)
            for kind, flat in self._adam.of(piece).items():
                shards += parameter_shards(kind, place, shape, piece.first, flat)
        return shards

    @property
    def optimizer_steps(self) -> int:
        """See TrainEngine.optimizer_steps."""
        return self._adam.steps

    def load_shards(self, fill: Callable[[list[Shard]], None], optimizer_steps: int) -> None:
        """See TrainEngine.load_shards."""
        fill(self.named_shards(owned=False))
        self._adam.set_steps(optimizer_steps)
        self._engine.state.refresh_weights()
