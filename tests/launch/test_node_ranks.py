"""The ranks of one node, with idle processes in their place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megads.errors import ConfigError
from megads.launch.hang_detection import HangSettings
from megads.launch.node_ranks import NodePart, NodeRanks, _ended, require_devices
from megads.runtime.heartbeat import STACKS_SIGNAL
from megads.runtime.ports import start_secret
from megads.runtime.run_dir import exit_path, failure_path, spare_path

SLEEP = "import time; time.sleep(600)"
RANK_1_HANGS_AND_RANK_0_DIES_WHEN_ASKED_FOR_ITS_STACKS = """
import time
from megads.runtime.environment import rank_environment
from megads.runtime.heartbeat import heartbeat, stacks_path

environment = rank_environment()
with heartbeat(environment.heartbeats, environment.rank) as own:
    own.enter("building the engine" if environment.rank == 0 else "opening the data")
    if environment.rank == 0:
        # Nothing handles the signal, which then ends the process.
        stacks_path(environment.heartbeats, environment.rank).touch()
    time.sleep(600)
"""
RANK_1_TAKES_LONGER = "import os, time; time.sleep(2.0 * int(os.environ['RANK']))"


@pytest.fixture(autouse=True)
def secret(tmp_path: Path) -> Iterator[None]:
    """Creates the secret of a start, as the launcher does."""
    with start_secret(tmp_path, None):
        yield


def started(run_dir: Path, program: str, ranks: int, hangs: HangSettings | None = None) -> NodeRanks:
    made = NodeRanks(NodePart(run_dir, ("-c", program), ranks, threads_per_rank=1, cpu=True, hangs=hangs))
    made.start()
    return made


def pids(ranks: NodeRanks) -> dict[int, int]:
    deadline = time.monotonic() + 60
    while len(found := ranks._pids()) < ranks.part.num_ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.distributed
def test_failure_records_are_read_only_after_a_process_has_ended(tmp_path: Path) -> None:
    """Catches polling of the shared disk for failure records, ten times a second per rank: a record of a running rank
    would be found."""
    ranks = started(tmp_path, SLEEP, 2)
    try:
        victim = pids(ranks)[1]
        failure_path(tmp_path, 1).parent.mkdir()
        failure_path(tmp_path, 1).write_text(json.dumps({"rank": 1, "exit_code": 3}))
        for _ in range(10):
            assert ranks.poll() and not ranks.failing
        os.kill(victim, signal.SIGKILL)
        for _ in range(100):
            if not ranks.poll() or ranks.failing:
                break
        assert ranks.failing
    finally:
        ranks.kill()
        while ranks.poll():
            continue


@pytest.mark.distributed
def test_a_hang_is_reported_though_another_rank_dies_while_it_is_asked_for_its_stacks(tmp_path: Path) -> None:
    """Catches a rank that is blamed because faulthandler crashed it, as it may when it reads the frames of other
    threads that run; the hung rank was found before."""
    settings = HangSettings(min_s=0.1)
    ranks = started(tmp_path, RANK_1_HANGS_AND_RANK_0_DIES_WHEN_ASKED_FOR_ITS_STACKS, 2, settings)
    try:
        while ranks.poll() and not ranks.hang():
            assert not ranks.failing
        assert [position.rank for position in ranks.hang()] == [1]
    finally:
        ranks.kill()
        while ranks.poll():
            continue
    assert ranks._processes is not None and ranks._processes.exit_codes[0] == -STACKS_SIGNAL


@pytest.mark.distributed
def test_ranks_that_all_end_while_a_hang_is_examined_are_reported(tmp_path: Path) -> None:
    """Catches ranks whose exits are noted by nobody, and a run that ends without a cause."""
    program = RANK_1_HANGS_AND_RANK_0_DIES_WHEN_ASKED_FOR_ITS_STACKS.replace(
        "if environment.rank == 0:\n", "if True:\n"
    )
    ranks = started(tmp_path, program, 2, HangSettings(min_s=0.1))
    try:
        while ranks.poll():
            assert not ranks.hang(), "both have ended before it is reported"
    finally:
        ranks.kill()
    (report,) = ranks.reports()
    assert {end.exit_code for end in report.exits} == {-STACKS_SIGNAL} and len(report.exits) == 2


@pytest.mark.distributed
def test_a_rank_with_its_exit_record_on_another_disk_has_returned(tmp_path: Path) -> None:
    """Catches peers killed during their exit because the first rank to exit found the run's disk full."""
    spare = spare_path(exit_path(tmp_path, 0))
    spare.parent.mkdir(mode=0o700)
    try:
        spare.write_text(json.dumps({"rank": 0, "exit_code": 0}))
        exit_path(tmp_path, 1).parent.mkdir()
        exit_path(tmp_path, 1).write_text(json.dumps({"rank": 1, "exit_code": 0}))
        ranks = started(tmp_path, RANK_1_TAKES_LONGER, 2)
        while ranks.poll():
            assert not ranks.failing
        (report,) = ranks.reports()
        assert report.returned == {0: 0, 1: 0} and not report.failed
    finally:
        spare.unlink()
        spare.parent.rmdir()


@pytest.mark.distributed
@pytest.mark.parametrize("cuda", [True, False])
def test_ranks_of_a_shared_gpu_are_told_so(cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches cluster.ranks_per_gpu that does not reach the ranks' processes, and one that does on a CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    program = "import json, os; json.dump(dict(os.environ), open(f'seen_{os.environ[\"RANK\"]}', 'w'))"
    monkeypatch.chdir(tmp_path)
    ranks = NodeRanks(NodePart(tmp_path, ("-c", program), 4, threads_per_rank=1, ranks_per_gpu=2))
    ranks.start()
    while ranks.poll():
        continue
    seen = [json.loads((tmp_path / f"seen_{rank}").read_text()) for rank in range(4)]
    assert [of_rank["LOCAL_RANK"] for of_rank in seen] == (["0", "0", "1", "1"] if cuda else ["0", "1", "2", "3"])
    hosts = [f"megads-rank-{rank}" if cuda else None for rank in range(4)]
    assert [of_rank.get("NCCL_HOSTID") for of_rank in seen] == hosts
    assert {of_rank["NCCL_SOCKET_IFNAME"] for of_rank in seen} == {"=lo"}
    assert {of_rank["GLOO_SOCKET_IFNAME"] for of_rank in seen} == {"lo"}
    assert {of_rank.get("NCCL_P2P_DISABLE") for of_rank in seen} == ({"1"} if cuda else {None})


def test_every_rank_needs_a_gpu_or_a_share_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks without a GPU that are started, and ranks that may share one that are refused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    require_devices(2, "parallel.dp")
    require_devices(8, "parallel.dp", ranks_per_gpu=4)
    with pytest.raises(ConfigError, match=r"dp = 3 ranks, but this machine has 2 GPUs: lower"):
        require_devices(3, "parallel.dp")
    with pytest.raises(ConfigError, match=r"2 GPUs for 4 ranks each \(cluster\.ranks_per_gpu\)"):
        require_devices(9, "parallel.dp", ranks_per_gpu=4)


def test_a_zombie_process_counts_as_ended() -> None:
    """Catches a zombie that counts as running: the rank server may be too busy to reap it."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    assert not _ended(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert _ended(process.pid)
    process.wait()
    assert _ended(process.pid)
