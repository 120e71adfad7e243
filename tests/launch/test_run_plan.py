"""Plan of a run: the number of CPU threads that its shapes occupy."""

from __future__ import annotations

from dataclasses import replace

from megads.config import RootConfig
from megads.launch.run_plan import FLOPS_PER_THREAD, useful_threads
from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig
from megads.plan.model_size import block_flops
from megads.train_config import TrainConfig


def test_useful_threads() -> None:
    """Catches a tiny model whose threads spend their time waking each other, and a large one on a single core."""
    tiny = ModelConfig(num_layers=2, hidden_size=64, num_heads=4)
    config = RootConfig(model=tiny, train=TrainConfig(micro_batch_size=1, seq_len=128))
    assert useful_threads(config) == 1, "no vocabulary is needed"
    large = replace(config, model=replace(tiny, hidden_size=2048, num_heads=16))
    flops = 128 * block_flops(large.model, 128).forward
    assert useful_threads(large) == int(flops / FLOPS_PER_THREAD) > 100
    shared = replace(large, parallel=ParallelConfig(tp=4, cp=2))
    assert useful_threads(shared) == int(flops / 8 / FLOPS_PER_THREAD)
    several = replace(config, train=TrainConfig(micro_batch_size=64, seq_len=128))
    assert useful_threads(several) > 1
