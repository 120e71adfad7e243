"""FlexAttention's scores and masks against the formula in fp64, as far as a CPU runs them.

Its operators run in eager mode here; the forward pass is also compiled, as on a GPU, where the block mask decides which
keys are read.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as plain_operator

from megads.ops.attention import FLEX_BLOCK, _alibi, _attend, attention_reference, document_block_mask, flex_attention
from tests.ops.accuracy import check_error, relative_error
from tests.ops.test_attention import both, eager, inputs

SLOPES = torch.linspace(0.5, 0.001, 6)
PLACES = torch.cat([torch.arange(0, 70), torch.arange(210, 280)])
STARTS = torch.stack([torch.arange(300) // 37 * 37, torch.arange(300) // 90 * 90])
CASES: dict[str, tuple[int, int, Tensor | None, int | None, Tensor | None, Tensor | None]] = {
    "no bias": (300, 300, None, None, None, None),
    "alibi": (256, 256, SLOPES, None, None, None),
    "window": (300, 300, SLOPES, 50, None, None),
    "documents": (300, 300, SLOPES, None, None, STARTS),
    "documents and a window": (300, 300, SLOPES, 30, None, STARTS),
    "context rank": (140, 280, SLOPES, 100, PLACES, STARTS[:, PLACES]),
}


def first_seen(queries: int, window: int | None, places: Tensor | None, starts: Tensor | None) -> Tensor:
    """Returns the first visible key of every query, [b, s]."""
    places = torch.arange(queries) if places is None else places
    first = torch.zeros(2, queries, dtype=torch.int64) if starts is None else starts
    return first if window is None else torch.maximum(first, places - window + 1)


@pytest.mark.quick("alibi-dtype1", "documents and a window-dtype4", "context rank-dtype5")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in CASES), ("alibi", torch.bfloat16), ("documents and a window", torch.bfloat16)],
)
def test_error_is_within_twice_torchs(name: str, dtype: torch.dtype) -> None:
    """Catches a bias of the wrong head, of the wrong sign or by a rank's local positions, a window off by one, a
    document boundary that is ignored, and keys of another group."""
    queries, keys, slopes, window, places, starts = CASES[name]
    q, k, v, _ = inputs(queries, keys, 24, dtype, heads=6, key_heads=2)
    mask = document_block_mask(queries, keys, q.device, window, places, starts)
    first = first_seen(queries, window, places, starts)
    exact_slopes = None if slopes is None else slopes.double()
    exact = attention_reference(q.double(), k.double(), v.double(), exact_slopes, places, first)
    theirs = eager(q, k, v, slopes, places, first)
    check_error(flex_attention(q, k, v, mask, slopes, places), theirs, exact)


@pytest.mark.parametrize("name", ["documents and a window", "context rank"])
def test_flex_attention_gradients_match_the_reference(name: str) -> None:
    """Catches a score or a mask that FlexAttention cannot differentiate.

    PyTorch refuses gradients on a CPU, but has the operator: it is called without the front end that refuses.
    """
    queries, keys, _, window, places, starts = CASES[name]
    tensors = inputs(queries, keys, 16, torch.float32, heads=6, key_heads=2)
    mask = document_block_mask(queries, keys, torch.device("cpu"), window, places, starts)
    add = _alibi(SLOPES, places)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return plain_operator(q, k, v, add, mask.as_tuple(), 0.25, {"PRESCALE_QK": False})[0]

    found = both(torch.compile(attend, backend="eager", fullgraph=True), tensors)
    rest = (SLOPES.double(), places, first_seen(queries, window, places, starts))
    exact = both(attention_reference, [x.double() for x in tensors], *rest)
    for ours, right in zip(found, exact, strict=True):
        assert relative_error(ours, right) < 1e-6


@pytest.mark.parametrize("queries", [127, 128, 384, 400])
@pytest.mark.parametrize("window", [None, 1, 128, 200])
@pytest.mark.parametrize("packed", [False, True])
def test_block_masks_list_exactly_the_visible_blocks(queries: int, window: int | None, packed: bool) -> None:
    """Catches a block that is omitted though a query sees one of its keys, and one listed as full that has masked keys:
    only compiled kernels use the blocks, eager operators do not."""
    starts = torch.stack([torch.arange(queries) // 130 * 130, torch.arange(queries) // 256 * 256]) if packed else None
    mask = document_block_mask(queries, queries, torch.device("cpu"), window, None, starts)
    keys = torch.arange(queries)
    first = first_seen(queries, window, None, starts)
    seen = (keys <= torch.arange(queries)[:, None]) & (keys >= first[:, :, None])
    blocks = -(-queries // FLEX_BLOCK)
    room = torch.zeros(2, blocks * FLEX_BLOCK, blocks * FLEX_BLOCK, dtype=torch.bool)
    room[:, :queries, :queries] = seen
    tiles = room.unflatten(2, (blocks, FLEX_BLOCK)).unflatten(1, (blocks, FLEX_BLOCK)).transpose(2, 3)
    some, whole = (dense(*listed, blocks) for listed in ((mask.kv_num_blocks, mask.kv_indices), full_blocks(mask)))
    assert torch.equal((some | whole).expand(2, -1, -1) & tiles.any((-1, -2)), tiles.any((-1, -2)))
    assert torch.equal(whole.expand(2, -1, -1), tiles.all((-1, -2)))
    assert not (some & whole).any()


def full_blocks(mask: Any) -> tuple[Tensor, Tensor]:
    return mask.full_kv_num_blocks, mask.full_kv_indices


def dense(count: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Returns the listed blocks as a mask, bool [b, i, j]."""
    named = torch.arange(blocks) < count[:, 0, :, None]
    return torch.zeros(named.shape, dtype=torch.bool).scatter(2, indices[:, 0].long(), named)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_compiled_forward_equals_the_reference(name: str) -> None:
    """Catches blocks listed in an order that the kernel does not read, and closures that the compiler refuses."""
    queries, keys, slopes, window, places, starts = CASES[name]
    q, k, v, _ = inputs(queries, keys, 32, torch.float32, heads=6, key_heads=2)
    mask = document_block_mask(queries, keys, q.device, window, places, starts)
    add = None if slopes is None else _alibi(slopes, places)
    found = _attend(True)(q, k, v, score_mod=add, block_mask=mask, enable_gqa=True)
    rest = (None if slopes is None else slopes.double(), places, first_seen(queries, window, places, starts))
    assert relative_error(found, attention_reference(q.double(), k.double(), v.double(), *rest)) < 1e-6
