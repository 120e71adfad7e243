"""Causal multi-head self-attention.

Shape suffixes: b = batch, s = query position, t = key position, n = heads, d = head dim, h = hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megads.batch import BatchInfo
from megads.model.alibi import causal_bias, hide_other_documents, slopes_of
from megads.model.config import AttentionKind, ModelConfig, Position
from megads.model.dropout import Dropout
from megads.model.per_batch import PerBatch
from megads.model.rotary import Rotary
from megads.ops.attention import attention
from megads.ops.gelu import kernel_takes

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
        kernel_allowed: model.attention leaves the choice, or asks for the kernel.
        fused: take megads' own kernel where it can compute this; dropout on the probabilities it cannot.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.alibi = config.position is Position.alibi
        self.heads = range(config.num_heads)
        self.kernel_allowed = config.attention is not AttentionKind.sdpa
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
        if self.fused and self.kernel_allowed and not self.dropout.active and kernel_takes(q_bnsd):
            slopes_n = slopes_of(self.num_heads, self.heads.start, self.heads.stop) if self.alibi else None
            return attention(q_bnsd, k_bntd, v_bntd, slopes_n, info.sequence_index, info.document_starts)
        if self.dropout.active:
            scores_bnst = (q_bnsd @ k_bntd.transpose(-1, -2)).float() * q_bnsd.shape[-1] ** -0.5
            scores_bnst = scores_bnst + self.bias(info, num_keys, device, torch.float32)
            probabilities_bnst = torch.softmax(scores_bnst, dim=-1).to(v_bntd.dtype)
            dropped_bnst: Tensor = self.dropout(probabilities_bnst, info, sequence_dim=2)
            return dropped_bnst @ v_bntd
        bias = self.bias(info, num_keys, device, bias_dtype(q_bnsd))
        return F.scaled_dot_product_attention(q_bnsd, k_bntd, v_bntd, attn_mask=bias)


class Attention(nn.Module):
    """Fused QKV projection, rotary positions if any, attention core, output projection.

    Rows of the QKV weight are ordered [head, (q, k, v), head dim], as in BLOOM: a contiguous share of the rows is a
    contiguous share of the heads.
    """

    def __init__(self, config: ModelConfig, seed: int, site: str) -> None:
        super().__init__()
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
            q_bsnd, k_bsnd = self.rotary(q_bsnd, k_bsnd, info)
            # A copy, so that what backward keeps of the values is not a view that keeps unturned queries and keys too.
            v_bsnd = v_bsnd.contiguous()
        context_bnsd = self.core(*(x.transpose(1, 2) for x in (q_bsnd, k_bsnd, v_bsnd)), info)
        out_bsh: Tensor = self.dense(context_bnsd.transpose(1, 2).reshape(batch, seq_len, width // 3))
        return out_bsh
