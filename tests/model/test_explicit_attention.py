"""Attention by scores in memory, and a block by fused kernels, against what torch's operators compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import AttentionKind, ModelConfig, Position
from megads.model.explicit_attention import explicit_attention
from megads.model.stages import Block, use_kernels

CONFIG = ModelConfig(hidden_size=24, num_heads=6, init_std=0.2)
STARTS = torch.stack([torch.arange(40) // 13 * 13, torch.zeros(40, dtype=torch.int64)])
WHOLE, HALF = torch.arange(40), torch.cat([torch.arange(10), torch.arange(30, 40)])


def core_gradients(core: AttentionCore, info: BatchInfo, queries: int) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    heads = len(core.heads)
    leaves = [torch.randn(2, heads, n, 4, generator=generator).requires_grad_() for n in (queries, 40, 40)]
    out = core(*leaves, info)
    out.backward(torch.randn(out.shape, generator=generator))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("position", [Position.alibi, Position.learned])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shared", [1, 2])
def test_the_softmax_kernel_in_the_core(position: Position, dropout: float, shared: int) -> None:
    """Catches slopes of the wrong heads, a forgotten border, place or scale, and a mask that follows the kernel."""
    config = replace(CONFIG, position=position, attention_dropout=dropout)
    for places in (WHOLE, HALF):
        info = BatchInfo(torch.arange(2), document_starts=STARTS[:, places], sequence_index=places, seq_len=40)
        found = []
        for kind in (AttentionKind.sdpa, AttentionKind.fused_softmax):
            core = AttentionCore(replace(config, attention=kind), 7, "core")
            core.narrow(shared - 1, shared)
            core.fused = True
            found.append(core_gradients(core, info, len(places)))
        for expected, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_heads_that_share_keys() -> None:
    """Catches queries that meet the keys of another group of heads."""
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)

    def soften(scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def keep(weights: Tensor) -> Tensor:
        return weights

    expected = (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(explicit_attention(q, k, v, soften, keep), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("position", [Position.alibi, Position.rope])
def test_a_block_of_kernels(position: Position) -> None:
    """Catches a residual that misses a gradient, a norm without its gain, angles turned the wrong way back."""
    config = replace(CONFIG, position=position, hidden_dropout=0.1, attention_dropout=0.1)
    results = []
    for fused in (False, True):
        block = Block(config, 0, 0)
        torch.manual_seed(0)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if fused:
            use_kernels(block)
        hidden = torch.randn(2, 40, 24, requires_grad=True)
        out = block(hidden, BatchInfo(torch.arange(2)))
        out.square().mean().backward()
        results.append([out.detach(), hidden.grad, *(p.grad for p in block.parameters())])
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
