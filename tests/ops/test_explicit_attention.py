"""Explicit attention, with scores in memory, and a block of fused kernels, against torch's operators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import AttentionKind, ModelConfig, Position
from megads.model.gpt import Block, use_kernels
from megads.ops.config import FUSED
from megads.ops.dropout import DropoutMask, site_key, threshold_of
from megads.ops.softmax import MaskedSoftmax, explicit_attention

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
def test_the_core_with_kernels_equals_plain_torch(position: Position, dropout: float, shared: int) -> None:
    """Catches slopes or dropout masks of the wrong heads, an ignored document boundary, position or scale, and a
    dropout mask that depends on the kernel, in the fused attention and softmax kernels."""
    config = replace(CONFIG, position=position, attention_dropout=dropout)
    for places in (WHOLE, HALF):
        info = BatchInfo(torch.tensor([3, 2**40]), document_starts=STARTS[:, places], sequence_index=places, seq_len=40)
        found = []
        for kind in (AttentionKind.sdpa, AttentionKind.fused_softmax, AttentionKind.fused):
            core = AttentionCore(replace(config, attention=kind), 7, "core")
            core.narrow(shared - 1, shared)
            core.kernels = FUSED
            found.append(core_gradients(core, info, len(places)))
        for expected, softmax, whole in zip(*found, strict=True):
            torch.testing.assert_close(softmax, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


def test_plain_dropout_gradients_equal_autograd() -> None:
    """Catches a gradient without the dropout mask or its scale, or wrong for shared keys, in fp64 against autograd."""
    q, k, v = (torch.randn(2, n, 6, 4, dtype=torch.float64, requires_grad=True) for n in (6, 3, 3))
    mask = DropoutMask(site_key(0, "core"), threshold_of(0.4), torch.tensor([4, 5]), first_head=2)
    bias = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
    keep = mask.keep(6, torch.arange(6), 6) * mask.scale
    weights = (q @ k.repeat_interleave(2, 1).mT * 0.5 + bias).softmax(-1)
    grad = torch.randn(2, 6, 6, 4, dtype=torch.float64)
    expected = weights * keep @ v.repeat_interleave(2, 1)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    out = explicit_attention(q, k, v, MaskedSoftmax(0.5, lambda: bias), mask)
    torch.testing.assert_close(out, expected)
    for found, right in zip(torch.autograd.grad(out, (q, k, v), grad), wanted, strict=True):
        torch.testing.assert_close(found, right)


def test_backward_keeps_probabilities_and_nothing_else_of_their_size() -> None:
    """Catches a mask, dropped probabilities or fp32 scores that are saved for the backward pass."""
    q, k, v = (torch.randn(1, 2, 64, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask, kept = DropoutMask(1, threshold_of(0.4), torch.tensor([4])), []
    bias = torch.zeros(1, 1, 64, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        explicit_attention(q, k, v, MaskedSoftmax(0.5, lambda: bias), mask)
    assert sorted(kept)[-1] == 2 * 64 * 64 * 2 and sum(kept) == 2 * 64 * 64 * 2 + 3 * q.nbytes


def test_grouped_heads_read_their_own_keys() -> None:
    """Catches queries that attend to the keys of another group of heads."""
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    expected = (q @ k.repeat_interleave(2, 1).mT).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(explicit_attention(q, k, v, MaskedSoftmax(1.0, lambda: torch.zeros(()))), expected)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("position", [Position.alibi, Position.rope])
def test_a_block_of_kernels_equals_plain_torch(position: Position) -> None:
    """Catches a residual without its gradient, a norm without its gain, and rotary angles not inverted in backward."""
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
