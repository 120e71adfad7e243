"""Runs every check of `megads doctor`; a check that raises becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megads.api import LONGEST_WAIT_S, ConfigError, user_cache_dir
from megads.tools.doctor import machine, software
from megads.tools.doctor.finding import Finding, Status, note, ok, problem
from megads.tools.doctor.probe import probe_process


@dataclass
class DoctorConfig:
    """`megads doctor`: checks this machine and its software."""

    json: bool = False
    """Print one JSON object instead of a table; --json is short for it."""
    runs_dir: str = "runs"
    """Folder that runs write to; its disk is checked."""
    cache_dir: str | None = None
    """Folder of cached index maps and measurements; null is the user's cache folder."""
    timeout_s: float = 6.0
    """Timeout of the checks that run in a separate process: importing torch and DeepSpeed, a collective, the GPUs."""

    def check(self) -> None:
        """Raises ConfigError if the timeout is out of range."""
        if not 0 < self.timeout_s <= LONGEST_WAIT_S:
            raise ConfigError(f"timeout_s = {self.timeout_s}: must be positive, and at most {LONGEST_WAIT_S:.0f}")


def examine(config: DoctorConfig, conf: Path) -> list[Finding]:
    """Checks this machine and its software.

    Args:
        config: folders to check, and the timeout.
        conf: folder of the YAML configs.
    """
    runs = Path(config.runs_dir)
    caches = Path(config.cache_dir) if config.cache_dir else user_cache_dir()
    with probe_process(config.timeout_s) as wait_for_findings:
        return run_checks(
            {
                "python": software.check_python,
                "packages": software.check_packages,
                "copies": software.check_copies,
                "apex": software.check_apex,
                "configs": lambda: _check_configs(conf),
                "cores": machine.check_cores,
                "processor": machine.check_processor,
                "load": machine.check_load,
                "threads": machine.check_threads,
                "memory": machine.check_memory,
                "shared memory": machine.check_shared_memory,
                "huge pages": machine.check_huge_pages,
                "open files": machine.check_open_files,
                "clock": machine.check_clock,
                "disk of runs": lambda: machine.check_disk("disk of runs", runs, needed=True),
                "disk of caches": lambda: machine.check_disk("disk of caches", caches, needed=False),
                "compilers": software.check_compilers,
                "slurm": software.check_slurm,
                "wandb": software.check_wandb,
                # Last, because it waits for the probe, which runs during the other checks.
                "torch and deepspeed": wait_for_findings,
            }
        )


def run_checks(checks: Mapping[str, Callable[[], list[Finding]]]) -> list[Finding]:
    """Runs the checks in order; an exception of a check becomes a note."""
    findings = []
    for name, check in checks.items():
        try:
            findings += check()
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            cost = "its state is unknown"
            findings.append(note(name, f"could not be checked: {what}", cost, "see the other findings first"))
    return findings


def worst(findings: list[Finding]) -> Status:
    """Returns the status of the worst finding."""
    return max((finding.status for finding in findings), key=list(Status).index, default=Status.ok)


def _check_configs(conf: Path) -> list[Finding]:
    if (conf / "train.yaml").is_file():
        return [ok("configs", str(conf))]
    return [problem("configs", f"no train.yaml in {conf}", "no verb can compose its config", "reinstall megads")]
