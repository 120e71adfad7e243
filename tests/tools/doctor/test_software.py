"""Versions, known-bad releases and duplicate packages; compilers, SLURM and wandb, with and without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megads.tools.doctor import software
from megads.tools.doctor.finding import Finding, Status
from megads.tools.doctor.software import (
    ask,
    check_packages,
    check_python,
    copy_findings,
    installed_version,
    package_findings,
    stated_requirements,
)

REPOSITORY = Path(__file__).parents[3]


def judged(installed: dict[str, list[str]], python: str = "3.12.1", *wanted: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in package_findings([Requirement(w) for w in wanted], installed, python)}


def test_this_environment_is_in_order() -> None:
    """Catches a doctor that reports a problem in a tested environment, and one that reads no requirements."""
    assert [finding.status for finding in [*check_python(), *check_packages()]] == [Status.ok] * 2
    python, requirements = stated_requirements()
    assert python.startswith(">=3.11")
    assert {"deepspeed", "hydra-core", "omegaconf", "tokenizers", "torch"} <= {r.name for r in requirements}
    assert "ruff" not in {r.name for r in requirements}


@pytest.mark.parametrize(
    ("package", "version", "python", "expected"),
    [
        ("deepspeed", "0.17.6", "3.11.0", "summed"),
        ("deepspeed", "0.18.9", "3.11.0", "divided"),
        ("deepspeed", "0.19.2+cpu", "3.11.0", "divided"),
        ("deepspeed", "0.19.7", "3.11.0", "not finite"),
        ("deepspeed", "0.19.8", "3.11.0", None),
        ("omegaconf", "2.4.0.dev3", "3.11.0", "does not work"),
        ("omegaconf", "2.3.1", "3.11.0", None),
        ("hydra-ax-sweeper", "1.2.0", "3.11.0", "every Hydra application"),
        ("hydra-ax-sweeper", "1.2.0", "3.10.9", None),
    ],
)
def test_known_bad_releases(package: str, version: str, python: str, expected: str | None) -> None:
    """Catches a release that trains incorrectly and is accepted, and its fixed successor that is refused."""
    found = judged({package: [version]}, python).get(package)
    assert (found is None) if expected is None else (found is not None and expected in found.cost)
    assert found is None or found.remedy


def test_missing_and_old_packages_are_problems() -> None:
    """Catches versions that are compared as text: 2.10 is newer than 2.9."""
    findings = judged({"torch": ["2.8.0"], "numpy": ["2.10"]}, "3.12.1", "torch>=2.9", "numpy>=2.9", "xxhash")
    assert (findings["torch"].status, findings["torch"].found) == (Status.problem, "2.8.0")
    assert findings["xxhash"].found == "not installed"
    assert findings["packages"].found == "numpy 2.10"


def test_copies_and_mixed_cuda() -> None:
    """Catches two torch installations, or CUDA libraries of two versions, that are not reported."""
    found = copy_findings({"torch": ["2.13.0", "2.9.0"], "nvidia-cublas-cu12": ["1"], "nvidia-nccl-cu13": ["1"]})
    assert [finding.check for finding in found] == ["copies of torch", "CUDA libraries"]
    assert copy_findings({"torch": ["2.13.0"], "nvidia-cublas-cu12": ["1"], "nvidia-nccl-cu12": ["1"]}) == []


def test_planted_packages_are_found(tmp_path: Path) -> None:
    """Catches a search that misses packages on PYTHONPATH: a second torch, PyPI's apex, a sweeper that breaks Hydra."""
    for name, version in (("torch", "2.1.0"), ("hydra_ax_sweeper", "1.2.0"), ("apex", "0.9.10.dev0")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    code = (
        "from megads.tools.doctor.software import *\n"
        "for f in [*check_packages(), *check_copies(), *check_apex()]: print(f.status, f.check, f.found, sep='|')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = result.stdout.splitlines()
    assert "problem|torch|2.1.0" in lines and "problem|hydra-ax-sweeper|1.2.0" in lines
    assert any(line.startswith("note|copies of torch|2.1.0, 2.") for line in lines)
    assert any(line.startswith("note|apex|apex 0.9.10.dev0 is not NVIDIA's: PyPI's package") for line in lines)


def test_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches missing compilers or SLURM, as on a laptop, that are reported as a problem."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (compilers,), (slurm,) = software.check_compilers(), software.check_slurm()
    assert (compilers.status, compilers.found) == (Status.note, "none")
    assert slurm.status == Status.ok and "this machine only" in slurm.found


def test_half_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a container with only srun mounted, or with an srun that fails, that is not reported."""
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    (slurm,) = software.check_slurm()
    assert slurm.status == Status.note and "sbatch" in slurm.cost and "inside job 17" in slurm.found


def test_wandb_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key in ~/.netrc that is not found, one for another server that is used, and a key that is printed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine wandb.example login user password not-a-real-key\n")
    netrc.chmod(0o600)
    (other,) = software.check_wandb()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    (found,) = software.check_wandb()
    assert found.status == Status.ok and "not-a-real-key" not in found.found
    if installed_version("wandb"):
        assert other.status == Status.note and str(netrc) in found.found


def test_ask_survives_every_program() -> None:
    """Catches a doctor that hangs or fails with a program that it runs."""
    assert ask("echo", "7") == "7"
    assert ask("false") is None
    assert ask("no-such-program") is None
    assert ask("sleep", "9", timeout_s=0.1) is None
