"""The attention kernel against the formula in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megads.batch import BatchInfo
from megads.model.attention import AttentionCore
from megads.model.config import AttentionKind, ModelConfig, Position
from megads.ops.attention import NOTHING_DROPPED, attention, attention_reference
from megads.ops.config import FUSED
from megads.ops.dropout import DropoutMask, site_key, threshold_of
from tests.ops.accuracy import check_error, check_errors, check_threads, denormals, outputs_and_gradients

pytestmark = pytest.mark.usefixtures("kernels")


def inputs(
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    heads: int = 3,
    scale: float = 1.0,
    key_heads: int | None = None,
) -> list[Tensor]:
    """Returns queries, keys, values and the gradient of the output; views whose rows are not adjacent."""
    generator = torch.Generator().manual_seed(queries + keys)
    shared = key_heads or heads
    sizes = ((queries, heads), (keys, shared), (keys, shared), (queries, heads))
    found = (torch.randn(2, *size, dim + 2, dtype=torch.float64, generator=generator) for size in sizes)
    return [(scale * x).to(dtype)[..., :dim].transpose(1, 2) for x in found]


def both(compute: Any, tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    """Returns the output and the gradients of queries, keys and values."""
    return outputs_and_gradients(lambda *leaves: compute(*leaves, *rest), tensors[:3], tensors[3])


def eager(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> Tensor:
    """Computes the formula in the dtype of the inputs, with the softmax in fp32 as everywhere."""
    slopes, places, starts = rest
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    places = torch.arange(q.shape[2]) if places is None else places
    distance = torch.arange(k.shape[2]) - places[:, None]
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if slopes is not None:
        scores = scores + slopes[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, float("-inf"))
    if starts is not None:
        scores = scores.masked_fill((torch.arange(k.shape[2]) < starts[:, :, None])[:, None], float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


PLACES = torch.cat([torch.arange(0, 70), torch.arange(210, 280)])
STARTS = torch.stack([torch.arange(200) // 37 * 37, torch.arange(200) // 90 * 90])
SLOPES = torch.tensor([0.5, 0.01, 0.002])
CASES: dict[str, tuple[int, int, int, Tensor | None, Tensor | None, Tensor | None]] = {
    "one token": (1, 1, 8, SLOPES, None, None),
    "odd sizes": (131, 131, 9, SLOPES, None, None),
    "whole blocks": (192, 192, 64, SLOPES, None, None),
    "wide heads, no bias": (100, 100, 80, None, None, None),
    "context rank": (140, 280, 16, SLOPES, PLACES, None),
    "documents": (200, 200, 24, SLOPES, None, STARTS),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_error_is_within_twice_torchs(name: str, dtype: torch.dtype) -> None:
    """Catches wrong masks at block boundaries, wrong slopes, positions or documents, and bf16 instead of fp32."""
    queries, keys, dim, slopes, places, starts = CASES[name]
    tensors = inputs(queries, keys, dim, dtype)
    doubles = [x.double() for x in tensors]
    exact = both(attention_reference, doubles, None if slopes is None else slopes.double(), places, starts)
    found = both(attention, tensors, slopes, places, starts)
    for ours, theirs, right in zip(found, both(eager, tensors, slopes, places, starts), exact, strict=True):
        if right.norm() == 0:  # one token: its probability is constant
            assert ours.norm() < 1e-6
        else:
            check_error(ours, theirs, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_read_their_own_keys(key_heads: int, dtype: torch.dtype) -> None:
    """Catches keys of the wrong head, and gradients of keys and values that omit a query head of their group."""
    tensors = inputs(200, 200, 20, dtype, heads=6, key_heads=key_heads)
    slopes = torch.linspace(0.5, 0.001, 6)
    exact = both(attention_reference, [x.double() for x in tensors], slopes.double(), None, STARTS)
    found = both(attention, tensors, slopes, None, STARTS)
    check_errors(found, both(eager, tensors, slopes, None, STARTS), exact)
    q, k, v, _ = tensors
    with pytest.raises(RuntimeError, match="heads of keys and values must divide"):
        attention(q[:, :5], torch.cat([k, k], 1), torch.cat([v, v], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["odd sizes", "context rank", "documents"])
def test_dropout_matches_plain_torchs(name: str, dtype: torch.dtype) -> None:
    """Catches dropout bits of another row, block or head, a missing scale, probabilities normalized after dropout,
    gradients without the mask, and a mask that depends on how heads or blocks are distributed over threads."""
    queries, keys, dim, slopes, places, starts = CASES[name]
    mask = DropoutMask(site_key(1, "core"), threshold_of(0.3), torch.tensor([2**40 + 3, 5]), first_head=4)
    tensors = inputs(queries, keys, dim, dtype, heads=6, key_heads=2)
    slopes = None if slopes is None else slopes.repeat_interleave(2)
    rest = (None if slopes is None else slopes.double(), places, starts, mask)
    exact = both(attention_reference, [x.double() for x in tensors], *rest)
    found = both(attention, tensors, slopes, places, starts, mask)
    check_errors(found, both(attention_reference, tensors, slopes, places, starts, mask), exact)
    check_threads(lambda: both(attention, tensors, slopes, places, starts, mask), 1, 7)


def test_rows_without_keys_are_zero() -> None:
    """Catches NaN from an empty softmax: such a row, like padding, is zero and contributes to no gradient."""
    tensors = inputs(70, 70, 16, torch.float32)
    starts = torch.zeros(2, 70, dtype=torch.int64)
    starts[1, 3:69] = 70
    found = both(attention, tensors, None, None, starts)
    for ours, right in zip(found, both(attention_reference, tensors, None, None, starts), strict=True):
        torch.testing.assert_close(ours, right.nan_to_num(), rtol=1e-5, atol=1e-5)
    assert (found[0][1, :, 3:69] == 0).all() and (found[1][1, :, 3:69] == 0).all()


def test_far_keys_under_alibi_give_no_denormal_gradients() -> None:
    """Catches arithmetic with denormals: a backward pass in fp32 took 2 to 7 times as long as without ALiBi."""
    tensors = inputs(600, 600, 64, torch.float32)
    tensors[3] = tensors[3].contiguous()
    tensors[3][:, :, :-1] = 0  # only the last query contributes to the gradients of keys and values
    found = both(attention, tensors, SLOPES, None, None)
    assert [denormals(x) for x in found] == [0] * 4
    assert (found[3][:, 0, 0] == 0).all(), "of slope 0.5, key 0 is beyond what fp32 can tell from nothing"


def test_large_scores_are_exact_and_infinities_show() -> None:
    """Catches an exponential without the maximum subtracted, and a non-finite value that does not reach the output."""
    tensors = inputs(90, 90, 16, torch.float32, scale=60.0)
    exact = both(attention_reference, [x.double() for x in tensors])
    for ours, right in zip(both(attention, tensors), exact, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=2e-3, atol=2e-3 * float(right.abs().max()))
    for value in (float("nan"), float("inf")):
        broken = [x.clone() for x in inputs(90, 90, 16, torch.float32)]
        broken[1][0, 1, 40, 3] = value
        out = attention(*broken[:3])
        assert not out[0, 1, 40:].isfinite().all() and out[0, 1, :40].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 3])
def test_the_same_bits_at_any_number_of_threads(key_heads: int, dtype: torch.dtype) -> None:
    """Catches reductions whose order depends on how rows are split, or on whether heads or blocks of them are."""
    tensors = inputs(200, 200, 16, dtype, key_heads=key_heads)
    # Blocks are split from 3 threads on with one key head, from 5 with three.
    check_threads(lambda: both(attention, tensors, SLOPES, None, STARTS), 1, 2, 3, 5)


@pytest.mark.slow
def test_opcheck_passes() -> None:
    """Catches a wrong schema, fake kernel or autograd registration, which breaks torch.compile or autograd."""
    q, k, v, grad = inputs(20, 20, 8, torch.float32)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    starts, drawn = STARTS[:, :20].contiguous(), (torch.tensor([3, 4]), 7, 9000, 2)
    torch.library.opcheck(
        torch.ops.megads.attention_forward.default, (*leaves, SLOPES, None, starts, 0.3, *NOTHING_DROPPED)
    )
    out, statistics = torch.ops.megads.attention_forward(q, k, v, SLOPES, None, None, 0.3, *drawn)
    backward = (grad, q, k, v, out, statistics, SLOPES, None, None, 0.3, *drawn)
    torch.library.opcheck(torch.ops.megads.attention_backward.default, backward)
    compiled = both(torch.compile(lambda *tensors: attention(*tensors, SLOPES)), [q, k, v, grad])
    for ours, right in zip(compiled, both(attention, [q, k, v, grad], SLOPES), strict=True):
        torch.testing.assert_close(ours, right)


def test_empty_inputs_are_valid() -> None:
    """Catches a division by the number of blocks, which is zero for an empty batch."""
    q = torch.empty(0, 3, 5, 8, requires_grad=True)
    out = attention(q, q, q)
    out.sum().backward()
    assert out.shape == (0, 3, 5, 8) and q.grad is not None


@pytest.mark.parametrize("position", [Position.alibi, Position.learned])
@pytest.mark.parametrize("shared", [1, 2])
def test_the_attention_core_equals_plain_torch(position: Position, shared: int) -> None:
    """Catches slopes of the wrong heads, a missing mask, and a core whose dropout the kernel ignores."""
    config = ModelConfig(hidden_size=24, num_heads=6, position=position)
    tensors = inputs(40, 40, 4, torch.float32, heads=6 // shared)
    info = BatchInfo(torch.arange(2), document_starts=STARTS[:, :40] // 37 * 10)
    core = AttentionCore(config, 0, "core")
    core.narrow(shared - 1, shared)
    expected = core(*tensors[:3], info)
    core.kernels = FUSED
    torch.testing.assert_close(core(*tensors[:3], info), expected, rtol=1e-5, atol=1e-5)
    chosen = AttentionCore(replace(config, attention=AttentionKind.sdpa), 0, "core")
    chosen.narrow(shared - 1, shared)
    chosen.kernels = FUSED
    assert torch.equal(chosen(*tensors[:3], info), expected)
    core.dropout.p = 0.5
    assert not torch.allclose(core(*tensors[:3], info), expected, atol=1e-2)


def test_hidden_key_blocks_are_not_computed() -> None:
    """Catches key blocks computed although no query sees them: their NaN would reach the output as 0 * NaN."""
    q, k, v, _ = inputs(64, 256, 16, torch.float32)
    k[:, :, 64:] = v[:, :, 64:] = float("nan")
    expected = F.scaled_dot_product_attention(q, k[:, :, :64], v[:, :, :64], is_causal=True)
    torch.testing.assert_close(attention(q, k, v), expected, rtol=1e-5, atol=1e-5)


def test_keys_before_every_document_start_are_not_computed() -> None:
    """Catches a window that is masked but computed: NaN in hidden blocks of keys would reach the results."""
    tensors = inputs(256, 256, 16, torch.float32)
    starts = (torch.arange(256) - 20).clamp(min=64).expand(2, -1)
    expected = both(attention_reference, tensors, SLOPES, None, starts)
    for x in tensors[1:3]:
        x[:, :, :64] = float("nan")
    for ours, right in zip(both(attention, tensors, SLOPES, None, starts), expected, strict=True):
        torch.testing.assert_close(ours, right.nan_to_num(), rtol=1e-5, atol=1e-5)
