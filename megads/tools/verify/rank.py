"""One rank of a verification, started by megads.tools.verify.compare: `python -m megads.tools.verify.rank <folder>`."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import NoReturn

from megads.api import EXIT_OK, run_rank, start_rank


def main() -> NoReturn:
    """Reads the job, runs it and writes the results."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.verify.rank")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rank = start_rank(folder).rank
    run_rank(folder, lambda: _work(folder, rank))


def _work(folder: Path, rank: int) -> int:
    # Imported after the log is open, so that import errors are logged.
    import torch

    from megads.api import import_plugins, rank_device, rank_environment, world
    from megads.tools.verify.layout import build_engine, train_rank
    from megads.tools.verify.run import read_stream, write_runs
    from megads.tools.verify.scenario import Job, result_path

    job = Job.read(folder)
    import_plugins(job.plugins)
    if job.defect:
        module, function = job.defect.split(":")
        getattr(importlib.import_module(module), function)()
    runs = []
    device = rank_device(rank_environment(), deterministic=True) if job.cuda else torch.device("cpu")
    with world(device, job.timeout_s):
        for scenario in job.scenarios:
            engine = build_engine(scenario, job.parallel, device=device)
            run, grid = train_rank(scenario, engine), engine.grid
            ends = grid.pp.rank in job.parallel.placement.ends
            run.stream = read_stream(job.corpus, scenario, grid.dp.rank, grid.dp.size, needs_tokens=ends)
            runs.append(run)
            del engine
    write_runs(result_path(folder, rank), runs)
    return EXIT_OK


if __name__ == "__main__":
    main()
