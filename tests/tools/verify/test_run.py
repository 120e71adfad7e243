"""Tensors, results and batches, assembled from all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megads.errors import NumericalError
from megads.tools.verify.checks import measure_agreement, measure_samples
from megads.tools.verify.run import (
    RankRun,
    Run,
    Stream,
    TensorPart,
    assemble,
    count_differing_copies,
    join,
    read_stream,
    write_corpus,
)
from megads.tools.verify.scenario import Scenario


def piece(start: int, values: list[float], key: str = "weight/a") -> TensorPart:
    return TensorPart(key, (4,), (start,), np.array(values, np.float32))


def test_assembled_tensors_are_whole() -> None:
    """Catches shards that overlap or leave gaps, which a checkpoint would save twice or lose."""
    whole = assemble([piece(0, [1, 2]), piece(2, [3, 4]), piece(0, [9, 9, 9, 9], "exp_avg/a")], "weight")
    assert {name: values.tolist() for name, values in whole.items()} == {"a": [1, 2, 3, 4]}
    with pytest.raises(NumericalError, match="weight a: 1 elements are owned by several ranks and 1 by none"):
        assemble([piece(0, [1, 2]), piece(1, [2, 3])], "weight")


def test_copies_that_differ_are_counted_bitwise() -> None:
    """Catches replicas that are compared by value (-0.0, NaN) or only where their rectangles coincide."""
    copies = [piece(0, [0.0, 1, 2, np.nan]), piece(1, [1, 2, np.nan]), piece(0, [-0.0])]
    alone = [piece(0, [1, 2, 3, 4], "weight/b")]
    assert count_differing_copies([*copies, *alone]) == {"weight/a": 1}
    assert count_differing_copies([*copies[:2], *alone]) == {"weight/a": 0}


def test_ranks_that_disagree_are_told() -> None:
    """Catches results of rank 0 that stand for all ranks, and a sample that two ranks read differently."""
    torn = join([RankRun(losses=[1.0]), RankRun(losses=[2.0])], 6)
    assert torn.disagreements == ["losses [2.0] of rank 1, [1.0] of rank 0"]
    assert any(deviation.exceeds for deviation in measure_agreement(torn, Run()))
    ranks = [RankRun(stream=Stream(["h"], {"tokens of sample 0": digest})) for digest in ("aa", "bb")]
    assert join(ranks, 6).stream == Stream(["h"], {"tokens of sample 0": "aa bb"})


SCENARIO = Scenario(steps=6)


def test_ranks_together_read_what_one_process_reads(tmp_path: Path) -> None:
    """Catches a check that always fails, and one that passes when a rank's samples are missing, batches have another
    seed, or document boundaries differ."""
    write_corpus(tmp_path / "corpus", SCENARIO)
    reference = Run(stream=read_stream(tmp_path / "corpus", SCENARIO))
    ranks = [
        RankRun(stream=read_stream(tmp_path / "corpus", SCENARIO, rank, 3, needs_tokens=ends))
        for rank in range(3)
        for ends in (True, False)
    ]
    found = measure_samples(join(ranks, 6), reference)
    samples = SCENARIO.steps * SCENARIO.global_batch_size
    assert len(found) == SCENARIO.steps + 4 * samples and not any(deviation.exceeds for deviation in found)

    lost = measure_samples(join(ranks[:4], 6), reference)
    assert sum(deviation.exceeds for deviation in lost) == 4 * samples // 3
    other = read_stream(tmp_path / "corpus", replace(SCENARIO, seed=8))
    assert all(d.exceeds for d in measure_samples(Run(stream=other), reference) if d.what.startswith("batch hash"))
    first = ranks[0].stream
    torn = replace(first, contents={name: value + "x" * ("starts" in name) for name, value in first.contents.items()})
    assert (
        sum(d.exceeds for d in measure_samples(join([RankRun(stream=torn), *ranks[2:]], 6), reference)) == samples // 3
    )
