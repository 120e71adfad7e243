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

from megads.launch.node_ranks import NodePart, NodeRanks, _ended
from megads.runtime.ports import start_secret
from megads.runtime.run_dir import exit_path, failure_path, spare_path

SLEEP = "import time; time.sleep(600)"
RANK_1_TAKES_LONGER = "import os, time; time.sleep(2.0 * int(os.environ['RANK']))"


@pytest.fixture(autouse=True)
def secret(tmp_path: Path) -> Iterator[None]:
    """Creates the secret of a start, as the launcher does."""
    with start_secret(tmp_path, None):
        yield


def started(run_dir: Path, program: str, ranks: int) -> NodeRanks:
    made = NodeRanks(NodePart(run_dir, ("-c", program), ranks, threads_per_rank=1, cpu=True))
    made.start()
    return made


def pids(ranks: NodeRanks) -> dict[int, int]:
    deadline = time.monotonic() + 60
    while len(found := ranks._pids()) < ranks.part.num_ranks and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.distributed
def test_records_are_read_when_a_process_has_ended(tmp_path: Path) -> None:
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
def test_a_rank_whose_word_is_on_another_disk_has_returned(tmp_path: Path) -> None:
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


def test_a_process_that_nobody_waited_for_has_ended() -> None:
    """Catches a zombie that counts as running: the rank server may be too busy to reap it."""
    process = subprocess.Popen([sys.executable, "-c", SLEEP])
    assert not _ended(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert _ended(process.pid)
    process.wait()
    assert _ended(process.pid)
