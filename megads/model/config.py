"""The shape of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from megads.errors import ConfigError


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


class AttentionKind(StrEnum):
    """How attention is computed; all compute the same."""

    auto = "auto"
    fused = "fused"
    fused_softmax = "fused_softmax"
    sdpa = "sdpa"
    augmented = "augmented"

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Values that people ask for, and why they are not offered."""
        in_it = "fused is a flash kernel with ALiBi, document borders and context parallelism inside; use auto"
        flex = "FlexAttention has no backward pass on a CPU; use auto"
        return {"flash": in_it, "flex": flex, "reference": "use sdpa, which is plain torch"}


@dataclass
class ModelConfig:
    """A decoder of pre-norm blocks with causal attention, like BLOOM unless told otherwise."""

    num_layers: int = 2
    """Transformer blocks."""
    hidden_size: int = 64
    """Width of the residual stream; a multiple of num_heads."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int | None = None
    """Heads of keys and values, each shared by equally many neighbouring heads of queries (grouped-query attention,
    Ainslie et al. 2023; 1 is multi-query attention): smaller projections, less to gather for context parallelism and to
    keep for generation. A divisor of num_heads; null is num_heads."""
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
    parallel_block: bool = False
    """Attention and MLP of a block read the same norm and are added together, x + attention(norm(x)) + mlp(norm(x)), as
    in GPT-J and PaLM; else the MLP follows attention, with a norm of its own."""
    embedding_norm: bool = True
    """A norm after the word embedding, as in BLOOM."""
    tie_embeddings: bool = True
    """The output projection is the word embedding."""
    hidden_dropout: float = 0.0
    """Dropout on the embedding and on the output of attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention probabilities."""
    attention: AttentionKind = AttentionKind.auto
    """How attention is computed, not what: fused is megads' own kernel, and fused_softmax megads' own softmax of scores
    that are in memory, between two matrix products (both with ops.impl=fused); sdpa is torch's, with a mask in memory;
    augmented is torch's causal flash kernel, without a mask, ALiBi being eight more features of a head, in bf16.
    auto takes fused where ops.impl has it (fused_softmax with model.attention_dropout), and sdpa elsewhere."""
    norm_eps: float = 1e-5
    """Added to the variance (the mean square with rmsnorm) in every norm."""
    init_std: float | None = None
    """Standard deviation of the initial weights; null is sqrt(1 / (3 * hidden_size)), BLOOM's rule."""

    @property
    def vocabulary(self) -> int:
        """vocab_size once it is known; raises ConfigError where it is still the tokenizer's to say."""
        if self.vocab_size is None:
            raise ConfigError("model.vocab_size is null, and no tokenizer has filled it in: set it")
        return self.vocab_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

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
        return self.init_std if self.init_std is not None else math.sqrt(1.0 / (3.0 * self.hidden_size))

    def check(self) -> None:
        """Raises ConfigError on a shape that cannot be built."""
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "ffn_size", "vocab_size", "max_seq_len")
        for name in (*sizes, "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.{name} = {value}: must be at least 1")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"model.hidden_size = {self.hidden_size} is not divisible by model.num_heads = {self.num_heads}: "
                "choose a number of heads that divides the width"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads = {self.num_heads}: every "
                "head of keys and values serves equally many of queries; choose a divisor, or null for num_heads"
            )
        if self.position is Position.rope and self.head_dim % 2:
            raise ConfigError(
                f"model.hidden_size / model.num_heads = {self.head_dim} is odd, but model.position=rope turns pairs of "
                "a head's features: choose an even head size, or model.position=alibi"
            )
        if self.attention is AttentionKind.fused and self.attention_dropout:
            raise ConfigError(
                f"model.attention = fused cannot drop probabilities, but model.attention_dropout = "
                f"{self.attention_dropout}: set that to 0, or model.attention=fused_softmax or auto"
            )
        self._check_augmented()
        if self.rope_theta <= 0.0:
            raise ConfigError(f"model.rope_theta = {self.rope_theta}: must be positive")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"model.{name} = {getattr(self, name)}: must be in [0, 1)")

    def _check_augmented(self) -> None:
        """Raises ConfigError where a plain causal kernel computes something else."""
        if self.attention is not AttentionKind.augmented:
            return
        for wrong, found, wanted in (
            (self.position is not Position.alibi, f"model.position = {self.position}", "model.position=alibi"),
            (self.window is not None, f"model.window = {self.window}", "model.window=null"),
            (self.attention_dropout > 0, f"model.attention_dropout = {self.attention_dropout}", "0"),
        ):
            if wrong:
                raise ConfigError(
                    f"model.attention = augmented is ALiBi through a kernel that can do nothing else, but {found}: set "
                    f"{wanted}, or model.attention=auto"
                )
