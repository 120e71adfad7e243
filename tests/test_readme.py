"""The README's commands run, in order, as a newcomer would type them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

# Run by .ci/run itself: they set up an environment and take minutes.
BY_CI = ("make demo", "make test")


def commands() -> list[str]:
    """Lines that start with "$ " in console fences, continuation lines joined."""
    found = []
    for fence in re.findall(r"```console\n(.*?)```", README.read_text(), re.DOTALL):
        joined = fence.replace("\\\n", "")
        found += [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]
    return found


def test_readme_shows_its_two_commands() -> None:
    """Catches a README whose main commands CI does not run."""
    ci = (ROOT / ".ci" / "run").read_text()
    for command in BY_CI:
        assert command in commands()
        assert re.search(rf"\b{command.split()[1]}\b", ci), f".ci/run does not run {command}"


@pytest.mark.distributed
def test_readme_commands_run(tmp_path: Path) -> None:
    """Catches a renamed key, verb or file in the README."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    (tmp_path / "notes").mkdir()
    for number, source in enumerate(sorted((ROOT / "megads").rglob("*.py"))[:40]):
        (tmp_path / "notes" / f"{number}.txt").write_text(source.read_text())
    for command in commands():
        if command in BY_CI or command.startswith(("git ", "cd ", "make ")):
            continue
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
