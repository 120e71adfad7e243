"""Names and weights of the model's layers, and names of the tied embedding parameters. Imports no torch."""

from __future__ import annotations

from megads.model.config import ModelConfig

EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"
TIED_PARAMETER, TIED_COPY = "embedding.word.weight", "head.weight"


def stage_weights(config: ModelConfig) -> dict[str, float]:
    """Relative cost of every layer by name, in the order of the forward pass.

    A block, the embedding and the head each cost 1.
    """
    blocks = {f"blocks.{index}": 1.0 for index in range(config.num_layers)}
    return {EMBEDDING: 1.0, **blocks, FINAL_NORM: 0.0, HEAD: 1.0}


def is_block(name: str) -> bool:
    """Whether the layer with this name is a transformer block."""
    return name.startswith("blocks.")
