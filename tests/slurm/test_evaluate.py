"""Tests a coordinated evaluation whose workers are a job array of a real SLURM."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import psutil
import pytest

from megads.errors import EXIT_OK
from tests.command import REPOSITORY, Command, StartCommand
from tests.slurm.jobs import Jobs
from tests.tools.evaluate.test_coordinator import (
    computed,
    live_members,
    make_run,
    parts_done,
    plain,
    results_in,
    start_evaluation,
    state_folder,
    units_of,
)

__all__ = ["plain"]

pytest.importorskip("lm_eval")


def start_on_slurm(jobs: Jobs, megads: StartCommand) -> Command:
    """Starts an evaluation on two nodes of one worker."""
    script = f"sbatch={REPOSITORY / 'scripts' / 'slurm' / 'evaluate.sbatch'}"
    return start_evaluation(
        megads, "workers=1", "launcher=slurm", "nodes=2", script, "sbatch_options='--time=60 --exclusive'",
        # As many threads as the plain evaluation: their number decides the last digits.
        variables=jobs.environment() | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_two_nodes_with_kills(jobs: Jobs, megads: StartCommand, plain: dict[str, Any]) -> None:
    """Catches a work unit lost with its worker or its node, a second command that submits a second job, a checkpoint
    that workers of a node read twice, and results that differ from those of one process."""
    folder = megads.folder
    make_run(folder)
    first = start_on_slurm(jobs, megads)
    first.wait_for(lambda: parts_done(folder) >= 2 and len(live_members(folder)) == 2)
    jobs.submitted.append(json.loads((state_folder(folder) / "job.json").read_text())["job"])
    worker, other = live_members(folder)
    assert worker.node != other.node
    os.kill(worker.pid, signal.SIGKILL)
    # The login node goes down, and so does a node: its pool and all its workers.
    first.kill_everything()
    pool = psutil.Process(other.pid).parent()
    assert pool is not None and "megads.tools.evaluate.worker_pool" in pool.cmdline()
    for process in [*pool.children(recursive=True), pool]:
        process.kill()

    ended = start_on_slurm(jobs, megads).end(400)
    assert ended.code == EXIT_OK, ended
    assert f"job {jobs.submitted[0]} goes on" in ended.err
    assert results_in(folder / "run" / "evaluation") == plain
    assert abs(computed(folder) - len(units_of(folder))) <= 2
    jobs.wait_for(f"{jobs.submitted[0]}_0")
    jobs.wait_for(f"{jobs.submitted[0]}_1")
    assert not list((folder / "memory").iterdir())
