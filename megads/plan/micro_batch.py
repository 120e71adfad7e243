"""One micro-batch on one rank: the sizes from which the plan's operations are made.

Letters: T = tokens of a micro-batch, w = bytes of a weight, h = hidden size; a/t and f/t are this tensor-parallel
rank's share of the attention width and the MLP width, k/t of that of the keys; n = this rank's heads, s = tokens of a
whole sample. With sequence parallelism a rank holds T/t tokens outside of the tensor-parallel regions, all T inside of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megads.model.config import ModelConfig, NormKind, Position, QKNormWidth
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import chunk_tokens, shares_keys
from megads.parallel.rank_order import padded_rows

FP32, INT64 = 4, 8
MULTIPROCESSORS = 160
"""Of a GPU, at most; flash-attn gives each a sum of its own where there are few heads and samples."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch on one rank.

    Attributes:
        model: the model's shape.
        tp: tensor parallel size.
        cp: context parallel size.
        micro_batch_size: samples.
        seq_len: tokens a sample.
        weight_bytes: of one element of weights and activations: 2 for bf16, 4 for fp32.
        cuda: on a GPU; else on a CPU.
        sequence_parallel: hidden states outside of the tensor-parallel regions are cut along the sequence.
        document_mask: packed documents are hidden from each other.
        fused: megads' own kernels compute attention, norms, what is between the MLP's projections, and the loss.
        loss_chunk: tokens whose logits are in memory at a time; None goes by their size.
        step_sums: embedding and head can add to the fp32 sums of the step themselves; under ZeRO-2 and ZeRO-3 they
            cannot, as DeepSpeed's optimizer has gradients from autograd.
    """

    model: ModelConfig
    tp: int
    micro_batch_size: int
    seq_len: int
    weight_bytes: int
    cuda: bool = False
    sequence_parallel: bool = False
    cp: int = 1
    document_mask: bool = False
    fused: bool = False
    loss_chunk: int | None = None
    step_sums: bool = True

    @property
    def tokens(self) -> int:
        """T: those that this rank holds."""
        return self.micro_batch_size * self.seq_len // self.cp

    @property
    def shards(self) -> int:
        """Ranks that share the sequence outside of the tensor-parallel regions."""
        return self.tp if self.sequence_parallel else 1

    @property
    def heads(self) -> int:
        """Attention heads of this rank."""
        return self.model.num_heads // self.tp

    @property
    def region_hidden(self) -> int:
        """T h w: bytes of one [b, s, h] tensor inside of a tensor-parallel region, which has all tokens."""
        return self.tokens * self.model.hidden_size * self.weight_bytes

    @property
    def hidden(self) -> int:
        """Bytes of what this rank holds of a [b, s, h] tensor outside of the tensor-parallel regions."""
        return self.region_hidden // self.shards

    @property
    def attention(self) -> int:
        """T a/t w: bytes of this rank's queries or context."""
        return self.tokens * self.model.attention_width // self.tp * self.weight_bytes

    @property
    def keys(self) -> int:
        """T k/t w: bytes of this rank's keys, or values."""
        return self.attention // self.model.queries_per_kv

    @property
    def projection(self) -> int:
        """Bytes of this rank's queries, keys and values together."""
        return self.attention + 2 * self.keys

    @property
    def reordered(self) -> int:
        """A copy of a whole sequence in the order of shares, which a micro-batch of one sample does without."""
        return self.region_hidden if self.micro_batch_size > 1 else 0

    @property
    def gloo_copy(self) -> int:
        """Gloo's own copy of what it gathers or reduces and scatters."""
        return 0 if self.cuda else self.region_hidden

    def opened(self, output: int) -> int:
        """While a layer opens a region forward: its output of so many bytes, beside the gathered sequence."""
        if self.shards == 1:
            return output
        return self.region_hidden + max(self.gloo_copy, self.reordered, output)

    def closed(self) -> int:
        """While a layer closes a region forward: the product and, biased, the sum over ranks."""
        if self.shards == 1:
            return 2 * self.hidden
        return self.region_hidden + self.reordered + self.gloo_copy + self.hidden

    def opened_backward(self, output: int, gradient: int) -> int:
        """While a layer that opened a region runs backward, the gradient of its weight left out.

        Where the sequence is cut the input is gathered again, beside the gradient of it; this is then scattered while
        the gradient of the weight is made.

        Args:
            output: bytes of the layer's output, whose gradient is there.
            gradient: bytes of the gradient of its weight.
        """
        if self.shards == 1:
            summed = 2 * self.hidden if self.tp > 1 else 0
            return max(self.hidden + output, summed)
        whole = self.region_hidden
        gathering = whole + max(self.gloo_copy, self.reordered)
        scattering = whole + self.gloo_copy + self.hidden
        return output + whole + max(gathering - gradient, self.reordered + scattering - gradient, scattering)

    def closed_backward(self, inside: int) -> int:
        """While a layer that closed a region runs backward: the gradient inside, beside the gathered one outside."""
        return inside if self.shards == 1 else self.region_hidden + max(self.gloo_copy, self.reordered, inside)

    @property
    def ffn(self) -> int:
        """T f/t w: bytes of this rank's MLP activation."""
        return self.tokens * self.model.ffn_width // self.tp * self.weight_bytes

    @property
    def scores(self) -> int:
        """Elements of this rank's attention scores, [b, n, s/cp, s]."""
        return self.tokens * self.seq_len * self.heads

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding on this rank, padding included."""
        return padded_rows(self.model.vocabulary, self.tp)

    @property
    def logits(self) -> int:
        """Bytes of this rank's logits, [b, s, rows]."""
        return self.tokens * self.vocab_rows * self.weight_bytes

    @property
    def chunk(self) -> int:
        """Tokens whose logits are in memory at a time."""
        device = "cuda" if self.cuda else "cpu"
        return chunk_tokens(self.tokens, self.vocab_rows * self.weight_bytes, device, self.loss_chunk)

    @property
    def in_chunks(self) -> bool:
        """Head and loss run forward and back in the forward pass."""
        return self.chunk < self.tokens

    @property
    def norm_in_steps(self) -> bool:
        """Torch's RMSNorm on a CPU, which has no kernel: products in fp32, whose factors are kept."""
        return self.model.norm is NormKind.rmsnorm and not self.fused and not self.cuda

    @property
    def norm_kept(self) -> int:
        """Bytes that a norm keeps: its input and two statistics of every token, in fp32.

        Torch's LayerNorm has them in the weights' dtype on a CPU; its RMSNorm has one of them alone.
        """
        return self._kept_by_norm(self.tokens // self.shards, self.model.hidden_size)

    @property
    def head_norms_kept(self) -> int:
        """Bytes that the norms of queries and keys keep; a number of every token where their features are cut."""
        kv_heads = self.heads // self.model.queries_per_kv
        if not self.model.qk_norm:
            return 0
        if self.model.qk_norm_width is QKNormWidth.head:
            return self._kept_by_norm(self.tokens * (self.heads + kv_heads), self.model.head_dim)
        if self.tp > 1:
            return self.attention + self.keys + 2 * FP32 * self.tokens
        return sum(self._kept_by_norm(self.tokens, heads * self.model.head_dim) for heads in (self.heads, kv_heads))

    def _kept_by_norm(self, rows: int, width: int) -> int:
        if self.norm_in_steps:
            return FP32 * rows * (2 * width + 1)
        normed = rows * width * self.weight_bytes
        if self.fused:
            return normed + 2 * FP32 * rows
        count = 1 if self.model.norm is NormKind.rmsnorm else 2
        return normed + count * rows * (FP32 if self.cuda else self.weight_bytes)

    @property
    def norm_working(self) -> int:
        """Bytes of the fp32 products that are alive beside a norm's output, or beside the gradient of its input."""
        return FP32 * self.tokens // self.shards * self.model.hidden_size if self.norm_in_steps else 0

    @property
    def norm_sums(self) -> int:
        """Our own kernel's sums of the gradients of gain and bias, one of each block of rows (row_blocks.h)."""
        return self._sums_of_norm(self.tokens // self.shards, self.model.hidden_size)

    @property
    def head_norm_sums(self) -> int:
        """The same of the norm of queries."""
        if self.model.qk_norm_width is QKNormWidth.full:
            return self._sums_of_norm(self.tokens, self.heads * self.model.head_dim) if self.tp == 1 else 0
        return self._sums_of_norm(self.tokens * self.heads, self.model.head_dim)

    def _sums_of_norm(self, rows: int, width: int) -> int:
        blocks = -(-rows // max(16, -(-rows // 64)))
        return 2 * FP32 * blocks * width if self.fused else 0

    @property
    def attention_kind(self) -> AttentionKind:
        """What computes attention, as `AttentionCore.taken` says; auto on GPUs is taken for sdpa.

        What auto measures there keeps little more at most (`megads.engine.attention_trials`).
        """
        kind, low = self.model.attention, self.weight_bytes < FP32
        if kind is AttentionKind.auto:
            kind = AttentionKind.fused
        there = {
            AttentionKind.fused: self.fused and not self.cuda,
            AttentionKind.fused_softmax: self.fused,
            AttentionKind.augmented: low,
            AttentionKind.flash: self.cuda and low,
            AttentionKind.flex: self.cuda,
            AttentionKind.cudnn: self.cuda and low,
        }
        return kind if there.get(kind) else AttentionKind.sdpa

    @property
    def explicit_attention(self) -> bool:
        """Attention scores are in memory."""
        kind = self.attention_kind
        drops = self.model.attention_dropout > 0 and kind is not AttentionKind.fused
        return kind is AttentionKind.fused_softmax or drops or self.model.scores_in_memory

    @property
    def masked_by_kernel(self) -> bool:
        """Kernels hide keys and add biases themselves, so that no mask is in memory."""
        if self.explicit_attention:
            by_torch = self.model.attention is AttentionKind.sdpa or self.model.attention_sinks
            return self.fused and not by_torch
        if self.attention_kind not in (AttentionKind.cudnn, AttentionKind.sdpa):
            return True
        apart = self.model.window is not None or self.document_mask or self.cp > 1
        return self.model.position is not Position.alibi and not apart

    @property
    def fused_attention(self) -> bool:
        """Megads' own kernel computes the whole of attention."""
        return self.attention_kind is AttentionKind.fused and not self.explicit_attention

    @property
    def augmented_attention(self) -> bool:
        """Torch's causal kernel computes attention on longer queries, keys and values."""
        return self.attention_kind is AttentionKind.augmented and not self.explicit_attention

    @property
    def repeated_keys(self) -> int:
        """Bytes of keys and values repeated for every head of queries: CUDA's kernels with a mask do not share."""
        with_mask = self.attention_kind in (AttentionKind.sdpa, AttentionKind.cudnn) and not self.explicit_attention
        if self.attention_kind is AttentionKind.sdpa and self.masked_by_kernel:
            with_mask = not shares_keys(low=self.weight_bytes < FP32, head_dim=self.model.head_dim)
        return 2 * self.cp * self.attention if self.cuda and with_mask and self.model.queries_per_kv > 1 else 0

    @property
    def split_sums(self) -> int:
        """Bytes of the partial gradients of queries, fp32, by which flash-attn's are the same on every run."""
        if self.attention_kind is not AttentionKind.flash:
            return 0
        splits = -(-MULTIPROCESSORS // (self.micro_batch_size * self.heads))
        return splits * FP32 * self.attention // self.weight_bytes

    @property
    def bias_table(self) -> int:
        """Elements of the cached additive mask, [1, n or 1, s/cp, s]."""
        if self.masked_by_kernel:
            return 0
        return (self.heads if self.model.position is Position.alibi else 1) * self.seq_len**2 // self.cp

    @property
    def mask_bytes(self) -> int:
        """Of one element of the additive mask."""
        return self.weight_bytes if self.cuda and not self.model.attention_dropout else FP32

    @property
    def rotary_tables(self) -> int:
        """Bytes of the cached cosines and sines of rotary positions, each [s/cp, d/2] in fp32."""
        return FP32 * self.seq_len // self.cp * self.model.head_dim if self.model.position is Position.rope else 0

    @property
    def gathered_keys_and_values(self) -> int:
        """Bytes of the whole sample's keys and values where samples are cut, else 0."""
        return 2 * self.cp * self.keys if self.cp > 1 else 0

    def matrix(self, *shape: int) -> int:
        """Bytes of a weight's gradient as a backward pass makes it, before it is added to the one that is there."""
        return prod(shape) * self.weight_bytes
