"""Index maps of a large dataset: built once per cluster, by ranks on four nodes that start at the same time."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from scripts.bench.data_start import fabricate
from tests.command import REPOSITORY
from tests.slurm.jobs import Jobs
from tests.slurm.training import TRAIN, overrides

NODES, RANKS_PER_NODE = 4, 2
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes={NODES}
#SBATCH --ntasks-per-node={RANKS_PER_NODE}
cd {REPOSITORY}
srun --kill-on-bad-exit=0 python -m scripts.bench.data_start --rank "$1"
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """50 million samples of 2,048 tokens, whose 600 MB of maps take seconds; the tokens are a sparse 200 GB file."""
    prefix = tmp_path / "corpus"
    fabricate(prefix, 100_000, 100_000_000_000)
    return prefix


def ranks_of(jobs: Jobs, job: str) -> list[dict]:
    """Returns the report of each rank of a job."""
    return [json.loads(line) for line in jobs.output(job).splitlines() if line.startswith("{")]


def builders(ranks: list[dict]) -> list[str]:
    return [rank["node"] for rank in ranks if any(text.startswith("built the index map") for text in rank["said"])]


def test_one_rank_of_the_cluster_builds_and_all_map_its_files(jobs: Jobs, dataset: Path) -> None:
    """Catches maps that each node, or each rank, builds for itself or holds in private memory."""
    job = jobs.submit(SCRIPT, str(dataset))
    assert jobs.wait_for(job, timeout_s=400) == "COMPLETED", jobs.output(job)
    ranks = ranks_of(jobs, job)
    assert len(ranks) == NODES * RANKS_PER_NODE and len({rank["node"] for rank in ranks}) == NODES
    assert len(builders(ranks)) == 1
    waited = [rank for rank in ranks if any(text.startswith("waiting for process") for text in rank["said"])]
    assert len(waited) >= NODES - 1, ranks
    maps = set(Path(f"{dataset}.cache").glob("*.npy"))
    assert sum(path.stat().st_size for path in maps) > 500_000_000
    assert all({Path(name) for name in rank["maps"]} == maps for rank in ranks)
    # Anonymous memory, without the pages of the files.
    assert max(rank["peak_mb"] for rank in waited) < 100, ranks


def test_a_killed_builder_is_made_up_for(jobs: Jobs, dataset: Path) -> None:
    """Catches a cluster that hangs because its builder was killed, and a partial map that is read."""
    job = jobs.submit(SCRIPT, str(dataset))
    cache = Path(f"{dataset}.cache")
    half = 100_000_000

    def partial_bytes() -> int:
        return sum(path.stat().st_size for path in cache.glob(".*.partial"))

    jobs.wait_until(lambda: partial_bytes() > half, "half a map", job, 400)
    (lock,) = cache.glob("*.lock")
    found = re.fullmatch(r"process (\d+) on .*", lock.read_text())
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    jobs.wait_for(job, timeout_s=400)
    ranks = ranks_of(jobs, job)
    assert len(ranks) == NODES * RANKS_PER_NODE - 1 and len(builders(ranks)) == 1
    maps = set(cache.glob("*.npy"))
    assert all({Path(name) for name in rank["maps"]} == maps for rank in ranks)


def test_a_training_on_four_nodes_builds_them_once(jobs: Jobs, dataset: Path, tmp_path: Path) -> None:
    """Catches a launcher whose maps the ranks do not find, and ranks that build them again."""
    run_dir = tmp_path / "run"
    shape = {"parallel__pp": 1, "parallel__dp": 4, "train__steps": 2, "train__global_batch_size": 8}
    options = ("--nodes=4", "--gpus-per-node=0", "--time=60")
    wanted = overrides(dataset, run_dir, train__seq_len=2048, **shape)
    job = jobs.submit(TRAIN, *wanted, "data.split=[1,0]", options=options)
    assert jobs.wait_for(job, timeout_s=400) == "COMPLETED", jobs.output(job)
    logs = [path.read_text() for path in sorted((run_dir / "logs").glob("rank_*.log"))]
    assert len(logs) == NODES
    built = sum(log.count("built the index map") for log in logs)
    waited = sum(log.count("waiting for process") for log in logs)
    assert (built, waited) == (1, NODES - 1) or built == 0, logs
    assert len(list(Path(f"{dataset}.cache").glob("*.json"))) == 1
