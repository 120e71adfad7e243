"""Causal multi-head self-attention.

Shape suffixes: b = batch, s = query position, t = key position, n = heads, d = head dim, h = hidden size.
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
from megads.ops.gelu import kernel_takes
from megads.ops.softmax import masked_softmax

_DOCUMENT_BIASES: PerBatch[Tensor] = PerBatch()


def bias_dtype(queries: Tensor) -> torch.dtype:
    """Dtype of the additive mask that the fused kernels want beside these queries.

    The CPU kernel takes an fp32 mask beside bf16 queries, but computes garbage with one beside fp64 queries; CUDA
    kernels want the queries' dtype.
    """
    low = queries.device.type == "cpu" and queries.dtype.itemsize < 4
    return torch.float32 if low else queries.dtype


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d) + bias) v over a contiguous range of the model's heads.

    The bias of a head depends on its GLOBAL index, so the core knows which heads it holds; `narrow` keeps a share.
    Keys and values are those of the whole sample in the order of their places, queries those of the tokens that this
    rank holds.

    Attributes:
        kind: how it is to be computed.
        fused: take megads' own kernels: the one of the whole, or with dropout on the probabilities that of softmax.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.alibi = config.position is Position.alibi
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
        causal = causal_bias(*heads, num_keys, self.alibi, device, dtype, info.sequence_index)
        starts_bs = info.document_starts
        if starts_bs is None:
            return causal
        return _DOCUMENT_BIASES.get(info, (heads, self.alibi, dtype), lambda: hide_other_documents(causal, starts_bs))

    def forward(self, q_bnsd: Tensor, k_bntd: Tensor, v_bntd: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, n, s, d]."""
        num_keys, device = k_bntd.shape[2], q_bnsd.device
        # There is no kernel of attention for GPUs: torch's are as good there.
        fused = self.fused and self.kind is not AttentionKind.sdpa and kernel_takes(q_bnsd) and device.type == "cpu"
        starts_bs = info.document_starts
        slopes_n = slopes_of(self.num_heads, self.heads.start, self.heads.stop) if self.alibi and fused else None

        def soften(scores_bnst: Tensor) -> Tensor:
            scale = q_bnsd.shape[-1] ** -0.5
            if fused:
                return masked_softmax(scores_bnst, scale, slopes_n, info.sequence_index, starts_bs, fused=True)
            biased_bnst = scores_bnst.float() * scale + self.bias(info, num_keys, device, torch.float32)
            return torch.softmax(biased_bnst, dim=-1).to(v_bntd.dtype)

        if self.dropout.active or (fused and self.kind is AttentionKind.fused_softmax):
            drop = functools.partial(self.dropout, info=info, sequence_dim=2)
            return explicit_attention(q_bnsd, k_bntd, v_bntd, soften, drop)
        if fused:
            return attention(q_bnsd, k_bntd, v_bntd, slopes_n, info.sequence_index, starts_bs)
        bias = self.bias(info, num_keys, device, bias_dtype(q_bnsd))
        return F.scaled_dot_product_attention(q_bnsd, k_bntd, v_bntd, attn_mask=bias)


class Attention(nn.Module):
    """Fused QKV projection, rotary positions if any, attention core, output projection.

    Rows of the QKV weight are ordered [head, (q, k, v), head dim], as in BLOOM: a contiguous share of the rows is a
    contiguous share of the heads.

    Attributes:
        fused: take megads' own kernel for rotary positions.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.fused = False
        self.head_dim = config.head_dim
        rotates = config.position is Position.rope
        self.rotary = Rotary(config.head_dim, config.rope_theta) if rotates else None
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.core: nn.Module = AttentionCore(config, seed, f"{site}.core")
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_bsh: Tensor, info: BatchInfo) -> Tensor:
        """Returns [b, s, h]."""
        qkv = self.qkv(hidden_bsh)
        batch, seq_len, width = qkv.shape
        qkv_bsn3d = qkv.view(batch, seq_len, width // (3 * self.head_dim), 3, self.head_dim)
        q_bsnd, k_bsnd, v_bsnd = qkv_bsn3d.unbind(dim=3)
        if self.rotary is not None:
            q_bsnd, k_bsnd = self.rotary(q_bsnd, k_bsnd, info, self.fused)
            # A copy, so that what backward keeps of the values is not a view that keeps unturned queries and keys too.
            v_bsnd = v_bsnd.contiguous()
        context_bnsd = self.core(*(x.transpose(1, 2) for x in (q_bsnd, k_bsnd, v_bsnd)), info)
        out_bsh: Tensor = self.dense(context_bnsd.transpose(1, 2).reshape(batch, seq_len, width // 3))
        return out_bsh
