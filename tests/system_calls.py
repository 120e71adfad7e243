"""Kills a process with SIGKILL right before a chosen system call that changes a folder, by ptrace.

Python's audit hooks see renames, but no write and no fsync; here every such call counts, in all threads. A point in a
run is a label, such as `rename metrics.jsonl`, and the number of its occurrence, which does not depend on the timing of
other processes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

needs_ptrace = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux", reason="knows the system calls of Linux on x86-64"
)

# What each argument is: a path, a descriptor, or a folder's descriptor followed by a path in it.
_PATHS = {
    "open": (2, "p"), "creat": (85, "p"), "openat": (257, "dp"), "truncate": (76, "p"), "rename": (82, "pp"),
    "mkdir": (83, "p"), "rmdir": (84, "p"), "link": (86, "pp"), "unlink": (87, "p"), "symlink": (88, ".p"),
    "chmod": (90, "p"), "mkdirat": (258, "dp"), "unlinkat": (263, "dp"), "renameat": (264, "dpdp"),
    "linkat": (265, "dpdp"), "symlinkat": (266, ".dp"), "fchmodat": (268, "dp"), "utimensat": (280, "dp"),
    "renameat2": (316, "dpdp"), "utime": (132, "p"), "utimes": (235, "p"), "mknod": (133, "p"),
    "write": (1, "f"), "pwrite64": (18, "f"), "writev": (20, "f"), "pwritev": (296, "f"), "fsync": (74, "f"),
    "fdatasync": (75, "f"), "ftruncate": (77, "f"), "fchmod": (91, "f"), "fallocate": (285, "f"),
    "sendfile": (40, "f"), "copy_file_range": (326, "..f"), "memfd_create": (319, "p"), "mmap": (9, "....f"),
    "sendmsg": (46, "f"),
}  # fmt: skip
_NAMES = {number: name for name, (number, _) in _PATHS.items()}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_MAP_SHARED = 1
_SEIZE, _INTERRUPT, _LISTEN, _GET_SYSCALL_INFO, _SYSCALL = 0x4206, 0x4207, 0x4208, 0x420E, 24
_TRACESYSGOOD, _TRACECLONE, _EVENT_STOP, _ENTRY = 1, 8, 128, 1
_SET_PTRACER, _WALL, _CURRENT_FOLDER = 0x59616D61, 0x40000000, -100
_INFO = struct.Struct("=B3xIQQQ6Q")
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_LIBC.ptrace.restype = ctypes.c_long


@dataclass(frozen=True)
class Point:
    """A point in a process: before the n-th call with this label, counted from 1. An empty label matches no call."""

    label: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.label} #{self.number}"


NO_POINT = Point()


def trace_this_process(folder: Path, log: Path, kill_at: Point = NO_POINT, messages: bool = False) -> None:
    """Starts a tracer process, which logs the system calls of this process and kills it at `kill_at`.

    Args:
        folder: calls that change something in it count, and those that create or share memory.
        log: file that gets a line before every call that counts.
        kill_at: the call before which this process is killed.
        messages: writes to sockets and pipes count, too.
    """
    this, (ready, said), (begin, go) = os.getpid(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        # A grandchild, so that this process has no unexpected child.
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(said, str(os.getpid()).encode())
        os.read(begin, 1)
        _trace(_Calls(this, os.path.realpath(folder), messages), log, kill_at, said)
    os.waitpid(child, 0)
    os.close(said)
    tracer = int(os.read(ready, 20))
    # Permits the tracer where only ancestors may trace.
    _LIBC.prctl(_SET_PTRACER, ctypes.c_ulong(tracer), 0, 0, 0)
    os.write(go, b".")
    answer = os.read(ready, 100).decode()
    for descriptor in (ready, begin, go):
        os.close(descriptor)
    assert answer == "traced", f"this process cannot be traced: {answer or 'its tracer died'}"


def read_points(log: Path) -> list[Point]:
    """Every point that a traced process passed, in order."""
    seen, points = Counter[str](), []
    for label in log.read_text().splitlines():
        seen[label] += 1
        points.append(Point(label, seen[label]))
    return points


def first_and_last(points: list[Point]) -> list[Point]:
    """The first and last point of each label."""
    last = {point.label: point for point in points}
    return [point for point in points if point.number == 1 or point == last[point.label]]


def open_files(folder: Path) -> dict[int, str]:
    """One open file in the folder of each process that has any, by pid."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [str(link.readlink()) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        mine = [link for link in links if link.startswith(f"{folder}/")]
        if mine:
            found[int(process.name)] = mine[0]
    return found


def _trace(calls: _Calls, log: Path, kill_at: Point, said: int) -> NoReturn:
    """Runs the tracer; exits with the traced process."""
    try:
        _ptrace(_SEIZE, calls.pid, _TRACESYSGOOD | _TRACECLONE)
        _ptrace(_INTERRUPT, calls.pid, 0)
        with log.open("w", buffering=1) as file:
            os.write(said, b"traced")
            os.close(said)
            seen = Counter[str]()

            def about_to(label: str) -> None:
                file.write(f"{label}\n")
                seen[label] += 1
                if Point(label, seen[label]) == kill_at:
                    os.kill(calls.pid, signal.SIGKILL)

            _watch(calls, about_to)
    except OSError as error:
        with suppress(OSError):
            os.write(said, str(error).encode())
    finally:
        os._exit(0)


def _watch(calls: _Calls, about_to: Callable[[str], object]) -> None:
    """Resumes the traced process at every stop; calls `about_to` before each call that counts."""
    while True:
        try:
            thread, status = os.waitpid(-1, _WALL)
        except ChildProcessError:
            return
        if not os.WIFSTOPPED(status):
            if thread == calls.pid:
                return
            continue
        number, event, request = os.WSTOPSIG(status), status >> 16, _SYSCALL
        if event == _EVENT_STOP and number != signal.SIGTRAP:
            request = _LISTEN
        if not event and number == signal.SIGTRAP | 0x80:
            label = calls.label(thread)
            if label:
                about_to(label)
        # Only a signal-delivery stop passes a signal on.
        signal_number = 0 if event or number == signal.SIGTRAP | 0x80 else number
        _LIBC.ptrace(request, thread, None, signal_number)  # a thread that was killed meanwhile is reported next


class _Calls:
    """Labels the system calls of a process that count."""

    def __init__(self, pid: int, folder: str, messages: bool) -> None:
        self.pid, self._folder, self._messages = pid, folder, messages

    def label(self, thread: int) -> str:
        """Label of the call that a thread is about to make; empty if it does not count, or has been made."""
        buffer = ctypes.create_string_buffer(_INFO.size)
        if _LIBC.ptrace(_GET_SYSCALL_INFO, thread, _INFO.size, ctypes.addressof(buffer)) <= 0:
            return ""
        op, _, _, _, number, *arguments = _INFO.unpack(buffer.raw)
        name = _NAMES.get(number)
        if op != _ENTRY or name is None or not self._changes(name, arguments):
            return ""
        if name == "memfd_create":
            return f"memfd_create {self._text(arguments[0])}"
        paths = [self._shown(path) for path in self._paths(name, arguments)]
        return f"{name} {' '.join(filter(None, paths))}" if any(paths) else ""

    def _changes(self, name: str, arguments: list[int]) -> bool:
        if name in ("open", "openat"):
            return bool(arguments[1 if name == "open" else 2] & _WRITES)
        return name != "mmap" or bool(arguments[3] & _MAP_SHARED)

    def _paths(self, name: str, arguments: list[int]) -> list[str]:
        found, base = [], ""
        for kind, argument in zip(_PATHS[name][1], arguments, strict=False):
            signed = ctypes.c_int(argument & 0xFFFFFFFF).value
            if kind == "d":
                base = self._link("cwd" if signed == _CURRENT_FOLDER else f"fd/{signed}")
            elif kind == "p":
                text = self._text(argument) if argument else ""
                found.append(os.path.normpath(os.path.join(base or self._link("cwd"), text)))  # noqa: PTH118
            elif kind == "f":
                with suppress(OSError):
                    found.append(self._link(f"fd/{signed}"))
        return found

    def _link(self, name: str) -> str:
        """Target of a link in /proc/<pid>."""
        return str(Path(f"/proc/{self.pid}/{name}").readlink())

    def _shown(self, path: str) -> str:
        """A path without the parts that differ from run to run; empty if it does not count."""
        if path.startswith("/memfd:"):
            return path.removesuffix(" (deleted)")
        if self._messages and path.startswith(("socket:", "pipe:")):
            return path.partition(":")[0]
        if path != self._folder and not path.startswith(f"{self._folder}/"):
            return ""
        shown = path.removeprefix(self._folder).lstrip("/") or "."
        shown = re.sub(r"\.[0-9a-f]{12}\.partial", ".*.partial", shown)
        shown = re.sub(r"\b[0-9a-f]{16}\b", "<digest>", shown)
        # The step that a writer is ready for varies.
        shown = re.sub(r"\bstep_\d{8}\b", "step_<n>", shown)
        return re.sub(rf"(?<![0-9]){self.pid}(?![0-9])", "<pid>", shown)

    def _text(self, address: int) -> str:
        """A NUL-terminated string in the memory of the process."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(address)
            read = b""
            while b"\0" not in read and len(read) < 1 << 14:
                # Up to the end of a page: the next one may not be mapped.
                more = memory.read(4096 - (address + len(read)) % 4096)
                if not more:
                    break
                read += more
        return os.fsdecode(read.partition(b"\0")[0])


def _ptrace(request: int, pid: int, data: int) -> None:
    if _LIBC.ptrace(request, pid, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
