"""Who made a step non-finite, from what every rank saw."""

from __future__ import annotations

import pytest

from megads.engine.culprit import SHOWN, Symptoms, find_culprit
from megads.engine.interface import Culprit

FINE = Symptoms(rank=0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([FINE, Symptoms(1)], Culprit(0, "gradient norm"), id="nobody: the norm itself overflowed"),
        pytest.param(
            [Symptoms(0, forward_stage=0, gradients=((0, "a"),)), Symptoms(1, weights=("w",), forward_stage=0)],
            Culprit(1, "weights", ("w",)),
            id="bad weights before what follows from them",
        ),
        pytest.param(
            [Symptoms(0), Symptoms(1, forward_stage=1, gradients=((1, "b"),)), Symptoms(2, forward_stage=2)],
            Culprit(1, "forward", ("b",)),
            id="the earliest stage of a bad forward",
        ),
        pytest.param(
            [Symptoms(3, forward_stage=0), Symptoms(1, forward_stage=1), Symptoms(2, forward_stage=0)],
            Culprit(2, "forward"),
            id="stage before rank",
        ),
        pytest.param(
            [
                Symptoms(0, gradients=((0, "a"),)),
                Symptoms(1, gradients=((1, "b"),)),
                Symptoms(2, gradients=((1, "c"),)),
            ],
            Culprit(1, "backward", ("b",)),
            id="the latest stage of a bad backward",
        ),
        pytest.param(
            [Symptoms(0, gradients=((0, "a"), (3, "d"))), Symptoms(1, gradients=((1, "b"), (2, "c")))],
            Culprit(0, "backward", ("a", "d")),
            id="the latest virtual stage, which a V shape has on rank 0",
        ),
        pytest.param(
            [Symptoms(5, weights=("x",)), Symptoms(2, weights=("y",))],
            Culprit(2, "weights", ("y",)),
            id="the lowest rank of bad weights",
        ),
    ],
)
def test_first_in_the_order_of_computation(ranks: list[Symptoms], expected: Culprit) -> None:
    """Catches blame on a rank that only received what another one broke, whatever order the reports come in."""
    assert find_culprit(ranks) == expected
    assert find_culprit(ranks[::-1]) == expected


def test_names_are_capped() -> None:
    """Catches an event line with every parameter of a 70-layer model."""
    names = tuple(f"p{i}" for i in range(100))
    assert find_culprit([Symptoms(0, gradients=tuple((0, name) for name in names))]).parameters == names[:SHOWN]


def test_reads_as_a_sentence() -> None:
    """Catches a message that names nobody."""
    assert str(Culprit(3, "backward", ("a", "b"))) == "rank 3 in its backward (a, b)"
    assert str(Culprit(0, "gradient norm")) == "rank 0 in its gradient norm"
