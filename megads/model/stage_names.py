"""The model's stages in order, by name and weight, and the parameters that tied embeddings share. Imports no torch."""

from __future__ import annotations

from megads.model.config import ModelConfig

EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"
TIED_PARAMETER, TIED_COPY = "embedding.word.weight", "head.weight"


def stage_weights(config: ModelConfig) -> dict[str, float]:
    """Of every stage's name, in the order of the forward pass, its share of the work: a block is 1.

    Embedding and head count as much as a block.
    """
    blocks = {f"blocks.{index}": 1.0 for index in range(config.num_layers)}
    return {EMBEDDING: 1.0, **blocks, FINAL_NORM: 0.0, HEAD: 1.0}


def is_block(name: str) -> bool:
    """Whether the stage of this name is a transformer block."""
    return name.startswith("blocks.")
