"""Tensor sizes of one micro-batch on one rank, from which the planner builds its operations.

Symbols: T = tokens of a micro-batch, w = bytes per weight, h = hidden size; a/t, f/t and k/t = this tensor-parallel
rank's share of the attention width, the MLP width and the width of the keys; n = heads of this rank, s = tokens of a
whole sample. With sequence parallelism a rank holds T/t tokens outside of tensor-parallel regions and all T inside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from megads.api import (
    AttentionKind,
    ContextParallelKind,
    ModelConfig,
    NormKind,
    Position,
    QKNormWidth,
    chunk_tokens,
    exchanged_kv_heads,
    flash_in_ring,
    padded_rows,
)
from megads.ops import processor
from megads.ops.config import mlp_chunks, shares_kv_heads
from megads.ops.processor import GemmBackend
from megads.parallel.ring_shifts import most_window_rows
from megads.tools.plan.workload import block_index

FP32, INT64 = 4, 8
MULTIPROCESSORS = 160
"""Upper bound for a GPU. With few heads and samples, deterministic flash-attn has one partial dQ per multiprocessor."""


def adds_to_main_grad(weight_bytes: int, *, fused: bool) -> bool:
    """Whether GEMMs of weight gradients accumulate into main_grad on a CPU, as `add_weight_gradient` chooses.

    PyTorch's GEMMs add fp32 matrices, megads' also bf16 ones. Otherwise a temporary gradient is added.

    Args:
        weight_bytes: bytes per element of weights and activations.
        fused: whether megads' kernels are used.
    """
    return fused and (weight_bytes == FP32 or processor.gemm(bf16=True, kernels=True) is GemmBackend.megads)


@dataclass(frozen=True)
class BatchSizes:
    """One micro-batch on one rank.

    Attributes:
        model: model config.
        tp: tensor parallel size.
        cp: context parallel size.
        cp_kind: implementation of attention with context parallelism.
        cp_ulysses: context-parallel ranks that exchange heads, see `ParallelConfig`.
        micro_batch_size: number of samples.
        seq_len: tokens per sample.
        weight_bytes: bytes per element of weights and activations: 2 for bf16, 4 for fp32.
        cuda: whether the rank computes on a GPU; otherwise on a CPU.
        sequence_parallel: whether hidden states outside of tensor-parallel regions are split along the sequence.
        document_mask: whether attention is masked across packed documents.
        fused: whether megads' kernels compute attention, norms, the MLP's activation function and the loss.
        loss_chunk: number of tokens whose logits are in memory at a time; None: chosen by their size.
        mlp_chunk: most tokens whose MLP features are in memory at a time; None: all.
        vocab_multiple: number that divides the rows of the vocabulary on each rank.
        fused_accumulation: whether embedding and head accumulate into main_grad themselves. Not possible under
            ZeRO-2 and ZeRO-3, where DeepSpeed's optimizer takes gradients from autograd.
        ep: expert parallel size.
        expert_tp: whether the features of experts are divided over the tensor-parallel ranks.
        worst_load: see `Workload`.
    """

    model: ModelConfig
    tp: int
    micro_batch_size: int
    seq_len: int
    weight_bytes: int
    cuda: bool = False
    sequence_parallel: bool = False
    cp: int = 1
    cp_kind: ContextParallelKind = ContextParallelKind.allgather
    cp_ulysses: int = 1
    document_mask: bool = False
    fused: bool = False
    loss_chunk: int | None = None
    mlp_chunk: int | None = None
    vocab_multiple: int = 1
    fused_accumulation: bool = True
    ep: int = 1
    expert_tp: bool = True
    worst_load: bool = False

    def of_layer(self, name: str) -> BatchSizes:
        """The micro-batch in a block with this name, whose settings may differ from other blocks'."""
        return replace(self, model=self.model.layer(block_index(name)))

    @property
    def mask_kind(self) -> tuple[bool, int | None]:
        """What the additive masks of two blocks differ by."""
        return self.model.position is Position.alibi, self.model.window

    @property
    def tokens(self) -> int:
        """T: number of tokens that this rank holds."""
        return self.micro_batch_size * self.seq_len // self.cp

    @property
    def shards(self) -> int:
        """Number of ranks over which the sequence is split outside of tensor-parallel regions."""
        return self.tp if self.sequence_parallel else 1

    @property
    def heads(self) -> int:
        """Number of attention heads on this rank."""
        return self.model.num_heads // self.tp

    @property
    def region_hidden(self) -> int:
        """T h w: bytes of one [b, s, h] tensor inside a tensor-parallel region, which has all tokens."""
        return self.tokens * self.model.hidden_size * self.weight_bytes

    @property
    def hidden(self) -> int:
        """Bytes of this rank's part of a [b, s, h] tensor outside of tensor-parallel regions."""
        return self.region_hidden // self.shards

    @property
    def attention(self) -> int:
        """T a/t w: bytes of this rank's queries, or of its attention output."""
        return self.tokens * self.model.attention_width // self.tp * self.weight_bytes

    @property
    def keys(self) -> int:
        """T k/t w: bytes of this rank's keys, or of its values."""
        return self.tokens * self.model.local_kv_heads(self.tp) * self.model.head_dim * self.weight_bytes

    @property
    def ulysses_size(self) -> int:
        """Number of context-parallel ranks that exchange tokens for heads."""
        return self.cp if self.cp_kind is ContextParallelKind.ulysses else self.cp_ulysses

    @property
    def ulysses(self) -> bool:
        """Whether all-to-alls give each context-parallel rank the tokens of several for its share of the heads."""
        return self.ulysses_size > 1

    @property
    def ring(self) -> bool:
        """Whether keys and values come in blocks, from one context-parallel rank after another."""
        return self.core_cp > 1 and self.cp_kind is ContextParallelKind.ring

    @property
    def flash_in_ring(self) -> bool:
        """Whether FlashAttention computes a ring's blocks, so that no scores are in memory."""
        work = self.model.attention_work(self.tp)
        known = replace(work, bf16=self.weight_bytes < FP32, cuda=self.cuda, documents=self.document_mask)
        return self.ring and flash_in_ring(known)

    @property
    def core_cp(self) -> int:
        """Number of ranks over which the queries of a sample are divided inside the attention core."""
        return self.cp // self.ulysses_size

    @property
    def core_heads(self) -> tuple[int, int]:
        """Query and KV heads of the attention core on this rank."""
        ranks, kv_heads = self.ulysses_size, self.model.local_kv_heads(self.tp)
        return self.heads // ranks, exchanged_kv_heads(kv_heads, ranks) // ranks

    @property
    def exchanged_keys(self) -> int:
        """Bytes of this rank's keys, or of its values, after Ulysses' all-to-all; `keys` without it."""
        return self.tokens * self.ulysses_size * self.core_heads[1] * self.model.head_dim * self.weight_bytes

    @property
    def exchanged_inputs(self) -> int:
        """Bytes of this rank's queries, keys and values after Ulysses' all-to-all; `projection` without it."""
        return self.attention + 2 * self.exchanged_keys

    @property
    def core_keys(self) -> int:
        """Bytes of the keys, or of the values, that the attention core keeps: with context parallelism those of all
        tokens, except in a ring."""
        return self.exchanged_keys * (1 if self.ring else self.core_cp)

    @property
    def core_inputs(self) -> int:
        """Bytes of the queries, keys and values of the attention core."""
        return self.attention + 2 * self.core_keys

    @property
    def repeated_kv(self) -> int:
        """Bytes of keys and values with repeated heads before Ulysses' all-to-all; 0 if none are repeated."""
        kv_heads = self.core_heads[1] * self.ulysses_size
        return 0 if kv_heads == self.model.local_kv_heads(self.tp) else 2 * self.exchanged_keys

    @property
    def projection(self) -> int:
        """Bytes of this rank's queries, keys and values together."""
        return self.attention + 2 * self.keys

    @property
    def qkv_output(self) -> int:
        """Bytes of the QKV GEMM's output: less than `projection` if ranks share KV heads and gather keys and values."""
        return self.tokens * self.model.qkv_width // self.tp * self.weight_bytes

    @property
    def shared_keys(self) -> int:
        """Bytes of all ranks' keys and values together if ranks share KV heads, else 0."""
        shares = self.model.kv_heads < self.tp
        return 2 * self.tokens * self.model.kv_heads * self.model.head_dim * self.weight_bytes if shares else 0

    @property
    def reordered(self) -> int:
        """Bytes of a copy of the full sequence in rank order; not needed for a micro-batch of one sample."""
        return self.region_hidden if self.micro_batch_size > 1 else 0

    @property
    def gloo_copy(self) -> int:
        """Bytes of gloo's copy in an all-gather or reduce-scatter."""
        return 0 if self.cuda else self.region_hidden

    def row_parallel_forward(self) -> int:
        """Bytes during a row-parallel layer's forward pass: the GEMM output and the reduced output with bias."""
        if self.shards == 1:
            return 2 * self.hidden
        return self.region_hidden + self.reordered + self.gloo_copy + self.hidden

    def row_parallel_backward(self, inside: int) -> int:
        """Bytes during a row-parallel layer's backward pass: input gradient (`inside`) and gathered output gradient."""
        return inside if self.shards == 1 else self.region_hidden + max(self.gloo_copy, self.reordered, inside)

    @property
    def ffn(self) -> int:
        """T f/t w: bytes of this rank's MLP activations."""
        return self.tokens * self.model.ffn_width // self.tp * self.weight_bytes

    @property
    def routed_tokens(self) -> int:
        """Number of tokens that this rank sends to experts: with whole experts, its own share of the sequence."""
        return self.tokens if self.expert_tp else self.tokens // self.tp

    @property
    def sent_rows(self) -> int:
        """Number of rows that this rank sends to experts, one for each choice of a token."""
        return self.routed_tokens * self.model.moe.top_k

    @property
    def expert_rows(self) -> int:
        """Number of rows of this rank's experts, padding included, with the even or the worst load.

        Each token chooses different experts, so that no more rows of a token reach a rank than it has experts.
        """
        moe = self.model.moe
        even = self.sent_rows
        if moe.capacity_factor is not None:
            even = moe.num_experts * moe.capacity(self.routed_tokens)
        if not self.worst_load or moe.drops:
            return even
        # With a capacity, a step with an overflow is computed again without it.
        return max(even, self.ep * self.routed_tokens * min(moe.top_k, moe.num_experts // self.ep))

    @property
    def expert_features(self) -> int:
        """Features of an expert on this rank."""
        return self.model.expert_width // (self.tp if self.expert_tp else 1)

    @property
    def scores(self) -> int:
        """Number of elements of this rank's attention scores, [b, n, s/cp, s]."""
        return self.tokens * self.seq_len * self.heads

    @property
    def vocab_rows(self) -> int:
        """Number of embedding rows on this rank, padding included."""
        return padded_rows(self.model.vocabulary, self.tp, self.vocab_multiple)

    @property
    def logits(self) -> int:
        """Bytes of this rank's logits, [b, s, rows]."""
        return self.tokens * self.vocab_rows * self.weight_bytes

    @property
    def chunk(self) -> int:
        """Number of tokens whose logits are in memory at a time."""
        device = "cuda" if self.cuda else "cpu"
        return chunk_tokens(self.tokens, self.vocab_rows * self.weight_bytes, device, self.loss_chunk)

    @property
    def in_chunks(self) -> bool:
        """Whether head and loss run in chunks, with their backward pass inside the forward pass."""
        return self.chunk < self.tokens

    @property
    def mlp_parts(self) -> int:
        """Number of chunks of the sequence in which an MLP is computed."""
        return mlp_chunks(self.tokens, self.seq_len // self.cp // self.shards, self.mlp_chunk)

    @property
    def unfused_rmsnorm(self) -> bool:
        """Whether RMSNorm is PyTorch's on a CPU, which has no fused kernel and keeps fp32 intermediates."""
        return self.model.norm is NormKind.rmsnorm and not self.fused_norms and not self.cuda

    @property
    def fp32_norm_input(self) -> bool:
        """Whether a norm keeps an fp32 copy of its input, not the input itself."""
        return self.unfused_rmsnorm and self.weight_bytes < FP32

    @property
    def fused_norms(self) -> bool:
        """Whether megads' kernels compute norms: those with learned weights."""
        return self.fused and self.model.norm_affine

    def kept_by_norm(self, rows: int, width: int) -> int:
        """Bytes that a norm of `rows` vectors keeps: its input, and two fp32 statistics per vector.

        PyTorch's LayerNorm keeps the statistics in the weights' dtype on a CPU; its RMSNorm keeps only one.
        """
        gain = width * self.weight_bytes if self.model.norm_zero_centered else 0
        if self.unfused_rmsnorm:
            return FP32 * rows * ((2 if self.model.norm_affine else 1) * width + 1) + gain
        normed = rows * width * self.weight_bytes + gain
        if self.fused_norms:
            return normed + 2 * FP32 * rows
        count = 1 if self.model.norm is NormKind.rmsnorm else 2
        return normed + count * rows * (FP32 if self.cuda else self.weight_bytes)

    def norm_partial_grads(self, rows: int, width: int) -> int:
        """Bytes of the norm kernel's partial gradients of gain and bias, one per block of rows (row_blocks.h)."""
        return 2 * FP32 * -(-rows // max(16, -(-rows // 64))) * width if self.fused_norms else 0

    def head_norms(self) -> tuple[int, int]:
        """Bytes that the QK norms keep, and of the partial gradients of the query norm.

        Full-width norms that are split over tensor-parallel ranks keep one statistic per token each.
        """
        tokens, heads, kv_heads, dim = self.tokens, self.heads, self.model.local_kv_heads(self.tp), self.model.head_dim
        if self.model.qk_norm_width is QKNormWidth.head:
            kept = sum(self.kept_by_norm(tokens * count, dim) for count in (heads, kv_heads))
            return kept, self.norm_partial_grads(tokens * heads, dim)
        if self.tp > 1:
            return self.attention + self.keys + 2 * FP32 * tokens, 0
        kept = sum(self.kept_by_norm(tokens, count * dim) for count in (heads, kv_heads))
        return kept, self.norm_partial_grads(tokens, heads * dim)

    @property
    def attention_kind(self) -> AttentionKind:
        """The attention implementation, as in `AttentionCore.backend`; auto on GPUs is planned as sdpa.

        The implementations that auto tries there keep little more at most (`megads.tools.autotune.attention_trials`).
        """
        kind, low = self.model.attention, self.weight_bytes < FP32
        if self.ring:
            return AttentionKind.sdpa
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
        """Whether attention materializes its scores, all of them."""
        kind = self.attention_kind
        if self.ring:
            return False
        drops = self.model.attention_dropout > 0 and kind is not AttentionKind.fused
        return kind is AttentionKind.fused_softmax or drops or self.model.scores_in_memory

    @property
    def masked_by_kernel(self) -> bool:
        """Whether kernels apply masks and biases themselves, so that no mask is in memory."""
        if self.ring:
            return True
        if self.explicit_attention:
            by_torch = self.model.attention is AttentionKind.sdpa or self.model.attention_sinks
            return self.fused and not by_torch
        if self.attention_kind not in (AttentionKind.cudnn, AttentionKind.sdpa):
            return True
        apart = self.model.window is not None or self.document_mask or self.core_cp > 1
        return self.model.position is not Position.alibi and not apart

    @property
    def fused_attention(self) -> bool:
        """Whether megads' fused kernel computes attention."""
        return self.attention_kind is AttentionKind.fused and not self.explicit_attention

    @property
    def augmented_attention(self) -> bool:
        """Whether PyTorch's causal kernel computes attention on augmented queries, keys and values."""
        return self.attention_kind is AttentionKind.augmented and not self.explicit_attention

    @property
    def repeated_keys(self) -> int:
        """Bytes of keys and values repeated for every query head: CUDA kernels with a mask have no GQA."""
        with_mask = self.attention_kind in (AttentionKind.sdpa, AttentionKind.cudnn) and not self.explicit_attention
        if self.attention_kind is AttentionKind.sdpa and self.masked_by_kernel:
            with_mask = not shares_kv_heads(low=self.weight_bytes < FP32, head_dim=self.model.head_dim)
        heads, kv_heads = self.core_heads
        with_mask &= not self.ring
        return 2 * self.core_cp * self.attention if self.cuda and with_mask and heads > kv_heads else 0

    @property
    def dq_partials(self) -> int:
        """Bytes of flash-attn's fp32 partial query gradients, which make its backward pass deterministic."""
        if self.attention_kind is not AttentionKind.flash:
            return 0
        splits = -(-MULTIPROCESSORS // (self.micro_batch_size * self.core_heads[0]))
        return splits * FP32 * self.attention // self.weight_bytes

    @property
    def bias_table(self) -> int:
        """Number of elements of the cached additive mask, [1, n or 1, queries, s]."""
        if self.masked_by_kernel:
            return 0
        return (self.core_heads[0] if self.model.position is Position.alibi else 1) * self.seq_len**2 // self.core_cp

    @property
    def mask_bytes(self) -> int:
        """Bytes per element of the additive mask."""
        return self.weight_bytes if self.cuda and not self.model.attention_dropout else FP32

    @property
    def rotary_tables(self) -> int:
        """Bytes of the cached rotary cosines and sines, each [s/cp, d/2] in fp32, d the rotated features of a head."""
        return FP32 * self.seq_len // self.cp * self.model.rotary_dim if self.model.position is Position.rope else 0

    @property
    def gathered_keys_and_values(self) -> int:
        """Bytes of the gathered keys and values of whole samples under context parallelism, else 0."""
        return 2 * self.core_keys if self.core_cp > 1 and not self.ring else 0

    @property
    def window_rows(self) -> int | None:
        """Most bytes of keys and values that a rank receives, or sends, if it gathers only those that windows reach;
        None if it gathers all."""
        if not self.gathered_keys_and_values:
            return None
        rows = most_window_rows(self.core_cp, self.seq_len // (2 * self.core_cp), self.model.window)
        width = 2 * self.core_heads[1] * self.model.head_dim * self.weight_bytes
        return None if rows is None else max(rows) * self.micro_batch_size * width

    @property
    def exchanged_beside(self) -> int:
        """Bytes of what Ulysses has exchanged, while the attention core computes with copies that it saves: where keys
        and values are then gathered; else 0."""
        return self.exchanged_inputs if self.ulysses and self.gathered_keys_and_values else 0

    def matrix(self, *shape: int) -> int:
        """Bytes of a weight gradient of this shape in the weights' dtype, before it is accumulated."""
        return prod(shape) * self.weight_bytes
