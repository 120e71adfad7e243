"""The unsharded model on one process: what every layout is compared with."""

from __future__ import annotations

import torch
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
        value = value or initial_value(config, seed)
        self.names: dict[nn.Parameter, str] = {}
        self.stages = nn.ModuleList()
        for spec in stage_specs(config, seed):
            stage = spec.build()
            self.stages.append(stage)
            for name, parameter in stage.named_parameters():
                self.names[parameter] = f"{spec.name}.{name}"
                with torch.no_grad():
                    parameter.copy_(value(self._canonical(config, self.names[parameter]), tuple(parameter.shape)))
        embedding, head = self.stages[0], self.stages[-1]
        assert isinstance(embedding, Embedding) and isinstance(head, Head)
        if config.tie_embeddings:
            del self.names[head.weight]
            head.tie(embedding)

    @staticmethod
    def _canonical(config: ModelConfig, name: str) -> str:
        return TIED_PARAMETER if config.tie_embeddings and name == TIED_COPY else name

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Every parameter once, by its name in the whole model."""
        return {name: parameter for parameter, name in self.names.items()}

    def forward(self, tokens_bs: Tensor, info: BatchInfo) -> Tensor:
        """Returns logits [b, s, v]."""
        hidden = tokens_bs
        for stage in self.stages:
            hidden = stage(hidden, info)
        return hidden
