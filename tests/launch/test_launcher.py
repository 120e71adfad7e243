"""Tests the launcher with real processes, torch's real agent and real signals; stub ranks are in rank_bodies."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from megads.errors import ConfigError
from megads.launch.launcher import LaunchSpec, launch
from megads.monitor.console import Console
from megads.runtime.lease import current_holder
from megads.runtime.metrics import read_json_lines
from tests.command import TIMEOUT_S, StartLauncher

pytestmark = pytest.mark.distributed


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two ranks that share a GPU, which NCCL refuses with an unclear error message."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"= 3 ranks, but this machine has 2 GPUs: lower one of them"):
        launch(LaunchSpec(tmp_path, 3, ()), Console(tmp_path, io.StringIO()))
    assert list(tmp_path.iterdir()) == []


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.fault(25)
def test_ranks_finish_with_equal_threads_and_logs_of_their_own(start: StartLauncher) -> None:
    """Catches ranks that print to the terminal, use every core each, or do not form a process group."""
    launched = start("finish")
    code, out, err = launched.end()
    assert (code, err) == (0, "")
    assert out in ("", "starting ranks\n"), "what ranks print belongs into their logs"  # shown if starting is slow
    logs = [(launched.run_dir / "logs" / f"rank_0000{rank}.log").read_text() for rank in range(2)]
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert all(f"sum 2 threads {threads}" in log for log in logs)


def test_a_ranks_exit_code_lets_slow_peers_exit(start: StartLauncher) -> None:
    """Catches the agent killing rank 1 while it exits, because rank 0 has already exited with code 5."""
    launched = start("return_five_one_after_another")
    code, _, err = launched.end()
    assert (code, err) == (5, "")
    assert (launched.run_dir / "left_1").exists()


def test_the_failing_ranks_code_wins(start: StartLauncher) -> None:
    """Catches torchrun's exit code 1, blaming a peer that only lost its connection, and a peer left in a collective."""
    launched = start("fail_on_rank_1_while_peers_wait", ranks=3)
    code, _, err = launched.end()
    assert code == 7
    assert err.splitlines()[0] == "megads: rank 1: 6 non-finite steps in a row"
    assert "rank_00001.log" in err and "Traceback" not in err
    assert "Traceback" in (launched.run_dir / "logs" / "rank_00001.log").read_text()
    failure = next(e for e in read_json_lines(launched.run_dir / "events.jsonl") if e["event"] == "failure")
    assert (failure["rank"], failure["exit_code"]) == (1, 7)
    diagnosis = next(e for e in read_json_lines(launched.run_dir / "events.jsonl") if e["event"] == "diagnosis")
    assert (diagnosis["cause"], diagnosis["culprit"]) == ("nan_or_loss_divergence", "rank 1")
    assert "diagnosis:" not in err, "the message says it all"


@pytest.mark.slow
def test_a_stopped_peer_does_not_hold_up_the_end(start: StartLauncher) -> None:
    """Catches waiting 30 s for a process that cannot handle SIGTERM, and blaming it for the SIGKILL it then gets."""
    launched = start("fail_with_a_bug_while_a_peer_is_stopped")
    failed = launched.run_dir / "logs" / "failure_00001.json"
    launched.wait_for(failed.exists)
    begin = time.monotonic()
    code, _, err = launched.end()
    assert time.monotonic() - begin < 10
    assert code == 1
    assert "rank 1 failed, ZeroDivisionError: division by zero in the forward" in err


def test_a_rank_killed_by_sigkill_is_named(start: StartLauncher) -> None:
    """Catches a lost rank reported as its peers' connection error, and peers that outlive it."""
    launched = start("wait_in_a_collective", ranks=3)
    pid_files = [launched.run_dir / f"pid_{rank}" for rank in range(3)]
    launched.wait_for(lambda: all(path.exists() and path.read_text() for path in pid_files))
    time.sleep(0.3)
    pids = [int(path.read_text()) for path in pid_files]
    os.kill(pids[2], signal.SIGKILL)
    code, _, err = launched.end()
    assert code == 10
    assert "rank 2 was killed by SIGKILL (out of memory?" in err
    assert (
        "megads: diagnosis: a process was killed or crashed, reason unknown, rank 2; a restart may be enough. " in err
    )
    failure, diagnosis = (
        next(e for e in read_json_lines(launched.run_dir / "events.jsonl") if e["event"] == event)
        for event in ("failure", "diagnosis")
    )
    assert failure["oom_kills"] in (0, None) and diagnosis["restartable"]
    assert diagnosis["evidence"][0]["text"].startswith("rank 2 was killed by SIGKILL")
    assert not any(alive(pid) for pid in pids)


def test_no_orphan_survives_a_killed_launcher(start: StartLauncher) -> None:
    """Catches ranks that keep training after the launcher was killed: the agent starts each in its own session."""
    launched = start("step_until_stopped")
    launched.wait_for(lambda: (launched.run_dir / "metrics.jsonl").exists() and len(launched.rank_pids()) >= 2)
    pids = launched.rank_pids()
    launched.process.kill()
    launched.end()
    deadline = time.monotonic() + TIMEOUT_S
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.quick("15-6")
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 5), (signal.SIGTERM, 6)])
def test_the_first_signal_saves_and_stops(start: StartLauncher, number: signal.Signals, expected: int) -> None:
    """Catches a signal that kills the ranks, is mistaken for another, or leaves a stop file for the next start."""
    launched = start("step_until_stopped")
    metrics = launched.run_dir / "metrics.jsonl"
    launched.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    launched.process.send_signal(number)
    code, out, err = launched.end()
    assert (code, err) == (expected, "")
    assert "step 1 | loss 1.0000" in out
    assert f"{number.name}: saving and stopping" in out
    again = start("step_twice", ranks=1)
    assert again.end()[0] == 0
    assert not (launched.run_dir / "stop").exists()


def test_a_run_that_cannot_be_asked_to_stop_is_killed(start: StartLauncher) -> None:
    """Catches a signal that causes a traceback, or has no effect, if the stop file cannot be written."""
    launched = start("step_until_stopped")
    metrics = launched.run_dir / "metrics.jsonl"
    launched.wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
    pids = launched.rank_pids()
    # A folder in place of the file that the launcher writes: the write fails as on a full disk, for root too.
    (launched.run_dir / f"stop.{launched.process.pid}.partial").mkdir()
    launched.process.send_signal(signal.SIGTERM)
    code, out, err = launched.end()
    assert (code, err) == (130, "")
    assert "the run cannot be asked to stop (" in out and "it is killed" in out
    assert not (launched.run_dir / "stop").exists() and not any(alive(pid) for pid in pids)
    asked = [
        event for event in read_json_lines(launched.run_dir / "events.jsonl") if event["event"] == "stop_requested"
    ]
    assert len(asked) == 1 and "it is killed" in asked[0]["cause"]


@pytest.mark.slow
def test_a_lost_terminal_does_not_end_the_training(start: StartLauncher, tmp_path: Path) -> None:
    """Catches `megads train | head` or a dropped connection that ends the training or changes its exit code."""
    os.mkfifo(tmp_path / "pipe")
    launched = start("step_until_stopped", ranks=1, out=tmp_path / "pipe")
    with (tmp_path / "pipe").open() as pipe:
        assert any(line.startswith("step ") for line in pipe)
    metrics = launched.run_dir / "metrics.jsonl"
    before = metrics.stat().st_size
    launched.wait_for(lambda: metrics.stat().st_size > before + 100)
    launched.process.send_signal(signal.SIGHUP)
    assert launched.process.wait(timeout=40) == 5


@pytest.mark.fault(4)
def test_the_second_signal_kills_at_once(start: StartLauncher) -> None:
    """Catches a run that cannot be ended while it hangs in a collective."""
    launched = start("wait_in_a_collective")
    launched.wait_for((launched.run_dir / "pid_0").exists)
    pids = launched.rank_pids()
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launched.process.poll() is None
    launched.process.send_signal(signal.SIGINT)
    assert launched.end()[0] == 130
    assert not any(alive(pid) for pid in pids)


def test_a_run_directory_in_use_is_refused(start: StartLauncher) -> None:
    """Catches two launchers writing to one run directory, and a lock that outlives its holder."""
    first = start("step_until_stopped", ranks=1)
    first.wait_for(lambda: (holder := current_holder(first.run_dir)) is not None and holder.pid == first.process.pid)
    code, _, err = start("finish", ranks=1).end()
    assert code == 2
    assert err.startswith(f"the run directory {first.run_dir} is in use by process {first.process.pid}")
    first.process.kill()
    first.end()
    assert start("step_twice", ranks=1).end()[0] == 0


def test_ranks_refuse_a_config_that_is_not_the_frozen_one(start: StartLauncher) -> None:
    """Catches ranks that train with another config than the launcher checked."""
    code, _, err = start("finish", "--digest", "0" * 64).end()
    assert code == 2
    assert "the launcher froze 00000000" in err


def test_a_rank_that_cannot_start_is_reported(start: StartLauncher) -> None:
    """Catches a startup error of a rank that is not reported."""
    launched = start("no_such_body")
    code, _, err = launched.end()
    assert code == 1
    assert "AttributeError" in err and "no_such_body" in err
    record = json.loads(next((launched.run_dir / "logs").glob("failure_*.json")).read_text())
    assert record["consequence"] is False


def test_a_fault_in_the_diagnosis_changes_nothing(start: StartLauncher) -> None:
    """Catches a diagnosis that loses the exit code or message because a log is not a regular file."""
    launched = start("fail_on_rank_1_while_peers_wait", ranks=3)
    log = launched.run_dir / "logs" / "rank_00000.log"
    launched.wait_for(log.exists)
    log.unlink()
    os.mkfifo(log)
    code, _, err = launched.end()
    assert code == 7 and err.splitlines()[0] == "megads: rank 1: 6 non-finite steps in a row"
    events = [event["event"] for event in read_json_lines(launched.run_dir / "events.jsonl")]
    assert events[-3:] == ["failure", "exit", "diagnosis"]
