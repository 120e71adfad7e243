"""Runs a layout on ranks of its own and the reference in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megads.errors import ConfigError
from megads.launch.launcher import LaunchSpec, launch
from megads.monitor.console import Console
from megads.runtime.machine_memory import PROCESS_BYTES, available_memory
from megads.verify.job import Job, result_path
from megads.verify.reference import train_reference
from megads.verify.run import Run, join, read_runs
from megads.verify.scenario import Scenario
from megads.verify.stream import read_stream


def run_reference(scenario: Scenario, corpus: Path) -> Run:
    """One process of plain torch, on one thread, as every rank has."""
    with _one_thread():
        run = train_reference(scenario)
        run.stream = read_stream(corpus, scenario)
    return run


def run_layout(folder: Path, job: Job, console: Console) -> tuple[int, list[Run]]:
    """Starts the ranks and waits for them.

    Args:
        folder: of the job, the ranks' logs and their results; the caller holds it (lease.claimed).
        job: what they do.
        console: says what the launcher has to say.

    Returns:
        The launcher's exit code, and where it is 0 one run a scenario.

    Raises:
        ConfigError: this machine has no memory for that many processes.
    """
    ranks = job.parallel.world_size
    needed, available = ranks * PROCESS_BYTES, available_memory()
    if needed > available:
        raise ConfigError(
            f"{ranks} processes need {needed / 2**30:.1f} GiB, this machine has {available / 2**30:.1f} GiB available: "
            "lower verify.max_ranks, or verify the layout in parts"
        )
    for old in folder.glob("rank_*.pt"):
        old.unlink()
    job.write(folder)
    command = ("-m", "megads.verify.rank", str(folder))
    code = launch(LaunchSpec(folder, ranks, command, threads_per_rank=1, cpu=True, saves=False), console).exit_code
    if code:
        return code, []
    by_rank = [read_runs(result_path(folder, rank)) for rank in range(ranks)]
    of_scenarios = zip(job.scenarios, zip(*by_rank, strict=True), strict=True)
    return code, [join(runs, scenario.model) for scenario, runs in of_scenarios]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
