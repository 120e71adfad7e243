"""Submits real jobs to a private SLURM, waits for their states and reads what they wrote."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.command import REPOSITORY
from tests.slurm.faulty_cluster import FaultyCluster

TIMEOUT_S = 500.0
"""Only what never happens takes so long: on a busy machine ranks of four nodes take minutes to start. It is below
cluster.timeout_s, for which ranks wait that hang."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


class Jobs:
    """The jobs of one test.

    Args:
        cluster: where they run.
        folder: from which they are submitted; scripts and outputs are there.
    """

    def __init__(self, cluster: FaultyCluster, folder: Path):
        self.cluster = cluster
        self.folder = folder
        self.submitted: list[str] = []

    def submit(self, script: str | Path, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> str:
        """Submits a script with sbatch and returns the job's id. Its output is `<folder>/job-<id>.out`.

        Args:
            script: a path, or the text of a script.
            arguments: of the script.
            options: of sbatch, before the script's name.
            variables: added to the environment; PYTHONPATH names this repository, as in tests.command.
        """
        if isinstance(script, str):
            path = self.folder / f"script-{len(self.submitted)}.sbatch"
            path.write_text(script)
        else:
            path = script
        output = [] if any(option.startswith(("--output", "-o")) for option in options) else ["--output=job-%j.out"]
        done = subprocess.run(
            ["sbatch", "--parsable", *output, *options, str(path), *arguments],
            cwd=self.folder,
            env=self.environment(variables),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.submitted.append(done.stdout.strip().partition(";")[0])
        return self.submitted[-1]

    def environment(self, variables: Mapping[str, str] = {}) -> dict[str, str]:
        """Returns the environment of a client command and, by default, of the jobs it submits."""
        paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        return self.cluster.environment() | {"PYTHONPATH": ":".join(paths)} | dict(variables)

    def state(self, job: str) -> str:
        """Returns the state of a job: PENDING, RUNNING, COMPLETED, ..."""
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        """Returns a field of `scontrol show job`, such as ExitCode ("6:0"), Restarts or NodeList."""
        fields = self.cluster.command("scontrol", "--oneliner", "show", "job", job).split()
        return dict(field.partition("=")[::2] for field in fields)[name]

    def wait_for(self, job: str, *states: str, timeout_s: float = TIMEOUT_S) -> str:
        """Waits until a job is in one of the states, by default in any final one, and returns the state."""
        wanted = states or ENDED
        self.wait_until(lambda: self.state(job) in wanted, f"job {job} to be {' or '.join(wanted)}", job, timeout_s)
        return self.state(job)

    def wait_until(self, condition: Callable[[], bool], what: str, job: str, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until a condition holds; a failure's message names the condition and shows the job's output."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}; {self.state(job)}:\n{self.output(job)[-4000:]}"
            time.sleep(0.05)

    def output(self, job: str) -> str:
        """Returns what the job has written so far."""
        path = self.folder / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def cancel_all(self) -> None:
        """Cancels running and pending jobs, and waits until they are gone: the next test needs the nodes."""
        for job in self.submitted:
            subprocess.run(["scancel", job], env=self.environment(), capture_output=True, check=False)
        deadline = time.monotonic() + TIMEOUT_S
        while left := self.cluster.command("squeue", "--noheader", "--format=%i %T"):
            assert time.monotonic() < deadline, f"jobs survive scancel: {left}"
            time.sleep(0.05)
