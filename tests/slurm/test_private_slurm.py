"""The private SLURM cluster that the tests of this folder and `megads rehearse` use."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from megads.tools.rehearse.private_slurm import PrivateSlurm
from tests.slurm.jobs import Jobs


def test_a_step_runs_on_four_nodes(slurm_cluster: PrivateSlurm) -> None:
    """Catches nodes that are idle but run nothing, and node names that a rendezvous cannot resolve."""
    ask = "import os, socket; print(socket.gethostbyname(os.environ['SLURMD_NODENAME']))"
    out = slurm_cluster.command("srun", "--nodes=4", "--gpus-per-node=8", sys.executable, "-S", "-c", ask)
    assert sorted(out.split()) == sorted(slurm_cluster.nodes)


def test_a_job_is_requeued_with_its_count(jobs: Jobs) -> None:
    """Catches a cluster that cannot requeue, or takes half a minute for it."""
    job = jobs.submit('#!/bin/bash\necho "start ${SLURM_RESTART_COUNT:-0}"\n[[ $SLURM_RESTART_COUNT ]] || sleep 100\n')
    jobs.wait_until(lambda: "start 0" in jobs.output(job), "its start", job)
    start = time.monotonic()
    jobs.cluster.command("scontrol", "requeue", job)
    assert jobs.wait_for(job, timeout_s=60) == "COMPLETED" and "start 1" in jobs.output(job)
    assert time.monotonic() - start < 30


def test_the_batch_script_gets_its_signal(jobs: Jobs) -> None:
    """Catches a cluster in which --signal=B: never fires: all rehearsals of it would pass, or all would fail."""
    script = "#!/bin/bash\ntrap 'echo caught; exit 6' USR1\nwhile :; do sleep 0.1; done\n"
    job = jobs.submit(script, options=("--signal=B:USR1@100", "--time=1"))
    assert jobs.wait_for(job) == "FAILED"
    assert jobs.field(job, "ExitCode") == "6:0" and "caught" in jobs.output(job)


def test_a_lost_node_requeues_its_job_and_comes_back(jobs: Jobs) -> None:
    """Catches a lost node that goes unnoticed: its processes survive, or its job hangs."""
    cluster = jobs.cluster
    job = jobs.submit(
        "#!/bin/bash\nsrun --ntasks-per-node=1 --kill-on-bad-exit=1 sleep 317\n", options=("--nodes=2", "--requeue")
    )
    jobs.wait_until(lambda: len(_sleepers()) == 2, "its tasks", job)
    lost = cluster.command("scontrol", "show", "hostnames", jobs.field(job, "NodeList")).split()[1]
    cluster.lose_node(lost)
    assert len(_sleepers()) == 1, "what ran on the node went with it"
    cluster.wait_for_nodes("down", [lost])
    jobs.wait_until(lambda: jobs.field(job, "Restarts") == "1", "its requeue", job)
    cluster.revive(lost)
    assert set(cluster.node_states()) == set(cluster.nodes)


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """Catches daemons, jobs and folders left behind by a rehearsal that was killed with SIGKILL."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=tmp_path
    )
    assert owner.stdout
    with owner.stdout:
        folder = Path(owner.stdout.readline().strip())
    processes = psutil.Process(owner.pid).children(recursive=True)
    assert len(processes) >= 6, "keeper, munged, slurmctld, slurmd, the job's step and its sleep"
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    deadline = time.monotonic() + 10
    while folder.exists():
        assert time.monotonic() < deadline, "the folder is still there"
        time.sleep(0.05)


_OWNER = """
import time
from megads.tools.rehearse.private_slurm import PrivateSlurm
from megads.tools.rehearse.private_slurm import ClusterSize
cluster = PrivateSlurm(ClusterSize(num_nodes=1))
cluster.start()
cluster.command("sbatch", "--output=/dev/null", "--wrap=sleep 318")
while "RUNNING" not in cluster.command("squeue", "--noheader", "--format=%T"):
    time.sleep(0.05)
time.sleep(0.5)
print(cluster.folder, flush=True)
time.sleep(100)
"""


def _sleepers() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name", "cmdline"]) if _sleeps(process.info)]


def _sleeps(info: dict[str, Any]) -> bool:
    return info["name"] == "sleep" and (info["cmdline"] or [])[-1:] == ["317"]
