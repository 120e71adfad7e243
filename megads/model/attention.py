"""Causal self-attention; several heads of queries may share one of keys and values (Ainslie et al. 2023).

Shape suffixes: b = batch, s = query position, t = key position, n = heads, m = heads of keys and values, g = heads of
queries that share one of them (n / m), d = head dim, h = hidden size.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.alibi import causal_bias, hide_other_documents, slopes_of
from megads.model.config import AttentionKind, ModelConfig, Position
from megads.model.dropout import Dropout
from megads.model.explicit_attention import explicit_attention
from megads.model.per_batch import PerBatch
from megads.model.rotary import Rotary
from megads.ops.attention import attention
from megads.ops.augmented_attention import augmented_attention
from megads.ops.eligible import kernel_takes
from megads.ops.softmax import masked_softmax

_DOCUMENT_BIASES: PerBatch[Tensor] = PerBatch()
_WINDOW_STARTS: PerBatch[Tensor] = PerBatch()


def bias_dtype(queries: Tensor) -> torch.dtype:
    """Dtype of the additive mask that the fused kernels want beside these queries.

    The CPU kernel takes an fp32 mask beside bf16 queries, but computes garbage with one beside fp64 queries; CUDA
    kernels want the queries' dtype.
    """
    low = queries.device.type == "cpu" and queries.dtype.itemsize < 4
    return torch.float32 if low else queries.dtype


def masked_attention(q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d) + bias) v with torch's kernel, [b, n, s, d]; bias as `AttentionCore.bias` makes it."""
    group = q_bnsd.shape[1] // k_bmtd.shape[1]
    if group > 1 and q_bnsd.device.type != "cpu":
        # Of CUDA's kernels that take a mask, only the one that has all scores in memory knows shared keys.
        k_bmtd, v_bmtd = k_bmtd.repeat_interleave(group, dim=1), v_bmtd.repeat_interleave(group, dim=1)
    shared = k_bmtd.shape[1] != q_bnsd.shape[1]
    return F.scaled_dot_product_attention(q_bnsd, k_bmtd, v_bmtd, attn_mask=bias, enable_gqa=shared)


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v over a contiguous range of the model's heads.

    The bias of a head depends on its GLOBAL index, so the core knows which heads it holds; `narrow` keeps a share.
    Keys and values are those of the whole sample in the order of their places, queries those of the tokens that this
    rank holds. Query head i sees key-value head i // g.

    Attributes:
        kind: how it is to be computed.
        fused: take megads' own kernels: the one of the whole, or with dropout on the probabilities that of softmax.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.alibi = config.position is Position.alibi
        self.window = config.window
        self.heads = range(config.num_heads)
        self.kind = config.attention
        self.fused = False
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

    def forward(self, q_bnsd: Tensor, k_bmtd: Tensor, v_bmtd: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, n, s, d]."""
        (_, _, queries, dim), num_keys, device = q_bnsd.shape, k_bmtd.shape[2], q_bnsd.device
        if self.kind is AttentionKind.augmented and q_bnsd.dtype is torch.bfloat16:
            own_slopes_n = slopes_of(self.num_heads, self.heads.start, self.heads.stop)
            return augmented_attention(q_bnsd, k_bmtd, v_bmtd, own_slopes_n)
        fused = self.fused and self.kind is not AttentionKind.sdpa and kernel_takes(q_bnsd)
        slopes_n = slopes_of(self.num_heads, self.heads.start, self.heads.stop) if self.alibi and fused else None
        starts_bs = self.starts(info, queries, device) if fused else None

        def soften(scores_bnst: Tensor) -> Tensor:
            scale = dim**-0.5
            if fused:
                return masked_softmax(scores_bnst, scale, slopes_n, info.sequence_index, starts_bs, fused=True)
            biased_bnst = scores_bnst.float() * scale + self.bias(info, num_keys, device, torch.float32)
            return torch.softmax(biased_bnst, dim=-1).to(v_bmtd.dtype)

        if self.dropout.active or (fused and self.kind is AttentionKind.fused_softmax):
            drop = functools.partial(self.dropout, info=info, sequence_dim=2)
            return explicit_attention(q_bnsd, k_bmtd, v_bmtd, soften, drop)
        if fused:
            return attention(q_bnsd, k_bmtd, v_bmtd, slopes_n, info.sequence_index, starts_bs)
        return masked_attention(q_bnsd, k_bmtd, v_bmtd, self.bias(info, num_keys, device, bias_dtype(q_bnsd)))


class Attention(nn.Module):
    """Fused QKV projection, rotary positions if any, attention core, output projection.

    Rows of the QKV weight are ordered [key-value head, (its g queries, k, v), head dim]: a contiguous share of the rows
    is a contiguous share of the heads, of queries, keys and values alike. Where every head has its own keys this is
    BLOOM's order.

    Attributes:
        fused: take megads' own kernel for rotary positions.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.fused = False
        self.head_dim, self.queries_per_kv = config.head_dim, config.queries_per_kv
        rotates = config.position is Position.rope
        self.rotary = Rotary(config.head_dim, config.rope_theta) if rotates else None
        self.qkv = nn.Linear(config.hidden_size, config.qkv_width, bias=config.bias)
        self.core: nn.Module = AttentionCore(config, seed, f"{site}.core")
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        context_bnsd = self.core(*(x.transpose(1, 2) for x in self._queries_keys_values(hidden_bsh, info)), info)
        out_bsh: Tensor = self.dense(context_bnsd.transpose(1, 2).flatten(2))
        return out_bsh

    def _queries_keys_values(self, hidden_bsh: Tensor, info: BatchInfo) -> tuple[Tensor, Tensor, Tensor]:
        """q [b, s, n, d], k and v [b, s, m, d]: views of one projection, or all three of them copies.

        What backward keeps of a view would keep the whole projection beside the copies.
        """
        qkv = self.qkv(hidden_bsh)
        batch, seq_len, width = qkv.shape
        parts = self.queries_per_kv + 2
        groups = width // (parts * self.head_dim)
        qkv_bsmpd = qkv.view(batch, seq_len, groups, parts, self.head_dim)
        q_bsnd, k_bsmd, v_bsmd = (x.flatten(2, 3) for x in qkv_bsmpd.split((parts - 2, 1, 1), dim=3))
        apart = groups > 1 and self.queries_per_kv > 1  # the queries of several groups: flatten has copied them
        if self.rotary is not None:
            q_bsnd, k_bsmd = self.rotary(q_bsnd, k_bsmd, info, self.fused)
        elif apart:
            k_bsmd = k_bsmd.contiguous()
        if self.rotary is not None or apart:
            v_bsmd = v_bsmd.contiguous()
        return q_bsnd, k_bsmd, v_bsmd
