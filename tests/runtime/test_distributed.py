"""Agreement between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megads.errors import ConfigError
from megads.runtime.distributed import any_rank, require_equal
from tests.distributed import run_ranks

pytestmark = pytest.mark.distributed


def _require_equal(values: tuple[str, ...]) -> str:
    try:
        require_equal("the frozen config", values[dist.get_rank()])
    except ConfigError as error:
        return str(error)
    return ""


def test_equal_values_pass() -> None:
    """Catches a comparison that refuses what is equal."""
    assert run_ranks(_require_equal, 3, ("same",) * 3) == [""] * 3


def test_one_different_value_stops_every_rank() -> None:
    """Catches an error on the odd rank alone, which would leave the others waiting, and a message without the ranks."""
    messages = run_ranks(_require_equal, 3, ("old", "new", "old"))
    for message in messages:
        assert message.startswith("the frozen config differs between ranks")
        assert "'old': [0, 2]" in message and "'new': [1]" in message


def _any_rank(flagged: tuple[int, ...]) -> bool:
    return any_rank(dist.get_rank() in flagged, torch.device("cpu"))


@pytest.mark.parametrize("flagged", [(), (1,), (0, 2)])
def test_any_rank(flagged: tuple[int, ...]) -> None:
    """Catches a flag that only its own rank sees."""
    assert run_ranks(_any_rank, 3, flagged) == [bool(flagged)] * 3
