"""Starts `megads` commands as forks of one process that has imported torch, DeepSpeed and megads.

The imports take most of the time of a small run: two seconds in the launcher, five in the process that forks its
ranks. The workers of pytest-xdist share one process, because it imports all of megads. A forked command behaves like a
new process: it has its own environment, working directory, output and signals. What a process reads only at its start
(threads, malloc) is set as for a rank with one thread; a command that needs other values starts a new process to fork
its ranks, as `megads` does.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
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
    """A connection to the process that forks.

    The first of several test processes starts it; it ends when the last of them has closed its connection.

    Args:
        folder: its working directory; the same for those who share it, and of this user only.
    """

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        with _locked(folder) as lock:
            try:
                self._socket.connect(_address(lock))
            except (FileNotFoundError, ConnectionRefusedError):
                _start(folder, lock)
                self._socket.connect(_address(lock))
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
        self._socket.sendall(json.dumps(order).encode() + b"\n")
        return ForkedProcess(self, number)

    def known(self, number: int, name: str) -> int | None:
        """The pid or exit code that the server has reported for a command so far."""
        return self._replies[number].get(name)

    def reply(self, number: int, name: str, timeout: float | None) -> int:
        """Waits until the server reports it; raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self.known(number, name)) is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                raise subprocess.TimeoutExpired("megads", timeout or 0)
            received = self._socket.recv(1 << 16)
            assert received, "the command server has ended: see its output"
            *lines, self._unread = (self._unread + received).split(b"\n")
            for reply in map(json.loads, lines):
                self._replies[reply.pop("number")] |= reply
        return found

    def close(self) -> None:
        """Ends the forks that were started through this connection."""
        self._socket.close()


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Excludes other starts and the end of a server of this folder; yields the descriptor of the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _address(folder: int) -> str:
    """Address of the server's socket; the path of a folder may be longer than an address can be."""
    return f"/proc/self/fd/{folder}/commands"


def _start(folder: Path, lock: int) -> None:
    """Starts a server, which accepts connections when it has imported everything."""
    (folder / "commands").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_address(lock))
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", "tests.command_server", str(listener.fileno())],
            cwd=folder,
            env=os.environ | rank_variables(1, cuda=False) | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )


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
    import pkgutil

    import megads
    import megads.cli
    import tests.deepspeed_import  # noqa: F401

    for module in pkgutil.walk_packages(megads.__path__, "megads."):
        if module.name.endswith(".mlflow_tracker"):
            continue  # MLflow, for which few commands ask
        with suppress(ImportError):
            importlib.import_module(module.name)
    # Hydra loads its plugins once per process.
    from megads.cli.main import run

    run(["train", "no.such.key=1"])


class _Client:
    """A connection to a test process, which orders commands."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self.numbers = connection, dict[int, int]()
        """`numbers` are those of the orders whose commands run, by pid."""
        self._unread = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def orders(self) -> list[dict[str, Any]] | None:
        """New orders; None if the test process is gone."""
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return None
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None

    def reply(self, number: int, **content: int) -> None:
        with suppress(OSError):  # the test process is gone
            self.socket.sendall(json.dumps({"number": number, **content}).encode() + b"\n")

    def close(self) -> None:
        """Kills what still runs."""
        self.socket.close()
        for pid in self.numbers:
            os.kill(pid, signal.SIGKILL)


def _is_abandoned(listener: socket.socket) -> bool:
    """Whether nobody has connected; then nobody can any more."""
    with _locked(Path()) as lock:
        if select.select([listener], [], [], 0)[0]:
            return False
        Path(_address(lock)).unlink(missing_ok=True)
        return True


def _serve(listener: socket.socket) -> None:
    """Forks for each order of a client, and reports the exit code of each command, until no client is left."""
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
    clients = list[_Client]()
    while clients or not _is_abandoned(listener):
        ready, _, _ = select.select([listener, ended, *clients], [], [])
        if ended in ready:
            os.read(ended, 1 << 16)
            for pid, status in rank_server.ended_children():
                for client in clients:
                    if pid in client.numbers:
                        client.reply(client.numbers.pop(pid), code=os.waitstatus_to_exitcode(status))
        if listener in ready:
            clients.append(_Client(listener.accept()[0]))
        for client in [one for one in clients if one in ready]:
            orders = client.orders()
            if orders is None:
                clients.remove(client)
                client.close()
                continue
            for order in orders:
                pid = _fork(order, [ended, wake, *(one.fileno() for one in (listener, *clients))])
                client.numbers[pid] = order["number"]
                client.reply(order["number"], pid=pid)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
