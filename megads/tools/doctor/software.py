"""Checks of installed software: Python and its packages, compilers, SLURM, wandb."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import megads
from megads.ops.apex import ApexState, find_apex
from megads.runtime.environment import slurm_job, wandb_login
from megads.tools.doctor.finding import Finding, note, ok, problem

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Installed = Mapping[str, Sequence[str]]
"""Versions of each installed package by normalised name; more than one if several copies are on sys.path."""


@dataclass(frozen=True)
class KnownBad:
    """Releases of a package with a known defect.

    Attributes:
        package: name of the package.
        releases: version specifier of the releases.
        cost: effect of the defect.
        remedy: what to install instead.
        python: version specifier of the affected Python versions.
    """

    package: str
    releases: str
    cost: str
    remedy: str
    python: str = ""


_NEWER = "pip install 'deepspeed>=0.19.8'"
KNOWN_BAD = (
    KnownBad(
        "deepspeed", "<0.18.9",
        "pipeline gradients are summed over micro-batches: clipping and the grad norm are wrong", _NEWER,
    ),
    KnownBad(
        "deepspeed", ">=0.18.9,<0.19.3",
        "pipeline gradients are divided by the number of micro-batches at every stage (DeepSpeed #8152)", _NEWER,
    ),
    KnownBad(
        "deepspeed", ">=0.19.3,<0.19.8", "ZeRO-3 takes steps whose gradients are not finite, except in fp16", _NEWER
    ),
    KnownBad(
        "hydra-ax-sweeper", "==1.2.0",
        "breaks every Hydra application of this environment when plugins are discovered",
        "pip uninstall hydra-ax-sweeper", python=">=3.11",
    ),
    KnownBad("omegaconf", ">=2.4.0.dev0", "hydra-core 1.3 does not work with it", "pip install 'omegaconf<2.4'"),
)  # fmt: skip


def _installed_packages() -> dict[str, list[str]]:
    """Returns the versions of the installed packages; of several copies, the one that Python imports comes first."""
    found: dict[str, dict[str, str]] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"] if distribution.metadata else None
        if name:
            folder = str(Path(str(distribution.locate_file(""))).resolve())
            found.setdefault(_normalised(name), {}).setdefault(folder, distribution.version or "0")
    return {name: list(copies.values()) for name, copies in found.items()}


def _normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def stated_requirements() -> tuple[str, list[Requirement]]:
    """Returns the Python versions and packages that megads requires, from this checkout or the installed metadata."""
    # Imported here and below, so that the other checks still run if packaging is missing.
    from packaging.requirements import Requirement

    pyproject = Path(megads.__file__).resolve().parents[1] / "pyproject.toml"
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
        python, lines = str(project["requires-python"]), list(project["dependencies"])
    else:
        distribution = importlib.metadata.distribution("megads")
        python, lines = distribution.metadata["Requires-Python"], list(distribution.requires or [])
    requirements = [Requirement(line) for line in lines]
    # The marker excludes requirements of extras.
    return python, [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


def check_python() -> list[Finding]:
    """Checks the interpreter's version."""
    wanted, _ = stated_requirements()
    found = platform.python_version()
    if _contains(wanted, found):
        return [ok("python", f"{found}, {sys.prefix}")]
    return [problem("python", found, f"megads needs Python {wanted}", "create an environment with a supported Python")]


def check_packages() -> list[Finding]:
    """Checks every required package, and releases with known defects."""
    _, requirements = stated_requirements()
    return package_findings(requirements, _installed_packages(), platform.python_version())


def package_findings(requirements: Sequence[Requirement], installed: Installed, python: str) -> list[Finding]:
    """Compares the installed packages with the requirements and with KNOWN_BAD.

    Args:
        requirements: packages that megads requires.
        installed: installed packages.
        python: version of the interpreter.
    """
    good, findings = [], []
    for requirement in requirements:
        name = _normalised(requirement.name)
        version = installed.get(name, [""])[0]
        if version and requirement.specifier.contains(version, prereleases=True):
            good.append(f"{name} {version}")
            continue
        remedy = f"pip install '{requirement}'"
        findings.append(problem(name, version or "not installed", f"megads needs {requirement}", remedy))
    for bad in KNOWN_BAD:
        version = installed.get(bad.package, [""])[0]
        if version and _contains(bad.releases, version) and _contains(bad.python, python):
            findings.append(problem(bad.package, version, bad.cost, bad.remedy))
    return [ok("packages", ", ".join(good)), *findings]


def _contains(releases: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(releases).contains(version, prereleases=True)


def check_apex() -> list[Finding]:
    """Reports which package is installed as apex: NVIDIA's, complete or not, or another project."""
    found = find_apex()
    if found.state is ApexState.absent:
        return [ok("apex", "not installed: only needed for ops.impl=apex and optim.impl=apex")]
    if found.state is ApexState.present:
        return [ok("apex", f"{found.text}: ops.impl=apex and optim.impl=apex use it on GPUs")]
    cost = "ops.impl=apex and optim.impl=apex are rejected; nothing else needs it"
    return [note("apex", found.text, cost, found.remedy)]


def check_copies() -> list[Finding]:
    """Checks that there is one copy of torch and of DeepSpeed, and one major version of CUDA libraries."""
    return copy_findings(_installed_packages())


def copy_findings(installed: Installed) -> list[Finding]:
    """Returns findings about several copies of torch or DeepSpeed, and about CUDA libraries of several major versions.

    Args:
        installed: installed packages.
    """
    findings = []
    for name in ("torch", "deepspeed"):
        if len(installed.get(name, [])) > 1:
            found = f"{', '.join(installed[name])} are all on sys.path; the first is imported"
            cost = "a subprocess with another sys.path would import another copy"
            remedy = f"run pip uninstall {name} until none is left, then install it once"
            findings.append(note(f"copies of {name}", found, cost, remedy))
    # Packages such as nvidia-cublas-cu12.
    parts = [name.rpartition("-cu") for name in installed if name.startswith("nvidia-")]
    generations = sorted({generation for _, _, generation in parts if generation.isdigit()})
    if len(generations) > 1:
        found = f"packages of CUDA {' and '.join(generations)} are installed side by side"
        cost = "torch may load a library of the wrong version"
        findings.append(note("CUDA libraries", found, cost, "reinstall torch in a new environment"))
    return findings


def ask(*command: str, timeout_s: float = 2.0) -> str | None:
    """Returns the output of a program, or None if it is missing, fails or exceeds the timeout."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return result.stdout.strip()


def installed_version(package: str) -> str | None:
    """Returns the version of a package from its metadata, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_SLURM_COMMANDS = ("srun", "sbatch", "scontrol", "sinfo")


def check_compilers() -> list[Finding]:
    """Reports which compilers are installed and what the missing ones are for; training needs none of them."""
    found, missing = [], []
    for name, pattern, use in (
        ("g++", r"(\d+(?:\.\d+)+)$", "torch.compile and kernels for the CPU"),
        ("nvcc", r"release (\d+\.\d+)", "fused kernels for GPUs"),
        ("ninja", r"(\d+(?:\.\d+)+)", "faster builds of kernels"),
    ):
        text = ask(name, "--version")
        if text is None:
            missing.append(f"{name} ({use})")
            continue
        version = re.search(pattern, text.splitlines()[0] if name == "g++" else text)
        found.append(f"{name} {version.group(1) if version else 'of unknown version'}")
    if not missing:
        return [ok("compilers", ", ".join(found))]
    cost = f"without {', '.join(missing)} plain torch operations are used instead; results are the same"
    return [note("compilers", ", ".join(found) or "none", cost, "apt-get install g++ ninja-build; nvcc is in CUDA")]


def check_slurm() -> list[Finding]:
    """Reports whether this machine has SLURM, whether its controller responds, and whether this is inside a job."""
    there = [name for name in _SLURM_COMMANDS if shutil.which(name)]
    job = slurm_job()
    if not there:
        where = f"inside job {job}, but " if job else ""
        return [ok("slurm", f"{where}no SLURM commands: runs start on this machine only")]
    version = (ask("sinfo", "--version") or ask("srun", "--version") or "of unknown version").removeprefix("slurm ")
    inside = f"inside job {job}" if job else "outside of a job"
    missing = sorted(set(_SLURM_COMMANDS) - set(there))
    if missing:
        cost = f"{', '.join(missing)} are missing: jobs cannot be submitted from here"
        return [note("slurm", f"{version}, {inside}", cost, "install SLURM's client commands (slurm-client)")]
    if job is None and "is UP" not in (ask("scontrol", "ping") or ""):
        cost = "the controller does not respond: no job can be submitted"
        return [note("slurm", f"{version}, {inside}", cost, "run scontrol ping; check slurm.conf and munge")]
    return [ok("slurm", f"{version}, {inside}, the controller responds" if job is None else f"{version}, {inside}")]


def check_wandb() -> list[Finding]:
    """Reports whether runs can be recorded with wandb, without contacting a server."""
    version = installed_version("wandb")
    if version is None:
        return [ok("wandb", "not installed: metrics are in metrics.jsonl only")]
    login = wandb_login()
    if login:
        return [ok("wandb", f"{version}, key from {login}")]
    cost = "runs are recorded offline; logging.wandb.mode=online would fail"
    return [note("wandb", f"{version}, not logged in", cost, "wandb login, or set WANDB_API_KEY")]
