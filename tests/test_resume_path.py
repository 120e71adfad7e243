"""Tests where checkpoint.load=<path> leads, at the first start with it and at later ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from megads.checkpoint.manifest import read_manifest
from megads.checkpoint.read import CheckpointHandle
from megads.checkpoint.store import save_checkpoint
from megads.config.frozen import config_digest, record_config
from megads.train.resume import LoadSource, load_path_note, loads_given_path
from tests.checkpoint.random_layouts import global_tensors, random_layout, run_record, shards_of
from tests.config.test_root import good_config


def started(run_dir: Path, load: str, saves: int | None = None) -> bool:
    """Starts with this checkpoint.load and saves at step `saves`; returns whether the start goes to the path."""
    config = good_config()
    config.checkpoint.load = load
    to_path = loads_given_path(load, run_dir)
    run_dir.mkdir(exist_ok=True)
    record_config(config, run_dir)
    if saves is not None:
        record = replace(run_record(saves), config_digest=config_digest(config))
        save_checkpoint(run_dir, shards_of(random_layout(1, 1)[0], global_tensors(saves)), record)
    return to_path


def test_a_users_checkpoint_path_is_loaded_first_once(tmp_path: Path) -> None:
    """Catches a path that the run's own newest checkpoint overrides, one that discards what came after it when the same
    command runs again, also in a copied folder, and one that is forgotten before anything was saved from it."""
    run, other, first = (
        tmp_path / "run",
        str(tmp_path / "other"),
        str(tmp_path / "run" / "checkpoints" / "step_00000001"),
    )
    assert not started(run, "auto", saves=1) and not started(run, "none")
    assert not started(run, "auto", saves=5)
    assert started(run, first) and started(run, first, saves=2)
    assert not started(run, first) and not started(run, "auto")
    shutil.copytree(run, tmp_path / "copied")
    assert not started(tmp_path / "copied", first, saves=3)
    assert started(run, other, saves=2) and not started(run, other, saves=3)
    assert started(run, first)


def test_a_start_from_a_path_reports_what_it_abandons(tmp_path: Path) -> None:
    """Catches a first start from another run's checkpoint that fails, and later saves abandoned without a message."""
    run, other = tmp_path / "run", tmp_path / "other"
    started(other, "auto", saves=3)
    folder = other / "checkpoints" / "step_00000003"
    handle = CheckpointHandle(folder, read_manifest(folder))
    goes_to, went_to = LoadSource(handle, None, from_path=True), LoadSource(handle, None, from_path=False)
    assert load_path_note(goes_to, str(folder), run) == "" and load_path_note(went_to, "auto", run) == ""
    assert "an earlier start loaded checkpoint.load=" in load_path_note(went_to, str(folder), run)
    started(run, str(folder), saves=5)
    assert "up to step 5, are not used" in load_path_note(goes_to, str(folder), run)


def test_a_path_is_loaded_although_earlier_configs_are_unreadable(tmp_path: Path) -> None:
    """Catches a path that is ignored because configs or manifests cannot be read."""
    run, path = tmp_path / "run", str(tmp_path / "other")
    assert started(run, path)
    assert started(run, path, saves=1) and not started(run, path)
    shutil.rmtree(run / "configs")
    (run / "config.yaml").unlink()
    assert loads_given_path(path, run)
    (run / "checkpoints" / "step_00000001" / "manifest.json").write_text("{")
    assert started(run, path)
