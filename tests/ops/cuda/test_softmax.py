"""The CUDA softmax kernels, lane by lane, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megads.ops.dropout import DropoutMask, site_key, threshold_of
from tests.ops.accuracy import check_error
from tests.ops.cuda.lanes import Lanes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.4


def hidden_of(
    shape: torch.Size, places_s: Tensor | None, starts_bs: Tensor | None, padding_bt: Tensor | None
) -> Tensor:
    """Masked keys of each query, [b, 1, s, t]."""
    batch, _, queries, keys = shape
    places_s = torch.arange(queries) if places_s is None else places_s
    starts_bs = torch.zeros(batch, queries, dtype=torch.int64) if starts_bs is None else starts_bs
    keys_t = torch.arange(keys)
    hidden_bst = (keys_t > places_s[:, None]) | (keys_t < starts_bs[:, :, None])
    if padding_bt is not None:
        hidden_bst = hidden_bst | padding_bt.bool()[:, None]
    return hidden_bst[:, None]


def reference(scores: Tensor, slopes: Tensor | None, places: Tensor | None, hidden: Tensor) -> Tensor:
    """Softmax by its formula, in the dtype of the scores."""
    queries, keys = scores.shape[-2:]
    distance_st = torch.arange(keys) - (torch.arange(queries) if places is None else places)[:, None]
    biased = scores * SCALE
    if slopes is not None:
        biased = biased + (slopes[:, None, None] * distance_st).to(scores.dtype)
    return biased.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)


def ours(
    scores: Tensor,
    grad: Tensor,
    slopes: Tensor | None = None,
    places: Tensor | None = None,
    starts: Tensor | None = None,
    padding: Tensor | None = None,
    mask: DropoutMask | None = None,
    **how: int,
) -> tuple[Tensor, ...]:
    """Output and gradient of the scores; with dropout also the output after dropout, from forward and backward."""
    with Lanes("softmax", **how) as lanes:
        out, grad_scores = (lanes.empty(scores.shape, scores.dtype) for _ in range(2))
        left = [None if mask is None else lanes.empty(scores.shape, scores.dtype) for _ in range(2)]
        shape, drawn = (scores.dtype, *scores.shape, SCALE), (None, 0, 0, 0) if mask is None else mask.arguments
        lanes.call("softmax_forward", *shape, slopes, places, starts, padding, scores, out, *drawn, left[0])
        lanes.call("softmax_backward", *shape, places, starts, grad, out, grad_scores, *drawn, left[1])
        return out.clone(), grad_scores.clone(), *(x.clone() for x in left if x is not None)


def check(scores: Tensor, grad: Tensor, **arguments: Tensor | int) -> None:
    """Compares with the formula in fp64; the error of the formula in the dtype sets the bound."""
    masks = {name: arguments.get(name) for name in ("places", "starts", "padding")}
    mask: DropoutMask | None = arguments.get("mask")
    hidden = hidden_of(scores.shape, *masks.values())
    found = ours(scores, grad, **arguments)
    results = []
    for dtype in (scores.dtype, torch.float64):
        leaf = scores.detach().to(dtype, copy=True).requires_grad_()
        out = reference(leaf, arguments.get("slopes"), masks["places"], hidden)
        left = out
        if mask is not None:
            rows = torch.arange(scores.shape[2]) if masks["places"] is None else masks["places"]
            left = out * mask.keep(scores.shape[1], rows, scores.shape[3]) * mask.scale
        (left * grad.to(dtype)).masked_fill(hidden, 0.0).sum().backward()
        results.append((out.detach(), leaf.grad.nan_to_num(), *[left.detach()] * (0 if mask is None else 2)))
    for mine, eager, exact in zip(found, *results, strict=True):
        if exact.any():
            check_error(mine, eager.nan_to_num(), exact.nan_to_num())
        else:
            assert not mine.any()


def inputs(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    scores, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return 4 * scores, grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys"), [(3, 1), (9, 9), (5, 40), (3, 515), (2, 1025)])
def test_error_is_within_twice_torchs(queries: int, keys: int, dtype: torch.dtype) -> None:
    """Catches wrong tails of odd rows, ALiBi slopes of other heads, masks off by one, arithmetic in bf16."""
    scores, grad = inputs(2, 3, queries, keys, dtype=dtype)
    slopes = torch.tensor([0.5, 0.0625, 2.0**-8])
    places = torch.arange(queries) * max(1, keys // queries)
    starts = torch.randint(0, keys, (2, queries)) % (places + 1)
    for number, more in enumerate(({}, {"places": places, "starts": starts})):
        check(scores, grad, slopes=slopes, **more, order=number, residue=number * 3, at_end=number)


@pytest.mark.parametrize(("keys", "dtype"), [(4100, torch.bfloat16), (24580, torch.float32), (24580, torch.float16)])
def test_long_rows_match_the_reference(keys: int, dtype: torch.dtype) -> None:
    """Catches errors that only occur with blocks of many warps, or with rows read in chunks."""
    scores, grad = inputs(1, 1, 2, keys, dtype=dtype)
    check(scores, grad, places=torch.tensor([keys - 1, keys - 77]), order=7, residue=1)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 3, 3, 9), torch.float32), ((2, 3, 2, 515), torch.bfloat16), ((1, 2, 2, 8200), torch.bfloat16)],
)
def test_dropout_draws_plain_torchs_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Catches random bits that differ from torch's path, packs that do not start at a counter's boundary, bits of
    another chunk of a long row, a gradient or output without the mask, and gradients of masked keys left unwritten."""
    scores, grad = inputs(*shape, dtype=dtype)
    mask = DropoutMask(site_key(1, "core"), threshold_of(0.3), torch.tensor([2**33 + 4, 7])[: shape[0]], first_head=5)
    places = torch.arange(shape[2]) * (shape[3] // shape[2]) + shape[3] // shape[2] - 1
    starts = (places // 3).expand(shape[0], -1).contiguous()
    for number, more in enumerate(({}, {"starts": starts})):
        check(scores, grad, places=places, mask=mask, **more, order=number, residue=number * 3, at_end=number)


def test_padding_and_rows_without_keys_are_zero() -> None:
    """Catches NaN for a row without visible keys, a masked key with nonzero probability, another sample's mask."""
    scores, grad = inputs(2, 2, 4, 11, dtype=torch.float32)
    padding = torch.zeros(2, 11, dtype=torch.uint8)
    padding[0, 5:], padding[1, :3] = 1, 1
    places, starts = torch.tensor([-1, 2, 12, 5]), torch.tensor([[0, 3, 1, 0], [0, 0, 0, 99]])
    check(scores, grad, places=places, starts=starts, padding=padding)
    out, grad_scores = ours(scores, grad, places=places, starts=starts, padding=padding)
    assert (out[:, :, 0] == 0).all() and (grad_scores[:, :, 0] == 0).all() and (out[0, :, 1] == 0).all()
    assert (out[1, :, 1, 3:] == 0).all() and (out[1, :, 3] == 0).all()


def test_extreme_scores_stay_finite_or_show() -> None:
    """Catches overflow in exp, -inf that becomes NaN, a NaN that vanishes, NaN read from masked keys."""
    infinity = float("inf")
    scores = torch.tensor([[1e30, 0.0, 0.0], [-infinity, 2.0, 1.0], [0.0, float("nan"), 0.0], [1.0, 2.0, float("nan")]])
    places = torch.tensor([2, 2, 2, 1])
    out, grad = ours(scores[None, None], torch.full((1, 1, 4, 3), float("nan")).tril(1), places=places)
    torch.testing.assert_close(out[0, 0, :2], (scores[:2] * SCALE).softmax(-1))
    assert out[0, 0, 2].isnan().all()
    torch.testing.assert_close(out[0, 0, 3], torch.cat([(scores[3, :2] * SCALE).softmax(-1), torch.zeros(1)]))
    assert grad[0, 0, 3, 2] == 0


def test_empty_inputs_launch_no_kernel() -> None:
    """Catches a kernel launch with zero blocks, which is an error."""
    for shape in ((0, 2, 3, 4), (1, 2, 3, 0)):
        assert ours(torch.empty(shape), torch.empty(shape))[0].shape == shape
