"""A private SLURM of four nodes for the tests of this folder: each is marked `slurm` and run by `make test-slurm`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megads.tools.rehearse.private_slurm import ClusterSize, unavailable_reason
from tests.slurm.faulty_cluster import FaultyCluster
from tests.slurm.jobs import Jobs

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder and skips it, with the reason, where no SLURM can be started."""
    reason = unavailable_reason()
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker("slurm")
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def megads_on_the_path() -> Iterator[None]:
    """Puts `megads` on the PATH for batch scripts, as in an activated environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def slurm_cluster(megads_on_the_path: None) -> Iterator[FaultyCluster]:
    """Four nodes of 8 CPUs and 8 GPUs, as SLURM counts them; a test that takes a node down brings it up again."""
    with FaultyCluster(ClusterSize(num_nodes=4, cpus_per_node=8, gpus_per_node=8)) as cluster:
        yield cluster


@pytest.fixture
def jobs(slurm_cluster: FaultyCluster, tmp_path: Path) -> Iterator[Jobs]:
    """Submits jobs in tmp_path; those that are still running or pending at the end of the test are cancelled."""
    jobs = Jobs(slurm_cluster, tmp_path)
    yield jobs
    jobs.cancel_all()
