"""The shape of the model, and the table by which tensor and sequence parallelism cut it. Imports no torch.

`megads.parallel.sharding` applies the table. The loss head is cut with the vocabulary: `megads.model.gpt.token_losses`
on one process, `megads.parallel.loss.vocab_parallel_token_losses` where the logits are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from megads.errors import ConfigError
from megads.ops.attention_kinds import AttentionKind, AttentionWork, why_not
from megads.parallel.partition import Cut, ShardingTable
from megads.runtime.registry import BLOCKS

# Beyond any model; what is planned layer by layer ends.
_MOST_LAYERS = 10_000
SHARDING = ShardingTable(
    parameters={
        "embedding.word": Cut.vocab,
        "embedding.position": Cut.sequence,
        "blocks.*.attention.qkv": Cut.column,
        "blocks.*.attention.dense": Cut.row,
        "blocks.*.attention.query_norm": Cut.inside,
        "blocks.*.attention.key_norm": Cut.inside,
        "blocks.*.attention.sinks": Cut.vector,
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

FULL_QK_NORM = {
    "blocks.*.attention.query_norm": Cut.vector,
    "blocks.*.attention.key_norm": Cut.vector,
    "blocks.*.attention.query_key_norms": Cut.norms,
}
"""How norms of all heads' queries and keys are cut, in place of those of each head."""

CUSTOM = "custom"
"""Where a plugin's block lies in its stage: its parameters are blocks.<number>.custom.<path within it>."""


class Position(StrEnum):
    """How the model knows the order of its tokens."""

    alibi = "alibi"
    learned = "learned"
    rope = "rope"


class NormKind(StrEnum):
    """What is normalised, and by what."""

    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class MLPKind(StrEnum):
    """What is between the projections of an MLP."""

    gelu = "gelu"
    swiglu = "swiglu"


class NormPlacement(StrEnum):
    """Where a block norms: what its attention and its MLP read, or what they make."""

    input = "input"
    output = "output"


class QKNormWidth(StrEnum):
    """What a norm of queries and keys takes for one vector."""

    head = "head"
    full = "full"


class RopeScaling(StrEnum):
    """How RoPE's angles change for texts longer than those of the first training."""

    none = "none"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(unsafe_hash=True)
class RopeScalingConfig:
    """Slower rotations of pairs of features, so that a longer text has angles that the model knows."""

    kind: RopeScaling = RopeScaling.none
    """none; linear, all angles divided by factor (Chen et al. 2023); llama3, those of long waves only (Llama 3.1);
    yarn, those of long waves, and attention sharpened (Peng et al. 2023)."""
    factor: float = 1.0
    """How much longer texts get; at least 1."""
    original_max_seq_len: int = 8192
    """Longest text of the first training, for llama3 and yarn."""
    low_freq_factor: float = 1.0
    """llama3: waves longer than original_max_seq_len over this are slowed by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than original_max_seq_len over this stay as they are."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this in original_max_seq_len tokens stay as they are."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are slowed by the whole factor."""

    def check(self) -> None:
        """Raises ConfigError on values that no angle follows from."""
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
    """Which block the model repeats."""

    name: str = field(default="transformer", metadata={"choices": ("transformer",)})
    """transformer, or the name of a block that a plugin registers (docs/extending.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of a plugin's block, by their names."""

    @property
    def is_custom(self) -> bool:
        """Whether a plugin's block is asked for."""
        return self.name != "transformer"


_HIDDEN_MATRICES = tuple(f"{module}.weight" for module in ("qkv", "dense", "up", "gate_up", "down"))


@dataclass(unsafe_hash=True)
class MupConfig:
    """Maximal update parametrisation (Yang and Hu et al. 2022, Tensor Programs V, arXiv 2203.03466, table 8): the
    learning rate that is best for a narrow model is best for a wide one. All widths grow with hidden_size."""

    base_width: int | None = None
    """hidden_size at which optim.lr, model.init_std and output_multiplier are meant and nothing changes; null: none of
    this."""
    output_multiplier: float = 1.0
    """Of the logits at the base width; at others divided by hidden_size / base_width, too."""
    base_head_size: int | None = None
    """Attention scores are divided by the head size instead of its root, times sqrt(base_head_size), at which both are
    the same; null: by the root, as when heads get more and not wider."""

    def check(self) -> None:
        """Raises ConfigError on values that no width follows from."""
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
    """A decoder with causal attention, like BLOOM unless told otherwise."""

    num_layers: int = 2
    """Transformer blocks."""
    hidden_size: int = 64
    """Width of the residual stream; a multiple of num_heads unless head_size is given."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by equally many neighbouring heads of queries (grouped-query attention,
    Ainslie et al. 2023; 1 is multi-query attention): smaller projections, less to gather for context parallelism and to
    keep for generation. A divisor of num_heads; null is num_heads."""
    head_size: int | None = None
    """Features of an attention head; null is hidden_size / num_heads. Qwen3's and Mistral Nemo's differ from that."""
    ffn_size: int | None = None
    """Width of the MLP; null is 4 * hidden_size."""
    vocab_size: int | None = 512
    """The model's true output size; null is that of the data's tokenizer, filled in before the ranks start. Rows that
    tensor parallelism adds beyond it are masked and never saved."""
    max_seq_len: int = 2048
    """Longest trained sequence; the number of learned positions."""
    position: Position = Position.alibi
    """alibi (a bias linear in the distance, Press et al. 2021), learned (an embedding per position) or rope (rotary
    embedding of queries and keys, Su et al. 2021)."""
    rope_theta: float = 10000.0
    """Base of rope's angles; longer sequences want a larger one."""
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Scaling of rope's angles."""
    qk_norm: bool = False
    """A norm of every head's queries and keys, before rope, with gains that the heads share (Dehghani et al. 2023): it
    bounds the attention scores, which otherwise grow where a training is about to diverge. Qwen3's is rmsnorm."""
    qk_norm_width: QKNormWidth = QKNormWidth.head
    """head: every head's queries are one vector, and its keys; full: those of all heads are one, with a gain for each
    feature (OLMo 2), for which tensor-parallel ranks sum their squares. full needs norm=rmsnorm."""
    attention_logit_softcap: float | None = None
    """Bounds attention scores: cap * tanh(score / cap), before bias and mask (Gemma 2, 50); null: none. Scores are then
    in memory, as no kernel of the whole of attention caps them here (docs/model.md)."""
    attention_sinks: bool = False
    """Each head has a learned logit beside its scores, whose share of the probability goes to no token (gpt-oss 2025;
    Xiao et al. 2023): a head may attend to nothing. Scores are then in memory, as with attention_logit_softcap."""
    final_logit_softcap: float | None = None
    """Bounds the logits of the output projection in the same way (Gemma 2, 30); null: none."""
    window: int | None = None
    """Tokens that a token's attention sees, itself and those just before it (Beltagy et al. 2020); null is all before
    it. Layers reach further together: each adds another window."""
    norm: NormKind = NormKind.layernorm
    """layernorm (Ba et al. 2016) or rmsnorm, which subtracts no mean and has no bias (Zhang and Sennrich 2019)."""
    bias: bool = True
    """Projections and LayerNorms add a learned bias; false: none does, as in PaLM (Chowdhery et al. 2022) and Llama."""
    mlp: MLPKind = MLPKind.gelu
    """What is between the MLP's projections: gelu (its tanh approximation) or swiglu, silu(gate) * up with a third
    projection for the gates (Shazeer 2020): as many parameters as gelu has at two thirds of its ffn_size."""
    norm_placement: NormPlacement = NormPlacement.input
    """input: x + attention(norm(x)), then the MLP likewise (pre-norm); output: x + norm(attention(x)), norms of what
    attention and MLP make, before they are added (Liu et al. 2022, Swin v2; OLMo 2's reordered norm)."""
    parallel_block: bool = False
    """Attention and MLP of a block read the same norm and are added, x + dropout(attention(norm(x)) + mlp(norm(x))), as
    in GPT-J and PaLM: half the messages of tensor parallelism. Else the MLP follows attention, with its own norm."""
    block: BlockConfig = field(default_factory=BlockConfig)
    """The block, where it is not the built-in one; the keys above count as far as it reads them."""
    scale_embedding: bool = False
    """The word embedding is multiplied by sqrt(hidden_size) (Vaswani et al. 2017; Gemma), before positions are
    added."""
    embedding_norm: bool = True
    """A norm after the word embedding, as in BLOOM."""
    tie_embeddings: bool = True
    """The output projection is the word embedding."""
    hidden_dropout: float = 0.0
    """Dropout on the embedding and on the output of attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention probabilities."""
    attention: AttentionKind = AttentionKind.auto
    """How attention is computed, not what. On CPUs: fused, megads' own kernel. On GPUs: flash, the package flash-attn;
    flex, torch's FlexAttention; cudnn, cuDNN's kernel. On both: fused_softmax, megads' own softmax of scores that are
    in memory, between two matrix products (like fused with ops.impl=fused); sdpa, torch's, with a mask in memory unless
    causality is all; augmented, torch's causal flash kernel without a mask, ALiBi being eight more features of a head,
    in bf16. auto: on a CPU fused where ops.impl has it, else sdpa; on GPUs the quickest of those that can do the run's
    work, as measured at the first start and kept in the user's cache (docs/kernels.md)."""
    norm_eps: float = 1e-5
    """Added to the variance (the mean square with rmsnorm) in every norm."""
    init_std: float | None = None
    """Standard deviation of the initial weights; null is sqrt(1 / (3 * hidden_size)), BLOOM's rule. With mup, that of
    the base width."""
    mup: MupConfig = field(default_factory=MupConfig)
    """Maximal update parametrisation (docs/optimizers.md)."""

    @property
    def vocabulary(self) -> int:
        """vocab_size once it is known; raises ConfigError where it is still the tokenizer's to say."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is null, and no tokenizer has filled it in: set it")
        return self.vocab_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def attention_width(self) -> int:
        """Features of all heads' queries: what the output projection of attention reads."""
        return self.num_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def queries_per_kv(self) -> int:
        """Heads of queries that share a head of keys and values."""
        return self.num_heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        """Features of all heads' queries, keys and values."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ffn_width(self) -> int:
        return self.ffn_size if self.ffn_size is not None else 4 * self.hidden_size

    @property
    def mlp_rows(self) -> int:
        """Features of the projection into the MLP: gates too, where there are some."""
        return 2 * self.ffn_width if self.mlp is MLPKind.swiglu else self.ffn_width

    @property
    def weight_std(self) -> float:
        """Of embeddings and output projection, and of the blocks' matrices at the base width of mup."""
        width = self.hidden_size if self.mup.base_width is None else self.mup.base_width
        return self.init_std if self.init_std is not None else math.sqrt(1.0 / (3.0 * width))

    @property
    def width_ratio(self) -> float:
        """By how much the model is wider than the one of which its learning rate is; 1 without mup."""
        return 1.0 if self.mup.base_width is None else self.hidden_size / self.mup.base_width

    @property
    def hidden_std(self) -> float:
        """Standard deviation of the initial matrices of blocks."""
        return self.weight_std / math.sqrt(self.width_ratio)

    @property
    def logit_multiplier(self) -> float:
        """Of what the output projection reads."""
        return self.mup.output_multiplier / self.width_ratio

    @property
    def query_scale(self) -> float:
        """Of queries, beside the 1/sqrt(head size) of attention."""
        base = self.mup.base_head_size
        return 1.0 if base is None else math.sqrt(base / self.head_dim)

    def width_scale(self, *, muon: bool) -> Callable[[str], float]:
        """Factor of a parameter's learning rate, by its name, that follows from the width.

        A step of Adam, or of Lion, moves every element by about the learning rate: a matrix with `width_ratio` times as
        many inputs must move less by that. One of Muon has a spectral norm of about sqrt(width), which must not grow.

        Args:
            muon: matrices of blocks are orthogonalised.
        """
        factor = self.width_ratio**-0.5 if muon else 1.0 / self.width_ratio

        def scale(name: str) -> float:
            return factor if name.startswith("blocks.") and name.endswith(_HIDDEN_MATRICES) else 1.0

        return scale

    @property
    def scores_in_memory(self) -> bool:
        """Whether attention scores are treated in a way that no kernel of the whole of attention knows."""
        return self.attention_logit_softcap is not None or self.attention_sinks

    def check(self) -> None:
        """Raises ConfigError on a shape that cannot be built."""
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
                "head of keys and values serves equally many of queries; choose a divisor, or null for num_heads"
            )
        if self.position is Position.rope and self.head_dim % 2:
            raise ConfigError(
                f"a head has {self.head_dim} features (model.head_size, or model.hidden_size / model.num_heads), but "
                "model.position=rope turns pairs of them: choose an even number, or model.position=alibi"
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
        reason = why_not(self.attention, self.attention_work())
        if reason:
            raise ConfigError(f"model.attention = {self.attention} {reason}")

    def _check_softcaps(self) -> None:
        for name in ("attention_logit_softcap", "final_logit_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ConfigError(f"model.{name} = {value}: must be positive, or null for none")
        if self.attention_sinks and self.attention_dropout:
            raise ConfigError(
                f"model.attention_sinks = true cannot be had with model.attention_dropout = {self.attention_dropout}: "
                "set model.attention_dropout=0"
            )

    def _check_mup(self) -> None:
        self.mup.check()
        if self.mup.base_width is not None and (self.scale_embedding or self.block.is_custom):
            given = f"block.name = {self.block.name}" if self.block.is_custom else "scale_embedding = true"
            raise ConfigError(
                f"model.{given} cannot be had with model.mup.base_width: how that grows with the width is not known; "
                "leave one of them out"
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
                "model.norm_placement = output has a norm of attention and one of the MLP, but model.parallel_block "
                "adds the two before anything else: set one of them"
            )

    def attention_work(self, tp: int = 1) -> AttentionWork:
        """What the model asks of attention on a rank; precision, place and batch are not known here.

        Args:
            tp: tensor parallel size.
        """
        return AttentionWork(
            head_dim=self.head_dim,
            heads=self.num_heads // tp,
            kv_heads=self.kv_heads // tp,
            alibi=self.position is Position.alibi,
            window=self.window,
            dropout=self.attention_dropout,
            softcap=self.attention_logit_softcap is not None,
            sinks=self.attention_sinks,
        )


def sharding_of(model: ModelConfig) -> ShardingTable:
    """The table of a model, with what its options or a plugin's block put in it.

    Raises:
        ConfigError: no plugin registered the block.
    """
    if not model.block.is_custom:
        if model.qk_norm_width is QKNormWidth.head:
            return SHARDING
        return replace(SHARDING, parameters={**SHARDING.parameters, **FULL_QK_NORM})
    own: ShardingTable = getattr(BLOCKS.find(model.block.name, "model.block.name").make, "sharding", ShardingTable({}))
    prefix = f"blocks.*.{CUSTOM}."
    return ShardingTable(
        {**SHARDING.parameters, **{f"{prefix}{path}": cut for path, cut in own.parameters.items()}},
        (*SHARDING.dropouts, *(f"{prefix}{path}" for path in own.dropouts)),
        (*SHARDING.attention_cores, *(f"{prefix}{path}" for path in own.attention_cores)),
    )


def fused_rows(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of a built-in block that are several matrices, by the last parts of their names.

    Returns:
        How many neighbouring rows are each matrix's, which repeats over all rows: of each head of keys and values the
        queries that share it, the keys and the values; of each unit of a gated MLP the gate and the up.
    """
    head = model.head_dim
    return {
        "attention.qkv.weight": (model.queries_per_kv * head, head, head),
        "mlp.gate_up.weight": (1, 1),
    }


def has_attention_core(model: ModelConfig) -> bool:
    """Whether the model's block names an attention core; without one nobody knows how its tokens meet."""
    return not model.block.is_custom or len(sharding_of(model).attention_cores) > len(SHARDING.attention_cores)
