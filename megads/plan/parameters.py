"""Names, shapes and number of a model's parameters; nothing is allocated."""

from __future__ import annotations

from math import prod

import torch

from megads.model.config import MLPKind, ModelConfig, NormKind, Position
from megads.model.gpt import make_block


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of every parameter by name, in the model's order; a tied head has no entry of its own."""
    hidden, ffn = config.hidden_size, config.ffn_width

    def norm(name: str) -> dict[str, tuple[int, ...]]:
        parts = ("weight", "bias") if config.norm is NormKind.layernorm and config.bias else ("weight",)
        return {f"{name}.{part}": (hidden,) for part in parts}

    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        biases = {f"{name}.bias": (rows,)} if config.bias else {}
        return {f"{name}.weight": (rows, columns), **biases}

    shapes: dict[str, tuple[int, ...]] = {"embedding.word.weight": (config.vocabulary, hidden)}
    if config.position is Position.learned:
        shapes["embedding.position.weight"] = (config.max_seq_len, hidden)
    if config.embedding_norm:
        shapes |= norm("embedding.norm")
    for block in range(config.num_layers):
        if config.block.is_custom:
            shapes |= {f"blocks.{block}.{path}": shape for path, shape in custom_shapes(config).items()}
            continue
        shapes |= norm(f"blocks.{block}.input_norm")
        shapes |= linear(f"blocks.{block}.attention.qkv", config.qkv_width, hidden)
        shapes |= linear(f"blocks.{block}.attention.dense", hidden, hidden)
        if not config.parallel_block:
            shapes |= norm(f"blocks.{block}.post_attention_norm")
        into = "gate_up" if config.mlp is MLPKind.swiglu else "up"
        shapes |= linear(f"blocks.{block}.mlp.{into}", config.mlp_rows, hidden)
        shapes |= linear(f"blocks.{block}.mlp.down", hidden, ffn)
    shapes |= norm("final_norm")
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocabulary, hidden)
    return shapes


def custom_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of every parameter of one of a plugin's blocks, by its path in the block's stage."""
    with torch.device("meta"):
        block = make_block(config, seed=0, index=0)
    return {path: tuple(parameter.shape) for path, parameter in block.named_parameters()}


def parameter_count(config: ModelConfig) -> int:
    """Number of parameters, vocabulary padding excluded and a tied embedding counted once."""
    return sum(prod(shape) for shape in parameter_shapes(config).values())
