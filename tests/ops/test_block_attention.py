"""Attention in blocks of keys equals attention over all keys at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megads.model.attention import alibi_slopes
from megads.ops import block_attention
from megads.ops.block_attention import BlockAttention, RunningSoftmax
from megads.ops.dropout import DropoutMask, threshold_of

HEADS, KV_HEADS, TOKENS, DIM = 6, 2, 24, 8
STARTS = torch.tensor([[0] * 24, [0] * 10 + [10] * 7 + [17] * 7])


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    sinks: Tensor


def inputs(dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return Inputs(*(draw(2, count, TOKENS, DIM) for count in heads), draw(HEADS))


def expected(given: Inputs, block: BlockAttention, starts_bs: Tensor | None, sinks: bool) -> list[Tensor]:
    """Output and gradients, from all scores at once and autograd."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (given.k, given.v))
    scores = given.q @ k.transpose(-1, -2) * DIM**-0.5
    if block.softcap is not None:
        scores = block.softcap * (scores / block.softcap).tanh()
    distance = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    if block.slopes_n is not None:
        scores = scores + block.slopes_n.to(scores.dtype)[:, None, None] * distance
    hidden = (distance > 0)[None]
    if block.window is not None:
        hidden = hidden | (distance <= -block.window)
    if starts_bs is not None:
        hidden = hidden | (torch.arange(TOKENS) < starts_bs[:, :, None])
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    if sinks:
        scores = torch.cat((scores, given.sinks[:, None, None].expand(2, HEADS, TOKENS, 1)), -1)
    weights = scores.softmax(-1)[..., :TOKENS]
    if block.dropout is not None:
        weights = weights * block.dropout.keep(HEADS, torch.arange(TOKENS), TOKENS) * block.dropout.scale
    out = weights @ v
    leaves = [given.q, given.k, given.v, *([given.sinks] if sinks else [])]
    return [out, *torch.autograd.grad(out, leaves, given.grad)]


QUERIES = [range(6), range(6, 15), range(15, 24)]


def in_blocks(
    given: Inputs, block: BlockAttention, starts_bs: Tensor | None, sinks: bool, order: list[range]
) -> list[Tensor]:
    """The same from blocks of keys, in any order."""
    q, k, v, grad = (x.detach() for x in (given.q, given.k, given.v, given.grad))
    softmax = RunningSoftmax(q, given.sinks.detach() if sinks else None)
    flash = block.is_flash(q, starts_bs)
    pairs = [pair for queries in QUERIES for keys in order for pair in block.pairs(queries, keys, flash)]

    def starts(queries: range) -> Tensor | None:
        return None if starts_bs is None else starts_bs[:, queries.start : queries.stop]

    for queries, keys in pairs:
        rows, at = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        part = block.forward(q[:, :, rows], k[:, :, at], v[:, :, at], queries, keys, starts(queries))
        softmax.add(rows, *part)
    delta, out = (grad * softmax.out_bnsd).sum(-1), softmax.out_bnsd.to(q.dtype)
    grads = [torch.zeros_like(x, dtype=block_attention.wide_dtype(x)) for x in (q, k, v)]
    for queries, keys in pairs:
        rows, at = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        found = block.backward(
            *(grad[:, :, rows], q[:, :, rows], k[:, :, at], v[:, :, at]),
            *(out[:, :, rows], softmax.lse_bns[:, :, rows], delta[:, :, rows], queries, keys, starts(queries)),
        )
        for total, some, part in zip(grads, (rows, at, at), found, strict=True):
            total[:, :, some] += part
    own = [-((given.sinks.detach()[:, None] - softmax.lse_bns).exp() * delta).sum((0, 2))] if sinks else []
    return [softmax.out_bnsd, *grads, *own]


MASK = DropoutMask(7, threshold_of(0.3), torch.tensor([3, 2**40]), 2)
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "alibi": {"slopes_n": alibi_slopes(HEADS)},
    "window": {"window": 5},
    "window of one key": {"window": 1},
    "capped": {"softcap": 1.5, "slopes_n": alibi_slopes(HEADS)},
    "dropout": {"dropout": MASK},
    "all": {"slopes_n": alibi_slopes(HEADS), "window": 7, "softcap": 2.0, "dropout": MASK},
}
LATE_FIRST = [range(15, 24), range(3), range(3, 15)]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_blocks_combine_to_attention_over_all_keys(
    feature: str, sinks: bool, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches parts that are not weighted, masks and biases counted from a block, queries that see no key of a block,
    and gradients without the derivative of a cap, of a sink or of dropout; blocks of four keys and of any order."""
    given, block = inputs(), BlockAttention(**FEATURES[feature])
    starts_bs = STARTS if documents else None
    exact = expected(given, block, starts_bs, sinks)
    for most, order in ((1024, [range(TOKENS)]), (4, [range(TOKENS)]), (1024, LATE_FIRST), (5, LATE_FIRST)):
        monkeypatch.setattr(block_attention, "KEYS_AT_ONCE", most)
        found = in_blocks(given, block, starts_bs, sinks, order)
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_sums_over_blocks_are_in_fp32() -> None:
    """Catches outputs, statistics and gradients that are rounded to bf16 between blocks."""
    given = inputs(torch.bfloat16)
    found = in_blocks(given, BlockAttention(), None, False, LATE_FIRST)
    assert {x.dtype for x in found} == {torch.float32}
    wide = Inputs(*(x.detach().double().requires_grad_() for x in (given.q, given.k, given.v, given.grad, given.sinks)))
    for x, y in zip(found, expected(wide, BlockAttention(), None, False), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("order", [[range(6), range(6, 15), range(15, 24)], LATE_FIRST])
def test_flash_attention_computes_the_blocks_that_it_can(sinks: bool, order: list[range]) -> None:
    """Catches FlashAttention with the causal mask of another block, its gradients by the statistics of one block, and a
    block that is whole to it but not to the sample."""
    given = inputs(torch.float32)
    assert BlockAttention().is_flash(given.q, None) and not BlockAttention().is_flash(given.q, STARTS)
    assert not any(BlockAttention(**FEATURES[name]).is_flash(given.q, None) for name in set(FEATURES) - {"causal"})
    assert BlockAttention().pairs(range(6, 15), range(6), flash=True) == [(range(6, 15), range(6))]
    found = in_blocks(given, BlockAttention(), None, sinks, order)
    wide = Inputs(*(x.detach().double().requires_grad_() for x in (given.q, given.k, given.v, given.grad, given.sinks)))
    for x, y in zip(found, expected(wide, BlockAttention(), None, sinks), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_hidden_scores_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches products with keys after all queries or beyond their windows, and pairs that are left out or repeated."""
    monkeypatch.setattr(block_attention, "KEYS_AT_ONCE", 4)
    assert BlockAttention().pairs(range(8), range(8, 16)) == []
    assert BlockAttention(window=4).pairs(range(8, 16), range(4)) == []
    assert BlockAttention(window=5).pairs(range(8, 16), range(8)) == [(range(8, 12), range(4, 8))]
    for window in (None, 1, 3, 9):
        for keys in (range(8), range(8, 16)):
            pairs = BlockAttention(window=window).pairs(range(8, 16), keys)
            computed = [(q, k) for queries, some in pairs for q in queries for k in some]
            seen = {(q, k) for q in range(8, 16) for k in keys if k <= q and (window is None or q - k < window)}
            assert len(set(computed)) == len(computed) and seen <= set(computed)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (3, 9), (8, 8), (13, 11)])
def test_a_block_of_a_dropout_mask_is_a_part_of_the_whole(first: int, count: int) -> None:
    """Catches elements that are counted from the block, or from the group of eight in which it begins."""
    places = torch.arange(6)
    whole = MASK.keep(3, places, 24)
    assert torch.equal(MASK.keep(3, places, count, first=first), whole[..., first : first + count])
