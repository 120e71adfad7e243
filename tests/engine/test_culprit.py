"""Root cause of a non-finite step, from what every rank observed."""

from __future__ import annotations

import pytest

from megads.engine.interface import Culprit
from megads.engine.train_engine import SHOWN, Symptoms, agree_on_culprit, find_culprit
from megads.runtime import distributed
from megads.runtime.distributed import encode, open_control_plane
from tests.distributed import run_ranks

FINE = Symptoms(rank=0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([FINE, Symptoms(1)], Culprit(0, "gradient norm"), id="nobody: the norm itself overflowed"),
        pytest.param(
            [Symptoms(0, forward_stage=0, backward_stage=0), Symptoms(1, weights=True, forward_stage=0)],
            Culprit(1, "weights"),
            id="bad weights before what follows from them",
        ),
        pytest.param(
            [Symptoms(0), Symptoms(1, forward_stage=1, backward_stage=1), Symptoms(2, forward_stage=2)],
            Culprit(1, "forward"),
            id="the earliest stage of a bad forward",
        ),
        pytest.param(
            [Symptoms(3, forward_stage=0), Symptoms(1, forward_stage=1), Symptoms(2, forward_stage=0)],
            Culprit(2, "forward"),
            id="stage before rank",
        ),
        pytest.param(
            [Symptoms(0, backward_stage=0), Symptoms(1, backward_stage=1), Symptoms(2, backward_stage=1)],
            Culprit(1, "backward"),
            id="the latest stage of a bad backward",
        ),
        pytest.param([Symptoms(5, weights=True), Symptoms(2, weights=True)], Culprit(2, "weights"), id="lowest rank"),
    ],
)
def test_the_culprit_is_first_in_the_order_of_computation(ranks: list[Symptoms], expected: Culprit) -> None:
    """Catches blame on a rank that only received non-finite values from another one, in any order of the reports."""
    assert find_culprit(ranks) == expected
    assert find_culprit(ranks[::-1]) == expected


ManyNames = dict[int, list[tuple[int, str]]]


def _agreed(weights: dict[int, list[str]], gradients: ManyNames) -> tuple[Culprit, int]:
    """The root cause, and the number of bytes that this rank sent in collectives."""
    control, sent = open_control_plane(), []

    def measured(value: object, kind: object) -> bytes:
        sent.append(len(encode(value, kind)))
        return encode(value, kind)

    distributed.encode = measured
    rank = control.rank
    found = agree_on_culprit(control, weights.get(rank, []), None, gradients.get(rank, []))
    return found, sum(sent)


@pytest.mark.distributed
def test_only_the_culprits_shown_names_are_sent() -> None:
    """Catches names of another rank than the root cause, an event with every parameter of a 70-layer model, the stage
    of a V-shaped schedule's first gradient instead of its last, and an all-gather of all names."""
    many: ManyNames = {0: [(0, "a"), (3, "d")], 1: [(stage % 3, f"blocks.{stage}.mlp") for stage in range(2000)]}
    for found, sent in run_ranks(_agreed, 2, {}, many):
        assert found == Culprit(0, "backward", ("a", "d")) and sent < 1000
    names = [f"blocks.{layer}.mlp" for layer in range(2000)]
    for found, sent in run_ranks(_agreed, 2, {1: names}, many):
        assert found == Culprit(1, "weights", tuple(names[:SHOWN])) and sent < 1000


def test_the_culprit_message_names_the_rank() -> None:
    """Catches a message that does not name the rank."""
    assert str(Culprit(3, "backward", ("a", "b"))) == "rank 3 in its backward (a, b)"
    assert str(Culprit(0, "gradient norm")) == "rank 0 in its gradient norm"
