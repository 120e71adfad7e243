"""Configuration of the model, names of its layers, and its sharding table for tensor and sequence parallelism.

Imports no torch.

`megads.parallel.sharding` applies the table. The loss is sharded with the vocabulary: `megads.model.gpt.token_losses`
on one process, `megads.parallel.loss.vocab_parallel_token_losses` on sharded logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.ops.attention_kinds import AttentionKind, AttentionWork, unsupported_reason
from megads.parallel.partition import FeatureGroups, ParallelStyle, ShardingTable
from megads.runtime.registry import BLOCKS

# Larger than any model; bounds the time of planning, which visits every layer.
_MOST_LAYERS = 10_000
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
        "blocks.*.shared_input": ParallelStyle.columns,
        "blocks.*.summed_output": ParallelStyle.rows,
        "head": ParallelStyle.vocab_head,
    },
    dropouts=("embedding.dropout", "blocks.*.attention_dropout", "blocks.*.mlp_dropout", "blocks.*.summed_dropout"),
    attention_cores=("blocks.*.attention.core",),
)

FULL_QK_NORM = {
    "blocks.*.attention.query_norm": ParallelStyle.vector,
    "blocks.*.attention.key_norm": ParallelStyle.vector,
    "blocks.*.attention.query_key_norms": ParallelStyle.norms,
}
"""Sharding of QK norms over all heads, replacing the entries for norms per head."""

CUSTOM = "custom"
"""Attribute that holds a plugin's block: its parameters are blocks.<number>.custom.<path within it>."""


class Position(StrEnum):
    """Position encoding."""

    alibi = "alibi"
    learned = "learned"
    rope = "rope"


class NormKind(StrEnum):
    """Type of the norms."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class MLPKind(StrEnum):
    """Activation function of the MLP."""

    gelu = "gelu"
    swiglu = "swiglu"


class NormPlacement(StrEnum):
    """Whether a block normalizes the input or the output of its attention and MLP."""

    input = "input"
    output = "output"


class QKNormWidth(StrEnum):
    """Whether the QK norm is over the features of each head or of all heads."""

    head = "head"
    full = "full"


class RopeScaling(StrEnum):
    """RoPE scaling method, for sequences longer than those of pretraining."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(unsafe_hash=True)
class RopeScalingConfig:
    """RoPE scaling: lower rotary frequencies, so that angles in a longer context stay within the trained range."""

    kind: RopeScaling = RopeScaling.none
    """none; linear, all frequencies divided by factor (Chen et al. 2023); llama3, low frequencies only (Llama 3.1);
    yarn, low frequencies only, with larger attention scores (Peng et al. 2023)."""
    factor: float = 1.0
    """Ratio of the new to the original context length; at least 1."""
    original_max_seq_len: int = 8192
    """Maximum sequence length of pretraining, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: frequencies with wavelengths above original_max_seq_len / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: frequencies with wavelengths below original_max_seq_len / high_freq_factor are unchanged."""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this in original_max_seq_len tokens are unchanged."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this in original_max_seq_len tokens are divided by factor."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        if self.factor < 1.0 or self.original_max_seq_len < 1:
            raise ConfigError(
                f"model.rope_scaling.factor = {self.factor}, original_max_seq_len = {self.original_max_seq_len}: "
                "must be at least 1"
            )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if not 0.0 < getattr(self, low) < getattr(self, high):
                raise ConfigError(
                    f"model.rope_scaling.{low} = {getattr(self, low)}, {high} = {getattr(self, high)}: want "
                    f"0 < {low} < {high}"
                )


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


_HIDDEN_MATRICES = tuple(f"{module}.weight" for module in ("qkv", "dense", "up", "gate_up", "down"))


@dataclass(unsafe_hash=True)
class MupConfig:
    """Maximal update parametrization (muP; Yang and Hu et al. 2022, Tensor Programs V, arXiv 2203.03466, table 8): the
    optimal learning rate of a narrow model is also optimal for a wide one. All widths must scale with hidden_size."""

    base_width: int | None = None
    """hidden_size to which optim.lr, model.init_std and output_multiplier refer, and at which muP changes nothing;
    null: no muP."""
    output_multiplier: float = 1.0
    """Multiplier of the logits at the base width; at other widths it is divided by hidden_size / base_width."""
    base_head_size: int | None = None
    """Scales attention scores by sqrt(base_head_size) / head size instead of 1 / sqrt(head size); the two are equal at
    base_head_size. null: 1 / sqrt(head size), for models that scale the number of heads, not their size."""

    def check(self) -> None:
        """Raises ConfigError on invalid values."""
        for name in ("base_width", "base_head_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.mup.{name} = {value}: must be at least 1, or null")
        if not 0.0 < self.output_multiplier < math.inf:
            raise ConfigError(f"model.mup.output_multiplier = {self.output_multiplier}: must be positive")
        if self.base_width is None and self != MupConfig():
            raise ConfigError("model.mup only applies with model.mup.base_width: set it, or leave model.mup out")


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
    """Position encoding: alibi (a bias linear in the distance, Press et al. 2021), learned (an embedding per position)
    or rope (rotary embedding of queries and keys, Su et al. 2021)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies; longer sequences need a larger one."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Scaling of the rotary frequencies."""
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
    bias: bool = True
    """Learned biases in projections and LayerNorms; false: none, as in PaLM (Chowdhery et al. 2022) and Llama."""
    mlp: MLPKind = MLPKind.gelu
    """Activation of the MLP: gelu (tanh approximation) or swiglu, silu(gate) * up with a third projection for the gates
    (Shazeer 2020), which has as many parameters as gelu at two thirds of its ffn_size."""
    norm_placement: NormPlacement = NormPlacement.input
    """input: x + attention(norm(x)), then the MLP likewise (pre-norm); output: x + norm(attention(x)), i.e. norms of
    the outputs of attention and MLP before the residual addition (Liu et al. 2022, Swin v2; OLMo 2)."""
    parallel_block: bool = False
    """Attention and MLP of a block read the same norm and are added, x + dropout(attention(norm(x)) + mlp(norm(x))), as
    in GPT-J and PaLM: half the tensor-parallel collectives. false: the MLP follows attention, with its own norm."""
    block: BlockConfig = field(default_factory=BlockConfig)
    """The type of block, if not the built-in one; the settings above apply as far as it reads them."""
    scale_embedding: bool = False
    """Multiply the word embedding by sqrt(hidden_size) (Vaswani et al. 2017; Gemma), before positions are added."""
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
    def queries_per_kv(self) -> int:
        """Number of query heads per KV head."""
        return self.num_heads // self.kv_heads

    def local_kv_heads(self, tp: int) -> int:
        """KV heads of a tensor-parallel rank; with fewer KV heads than ranks, several ranks share one."""
        return max(1, self.kv_heads // tp)

    def why_not_tp(self, tp: int) -> str:
        """Why the heads cannot be divided over tensor-parallel ranks, and what to change; empty if they can.

        Args:
            tp: tensor-parallel size.
        """
        if self.num_heads % tp:
            return (
                f"model.num_heads = {self.num_heads} is not divisible by parallel.tp = {tp}: every tensor parallel "
                "rank takes an equal share; lower parallel.tp or change the model"
            )
        heads = f"model.num_kv_heads = {self.num_kv_heads}"
        if self.kv_heads % tp and tp % self.kv_heads:
            return (
                f"{heads} neither divides parallel.tp = {tp} nor is divisible by it: every tensor parallel rank takes "
                "an equal share, or as many ranks share each KV head; change parallel.tp or the model"
            )
        sharers = tp // self.kv_heads
        if sharers > 1 and 2 * self.head_dim % sharers:
            return (
                f"{heads} with parallel.tp = {tp}: {sharers} ranks share a KV head, but the {2 * self.head_dim} rows "
                f"of its key and value are not divisible by {sharers}; lower parallel.tp or change model.head_size"
            )
        if sharers > 1 and self.qk_norm_width is QKNormWidth.full:
            return (
                f"{heads} is below parallel.tp = {tp}, which model.qk_norm_width = full does not support: the gains of "
                "the keys' norm are divided over the ranks; lower parallel.tp"
            )
        return ""

    @property
    def qkv_width(self) -> int:
        """Features of all heads' queries, keys and values."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ffn_width(self) -> int:
        return self.ffn_size if self.ffn_size is not None else 4 * self.hidden_size

    @property
    def mlp_rows(self) -> int:
        """Output features of the MLP's first projection, including the gates of swiglu."""
        return 2 * self.ffn_width if self.mlp is MLPKind.swiglu else self.ffn_width

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
        return self.mup.output_multiplier / self.width_ratio

    @property
    def query_scale(self) -> float:
        """Multiplier of queries, in addition to attention's 1/sqrt(head size)."""
        base = self.mup.base_head_size
        return 1.0 if base is None else math.sqrt(base / self.head_dim)

    def width_scale(self, *, muon: bool) -> Callable[[str], float]:
        """Function from a parameter's name to its learning-rate factor under muP.

        A step of Adam or Lion changes every element by about the learning rate, so the step of a matrix with
        `width_ratio` times as many inputs is divided by that ratio. A step of Muon has a spectral norm of about
        sqrt(width), which must stay constant.

        Args:
            muon: whether the matrices of blocks are orthogonalized.
        """
        factor = self.width_ratio**-0.5 if muon else 1.0 / self.width_ratio

        def scale(name: str) -> float:
            return factor if name.startswith("blocks.") and name.endswith(_HIDDEN_MATRICES) else 1.0

        return scale

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention scores are materialized, because no fused attention kernel supports the configuration."""
        return self.attention_logit_softcap is not None or self.attention_sinks

    def check(self) -> None:
        """Raises ConfigError on an invalid configuration."""
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size")
        for name in (*sizes, "max_seq_len", "window"):
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
        if self.position is Position.rope and self.head_dim % 2:
            raise ConfigError(
                f"a head has {self.head_dim} features (model.head_size, or model.hidden_size / model.num_heads), but "
                "model.position=rope rotates pairs of features: choose an even number, or model.position=alibi"
            )
        if self.rope_theta <= 0.0:
            raise ConfigError(f"model.rope_theta = {self.rope_theta}: must be positive")
        self._check_norms()
        self._check_softcaps()
        self._check_mup()
        self.rope_scaling.check()
        if self.rope_scaling.kind is not RopeScaling.none and self.position is not Position.rope:
            raise ConfigError(
                f"model.rope_scaling.kind = {self.rope_scaling.kind} scales rope's angles, but model.position = "
                f"{self.position}: leave it out, or set model.position=rope"
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"model.{name} = {getattr(self, name)}: must be in [0, 1)")
        reason = unsupported_reason(self.attention, self.attention_work())
        if reason:
            raise ConfigError(f"model.attention = {self.attention} {reason}")

    def _check_softcaps(self) -> None:
        for name in ("attention_logit_softcap", "final_logit_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ConfigError(f"model.{name} = {value}: must be positive, or null for none")
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

    def _check_norms(self) -> None:
        if self.qk_norm_width is QKNormWidth.full and not self.qk_norm:
            raise ConfigError("model.qk_norm_width = full only applies with model.qk_norm=true: set both, or neither")
        if self.qk_norm_width is QKNormWidth.full and self.norm is not NormKind.rmsnorm:
            raise ConfigError(
                f"model.qk_norm_width = full is RMSNorm, but model.norm = {self.norm}: set model.norm=rmsnorm"
            )
        if self.norm_placement is NormPlacement.output and self.parallel_block:
            raise ConfigError(
                "model.norm_placement = output normalizes the outputs of attention and MLP separately, but "
                "model.parallel_block adds them first: set one of them"
            )

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


def sharding_of(model: ModelConfig) -> ShardingTable:
    """Sharding table of a model, including the entries of its options or of a plugin's block.

    Raises:
        ConfigError: no plugin registered the block.
    """
    groups = {"blocks.*.attention.qkv": FeatureGroups(model.queries_per_kv * model.head_dim, 2 * model.head_dim)}
    if not model.block.is_custom:
        full = FULL_QK_NORM if model.qk_norm_width is QKNormWidth.full else {}
        return replace(SHARDING, parameters={**SHARDING.parameters, **full}, feature_groups=groups)
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
        Numbers of adjacent rows of each matrix in a fused parameter, a pattern that repeats over all rows: the query,
        key and value rows of each KV head; the gate and up rows of each unit of a gated MLP.
    """
    head = model.head_dim
    return {
        "attention.qkv.weight": (model.queries_per_kv * head, head, head),
        "mlp.gate_up.weight": (1, 1),
    }


def has_attention_core(model: ModelConfig) -> bool:
    """Whether the model's block declares an attention core; without one, how tokens interact is unknown."""
    return not model.block.is_custom or len(sharding_of(model).attention_cores) > len(SHARDING.attention_cores)


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
