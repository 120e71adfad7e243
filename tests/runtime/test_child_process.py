"""Children that keep to their cores and do not outlive their parent; real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megads.runtime.child_process import start_child
from tests.command import REPOSITORY

PARENT = """
import sys, time
from pathlib import Path
from megads.runtime.child_process import start_child
program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('saved', flush=True))); " \
          "print('ready', flush=True); time.sleep(60)"
print(start_child(["-c", program], Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def wait_for_text(log: Path, text: str) -> None:
    for _ in range(600):
        if log.exists() and text in log.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text!r} never came: {log.read_text() if log.exists() else 'no log'}")


def test_a_child_is_told_when_its_parent_is_killed(tmp_path: Path) -> None:
    """Catches points that train on, unseen, after their sweep was killed, and so refuse the next one."""
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    wait_for_text(log, "ready")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    child.wait(30)
    wait_for_text(log, "saved")


def test_a_child_keeps_to_its_cores_and_variables(tmp_path: Path) -> None:
    """Catches points side by side that share cores, and GPUs that are hidden from nobody."""
    core = min(os.sched_getaffinity(0))
    program = (
        "import os; print(os.sched_getaffinity(0), os.environ['CUDA_VISIBLE_DEVICES'], os.getpgid(0) == os.getpid())"
    )
    log = tmp_path / "deep" / "log"
    assert start_child(["-c", program], log, [core], {"CUDA_VISIBLE_DEVICES": "7"}).wait(60) == 0
    assert log.read_text() == f"{{{core}}} 7 True\n", "in a session of its own, out of the terminal's reach"
