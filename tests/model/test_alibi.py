"""ALiBi's slopes and the additive attention mask."""

from __future__ import annotations

import math

import pytest
import torch

from megads.model.attention import alibi_slopes, causal_bias

CPU = torch.device("cpu")


def test_a_power_of_two() -> None:
    """Catches slopes that start at 1 or step by the wrong ratio: 8 heads have 1/2 to 1/256 (Press et al. 2021)."""
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).dtype is torch.float32
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_six_heads() -> None:
    """Catches a geometric sequence over 6 heads: they take the slopes of 4 heads, then the odd ones of 8."""
    assert alibi_slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_bloom_176b() -> None:
    """Catches BLOOM's 112 heads in another order: 64 slopes of 64 heads, then the first 48 odd ones of 128."""
    slopes = alibi_slopes(112)
    torch.testing.assert_close(slopes[:64], torch.tensor([2.0 ** (-8 * i / 64) for i in range(1, 65)]))
    of_128 = [2.0 ** (-8 * i / 128) for i in range(1, 129)]
    torch.testing.assert_close(slopes[64:], torch.tensor(of_128[0::2][:48]))
    assert torch.equal(slopes[:64], alibi_slopes(64))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 12, 96])
def test_slopes_are_distinct_and_within_bounds(num_heads: int) -> None:
    """Catches a head that repeats another's slope, and one that grows with distance."""
    slopes = alibi_slopes(num_heads)
    assert slopes.shape == (num_heads,)
    assert len(set(slopes.tolist())) == num_heads
    assert slopes.min() >= 2.0**-8 and slopes.max() < 1.0


def test_bias_is_slope_times_distance() -> None:
    """Catches a wrong sign, a transposed mask, a query that cannot see itself, and future keys that are visible."""
    bias = causal_bias(6, range(6), 5, True, CPU, torch.float32)
    slopes = alibi_slopes(6)
    assert bias.shape == (1, 6, 5, 5)
    for head in range(6):
        for query in range(5):
            for key in range(5):
                expected = float(slopes[head]) * (key - query) if key <= query else -math.inf
                assert bias[0, head, query, key] == expected


def test_a_range_of_heads_keeps_its_global_slopes() -> None:
    """Catches slopes that start with the first head's on every tensor-parallel rank."""
    whole = causal_bias(6, range(6), 7, True, CPU, torch.float32)
    assert torch.equal(causal_bias(6, range(2, 4), 7, True, CPU, torch.float32), whole[:, 2:4])


def test_without_alibi_the_bias_is_the_causal_mask() -> None:
    """Catches a distance bias in models with learned positions."""
    bias = causal_bias(4, range(4), 3, False, CPU, torch.float32)
    inf = math.inf
    assert bias.tolist() == [[[[0.0, -inf, -inf], [0.0, 0.0, -inf], [0.0, 0.0, 0.0]]]]


def test_equals_the_key_only_form_after_softmax() -> None:
    """Catches a bias that differs from BLOOM's slope * key by more than a constant per row."""
    scores = torch.randn(1, 6, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = torch.softmax(scores + causal_bias(6, range(6), 9, True, CPU, torch.float64), dim=-1)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    by_key = alibi_slopes(6).double()[:, None, None] * torch.arange(9, dtype=torch.float64)
    theirs = torch.softmax((scores + by_key).masked_fill(future, -math.inf), dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_low_precision_keeps_near_keys_exact() -> None:
    """Catches an absolute bias in bf16, which loses the differences between the nearest keys at position 2000."""
    row = causal_bias(8, range(1), 2048, True, CPU, torch.bfloat16)[0, 0, 2047].double()
    assert torch.equal(row[-100:], 0.5 * torch.arange(-99, 1, dtype=torch.float64))
