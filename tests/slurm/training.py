"""Trainings of a tiny model as SLURM jobs, through the batch script that users submit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from tests.command import REPOSITORY, small_model, steps_of
from tests.slurm.jobs import Jobs

TRAIN = REPOSITORY / "scripts" / "slurm" / "train.sbatch"
SUBMIT = REPOSITORY / "scripts" / "slurm" / "submit.sh"
STEPS = 100
TWO_NODES = ("--nodes=2", "--gpus-per-node=0", "--time=60")


def overrides(corpus: Path, run_dir: Path, **changes: Any) -> list[str]:
    """A run of STEPS steps over two nodes that checkpoints often."""
    plan = {"parallel__pp": 2, "train__steps": STEPS, "checkpoint__every_steps": 10, "schedule__name": "constant"}
    return small_model(corpus, run__dir=run_dir, logging__wandb__mode="disabled", **(plan | changes))


class Training:
    """One run, submitted as one job or several.

    Args:
        jobs: of the test.
        corpus: prefix of the dataset.
        run_dir: the run directory.
        changes: to the config, for every submission.
    """

    def __init__(self, jobs: Jobs, corpus: Path, run_dir: Path, **changes: Any):
        self.jobs, self.run_dir = jobs, run_dir
        self._overrides = overrides(corpus, run_dir, **changes)

    def submit(self, *more: str, options: tuple[str, ...] = ()) -> str:
        """Submits train.sbatch; returns the job's id."""
        return self.jobs.submit(TRAIN, *self._overrides, *more, options=(*TWO_NODES, *options))

    @property
    def step(self) -> int:
        """Last step in the ledger."""
        steps = steps_of(self.run_dir)
        return int(steps[-1]["step"]) if steps else 0

    def wait_for_step(self, job: str, step: int) -> None:
        """Waits until a running job has written a step."""
        self.jobs.wait_until(
            lambda: self.step >= step and self.jobs.state(job) == "RUNNING", f"step {step} of {self.run_dir}", job
        )

    def exit_code(self, job: str) -> int:
        """Exit code of a job that has ended."""
        return int(self.jobs.field(job, "ExitCode").partition(":")[0])

    def signal(self, job: str, name: str) -> None:
        """Sends a signal to the batch script alone, as `#SBATCH --signal=B:` does."""
        self.jobs.cluster.command("scancel", "--batch", f"--signal={name}", job)

    def submit_chain(self, length: int, *more: str) -> str:
        """Submits a chain with submit.sh; returns the array's id."""
        done = subprocess.run(
            [SUBMIT, f"--chain={length}", "--parsable", "--output=chain-%a.out", *TWO_NODES, *self._overrides, *more],
            cwd=self.jobs.folder,
            env=self.jobs.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        self.jobs.submitted.append(done.stdout.strip())
        return self.jobs.submitted[-1]
