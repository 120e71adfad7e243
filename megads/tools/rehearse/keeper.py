"""Supervisor process of a private SLURM: starts its daemons and kills them when the owning process ends.

Started as a script with the cluster's folder as its argument, so that it imports only the standard library. It reads
one JSON line from stdin per daemon to start, {"command": [...], "environment": {...}, "log": path}, and replies with
{"pid": n, "group": m}. The group is the pid of a process between this one and the daemon. It is a child subreaper: it
adopts and reaps processes that the daemon orphans, such as slurmd's job steps.

When stdin closes or the parent ends, all descendants are killed and the folder is removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.5


def serve(folder: Path) -> None:
    """Starts daemons until stdin closes or the parent dies, then kills all descendants and removes the folder.

    Args:
        folder: folder that the daemons write to.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The owner handles Ctrl-C and a closed terminal: it closes stdin.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    while os.getppid() == parent:
        _reap()
        if not select.select([sys.stdin], [], [], _POLL_S)[0]:
            continue
        line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]
        if not line:
            break
        pid, group = _start_group(**json.loads(line))
        sys.stdout.write(json.dumps({"pid": pid, "group": group}) + "\n")
        sys.stdout.flush()
    _kill_all()
    shutil.rmtree(folder, ignore_errors=True)


def _start_group(command: list[str], environment: dict[str, str], log: str) -> tuple[int, int]:
    """Starts a daemon as the child of a new process and returns the pids of the daemon and of that process."""
    reading, writing = os.pipe()
    group = os.fork()
    if group == 0:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for inherited in (sys.stdin.fileno(), sys.stdout.fileno(), reading):
            os.close(inherited)
        os.write(writing, str(_start(command, environment, log)).encode())
        os.close(writing)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        return int(answer.read()), group


def _start(command: list[str], environment: dict[str, str], log: str) -> int:
    """Starts a daemon in the foreground, in a new session, and returns its pid."""
    libc = ctypes.CDLL(None)

    def before_exec() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    with Path(log).open("ab") as file:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            preexec_fn=before_exec,  # noqa: PLW1509 (this process has one thread)
            start_new_session=True,
        )
    return process.pid


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _descendants() -> list[int]:
    """Returns the pids of all descendants of this process."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name in parentheses may contain any character; state and parent follow the last parenthesis.
                after = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(after[1]), []).append(int(entry.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _kill_all() -> None:
    """Kills descendants until none is left; orphans become children of this process."""
    while left := _descendants():
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
