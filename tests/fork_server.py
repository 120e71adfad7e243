"""Runs many `megads` command lines, each in a process forked from one that has imported everything.

Starting a process takes seconds, a fork milliseconds; this server is itself a fork of tests.command_server. Each
command has its own folder and HOME, limits on CPU time, memory and file size, and an audit hook that records what it
writes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

REPOSITORY = Path(__file__).parents[1]
# CPU time, because wall-clock time means little on a shared machine.
CPU_LIMIT_S = 10
# Wall-clock limit, for hangs that use no CPU time; higher, so that a busy machine does not count as a hang.
CLOCK_LIMIT_S = 40
START_LIMIT_S = 240.0
MEMORY_LIMIT_BYTES = 4 << 30
FILE_LIMIT_BYTES = 64 << 20
_STDOUT, _STDERR, _OUTSIDE = ".stdout", ".stderr", ".outside"
_NAMES = (_STDOUT, _STDERR, _OUTSIDE)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
# Devices, not their folders: /dev/shm is memory that outlives its writer.
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/proc/self/fd", "/proc/self/task")


class Started(Protocol):
    """The process of the server."""

    def wait(self, timeout: float | None = None) -> int: ...


StartServer = Callable[[Path, str, Sequence[str], Mapping[str, str], Path, Path], Started]


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
    """The process that forks commands; `root` is its HOME and holds its log."""

    def __init__(self, root: Path, start: StartServer) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")  # the kernel chooses a name
            listener.listen()
            listener.settimeout(START_LIMIT_S)
            name, log = listener.getsockname().hex(), root / "fork_server.log"
            log.touch()
            self._process = start(root, "tests.fork_server", [name], os.environ | {"HOME": str(root)}, log, log)
            self._connection = listener.accept()[0]
        self._connection.settimeout(None)
        self._lines = self._connection.makefile("rw")

    def __call__(self, folder: Path, arguments: Sequence[str], stub: bool = False) -> Outcome:
        """Runs one command line in a folder.

        Args:
            folder: its working directory, the only place that it may write to.
            arguments: the command and its arguments.
            stub: replace the work that a valid config of some commands would start, see `_WORK`.
        """
        order = {"folder": str(folder), "arguments": list(arguments), "stub": stub}
        self._lines.write(json.dumps(order) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        assert answer, f"the fork server ended: {self._process.wait(timeout=30)}"
        code, limit = json.loads(answer)
        texts = [(folder / name).read_text(errors="surrogateescape") for name in (_STDOUT, _STDERR)]
        outside = sorted(set((folder / _OUTSIDE).read_text(errors="surrogateescape").splitlines()))
        return Outcome(code, *texts, outside, limit)

    def close(self) -> None:
        """Ends the server."""
        self._lines.close()
        self._connection.close()
        self._process.wait(timeout=30)


def left_by_commands(folder: Path) -> list[str]:
    """Names of the files that a command left in its folder, without the server's own."""
    return sorted({path.name for path in folder.iterdir()} - {*_NAMES, "tmp"})


@contextmanager
def run_fork_server(root: Path, start: StartServer) -> Iterator[ForkServer]:
    """Yields a server, forked by `CommandServer.start`, and ends it."""
    server = ForkServer(root, start)
    try:
        yield server
    finally:
        server.close()


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


def _child(order: dict[str, Any]) -> int:
    """The body of a forked process; returns the exit code."""
    folder = Path(order["folder"])
    os.setsid()
    os.chdir(folder)
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / ".cache")}
    tempfile.tempdir = None  # cached by the parent
    for descriptor, name in enumerate((os.devnull, *_NAMES)):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(name, flags, 0o600)
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
    # As Python opens them at startup.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="strict", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
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
    sys.addaudithook(_watch(folder.resolve()))
    if order["stub"]:
        _stub_work()
    from megads.cli.main import run

    code = run(order["arguments"])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _watch(folder: Path) -> Callable[[str, tuple[Any, ...]], None]:
    """Returns an audit hook that records what is written outside of a folder."""

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
                    os.write(3, os.fsencode(f"{found}\n"))

    return hook


def main() -> None:
    """Forks a child for each line from the socket that is named on the command line."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(bytes.fromhex(sys.argv[1]))
        sys.dont_write_bytecode = True
        with connection.makefile("rw") as lines:
            # readline may buffer ahead: there is only one request at a time.
            while line := lines.readline():
                lines.write(json.dumps(_answer(json.loads(line))) + "\n")
                lines.flush()


def _answer(order: dict[str, Any]) -> tuple[int, str]:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _child(order)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)
    watch = os.pidfd_open(child)
    ended = select.select([watch], [], [], CLOCK_LIMIT_S + 1)[0]
    os.close(watch)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    # Processes that it started.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    limit = "" if ended else f"{CLOCK_LIMIT_S} s by the clock"
    if usage.ru_utime + usage.ru_stime >= CPU_LIMIT_S:
        limit = f"{CPU_LIMIT_S} s of processor time"
    return os.waitstatus_to_exitcode(status), limit


def import_everything() -> None:
    """Imports all of megads, and makes Hydra load its plugins."""
    import importlib
    import pkgutil

    import megads
    import megads.cli

    for module in pkgutil.walk_packages(megads.__path__, "megads."):
        with suppress(ImportError):
            importlib.import_module(module.name)
    # Hydra loads its plugins once per process.
    from megads.cli.main import run

    run(["train", "no.such.key=1"])
