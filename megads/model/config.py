"""Configuration of the model, and names and costs of its layers. Imports no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any

from megads.errors import ConfigError
from megads.model.moe_config import MoEConfig
from megads.model.mup import MupConfig, width_scale
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.ops.attention_kinds import AttentionKind, AttentionWork, unsupported_reason

# Larger than any model; bounds the time of planning, which visits every layer.
_MOST_LAYERS = 10_000
CUSTOM = "custom"
"""Attribute that holds a plugin's block: its parameters are blocks.<number>.custom.<path within it>."""


class Position(StrEnum):
    """Position encoding."""

    alibi = "alibi"
    learned = "learned"
    rope = "rope"
    none = "none"


class NormKind(StrEnum):
    """Type of the norms."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class MLPKind(StrEnum):
    """Activation function of the MLP."""

    gelu = "gelu"
    gelu_exact = "gelu_exact"
    relu = "relu"
    relu2 = "relu2"
    swiglu = "swiglu"
    geglu = "geglu"
    geglu_exact = "geglu_exact"

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third projection, for gates."""
        return self in (MLPKind.swiglu, MLPKind.geglu, MLPKind.geglu_exact)


class NormPlacement(StrEnum):
    """Whether a block normalizes the input, the output, or both of its attention and MLP."""

    input = "input"
    output = "output"
    both = "both"


class QKNormWidth(StrEnum):
    """Whether the QK norm is over the features of each head or of all heads."""

    head = "head"
    full = "full"


@dataclass
class BlockConfig:
    """Type of the model's blocks."""

    name: str = field(default="transformer", metadata={"choices": ("transformer",)})
    """transformer, or the name of a block that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's block, by name."""

    @property
    def is_custom(self) -> bool:
        """Whether a plugin's block is configured."""
        return self.name != "transformer"


@dataclass
class LayerKind:
    """Settings of some layers that differ from the model's: an item of model.layer_pattern."""

    layers: int = 1
    """Number of consecutive layers of this kind."""
    window: int | None = None
    """Sliding window in tokens, as model.window; 0: all tokens before it; null: model.window."""
    position: Position | None = None
    """Position encoding of these layers: rope, alibi, or none (NoPE); null: model.position."""
    rope_theta: float | None = None
    """Base of the rotary frequencies; null: model.rope_theta."""
    rope_scaling: RopeScalingConfig | None = None
    """Scaling of the rotary frequencies, as a whole; null: model.rope_scaling."""
    attention: AttentionKind | None = None
    """Attention backend; null: model.attention."""

    def applied_to(self, model: ModelConfig) -> ModelConfig:
        """A model all of whose layers are of this kind."""
        return replace(
            model,
            layer_pattern=[],
            window=model.window if self.window is None else self.window or None,
            position=model.position if self.position is None else self.position,
            rope_theta=model.rope_theta if self.rope_theta is None else self.rope_theta,
            rope_scaling=model.rope_scaling if self.rope_scaling is None else self.rope_scaling,
            attention=model.attention if self.attention is None else self.attention,
        )


@dataclass
class ModelConfig:
    """A decoder-only transformer; the defaults are BLOOM's architecture."""

    num_layers: int = 2
    """Number of transformer blocks."""
    hidden_size: int = 64
    """Width of the residual stream; a multiple of num_heads unless head_size is given."""
    num_heads: int = 4
    """Number of attention heads."""
    num_kv_heads: int | None = None
    """Number of KV heads, each shared by num_heads / num_kv_heads adjacent query heads (grouped-query attention,
    Ainslie et al. 2023; 1 is multi-query attention): smaller projections, a smaller all-gather in context parallelism
    and a smaller KV cache. A divisor of num_heads, and a divisor or multiple of parallel.tp: with fewer KV heads than
    ranks, ranks share them. null: num_heads."""
    head_size: int | None = None
    """Features per attention head; null: hidden_size / num_heads. Qwen3 and Mistral Nemo use other values."""
    ffn_size: int | None = None
    """Width of the MLP; null: 4 * hidden_size."""
    vocab_size: int | None = 512
    """Vocabulary size without padding; null: that of the data's tokenizer, set before the ranks start. Padding rows
    that tensor parallelism adds are masked and never saved."""
    max_seq_len: int = 2048
    """Maximum sequence length in training; the number of learned positions."""
    position: Position = Position.alibi
    """Position encoding: alibi (a bias linear in the distance, Press et al. 2021), learned (an embedding per position),
    rope (rotary embedding of queries and keys, Su et al. 2021) or none (NoPE, Kazemnejad et al. 2023)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies; longer sequences need a larger one."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Scaling of the rotary frequencies."""
    rotary_fraction: float = 1.0
    """Fraction of a head's features that rope rotates, the first ones; int(fraction * features) must be even (GPT-NeoX
    and Pythia 0.25, Black et al. 2022; Phi 2 0.4; StableLM 2 0.25)."""
    rotary_interleaved: bool = False
    """Rope rotates pairs of adjacent features, 2i and 2i + 1 (RoFormer, GPT-J); false: features i and i + r/2 of r
    (GPT-NeoX, Llama). PyTorch computes the interleaved form, as megads' kernel does not support it."""
    layer_pattern: list[LayerKind] = field(default_factory=list)
    """Layers that differ: kinds of layers, each with its window, position, rope_theta, rope_scaling and attention,
    whose unset fields are the model's. The list is repeated up to num_layers. Gemma 3, five sliding layers, then a full
    one: [{layers: 5, window: 1024, rope_theta: 10000}, {window: 0}]. SmolLM3, no positions in every fourth layer:
    [{layers: 3}, {position: none}]. Empty: all layers are equal."""
    qkv_clip: float | None = None
    """Clip queries, keys and values to [-qkv_clip, qkv_clip] after their projection (MPT and OLMo clip_qkv); null: no
    clipping."""
    attention_multiplier: float | None = None
    """Factor of attention scores, softmax(attention_multiplier * q k^T) (Granite attention_multiplier; Gemma
    query_pre_attn_scalar^(-1/2)); null: 1 / sqrt(head size)."""
    qk_norm: bool = False
    """Normalize the queries and keys of every head before rope, with gains shared by the heads (Dehghani et al. 2023).
    It bounds the attention scores, which otherwise grow before training diverges. Qwen3 uses it with rmsnorm."""
    qk_norm_width: QKNormWidth = QKNormWidth.head
    """head: normalize each head's queries and keys separately; full: normalize those of all heads as one vector, with a
    gain per feature (OLMo 2), which adds an all-reduce of sums of squares under tensor parallelism. full requires
    norm=rmsnorm."""
    attention_logit_softcap: float | None = None
    """Softcap of attention scores: cap * tanh(score / cap), before bias and mask (Gemma 2: 50); null: none. Scores are
    then materialized, as no fused attention kernel supports it here (docs/model.md)."""
    attention_sinks: bool = False
    """Attention sinks: a learned logit per head in the softmax whose probability goes to no token (gpt-oss 2025; Xiao
    et al. 2023), so that a head can attend to nothing. Scores are then materialized, as for attention_logit_softcap."""
    final_logit_softcap: float | None = None
    """Softcap of the output logits, as above (Gemma 2: 30); null: none."""
    window: int | None = None
    """Sliding-window attention: number of tokens that a token attends to, itself and those before it (Beltagy et al.
    2020); null: all before it. The receptive field grows by a window per layer."""
    norm: NormKind = NormKind.layernorm
    """layernorm (Ba et al. 2016) or rmsnorm, which subtracts no mean and has no bias (Zhang and Sennrich 2019)."""
    norm_affine: bool = True
    """Norms have learned weights; false: none, nor biases (OLMo 1's non-parametric LayerNorm, Groeneveld et al. 2024).
    PyTorch then computes them, as megads' kernel does not support it."""
    norm_zero_centered: bool = False
    """Norms multiply by 1 + weight, with initial weights of 0 (Gemma; Megatron's layernorm_zero_centered_gamma). The
    sum is rounded to the weights' dtype, as a stored gain would be."""
    bias: bool = True
    """Learned biases in projections and LayerNorms; false: none, as in PaLM (Chowdhery et al. 2022) and Llama."""
    qkv_bias: bool | None = None
    """Biases of the QKV projection (Qwen2 has only these); null: model.bias."""
    attention_output_bias: bool | None = None
    """Bias of attention's output projection (GPT-J has none); null: model.bias."""
    mlp_bias: bool | None = None
    """Biases of the MLP's projections; null: model.bias."""
    mlp: MLPKind = MLPKind.gelu
    """Activation of the MLP: gelu (tanh approximation), gelu_exact (Hendrycks and Gimpel 2016), relu (OPT), relu2,
    max(x, 0)^2 (So et al. 2021, Primer); or with a third projection for gates, act(gate) * up (Shazeer 2020): swiglu
    (silu), geglu (tanh GELU, Gemma), geglu_exact, which have as many parameters as gelu at two thirds of its ffn_size.
    Of these, megads has kernels for gelu and swiglu; PyTorch computes the others."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts (docs/moe.md)."""
    norm_placement: NormPlacement = NormPlacement.input
    """input: x + attention(norm(x)), then the MLP likewise (pre-norm); output: x + norm(attention(x)), i.e. norms of
    the outputs of attention and MLP before the residual addition (Liu et al. 2022, Swin v2; OLMo 2); both: x +
    norm(attention(norm(x))), then the MLP likewise, with four norms per block (Gemma 2 and 3)."""
    parallel_block: bool = False
    """Attention and MLP of a block read the same norm and are added, x + dropout(attention(norm(x)) + mlp(norm(x))), as
    in GPT-J and PaLM: half the tensor-parallel collectives. false: the MLP follows attention, with its own norm."""
    parallel_norms: int = 1
    """Norms of a parallel block: 1, or 2: attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX and Pythia, Falcon 40B), which
    saves only half of the collectives that 1 saves."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add to the residual stream, x + residual_multiplier * attention(norm(x))
    (Granite)."""
    block: BlockConfig = field(default_factory=BlockConfig)
    """The type of block, if not the built-in one; the settings above apply as far as it reads them."""
    scale_embedding: bool = False
    """Multiply the word embedding by sqrt(hidden_size) (Vaswani et al. 2017; Gemma), before positions are added."""
    head_bias: bool = False
    """Bias of the output projection, added after its scaling (GPT-J, Phi); requires tie_embeddings=false."""
    embedding_multiplier: float = 1.0
    """Factor of the word embedding, in addition to scale_embedding (Granite)."""
    logit_scale: float = 1.0
    """Factor of the output logits, before final_logit_softcap (Cohere logit_scale; Granite 1 / logits_scaling)."""
    embedding_norm: bool = True
    """Norm after the word embedding, as in BLOOM."""
    tie_embeddings: bool = True
    """Share the word embedding's weight with the output projection."""
    hidden_dropout: float = 0.0
    """Dropout on the embedding and on the outputs of attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention probabilities."""
    attention: AttentionKind = AttentionKind.auto
    """Attention backend. On CPUs: fused, megads' fused kernel. On GPUs: flash, the package flash-attn; flex, PyTorch's
    FlexAttention; cudnn, cuDNN's kernel. On both: fused_softmax, megads' softmax of materialized scores between two
    GEMMs (like fused with ops.impl=fused); sdpa, PyTorch's, with a materialized mask unless it is only causal;
    augmented, PyTorch's causal flash kernel without a mask, with ALiBi as eight more features per head, in bf16. auto:
    on a CPU fused if ops.impl uses it, else sdpa; on GPUs the fastest that supports the run, measured at the first
    start and stored in the user's cache (docs/kernels.md)."""
    norm_eps: float = 1e-5
    """Added to the variance (the mean square for rmsnorm) in every norm."""
    init_std: float | None = None
    """Standard deviation of the initial weights; null: sqrt(1 / (3 * hidden_size)), as in BLOOM. With mup, it refers to
    the base width."""
    mup: MupConfig = field(default_factory=MupConfig)
    """Maximal update parametrization (docs/optimizers.md)."""

    @property
    def vocabulary(self) -> int:
        """vocab_size; raises ConfigError if the tokenizer has not set it yet."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is null, and no tokenizer has filled it in: set it")
        return self.vocab_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def attention_width(self) -> int:
        """Features of all query heads, i.e. the input width of attention's output projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rope rotates."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def has_qkv_bias(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def has_attention_output_bias(self) -> bool:
        return self.bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    def kind_of(self, index: int) -> int:
        """Number of a layer's kind in `layer_kinds`.

        Args:
            index: index of the layer in the whole model.
        """
        ends = list(accumulate(kind.layers for kind in self.layer_pattern))
        pattern, variants = bisect_right(ends, index % ends[-1]) if ends else 0, self._mlp_variants
        return pattern * len(variants) + variants.index(self.moe.holds(index))

    @property
    def _mlp_variants(self) -> tuple[bool, ...]:
        """Whether layers have experts: both values if some have and some have not."""
        if not self.moe.enabled:
            return (False,)
        return (False, True) if self.moe.first_dense or self.moe.interval > 1 else (True,)

    def of_kind(self, number: int) -> ModelConfig:
        """The model with the settings of one kind of layers, by its number in `layer_kinds`, for all of them."""
        pattern, variant = divmod(number, len(self._mlp_variants))
        model = self.layer_pattern[pattern].applied_to(self) if self.layer_pattern else self
        if len(self._mlp_variants) == 1:
            return model
        experts = self._mlp_variants[variant]
        return replace(model, moe=replace(self.moe, first_dense=0, interval=1) if experts else MoEConfig())

    def layer(self, index: int) -> ModelConfig:
        """The model with the settings of one layer, by its index in the whole model, for all of them."""
        return self.of_kind(self.kind_of(index))

    def layer_kinds(self) -> list[tuple[ModelConfig, int]]:
        """`of_kind` for each kind of layers (those of `layer_pattern`, each without and with experts if only some
        layers have experts), and the number of layers of it.
        """
        counts = Counter(self.kind_of(index) for index in range(self.num_layers))
        kinds = max(1, len(self.layer_pattern)) * len(self._mlp_variants)
        return [(self.of_kind(number), counts[number]) for number in range(kinds)]

    def length_dependent_layers(self) -> list[ModelConfig]:
        """Kinds of layers whose rotary frequencies depend on the length of the sequence."""
        kinds = [kind for kind, _ in self.layer_kinds() if kind.position is Position.rope]
        return [kind for kind in kinds if kind.rope_scaling.effective_length(1)]

    def with_attention(self, chosen: Sequence[AttentionKind]) -> ModelConfig:
        """Sets the attention backend of each kind of layers, in the order of `layer_kinds`."""
        chosen = chosen[:: len(self._mlp_variants)]
        if not self.layer_pattern:
            return replace(self, attention=chosen[0])
        pattern = [replace(kind, attention=own) for kind, own in zip(self.layer_pattern, chosen, strict=True)]
        return replace(self, layer_pattern=pattern)

    @property
    def queries_per_kv(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.kv_heads

    def local_kv_heads(self, tp: int) -> int:
        """KV heads of a tensor-parallel rank; with fewer KV heads than ranks, several ranks share one."""
        return max(1, self.kv_heads // tp)

    @property
    def qkv_width(self) -> int:
        """Features of all heads' queries, keys and values."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ffn_width(self) -> int:
        return self.ffn_size if self.ffn_size is not None else 4 * self.hidden_size

    @property
    def mlp_rows(self) -> int:
        """Output features of the MLP's first projection, including gates."""
        return 2 * self.ffn_width if self.mlp.gated else self.ffn_width

    @property
    def expert_width(self) -> int:
        """Width of an expert's MLP."""
        return self.ffn_width if self.moe.expert_ffn_size is None else self.moe.expert_ffn_size

    @property
    def weight_std(self) -> float:
        """Initial standard deviation of embeddings and output projection, and of blocks at the base width of muP."""
        width = self.hidden_size if self.mup.base_width is None else self.mup.base_width
        return self.init_std if self.init_std is not None else math.sqrt(1.0 / (3.0 * width))

    @property
    def width_ratio(self) -> float:
        """hidden_size over the base width of muP; 1 without muP."""
        return 1.0 if self.mup.base_width is None else self.hidden_size / self.mup.base_width

    @property
    def hidden_std(self) -> float:
        """Initial standard deviation of the matrices of blocks."""
        return self.weight_std / math.sqrt(self.width_ratio)

    @property
    def logit_multiplier(self) -> float:
        """Multiplier of the output projection's input."""
        return self.logit_scale * self.mup.output_multiplier / self.width_ratio

    @property
    def query_scale(self) -> float:
        """Multiplier of queries, in addition to attention's 1/sqrt(head size)."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier * math.sqrt(self.head_dim)
        base = self.mup.base_head_size
        return 1.0 if base is None else math.sqrt(base / self.head_dim)

    def width_scale(self, *, muon: bool) -> Callable[[str], float]:
        """Function from a parameter's name to its learning-rate factor, see `megads.model.mup.width_scale`."""
        return width_scale(self.width_ratio, muon=muon)

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention scores are materialized, because no fused attention kernel supports the configuration."""
        return self.attention_logit_softcap is not None or self.attention_sinks

    def check(self) -> None:
        """Raises ConfigError on an invalid configuration."""
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size")
        for name in (*sizes, "max_seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name} = {value}: must be at least 1")
        if self.num_layers > _MOST_LAYERS:
            raise ConfigError(f"model.num_layers = {self.num_layers}: must be at most {_MOST_LAYERS}")
        if self.head_size is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.hidden_size = {self.hidden_size} is not divisible by model.num_heads = {self.num_heads}: "
                "choose a number of heads that divides the width, or set model.head_size"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads = {self.num_heads}: every "
                "KV head serves the same number of query heads; choose a divisor, or null for num_heads"
            )
        self._check_norms()
        self._check_moe()
        self._check_bounds_and_factors()
        self._check_mup()
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"model.{name} = {getattr(self, name)}: must be in [0, 1)")
        self._check_layer_pattern()
        for number, (kind, _) in enumerate(self.layer_kinds()):
            try:
                kind._check_layer()
            except ConfigError as error:
                place = number // len(self._mlp_variants)
                raise ConfigError(f"model.layer_pattern[{place}]: {error}") if self.layer_pattern else error from None
        positions = {kind.position for kind, _ in self.layer_kinds()}
        of_rope = {
            "rope_scaling.kind": (self.rope_scaling.kind, RopeScaling.none, "scales rope's angles"),
            "rotary_fraction": (self.rotary_fraction, 1.0, "sets how many features rope rotates"),
            "rotary_interleaved": (self.rotary_interleaved, False, "sets which features rope rotates"),
        }
        for name, (value, usual, effect) in of_rope.items():
            if value != usual and Position.rope not in positions:
                raise ConfigError(
                    f"model.{name} = {str(value).lower()} {effect}, but model.position = {self.position}: leave it "
                    "out, or set model.position=rope"
                )

    def _check_moe(self) -> None:
        self.moe.check(self.num_layers)
        if not self.moe.enabled:
            return
        if self.parallel_block or self.block.is_custom:
            given = "parallel_block = true" if self.parallel_block else f"block.name = {self.block.name}"
            raise ConfigError(
                f"model.{given} cannot be combined with model.moe.num_experts = {self.moe.num_experts}: remove one "
                "of them"
            )
        if self.has_mlp_bias:
            raise ConfigError(
                f"model.moe.num_experts = {self.moe.num_experts}: experts have no biases here; set "
                "model.mlp_bias=false, or model.bias=false"
            )
        if self.mup.base_width is not None:
            raise ConfigError(
                f"model.mup.base_width = {self.mup.base_width} cannot be combined with model.moe.num_experts = "
                f"{self.moe.num_experts}: the scaling of experts with the width is unknown; remove one of them"
            )

    def _check_layer_pattern(self) -> None:
        """Checks that the pattern fits the model; `_check_layer` checks each kind."""
        described = sum(kind.layers for kind in self.layer_pattern)
        if any(kind.layers < 1 for kind in self.layer_pattern) or described > self.num_layers:
            counts = [kind.layers for kind in self.layer_pattern]
            raise ConfigError(
                f"model.layer_pattern describes {' + '.join(map(str, counts))} layers: want at least 1 of each kind, "
                f"and at most model.num_layers = {self.num_layers}"
            )
        positions = {kind.position for kind in self.layer_pattern} - {None}
        if Position.learned in positions or (positions and self.position is Position.learned):
            raise ConfigError(
                "model.layer_pattern sets position, but learned positions are added to the embedding, for all layers: "
                "use rope, alibi or none"
            )

    def _check_layer(self) -> None:
        """Checks the settings that may differ between layers."""
        if self.window is not None and self.window < 1:
            raise ConfigError(f"model.window = {self.window}: must be at least 1")
        if not 0.0 < self.rotary_fraction <= 1.0:
            raise ConfigError(f"model.rotary_fraction = {self.rotary_fraction}: must be in (0, 1]")
        if self.position is Position.rope and (self.rotary_dim % 2 or not 1 < self.rotary_dim <= self.head_dim):
            part = "" if self.rotary_fraction == 1.0 else f", of which model.rotary_fraction takes {self.rotary_dim}"
            raise ConfigError(
                f"a head has {self.head_dim} features (model.head_size, or model.hidden_size / model.num_heads){part}, "
                "but model.position=rope rotates pairs of features: choose an even number, or model.position=alibi"
            )
        if self.rope_theta <= 0.0:
            raise ConfigError(f"model.rope_theta = {self.rope_theta}: must be positive")
        self.rope_scaling.check()
        if self.position is Position.rope:
            self.rope_scaling.check_pairs(self.rotary_dim // 2)
        reason = unsupported_reason(self.attention, self.attention_work())
        if reason:
            raise ConfigError(f"model.attention = {self.attention} {reason}")

    def _check_bounds_and_factors(self) -> None:
        bounds = ("attention_logit_softcap", "final_logit_softcap", "qkv_clip", "attention_multiplier")
        for name in (*bounds, "embedding_multiplier", "residual_multiplier", "logit_scale"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ConfigError(
                    f"model.{name} = {value}: must be positive{', or null for none' if name in bounds else ''}"
                )
        if self.attention_sinks and self.attention_dropout:
            raise ConfigError(
                f"model.attention_sinks = true does not support model.attention_dropout = {self.attention_dropout}: "
                "set model.attention_dropout=0"
            )

    def _check_mup(self) -> None:
        self.mup.check()
        if self.mup.base_width is not None and (self.scale_embedding or self.block.is_custom):
            given = f"block.name = {self.block.name}" if self.block.is_custom else "scale_embedding = true"
            raise ConfigError(
                f"model.{given} cannot be combined with model.mup.base_width: its scaling with the width is unknown; "
                "remove one of them"
            )
        if self.mup.base_head_size is not None and self.attention_multiplier is not None:
            raise ConfigError(
                f"model.attention_multiplier = {self.attention_multiplier} and model.mup.base_head_size = "
                f"{self.mup.base_head_size} both scale attention scores: remove one of them"
            )

    def _check_norms(self) -> None:
        if self.qk_norm_width is QKNormWidth.full and not self.qk_norm:
            raise ConfigError("model.qk_norm_width = full only applies with model.qk_norm=true: set both, or neither")
        if self.qk_norm_width is QKNormWidth.full and self.norm is not NormKind.rmsnorm:
            raise ConfigError(
                f"model.qk_norm_width = full is RMSNorm, but model.norm = {self.norm}: set model.norm=rmsnorm"
            )
        if self.norm_placement is not NormPlacement.input and self.parallel_block:
            raise ConfigError(
                f"model.norm_placement = {self.norm_placement} normalizes the outputs of attention and MLP separately, "
                "but model.parallel_block adds them first: set one of them"
            )
        if self.parallel_norms not in (1, 2) or (self.parallel_norms == 2 and not self.parallel_block):
            raise ConfigError(
                f"model.parallel_norms = {self.parallel_norms}: must be 1, or 2 with model.parallel_block=true"
            )
        if self.head_bias and self.tie_embeddings:
            raise ConfigError(
                "model.head_bias = true is not supported with model.tie_embeddings = true, which shares the whole "
                "output projection with the embedding: set model.tie_embeddings=false"
            )
        if not self.norm_affine and (self.norm_zero_centered or self.qk_norm_width is QKNormWidth.full):
            given = "norm_zero_centered = true" if self.norm_zero_centered else "qk_norm_width = full"
            raise ConfigError(f"model.{given} is about the weights of norms, but model.norm_affine = false has none")

    def attention_work(self, tp: int = 1) -> AttentionWork:
        """Attention's shape and features on a rank, without precision, device and batch.

        Args:
            tp: tensor-parallel size.
        """
        return AttentionWork(
            head_dim=self.head_dim,
            heads=self.num_heads // tp,
            kv_heads=self.local_kv_heads(tp),
            alibi=self.position is Position.alibi,
            window=self.window,
            dropout=self.attention_dropout,
            softcap=self.attention_logit_softcap is not None,
            sinks=self.attention_sinks,
        )


EMBEDDING, FINAL_NORM, HEAD = "embedding", "final_norm", "head"
TIED_PARAMETER, TIED_COPY = "embedding.word.weight", "head.weight"


def layer_costs(config: ModelConfig) -> dict[str, float]:
    """Relative cost of every layer by name, in the order of the forward pass.

    A block, the embedding and the head each cost 1.
    """
    blocks = {f"blocks.{index}": 1.0 for index in range(config.num_layers)}
    return {EMBEDDING: 1.0, **blocks, FINAL_NORM: 0.0, HEAD: 1.0}


def is_block(name: str) -> bool:
    """Whether the layer with this name is a transformer block."""
    return name.startswith("blocks.")
