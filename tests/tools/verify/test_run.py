"""What ranks hold, put together."""

from __future__ import annotations

import numpy as np
import pytest

from megads.errors import NumericalError
from megads.tools.verify.checks import measure_agreement
from megads.tools.verify.run import RankRun, Run, Stream, TensorPart, assemble, differing_copies, join


def piece(start: int, values: list[float], key: str = "weight/a") -> TensorPart:
    return TensorPart(key, (4,), (start,), np.array(values, np.float32))


def test_assembled_tensors_are_whole() -> None:
    """Catches shards that overlap or leave holes, which a checkpoint would save twice or lose."""
    whole = assemble([piece(0, [1, 2]), piece(2, [3, 4]), piece(0, [9, 9, 9, 9], "exp_avg/a")], "weight")
    assert {name: values.tolist() for name, values in whole.items()} == {"a": [1, 2, 3, 4]}
    with pytest.raises(NumericalError, match="weight a: 1 elements are owned by several ranks and 1 by none"):
        assemble([piece(0, [1, 2]), piece(1, [2, 3])], "weight")


def test_copies_that_differ_are_counted_bitwise() -> None:
    """Catches copies that are compared by value (-0.0, NaN) or only where their rectangles coincide."""
    copies = [piece(0, [0.0, 1, 2, np.nan]), piece(1, [1, 2, np.nan]), piece(0, [-0.0])]
    alone = [piece(0, [1, 2, 3, 4], "weight/b")]
    assert differing_copies([*copies, *alone]) == {"weight/a": 1}
    assert differing_copies([*copies[:2], *alone]) == {"weight/a": 0}


def test_ranks_that_disagree_are_told() -> None:
    """Catches figures of rank 0 that stand for all, and a row that two ranks were given differently."""
    torn = join([RankRun(losses=[1.0]), RankRun(losses=[2.0])], 6)
    assert torn.disagreements == ["losses [2.0] of rank 1, [1.0] of rank 0"]
    assert any(deviation.exceeds for deviation in measure_agreement(torn, Run()))
    ranks = [RankRun(stream=Stream(["h"], {"tokens of sample 0": digest})) for digest in ("aa", "bb")]
    assert join(ranks, 6).stream == Stream(["h"], {"tokens of sample 0": "aa bb"})
