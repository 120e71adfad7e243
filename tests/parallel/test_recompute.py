"""Selection of recomputed blocks; tests/engine/test_recompute.py trains with recomputation."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.partition import block_modes

FULL, SELECTIVE, NONE = Recompute.full, Recompute.selective, Recompute.none


def test_recomputed_blocks_follow_interval_and_number() -> None:
    """Catches an interval that skips the first block, and recompute_blocks that counts from the last block."""
    assert block_modes(ParallelConfig(), 0, 2) == [NONE, NONE]
    assert block_modes(ParallelConfig(recompute=SELECTIVE), 0, 2) == [SELECTIVE, SELECTIVE]
    assert block_modes(ParallelConfig(recompute=FULL, recompute_interval=2), 1, 5) == [FULL, NONE, FULL, NONE, FULL]
    counted = ParallelConfig(pp=2, recompute=FULL, recompute_blocks=[2, 0], recompute_interval=3)
    assert block_modes(counted, 0, 3) == [FULL, FULL, NONE]
    assert block_modes(counted, 1, 2) == [NONE, NONE]


def test_more_blocks_than_the_stage_has_are_refused() -> None:
    """Catches a number that is silently reduced to the stage's number of blocks."""
    parallel = ParallelConfig(pp=2, recompute=FULL, recompute_blocks=[1, 4])
    parallel.check()
    with pytest.raises(ConfigError, match="asks for 4 blocks of stage 1, whose number of blocks is 3"):
        block_modes(parallel, 1, 3)
