"""Parameter names, shapes and counts of a model, and its training FLOPs.

Nothing is allocated. Convention: model FLOPs are those that the algorithm needs. Two per multiply-add, forward once and
backward twice, causal attention counted in full, no recomputation; norms, biases, activation functions and the
embedding lookup are not counted. Hardware FLOPs are model FLOPs plus those of activation recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from megads.model.config import ModelConfig, NormKind, NormPlacement, Position, QKNormWidth
from megads.model.sharding import has_attention_core
from megads.ops.attention_kinds import AttentionKind
from megads.parallel.config import Recompute

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Unsharded shape of every parameter by name, in model order; a tied head has no separate entry."""
    hidden = config.hidden_size
    shapes: Shapes = {"embedding.word.weight": (config.vocabulary, hidden)}
    if config.position is Position.learned:
        shapes["embedding.position.weight"] = (config.max_seq_len, hidden)
    if config.embedding_norm:
        shapes |= _norm(config, "embedding.norm", hidden)
    of_kinds = [
        _custom_shapes(kind) if kind.block.is_custom else _block_shapes(kind) for kind, _ in config.layer_kinds()
    ]
    for block in range(config.num_layers):
        shapes |= {f"blocks.{block}.{path}": shape for path, shape in of_kinds[config.kind_of(block)].items()}
    shapes |= _norm(config, "final_norm", hidden)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocabulary, hidden)
    if config.head_bias:
        shapes["head.bias"] = (config.vocabulary,)
    return shapes


def shapes_of_any_vocabulary(config: ModelConfig) -> Shapes:
    """`parameter_shapes`, with a vocabulary size of 1 if it is not known yet."""
    return parameter_shapes(replace(config, vocab_size=config.vocab_size or 1))


def _norm(config: ModelConfig, name: str, width: int) -> Shapes:
    parts = ("weight", "bias") if config.norm is NormKind.layernorm and config.bias else ("weight",)
    return {f"{name}.{part}": (width,) for part in parts if config.norm_affine}


def _linear(name: str, rows: int, columns: int, bias: bool) -> Shapes:
    biases = {f"{name}.bias": (rows,)} if bias else {}
    return {f"{name}.weight": (rows, columns), **biases}


def _block_shapes(config: ModelConfig) -> Shapes:
    """Unsharded shape of every parameter of a built-in block, by its path within the block."""
    hidden, placement = config.hidden_size, config.norm_placement
    before, after = placement is not NormPlacement.output, placement is not NormPlacement.input
    shapes = _norm(config, "input_norm", hidden) if before else {}
    if config.qk_norm:
        whole = config.qk_norm_width is QKNormWidth.full
        for part, heads in (("query", config.num_heads), ("key", config.kv_heads)):
            shapes |= _norm(config, f"attention.{part}_norm", (heads if whole else 1) * config.head_dim)
    shapes |= _linear("attention.qkv", config.qkv_width, hidden, config.has_qkv_bias)
    shapes |= {"attention.sinks.weight": (config.num_heads,)} if config.attention_sinks else {}
    shapes |= _linear("attention.dense", hidden, config.attention_width, config.has_attention_output_bias)
    if after:
        shapes |= _norm(config, "attention_output_norm", hidden)
    if before and (config.parallel_norms == 2 or not config.parallel_block):
        shapes |= _norm(config, "post_attention_norm", hidden)
    shapes |= _expert_shapes(config) if config.moe.enabled else _mlp_shapes(config, "mlp", config.ffn_width)
    return shapes | _norm(config, "mlp_output_norm", hidden) if after else shapes


def _mlp_shapes(config: ModelConfig, name: str, width: int) -> Shapes:
    into, rows = ("gate_up", 2 * width) if config.mlp.gated else ("up", width)
    hidden, bias = config.hidden_size, config.has_mlp_bias
    return _linear(f"{name}.{into}", rows, hidden, bias) | _linear(f"{name}.down", hidden, width, bias)


def _expert_shapes(config: ModelConfig) -> Shapes:
    """Shapes of a block's router, experts and shared expert; without the state of a router's balance."""
    moe, hidden = config.moe, config.hidden_size
    shapes = _linear("mlp.router", moe.num_experts, hidden, moe.router_bias)
    into, rows = ("gate_up", 2 * config.expert_width) if config.mlp.gated else ("up", config.expert_width)
    shapes[f"mlp.experts.{into}.weight"] = (moe.num_experts * rows, hidden)
    shapes["mlp.experts.down.weight"] = (moe.num_experts * config.expert_width, hidden)
    if moe.shared_ffn_size:
        shapes |= _mlp_shapes(config, "mlp.shared", moe.shared_ffn_size)
    if moe.shared_gate:
        shapes["mlp.shared_gate.weight"] = (1, hidden)
    return shapes


def router_state_shapes(config: ModelConfig) -> Shapes:
    """Shape of every parameter that the balance of experts updates instead of the optimizer, by name."""
    moe = config.moe
    kinds = {"expert_bias": moe.selects_by_bias, "expert_load": moe.global_loss > 0.0}
    routers = [f"blocks.{block}.mlp.router" for block in range(config.num_layers) if moe.holds(block)]
    return {f"{router}.{kind}": (moe.num_experts,) for router in routers for kind, held in kinds.items() if held}


def _custom_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Unsharded shape of every parameter of a plugin's block, by its path within the block."""
    # A plugin's block must be built, on the meta device. Otherwise the planner does not import torch.
    import torch

    from megads.model.gpt import make_block

    with torch.device("meta"):
        block = make_block(config, seed=0, index=0)
    return {path: tuple(parameter.shape) for path, parameter in block.named_parameters()}


def parameter_count(config: ModelConfig) -> int:
    """Parameter count; vocabulary padding is excluded and a tied embedding is counted once."""
    return sum(prod(shape) for shape in parameter_shapes(config).values())


def active_parameter_count(config: ModelConfig) -> int:
    """Number of parameters that process a token: `parameter_count` with top_k of the experts of each layer, as in the
    names of Qwen3-30B-A3B and Mixtral's 12.9 billion."""
    unused = 0
    for kind, layers in config.layer_kinds():
        if kind.moe.enabled:
            shapes = _expert_shapes(kind)
            stacked = sum(prod(shape) for name, shape in shapes.items() if name.startswith("mlp.experts."))
            unused += layers * (stacked // kind.moe.num_experts) * (kind.moe.num_experts - kind.moe.top_k)
    return parameter_count(config) - unused


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs per token of one layer.

    Attributes:
        forward: FLOPs of the forward pass.
        backward_input: FLOPs of dgrad, including attention's backward pass (twice its forward FLOPs).
        backward_weight: FLOPs of wgrad.
    """

    forward: int
    backward_input: int
    backward_weight: int

    @property
    def total(self) -> int:
        return self.forward + self.backward_input + self.backward_weight


def block_flops(config: ModelConfig, seq_len: int) -> LayerFlops:
    """FLOPs per token of one block: its linear layers and attention's two matmuls, counted as in PaLM. Experts count as
    often as a token chooses them.

    A plugin's block counts two per element of each matrix, and attention's matmuls if it has an attention core.

    Args:
        config: config of the block's layer, see `ModelConfig.layer`.
        seq_len: tokens per sample.
    """
    assert not config.layer_pattern, "the layers differ"
    if config.block.is_custom:
        matrices = 2 * sum(prod(shape) for shape in _custom_shapes(config).values() if len(shape) == 2)
        attention = 2 * _attention_matmul(config, seq_len) if has_attention_core(config) else 0
    else:
        matrices, attention = sum(_matrices(config)), 2 * _attention_matmul(config, seq_len)
    return LayerFlops(matrices + attention, matrices + 2 * attention, matrices)


def _matrices(config: ModelConfig) -> tuple[int, int, int]:
    """FLOPs per token of a block's projections: attention's, the MLP's up (and gate), and the MLP's down.

    With experts, the second includes the router and the shared expert's gate.
    """
    twice, moe = 2 * config.hidden_size, config.moe
    attention = twice * (config.qkv_width + config.attention_width)
    if not moe.enabled:
        return attention, twice * config.mlp_rows, twice * config.ffn_width
    width = moe.top_k * config.expert_width + moe.shared_ffn_size
    return attention, twice * ((1 + config.mlp.gated) * width + moe.num_experts + moe.shared_gate), twice * width


def _attention_matmul(config: ModelConfig, seq_len: int) -> int:
    """FLOPs per token of one of attention's two matmuls; a sliding window limits the keys per token."""
    return 2 * config.attention_width * min(seq_len, config.window or seq_len)


def head_flops(config: ModelConfig) -> LayerFlops:
    """FLOPs per token of the output projection."""
    matrix = 2 * config.vocabulary * config.hidden_size
    return LayerFlops(matrix, matrix, matrix)


def model_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Model FLOPs per token, forward and backward: 6 per matmul weight, the output head included, plus 12*L*a*S.

    The second term is attention's two matmuls (scores and values), as in PaLM (Chowdhery et al. 2022, appendix B). A
    sliding window smaller than S replaces S in its layers.

    Args:
        config: model config; L = num_layers, a = total query width, hidden_size by default.
        seq_len: tokens per sample, S.
    """
    blocks = sum(count * block_flops(kind, seq_len).total for kind, count in config.layer_kinds())
    return blocks + head_flops(config).total


def hardware_flops_per_token(
    config: ModelConfig, seq_len: int, blocks: Iterable[Recompute], *, chunked_mlp: bool = False
) -> int:
    """Hardware FLOPs per token: model FLOPs plus activation recomputation.

    Recomputation stops at the last tensor that backward needs. For a block that is the input of its last linear layer,
    whose GEMM is therefore repeated only if dropout follows. For attention that materializes its scores (fused_softmax
    or softcap) without dropout it is the probabilities, so the matmul with the values is not repeated; other attention
    implementations need their output. Experts' last GEMM is always repeated: the sum over a token's experts needs its
    output.

    Args:
        config: model config.
        seq_len: tokens per sample.
        blocks: recomputation mode of each block of the model.
        chunked_mlp: whether MLPs, and shared experts, are computed in chunks, which repeat their forward pass.
    """
    again = [recompute_flops(kind, seq_len) for kind, _ in config.layer_kinds()]
    recomputed = sum(again[config.kind_of(index)][mode] for index, mode in enumerate(blocks))
    mlps = sum(mlp_flops(config.layer(index)) for index in range(config.num_layers)) if chunked_mlp else 0
    return model_flops_per_token(config, seq_len) + recomputed + mlps


def mlp_flops(config: ModelConfig) -> int:
    """FLOPs per token of the forward pass of a block's MLP, or of its shared expert."""
    width = config.moe.shared_ffn_size if config.moe.enabled else config.ffn_width
    return 2 * (2 + config.mlp.gated) * width * config.hidden_size


def recompute_flops(config: ModelConfig, seq_len: int) -> dict[Recompute, int]:
    """FLOPs per token that a block recomputes, by recomputation mode; arguments as in `block_flops`."""
    assert not config.layer_pattern, "the layers differ"
    attention, into, out_of = _matrices(config)
    matmul = _attention_matmul(config, seq_len)
    in_memory = config.attention is AttentionKind.fused_softmax or config.scores_in_memory
    explicit = in_memory and not config.attention_dropout
    core = matmul if explicit else 2 * matmul
    full = attention + 2 * matmul + into + (out_of if config.hidden_dropout else 0)
    if config.moe.enabled and not config.hidden_dropout:
        # The sum over a token's experts needs their outputs, and the shared expert's gate needs its output.
        width = config.moe.top_k * config.expert_width
        full += out_of if config.moe.shared_gate else 2 * config.hidden_size * width
    return {Recompute.none: 0, Recompute.selective: core, Recompute.full: full}
