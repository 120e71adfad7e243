"""One rank of a verification: `python -m megads.verify.rank <folder>`, started by megads.verify.start only."""

from __future__ import annotations

import argparse
import importlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megads.errors import EXIT_OK
from megads.runtime.rank_process import run_rank, start_rank

if TYPE_CHECKING:
    from megads.parallel.config import ParallelConfig
    from megads.verify.scenario import Scenario


@dataclass(frozen=True)
class Job:
    """What every rank does.

    Attributes:
        parallel: the layout.
        scenarios: trained one after another, each on an engine of its own.
        corpus: prefix of the dataset that the data path is checked on.
        timeout_s: longest wait for a peer.
        defect: module:function, called first; tests break something with it.
    """

    parallel: ParallelConfig
    scenarios: tuple[Scenario, ...]
    corpus: Path
    timeout_s: float
    defect: str = ""


def job_path(folder: Path) -> Path:
    """Where the job is."""
    return folder / "job.pickle"


def result_path(folder: Path, rank: int) -> Path:
    """Where a rank leaves its RankRun of every scenario."""
    return folder / f"rank_{rank:05d}.pickle"


def main() -> NoReturn:
    """Reads the job, does it and writes what came out."""
    parser = argparse.ArgumentParser(prog="python -m megads.verify.rank")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    rank = start_rank(folder).rank
    run_rank(folder, lambda: _work(folder, rank))


def _work(folder: Path, rank: int) -> int:
    # Imported after the log is open, so that a failing import is in it.
    import torch

    from megads.runtime.distributed import world
    from megads.verify.layout import build_engine, train_rank
    from megads.verify.stream import read_stream

    job: Job = pickle.loads(job_path(folder).read_bytes())
    if job.defect:
        module, function = job.defect.split(":")
        getattr(importlib.import_module(module), function)()
    runs = []
    with world(torch.device("cpu"), job.timeout_s):
        for scenario in job.scenarios:
            engine = build_engine(scenario, job.parallel)
            run, grid = train_rank(scenario, engine), engine.grid
            ends = grid.pp.rank in job.parallel.placement.ends
            run.stream = read_stream(job.corpus, scenario, grid.dp.rank, grid.dp.size, needs_tokens=ends)
            runs.append(run)
            del engine
    result_path(folder, rank).write_bytes(pickle.dumps(runs))
    return EXIT_OK


if __name__ == "__main__":
    main()
