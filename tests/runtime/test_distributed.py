"""Who is admitted to a world."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megads.errors import UnhealthyNode
from megads.runtime.control_plane import open_control_plane
from megads.runtime.distributed import admit
from megads.runtime.run_secret import Secret
from tests.distributed import run_ranks

OURS, THEIRS = bytes(range(32)), bytes(32)


def _admitted(keys: Sequence[bytes | None]) -> str:
    control = open_control_plane()
    key = keys[control.rank]
    try:
        admit(control, Secret(key) if key is not None else None)
    except UnhealthyNode as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        pytest.param([OURS, OURS, OURS], "", id="one start"),
        pytest.param([None, None, None], "", id="started by hand"),
        pytest.param([OURS, None, OURS], "rank 1 of 3 joined without the secret that the others have", id="none"),
        pytest.param([OURS, OURS, THEIRS], "rank 2 of 3 joined with another secret than this start's", id="another"),
        pytest.param([THEIRS, OURS, OURS], "rank 0 of 3 joined with another secret than this start's", id="rank 0"),
    ],
)
def test_every_rank_proves_that_it_knows_the_secret(keys: list[bytes | None], said: str) -> None:
    """Catches a stranger that is admitted, a rank of the start that is blamed for it, ranks that go on without the one
    that refused, and worlds without a launcher that are refused."""
    for found in run_ranks(_admitted, 3, keys):
        assert found.startswith(said) and bool(found) == bool(said)
