"""What is drawn, against the distribution it should come from."""

from __future__ import annotations

import pytest
import torch

from megads.evaluate.sampling import Sampling, draws, next_tokens

PROBABILITIES = torch.tensor([0.02, 0.4, 0.08, 0.3, 0.2], dtype=torch.float64)
DRAWS = 20_000


def frequencies(sampling: Sampling) -> torch.Tensor:
    """How often each token comes, over as many rows as there are draws."""
    logits = PROBABILITIES.log().expand(DRAWS, -1)
    tokens = next_tokens(logits, draws(3, range(DRAWS), 0), sampling)
    return torch.bincount(tokens, minlength=len(PROBABILITIES)).double() / DRAWS


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    possible = expected > 0
    assert bool((found[~possible] == 0).all()), "a token was drawn that cannot be"
    return float(DRAWS * ((found - expected)[possible] ** 2 / expected[possible]).sum())


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), [0, 1, 2, 3, 4]),
        (Sampling(temperature=0.5), [0, 1, 2, 3, 4]),
        (Sampling(temperature=3.0), [0, 1, 2, 3, 4]),
        (Sampling(top_k=2), [1, 3]),
        (Sampling(top_k=50), [0, 1, 2, 3, 4]),
        (Sampling(top_p=0.65), [1, 3]),
        (Sampling(top_p=0.75), [1, 3, 4]),
        (Sampling(top_p=0.01), [1]),
        (Sampling(top_p=0.95, top_k=3, temperature=1.5), [1, 3, 4]),
    ],
)
def test_distribution(sampling: Sampling, kept: list[int]) -> None:
    """Catches a temperature that multiplies, a nucleus that leaves out the token that reaches top_p, probabilities
    that are not renormalised. The bound is the 0.999 quantile of chi-square with 4 degrees of freedom."""
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept] ** (1.0 / sampling.temperature)
    assert chi_square(frequencies(sampling), expected / expected.sum()) < 18.5


def test_the_test_of_the_distribution_can_fail() -> None:
    """Catches a statistic that accepts anything: one percent moved from a token to another is seen."""
    moved = PROBABILITIES + torch.tensor([0.01, -0.01, 0.0, 0.0, 0.0])
    assert chi_square(frequencies(Sampling()), moved) > 18.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_likeliest(dtype: torch.dtype) -> None:
    """Catches a division by temperature 0, and a draw where none is wanted."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(next_tokens(logits, torch.rand(6).double(), Sampling(temperature=0.0)), logits.argmax(-1))


def test_extreme_temperatures() -> None:
    """Catches NaN from infinities: almost 0 is greedy, and masked tokens never come at any temperature."""
    logits = torch.tensor([[30.0, 29.0, -torch.inf, 31.0]]).repeat(500, 1)
    uniform = draws(0, range(500), 0)
    assert set(next_tokens(logits, uniform, Sampling(temperature=1e-300)).tolist()) == {3}
    assert set(next_tokens(logits, uniform, Sampling(temperature=1e6)).tolist()) == {0, 1, 3}


def test_the_last_token_of_the_nucleus_is_the_last() -> None:
    """Catches a rounding of the cumulative sum that draws the first token beyond it."""
    logits = PROBABILITIES.log()[None]
    almost_one = torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)
    assert next_tokens(logits, almost_one, Sampling()).item() == 0
    assert next_tokens(logits, almost_one, Sampling(top_p=0.65)).item() == 3


def test_draws_are_a_function_of_seed_sequence_and_place() -> None:
    """Catches streams that repeat in other rows, places or seeds, and rows that depend on their neighbours."""
    assert torch.equal(draws(1, [4, 9], 2)[1:], draws(1, [9], 2))
    others = [draws(s, [q], p).item() for s in range(3) for q in range(3) for p in range(3)]
    assert len(set(others)) == 27
    many = torch.cat([draws(0, range(1000), place) for place in range(10)])
    assert many.min() >= 0.0 and many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.01 and abs(many.var() - 1 / 12) < 0.003
