"""Where a run is placed and what the user is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.cli.memory_check import Machine
from megads.cli.train import _changes, chosen_kernels, launch_spec, place
from megads.config import RootConfig
from megads.errors import ConfigError
from megads.frozen_config import config_digest, freeze
from megads.model.config import AttentionKind
from megads.ops.config import Implementation


def test_run_is_named_after_experiment_then_model() -> None:
    """Catches two experiments of one model that share a name, and an experiment in a folder that makes a path."""
    config = RootConfig()
    assert str(place(config, {"experiment": "demo", "model": "tiny"}).run.id).startswith("demo-")
    assert str(place(config, {"experiment": None, "model": "tiny"}).run.id).startswith("tiny-")
    assert str(place(config, {"experiment": "team/a", "model": "tiny"}).run.id).startswith("team-a-")


def test_given_id_and_dir_win() -> None:
    """Catches a run.dir that is ignored when run.id is given."""
    config = RootConfig()
    config.run.id, config.run.dir = "mine", "/somewhere/else"
    placed = place(config, {})
    assert (placed.run.id, placed.run.dir) == ("mine", "/somewhere/else")
    config.run.dir = None
    assert place(config, {}).run.dir == "runs/mine"


def test_ranks_get_the_digest_of_the_frozen_config() -> None:
    """Catches a digest taken before run.id and run.dir are filled in."""
    placed = place(RootConfig(), {"model": "tiny"})
    assert config_digest(placed) in launch_spec(placed).command


def test_changes_since_the_last_start(tmp_path: Path) -> None:
    """Catches a continued run whose learning rate changed without a word."""
    config = RootConfig()
    freeze(config, tmp_path / "config.yaml")
    assert _changes(tmp_path, config) == []
    config.optim.lr = 1e-3
    assert _changes(tmp_path, config) == [{"key": "optim.lr", "before": 0.0003, "after": 0.001}]


def test_every_point_of_a_sweep_is_tracked_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two points in one wandb run: the tracker is told the run directory and reads the id there."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    places = []
    for lr in (1e-3, 3e-4):
        config = RootConfig()
        config.optim.lr = lr
        placed = place(config, {"model": "tiny"})
        assert launch_spec(placed).side_command == ("-m", "megads.cli.tracker", placed.run.dir, "--follow")
        places.append((placed.run.id, placed.run.dir))
    assert len({run_id for run_id, _ in places}) == len({run_dir for _, run_dir in places}) == 2
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert launch_spec(placed).side_command == ()


def test_no_kernel_of_attention_on_gpus() -> None:
    """Catches an explicit choice of attention that is silently dropped on GPUs."""
    config = RootConfig()
    config.ops.impl, config.model.attention = Implementation.fused, AttentionKind.fused
    with pytest.raises(ConfigError, match=r"model\.attention = fused is for CPUs"):
        chosen_kernels(config, Machine(2**30, per_gpu=True))
    config.ops.impl, config.model.attention = Implementation.auto, AttentionKind.auto
    assert chosen_kernels(config, Machine(2**30, per_gpu=True)).model is not Implementation.fused


@pytest.mark.parametrize("kind", [AttentionKind.flash, AttentionKind.flex, AttentionKind.cudnn])
def test_kernels_of_gpus_are_refused_on_a_cpu(kind: AttentionKind) -> None:
    """Catches an explicit choice of attention that starts ranks on a CPU and is dropped there without a word."""
    config = RootConfig()
    config.model.attention = kind
    with pytest.raises(ConfigError, match=rf"model\.attention = {kind} .* CPU.*: use model\.attention=auto"):
        chosen_kernels(config, Machine(2**30, per_gpu=False))
