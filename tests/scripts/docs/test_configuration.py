"""The generated reference of all configuration keys matches the code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
SCRIPT = Path("scripts") / "docs" / "configuration.py"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / SCRIPT), "--check"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.always
def test_the_committed_page_is_up_to_date() -> None:
    """Catches a key that was added, renamed or redocumented without `make docs`."""
    result = check(REPOSITORY)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_stale_page_is_reported_with_the_command(tmp_path: Path) -> None:
    """Catches a check that passes for any page."""
    for name in (SCRIPT, Path("docs") / "configuration.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    assert check(tmp_path).returncode == 0
    page = tmp_path / "docs" / "configuration.md"
    lines = page.read_text().splitlines(keepends=True)
    rows = [number for number, line in enumerate(lines) if line.startswith("| `")]
    page.write_text("".join(lines[: rows[0]] + lines[rows[0] + 1 :]))  # without the row of one key
    result = check(tmp_path)
    assert result.returncode == 1
    assert "run `make docs`" in result.stderr
