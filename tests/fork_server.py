"""Runs many `megads` command lines that end by themselves, each in a fork of tests.command_server.

Starting a process takes seconds, a fork milliseconds. Each command has its own folder and HOME, limits on CPU time,
memory and file size, and an audit hook that records what it writes.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.command_server import CommandServer

# CPU time, because wall-clock time means little on a shared machine.
CPU_LIMIT_S = 10
# Wall-clock limit, for hangs that use no CPU time; higher, so that a busy machine does not count as a hang.
CLOCK_LIMIT_S = 240
MEMORY_LIMIT_BYTES = 4 << 30
FILE_LIMIT_BYTES = 64 << 20
_STDOUT, _STDERR, _OUTSIDE = ".stdout", ".stderr", ".outside"
_NAMES = (_STDOUT, _STDERR, _OUTSIDE)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
# Devices, not their folders: /dev/shm is memory that outlives its writer.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/proc/self/fd", "/proc/self/task")


@dataclass(frozen=True)
class Outcome:
    """How a command line ended.

    Attributes:
        code: exit code, negative for a signal.
        out: its stdout.
        err: its stderr.
        outside: paths outside its folder that it wrote to.
        limit: the limit that it reached, empty for none.
    """

    code: int
    out: str
    err: str
    outside: list[str]
    limit: str

    def defect(self, allowed: Sequence[int] = (0, 2, 3, 4)) -> str:
        """Behavior that no command line may have; empty if there is none."""
        if self.limit:
            return f"did not end: {self.limit}"
        if "Traceback (most recent call last)" in self.err:
            return "printed a traceback"
        if self.code not in allowed:
            return f"exited with {self.code}"
        if self.code and not (self.err + self.out).strip():
            return f"exited with {self.code} and said nothing"
        if self.outside:
            return f"wrote to {', '.join(self.outside)}"
        return ""


class ForkServer:
    """Runs command lines in forks of the command server."""

    def __init__(self, server: CommandServer) -> None:
        self._server = server

    def __call__(self, folder: Path, arguments: Sequence[str], stub: bool = False) -> Outcome:
        """Runs one command line in a folder.

        Args:
            folder: its working directory, the only place that it may write to.
            arguments: the command and its arguments.
            stub: replace the work that a valid config of some commands would start, see `_WORK`.
        """
        for name in _NAMES:
            (folder / name).write_bytes(b"")
        (folder / "tmp").mkdir(exist_ok=True)
        places = {"HOME": folder, "TMPDIR": folder / "tmp", "XDG_CACHE_HOME": folder / ".cache"}
        variables = os.environ | {name: str(place) for name, place in places.items()}
        words, files = (str(int(stub)), *arguments), (folder / _STDOUT, folder / _STDERR)
        process, limit = self._server.start(folder, __name__, words, variables, *files), ""
        try:
            code = process.wait(CLOCK_LIMIT_S + 1)
            if code == -signal.SIGKILL:
                limit = f"{CPU_LIMIT_S} s of processor time"
        except subprocess.TimeoutExpired:
            limit = f"{CLOCK_LIMIT_S} s by the clock"
            process.kill()
            code = process.wait()
        # Processes that it started.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        texts = [(folder / name).read_text(errors="surrogateescape") for name in _NAMES]
        return Outcome(code, texts[0], texts[1], sorted(set(texts[2].splitlines())), limit)


def left_by_commands(folder: Path) -> list[str]:
    """Names of the files that a command left in its folder, without the server's own."""
    return sorted({path.name for path in folder.iterdir()} - {*_NAMES, "tmp"})


_CALIBRATED = ("peak_tflops", "memory_gigabytes_per_s", "node_gigabytes_per_s", "node_latency_us")
# Stubs for functions that take minutes or start processes if the config is valid; other tests run the functions.
_WORK: dict[str, Callable[..., Any]] = {
    "megads.tools.plan.calibrate.measure:calibrate": lambda *_: {
        "name": "cpu x 2",
        "collectives": [[]],
        "products": [[1, 1, 1, 1.0]],
        "attention_rates": [[1, 1.0, 1.0]],
        **dict.fromkeys(_CALIBRATED, 1.0),
    },
    "megads.tools.doctor.examine:examine": lambda *_: [],
    "megads.tools.verify.compare:verify": lambda *_: (0, 0),
    "megads.tools.report.watch.server:serve": lambda *_: None,
}


def _stub_work() -> None:
    import importlib

    for name, stand_in in _WORK.items():
        module, _, function = name.partition(":")
        setattr(importlib.import_module(module), function, stand_in)
    import megads.cli.check_nodes as verb
    from megads.tools.doctor.node_check import CheckResult

    verb.check_nodes = lambda _, place: CheckResult({}, {node: [] for node in place.nodes}, {})


def main() -> None:
    """Runs the command line behind the first argument, `1` to stub its work, within the limits; raises SystemExit."""
    stub, arguments, folder = sys.argv[1] == "1", sys.argv[2:], Path.cwd()
    os.setsid()
    sys.dont_write_bytecode = True
    tempfile.tempdir = None  # cached by the server
    faulthandler.register(signal.SIGXCPU, sys.stderr)
    faulthandler.dump_traceback_later(CLOCK_LIMIT_S, file=sys.stderr)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: (CPU_LIMIT_S, CPU_LIMIT_S + 1),
        resource.RLIMIT_AS: (pages * resource.getpagesize() + MEMORY_LIMIT_BYTES,) * 2,
        resource.RLIMIT_FSIZE: (FILE_LIMIT_BYTES,) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    for limit, values in limits.items():
        resource.setrlimit(limit, values)
    sys.addaudithook(_watch(folder, os.open(_OUTSIDE, os.O_WRONLY)))
    if stub:
        _stub_work()
    from megads.cli.main import run

    sys.exit(run(arguments))


def _watch(folder: Path, record: int) -> Callable[[str, tuple[Any, ...]], None]:
    """Returns an audit hook that records in a file what is written outside of a folder."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            paths = [path] if isinstance(flags, int) and flags & _WRITING else []
        elif event in _CHANGING:
            paths = [path for path in arguments[:2] if isinstance(path, str | bytes | os.PathLike)]
        else:
            return
        for path in paths:
            if isinstance(path, int):
                continue
            with suppress(OSError, ValueError):
                found = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
                places = (Path(found), Path(os.path.realpath(found)))
                inside = any(place.is_relative_to(folder) for place in places)
                if not inside and not found.startswith(_DEVICES):
                    os.write(record, os.fsencode(f"{found}\n"))

    return hook
