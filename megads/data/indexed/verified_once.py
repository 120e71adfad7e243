"""Verifies and hashes large files once per node and boot, instead of in every rank at every start.

Results are stored in the node's temporary folder, under the files' states: size, times and inode, one of which changes
with every write. A rank that finds another one at work waits for its result. A reboot discards the results.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megads.errors import DataError, reason_of
from megads.runtime.files import atomic_writer
from megads.runtime.own_folder import make_own, own_path

# A recently written file may be written again within the same clock tick, so its times prove nothing yet.
SETTLED_NS = 2 * 10**9
FileState = tuple[int, int, int, int]
"""Size, modification time, inode change time, inode number: every write changes at least one of them."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def file_state(path: Path) -> FileState:
    """Returns the state of a file, which changes with every write; raises DataError if the file is missing."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {reason_of(error)}") from error
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def require_unchanged(path: Path, state: FileState) -> None:
    """Raises DataError if the state of a file has changed."""
    if file_state(path) != state:
        raise DataError(f"{path}: changed while it was read: start again when nothing writes to it")


def verify_once(files: Sequence[Path], claim: str, verify: Callable[[], None]) -> None:
    """Runs `verify`, unless a process of this node has done so since boot and the files are unchanged.

    Args:
        files: files whose content alone determines the result.
        claim: what is verified, including all values that the files are compared with.
        verify: raises if the claim does not hold.

    Raises:
        DataError: a file cannot be read.
    """

    def compute() -> str:
        verify()
        return "holds"

    computed_once(files, claim, compute)


def computed_once(files: Sequence[Path], claim: str, compute: Callable[[], str]) -> str:
    """Returns the result of `compute`, or of an earlier call in a process of this node since boot if the files are
    unchanged.

    For files that changed less than two seconds ago every process computes the result, because another write in the
    same clock tick would not change their times.

    Args:
        files: files whose content, with `claim`, determines the result.
        claim: what is computed, including everything else that the result depends on.
        compute: returns the result; exceptions are not stored.

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
            # A full disk, or a file that changed meanwhile, only makes the next start slower.
            with suppress(OSError, DataError):
                if [file_state(path) for path in files] == states:
                    with atomic_writer(memory) as file:
                        file.write(json.dumps({"found": found}).encode())
    return found


def _remembered(memory: Path) -> str | None:
    """Returns the stored result; None if there is none or it is damaged."""
    try:
        return str(json.loads(memory.read_bytes())["found"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Waits for other processes of this node; does nothing if locks or disk space are unavailable."""
    with ExitStack() as opened:
        with suppress(OSError):
            fcntl.flock(opened.enter_context(path.open("ab")), fcntl.LOCK_EX)
        yield


def _memory() -> Path | None:
    """Returns the result folder of this user, node and boot; None if there is none that only this user can write to."""
    try:
        boot = _BOOT_ID.read_text().strip()
        return make_own(own_path("verified", boot))
    except OSError:
        return None
