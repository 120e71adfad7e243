"""A sweep whose points are jobs of a Ray cluster, which the test starts on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megads.tools.sweep.points import read_points
from tests.command import Command, StartCommand, events_of, small_model, steps_of
from tests.tools.sweep.test_local_sweep import saved_point

pytest.importorskip("ray", reason="Ray is not installed: pip install 'megads[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

STEPS = 60
HEAD = """
import sys, ray
found = ray.init(num_cpus=3, include_dashboard=True, log_to_driver=False, _temp_dir=sys.argv[1])
print(found.dashboard_url, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[dict[str, str]]:
    """Environment variables of a client of a cluster with three cores, including its token."""
    variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    # A busy machine takes minutes to start a dozen processes.
    patience = {
        "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
        "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "300",
        "RAY_raylet_start_wait_time_s": "300",
    }
    # A short path, because paths of Unix sockets are limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [sys.executable, "-c", HEAD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | variables | patience,
        )  # fmt: skip
        assert head.stdin and head.stdout
        with head.stdin, head.stdout:
            url = head.stdout.readline().strip()
            assert url, "the cluster did not start"
            yield variables | {"RAY_ADDRESS": f"http://{url}"}
        head.wait(120)


def sweep(cluster: dict[str, str], megads: StartCommand, corpus: Path, *overrides: str, rates: str) -> Command:
    """A sweep over learning rates."""
    model = small_model(
        corpus, train__steps=STEPS, train__max_nonfinite_steps=1, checkpoint__every_steps=10,
        logging__wandb__mode="disabled",
    )  # fmt: skip
    return megads(
        "train", "-m", *model, f"optim.lr={rates}", "sweep.name=mine", "sweep.launcher=ray", "sweep.poll_s=0.5",
        *overrides, variables=cluster,
    )  # fmt: skip


def test_a_killed_sweep_finds_its_jobs(ray_cluster: dict[str, str], megads: StartCommand, corpus: Path) -> None:
    """Catches jobs that the same command submits twice or loses, an infeasible point that is submitted, and Ray's exit
    code reported as the job's."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    rates = "1e-3,3e-3,1e30,-1"
    first = sweep(ray_cluster, megads, corpus, rates=rates)
    first.wait_for(lambda: saved_point(folder, 0) is not None, 400)
    # Like a crash of the login node: jobs continue without the command that submitted them.
    first.kill_everything()
    before = read_points(folder)
    again = sweep(ray_cluster, megads, corpus, rates=rates).end(400)
    assert again.code == 7, again
    points = read_points(folder)
    assert [str(point.state) for point in points] == ["finished", "finished", "failed", "infeasible"]
    assert points[3].job == "" and points[2].exit_code == 7
    known = [(new.job, old.job) for new, old in zip(points, before, strict=False) if old.job]
    assert known and all(new == old for new, old in known)
    for point in points[:2]:
        run_dir = megads.folder / point.run_dir
        assert [line["step"] for line in steps_of(run_dir)] == list(range(1, STEPS + 1))
        assert len(events_of(run_dir, "start")) == 1
        assert "finished after" in again.out


def test_a_stopped_sweep_stops_its_jobs(ray_cluster: dict[str, str], megads: StartCommand, corpus: Path) -> None:
    """Catches jobs that continue after Ctrl-C, and a training job that is killed without saving."""
    folder = megads.folder / "runs" / "sweeps" / "mine"
    started = sweep(ray_cluster, megads, corpus, "train.steps=5000", "sweep.parallel=1", rates="1e-3,3e-3")
    started.wait_for(lambda: saved_point(folder, 0) is not None, 400)
    started.process.send_signal(signal.SIGINT)
    ended = started.end(400)
    assert ended.code == 5, ended
    point = read_points(folder)[0]
    assert (point.state, point.exit_code) == ("stopped", 5)
    assert events_of(megads.folder / point.run_dir, "end")[-1]["stopped"] == "interrupted"


def test_no_cluster(megads: StartCommand, corpus: Path) -> None:
    """Catches a traceback if no cluster is reachable."""
    ended = sweep({}, megads, corpus, "sweep.ray_address=http://127.0.0.1:1", rates="1e-3,3e-3").end(400)
    assert ended.code == 2 and "ray start --head" in ended.err
