"""Tests the lease, which decides which start may write to a run directory."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megads.errors import ConfigError, Fenced
from megads.runtime import lease as lease_module
from megads.runtime.lease import Fence, Holder, claimed, current_holder
from megads.runtime.slurm import SlurmJob

DIES = "import sys; from pathlib import Path; from megads.runtime.lease import claimed, Lease; import os\n"
DIES += "with claimed(Path(sys.argv[1])): os._exit(3)"


def rewrite(run_dir: Path, **changes: object) -> None:
    """Changes fields of the lease file."""
    path = max((run_dir / "lease").glob("0*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.fault(18)
def test_a_second_start_is_refused_naming_the_holder(tmp_path: Path) -> None:
    """Catches two launchers in one run directory, and a lease that outlives a start that ended or died."""
    with claimed(tmp_path) as first:
        assert first.number == 1
        mine = rf"in use by process {os.getpid()}: wait .* \(kill {os.getpid()}\)"
        with pytest.raises(ConfigError, match=mine), claimed(tmp_path):
            pass
    with claimed(tmp_path) as second:
        assert second.number == 2
    assert subprocess.run([sys.executable, "-c", DIES, tmp_path], check=False).returncode == 3
    with claimed(tmp_path) as fourth:
        assert fourth.number == 4
    assert sorted(path.name for path in (tmp_path / "lease").iterdir()) == ["00000004.json"]


@pytest.mark.fault(18)
def test_a_reused_pid_is_no_holder(tmp_path: Path) -> None:
    """Catches a dead launcher that counts as alive because its pid was reused."""
    with claimed(tmp_path):
        holder = current_holder(tmp_path)
        assert holder is not None
        rewrite(tmp_path, born=holder.born - 1)
        with claimed(tmp_path) as second:
            assert second.number == 2


@pytest.mark.fault(18)
def test_a_requeued_job_takes_over_and_fences_orphans(tmp_path: Path) -> None:
    """Catches a requeued job that is refused because of its own orphan, and an orphan that keeps writing."""
    with claimed(tmp_path, SlurmJob("42", 0, "here")) as orphan:
        fence = Fence(tmp_path, orphan.number)
        fence.check()
        theirs = r"SLURM job 42 \(restart 0, process \d+ on .*scancel 42"
        with pytest.raises(ConfigError, match=theirs), claimed(tmp_path, SlurmJob("42", 0, "here")):
            pass
        with claimed(tmp_path, SlurmJob("42", 1, "here")) as requeued:
            assert requeued.number == 2
            with pytest.raises(Fenced, match=r"start 1 of the run lost .* to start 2, SLURM job 42 \(restart 1"):
                fence.check()
            assert Fence(tmp_path, None).reason() == Fence(tmp_path, 2).reason() == ""
        # The orphan's exit does not remove the requeued job's file.
    assert [path.name for path in (tmp_path / "lease").iterdir()] == ["00000002.json"]


def test_a_holder_on_another_node_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a launcher on another node that loses its lease while it is alive, or blocks the run after it died."""
    monkeypatch.setattr(lease_module, "BEAT_S", 0.2)
    monkeypatch.setattr(lease_module, "_SILENT_S", 120.0)  # it is refused at the first beat
    monkeypatch.setattr(lease_module, "_POLL_S", 0.05)
    with claimed(tmp_path):
        rewrite(tmp_path, machine="another", node="far")
        with pytest.raises(ConfigError, match=rf"process {os.getpid()} on far"), claimed(tmp_path):
            pass
        # Its heartbeat thread runs until here.
    rewrite(tmp_path, machine="another", released=False)
    monkeypatch.setattr(lease_module, "_SILENT_S", 1.0)
    begin = time.monotonic()
    with claimed(tmp_path) as second:
        assert second.number == 2
    assert time.monotonic() - begin > 1.0


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"number": 1}', '{"job": 7}', "[" * 100_000])
def test_a_damaged_lease_blocks_nobody(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lease file truncated by a full disk or a crash that blocks the run forever, with a traceback; and a
    live start that loses its lease because its file was damaged."""
    for name, seconds in (("BEAT_S", 0.1), ("_SILENT_S", 0.5), ("_POLL_S", 0.05)):
        monkeypatch.setattr(lease_module, name, seconds)
    with claimed(tmp_path):
        path = tmp_path / "lease" / "00000001.json"
        path.write_text(content)
        locked = r"in use by a start whose file 00000001\.json .* cannot be read"
        with pytest.raises(ConfigError, match=locked), claimed(tmp_path):
            pass
    path.write_text(content)
    with claimed(tmp_path) as second:
        assert second.number == 2


@pytest.mark.parametrize("kind", ["folder", "loop", "pipe"])
def test_a_lease_path_that_is_no_file_is_refused(kind: str, tmp_path: Path) -> None:
    """Catches a non-file with the name of a lease file that causes a traceback or a hang."""
    path = tmp_path / "lease" / "00000003.json"
    path.parent.mkdir()
    {"folder": path.mkdir, "loop": lambda: path.symlink_to(path), "pipe": lambda: os.mkfifo(path)}[kind]()
    with pytest.raises(ConfigError, match=r"00000003\.json is not a file: .* remove it"), claimed(tmp_path):
        pass
    path.rename(path.with_name("3x.json"))
    with claimed(tmp_path) as first:
        assert first.number == 1
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "lease").write_text("")
    with pytest.raises(ConfigError, match="lease is not a folder: remove it"), claimed(tmp_path / "other"):
        pass


def _claim(run_dir: Path, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    try:
        with claimed(run_dir):
            results.put("held")  # type: ignore[attr-defined]
            time.sleep(2)
    except ConfigError:
        results.put("refused")  # type: ignore[attr-defined]


def test_one_of_simultaneous_starts_wins(tmp_path: Path) -> None:
    """Catches a race in which two simultaneous starts both take the lease."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_claim, args=(tmp_path, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=30) for _ in processes)
    for process in processes:
        process.join()
    assert found == ["held", "refused", "refused", "refused"]


def test_a_lost_lease_is_noticed_by_the_next_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a launcher that continues although its ranks have been fenced."""
    monkeypatch.setattr(lease_module, "BEAT_S", 0.05)
    with claimed(tmp_path, SlurmJob("7", 0, "here")) as orphan, claimed(tmp_path, SlurmJob("7", 1, "here")):
        deadline = time.monotonic() + 120
        with pytest.raises(Fenced):
            while time.monotonic() < deadline:
                orphan.check()
                time.sleep(0.02)


def test_the_remedy_ends_the_holder() -> None:
    """Catches a remedy that does not end the holder."""
    assert Holder(1, "n1", 5, "m", 0).remedy == "kill 5"
    assert Holder(1, "n1", 5, "m", 0, SlurmJob("9", 2, "c")).remedy == "scancel 9"
