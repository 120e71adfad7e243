"""What megads can use if it is there: compilers, SLURM, wandb."""

from __future__ import annotations

import re
import shutil

from megads.runtime.environment import slurm_job, wandb_login
from megads.tools.doctor.finding import Finding, note, ok
from megads.tools.doctor.software import ask, installed_version

_SLURM_COMMANDS = ("srun", "sbatch", "scontrol", "sinfo")


def check_compilers() -> list[Finding]:
    """Says which compilers there are and what each would give; training needs none of them."""
    found, missing = [], []
    for name, pattern, use in (
        ("g++", r"(\d+(?:\.\d+)+)$", "torch.compile and kernels for the CPU"),
        ("nvcc", r"release (\d+\.\d+)", "fused kernels for GPUs"),
        ("ninja", r"(\d+(?:\.\d+)+)", "quicker builds of kernels"),
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
    """Says whether this is a SLURM cluster, whether it answers, and whether this is inside a job."""
    there = [name for name in _SLURM_COMMANDS if shutil.which(name)]
    job = slurm_job()
    if not there:
        where = f"inside job {job}, but " if job else ""
        return [ok("slurm", f"{where}no SLURM commands: runs start on this machine only")]
    version = (ask("sinfo", "--version") or ask("srun", "--version") or "of unknown version").removeprefix("slurm ")
    inside = f"inside job {job}" if job else "outside of a job"
    missing = sorted(set(_SLURM_COMMANDS) - set(there))
    if missing:
        cost = f"{', '.join(missing)} are missing: jobs cannot be sent from here"
        return [note("slurm", f"{version}, {inside}", cost, "install SLURM's client commands (slurm-client)")]
    if job is None and "is UP" not in (ask("scontrol", "ping") or ""):
        cost = "the controller does not answer: no job can be sent"
        return [
            note("slurm", f"{version}, {inside}", cost, "scontrol ping; is slurm.conf the cluster's, munge running?")
        ]
    return [ok("slurm", f"{version}, {inside}, the controller answers" if job is None else f"{version}, {inside}")]


def check_wandb() -> list[Finding]:
    """Says whether runs can be recorded with wandb; asks no server."""
    version = installed_version("wandb")
    if version is None:
        return [ok("wandb", "not installed: metrics.jsonl holds every run")]
    login = wandb_login()
    if login:
        return [ok("wandb", f"{version}, key from {login}")]
    cost = "runs are recorded offline; logging.wandb.mode=online would fail"
    return [note("wandb", f"{version}, not logged in", cost, "wandb login, or set WANDB_API_KEY")]
