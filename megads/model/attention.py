"""Causal self-attention, multi-head or grouped-query (GQA, Ainslie et al. 2023).

With ALiBi (Press, Smith and Lewis 2021), scores get a bias that is linear in the distance of query and key.

With rotary position embedding (Su et al. 2021, RoFormer), features i and i + d/2 of a head form a pair that is rotated
by the angle position * theta^(-2i/d), so that the dot product of a query and a key depends on the distance of their
positions. The paper pairs adjacent features; pairing halves, as in Llama and GPT-NeoX, is equivalent up to the order of
a head's features. With model.rotary_fraction, d is the number of a head's first features that are rotated.

Shape suffixes: b = batch, s = query position, t = key position, n = query heads, m = KV heads, g = query heads per KV
head (n / m), p = heads of a group (its g queries, k, v), d = head dim, r = d/2 pairs of features, h = hidden size,
u = tokens of all samples (b s).
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megads.batch import BatchInfo, MicroBatchCache
from megads.model.config import ModelConfig, Position, QKNormWidth
from megads.model.layers import Dropout, Linear, Norm, Norms
from megads.model.rope_scaling import RopeScaling, RopeScalingConfig
from megads.ops.attention import (
    FLASH_INSTALLED,
    DocumentBounds,
    attention,
    augmented_attention,
    bias_dtype,
    cudnn_attention,
    document_block_mask,
    flash_attention,
    flash_document_bounds,
    flex_attention,
    masked_attention,
)
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import TORCH, KernelOp, Kernels
from megads.ops.device_cache import device_cache
from megads.ops.dropout import DropoutMask
from megads.ops.rotary import rotate
from megads.ops.softmax import MaskedSoftmax, explicit_attention

Tables = tuple[Tensor, Tensor]
_RESTARTED: MicroBatchCache[Tables] = MicroBatchCache()


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi slope of every head, fp32 [num_heads].

    If n is a power of two, the slopes are 2^(-8 i / n), i = 1..n. Otherwise they are those of the largest power of two
    below n, followed by every other slope of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


@device_cache(8)
def _slopes_of(num_heads: int, first_head: int, last_head: int, device: torch.device) -> Tensor:
    """ALiBi slopes of heads first_head..last_head - 1 of `num_heads`, fp32; the same tensor on every call."""
    return alibi_slopes(num_heads)[first_head:last_head].to(device, copy=True)


@device_cache(8)
def causal_bias(
    num_heads: int,
    first_head: int,
    last_head: int,
    seq_len: int,
    alibi: bool,
    device: torch.device,
    dtype: torch.dtype,
    places_s: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Additive attention mask of a contiguous range of heads, [1, heads, s, seq_len] ([1, 1, ...] without ALiBi).

    Holds slope * (key - query) up to the query's own position, and -inf after it and before its window. This relative
    form is used instead of slope * key because its values near the query, where most of the probability is, stay exact
    in low precision.

    The result is cached by the identity of `places_s`, so pass the same tensor every time.

    Args:
        num_heads: number of heads of the whole model.
        first_head: first head of the range.
        last_head: end of the range, exclusive.
        seq_len: number of keys, at positions 0..seq_len-1.
        alibi: add the ALiBi bias; False: the causal mask only.
        device: device of the result.
        dtype: dtype of the result.
        places_s: integer position of every query; None: all positions.
        window: number of keys that a query attends to, ending with the one at its own position; None: all.
    """
    queries_s = torch.arange(seq_len, device=device) if places_s is None else places_s
    keys_t = torch.arange(seq_len, device=device)
    return causal_bias_at(num_heads, first_head, last_head, queries_s[None], keys_t, alibi, dtype, window)


def causal_bias_at(
    num_heads: int,
    first_head: int,
    last_head: int,
    positions_bs: Tensor,
    keys_t: Tensor,
    alibi: bool,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """`causal_bias` for arbitrary positions of queries and keys, [b, heads or 1, s, t].

    Args:
        num_heads: number of heads of the whole model.
        first_head: first head of the range.
        last_head: end of the range, exclusive.
        positions_bs: integer position of every query.
        keys_t: integer position of every key; keys after a query's position are masked.
        alibi: add the ALiBi bias; False: the causal mask only.
        dtype: dtype of the result.
        window: number of keys that a query attends to; None: all.
    """
    distance_bst = keys_t.float() - positions_bs[:, :, None]
    hidden_bst = distance_bst > 0
    if window is not None:
        hidden_bst |= distance_bst <= -window
    if not alibi:
        return torch.zeros_like(distance_bst).masked_fill_(hidden_bst, -math.inf)[:, None].to(dtype)
    slopes = alibi_slopes(num_heads)[first_head:last_head].to(positions_bs.device)
    bias_bnst = slopes[:, None, None] * distance_bst[:, None]
    return bias_bnst.masked_fill_(hidden_bst[:, None], -math.inf).to(dtype)


def mask_other_documents(bias_bnst: Tensor, document_starts_bs: Tensor) -> Tensor:
    """Masks the keys before each query's document with -inf, [b, n, s, t].

    Args:
        bias_bnst: causal mask [b or 1, n or 1, s, t] of keys at positions 0..t-1. It must mask keys after the query, as
            only the start of a document is compared.
        document_starts_bs: position at which the document of every query starts.
    """
    keys_t = torch.arange(bias_bnst.shape[-1], device=bias_bnst.device)
    before_bst = keys_t < document_starts_bs[:, :, None]
    return bias_bnst.masked_fill(before_bst[:, None], -math.inf)


_DOCUMENT_BIASES: MicroBatchCache[Tensor] = MicroBatchCache()
_DOCUMENTS: MicroBatchCache[DocumentBounds] = MicroBatchCache()
_DOCUMENT_BLOCKS: MicroBatchCache[BlockMask] = MicroBatchCache()
_WINDOW_STARTS: MicroBatchCache[Tensor] = MicroBatchCache()
_blocks_of = device_cache(8)(document_block_mask)


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v over a contiguous range of the model's heads.

    The bias of a head depends on its GLOBAL index, so the core stores which heads it holds; `narrow` keeps a share.
    Keys and values are those of the whole sample in order of position, queries those of the tokens that this rank
    holds. Query head i attends to KV head i // g.

    Attributes:
        kind: configured attention backend; auto is megads' fused attention if its kernels are used, else sdpa.
        kernels: kernel implementation; megads has a fused attention kernel for CPUs and a masked softmax kernel.
    """

    untraced: ClassVar = ("forward",)

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.alibi = config.position is Position.alibi
        self.window, self.softcap = config.window, config.attention_logit_softcap
        self.heads = range(config.num_heads)
        self.kind = config.attention
        self.kernels = TORCH
        self.dropout = Dropout(config.attention_dropout, seed, f"{site}.dropout")

    def narrow(self, rank: int, size: int) -> None:
        """Keeps only share `rank` of `size` equal contiguous shares of the heads."""
        share = len(self.heads) // size
        self.heads = self.heads[rank * share : (rank + 1) * share]

    def bias(self, info: BatchInfo, num_keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Additive mask of this core's heads, [1, n or 1, s, t]; [b, ...] if it masks other documents."""
        heads = (self.num_heads, self.heads.start, self.heads.stop)
        causal = causal_bias(*heads, num_keys, self.alibi, device, dtype, info.sequence_index, self.window)
        starts_bs = info.document_starts
        if starts_bs is None:
            return causal
        key = (heads, self.alibi, dtype, self.window)
        return _DOCUMENT_BIASES.get(info, key, lambda: mask_other_documents(causal, starts_bs))

    def visible_from(self, info: BatchInfo, queries: int, device: torch.device) -> Tensor | None:
        """First position that each query attends to, by document and window, int64 [b, s]; None: 0."""
        window = self.window
        if window is None:
            return info.document_starts

        def make() -> Tensor:
            places_s = torch.arange(queries, device=device) if info.sequence_index is None else info.sequence_index
            first_s = (places_s - (window - 1)).clamp_(min=0)
            if info.document_starts is None:
                return first_s.repeat(len(info.sample_ids), 1)
            return torch.maximum(first_s, info.document_starts)

        return _WINDOW_STARTS.get(info, (window, device), make)

    def slopes(self, device: torch.device) -> Tensor | None:
        """ALiBi slopes of this core's heads, fp32; None without ALiBi."""
        return _slopes_of(self.num_heads, self.heads.start, self.heads.stop, device) if self.alibi else None

    def blocks(self, info: BatchInfo, queries: int, keys: int, device: torch.device) -> BlockMask:
        """FlexAttention's block mask: causal, within the window and, if documents are given, within each document."""
        sizes, starts_bs = (queries, keys, device, self.window, info.sequence_index), info.document_starts
        if starts_bs is None:
            return _blocks_of(*sizes)
        return _DOCUMENT_BLOCKS.get(info, sizes, lambda: document_block_mask(*sizes, starts_bs))

    def backend(self, q_bnsd: Tensor) -> AttentionKind:
        """The attention backend for these tensors: the configured one, or sdpa if its kernel is not available.

        Training runs are checked beforehand (`attention_kinds.unsupported_reason`), but a model may be evaluated on
        other devices.
        """
        kind, low = self.kind, q_bnsd.dtype is torch.bfloat16
        if kind is AttentionKind.auto:
            kind = AttentionKind.fused
        match kind:
            case AttentionKind.fused | AttentionKind.fused_softmax:
                there = self.kernels.takes(KernelOp.attention, q_bnsd)
                there &= kind is AttentionKind.fused_softmax or not q_bnsd.is_cuda
            case AttentionKind.augmented:
                there = low
            case AttentionKind.flex:
                there = q_bnsd.is_cuda
            case AttentionKind.flash:
                there = q_bnsd.is_cuda and low and FLASH_INSTALLED
            case _:
                there = q_bnsd.is_cuda and low
        return kind if there else AttentionKind.sdpa

    def forward(
        self, q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, info: BatchInfo, sinks_n: Tensor | None = None
    ) -> Tensor:
        """Returns [b, n, s, d].

        Args:
            q_bnsd: queries.
            k_bmtd: keys of the whole sample.
            v_bmtd: values, likewise.
            info: description of the micro-batch.
            sinks_n: attention sink logit of each of this core's heads; None: no sinks.
        """
        kind = self.backend(q_bnsd)
        (_, _, queries, _), num_keys, device = q_bnsd.shape, k_bmtd.shape[2], q_bnsd.device
        mask = self.dropout.mask(info, device, self.heads.start) if self.dropout.active else None
        drops = mask is not None and kind is not AttentionKind.fused
        if kind is AttentionKind.fused_softmax or drops or self.softcap is not None or sinks_n is not None:
            return self._explicit(q_bnsd, k_bmtd, v_bmtd, info, mask, sinks_n)
        inputs, slopes_n, places_s = (q_bnsd, k_bmtd, v_bmtd), self.slopes(device), info.sequence_index
        match kind:
            case AttentionKind.fused:
                return attention(*inputs, slopes_n, places_s, self.visible_from(info, queries, device), mask)
            case AttentionKind.augmented:
                assert slopes_n is not None
                return augmented_attention(*inputs, slopes_n)
            case AttentionKind.flex:
                return flex_attention(*inputs, self.blocks(info, queries, num_keys, device), slopes_n, places_s)
            case AttentionKind.flash:
                apart = None
                if (starts_bs := info.document_starts) is not None:
                    known_bs = starts_bs if info.host_document_starts is None else info.host_document_starts.tensor
                    apart = _DOCUMENTS.get(info, None, lambda: flash_document_bounds(known_bs, device))
                return flash_attention(*inputs, slopes_n, self.window, apart)
        # PyTorch's FlashAttention supports no mask tensor, so none is passed if the mask is only causal.
        causal_alone = all(x is None for x in (slopes_n, self.window, info.document_starts, places_s))
        bias = None if causal_alone else self.bias(info, num_keys, device, bias_dtype(q_bnsd))
        return (cudnn_attention if kind is AttentionKind.cudnn else masked_attention)(*inputs, bias)

    def with_bias(
        self, q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor, sinks_n: Tensor | None = None
    ) -> Tensor:
        """Attention by PyTorch with any additive mask and no dropout, [b, n, s, d].

        Args:
            q_bnsd: queries.
            k_bmtd: keys.
            v_bmtd: values.
            bias: additive mask, [b or 1, n or 1, s, t].
            sinks_n: see `forward`.
        """
        if self.softcap is None and sinks_n is None:
            return masked_attention(q_bnsd, k_bmtd, v_bmtd, bias)
        softmax = MaskedSoftmax(q_bnsd.shape[-1] ** -0.5, lambda: bias, softcap=self.softcap, sinks_n=sinks_n)
        return explicit_attention(q_bnsd, k_bmtd, v_bmtd, softmax)

    def _explicit(
        self,
        q_bnsd: Tensor,
        k_bmtd: Tensor,
        v_bmtd: Tensor,
        info: BatchInfo,
        mask: DropoutMask | None,
        sinks_n: Tensor | None,
    ) -> Tensor:
        """Attention that materializes the scores, [b, n, s, d]."""
        (_, _, queries, dim), num_keys, device = q_bnsd.shape, k_bmtd.shape[2], q_bnsd.device
        by_kernel = self.kind is not AttentionKind.sdpa and sinks_n is None
        if by_kernel and self.kernels.takes(KernelOp.attention, q_bnsd):
            starts_bs = self.visible_from(info, queries, device)
            visible = (self.slopes(device), info.sequence_index, None if starts_bs is None else starts_bs.contiguous())
            softmax = MaskedSoftmax(dim**-0.5, None, *visible, softcap=self.softcap)
            return explicit_attention(q_bnsd, k_bmtd, v_bmtd, softmax, mask)
        bias = functools.partial(self.bias, info, num_keys, device, torch.float32)
        softmax = MaskedSoftmax(dim**-0.5, bias, places_s=info.sequence_index, softcap=self.softcap, sinks_n=sinks_n)
        return explicit_attention(q_bnsd, k_bmtd, v_bmtd, softmax, mask)


class AttentionSinks(nn.Module):
    """Attention sinks: one learned logit per head, used by the attention core."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class Attention(nn.Module):
    """Fused QKV projection, optional QK norm and rotary embedding, attention core, output projection.

    Rows of the QKV weight are ordered [KV head, (its g queries, k, v), head dim], so that a contiguous share of the
    rows is a contiguous share of the heads, for queries, keys and values. Without GQA this is BLOOM's order. With fewer
    KV heads than tensor-parallel ranks, the projection returns a rank's queries with the key and value that they share.

    Attributes:
        kernels: kernel implementation of the rotary embedding.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.kernels = TORCH
        self.head_dim, self.queries_per_kv = config.head_dim, config.queries_per_kv
        self.query_scale = config.query_scale
        rotates = config.position is Position.rope
        rotation = (config.rotary_dim, config.rope_theta, config.rope_scaling, config.rotary_interleaved)
        self.rotary = Rotary(*rotation) if rotates else None
        self.qkv_clip = config.qkv_clip
        whole = config.qk_norm_width is QKNormWidth.full
        self.query_norm, self.key_norm = (
            Norm(config, (heads if whole else 1) * config.head_dim) if config.qk_norm else None
            for heads in (config.num_heads, config.kv_heads)
        )
        self.query_key_norms: nn.Module | None = Norms() if whole else None
        self.qkv = Linear(config.hidden_size, config.qkv_width, bias=config.has_qkv_bias)
        self.sinks = AttentionSinks(config.num_heads) if config.attention_sinks else None
        self.core: nn.Module = AttentionCore(config, seed, f"{site}.core")
        self.dense = Linear(config.attention_width, config.hidden_size, bias=config.has_attention_output_bias)

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        out_bsh: Tensor = self.dense(self.context(*self.heads(self.qkv(hidden_bsh), info), info))
        return out_bsh

    def context(self, q_bsnd: Tensor, k_bsmd: Tensor, v_bsmd: Tensor, info: BatchInfo) -> Tensor:
        """Output of the attention core, i.e. input of the output projection, [b, s, n d]."""
        sinks = () if self.sinks is None else (self.sinks.weight,)
        context_bnsd: Tensor = self.core(*(x.transpose(1, 2) for x in (q_bsnd, k_bsmd, v_bsmd)), info, *sinks)
        return context_bnsd.transpose(1, 2).flatten(2)

    def heads(self, qkv: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, s, n, d], k and v [b, s, m, d] from a QKV projection [b, s, ...].

        All three are views of it or all three are copies: a view that is saved for backward would keep the whole
        projection alive in addition to the copies.
        """
        batch, seq_len, width = qkv.shape
        if self.qkv_clip is not None:
            qkv = qkv.clamp(-self.qkv_clip, self.qkv_clip)
        # A tensor-parallel rank with a share of a group's queries has one group with fewer of them.
        parts = min(self.queries_per_kv + 2, width // self.head_dim)
        groups = width // (parts * self.head_dim)
        # Batch and sequence are flattened to at most four dims: the backward pass of split is a torch.cat, which on a
        # GPU copies tensors of more than four dims input by input, three times as slowly.
        qkv_umpd = qkv.view(batch * seq_len, groups, parts, self.head_dim)
        q_und, k_umd, v_umd = (x.flatten(1, 2) for x in qkv_umpd.split((parts - 2, 1, 1), dim=2))
        q_bsnd, k_bsmd, v_bsmd = (x.unflatten(0, (batch, seq_len)) for x in (q_und, k_umd, v_umd))
        apart = groups > 1 and self.queries_per_kv > 1  # flatten has copied the queries
        if self.query_norm is not None and self.key_norm is not None:
            q_bsnd, k_bsmd = q_bsnd.contiguous(), k_bsmd.contiguous()
            if self.query_key_norms is None:
                q_bsnd, k_bsmd = self.query_norm(q_bsnd), self.key_norm(k_bsmd)
            else:
                q_bsnd, k_bsmd = self.query_key_norms((q_bsnd, k_bsmd), (self.query_norm, self.key_norm))
            apart = True
        if self.query_scale != 1.0:
            q_bsnd, apart = q_bsnd * self.query_scale, True
        if self.rotary is not None:
            q_bsnd, k_bsmd = self.rotary(q_bsnd, k_bsmd, info, self.kernels)
        elif apart:
            k_bsmd = k_bsmd.contiguous()
        if self.rotary is not None or apart:
            v_bsmd = v_bsmd.contiguous()
        return q_bsnd, k_bsmd, v_bsmd


UNSCALED = RopeScalingConfig()


def rotary_tables(
    positions: Tensor,
    rotary_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScalingConfig = UNSCALED,
    seq_len: int = 0,
) -> Tables:
    """Cosine and sine tables of rotary embedding, each [..., s, 1, r] for integer positions [..., s].

    Angles are always computed in fp64: near position 10^6, adjacent fp32 numbers are 0.06 radians apart. Both tables
    are multiplied by `scaling.rotation_scale`, which scales attention scores by its square (Peng et al. 2023, equation
    22; Ding et al. 2024).

    Args:
        positions: position of each token.
        rotary_dim: number of rotated features.
        theta: base of the frequencies.
        dtype: dtype of the result.
        scaling: scaling of the frequencies.
        seq_len: length of the tokens' sequence, on which some scalings depend.
    """
    pairs_r = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device) / rotary_dim
    angles = positions[..., None, None] * scaled_frequencies(theta**-pairs_r, theta, scaling, seq_len)
    size = scaling.rotation_scale
    return (size * angles.cos()).to(dtype), (size * angles.sin()).to(dtype)


def scaled_frequencies(frequencies_r: Tensor, theta: float, scaling: RopeScalingConfig, seq_len: int = 0) -> Tensor:
    """Rotary frequencies in radians per position, fp64 [r], scaled for sequences longer than those of pretraining.

    Args:
        frequencies_r: unscaled frequencies, theta^(-2 i / d) for pair i.
        theta: base of the frequencies.
        scaling: scaling method; see the papers cited there.
        seq_len: length of the sequence.
    """
    slowed_r = frequencies_r / scaling.factor
    turns_r = scaling.original_max_seq_len * frequencies_r / (2 * math.pi)
    pairs = len(frequencies_r)
    numbers_r = torch.arange(pairs, dtype=torch.float64, device=frequencies_r.device)
    match scaling.kind:
        case RopeScaling.none:
            return frequencies_r
        case RopeScaling.linear:
            return slowed_r
        case RopeScaling.dynamic:
            ratio = scaling.effective_length(seq_len) / scaling.original_max_seq_len
            growth = scaling.factor * ratio - scaling.factor + 1.0
            # A base b growth^(d / (d - 2)) divides the frequency of pair i by growth^(2 i / (d - 2)), d = 2 pairs.
            return frequencies_r * growth ** -(numbers_r / (pairs - 1))
        case RopeScaling.longrope:
            long = scaling.effective_length(seq_len) > scaling.original_max_seq_len
            factors = scaling.long_factor if long else scaling.short_factor
            return frequencies_r / torch.tensor(factors, dtype=torch.float64, device=frequencies_r.device)
        case RopeScaling.llama3:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_r = ((turns_r - low) / (high - low)).clamp(0.0, 1.0)
        case RopeScaling.yarn:

            def pair_of(turns: float) -> float:
                """Fractional index of the pair that makes `turns` rotations in original_max_seq_len positions."""
                return pairs * math.log(scaling.original_max_seq_len / (2 * math.pi * turns)) / math.log(theta)

            first = max(math.floor(pair_of(scaling.beta_fast)), 0)
            last = min(math.ceil(pair_of(scaling.beta_slow)), 2 * pairs - 1)
            kept_r = 1.0 - ((numbers_r - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return kept_r * frequencies_r + (1.0 - kept_r) * slowed_r


@device_cache(8)
def _place_tables(
    count: int,
    rotary_dim: int,
    theta: float,
    scaling: RopeScalingConfig,
    device: torch.device,
    dtype: torch.dtype,
    places_s: Tensor | None,
    effective_length: int,
) -> Tables:
    """Rotary tables for positions that do not restart within a sample; cached by the identity of `places_s`."""
    places_s = torch.arange(count, device=device) if places_s is None else places_s
    return rotary_tables(places_s, rotary_dim, theta, dtype, scaling, effective_length)


class Rotary(nn.Module):
    """Rotary position embedding of one attention layer; no parameters.

    Args:
        rotary_dim: number of a head's first features that are rotated, even.
        theta: base of the frequencies.
        scaling: scaling of the frequencies.
        interleaved: whether adjacent features form a pair; False: halves.
    """

    untraced: ClassVar = ("tables",)

    def __init__(
        self, rotary_dim: int, theta: float, scaling: RopeScalingConfig = UNSCALED, interleaved: bool = False
    ) -> None:
        super().__init__()
        self.rotary_dim, self.theta, self.scaling, self.interleaved = rotary_dim, theta, scaling, interleaved

    def forward(
        self, q_bsnd: Tensor, k_bsnd: Tensor, info: BatchInfo, kernels: Kernels = TORCH
    ) -> tuple[Tensor, Tensor]:
        """Rotates queries and keys by the positions of the tokens that this rank holds.

        Args:
            q_bsnd: queries.
            k_bsnd: keys.
            info: description of the micro-batch.
            kernels: kernel implementation.
        """
        tables = self.tables(q_bsnd.shape[1], q_bsnd.device, torch.promote_types(q_bsnd.dtype, torch.float32), info)
        return rotate(q_bsnd, *tables, kernels, self.interleaved), rotate(k_bsnd, *tables, kernels, self.interleaved)

    def tables(self, count: int, device: torch.device, dtype: torch.dtype, info: BatchInfo) -> Tables:
        """Cosine and sine tables for `count` tokens, computed once for all layers."""
        positions_bs, how = info.position_ids_bs, (self.rotary_dim, self.theta)
        length = self.scaling.effective_length(count if info.seq_len is None else info.seq_len)
        if positions_bs is None and info.row_lengths is None:
            return _place_tables(count, *how, self.scaling, device, dtype, info.sequence_index, length)

        def make() -> Tables:
            places = info.positions(count, device)
            if info.row_lengths is None:
                return rotary_tables(places, *how, dtype, self.scaling, length)
            rows = zip(places.expand(len(info.row_lengths), -1), info.row_lengths, strict=True)
            tables = [rotary_tables(places_s, *how, dtype, self.scaling, own) for places_s, own in rows]
            cosines, sines = zip(*tables, strict=True)
            return torch.stack(cosines), torch.stack(sines)

        return _RESTARTED.get(info, (*how, self.scaling, dtype), make)
