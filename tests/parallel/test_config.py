"""Invalid layouts are rejected."""

from __future__ import annotations

import pytest

from megads.errors import ConfigError
from megads.parallel.config import ParallelConfig, Partition, Recompute
from megads.parallel.schedule import ScheduleName

LOOPED, V_SHAPED = ScheduleName["interleaved"], ScheduleName["zb_v"]
FULL, SELECTIVE = Recompute.full, Recompute.selective


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
        (ParallelConfig(tp=0), "parallel.tp = 0"),
        (ParallelConfig(cp=0), "parallel.cp = 0"),
        (ParallelConfig(pp=0), "parallel.pp = 0"),
        (ParallelConfig(dp=0), "parallel.dp = 0"),
        (ParallelConfig(rank_order=["tp", "pp", "dp"]), r"must name each of tp, cp, pp, dp once"),
        (ParallelConfig(rank_order=["tp", "pp", "dp", "dp"]), r"must name each of tp, cp, pp, dp once"),
        (ParallelConfig(rank_order=["tp", "cp", "pp", "ep"]), r"must name each of tp, cp, pp, dp once"),
        (ParallelConfig(bucket_elements=0), r"bucket_elements = 0.*at least 1"),
        (ParallelConfig(zero_stage=4, dp=2), r"parallel.zero_stage = 4: must be one of 0, 1, 2, 3"),
        (ParallelConfig(zero_stage=2, pp=2, dp=2), r"zero_stage = 2 with parallel.pp = 2: .*use zero_stage=1 with"),
        (ParallelConfig(zero_stage=3, pp=2, dp=2), r"zero_stage = 3 with parallel.pp = 2"),
        (ParallelConfig(zero_stage=3, tp=2), r"zero_stage = 3 with .* = 1: there is no rank to shard over"),
        (
            ParallelConfig(zero_stage=2, dp=4, zero_shard_size=2),
            r"zero_shard_size = 2 only applies to .*zero_stage = 3",
        ),
        (ParallelConfig(zero_stage=3, dp=4, zero_shard_size=3), r"zero_shard_size = 3: must .* divide .* = 4"),
        (ParallelConfig(zero_stage=3, dp=4, zero_shard_size=1), r"zero_shard_size = 1: must be at least 2"),
        (
            ParallelConfig(zero_stage=0, dp=2, overlap_param_gather=True),
            r"overlap_param_gather = true only applies to .*zero_stage = 1, .* = 0: set .*=false",
        ),
        (ParallelConfig(recompute=FULL, recompute_interval=0), "recompute_interval = 0"),
        (ParallelConfig(recompute_interval=2), "recompute_interval = 2 does nothing with parallel.recompute = none"),
        (ParallelConfig(recompute=SELECTIVE, recompute_blocks=[1]), r"recompute_blocks = \[1\] only applies"),
        (ParallelConfig(pp=2, recompute=FULL, recompute_blocks=[1]), "2 numbers"),
        (ParallelConfig(recompute=FULL, recompute_blocks=[-1]), r"\[-1\]"),
    ],
)
def test_impossible_layouts_are_refused(parallel: ParallelConfig, message: str) -> None:
    """Catches a key that is silently ignored, one that fails later without being named, and DeepSpeed's assertion in
    the middle of startup."""
    with pytest.raises(ConfigError, match=message):
        parallel.check()


def test_valid_pipelines_pass() -> None:
    """Catches a rejected valid layout: every schedule with its own settings, and settings that equal the default."""
    for schedule in ScheduleName:
        ParallelConfig(pp=2, schedule=schedule).check()
    ParallelConfig(pp=2, schedule=LOOPED, virtual_stages=1, contiguous_micro_batches=2).check()
    ParallelConfig(schedule=ScheduleName["zb_h1"], virtual_stages=1).check()
    ParallelConfig(pp=2, schedule=V_SHAPED, first_stage_blocks=0, last_stage_blocks=0).check()


def test_recorded_sizes_name_divided_experts() -> None:
    """Catches records of a layout, such as those of checkpoints and `megads why`, without expert parallelism, and a
    product of axes that counts its ranks twice."""
    layout = ParallelConfig(tp=2, dp=4, ep=4)
    assert layout.sizes == {"tp": 2, "cp": 1, "pp": 1, "dp": 4, "ep": 4}
    assert layout.product == "tp 2 x cp 1 x pp 1 x dp 4"
    assert "ep" not in ParallelConfig(dp=4).sizes
