"""Starts `megads` commands as forks of one process that has imported torch, DeepSpeed and megads.

The imports take most of the time of a small run: two seconds in the launcher, five in the process that forks its
ranks. Otherwise a forked command behaves like a new process: it has its own environment, working directory, output and
signals. What a process reads only at its start (threads, malloc) is set as for a rank with one thread; a command that
needs other values starts a new process to fork its ranks, as `megads` does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from megads.launch import rank_server
from megads.runtime.environment import FIXED_AT_START, rank_variables

REPOSITORY = Path(__file__).parents[1]


class ForkedProcess:
    """A forked command, with the methods of subprocess.Popen that the tests call."""

    def __init__(self, server: CommandServer, number: int) -> None:
        self._server, self._number = server, number
        self.pid = server.reply(number, "pid", None)

    @property
    def returncode(self) -> int | None:
        """Exit code; None while it runs."""
        return self._server.known(self._number, "code")

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it ends; raises subprocess.TimeoutExpired."""
        return self._server.reply(self._number, "code", timeout)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class CommandServer:
    """The process that forks; its working directory is `root`."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.command_server"],
            cwd=root,
            env=os.environ | rank_variables(1, cuda=False) | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._replies: dict[int, dict[str, int]] = {}
        self._unread = b""

    def start(
        self, folder: Path, module: str, arguments: Sequence[str], variables: Mapping[str, str], out: Path, err: Path
    ) -> ForkedProcess:
        """Runs the `main` of a module.

        Args:
            folder: working directory.
            module: name of the module.
            arguments: command-line arguments.
            variables: the whole environment.
            out: file for stdout.
            err: file for stderr.
        """
        number = len(self._replies)
        self._replies[number] = {}
        order = {
            "number": number, "folder": str(folder), "module": module, "arguments": list(arguments),
            "variables": dict(variables), "out": str(out), "err": str(err),
        }  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return ForkedProcess(self, number)

    def known(self, number: int, name: str) -> int | None:
        """The pid or exit code that the server has reported for a command so far."""
        return self._replies[number].get(name)

    def reply(self, number: int, name: str, timeout: float | None) -> int:
        """Waits until the server reports it; raises subprocess.TimeoutExpired."""
        assert self._process.stdout is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self.known(number, name)) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired("megads", timeout or 0)
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            assert received, f"the command server ended with {self._process.wait()}"
            *lines, self._unread = (self._unread + received).split(b"\n")
            for reply in map(json.loads, lines):
                self._replies[reply.pop("number")] |= reply
        return found

    def close(self) -> None:
        """Ends the server and its forks."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


@contextmanager
def run_command_server(root: Path) -> Iterator[CommandServer]:
    """Yields a server; ends it."""
    server = CommandServer(root)
    try:
        yield server
    finally:
        server.close()


class _ParkedServer:
    """Replaces subprocess.Popen in megads.launch.rank_server: a fork that waits to become the first rank server.

    It is forked before the command runs, so that it inherits none of the launcher's threads, locks and files.
    """

    def __init__(self) -> None:
        orders, self._orders = os.pipe()
        self._replies, replies = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            os.close(self._replies)
            _wait_to_serve(orders, replies)
        os.close(orders)
        os.close(replies)
        self.stdin = os.fdopen(self._orders, "wb", buffering=0)
        self.stdout = os.fdopen(self._replies, "rb", buffering=0)
        self.returncode: int | None = None
        self._taken = False

    def __call__(self, command: Sequence[str], **options: Any) -> Any:
        """Returns the fork with this environment; a new process if it is in use or FIXED_AT_START variables differ."""
        ours = rank_variables(1, cuda=False)
        if self._taken or any(os.environ.get(name) != ours.get(name) for name in FIXED_AT_START):
            return subprocess.Popen(command, **options)
        self._taken = True
        self.stdin.write(json.dumps(dict(os.environ)).encode() + b"\n")
        return self

    def poll(self) -> int | None:
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG) if self.returncode is None else (0, 0)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _wait_to_serve(orders: int, replies: int) -> NoReturn:
    """Body of the parked fork: becomes a rank server when it receives its environment, else exits."""
    launcher = os.getppid()
    read = b""
    # One byte at a time: what follows the line is for the rank server.
    while not read.endswith(b"\n"):
        byte = os.read(orders, 1)
        if not byte:
            os._exit(0)
        read += byte
    _become(json.loads(read))
    os.setsid()
    os.dup2(orders, 0)
    os.dup2(replies, 1)
    os.close(orders)
    os.close(replies)
    sys.argv = ["rank_server", str(launcher)]
    with suppress(SystemExit):
        rank_server.main()
    os._exit(1)


def _become(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _child(order: dict[str, Any]) -> None:
    """The body of a forked command; raises SystemExit."""
    os.chdir(order["folder"])
    for descriptor, name in enumerate((os.devnull, order["out"], order["err"])):
        opened = os.open(name, os.O_WRONLY if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    # As Python creates them at startup.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="strict", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    _become(order["variables"])
    if order["module"] != "tests.fork_server":  # most of whose commands start no ranks
        rank_server.subprocess = _Subprocess(_ParkedServer())  # type: ignore[attr-defined]
    sys.argv = [order["module"], *order["arguments"]]
    importlib.import_module(order["module"]).main()


class _Subprocess:
    """The part of the module subprocess that megads.launch.rank_server uses."""

    PIPE = subprocess.PIPE

    def __init__(self, popen: _ParkedServer) -> None:
        self.Popen = popen


def _fork(order: dict[str, Any], descriptors: Sequence[int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code: Any = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup, and launchers keep that
        for descriptor in descriptors:
            os.close(descriptor)
        _child(order)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _import_everything() -> None:
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


def _serve() -> None:
    """Forks for each line of stdin, and reports the exit code of each command."""
    requests, replies = os.dup(0), os.dup(1)
    # What the imports print goes to stderr.
    os.dup2(2, 1)
    _import_everything()
    for name in (
        "deepspeed.runtime.pipe.engine",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "tests.faults",
        "tests.fork_server",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    unread = b""
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 1 << 16)
            for pid, status in rank_server.ended_children():
                reply = {"number": numbers.pop(pid), "code": os.waitstatus_to_exitcode(status)}
                os.write(replies, json.dumps(reply).encode() + b"\n")
        if requests in ready:
            received = os.read(requests, 1 << 16)
            if not received:
                break
            *lines, unread = (unread + received).split(b"\n")
            for order in map(json.loads, lines):
                pid = _fork(order, [requests, replies, ended, wake])
                numbers[pid] = order["number"]
                os.write(replies, json.dumps({"number": order["number"], "pid": pid}).encode() + b"\n")
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
