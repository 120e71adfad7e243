"""The scaled run of a rehearsal."""

from __future__ import annotations

import itertools
from pathlib import Path

from megads.checkpoint.config import CheckpointConfig
from megads.config.root import RootConfig, TrainConfig, check_config
from megads.data.config import DataConfig, DatasetConfig
from megads.model.config import ModelConfig, Position
from megads.parallel.config import ParallelConfig, Recompute
from megads.runtime.config import ClusterConfig, ClusterKind
from megads.tools.rehearse.notes import Orders
from megads.tools.rehearse.start import scaled_parallel, scaled_run

ORDERS = Orders(
    nodes=48, gpus_per_node=8, gpu_memory_gib=None, scaled_nodes=2, max_ranks=4, data="small", last_step=7,
    elsewhere=False, refused=False,
)  # fmt: skip


def test_every_layout_is_scaled_to_one_that_runs_on_its_nodes() -> None:
    """Catches a scaled layout that is invalid, has the wrong number of ranks, or splits another axis."""
    for tp, pp, cp, dp in itertools.product((1, 2, 3, 8), (1, 2, 12), (1, 4), (1, 2, 6)):
        for zero_stage, max_ranks in itertools.product((1, 3), (2, 4, 8)):
            asked = ParallelConfig(tp=tp, pp=pp, cp=cp, dp=dp, zero_stage=zero_stage, sequence_parallel=True)
            if zero_stage == 3 and (pp > 1 or cp * dp == 1):
                continue
            small = scaled_parallel(asked, max_ranks)
            small.check()
            assert small.world_size == min(max_ranks, 2 ** sum(size > 1 for size in asked.sizes.values()))
            assert all(size == 1 or asked.sizes[axis] > 1 for axis, size in small.sizes.items())


def test_a_large_run_becomes_a_small_one_of_its_kind(tmp_path: Path) -> None:
    """Catches a rehearsal that allocates the real model, writes into the real run, or checks another kind of model."""
    config = RootConfig(
        model=ModelConfig(num_layers=70, hidden_size=14336, num_heads=112, vocab_size=250680, position=Position.rope),
        parallel=ParallelConfig(tp=4, pp=12, dp=8, recompute=Recompute.full, recompute_blocks=[1] * 12),
        train=TrainConfig(global_batch_size=2048, seq_len=2048, samples=220_000_000),
        data=DataConfig(train=[DatasetConfig("data/bloom")]),
        checkpoint=CheckpointConfig(init_from="runs/bloom"),
    )
    check_config(config)
    small = scaled_run(config, ORDERS, tmp_path / "run")
    check_config(small)
    assert small.model.hidden_size <= 64 and small.train.steps == 7 and small.train.samples is None
    assert (small.model.position, small.parallel.recompute) == (Position.rope, Recompute.full)
    assert small.run.dir == str(tmp_path / "run") and small.data.train[0].path == "small"
    assert small.cluster.ranks_per_node == 2 and small.checkpoint.init_from is None


def test_a_run_of_one_rank_keeps_its_spare_node(tmp_path: Path) -> None:
    """Catches a rehearsal that divides one rank over its node and the spare: 0 per node, and an invalid config."""
    config = RootConfig(
        data=DataConfig(train=[DatasetConfig("data/bloom")]),
        cluster=ClusterConfig(kind=ClusterKind.slurm, spare_nodes=1),
    )
    small = scaled_run(config, ORDERS, tmp_path / "run")
    small.cluster.check()
    assert (small.cluster.ranks_per_node, small.cluster.spare_nodes) == (1, 1)
