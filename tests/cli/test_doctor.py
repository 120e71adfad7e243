"""`megads doctor` on this machine, and with defects planted into its environment."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
BROKEN = {
    "ImportError": "raise ImportError('libcudart.so.12: cannot open shared object file')",
    "SIGSEGV": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "took longer": "import time; time.sleep(60)",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "megads.cli.main", "doctor", *arguments]


def environment(planted: Path | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{planted}:{REPOSITORY}" if planted else str(REPOSITORY)}


def doctor(cwd: Path, *arguments: str, planted: Path | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
    """Runs it; returns the exit code and the findings by check."""
    result = subprocess.run(
        command("--json", *arguments),
        cwd=cwd,
        env=environment(planted),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    content = json.loads(result.stdout)
    assert content["status"] == ("problem" if result.returncode == 9 else content["status"])
    return result.returncode, {finding["check"]: finding for finding in content["findings"]}


def plant(folder: Path, module: str, code: str) -> Path:
    """Writes a module that shadows the installed one."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(code)
    return folder


@pytest.mark.always
def test_doctor_finds_that_this_machine_can_train(tmp_path: Path) -> None:
    """Catches a missing check, a finding without cost and remedy, files left behind, and a false alarm."""
    code, findings = doctor(tmp_path, "timeout_s=60")
    assert code == 0, [finding for finding in findings.values() if finding["status"] == "problem"]
    for check in ("python", "packages", "cores", "memory", "disk of runs", "disk of caches", "slurm", "wandb", "clock"):
        assert findings[check]["status"] in ("ok", "note")
    for check in ("hydra", "import torch", "import deepspeed", "collectives", "kernels", "attention"):
        assert findings[check]["status"] == "ok", findings[check]
    assert all(finding["cost"] and finding["remedy"] for finding in findings.values() if finding["status"] != "ok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", BROKEN)
def test_doctor_survives_a_broken_torch(tmp_path: Path, way: str) -> None:
    """Catches a doctor that crashes or hangs because `import torch` does."""
    limit_s = 1 if way == "took longer" else 60
    planted = plant(tmp_path / "planted", "torch", BROKEN[way])
    code, findings = doctor(tmp_path, f"timeout_s={limit_s}", planted=planted)
    assert way in findings["import torch"]["found"]
    assert findings["import torch"]["remedy"]
    assert code == (0 if way == "took longer" else 9)
    assert findings["disk of runs"]["status"] in ("ok", "note")


def test_doctor_tells_a_broken_deepspeed_from_a_broken_torch(tmp_path: Path) -> None:
    """Catches a broken DeepSpeed that is reported as a broken torch."""
    planted = plant(tmp_path / "planted", "deepspeed", "raise RuntimeError('CUDA_HOME does not exist')")
    code, findings = doctor(tmp_path, "timeout_s=60", planted=planted)
    assert code == 9
    assert findings["import torch"]["status"] == "ok"
    assert findings["import deepspeed"]["found"] == "RuntimeError: CUDA_HOME does not exist"


def test_doctor_names_a_plugin_that_breaks_hydra(tmp_path: Path) -> None:
    """Catches a doctor that needs a working Hydra; the defect is hydra-ax-sweeper 1.2.0's on Python 3.11."""
    broken = (
        "from dataclasses import dataclass\n@dataclass\nclass Part:\n    x: int = 0\n"
        "@dataclass\nclass Config:\n    part: Part = Part()\n"
    )
    planted = plant(tmp_path / "planted", "hydra_plugins/hydra_broken_sweeper", broken)
    plant(planted, "torch", BROKEN["ImportError"])
    code, findings = doctor(tmp_path, planted=planted)
    assert code == 9
    assert "mutable default" in findings["hydra"]["found"]
    result = subprocess.run(
        [sys.executable, "-m", "megads.cli.main", "train"],
        env=environment(planted),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "a Hydra plugin of this environment cannot be loaded" in result.stderr and "megads doctor" in result.stderr


def test_doctor_runs_without_hydra(tmp_path: Path) -> None:
    """Catches a doctor that imports Hydra itself."""
    planted = plant(tmp_path / "planted", "hydra", "raise ImportError('no hydra')")
    plant(planted, "torch", BROKEN["ImportError"])
    code, findings = doctor(tmp_path, planted=planted)
    assert code == 9
    assert findings["hydra"]["found"] == "ImportError: no hydra"


def test_doctor_reports_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Catches a key of the command line that is ignored."""
    planted = plant(tmp_path / "planted", "torch", BROKEN["took longer"])
    code, findings = doctor(tmp_path, "runs_dir=/proc/runs", "timeout_s=0.5", planted=planted)
    assert code == 9
    assert findings["disk of runs"]["status"] == "problem"


def test_doctor_prints_a_table_on_a_terminal_and_plain_lines_elsewhere(tmp_path: Path) -> None:
    """Catches escape codes in a log file, and a cost or remedy that only the JSON has."""
    run = {
        "cwd": tmp_path,
        "env": {**environment(plant(tmp_path / "p", "torch", BROKEN["ImportError"])), "TERM": "xterm"},
    }
    piped = subprocess.run(command(), capture_output=True, text=True, timeout=60, check=False, **run)
    assert piped.returncode == 9 and "\x1b" not in piped.stdout
    assert (
        "costs: nothing can be trained" in piped.stdout and "This machine cannot train as it is: 1 pro" in piped.stdout
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(command(), stdout=theirs, stderr=theirs, stdin=theirs, **run) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:
            pass
    os.close(ours)
    assert process.returncode == 9
    assert b"\x1b[1;31mproblem" in shown and b"import torch" in shown
