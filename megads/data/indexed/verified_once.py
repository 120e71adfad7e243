"""Large files are verified and hashed once a node and boot, not by every rank at every start.

What was found is remembered beside the node's other temporary files, under the files' states: size, times
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

from megads.errors import DataError
from megads.runtime.files import atomic_writer

# A file written a moment ago may be written again within the same tick of the clock: its times prove nothing yet.
SETTLED_NS = 2 * 10**9
FileState = tuple[int, int, int, int]
"""Size, times of the last change of content and of inode, inode number: no write leaves all four as they were."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def file_state(path: Path) -> FileState:
    """Returns what changes whenever the file does; raises DataError where it is gone."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def require_unchanged(path: Path, state: FileState) -> None:
    """Raises DataError where a file is no longer as it was."""
    if file_state(path) != state:
        raise DataError(f"{path}: changed while it was read: start again when nothing writes to it")


def verify_once(files: Sequence[Path], claim: str, verify: Callable[[], None]) -> None:
    """Runs `verify`, unless a process of this node has done so since it booted and the files are what they were.

    Args:
        files: on whose content alone the answer depends.
        claim: what is verified of them, with all that it is compared with.
        verify: raises where it does not hold.

    Raises:
        DataError: a file cannot be read.
    """

    def compute() -> str:
        verify()
        return "holds"

    computed_once(files, claim, compute)


def computed_once(files: Sequence[Path], claim: str, compute: Callable[[], str]) -> str:
    """Returns what `compute` returns, or returned in a process of this node since it booted, if the files are the same.

    For files that changed less than two seconds ago everybody computes: another write in the same tick of the clock
    would leave no trace in their times.

    Args:
        files: on whose content alone the answer depends.
        claim: what is computed of them, with all else that it depends on.
        compute: the answer; what it raises is not remembered.

    Raises:
        DataError: a file cannot be read.
    """
    states = [file_state(path) for path in files]
    folder = _memory()
    if folder is None or time.time_ns() - max(max(state[1:3]) for state in states) <= SETTLED_NS:
        return compute()
    content = [claim, [[str(path.absolute()), *state] for path, state in zip(files, states, strict=True)]]
    memory = folder / hashlib.sha256(json.dumps(content).encode()).hexdigest()
    found = _remembered(memory)
    if found is not None:
        return found
    with _lock(memory.with_suffix(".lock")):
        found = _remembered(memory)
        if found is None:
            found = compute()
            # A full disk, or a file that changed meanwhile, costs only the next start's time.
            with suppress(OSError, DataError):
                if [file_state(path) for path in files] == states:
                    with atomic_writer(memory) as file:
                        file.write(json.dumps({"found": found}).encode())
    return found


def _remembered(memory: Path) -> str | None:
    """What was found before; None where nothing was, or what was written is damaged."""
    try:
        return str(json.loads(memory.read_bytes())["found"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


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
