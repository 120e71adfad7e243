"""What a case of scripts/bench/gpu_judges.py says before it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scripts.bench.gpu_progress import Progress
from tests.command import Command

HANGS = """import json, sys, time
from pathlib import Path
run_dir = Path(sys.argv[1].partition("=")[2])
(run_dir / "logs").mkdir(parents=True)
print("starting ranks", flush=True)
(run_dir / "logs/rank_00000.log").write_text("rank 0 waits for its peer")
with (run_dir / "events.jsonl").open("w") as events:
    events.write(json.dumps({"time": time.time(), "event": "first_step", "seconds": {"imports": 41.5}}) + "\\n")
time.sleep(600)
"""


class Starter:
    """Starts a command that writes a run's files and hangs, with its stacks on SIGABRT."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hangs.py").write_text(HANGS)

    def __call__(
        self, *arguments: str, fault: str = "", variables: Mapping[str, str] = {}, anew: bool = False
    ) -> Command:
        return Command(self.folder, arguments, "hangs", {"PYTHONFAULTHANDLER": "1"})


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the signal handler that the test replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handlers")
def test_a_killed_case_logs_how_far_it_came(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a case that reaches its limit and leaves an empty log, as on the first GPU, or processes."""
    progress = Progress()
    progress.end_on(signal.SIGTERM)
    another = subprocess.Popen(["sleep", "60"])
    said = ""
    with progress.of(Starter(tmp_path)) as start:
        command = start(f"run.dir={tmp_path / 'four'}")
        while "first_step" not in said:
            time.sleep(0.05)
            said += capfd.readouterr().out
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
    assert another.poll() is None, "a process of nobody's case was ended: the tests' command server is one"
    another.kill()
    another.wait()
    assert command.process.wait(60) == -signal.SIGABRT
    command.close()
    said += capfd.readouterr().out
    assert "started megads run.dir=" in said and '"imports": 41.5' in said
    assert "SIGTERM: the case is ended before its time" in said and ": starting ranks" in said
    assert "four/logs/rank_00000.log: rank 0 waits for its peer" in said
    assert "hangs.py" in said and "test_gpu_progress.py" in said, "no stacks"
