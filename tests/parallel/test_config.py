"""Invalid layouts are rejected."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Partition
from megads.parallel.schedule import ScheduleName

LOOPED, V_SHAPED = ScheduleName["interleaved"], ScheduleName["zb_v"]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(pp=2, virtual_stages=2), r"virtual_stages = 2 with parallel.schedule = 1f1b, .*interleaved"),
        (ParallelConfig(pp=2, schedule=V_SHAPED, virtual_stages=4), r"virtual_stages = 4 .* zb_v, .*two"),
        (ParallelConfig(schedule=V_SHAPED), r"schedule = zb_v with parallel.pp = 1: .*schedule=1f1b, or raise"),
        (ParallelConfig(schedule=LOOPED), r"schedule = interleaved with parallel.pp = 1"),
        (
            ParallelConfig(pp=2, schedule=LOOPED, contiguous_micro_batches=1),
            r"contiguous_micro_batches = 1 is below parallel.pp = 2",
        ),
        (
            ParallelConfig(pp=2, contiguous_micro_batches=2),
            r"contiguous_micro_batches = 2 only applies to .*interleaved",
        ),
        (ParallelConfig(pp=2, layer_costs=[1.0, 2.0]), r"layer_costs = \[1.0, 2.0\]: must be three numbers"),
        (ParallelConfig(pp=2, layer_costs=[1.0, 0.0, 1.0]), r"none negative and the block's above 0"),
        (ParallelConfig(pp=2, layer_costs=[1.0, 1.0, float("nan")]), r"must be three numbers"),
        (ParallelConfig(pp=2, layer_costs=[1.0] * 3, partition=Partition.auto), r"only weighted uses given"),
        (ParallelConfig(first_stage_blocks=1), r"first_stage_blocks = 1 with a single stage"),
        (ParallelConfig(pp=2, last_stage_blocks=-1), r"last_stage_blocks = -1: must be 0 or more"),
    ],
)
def test_impossible_pipelines_are_refused(parallel: ParallelConfig, message: str) -> None:
    """Catches a key that is silently ignored, and one that fails later without being named."""
    with pytest.raises(ConfigError, match=message):
        parallel.check()


def test_valid_pipelines_pass() -> None:
    """Catches a rejected valid layout: every schedule with its own settings, and settings that equal the default."""
    for schedule in ScheduleName:
        ParallelConfig(pp=2, schedule=schedule).check()
    ParallelConfig(pp=2, schedule=LOOPED, virtual_stages=1, contiguous_micro_batches=2).check()
    ParallelConfig(schedule=ScheduleName["zb_h1"], virtual_stages=1).check()
    ParallelConfig(pp=2, schedule=V_SHAPED, first_stage_blocks=0, last_stage_blocks=0).check()
