"""Large files are verified once a node and boot, not by every rank at every start.

What was found to be whole is remembered beside the node's other temporary files, under the files' states: size, times
and inode, one of which every write changes. A rank that finds another at work waits for its answer. A node that boots
looks again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megads.data.content_digest import SETTLED_NS, file_state

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def verify_once(files: Sequence[Path], claim: str, verify: Callable[[], None]) -> None:
    """Runs `verify`, unless a process of this node has done so since it booted and the files are what they were.

    Files that changed less than two seconds ago are verified by everybody: another write in the same tick of the clock
    would leave no trace in their times.

    Args:
        files: on whose content alone the answer depends.
        claim: what is verified of them, with all that it is compared with.
        verify: raises where it does not hold.

    Raises:
        DataError: a file cannot be read.
    """
    states = [file_state(path) for path in files]
    folder = _memory()
    if folder is None or time.time_ns() - max(max(state[1:3]) for state in states) <= SETTLED_NS:
        verify()
        return
    content = [claim, [[str(path.absolute()), *state] for path, state in zip(files, states, strict=True)]]
    memory = folder / hashlib.sha256(json.dumps(content).encode()).hexdigest()
    if memory.exists():
        return
    with _lock(memory.with_suffix(".lock")):
        if not memory.exists():
            verify()
            with suppress(OSError):  # a full disk costs only the next start's time
                memory.touch()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Waits for other processes of this node; does not where there are no locks, or no room for one."""
    with ExitStack() as opened:
        with suppress(OSError):
            fcntl.flock(opened.enter_context(path.open("ab")), fcntl.LOCK_EX)
        yield


def _memory() -> Path | None:
    """The folder of this user, node and boot; None where there is none that only this user can write to."""
    try:
        boot = _BOOT_ID.read_text().strip()
        folder = Path(tempfile.gettempdir()) / f"megads-verified-{os.getuid()}-{boot}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    return folder if status.st_uid == os.getuid() and status.st_mode & 0o777 == 0o700 else None
