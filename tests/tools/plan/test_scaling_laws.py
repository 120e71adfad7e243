"""Published scaling laws against values in their papers."""

from __future__ import annotations

import numpy as np
import pytest

from megads.tools.plan.budget import LAWS

GOPHER_FLOPS = 5.76e23
"""Gopher's and Chinchilla's compute (Hoffmann et al. 2022, section 1)."""


def test_hoffmann_gophers_budget() -> None:
    """Catches a wrong coefficient: by approach 3 the best model for Gopher's compute has 40 B parameters."""
    law = LAWS["hoffmann2022"]
    assert law.best(GOPHER_FLOPS)[0] == pytest.approx(40e9, rel=0.02)
    assert law.size_exponent == pytest.approx(0.46, abs=0.005), "the paper's table 2"


def test_epoch_agrees_with_chinchilla() -> None:
    """Catches the same in Epoch's fit of about 20 tokens per parameter: Chinchilla has 70 B and 1.4 T."""
    law = LAWS["epoch2024"]
    parameters, tokens = law.best(GOPHER_FLOPS)
    assert parameters == pytest.approx(70e9, rel=0.05) and tokens == pytest.approx(1.4e12, rel=0.06)
    assert law.size_exponent == pytest.approx(0.5126, abs=1e-4), "its table 2"


@pytest.mark.parametrize("name", LAWS)
def test_the_best_is_the_best(name: str) -> None:
    """Catches a wrong optimum: no other size reaches its loss with the same compute."""
    law = LAWS[name]
    for flops in (1e19, 1e22, 1e25):
        best, tokens = law.best(flops)
        assert 6 * best * tokens == pytest.approx(flops)
        sizes = best * np.geomspace(0.1, 10, 2001)
        losses = [law.loss(size, flops / 6 / size) for size in sizes.tolist()]
        assert sizes[int(np.argmin(losses))] == pytest.approx(best, rel=0.01)
        assert law.best_tokens(best) == pytest.approx(tokens)
        assert law.flops_of_loss(law.loss(best, tokens)) == pytest.approx(flops, rel=1e-6)
