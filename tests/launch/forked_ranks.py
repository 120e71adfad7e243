"""What forked ranks run in the fork server's tests."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from megads.runtime.environment import launcher_pid

_SHOWN = ("RANK", "PLACE", "OMP_NUM_THREADS")


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "leave":
        os._exit(int(rest[0]))
    if what == "raise":
        raise ZeroDivisionError
    if what == "describe":
        Path(rest[0]).write_text(json.dumps(_description()))
        return
    time.sleep(600)


def _description() -> dict[str, object]:
    links = list(Path("/proc/self/fd").iterdir())
    return {
        "pid": os.getpid(),
        "session": os.getsid(0),
        "variables": {name: os.environ[name] for name in _SHOWN if name in os.environ},
        "imported": sorted({"torch", "deepspeed", "megads.train.loop"} & sys.modules.keys()),
        "terminated_by_sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "interrupted_by_sigint": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        "parent_is_the_launcher": launcher_pid() == os.getppid(),
        "open_pipes": [str(link) for link in links if link.exists() and "pipe:" in str(link.readlink())],
    }
