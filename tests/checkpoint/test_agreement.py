"""What fails on one rank fails on all."""

from __future__ import annotations

import pytest

from megads.checkpoint.agreement import agreed, from_first, gather_to_all, gather_to_first, on_first, rank
from megads.errors import CheckpointError
from tests.distributed import run_ranks


def fail_on(failing: int) -> int:
    if rank() == failing:
        raise OSError(28, "No space left on device", "some/file")
    return rank()


def outcomes() -> list[object]:
    results: list[object] = [agreed(rank), gather_to_all(rank() * 10), gather_to_first(rank()), from_first(rank())]
    results.append(on_first(lambda: f"made by {rank()}"))
    for action in (lambda: agreed(lambda: fail_on(1)), lambda: on_first(lambda: fail_on(0))):
        try:
            results.append(action())
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.distributed
def test_ranks_agree() -> None:
    """Catches a failure that one rank raises while the others wait for it (a deadlock) or go on."""
    failures = [f"rank {index}: some/file: No space left on device" for index in (1, 0)]
    assert run_ranks(outcomes, 3) == [
        [index, [0, 10, 20], [0, 1, 2] if index == 0 else None, 0, "made by 0", *failures] for index in range(3)
    ]


def test_without_process_group() -> None:
    """Catches a tool on one process that needs a process group."""
    failure = "rank 0: some/file: No space left on device"
    assert outcomes() == [0, [0], [0], 0, "made by 0", 0, failure]
