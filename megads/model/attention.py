"""Causal self-attention; several heads of queries may share one of keys and values (Ainslie et al. 2023).

With ALiBi (Press, Smith and Lewis 2021) scores are biased linearly in the distance of query and key.

With rotary position embedding (Su et al. 2021, RoFormer) feature i of a head and feature i + d/2 are one point in the
plane, turned by the angle position * theta^(-2i/d); so the product of a query and a key depends on the distance of
their positions. The paper pairs neighbouring features; halves, as Llama and GPT-NeoX pair them, are the same up to the
order of a head's features.

Shape suffixes: b = batch, s = query position, t = key position, n = heads, m = heads of keys and values, g = heads of
queries that share one of them (n / m), p = parts of a group of heads (its g queries, k, v), d = head dim, r = d/2 pairs
of features, h = hidden size, u = tokens of all samples (b s).
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megads.batch import BatchInfo, PerBatch
from megads.model.config import ModelConfig, Position, QKNormWidth, RopeScaling, RopeScalingConfig
from megads.model.dropout import Dropout
from megads.model.norm import Norm, Norms
from megads.ops.attention import (
    FLASH_INSTALLED,
    Documents,
    attention,
    augmented_attention,
    bias_dtype,
    cudnn_attention,
    documents_of,
    flash_attention,
    flex_attention,
    masked_attention,
    visible_blocks,
)
from megads.ops.attention_kinds import AttentionKind
from megads.ops.config import TORCH, KernelOp, Kernels
from megads.ops.device_cache import device_cache
from megads.ops.dropout import DropoutMask
from megads.ops.rotary import rotate
from megads.ops.softmax import MaskedSoftmax, explicit_attention

Tables = tuple[Tensor, Tensor]
_RESTARTED: PerBatch[Tables] = PerBatch()


def alibi_slopes(num_heads: int) -> Tensor:
    """Slope of every head, fp32 [num_heads].

    For n a power of two the slopes are 2^(-8 i / n), i = 1..n. Any other count takes those of the largest power of two
    below it, then every other slope of twice that power.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


@device_cache(8)
def _slopes_of(num_heads: int, first_head: int, last_head: int, device: torch.device) -> Tensor:
    """Slopes of heads first_head..last_head - 1 of a model with `num_heads`, fp32; the same tensor every time."""
    return alibi_slopes(num_heads)[first_head:last_head].to(device, copy=True)


@device_cache(4)
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

    Holds slope * (key - query) up to the query's own place, and -inf beyond it and before its window. The relative form
    is used, not slope * key, because its values near the query, where most of the probability lies, stay exact in low
    precision.

    The result is cached, by the identity of `places_s`: give the same tensor every time.

    Args:
        num_heads: heads of the whole model.
        first_head: first head of the range.
        last_head: the one after the last.
        seq_len: keys, at places 0..seq_len-1.
        alibi: False leaves the causal mask alone.
        device: of the result.
        dtype: of the result.
        places_s: integer place of every query; None: all places.
        window: keys that a query sees, the one at its own place being the last; None: all.
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
    """The same for queries and keys anywhere in their sequences, [b, heads or 1, s, t].

    Args:
        num_heads: heads of the whole model.
        first_head: first head of the range.
        last_head: the one after the last.
        positions_bs: integer position of every query.
        keys_t: integer position of every key; those beyond a query's position are masked.
        alibi: False leaves the causal mask alone.
        dtype: of the result.
        window: keys that a query sees; None: all.
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


def hide_other_documents(bias_bnst: Tensor, document_starts_bs: Tensor) -> Tensor:
    """The mask with -inf at every key before the query's document, [b, n, s, t].

    Args:
        bias_bnst: a causal mask [b or 1, n or 1, s, t] of keys at places 0..t-1. It must hide later keys: a key up to
            the query's own place that is not before the document is in it, so nothing need be known of the keys.
        document_starts_bs: place at which the document of every query starts.
    """
    keys_t = torch.arange(bias_bnst.shape[-1], device=bias_bnst.device)
    before_bst = keys_t < document_starts_bs[:, :, None]
    return bias_bnst.masked_fill(before_bst[:, None], -math.inf)


_DOCUMENT_BIASES: PerBatch[Tensor] = PerBatch()
_DOCUMENTS: PerBatch[Documents] = PerBatch()
_DOCUMENT_BLOCKS: PerBatch[BlockMask] = PerBatch()
_WINDOW_STARTS: PerBatch[Tensor] = PerBatch()
_blocks_of = device_cache(8)(visible_blocks)


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v over a contiguous range of the model's heads.

    The bias of a head depends on its GLOBAL index, so the core knows which heads it holds; `narrow` keeps a share.
    Keys and values are those of the whole sample in the order of their places, queries those of the tokens that this
    rank holds. Query head i sees key-value head i // g.

    Attributes:
        kind: how it is to be computed; auto is the kernel of the whole where megads' own are taken, else sdpa.
        kernels: whose kernels compute; megads have one of the whole, for CPUs, and one of the masked softmax.
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
        """Keeps share `rank` of `size` equal contiguous shares of the heads."""
        share = len(self.heads) // size
        self.heads = self.heads[rank * share : (rank + 1) * share]

    def bias(self, info: BatchInfo, num_keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Additive mask of this core's heads, [1, n or 1, s, t]; [b, ...] where it hides other documents."""
        heads = (self.num_heads, self.heads.start, self.heads.stop)
        causal = causal_bias(*heads, num_keys, self.alibi, device, dtype, info.sequence_index, self.window)
        starts_bs = info.document_starts
        if starts_bs is None:
            return causal
        key = (heads, self.alibi, dtype, self.window)
        return _DOCUMENT_BIASES.get(info, key, lambda: hide_other_documents(causal, starts_bs))

    def starts(self, info: BatchInfo, queries: int, device: torch.device) -> Tensor | None:
        """First place that each query sees, int64 [b, s]: its document's, or its window's; None: 0."""
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
        """ALiBi slope of each of this core's heads, fp32; None: there is no bias."""
        return _slopes_of(self.num_heads, self.heads.start, self.heads.stop, device) if self.alibi else None

    def blocks(self, info: BatchInfo, queries: int, keys: int, device: torch.device) -> BlockMask:
        """FlexAttention's mask of this micro-batch: of its documents, or of its lengths alone."""
        sizes, starts_bs = (queries, keys, device, self.window, info.sequence_index), info.document_starts
        if starts_bs is None:
            return _blocks_of(*sizes)
        return _DOCUMENT_BLOCKS.get(info, sizes, lambda: visible_blocks(*sizes, starts_bs))

    def taken(self, q_bnsd: Tensor) -> AttentionKind:
        """The kind that computes on these tensors: the one that was asked for, or where its kernel cannot be had sdpa.

        A run that trains has been checked before (`attention_kinds.why_not`); but its model may be evaluated elsewhere.
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
            info: of the micro-batch.
            sinks_n: logit of each of this core's heads beside its scores; None: none.
        """
        kind = self.taken(q_bnsd)
        (_, _, queries, _), num_keys, device = q_bnsd.shape, k_bmtd.shape[2], q_bnsd.device
        mask = self.dropout.mask(info, device, self.heads.start) if self.dropout.active else None
        drops = mask is not None and kind is not AttentionKind.fused
        if kind is AttentionKind.fused_softmax or drops or self.softcap is not None or sinks_n is not None:
            return self._explicit(q_bnsd, k_bmtd, v_bmtd, info, mask, sinks_n)
        inputs, slopes_n, places_s = (q_bnsd, k_bmtd, v_bmtd), self.slopes(device), info.sequence_index
        match kind:
            case AttentionKind.fused:
                return attention(*inputs, slopes_n, places_s, self.starts(info, queries, device), mask)
            case AttentionKind.augmented:
                assert slopes_n is not None
                return augmented_attention(*inputs, slopes_n)
            case AttentionKind.flex:
                return flex_attention(*inputs, self.blocks(info, queries, num_keys, device), slopes_n, places_s)
            case AttentionKind.flash:
                starts_bs = info.document_starts
                apart = None if starts_bs is None else _DOCUMENTS.get(info, None, lambda: documents_of(starts_bs))
                return flash_attention(*inputs, slopes_n, self.window, apart)
        # Torch's FlashAttention takes no mask: where causality is all that there is to hide, there is none.
        causal_alone = all(x is None for x in (slopes_n, self.window, info.document_starts, places_s))
        bias = None if causal_alone else self.bias(info, num_keys, device, bias_dtype(q_bnsd))
        return (cudnn_attention if kind is AttentionKind.cudnn else masked_attention)(*inputs, bias)

    def with_bias(
        self, q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor, sinks_n: Tensor | None = None
    ) -> Tensor:
        """Attention by torch under any additive mask, [b, n, s, d]; nothing is dropped.

        Args:
            q_bnsd: queries.
            k_bmtd: keys.
            v_bmtd: values.
            bias: [b or 1, n or 1, s, t].
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
        """The same with scores in memory, [b, n, s, d]."""
        (_, _, queries, dim), num_keys, device = q_bnsd.shape, k_bmtd.shape[2], q_bnsd.device
        by_kernel = self.kind is not AttentionKind.sdpa and sinks_n is None
        if by_kernel and self.kernels.takes(KernelOp.attention, q_bnsd):
            starts_bs = self.starts(info, queries, device)
            visible = (self.slopes(device), info.sequence_index, None if starts_bs is None else starts_bs.contiguous())
            softmax = MaskedSoftmax(dim**-0.5, None, *visible, softcap=self.softcap)
            return explicit_attention(q_bnsd, k_bmtd, v_bmtd, softmax, mask)
        bias = functools.partial(self.bias, info, num_keys, device, torch.float32)
        softmax = MaskedSoftmax(dim**-0.5, bias, places_s=info.sequence_index, softcap=self.softcap, sinks_n=sinks_n)
        return explicit_attention(q_bnsd, k_bmtd, v_bmtd, softmax, mask)


class Sinks(nn.Module):
    """A logit for each head; the attention core computes with it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class Attention(nn.Module):
    """Fused QKV projection, norms of queries and keys and rotary positions if any, attention core, output projection.

    Rows of the QKV weight are ordered [key-value head, (its g queries, k, v), head dim]: a contiguous share of the rows
    is a contiguous share of the heads, of queries, keys and values alike. Where every head has its own keys this is
    BLOOM's order.

    Attributes:
        kernels: whose kernel turns queries and keys by their positions.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.kernels = TORCH
        self.head_dim, self.queries_per_kv = config.head_dim, config.queries_per_kv
        self.query_scale = config.query_scale
        rotates = config.position is Position.rope
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling) if rotates else None
        whole = config.qk_norm_width is QKNormWidth.full
        self.query_norm, self.key_norm = (
            Norm(config, (heads if whole else 1) * config.head_dim) if config.qk_norm else None
            for heads in (config.num_heads, config.kv_heads)
        )
        self.query_key_norms: nn.Module | None = Norms() if whole else None
        self.qkv = nn.Linear(config.hidden_size, config.qkv_width, bias=config.bias)
        self.sinks = Sinks(config.num_heads) if config.attention_sinks else None
        self.core: nn.Module = AttentionCore(config, seed, f"{site}.core")
        self.dense = nn.Linear(config.attention_width, config.hidden_size, bias=config.bias)

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        out_bsh: Tensor = self.dense(self.context(*self.heads(self.qkv(hidden_bsh), info), info))
        return out_bsh

    def context(self, q_bsnd: Tensor, k_bsmd: Tensor, v_bsmd: Tensor, info: BatchInfo) -> Tensor:
        """What the output projection reads, [b, s, n d]."""
        sinks = () if self.sinks is None else (self.sinks.weight,)
        context_bnsd: Tensor = self.core(*(x.transpose(1, 2) for x in (q_bsnd, k_bsmd, v_bsmd)), info, *sinks)
        return context_bnsd.transpose(1, 2).flatten(2)

    def heads(self, qkv: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, s, n, d], k and v [b, s, m, d] of a projection [b, s, ...]: views of it, or all three of them copies.

        What backward keeps of a view would keep the whole projection beside the copies.
        """
        batch, seq_len, width = qkv.shape
        parts = self.queries_per_kv + 2
        groups = width // (parts * self.head_dim)
        # Batch and sequence are one dimension: of more than four torch's cat, by which the split's gradient is put
        # together on a GPU, copies input by input, three times as slowly.
        qkv_umpd = qkv.view(batch * seq_len, groups, parts, self.head_dim)
        q_und, k_umd, v_umd = (x.flatten(1, 2) for x in qkv_umpd.split((parts - 2, 1, 1), dim=2))
        q_bsnd, k_bsmd, v_bsmd = (x.unflatten(0, (batch, seq_len)) for x in (q_und, k_umd, v_umd))
        apart = groups > 1 and self.queries_per_kv > 1  # the queries of several groups: flatten has copied them
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
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScalingConfig = UNSCALED,
) -> Tables:
    """Cosine and sine of every angle, each [..., s, 1, r] for integer positions [..., s].

    Angles are fp64 whatever the result's dtype: near position 10^6 neighbouring fp32 numbers are 0.06 radians apart.
    With yarn both are multiplied by 0.1 ln(factor) + 1, which sharpens attention by its square (Peng et al. 2023,
    equation 22).
    """
    pairs_r = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions[..., None, None] * scaled_frequencies(theta**-pairs_r, theta, scaling)
    size = 0.1 * math.log(scaling.factor) + 1.0 if scaling.kind is RopeScaling.yarn else 1.0
    return (size * angles.cos()).to(dtype), (size * angles.sin()).to(dtype)


def scaled_frequencies(frequencies_r: Tensor, theta: float, scaling: RopeScalingConfig) -> Tensor:
    """Radians a position of each pair of features, fp64 [r], for texts longer than those of the first training.

    Args:
        frequencies_r: unscaled, theta^(-2 i / d) for pair i.
        theta: rope's base.
        scaling: how; see the papers named there.
    """
    slowed_r = frequencies_r / scaling.factor
    turns_r = scaling.original_max_seq_len * frequencies_r / (2 * math.pi)
    match scaling.kind:
        case RopeScaling.none:
            return frequencies_r
        case RopeScaling.linear:
            return slowed_r
        case RopeScaling.llama3:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept_r = ((turns_r - low) / (high - low)).clamp(0.0, 1.0)
        case RopeScaling.yarn:
            pairs = len(frequencies_r)

            def pair_of(turns: float) -> float:
                """The pair, a fraction, that turns so often in the first training's longest text."""
                return pairs * math.log(scaling.original_max_seq_len / (2 * math.pi * turns)) / math.log(theta)

            first = max(math.floor(pair_of(scaling.beta_fast)), 0)
            last = min(math.ceil(pair_of(scaling.beta_slow)), 2 * pairs - 1)
            numbers_r = torch.arange(pairs, dtype=torch.float64, device=frequencies_r.device)
            kept_r = 1.0 - ((numbers_r - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
    return kept_r * frequencies_r + (1.0 - kept_r) * slowed_r


@device_cache(4)
def _place_tables(
    seq_len: int,
    head_dim: int,
    theta: float,
    scaling: RopeScalingConfig,
    device: torch.device,
    dtype: torch.dtype,
    places_s: Tensor | None,
) -> Tables:
    """Tables of a sample whose positions are places; cached by the identity of `places_s`."""
    places_s = torch.arange(seq_len, device=device) if places_s is None else places_s
    return rotary_tables(places_s, head_dim, theta, dtype, scaling)


class Rotary(nn.Module):
    """Rotary position embedding of one attention layer; no parameters.

    Args:
        head_dim: features of a head, an even number.
        theta: the base of the angles.
        scaling: of the angles.
    """

    untraced: ClassVar = ("tables",)

    def __init__(self, head_dim: int, theta: float, scaling: RopeScalingConfig = UNSCALED) -> None:
        super().__init__()
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling

    def forward(
        self, q_bsnd: Tensor, k_bsnd: Tensor, info: BatchInfo, kernels: Kernels = TORCH
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by the positions of the tokens that this rank holds.

        Args:
            q_bsnd: queries.
            k_bsnd: keys.
            info: of the micro-batch.
            kernels: whose kernel computes.
        """
        tables = self.tables(q_bsnd.shape[1], q_bsnd.device, torch.promote_types(q_bsnd.dtype, torch.float32), info)
        return rotate(q_bsnd, *tables, kernels), rotate(k_bsnd, *tables, kernels)

    def tables(self, count: int, device: torch.device, dtype: torch.dtype, info: BatchInfo) -> Tables:
        """Cosine and sine for so many tokens, made once for all layers."""
        positions_bs = info.position_ids_bs
        if positions_bs is None:
            return _place_tables(count, self.head_dim, self.theta, self.scaling, device, dtype, info.sequence_index)
        key = (self.head_dim, self.theta, self.scaling, dtype)
        return _RESTARTED.get(
            info, key, lambda: rotary_tables(positions_bs, self.head_dim, self.theta, dtype, self.scaling)
        )
