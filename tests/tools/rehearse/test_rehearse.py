"""`megads rehearse` without SLURM; with SLURM, see tests/slurm/test_rehearse.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megads.cli.main import run
from megads.errors import ConfigError


def test_a_machine_without_slurm_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback if a program is missing, and a folder left behind."""
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\nexec megads train cluster=slurm\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run(["rehearse", "--keep", "kept", "--", "sbatch", "job.sbatch"]) == ConfigError.exit_code
    assert "no munged" in (said := capsys.readouterr().err) or "no sbatch" in said
    assert "scripts/install_slurm.sh" in said and not (tmp_path / "kept").exists()


@pytest.mark.always
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "an empty command"),
        (["--", "srun", "x"], "srun x"),
        (["--", "sbatch"], "without a script"),
        (["--ranks", "3", "--", "sbatch", "x"], "want 2, 4 or 8"),
    ],
)
def test_what_is_no_command_to_rehearse_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches options taken for the user's command, or a rehearsal of nothing."""
    assert run(["rehearse", *words]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_its_help_is_no_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a failing exit code after --help, and exit 0 after an option that does not exist."""
    assert run(["rehearse", "--help"]) == 0
    assert "Exit codes: 0" in capsys.readouterr().out
    assert run(["rehearse", "--rnaks", "2", "--", "sbatch", "x"]) == ConfigError.exit_code
