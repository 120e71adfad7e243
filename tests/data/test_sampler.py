from __future__ import annotations

import numpy as np
import pytest

from megads.data.sampler import batch_hash, micro_batch_ids
from megads.errors import ConfigError

LAYOUTS = [(1, 1), (1, 12), (2, 3), (3, 2), (4, 1), (6, 2)]


@pytest.mark.parametrize("dp,micro", LAYOUTS)
def test_every_layout_deals_the_same_samples_in_the_same_order(dp: int, micro: int) -> None:
    """Catches samples that depend on the layout: dealt out by micro-batch, then rank, they are a run of numbers."""
    by_rank = [micro_batch_ids(100, 12, micro, rank, dp) for rank in range(dp)]
    assert all(ids.shape == (12 // (micro * dp), micro) and ids.dtype == np.int64 for ids in by_rank)
    assert np.stack(by_rank, axis=1).ravel().tolist() == list(range(100, 112))


def test_formula() -> None:
    """Catches rank and micro-batch changing places, which the union over ranks does not show."""
    assert micro_batch_ids(100, 12, 2, 1, 3).tolist() == [[102, 103], [108, 109]]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    """Catches samples dropped without a word."""
    with pytest.raises(ConfigError, match=r"12 samples is no multiple .* 2 \* 4 = 8"):
        micro_batch_ids(0, 12, 2, 0, 4)


def test_batch_hash_is_stable_and_sees_order_and_epoch() -> None:
    """Catches a hash that changes with type, platform or version, or that misses a change of the data."""
    pairs = [(0, 5), (0, 2), (1, 7)]
    assert batch_hash(pairs) == batch_hash(np.array(pairs, np.int32)) == "a7c332fa0ec2d076"
    assert len({batch_hash(pairs), batch_hash(pairs[::-1]), batch_hash([(1, 5), (0, 2), (1, 7)])}) == 3
