"""Hung ranks: named within seconds, killed in time, peers not blamed. All processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megads.runtime.heartbeat import (
    INTERVAL_S,
    LOST_AFTER_S,
    Heartbeat,
    HeartbeatMonitor,
    RankPosition,
    heartbeat,
    heartbeat_path,
    render_positions,
)
from megads.runtime.metrics import read_json_lines
from tests.command import Launched, StartLauncher

BEAT = """
import sys, time
from pathlib import Path
from megads.runtime.heartbeat import heartbeat
with heartbeat(Path(sys.argv[1]), 3) as beats:
    beats.enter("sleeping", step=5)
    print("beats", flush=True)
    time.sleep(60)
"""


def looks(
    monitor: HeartbeatMonitor, pids: dict[int, int], seconds: float, *, until_one: bool = False
) -> list[RankPosition]:
    """Reports of a monitor within `seconds`; with `until_one`, up to the first report."""
    found: list[RankPosition] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (until_one and found):
        found += monitor.poll(pids)
        time.sleep(INTERVAL_S / 5)
    return found


def test_seconds_are_summed_by_phase() -> None:
    """Catches a phase that is entered twice but counted once, validation batches counted as separate phases, and a
    current phase that is left out."""
    before_s = time.monotonic()
    beats, begun_s = Heartbeat(), time.monotonic()
    for phase in ("training", "validating, batch 1/2", "validating, batch 2/2", "training"):
        time.sleep(0.02)
        beats.enter(phase)
    time.sleep(0.02)
    end_s = time.monotonic()
    spent, after_s = beats.spent(), time.monotonic()
    assert list(spent) == ["starting", "training", "validating"]
    assert spent["starting"] >= 0.02 and spent["training"] >= 0.04 and spent["validating"] >= 0.04
    assert end_s - begun_s <= sum(spent.values()) + 1e-6 and sum(spent.values()) <= after_s - before_s + 1e-6


def test_the_process_start_time_is_exact() -> None:
    """Catches a start time in the wrong unit, the machine's boot time, and one that drifts while the process runs."""
    # It reads two clocks one after the other: of several readings, the least is that of a process not interrupted then.
    read = "print(min(process_started_s() for _ in range(100)));"
    body = f"import time; from megads.runtime.heartbeat import process_started_s; {read} time.sleep(0.5); {read}"
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True)
    after = time.time()
    first, second = map(float, process.communicate()[0].split())
    # The kernel counts in hundredths of a second.
    assert before - 0.03 <= first <= after + 0.03
    assert second == pytest.approx(first, abs=0.03)


def test_a_stopped_process_is_told_from_one_that_waits() -> None:
    """Catches a sleeping main thread reported as hung, a stopped process that is not reported, a continued process that
    is still reported, and one reported after its end."""
    monitor = HeartbeatMonitor("node-1")
    assert monitor.folder is not None and monitor.folder.stat().st_mode & 0o077 == 0
    process = subprocess.Popen([sys.executable, "-c", BEAT, str(monitor.folder)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        pids = {3: process.pid}
        assert looks(monitor, pids, 2.5) == []
        (at,) = monitor.positions()
        assert (at.rank, at.step, at.phase, at.lost) == (3, 5, "sleeping", False) and at.phase_s > 2
        process.send_signal(signal.SIGSTOP)
        (lost,) = looks(monitor, pids, 20, until_one=True)
        assert lost.lost and lost.stopped and lost.name == "rank 3 on node-1"
        assert "its process is stopped (SIGSTOP); last in step 5, sleeping" in str(lost)
        process.send_signal(signal.SIGCONT)
        (back,) = looks(monitor, pids, 20, until_one=True)
        assert not back.lost
    finally:
        process.kill()
        process.wait()
    looks(monitor, pids, 3)
    assert monitor.positions() == []
    monitor.close()
    assert monitor.folder is None and monitor.poll(pids) == []


def test_a_suspended_monitor_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks killed because a laptop slept, a job was suspended, or the launcher itself was stopped."""
    monitor = HeartbeatMonitor()
    assert monitor.folder is not None
    with heartbeat(monitor.folder, 0) as beats:
        beats.enter("training", 1)
        last = heartbeat_path(monitor.folder, 0).read_bytes()
    heartbeat_path(monitor.folder, 0).write_bytes(last)  # undoes the end that the rank has announced
    pids, now = {0: os.getpid()}, time.monotonic()
    monitor.poll(pids)
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    assert monitor.poll(pids) == []
    (position,) = monitor.positions()
    assert 0 < position.silent_s <= 2 * INTERVAL_S
    monitor.close()


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"\xff" * 72])
def test_invalid_heartbeat_files_are_ignored(content: bytes) -> None:
    """Catches a monitor, and with it a run, that fails on invalid files in its folder."""
    monitor = HeartbeatMonitor()
    assert monitor.folder is not None
    heartbeat_path(monitor.folder, 0).write_bytes(content)
    assert monitor.poll({0: os.getpid()}) == [] and monitor.positions() == []
    monitor.close()


def test_a_ranks_phase_is_shown_without_delay() -> None:
    """Catches a phase that is shown up to half a second too long, and a phase of a rank that has not started."""
    monitor = HeartbeatMonitor()
    assert monitor.phase(0) == ""
    with heartbeat(monitor.folder, 0) as beats:
        beats.enter("validating, batch 1/2")
        assert monitor.phase(0) == "validating, batch 1/2"
        beats.enter("engine step")
        assert monitor.phase(0) == "engine step"
    monitor.close()
    assert monitor.phase(0) == ""


def test_unwritable_heartbeats_do_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a run that fails because heartbeats cannot be written to the node's disk."""
    with heartbeat(tmp_path / "missing", 0) as beats:
        beats.enter("training", 1)
    assert "no heartbeats are sent" in caplog.text


def test_ranks_at_the_same_place_are_shown_together() -> None:
    """Catches an error message with one line per rank: 10,000 lines."""
    waiting = [RankPosition(rank, 7, "engine step", 30.0 + rank) for rank in range(12)]
    shown = render_positions([*waiting, RankPosition(12, 7, "loading data", 41.0)])
    assert shown == (
        "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more: in step 7, engine step for 41 s; "
        "rank 12: in step 7, loading data for 41 s"
    )


def pid_of(launched: Launched, rank: int) -> int:
    path = launched.run_dir / f"pid_{rank}"
    launched.wait_for(lambda: path.exists() and bool(path.read_text()))
    return int(path.read_text())


def events(launched: Launched, name: str) -> list[dict[str, object]]:
    return [event for event in read_json_lines(launched.run_dir / "events.jsonl") if event["event"] == name]


@pytest.mark.distributed
def test_a_stopped_rank_is_named_killed_and_blamed(start: StartLauncher) -> None:
    """Catches a hang that lasts until the collective timeout, and blame on the rank that waits."""
    launched = start("beat_until_stopped", cluster__heartbeat_timeout_s=LOST_AFTER_S)
    os.kill(pid_of(launched, 1), signal.SIGSTOP)
    code, out, err = launched.end()
    assert code == 9
    assert "megads: rank 1: hung: sends no heartbeat for" in err and "its process is stopped (SIGSTOP)" in err
    assert "in step " in err and "rank_00001.log" in err and "rank 0" not in err
    assert "rank 1 sends no heartbeat" in out
    (lost,) = events(launched, "heartbeat_lost")
    assert (lost["rank"], lost["state"]) == (1, "T")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stopped_rank_is_blamed_when_its_peers_give_up_first(start: StartLauncher) -> None:
    """Catches the healthy rank's collective timeout, which comes first, taken for the root cause."""
    launched = start("beat_until_stopped", cluster__timeout_s=8.0)
    os.kill(pid_of(launched, 1), signal.SIGSTOP)
    code, _, err = launched.end()
    assert code == 9 and "megads: rank 1: hung: sends no heartbeat for" in err


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stop_does_not_wait_for_a_stopped_rank(start: StartLauncher) -> None:
    """Catches a preempted job that waits for a hung rank until the scheduler kills it, and is not requeued."""
    launched = start("beat_until_stopped")
    os.kill(pid_of(launched, 1), signal.SIGSTOP)
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert code == 6
    assert "rank 1 cannot: stopped by SIGSTOP: killed; the last checkpoint remains" in err
    assert "rank 1: hung: sends no heartbeat" in err


@pytest.mark.distributed
def test_ranks_that_do_not_stop_are_killed(start: StartLauncher) -> None:
    """Catches an endless wait for ranks that send heartbeats but do not stop."""
    launched = start("beat_until_stopped", run__stop_timeout_s=3.0)
    pid_of(launched, 1)
    launched.process.send_signal(signal.SIGINT)
    code, _, err = launched.end()
    assert code == 9 and "run.stop_timeout_s has passed: killed; the last checkpoint remains" in err
    assert "ranks 0, 1: in step " in err or "rank 0: in step " in err


@pytest.mark.slow
@pytest.mark.distributed
def test_native_code_that_holds_the_interpreter_is_named(start: StartLauncher) -> None:
    """Catches a deadlock in an extension that blocks all threads of its rank and is taken for a slow step."""
    launched = start("hold_the_interpreter", cluster__heartbeat_timeout_s=LOST_AFTER_S)
    code, _, err = launched.end()
    assert code == 9
    assert "megads: rank 1: hung: sends no heartbeat for" in err and "native code holds the GIL" in err
    assert "last in step 7, native code" in err
