"""All stages on one rank, for engines without a pipeline; built from the same pieces as a pipeline's stages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megads.batch import MicroBatch
from megads.engine.stage_pipeline import StageLayerSpec, run_stages, wrap_blocks
from megads.engine.token_mean import TokenMeanLoss
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue
from megads.model.sharding import sharding_of
from megads.model.stages import EMBEDDING, HEAD, TIED_PARAMETER, stage_specs
from megads.ops.choice import TORCH, Kernels
from megads.parallel.config import ParallelConfig
from megads.parallel.grid import ParallelGrid
from megads.parallel.weight_gradients import SplitLayer, TiedGradient


def tie_weights(embedding: SplitLayer, head: SplitLayer, shape: tuple[int, ...]) -> None:
    """Gives the output projection the embedding's weight, whose two gradients are added in fp32.

    Args:
        embedding: its weight may be cut by ZeRO-3 already.
        head: of the same vocabulary.
        shape: of the weight before it was cut.
    """
    head.weight = embedding.weight
    head.weight_gradients = embedding.weight_gradients = TiedGradient(shape)


class WholeModel(nn.Module):
    """This rank's tensor-parallel share of every stage, and the loss.

    Args:
        model: the model's shape.
        parallel: the layout.
        grid: the ranks.
        seed: of dropout.
        value: initial weights.
        device: where they are.
        precision: their dtype.
        loss: of a micro-batch.
        shard: called with every stage as soon as it is built, so that ZeRO-3 can cut its weights before the next one
            is drawn: no rank ever holds the whole model.
        ops: whose operators compute.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        grid: ParallelGrid,
        seed: int,
        value: InitialValue,
        device: torch.device,
        precision: torch.dtype,
        loss: TokenMeanLoss,
        shard: Callable[[nn.Module], None] | None = None,
        ops: Kernels = TORCH,
    ) -> None:
        super().__init__()
        self.loss = loss
        tied = model.tie_embeddings
        self.tied_key = TIED_PARAMETER if tied else None
        stages: dict[str, nn.Module] = {}
        rows: tuple[int, ...] = ()
        for spec in stage_specs(model, seed):
            stage = (
                StageLayerSpec(spec, grid, value, device, tied=tied, parallel=parallel, ops=ops).build().to(precision)
            )
            if tied and spec.name == HEAD:
                tie_weights(stages[EMBEDDING].word, stage, rows)  # type: ignore[arg-type]
            if spec.name == EMBEDDING:
                rows = tuple(stage.word.weight.shape)  # type: ignore[union-attr, arg-type]
            if shard is not None:
                shard(stage)
            stages[spec.name] = stage
        self.stages = nn.ModuleList(stages.values())
        wrap_blocks(stages, parallel, 0, ops.compiled, sharding_of(model))

    def forward(self, batch: MicroBatch) -> Tensor:
        """The scaled loss of a micro-batch that is on the model's device; fp64 scalar."""
        assert batch.tokens_bs is not None and batch.labels_bs is not None and batch.loss_mask_bs is not None
        *stages, head = self.stages
        hidden = run_stages(stages, batch.tokens_bs, batch.info)
        return self.loss.of_head(head, hidden, batch.info, (batch.labels_bs, batch.loss_mask_bs))
