"""The unsharded model on one process: what every layout is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.config import ModelConfig
from megads.model.initialise import InitialValue, initial_value
from megads.model.stages import TIED_COPY, TIED_PARAMETER, Embedding, Head, stage_specs


class GPT(nn.Module):
    """All stages one after another.

    Args:
        config: the model's shape.
        seed: seed of weights and dropout.
        value: initial weights; None is `megads.model.initialise.initial_value`.
    """

    def __init__(self, config: ModelConfig, seed: int, value: InitialValue | None = None) -> None:
        super().__init__()
        config.check()
        self.config = config
        value = value or initial_value(config, seed)
        self.stage_names: list[str] = []
        self.stages = nn.ModuleList()
        for spec in stage_specs(config, seed):
            stage = spec.build()
            self.stage_names.append(spec.name)
            self.stages.append(stage)
            for name, parameter in stage.named_parameters():
                with torch.no_grad():
                    parameter.copy_(value(self._canonical(f"{spec.name}.{name}"), tuple(parameter.shape)))
        if config.tie_embeddings:
            self._tie()

    @classmethod
    def empty(cls, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> GPT:
        """The model with uninitialised weights for a checkpoint to fill; allocates each of them once.

        Args:
            config: the model's shape.
            device: where the weights are.
            dtype: of the weights.
        """

        def nothing(_name: str, shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, device="meta")

        with torch.device("meta"):
            model = cls(config, seed=0, value=nothing).to(dtype)
        for stage in model.stages:
            if not (config.tie_embeddings and isinstance(stage, Head)):
                stage.to_empty(device=device)
        if config.tie_embeddings:
            model._tie()
        return model

    def _tie(self) -> None:
        embedding, head = self.stages[0], self.stages[-1]
        assert isinstance(embedding, Embedding) and isinstance(head, Head)
        head.tie(embedding)

    def _canonical(self, name: str) -> str:
        return TIED_PARAMETER if self.config.tie_embeddings and name == TIED_COPY else name

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its name in the whole model."""
        return {
            self._canonical(f"{stage_name}.{name}"): parameter
            for stage_name, stage in zip(self.stage_names, self.stages, strict=True)
            for name, parameter in stage.named_parameters()
        }

    def forward(self, tokens_bs: Tensor, info: BatchInfo) -> Tensor:
        """Returns logits [b, s, v]."""
        hidden = tokens_bs
        for stage in self.stages:
            hidden = stage(hidden, info)
        return hidden


def token_losses(logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Cross entropy of every token in nats, fp32 (fp64 for fp64 logits) [b, s]."""
    logits = logits_bsv if logits_bsv.dtype.itemsize >= 4 else logits_bsv.float()
    return F.cross_entropy(logits.flatten(0, 1), labels_bs.flatten(), reduction="none").view_as(labels_bs)
