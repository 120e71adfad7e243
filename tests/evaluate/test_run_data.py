"""Which data a run was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.config import RootConfig
from megads.data.blend_config import DatasetConfig
from megads.evaluate.run_data import dataset_prefixes
from megads.frozen_config import freeze


def test_data_of_a_frozen_config(tmp_path: Path) -> None:
    """Catches a path that is looked for in the wrong folder: it is relative to where the training was started."""
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)
    config = RootConfig()
    config.data.train = [DatasetConfig(path="data/corpus")]
    freeze(config, run_dir / "config.yaml")
    assert dataset_prefixes(run_dir) == [Path("data/corpus"), tmp_path / "data" / "corpus"]


@pytest.mark.parametrize("content", [None, "", "[]", "data: 3", "data: {train: null}", "data: {train: [x]}", "{"])
def test_a_run_without_a_readable_config(content: str | None, tmp_path: Path) -> None:
    """Catches a traceback for a checkpoint that was moved out of its run."""
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert dataset_prefixes(tmp_path) == []
