"""Sharding table of the model for tensor and sequence parallelism. Imports no torch.

`megads.parallel.sharding` applies the table. The loss is sharded with the vocabulary: `megads.model.gpt.token_losses`
on one process, `megads.parallel.loss.vocab_parallel_token_losses` on sharded logits.
"""

from __future__ import annotations

from dataclasses import replace

from megads.model.config import CUSTOM, ModelConfig, QKNormWidth
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import ContextParallelKind
from megads.parallel.partition import FeatureGroups, ParallelStyle, ShardingTable
from megads.runtime.registry import BLOCKS

SHARDING = ShardingTable(
    parameters={
        "embedding.word": ParallelStyle.vocab,
        "embedding.position": ParallelStyle.sequence,
        "blocks.*.attention.qkv": ParallelStyle.column,
        "blocks.*.attention.dense": ParallelStyle.row,
        "blocks.*.attention.query_norm": ParallelStyle.inside,
        "blocks.*.attention.key_norm": ParallelStyle.inside,
        "blocks.*.attention.sinks": ParallelStyle.vector,
        "blocks.*.mlp.up": ParallelStyle.column,
        "blocks.*.mlp.gate_up": ParallelStyle.column,
        "blocks.*.mlp.down": ParallelStyle.row,
        "blocks.*.mlp.shared.up": ParallelStyle.column,
        "blocks.*.mlp.shared.gate_up": ParallelStyle.column,
        "blocks.*.mlp.shared.down": ParallelStyle.row,
        "blocks.*.mlp.experts.*": ParallelStyle.experts,
        "blocks.*.shared_input": ParallelStyle.columns,
        "blocks.*.summed_output": ParallelStyle.rows,
        "head": ParallelStyle.vocab_head,
    },
    dropouts=("embedding.dropout", "blocks.*.attention_dropout", "blocks.*.mlp_dropout", "blocks.*.summed_dropout"),
    attention_cores=("blocks.*.attention.core",),
    experts=("blocks.*.mlp.experts",),
    routers=("blocks.*.mlp.router",),
)

FULL_QK_NORM = {
    "blocks.*.attention.query_norm": ParallelStyle.vector,
    "blocks.*.attention.key_norm": ParallelStyle.vector,
    "blocks.*.attention.query_key_norms": ParallelStyle.norms,
}
"""Sharding of QK norms over all heads, replacing the entries for norms per head."""


def sharding_of(model: ModelConfig) -> ShardingTable:
    """Sharding table of a model, including the entries of its options or of a plugin's block.

    Raises:
        ConfigError: no plugin registered the block.
    """
    groups = {"blocks.*.attention.qkv": FeatureGroups(model.queries_per_kv * model.head_dim, 2 * model.head_dim)}
    if not model.block.is_custom:
        full = FULL_QK_NORM if model.qk_norm_width is QKNormWidth.full else {}
        parameters = {**SHARDING.parameters, **full}
        return replace(SHARDING, parameters=parameters, feature_groups=groups, num_experts=model.moe.num_experts)
    own: ShardingTable = getattr(BLOCKS.find(model.block.name, "model.block.name").make, "sharding", ShardingTable({}))
    prefix = f"blocks.*.{CUSTOM}."
    return ShardingTable(
        {**SHARDING.parameters, **{f"{prefix}{path}": style for path, style in own.parameters.items()}},
        (*SHARDING.dropouts, *(f"{prefix}{path}" for path in own.dropouts)),
        (*SHARDING.attention_cores, *(f"{prefix}{path}" for path in own.attention_cores)),
        {f"{prefix}{path}": of_module for path, of_module in own.feature_groups.items()},
    )


def fused_rows(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Fused parameters of a built-in block, by name suffix.

    Returns:
        Numbers of adjacent rows of each matrix in a fused parameter, a pattern that repeats over all rows, of experts
        over those of each: the query, key and value rows of each KV head; the gate and up rows of each unit of a gated
        MLP.
    """
    head = model.head_dim
    return {
        "attention.qkv.weight": (model.queries_per_kv * head, head, head),
        **{f"mlp.{part}gate_up.weight": (1, 1) for part in ("", "shared.", "experts.")},
    }


def has_attention_core(model: ModelConfig) -> bool:
    """Whether the model's block declares an attention core; without one, how tokens interact is unknown."""
    return not model.block.is_custom or len(sharding_of(model).attention_cores) > len(SHARDING.attention_cores)


def why_not_tp(model: ModelConfig, tp: int) -> str:
    """Why the heads cannot be divided over tensor-parallel ranks, and what to change; empty if they can.

    Args:
        model: model config.
        tp: tensor-parallel size.
    """
    if model.num_heads % tp:
        return (
            f"model.num_heads = {model.num_heads} is not divisible by parallel.tp = {tp}: every tensor parallel "
            "rank takes an equal share; lower parallel.tp or change the model"
        )
    heads = f"model.num_kv_heads = {model.num_kv_heads}"
    if model.kv_heads % tp and tp % model.kv_heads:
        return (
            f"{heads} neither divides parallel.tp = {tp} nor is divisible by it: every tensor parallel rank takes "
            "an equal share, or as many ranks share each KV head; change parallel.tp or the model"
        )
    sharers = tp // model.kv_heads
    if sharers > 1 and 2 * model.head_dim % sharers:
        return (
            f"{heads} with parallel.tp = {tp}: {sharers} ranks share a KV head, but the {2 * model.head_dim} rows "
            f"of its key and value are not divisible by {sharers}; lower parallel.tp or change model.head_size"
        )
    if sharers > 1 and model.qk_norm_width is QKNormWidth.full:
        return (
            f"{heads} is below parallel.tp = {tp}, which model.qk_norm_width = full does not support: the gains of "
            "the keys' norm are divided over the ranks; lower parallel.tp"
        )
    return ""


def context_kinds(model: ModelConfig, tp: int, cp: int) -> tuple[ContextParallelKind, ...]:
    """Kinds of context parallelism that a model allows in a layout; only the default if samples are not divided.

    Args:
        model: the model.
        tp: tensor-parallel size.
        cp: context-parallel size.
    """
    found = [ContextParallelKind.allgather]
    if cp > 1 and not model.block.is_custom:
        if model.num_heads % (tp * cp) == 0:
            found.append(ContextParallelKind.ulysses)
        if all(kind.attention in (AttentionKind.auto, AttentionKind.sdpa) for kind, _ in model.layer_kinds()):
            found.append(ContextParallelKind.ring)
    return tuple(found)
