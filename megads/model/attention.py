"""Causal self-attention, multi-head or grouped-query (GQA, Ainslie et al. 2023).

With ALiBi (Press, Smith and Lewis 2021), scores get a bias that is linear in the distance of query and key.

Shape suffixes: b = batch, s = query position, t = key position, n = query heads, m = KV heads, g = query heads per KV
head (n / m), p = heads of a group (its g queries, k, v), d = head dim, r = d/2 pairs of features, h = hidden size,
u = tokens of all samples (b s).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from megads.batch import BatchInfo, MicroBatchCache
from megads.model.config import ModelConfig, Position, QKNormWidth
from megads.model.layers import Dropout, Linear, Norm, Norms
from megads.model.rotary import Rotary
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
from megads.ops.block_attention import BlockAttention
from megads.ops.config import TORCH, KernelOp
from megads.ops.device_cache import device_cache
from megads.ops.dropout import DropoutMask
from megads.ops.softmax import MaskedSoftmax, explicit_attention


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
def _slopes_of(num_heads: int, heads: range, device: torch.device) -> Tensor:
    """ALiBi slopes of some of `num_heads` heads, fp32; the same tensor on every call."""
    return alibi_slopes(num_heads)[heads.start : heads.stop].to(device, copy=True)


@device_cache(8)
def causal_bias(
    num_heads: int,
    heads: range,
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
        heads: the range of heads.
        seq_len: number of keys, at positions 0..seq_len-1.
        alibi: add the ALiBi bias; False: the causal mask only.
        device: device of the result.
        dtype: dtype of the result.
        places_s: integer position of every query; None: all positions.
        window: number of keys that a query attends to, ending with the one at its own position; None: all.
    """
    queries_s = torch.arange(seq_len, device=device) if places_s is None else places_s
    keys_t = torch.arange(seq_len, device=device)
    return causal_bias_at(num_heads, heads, queries_s[None], keys_t, alibi, dtype, window)


def causal_bias_at(
    num_heads: int,
    heads: range,
    positions_bs: Tensor,
    keys_t: Tensor,
    alibi: bool,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """`causal_bias` for arbitrary positions of queries and keys, [b, heads or 1, s, t].

    Args:
        num_heads: number of heads of the whole model.
        heads: the range of heads.
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
    slopes = alibi_slopes(num_heads)[heads.start : heads.stop].to(positions_bs.device)
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


@dataclass(frozen=True)
class CoreInputs:
    """What an attention core reads besides queries, keys and values: the same for all layers of a kind.

    Attributes:
        kind: the attention backend.
        slopes_n: ALiBi slope of each of the core's heads, fp32; None without ALiBi.
        places_s: index of every query in the sample; None: 0..s-1.
        starts_bs: first position that each query attends to; None: 0. Only for megads' kernel.
        bias: additive mask of PyTorch's kernels; None: causal attention only.
        blocks: FlexAttention's block mask; None for other backends.
    """

    kind: AttentionKind
    slopes_n: Tensor | None = None
    places_s: Tensor | None = None
    starts_bs: Tensor | None = None
    bias: Tensor | None = None
    blocks: BlockMask | None = None


TRACED_KINDS = (AttentionKind.fused, AttentionKind.sdpa, AttentionKind.flex, AttentionKind.cudnn)
"""Backends that torch.compile traces; others look up tensors of their own."""


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v over a contiguous range of the model's heads.

    The bias of a head depends on its GLOBAL index, so the core stores which heads it holds; `narrow` keeps a share.
    Keys and values are those of the whole sample in order of position, queries those of the tokens that this rank
    holds. Query head i attends to KV head i // g.

    Attributes:
        kind: configured attention backend; auto is megads' fused attention if its kernels are used, else sdpa.
        kernels: kernel implementation; megads has a fused attention kernel for CPUs and a masked softmax kernel.
        explicit: whether scores are materialized even without dropout: with a softcap or attention sinks.
        prepared: set by `prepare`, read where torch.compile traces the core.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.alibi = config.position is Position.alibi
        self.window, self.softcap = config.window, config.attention_logit_softcap
        self.explicit = config.scores_in_memory
        self.heads = range(config.num_heads)
        self.kind = config.attention
        self.kernels = TORCH
        self.prepared: CoreInputs | None = None
        self.dropout = Dropout(config.attention_dropout, seed, f"{site}.dropout")

    @property
    def untraced(self) -> tuple[str, ...]:
        """Methods excluded from torch.compile: `forward` if it materializes scores or looks up other tensors."""
        kind = AttentionKind.fused if self.kind is AttentionKind.auto else self.kind
        return ("forward",) if self.explicit or self.dropout.p > 0.0 or kind not in TRACED_KINDS else ()

    def prepare(self, hidden_bsh: Tensor, info: BatchInfo) -> None:
        """Computes or looks up everything that does not depend on a layer's activations, for a compiled block.

        Args:
            hidden_bsh: input of the block, with all tokens of the sample.
            info: description of the micro-batch.
        """
        tokens = hidden_bsh.shape[1]
        self.prepared = self._inputs(self.backend(hidden_bsh), hidden_bsh, tokens, tokens, info)

    def _inputs(self, kind: AttentionKind, like: Tensor, queries: int, keys: int, info: BatchInfo) -> CoreInputs:
        """Inputs for queries of the device and dtype of `like`."""
        device, slopes_n, places_s = like.device, self.slopes(like.device), info.sequence_index
        match kind:
            case AttentionKind.fused:
                return CoreInputs(kind, slopes_n, places_s, self.visible_from(info, queries, device))
            case AttentionKind.flex:
                return CoreInputs(kind, slopes_n, places_s, blocks=self.blocks(info, queries, keys, device))
            case AttentionKind.sdpa | AttentionKind.cudnn:
                # PyTorch's FlashAttention supports no mask tensor, so none is passed if the mask is only causal.
                causal_alone = all(x is None for x in (slopes_n, self.window, info.document_starts, places_s))
                return CoreInputs(
                    kind,
                    slopes_n,
                    places_s,
                    bias=None if causal_alone else self.bias(info, keys, device, bias_dtype(like)),
                )
        return CoreInputs(kind, slopes_n, places_s)

    def narrow(self, rank: int, size: int) -> None:
        """Keeps only share `rank` of `size` equal contiguous shares of the heads."""
        share = len(self.heads) // size
        self.heads = self.heads[rank * share : (rank + 1) * share]

    def bias(self, info: BatchInfo, num_keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Additive mask of this core's heads, [1, n or 1, s, t]; [b, ...] if it masks other documents."""
        heads = (self.num_heads, self.heads)
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
        return _slopes_of(self.num_heads, self.heads, device) if self.alibi else None

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
        inputs = (q_bnsd, k_bmtd, v_bmtd)
        if torch.compiler.is_compiling() and self.prepared is not None:
            return self._attend(inputs, self.prepared, None)
        kind, queries, device = self.backend(q_bnsd), q_bnsd.shape[2], q_bnsd.device
        mask = self.dropout.mask(info, device, self.heads.start) if self.dropout.active else None
        drops = mask is not None and kind is not AttentionKind.fused
        if kind is AttentionKind.fused_softmax or drops or self.explicit:
            return self._explicit(*inputs, info, mask, sinks_n)
        known = self._inputs(kind, q_bnsd, queries, k_bmtd.shape[2], info)
        if kind is AttentionKind.flash:
            apart = None
            if (starts_bs := info.document_starts) is not None:
                known_bs = starts_bs if info.host_document_starts is None else info.host_document_starts.tensor
                apart = _DOCUMENTS.get(info, None, lambda: flash_document_bounds(known_bs, device))
            return flash_attention(*inputs, known.slopes_n, self.window, apart)
        return self._attend(inputs, known, mask)

    def _attend(self, inputs: tuple[Tensor, Tensor, Tensor], known: CoreInputs, mask: DropoutMask | None) -> Tensor:
        match known.kind:
            case AttentionKind.fused:
                return attention(*inputs, known.slopes_n, known.places_s, known.starts_bs, mask)
            case AttentionKind.augmented:
                assert known.slopes_n is not None
                return augmented_attention(*inputs, known.slopes_n)
            case AttentionKind.flex:
                assert known.blocks is not None
                return flex_attention(*inputs, known.blocks, known.slopes_n, known.places_s)
            case AttentionKind.cudnn:
                return cudnn_attention(*inputs, known.bias)
        return masked_attention(*inputs, known.bias)

    def blockwise(self, info: BatchInfo, device: torch.device) -> BlockAttention:
        """The same function for blocks of queries and keys, in plain PyTorch.

        Args:
            info: description of the micro-batch.
            device: device of the queries.
        """
        mask = self.dropout.mask(info, device, self.heads.start) if self.dropout.active else None
        return BlockAttention(self.slopes(device), self.window, self.softcap, mask)

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
