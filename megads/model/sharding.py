"""How the model may be cut by tensor and sequence parallelism; `megads.parallel.sharding` applies this table.

The loss head is cut with the vocabulary: `megads.model.gpt.token_losses` on one process,
`megads.parallel.loss.vocab_parallel_token_losses` where the logits are split.
"""

from __future__ import annotations

from megads.model.config import ModelConfig
from megads.parallel.table import Cut, ShardingTable
from megads.runtime.registry import BLOCKS

SHARDING = ShardingTable(
    parameters={
        "embedding.word": Cut.vocab,
        "embedding.position": Cut.sequence,
        "blocks.*.attention.qkv": Cut.column,
        "blocks.*.attention.dense": Cut.row,
        "blocks.*.mlp.up": Cut.column,
        "blocks.*.mlp.gate_up": Cut.column,
        "blocks.*.mlp.down": Cut.row,
        "blocks.*.shared_input": Cut.columns,
        "blocks.*.summed_output": Cut.rows,
        "head": Cut.vocab_head,
    },
    dropouts=("embedding.dropout", "blocks.*.attention_dropout", "blocks.*.mlp_dropout", "blocks.*.summed_dropout"),
    attention_cores=("blocks.*.attention.core",),
)

CUSTOM = "custom"
"""Where a plugin's block lies in its stage: its parameters are blocks.<number>.custom.<path within it>."""


def sharding_of(model: ModelConfig) -> ShardingTable:
    """The table of a model, with that of a plugin's block in it.

    Raises:
        ConfigError: no plugin registered the block.
    """
    if not model.block.is_custom:
        return SHARDING
    own: ShardingTable = getattr(BLOCKS.find(model.block.name, "model.block.name").make, "sharding", ShardingTable({}))
    prefix = f"blocks.*.{CUSTOM}."
    return ShardingTable(
        {**SHARDING.parameters, **{f"{prefix}{path}": cut for path, cut in own.parameters.items()}},
        (*SHARDING.dropouts, *(f"{prefix}{path}" for path in own.dropouts)),
        (*SHARDING.attention_cores, *(f"{prefix}{path}" for path in own.attention_cores)),
    )


def has_attention_core(model: ModelConfig) -> bool:
    """Whether the model's block names an attention core; without one nobody knows how its tokens meet."""
    return not model.block.is_custom or len(sharding_of(model).attention_cores) > len(SHARDING.attention_cores)
