"""Tests the evidence from processes that really hang: its content, its time limit, and that it blocks nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megads.launch import evidence
from megads.launch.evidence import EvidenceCollection, evidence_folders
from megads.runtime.heartbeat import RankPosition, stacks_path
from megads.runtime.run_dir import evidence_path, rank_log_path
from megads.tools.diagnose.inputs import main_thread_stack

HANG = """
import ctypes, sys, time
from pathlib import Path
from megads.runtime.heartbeat import heartbeat
from megads.runtime.heartbeat import answer_requests
folder, rank, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def waits_for_good():
    mutex, library = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while way == "native":
        library.pthread_mutex_lock(mutex)
    time.sleep(60)
if way != "deaf":
    answer_requests(folder, rank)
with heartbeat(folder, rank):
    print("ready", flush=True)
    waits_for_good()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """One that sleeps, one whose native code holds the GIL, one that is stopped, one that cannot answer requests."""
    folder = tmp_path / "heartbeats"
    folder.mkdir()
    started = {
        rank: subprocess.Popen([sys.executable, "-c", HANG, str(folder), str(rank), way], stdout=subprocess.PIPE)
        for rank, way in enumerate(("sleep", "native", "sleep", "deaf"))
    }
    try:
        for process in started.values():
            assert process.stdout is not None and process.stdout.readline()
        started[2].send_signal(signal.SIGSTOP)
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def collect(run_dir: Path, ranks: dict[int, subprocess.Popen[bytes]]) -> EvidenceCollection:
    pids = {rank: process.pid for rank, process in ranks.items()}
    positions = [RankPosition(rank, 5, "engine step", 30.0) for rank in ranks]
    folder = evidence_path(run_dir, 1, "now")
    made = EvidenceCollection(folder, run_dir, run_dir / "heartbeats", pids, positions, "a test")
    made.wait()
    return made


def test_hung_ranks_leave_their_stacks_and_live_on(
    tmp_path: Path, ranks: dict[int, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a rank that the request terminates, stacks that need the interpreter, a stopped process that blocks all
    evidence, and stacks of an earlier request reported as new."""
    monkeypatch.setattr(evidence, "LIMIT_S", 120.0)  # reading takes longer on a busy machine
    rank_log_path(tmp_path, 0).parent.mkdir()
    rank_log_path(tmp_path, 0).write_text("x" * 100_000 + "\nthe last line\n")
    for _ in range(2):
        folder = collect(tmp_path, ranks).folder
    assert all(process.poll() is None for process in ranks.values())
    assert [frame.split()[-1] for frame in main_thread_stack(folder, 0)[:2]] == ["waits_for_good", "<module>"]
    assert any(frame.endswith("waits_for_good") for frame in main_thread_stack(folder, 1))
    assert (folder / "stacks_rank_00000.txt").read_text().count("in waits_for_good") == 1
    assert main_thread_stack(folder, 2) == main_thread_stack(folder, 3) == []
    node = json.loads((folder / "node.json").read_text())
    assert node["reason"] == "a test" and [position["rank"] for position in node["positions"]] == [0, 1, 2, 3]
    assert node["processes"]["2"]["State"].startswith("T") and "VmRSS" in node["processes"]["0"]
    tail = (folder / "log_rank_00000.txt").read_text()
    assert tail.endswith("the last line\n") and len(tail) <= 1 << 15
    assert evidence_folders(tmp_path, 1) == [folder] and evidence_folders(tmp_path, 2) == []


def test_unwritable_evidence_does_not_stop_a_restart(tmp_path: Path, ranks: dict[int, subprocess.Popen[bytes]]) -> None:
    """Catches a run that is not restarted because its evidence cannot be written."""
    (tmp_path / "evidence").write_text("in the way")
    assert collect(tmp_path, ranks).finished


def test_slow_evidence_does_not_delay_a_restart(
    tmp_path: Path, ranks: dict[int, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a restart that waits for a disk or a driver that does not respond."""
    responds, responded = threading.Event(), list[bool]()
    monkeypatch.setattr(evidence, "LIMIT_S", 0.3)
    monkeypatch.setattr(evidence, "_tail", lambda _: responded.append(responds.wait(120.0)))
    try:
        assert collect(tmp_path, ranks).finished
        assert responded == []
    finally:
        responds.set()


def test_evidence_survives_missing_and_failing_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches evidence that is aborted by a tool that is missing, fails, or hangs."""
    tool = tmp_path / "dmesg"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(evidence, "_TOOL_TIMEOUT_S", 0.3)
    assert evidence._kernel_lines() == b""
    for script, lines in (
        ("exit 1", b""),
        ("exec /bin/sleep 5", b""),
        ("echo usb found; echo NVRM: Xid 79", b"NVRM: Xid 79"),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert evidence._kernel_lines() == lines


def test_a_rank_that_cannot_answer_yet_is_not_asked(tmp_path: Path) -> None:
    """Catches a rank killed during its start by a signal for which it has no handler yet."""
    assert not stacks_path(tmp_path, 0).exists()
    evidence.ask_ranks(tmp_path, {0: os.getpid()})
