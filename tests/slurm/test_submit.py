"""submit.sh: checks on the login node before a job is queued."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.slurm.jobs import Jobs
from tests.slurm.training import SUBMIT, overrides


def submit(jobs: Jobs, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SUBMIT, *words], cwd=jobs.folder, env=jobs.environment(), capture_output=True, text=True, check=False
    )


def test_a_dry_run_submits_nothing_and_says_what_would_be(jobs: Jobs, corpus: Path) -> None:
    """Catches a dry run that submits, loses overrides with spaces, or does not show SLURM's answer."""
    words = ("--dry-run", "--nodes=2", "--gpus-per-node=0", "--time=5", *overrides(corpus, jobs.folder / "run"))
    done = submit(jobs, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("would run: sbatch --nodes=2 --gpus-per-node=0 --time=5 ")
    assert "dry run: nothing was started" in done.stdout and "2 = tp 1 x cp 1 x pp 2 x dp 1" in done.stdout
    assert "to start at" in done.stderr
    assert jobs.cluster.command("squeue", "--noheader") == ""
    assert not (jobs.folder / "run").exists()


def test_a_dry_run_refuses_what_does_not_fit(jobs: Jobs, corpus: Path) -> None:
    """Catches a layout that leaves GPUs idle, or options that SLURM refuses, found only when the job starts."""
    layout = overrides(corpus, jobs.folder / "run")
    done = submit(jobs, "--dry-run", "--nodes=2", "--gpus-per-node=4", *layout)
    assert done.returncode == 2
    assert "= 2 ranks, but 2 nodes take 4 each" in done.stderr
    done = submit(jobs, "--dry-run", "--nodes=2", "--gpus-per-node=0", "--partition=nowhere", *layout)
    assert done.returncode == 2
    assert "invalid partition specified: nowhere" in done.stderr and "megads" not in done.stderr


def test_wrong_words_are_refused(jobs: Jobs) -> None:
    """Catches a short option whose value becomes an override, an invalid chain length, and missing overrides."""
    for words in (("-N", "2", "model=tiny"), ("--chain=ten", "model=tiny"), ()):
        done = submit(jobs, *words)
        assert (done.returncode, done.stderr != "") == (2, True), words


def test_what_the_options_do_not_say_is_derived(jobs: Jobs, corpus: Path) -> None:
    """Catches a job of one node for a layout of four, `--nodes 2` whose value becomes an override, and a time limit
    with which a job waits for ever."""
    layout = overrides(corpus, jobs.folder / "run", parallel__pp=2, parallel__dp=3)
    done = submit(jobs, "--dry-run", "--gpus-per-node=2", "--time=5", *layout)
    assert done.stdout.startswith("would run: sbatch --gpus-per-node=2 --time=5 --nodes=3 "), done.stdout + done.stderr
    done = submit(jobs, "--dry-run", "--nodes", "2", "--gpus-per-node", "4", "--time=5", *layout)
    assert done.stdout.startswith("would run: sbatch --nodes=2 --gpus-per-node=4 --time=5 "), done.stdout + done.stderr
    name = jobs.cluster.command("sinfo", "--noheader", "--format=%R").split()[0]
    jobs.cluster.command("scontrol", "update", f"PartitionName={name}", "MaxTime=60")
    try:
        done = submit(jobs, "--dry-run", "--nodes=2", "--time=2-00:00:00", *layout)
    finally:
        jobs.cluster.command("scontrol", "update", f"PartitionName={name}", "MaxTime=UNLIMITED")
    assert done.returncode == 2 and "--time=2-00:00:00 is above the limit 1:00:00 of partition" in done.stderr
