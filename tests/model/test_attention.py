"""Causal attention and rotary positions, against a second implementation with explicit loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megads.batch import BatchInfo
from megads.model.attention import Attention, AttentionCore
from megads.model.config import AttentionKind, ModelConfig, Position
from megads.model.rotary import Rotary, rotary_tables
from megads.ops.config import FUSED, TORCH
from megads.ops.rotary import rotate
from tests.model import naive

INFO = BatchInfo(sample_ids=torch.tensor([0, 1]))


def hot_attention(position: Position = Position.alibi, **changes: object) -> Attention:
    config = ModelConfig(hidden_size=24, num_heads=6, position=position, **changes)
    attention = Attention(config, 0, "blocks.0.attention").double()
    generator = torch.Generator().manual_seed(1)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4, generator=generator)
    return attention


def hidden(seq_len: int = 7) -> Tensor:
    return torch.randn(2, seq_len, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


FEATURES = {"num_kv_heads": 2, "window": 4}
# Rows are packed differently; the fourth token attends to fewer tokens than its window.
STARTS = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 3], [0, 1, 1, 1, 1, 1, 1, 7, 7]])
PACKED = BatchInfo(torch.tensor([0, 1]), document_starts=STARTS)


@pytest.mark.parametrize("info", [INFO, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("position", [Position.alibi, Position.rope])
def test_shared_keys_and_a_window_equal_the_naive_implementation(position: Position, info: BatchInfo) -> None:
    """Catches a query head that attends to another group's keys, and a window that is off by one, hides keys that the
    document mask allows or reveals keys that it hides."""
    attention, x = hot_attention(position, **FEATURES), hidden(9)
    weights = (attention.qkv.weight, attention.qkv.bias, attention.dense.weight, attention.dense.bias)
    config = ModelConfig(hidden_size=24, num_heads=6, position=position, **FEATURES)
    starts = [None, None] if info.document_starts is None else STARTS.tolist()
    rows = zip(x, starts, strict=True)
    expected = torch.stack([naive.attention(row, *weights, config, starts=at) for row, at in rows])
    torch.testing.assert_close(attention(x, info), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("info", [INFO, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("places", [None, [0, 1, 7, 8]], ids=["all", "a share"])
@pytest.mark.parametrize("window", [1, 4, 20])
@pytest.mark.parametrize("kind", [AttentionKind.fused, AttentionKind.fused_softmax])
def test_the_kernels_compute_the_same_with_shared_keys_and_a_window(
    kind: AttentionKind, window: int, places: list[int] | None, info: BatchInfo
) -> None:
    """Catches a window start that is off by one, counted in this rank's tokens, or that ignores the document's start;
    and key gradients that miss some of the query heads that share the keys."""
    config = ModelConfig(hidden_size=48, num_heads=6, num_kv_heads=2, window=window, attention=kind)
    index = None if places is None else torch.tensor(places)
    starts = info.document_starts
    held = starts if index is None or starts is None else starts[:, index]
    info = BatchInfo(info.sample_ids, document_starts=held, sequence_index=index, seq_len=9)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 6, len(places or range(9)), 8, generator=generator)
    inputs = [q, *(torch.randn(2, 2, 9, 8, generator=generator) for _ in range(2))]
    found = []
    for kernels in (TORCH, FUSED):
        core = AttentionCore(config, 0, "core")
        core.kernels = kernels
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = core(*leaves, info)
        out.backward(torch.arange(out.numel()).view(out.shape).sin())
        found.append([out, *(x.grad for x in leaves)])
    for fused, plain in zip(*reversed(found), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", Position)
def test_equals_the_naive_implementation(position: Position) -> None:
    """Catches a wrong scale, slope or mask, and a wrong order of the QKV rows ([head, (q, k, v), dim]) or of the heads.

    At 17 tokens torch runs its vectorized CPU kernel, which is silently wrong for an fp32 mask with fp64 queries.
    """
    attention, x = hot_attention(position), hidden(17)
    weights = (attention.qkv.weight, attention.qkv.bias, attention.dense.weight, attention.dense.bias)
    config = ModelConfig(hidden_size=24, num_heads=6, position=position)
    expected = torch.stack([naive.attention(row, *weights, config) for row in x])
    torch.testing.assert_close(attention(x, INFO), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, FEATURES], ids=["plain", "shared keys, window"])
def test_dropout_path_computes_the_same_attention(changes: dict) -> None:
    """Catches a dropout path that differs from the fused path: with almost no dropout they agree."""
    attention, x = hot_attention(attention_dropout=1e-12, **changes), hidden()
    assert attention.train().core.dropout.active
    torch.testing.assert_close(attention(x, INFO), attention.eval()(x, INFO), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_later_token_changes_no_earlier_output(dropout: float) -> None:
    """Catches a causal mask that is off by one or missing in one of the two paths."""
    attention, x = hot_attention(attention_dropout=dropout), hidden()
    before = attention(x, INFO)
    changed = x.clone()
    changed[:, 4] += 3.0
    after = attention(changed, INFO)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_gradients_flow_back_in_time_only() -> None:
    """Catches a backward pass that violates causality: an output has no gradient at later inputs."""
    attention, x = hot_attention(), hidden().requires_grad_()
    attention(x, INFO)[:, 3].sum().backward()
    assert x.grad is not None
    assert (x.grad[:, 4:] == 0).all() and (x.grad[:, :4] != 0).any(dim=-1).all()


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 6), (3, 6), (2, 2), (3, 3)])
def test_shares_of_the_heads_keep_global_slopes(size: int, kv_heads: int) -> None:
    """Catches ALiBi slopes of local head indices: the shards' outputs are exactly the slices of the full one."""
    config = ModelConfig(hidden_size=24, num_heads=6, num_kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, 5, 4, dtype=torch.float64, generator=generator) for n in (6, kv_heads, kv_heads))
    whole = AttentionCore(config, 0, "core")(q, k, v, INFO)
    width = 6 // size
    for rank in range(size):
        share = AttentionCore(config, 0, "core")
        share.narrow(rank, size)
        heads = slice(rank * width, (rank + 1) * width)
        kv = slice(rank * kv_heads // size, (rank + 1) * kv_heads // size)
        torch.testing.assert_close(share(q[:, heads], k[:, kv], v[:, kv], INFO), whole[:, heads])


def test_narrow_twice_narrows_the_share() -> None:
    """Catches a shard counted from the model's first head instead of the first local head."""
    core = AttentionCore(ModelConfig(hidden_size=24, num_heads=6), 0, "core")
    core.narrow(1, 2)
    core.narrow(2, 3)
    assert core.heads == range(5, 6)


def test_bf16_error_is_that_of_bf16() -> None:
    """Catches a softmax or mask in bf16: the error must stay within twice that of rounding inputs and output."""
    config = ModelConfig(hidden_size=64, num_heads=4)
    generator = torch.Generator().manual_seed(4)
    exact = [torch.randn(2, 4, 200, 16, dtype=torch.float64, generator=generator) for _ in range(3)]
    rounded = [x.bfloat16() for x in exact]
    core = AttentionCore(config, 0, "core")
    upcast = core(*(x.double() for x in rounded), INFO)
    error = (core(*rounded, INFO).double() - upcast).norm()
    rounding = (upcast.bfloat16().double() - upcast).norm()
    assert error <= 2 * rounding


def vectors(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[1, count, 1, 16]."""
    return torch.randn(1, count, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_products_depend_on_the_distance_alone() -> None:
    """Catches keys rotated in the opposite direction to queries, and angles that are not linear in the position."""
    q, k = vectors(2).unbind(dim=1)

    def product(query: int, key: int) -> float:
        tables = (rotary_tables(torch.tensor([at]), 16, 10000.0, torch.float64) for at in (query, key))
        turned_q, turned_k = (rotate(x[:, None], *t, TORCH) for x, t in zip((q, k), tables, strict=True))
        return float((turned_q * turned_k).sum())

    assert abs(product(105, 100) - product(5, 0)) < 1e-12
    assert abs(product(5, 0) - product(0, 5)) > 0.1 and abs(product(5, 0) - product(6, 0)) > 0.1


def test_far_positions_have_exact_angles() -> None:
    """Catches angles computed in fp32, with an error of 0.03 at position 10^6 for the highest frequency."""
    positions = torch.tensor([999_999, 1_000_000])
    cos, sin = rotary_tables(positions, 16, 500_000.0, torch.float32)
    angles = positions.double()[:, None] * 500_000.0 ** (-torch.arange(8).double() / 8)
    torch.testing.assert_close(cos[:, 0].double(), angles.cos(), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[:, 0].double(), angles.sin(), rtol=0, atol=1e-7)


def test_low_precision_rounds_once() -> None:
    """Catches multiplications and additions in bf16: the result must be that of fp32 arithmetic, rounded once."""
    q = vectors(200, torch.bfloat16)
    info = BatchInfo(torch.tensor([0]))
    turned, _ = Rotary(16, 10000.0)(q, q, info)
    exact, _ = Rotary(16, 10000.0)(q.double(), q.double(), info)
    assert turned.dtype is torch.bfloat16
    assert (turned.double() - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()


def test_a_rank_of_the_sample_takes_its_places() -> None:
    """Catches a rank that counts its positions from 0, and tables of one rank's positions given to another."""
    q, rotary = vectors(8), Rotary(16, 10000.0)
    whole, _ = rotary(q, q, BatchInfo(torch.tensor([0])))
    for places in (torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])):
        held = q[:, places]
        turned, _ = rotary(held, held, BatchInfo(torch.tensor([0]), sequence_index=places, seq_len=8))
        assert torch.equal(turned, whole[:, places])


@pytest.mark.parametrize(
    ("changes", "views"),
    [
        ({}, (True, True, True)),
        ({"num_kv_heads": 1}, (True, True, True)),
        ({"num_kv_heads": 2}, (False, False, False)),
        ({"position": Position.rope}, (False, False, False)),
        ({"position": Position.rope, "num_kv_heads": 2}, (False, False, False)),
    ],
)
def test_heads_are_all_views_or_all_copies(changes: dict[str, Any], views: tuple[bool, ...]) -> None:
    """Catches one of q, k and v that is the only view, which keeps the whole projection in memory for the backward
    pass, and copies where none are needed."""
    attention = hot_attention(**changes)
    projection = attention.qkv(hidden())
    parts = attention.heads(projection, INFO)
    here = projection.untyped_storage().data_ptr()
    assert tuple(part.untyped_storage().data_ptr() == here for part in parts) == views


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"position": Position.rope}])
def test_the_projections_gradient_is_one_cat_on_gpus(changes: dict[str, Any]) -> None:
    """Catches parts of more than four dimensions: torch's cat on GPUs copies those one by one, which is much slower."""
    attention = hot_attention(**changes)
    dims: list[int] = []

    class Cats(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cat.default:
                dims.extend(x.dim() for x in args[0])
            return func(*args, **(kwargs or {}))

    parts = attention.heads(attention.qkv(hidden()), INFO)
    with Cats():
        torch.autograd.backward(parts, [torch.randn_like(part) for part in parts])
    assert len(dims) >= 3 and max(dims) <= 4
