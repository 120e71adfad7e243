"""How the model may be cut by tensor and sequence parallelism; `megads.parallel.sharding` applies this table.

The loss head is cut with the vocabulary: `megads.model.gpt.token_losses` on one process,
`megads.parallel.cross_entropy.vocab_parallel_token_losses` where the logits are split.
"""

from __future__ import annotations

from megads.parallel.table import Cut, ShardingTable

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
