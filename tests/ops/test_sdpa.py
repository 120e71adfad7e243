"""ALiBi as additional features of queries and keys, against the formula in fp64."""

from __future__ import annotations

import pytest
import torch

from megads.model.attention import alibi_slopes
from megads.ops.attention import _key_features, _query_features, attention_reference, augmented_attention
from megads.ops.config import AUGMENTED_LONGEST
from tests.ops.accuracy import check_error
from tests.ops.test_attention import both, eager, inputs


@pytest.mark.parametrize(("heads", "kv_heads", "length", "dim"), [(3, 3, 700, 24), (6, 2, 300, 40), (2, 1, 1, 8)])
def test_error_is_within_twice_torchs(heads: int, kv_heads: int, length: int, dim: int) -> None:
    """Catches a slope or position rounded to bf16, a scale that divides the bias, and slopes of another head."""
    slopes = alibi_slopes(heads)
    tensors = inputs(length, length, dim, torch.bfloat16, heads)
    tensors[1:3] = [x[:, :kv_heads] for x in tensors[1:3]]
    exact = both(attention_reference, [x.double() for x in tensors], slopes.double(), None, None)
    repeated = [tensors[0], *(x.repeat_interleave(heads // kv_heads, 1) for x in tensors[1:3]), tensors[3]]
    out, q, k, v = both(eager, repeated, slopes, None, None)
    theirs = [out, q, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (k, v))]
    for ours, their, right in zip(both(augmented_attention, tensors, slopes), theirs, exact, strict=True):
        if right.norm() == 0:  # one token: its probability is constant
            assert ours.norm() < 1e-6
        else:
            check_error(ours, their, right)


def test_augmented_features_hold_slope_and_position_exactly() -> None:
    """Catches the low-order part of a slope left out: up to 0.4% of the slope, too little to show in the error of one
    attention, but a different model."""
    slopes, dim, cpu = alibi_slopes(12), 40, torch.device("cpu")
    queries = _query_features(slopes, dim, cpu, torch.bfloat16).double()
    places = torch.tensor([1, 255, 256, 257, 4095, AUGMENTED_LONGEST - 1])
    keys = _key_features(AUGMENTED_LONGEST, cpu, torch.bfloat16).double()[places]
    wanted = slopes.double()[:, None] * places * dim**0.5
    torch.testing.assert_close(queries @ keys.T, wanted, rtol=2**-16, atol=0.0)
