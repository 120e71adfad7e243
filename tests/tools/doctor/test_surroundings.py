"""Compilers, SLURM and wandb, with and without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.tools.doctor import surroundings
from megads.tools.doctor.finding import Status
from megads.tools.doctor.software import ask, installed_version


def test_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a laptop without compilers or SLURM that is called ill."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (compilers,), (slurm,) = surroundings.check_compilers(), surroundings.check_slurm()
    assert (compilers.status, compilers.found) == (Status.note, "none")
    assert slurm.status == Status.ok and "this machine only" in slurm.found


def test_half_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a container into which only srun was mounted, and a command that does not run."""
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (slurm,) = surroundings.check_slurm()
    assert slurm.status == Status.note and "sbatch" in slurm.cost and "inside job 17" in slurm.found


def test_wandb_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key in ~/.netrc that is not found, one for another server, and a key that is shown."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine wandb.example login user password not-a-real-key\n")
    netrc.chmod(0o600)
    (other,) = surroundings.check_wandb()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    (found,) = surroundings.check_wandb()
    assert found.status == Status.ok and "not-a-real-key" not in found.found
    if installed_version("wandb"):
        assert other.status == Status.note and str(netrc) in found.found


def test_ask_survives_every_program() -> None:
    """Catches a doctor that hangs with the program it asks."""
    assert ask("echo", "7") == "7"
    assert ask("false") is None
    assert ask("no-such-program") is None
    assert ask("sleep", "9", timeout_s=0.1) is None
