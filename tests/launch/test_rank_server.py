"""The server that forks ranks, with real processes."""

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

from megads.errors import UnhealthyNode
from megads.launch.rank_server import RankServer

MODULE = "tests.launch.forked_ranks"


@pytest.fixture(scope="module")
def warm() -> Iterator[RankServer]:
    server = RankServer({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    yield server
    server.close()


def wait_for_end(server: RankServer, ranks: set[int], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ranks <= server.exit_codes.keys():
        assert time.monotonic() < deadline
        server.poll(0.5)


@pytest.mark.distributed
def test_a_forked_rank_is_like_a_new_process(warm: RankServer, tmp_path: Path) -> None:
    """Catches a rank without its own session, variables, arguments or signals, and one that imports torch again."""
    variables = {"RANK": "1", "PLACE": "here"}
    warm.start(1, ("-m", MODULE, "describe", str(tmp_path / "found.json")), variables)
    wait_for_end(warm, {1})
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["variables"] == variables | {"OMP_NUM_THREADS": "1"}
    assert found["session"] == found["pid"] == warm.pids[1] and warm.exit_codes[1] == 0
    assert found["imported"] == ["megads.train.loop", "torch"]
    assert found["terminated_by_sigterm"] and found["interrupted_by_sigint"] and found["parent_is_the_launcher"]
    assert found["open_pipes"] == []


@pytest.mark.distributed
def test_deepspeed_is_imported_once_if_the_run_uses_it(tmp_path: Path) -> None:
    """Catches ZeRO-2 and ZeRO-3 ranks that each import DeepSpeed themselves."""
    server = RankServer({"DS_ACCELERATOR": "cpu"}, deepspeed=True)
    server.start(0, ("-m", MODULE, "describe", str(tmp_path / "found.json")), {})
    wait_for_end(server, {0})
    server.close()
    assert json.loads((tmp_path / "found.json").read_text())["imported"] == ["deepspeed", "megads.train.loop", "torch"]


@pytest.mark.distributed
def test_exit_codes_and_signals_of_ranks_are_told_apart(warm: RankServer) -> None:
    """Catches an exit code that is lost, assigned to another rank, or without the negative sign of a signal."""
    for rank, end in enumerate(("leave 0", "leave 7", "raise", "wait")):
        warm.start(rank, ("-m", MODULE, *end.split()), {})
    while 3 not in warm.pids:
        warm.poll(0.5)
    os.kill(warm.pids[3], signal.SIGKILL)
    wait_for_end(warm, {0, 1, 2, 3})
    assert warm.exit_codes == {0: 0, 1: 7, 2: 1, 3: -signal.SIGKILL}


@pytest.mark.distributed
def test_a_server_that_is_killed_takes_its_ranks_along() -> None:
    """Catches ranks that outlive a killed server, a launcher that hangs, and a kill during imports that is not seen."""
    server = RankServer({"DS_ACCELERATOR": "cpu"})
    server.start(0, ("-m", MODULE, "wait"), {})
    while 0 not in server.pids:
        server.poll(0.5)
    os.kill(server._process.pid, signal.SIGKILL)
    with pytest.raises(UnhealthyNode, match="ended with -9"):
        wait_for_end(server, {0})
    deadline = time.monotonic() + 120
    while Path(f"/proc/{server.pids[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{server.pids[0]}").exists()
    server.close()
    early = RankServer({"DS_ACCELERATOR": "cpu"})
    early.start(5, ("-m", MODULE, "wait"), {})
    assert early.starting
    early.kill()
    wait_for_end(early, {5})
    assert early.exit_codes == {5: -signal.SIGKILL} and early.pids == {}
    early.close()


def test_a_rank_whose_server_died_at_once_runs_nothing(tmp_path: Path) -> None:
    """Catches an orphaned rank that takes its new parent for its server, and keeps training."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path.cwd())!r})
from megads.launch.rank_server import _become_rank
server = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == server:
    time.sleep(0.01)
order = {{"module": {MODULE!r}, "arguments": ["describe", {str(tmp_path / "found.json")!r}], "variables": {{}}}}
_become_rank(order, server, [])
"""
    # Returns once the rank has exited, which closes the pipe.
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_server_ends_with_its_launcher(tmp_path: Path) -> None:
    """Catches servers, each with torch in memory, that keep running after their launchers."""
    code = f"""
import os, sys
sys.path.insert(0, {str(Path.cwd())!r})
from megads.launch.rank_server import RankServer
print(RankServer({{"DS_ACCELERATOR": "cpu"}})._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
