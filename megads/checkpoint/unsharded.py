"""The whole model of a checkpoint of any layout, in one process."""

from __future__ import annotations

from typing import cast

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megads.checkpoint.read import CheckpointHandle, read_into
from megads.engine.interface import Shard
from megads.errors import CheckpointError
from megads.model.config import ModelConfig
from megads.model.gpt import GPT


def load_unsharded(handle: CheckpointHandle, device: torch.device, dtype: torch.dtype) -> GPT:
    """Builds the unsharded model of a checkpoint; its weights are in memory once.

    Args:
        handle: the checkpoint.
        device: where the model goes.
        dtype: of its weights, rounded from the fp32 masters as training rounds them.

    Returns:
        The model in evaluation mode, without gradients.

    Raises:
        CheckpointError: this version cannot build its model, or a weight is missing.
    """
    model = GPT.empty(_model_config(handle), device, dtype)
    with torch.no_grad():
        shards = [
            Shard(f"weight/{name}", tuple(parameter.shape), (0,) * parameter.dim(), parameter)
            for name, parameter in model.parameters_by_name().items()
        ]
        read_into(handle, shards)
    return model.eval().requires_grad_(False)


def _model_config(handle: CheckpointHandle) -> ModelConfig:
    """The shape that the checkpoint records of its model."""
    try:
        if "${" in str(handle.manifest.run.model):
            raise ValueError("${...} is never resolved in a manifest")
        merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), handle.manifest.run.model)
        return cast(ModelConfig, OmegaConf.to_object(merged))
    except (ValueError, OmegaConfBaseException) as error:
        raise CheckpointError(
            f"{handle.folder} is of a model that this version of megads cannot build "
            f"({str(error).splitlines()[0]}): use the version that wrote it"
        ) from error
