"""What fails on one rank fails on all."""

from __future__ import annotations

import errno

import pytest

from megads.checkpoint.agreement import RanksFailed, agreed, on_first
from megads.errors import CheckpointError
from megads.runtime.control_plane import open_control_plane
from tests.distributed import run_ranks


def outcomes() -> list[object]:
    control = open_control_plane()

    def fail_on(failing: int) -> int:
        if control.rank == failing:
            raise OSError(28, "No space left on device", "some/file")
        return control.rank

    results: list[object] = [
        agreed(control, lambda: control.rank),
        on_first(control, lambda: f"by {control.rank}", str),
    ]
    for action in (lambda: agreed(control, lambda: fail_on(1)), lambda: on_first(control, lambda: fail_on(0), int)):
        try:
            results.append(action())
        except CheckpointError as error:
            results.append(str(error))
    return results


@pytest.mark.distributed
def test_ranks_agree() -> None:
    """Catches a failure that one rank raises while the others wait for it (a deadlock) or go on."""
    failures = [f"rank {index}: some/file: No space left on device" for index in (1, 0)]
    assert run_ranks(outcomes, 3) == [[index, "by 0", *failures] for index in range(3)]


def errnos_of_many() -> list[int]:
    control = open_control_plane()

    def fail() -> None:
        try:
            raise OSError(errno.EDQUOT if control.rank == 3 else errno.EACCES, "whatever the locale calls it", "a/file")
        except OSError as error:
            raise CheckpointError(f"cannot write: {error.strerror}") from error

    try:
        agreed(control, fail)
    except RanksFailed as error:
        assert "and 1 more ranks" in str(error)
        return sorted(error.errnos)
    return []


@pytest.mark.distributed
def test_errors_of_the_system_keep_their_numbers() -> None:
    """Catches a full disk of the fourth rank that fails, which the message does not name, or in another language."""
    assert run_ranks(errnos_of_many, 4) == [sorted([errno.EACCES, errno.EDQUOT])] * 4


def test_without_process_group() -> None:
    """Catches a tool on one process that needs a process group."""
    failure = "rank 0: some/file: No space left on device"
    assert outcomes() == [0, "by 0", 0, failure]
