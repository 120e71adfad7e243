"""Tests a run with checkpoint.load=none (a fresh start): which checkpoints its restarts may resume from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from megads.checkpoint.config import EVERYTHING, list_checkpoints
from megads.checkpoint.fresh_start import (
    begin_fresh_start,
    continues_fresh_start,
    forget_fresh_start,
    own_history,
    recorded_history,
)
from megads.checkpoint.local import RECORD_FILE, newest_step
from megads.checkpoint.manifest import MANIFEST_FILE
from megads.checkpoint.read import find_checkpoint
from megads.errors import CheckpointError
from megads.launch.acceptance import discard_after_rollback
from megads.resilience.rollbacks import ROLL_BACK
from megads.runtime.metrics import EventWriter
from megads.train.resume import newest_up_to
from tests.checkpoint.small_checkpoints import write_checkpoint


def found(run_dir: Path, load: str = "none") -> int | None:
    """Step from which the ranks of a start resume."""
    history = own_history(load, run_dir)
    handle = None if history is None else find_checkpoint(run_dir, "auto", history=history)
    return None if handle is None else handle.state["step"]


def break_manifest(folder: Path) -> None:
    (folder / MANIFEST_FILE).write_text("{")


@pytest.fixture
def with_a_past(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 2, 4 (damaged) and 8, in which a fresh start begins."""
    for step in (2, 4, 8):
        write_checkpoint(tmp_path, step)
    break_manifest(tmp_path / "checkpoints" / "step_00000004")
    (tmp_path / RECORD_FILE).write_text("{}")
    begin_fresh_start(tmp_path)
    return tmp_path


def test_only_its_own(with_a_past: Path) -> None:
    """Catches a restart that resumes from a checkpoint older than the fresh start, local ones included, or not from its
    own: at the same step as an older checkpoint, or an earlier one."""
    assert found(with_a_past) is None and not (with_a_past / RECORD_FILE).exists()
    assert found(with_a_past, "auto") == 8
    history = recorded_history(with_a_past)
    assert history is not None and newest_step(with_a_past, history) == 0
    write_checkpoint(with_a_past, 4, seed=9)
    assert found(with_a_past) == 4 and newest_step(with_a_past, history) == 4
    write_checkpoint(with_a_past, 6)
    assert found(with_a_past) == 6
    saved = newest_up_to(with_a_past, 8)
    assert saved is not None and saved.step == 6 and newest_up_to(with_a_past, 3) is None


def test_damage(with_a_past: Path) -> None:
    """Catches an own checkpoint with a damaged manifest that is skipped without a message, or counted as older than the
    fresh start: training would begin again."""
    write_checkpoint(with_a_past, 6)
    break_manifest(with_a_past / "checkpoints" / "step_00000006")
    with pytest.raises(CheckpointError, match="step_00000006") as raised:
        found(with_a_past)
    assert "step_00000004" not in str(raised.value)


def test_a_rollback_leaves_the_past_alone(with_a_past: Path) -> None:
    """Catches a rollback to an own checkpoint that deletes later steps from before the fresh start."""
    for step in (1, 3, 5):
        write_checkpoint(with_a_past, step)
    with closing(EventWriter(with_a_past)) as events:
        events.write(ROLL_BACK, checkpoint_step=1, checkpoint_digest="", skip_samples=[8, 12], skip_index=0)
    assert discard_after_rollback(with_a_past)
    assert list(list_checkpoints(with_a_past)) == [1, 2, 4, 8]


def in_another_process(cases: list[tuple[Path, dict[str, str]]]) -> list[bool]:
    """Whether another launcher continues the fresh start of this one, by run directory and environment."""
    code = (
        "import json, os, sys; from pathlib import Path; from megads.checkpoint.fresh_start import *\n"
        "def look(run_dir, variables):\n"
        "    os.environ.update(variables); found = continues_fresh_start(Path(run_dir))\n"
        "    for name in variables: del os.environ[name]\n"
        "    return found\n"
        "print(json.dumps([look(*case) for case in json.loads(sys.argv[1])]))"
    )
    words = [sys.executable, "-c", code, json.dumps(cases, default=str)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(words, env=inherited, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_who_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a restart in place, a requeue or the next job of a chain that starts afresh again, and a second manual
    command that does not, also in the same allocation."""
    alone, in_job, in_chain = (tmp_path / name for name in ("alone", "in_job", "in_chain"))
    variables = [{}, {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7"}]
    for run_dir, more in zip((alone, in_job, in_chain), variables, strict=True):
        (run_dir / "checkpoints").mkdir(parents=True)
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        assert not continues_fresh_start(run_dir) and own_history("none", run_dir) is None
        begin_fresh_start(run_dir)
        assert continues_fresh_start(run_dir)
    cases = {
        (alone, ()): False,
        (alone, ("7",)): False,
        (in_job, ()): False,
        (in_job, ("7", "0")): False,
        (in_job, ("7", "2")): True,
        (in_job, ("8", "0")): False,
        (in_chain, ("7", "0", "7")): False,
        (in_chain, ("7", "1", "7")): True,
        (in_chain, ("8", "0", "7")): True,
        (in_chain, ("8", "0", "6")): False,
    }
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_ARRAY_JOB_ID")
    asked = [(run_dir, dict(zip(names, values, strict=False))) for run_dir, values in cases]
    assert dict(zip(cases, in_another_process(asked), strict=True)) == cases
    forget_fresh_start(alone)
    assert not continues_fresh_start(alone) and own_history("auto", alone) is EVERYTHING
