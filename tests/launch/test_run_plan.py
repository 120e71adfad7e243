"""Plan of a run: the number of CPU threads that its shapes occupy, and memory on a GPU that ranks share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.config import RootConfig
from megads.errors import ConfigError
from megads.launch.hang_detection import hang_settings
from megads.launch.run_plan import FLOPS_PER_THREAD, Machine, memory_line, plan_of, refuse_unfit, useful_threads
from megads.model.config import ModelConfig
from megads.model.model_size import block_flops
from megads.parallel.config import ParallelConfig
from megads.runtime.config import ClusterConfig
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


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    """Catches two ranks that are each planned into the whole GPU, and a hang that is seen while a peer has the GPU."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)
    config = RootConfig(model=model, parallel=ParallelConfig(dp=2), cluster=ClusterConfig(ranks_per_gpu=2))
    needed = plan_of(config, cuda=True).fullest_device.device_peak
    alone, shared = (Machine(2 * needed - 1, per_gpu=True, ranks_per_gpu=count) for count in (1, 2))
    refuse_unfit(config, alone)
    with pytest.raises(ConfigError, match=r"its share of a GPU \(cluster\.ranks_per_gpu=2\) has"):
        refuse_unfit(config, shared)
    assert "a share of a GPU" in memory_line(config, shared) and "a GPU" in memory_line(config, alone)
    assert shared.for_ranks(config.parallel) == needed - 1
    settings, usual = hang_settings(config), hang_settings(RootConfig())
    assert settings is not None and usual is not None and settings.min_s == 2 * usual.min_s
    given = replace(config, cluster=ClusterConfig(ranks_per_gpu=2, hang_min_s=7.0))
    assert (found := hang_settings(given)) is not None and found.min_s == 7.0
