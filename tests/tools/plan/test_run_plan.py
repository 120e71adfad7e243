"""Plan of a run: memory on a GPU that ranks share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.launch.hang_detection import hang_settings
from megads.launch.layout import Machine
from megads.model.config import ModelConfig
from megads.parallel.config import ParallelConfig
from megads.runtime.config import ClusterConfig
from megads.tools.plan.run_plan import memory_for_ranks, memory_text, plan_of, refuse_unfit


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    """Catches two ranks that are each planned into the whole GPU, and a hang that is seen while a peer has the GPU."""
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=512)
    config = RootConfig(model=model, parallel=ParallelConfig(dp=2), cluster=ClusterConfig(ranks_per_gpu=2))
    needed = plan_of(config, cuda=True).fullest_device.device_peak
    alone, shared = (Machine(2 * needed - 1, per_gpu=True, ranks_per_gpu=count) for count in (1, 2))
    refuse_unfit(config, alone)
    with pytest.raises(ConfigError, match=r"its share of a GPU \(cluster\.ranks_per_gpu=2\) has"):
        refuse_unfit(config, shared)
    assert "a share of a GPU" in memory_text(config, shared) and "a GPU" in memory_text(config, alone)
    assert memory_for_ranks(shared, config.parallel) == needed - 1
    settings, usual = hang_settings(config), hang_settings(RootConfig())
    assert settings is not None and usual is not None and settings.min_s == 2 * usual.min_s
    given = replace(config, cluster=ClusterConfig(ranks_per_gpu=2, hang_min_s=7.0))
    assert (found := hang_settings(given)) is not None and found.min_s == 7.0
