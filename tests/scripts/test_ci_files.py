"""The files of GitHub's and GitLab's CI: valid, and made of commands that exist. They are not run here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
WORKFLOW, GITLAB = REPOSITORY / ".github" / "workflows" / "ci.yml", REPOSITORY / ".gitlab-ci.yml"


def jobs(path: Path) -> dict[str, list[str]]:
    """The commands of each job of a file."""
    parsed: dict[str, Any] = yaml.safe_load(path.read_text())
    if path == WORKFLOW:
        return {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in parsed["jobs"].items()}
    return {name: job["script"] for name, job in parsed.items() if isinstance(job, dict) and "script" in job}


@pytest.mark.parametrize(
    ("path", "schema"), [(WORKFLOW, "vendor.github-workflows"), (GITLAB, "vendor.gitlab-ci")], ids=["github", "gitlab"]
)
def test_the_file_is_valid(path: Path, schema: str, tmp_path: Path) -> None:
    """Catches a key that the service does not know, and a schema that would take it."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema, of the extra [dev], is not installed")
    broken = tmp_path / path.name
    broken.write_text(path.read_text().replace("timeout", "time_out"))
    for file, code in ((path, 0), (broken, 1)):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(file)]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert checked.returncode == code, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", [WORKFLOW, GITLAB], ids=["github", "gitlab"])
def test_the_jobs_test_and_build_by_commands_that_exist(path: Path) -> None:
    """Catches a job that is missing, a target or script that was renamed, and a command that no shell takes."""
    found = jobs(path)
    assert found.keys() == {"test", "site", "wheel", "container"}
    assert ".ci/run" in found["test"] and (REPOSITORY / ".ci" / "run").exists()
    assert any(command.startswith("docker build") for command in found["container"])
    assert any("pip wheel" in command for command in found["wheel"])
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert found["site"] == ["make site"] and "site" in targets
    for command in (command for commands in found.values() for command in commands):
        assert subprocess.run(["bash", "-n", "-c", command], check=False, timeout=10).returncode == 0, command
