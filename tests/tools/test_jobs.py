"""Processes of a sweep or an evaluation on one machine, and SLURM jobs."""

from __future__ import annotations

import pytest

from megads.tools.jobs import machine_shares


@pytest.mark.parametrize(
    ("cores", "gpus", "parallel", "expected"),
    [
        (8, [], 1, [((), ())]),
        (8, [], 2, [((0, 1, 2, 3), ()), ((4, 5, 6, 7), ())]),
        (7, [], 3, [((0, 1), ()), ((2, 3), ()), ((4, 5), ())]),
        (4, ["2", "5", "6", "7"], 2, [((0, 1), ("2,5",)), ((2, 3), ("6,7",))]),
        (2, [], 3, [((0,), ()), ((1,), ()), ((0,), ())]),
    ],
)
def test_shares_do_not_overlap(cores: int, gpus: list[str], parallel: int, expected: list[object]) -> None:
    """Catches two processes that share a core or GPU needlessly, and a single one that gets part of the machine."""
    shares = machine_shares(range(cores), gpus, parallel)
    assert [(share.cores, tuple(share.variables.values())) for share in shares] == expected
