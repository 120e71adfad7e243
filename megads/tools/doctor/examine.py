"""Runs every check; one that fails itself is a finding too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megads.runtime.environment import user_cache_dir
from megads.tools.doctor import machine, surroundings
from megads.tools.doctor.config import DoctorConfig
from megads.tools.doctor.disk import check_disk
from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.doctor.software import judge_probe
from megads.tools.doctor.trial import Trial


def examine(config: DoctorConfig, conf: Path) -> list[Finding]:
    """Checks this machine and its software.

    Args:
        config: what to look at, and for how long.
        conf: the folder of YAML files.
    """
    runs = Path(config.runs_dir)
    caches = Path(config.cache_dir) if config.cache_dir else user_cache_dir()
    with Trial(config.timeout_s) as trial:
        return run_checks(
            {
                "packages": _check_packages,
                "configs": lambda: _check_configs(conf),
                "cores": machine.check_cores,
                "load": machine.check_load,
                "threads": machine.check_threads,
                "memory": machine.check_memory,
                "shared memory": machine.check_shared_memory,
                "huge pages": machine.check_huge_pages,
                "open files": machine.check_open_files,
                "clock": machine.check_clock,
                "disk of runs": lambda: check_disk("disk of runs", runs, needed=True),
                "disk of caches": lambda: check_disk("disk of caches", caches, needed=False),
                "compilers": surroundings.check_compilers,
                "slurm": surroundings.check_slurm,
                "wandb": surroundings.check_wandb,
                # Last: it waits for what the probe does in the meantime.
                "torch and deepspeed": lambda: judge_probe(trial.outcome()),
            }
        )


def run_checks(checks: Mapping[str, Callable[[], list[Finding]]]) -> list[Finding]:
    """Runs the checks in their order; what stops one of them is in the findings."""
    findings = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            cost = "whether it is in order is not known"
            findings.append(note(name, f"could not be checked: {what}", cost, "see the other findings first"))
    return findings


def worst(findings: list[Finding]) -> Status:
    """Returns the status of the worst finding."""
    return max((finding.status for finding in findings), key=list(Status).index, default=Status.ok)


def _check_packages() -> list[Finding]:
    # Imported here, because it needs a package itself.
    from megads.tools.doctor import packages

    return [*packages.check_python(), *packages.check_packages(), *packages.check_copies(), *packages.check_apex()]


def _check_configs(conf: Path) -> list[Finding]:
    if (conf / "train.yaml").is_file():
        return [ok("configs", str(conf))]
    return [problem("configs", f"no train.yaml in {conf}", "no verb can compose its config", "install megads anew")]
