"""Checks that a model and its samples divide over the ranks of a layout, and that its operators can be used there."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from megads.errors import ConfigError
from megads.model.config import ModelConfig
from megads.model.sharding import has_attention_core, why_not_tp
from megads.ops.config import Compile, Float8, Float8Recipe, OpsConfig
from megads.parallel.config import ContextParallelKind, EngineKind, ParallelConfig, Partition
from megads.parallel.partition import stage_bounds

_FLOAT8_IN_GRAPHS = "a graph would read the quantized weights of the step in which it was captured"


def check_layout(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> None:
    """Checks that the model divides over tensor-parallel ranks, its experts and pipeline stages, and samples over cp
    ranks.

    Args:
        model: the model.
        parallel: the layout.
        seq_len: tokens per sample.

    Raises:
        ConfigError: gives the value, the reason and the remedy.
    """
    tp = parallel.tp
    if reason := why_not_tp(model, tp):
        raise ConfigError(reason)
    dense = not all(map(model.moe.holds, range(model.num_layers)))
    if dense and model.ffn_width % tp:
        raise ConfigError(
            f"model.ffn_size (4 * hidden_size unless set) = {model.ffn_width} is not divisible by parallel.tp = {tp}: "
            "every tensor parallel rank takes an equal share; lower parallel.tp or change the model"
        )
    _check_experts(model, parallel)
    _check_stages(model, parallel)
    _check_context_parallel(model, parallel, seq_len)
    _check_sequence_parallel(parallel, seq_len)


def _check_experts(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Checks that experts, and their features, divide over the ranks."""
    moe = model.moe
    if not moe.enabled:
        if parallel.ep > 1 or not parallel.expert_tp:
            given = f"ep = {parallel.ep}" if parallel.ep > 1 else "expert_tp = false"
            raise ConfigError(
                f"parallel.{given} is about experts, but model.moe.num_experts = 0: remove it, or choose a "
                "model with experts"
            )
        return
    if moe.num_experts % parallel.ep:
        raise ConfigError(
            f"model.moe.num_experts = {moe.num_experts} is not divisible by parallel.ep = {parallel.ep}: every "
            "rank takes an equal share of the experts; choose a divisor"
        )
    if moe.drops and (parallel.cp > 1 or (parallel.tp > 1 and not parallel.expert_tp)):
        given = f"cp = {parallel.cp}" if parallel.cp > 1 else f"expert_tp = false with parallel.tp = {parallel.tp}"
        raise ConfigError(
            f"model.moe.overflow = drop is not supported with parallel.{given}: rows are dropped by sample, and a rank "
            "has only a part of each; use model.moe.overflow=recompute, or another layout"
        )
    for name, width in (("expert_ffn_size", model.expert_width), ("shared_ffn_size", moe.shared_ffn_size)):
        if width % parallel.tp and (name == "shared_ffn_size" or parallel.expert_tp):
            alternative = " or set parallel.expert_tp=false," if name == "expert_ffn_size" else ""
            raise ConfigError(
                f"model.moe.{name} = {width} is not divisible by parallel.tp = {parallel.tp}: every tensor-"
                f"parallel rank takes an equal share; lower parallel.tp,{alternative} or change the model"
            )


def _check_stages(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Checks that every pipeline stage gets a block, except a first or last stage configured to have none."""
    alone = (parallel.first_stage_blocks, parallel.last_stage_blocks).count(0)
    if model.num_layers < parallel.num_stages - alone:
        stages, remedy = f"parallel.pp = {parallel.pp}", "lower parallel.pp"
        if parallel.num_stages > parallel.pp:
            stages = f"parallel.pp * virtual_stages = {parallel.pp} * {parallel.num_stages // parallel.pp}"
            remedy = "lower one of them"
        raise ConfigError(
            f"model.num_layers = {model.num_layers} is below {stages}: every pipeline stage needs a block; {remedy}"
        )
    known = replace(parallel, partition=Partition.weighted) if parallel.partition is Partition.auto else parallel
    stage_bounds([1.0] * (model.num_layers + 2), known)


def _check_sequence_parallel(parallel: ParallelConfig, seq_len: int) -> None:
    """Checks that sequence parallelism gives every tensor-parallel rank an equal share of the tokens."""
    cuts = parallel.cp * parallel.tp
    if not parallel.sequence_parallel or parallel.tp == 1 or seq_len % cuts == 0:
        return
    ranks = f"parallel.tp = {parallel.tp}"
    if parallel.cp > 1:
        ranks = f"parallel.cp * tp = {parallel.cp} * {parallel.tp}"
    raise ConfigError(
        f"train.seq_len = {seq_len} is not divisible by {ranks}: with parallel.sequence_parallel every rank takes an "
        f"equal share of the tokens; use a train.seq_len that is a multiple of {cuts}, or "
        "parallel.sequence_parallel=false"
    )


def _check_context_parallel(model: ModelConfig, parallel: ParallelConfig, seq_len: int) -> None:
    """Checks that a sample divides into two equal chunks per context-parallel rank, that blocks name their core, and
    that its heads divide over the ranks if they are redistributed."""
    if parallel.cp > 1 and model.block.is_custom:
        _check_core_of_plugin(model, parallel)
    if parallel.ulysses_size > 1:
        _check_ulysses(model, parallel)
    if parallel.cp > 1 and not has_attention_core(model):
        raise ConfigError(
            f"parallel.cp = {parallel.cp} needs a block that names its attention core, which all-gathers keys "
            f"and values, but the sharding table of model.block.name = {model.block.name} names none; set "
            "parallel.cp=1"
        )
    chunks = 2 * parallel.cp
    if parallel.cp > 1 and seq_len % chunks:
        raise ConfigError(
            f"train.seq_len = {seq_len} is not divisible by 2 * parallel.cp = {chunks}: every context "
            "parallel rank takes two equal chunks of a sample; change train.seq_len to "
            f"{-(-seq_len // chunks) * chunks}, or lower parallel.cp"
        )


def _check_core_of_plugin(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuses what a plugin's attention core may not support."""
    wrong, unknown, remedy = "", "how many heads its attention core has", "parallel.cp_kind=allgather"
    if parallel.cp_ulysses > 1:
        wrong, remedy = f"parallel.cp_ulysses = {parallel.cp_ulysses}", "parallel.cp_ulysses=1"
    elif parallel.cp_kind in (ContextParallelKind.ulysses, ContextParallelKind.ring):
        wrong = f"parallel.cp_kind = {parallel.cp_kind}"
        if parallel.cp_kind is ContextParallelKind.ring:
            unknown = "how its attention core combines blocks of keys"
    if wrong:
        raise ConfigError(
            f"{wrong} is not supported with model.block.name = {model.block.name}: {unknown} is unknown; use {remedy}"
        )


def _check_ulysses(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Refuses heads that do not divide over the ranks that exchange them."""
    heads, ranks = model.num_heads // parallel.tp, parallel.ulysses_size
    if heads % ranks == 0:
        return
    count = f"{heads} (model.num_heads / parallel.tp = {model.num_heads} / {parallel.tp})"
    whole = parallel.cp_kind is ContextParallelKind.ulysses
    given = "parallel.cp_kind = ulysses" if whole else f"parallel.cp_ulysses = {ranks}"
    over = f"parallel.cp = {parallel.cp}" if whole else str(ranks)
    if not whole:
        both = gcd(heads, parallel.cp)
        divisors = ", ".join(str(size) for size in range(1, both + 1) if both % size == 0)
        remedy = f"use a divisor of both {heads} and parallel.cp = {parallel.cp}: {divisors}"
    elif heads > 1:
        remedy = f"change parallel.cp to a divisor of {heads}, or use parallel.cp_kind=allgather"
    else:
        remedy = "use parallel.cp_kind=allgather"
    raise ConfigError(
        f"{given} divides the heads of a tensor-parallel rank, {count if parallel.tp > 1 else heads}, over {over} "
        f"ranks, which does not divide them: {remedy}"
    )


def check_operators(ops: OpsConfig, float8: Float8, model: ModelConfig, parallel: ParallelConfig) -> None:
    """Checks that torch.compile, CUDA graphs, chunks and FP8, if they are used, support the model in the layout.

    Args:
        ops: operators.
        float8: which linear layers multiply in FP8.
        model: the model.
        parallel: the layout.

    Raises:
        ConfigError: gives the value, the reason and the remedy.
    """
    if ops.compile is not Compile.none and parallel.zero_stage == 3:
        raise ConfigError(
            f"ops.compile = {ops.compile} is not supported with parallel.zero_stage = 3: torch.compile cannot trace "
            "the all-gather of a layer's weights when it is called; set parallel.zero_stage=1 or 2, or ops.compile=none"
        )
    if ops.cuda_graphs is True and (reason := why_no_cuda_graphs(model, parallel)):
        raise ConfigError(f"ops.cuda_graphs = true is not supported with {reason}, or ops.cuda_graphs=false")
    if ops.mlp_chunk is not None:
        _check_mlp_chunk(ops.mlp_chunk, float8, model)
    if float8.recipe is not Float8Recipe.none:
        _check_float8(ops, float8, model, parallel)


def why_no_cuda_graphs(
    model: ModelConfig,
    parallel: ParallelConfig,
    float8: Float8Recipe = Float8Recipe.none,
    engine: EngineKind = EngineKind.native,
) -> str:
    """Why CUDA graphs of whole micro-batches are not supported, and what to set; empty if they are.

    Args:
        model: the model.
        parallel: the layout.
        float8: train.fp8.
        engine: the engine, not auto.
    """
    if model.moe.enabled and model.moe.capacity_factor is None:
        return (
            f"model.moe.num_experts = {model.moe.num_experts} and no capacity: the number of rows of an expert depends "
            "on the data; set model.moe.capacity_factor, for example to 1.5"
        )
    if reason := parallel.why_no_cuda_graphs():
        return reason
    if float8 is not Float8Recipe.none:
        return f"train.fp8 = {float8}: {_FLOAT8_IN_GRAPHS}; set train.fp8=none"
    if engine is EngineKind.deepspeed:
        return "engine = deepspeed: only the native engine captures micro-batches; set engine=native"
    return ""


def _check_mlp_chunk(chunk: int, float8: Float8, model: ModelConfig) -> None:
    """Chunks need MLPs of blocks, whose branches are separate and whose products do not share a scale."""
    given, moe = f"ops.mlp_chunk = {chunk}", model.moe
    refused = {
        f"model.block.name = {model.block.name}": (
            model.block.is_custom,
            "which part of a plugin's block is an MLP is unknown",
        ),
        "model.parallel_block = true": (
            model.parallel_block,
            "the MLP's projections are computed together with those of attention",
        ),
        f"model.moe.num_experts = {moe.num_experts}": (
            moe.enabled and not moe.shared_ffn_size and all(map(moe.holds, range(model.num_layers))),
            "routed experts are not divided, and there is neither a shared expert nor a dense layer",
        ),
        f"train.fp8 = {float8.recipe}": (
            float8.recipe is not Float8Recipe.none,
            "the scale of a tensor would be that of a chunk; use train.fp8=none",
        ),
    }
    for setting, (found, reason) in refused.items():
        if found:
            raise ConfigError(f"{given} is not supported with {setting}: {reason}, or remove ops.mlp_chunk")


def _check_float8(ops: OpsConfig, float8: Float8, model: ModelConfig, parallel: ParallelConfig) -> None:
    """FP8 needs blocks that use it, whose linear layers are known, one GEMM in each, and its weights outside of CUDA
    graphs."""
    given = f"train.fp8 = {float8.recipe}"
    if not float8.blocks(model.num_layers):
        raise ConfigError(
            f"{given}: train.fp8_bf16_blocks = {float8.bf16_blocks} at each end leave none of model.num_layers = "
            f"{model.num_layers} blocks to compute in FP8; lower train.fp8_bf16_blocks, or use train.fp8=none"
        )
    refused = {
        f"model.moe.num_experts = {model.moe.num_experts}": (model.moe.enabled, "the GEMMs of experts have no FP8", ""),
        f"model.block.name = {model.block.name}": (
            model.block.is_custom,
            "which layers of a plugin's block are linear is unknown",
            "",
        ),
        f"parallel.tp_chunks = {parallel.tp_chunks}": (
            parallel.tp_chunks > 1 and parallel.tp > 1,
            "FP8 GEMMs are not split",
            "set parallel.tp_chunks=1, or ",
        ),
        "parallel.overlap_param_gather = true": (
            parallel.overlap_param_gather,
            "all weights are quantized at the start of a step",
            "set parallel.overlap_param_gather=false, or ",
        ),
        "ops.cuda_graphs = true": (
            ops.cuda_graphs is True,
            _FLOAT8_IN_GRAPHS,
            "set ops.cuda_graphs=false, or ",
        ),
    }
    for setting, (found, reason, remedy) in refused.items():
        if found:
            raise ConfigError(f"{given} is not supported with {setting}: {reason}; {remedy}use train.fp8=none")
