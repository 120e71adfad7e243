"""Forks the ranks of a machine without GPUs from one process that has imported torch, and DeepSpeed if the run uses it.

The imports take most of a rank's startup time. Done once, before the fork, they cost the time and memory of one rank,
and a restart in place skips them. Ranks with a GPU are new processes: a CUDA driver does not survive a fork, and
DeepSpeed queries it on import.

The launcher starts `python -m megads.launch.rank_server` and writes one line of JSON per rank to its standard input.
The server replies on its standard output with the rank's pid, and later with its exit code. It is single-threaded, as a
process that forks must be, and ends at the end of its input; its ranks die with it (`rank.die_with_launcher`).
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
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from megads.errors import EXIT_BUG, UnhealthyNode
from megads.launch.rank import die_with_launcher
from megads.runtime import environment

_PRELOADED = ("megads.train.loop", "megads.engine.native_engine")
_PRELOADED_WITH_DEEPSPEED = (*_PRELOADED, "megads.engine.zero_engine", "megads.engine.deepspeed_engine")
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class RankServer:
    """The launcher's handle of the server, which it starts and which imports in the background.

    Args:
        variables: environment variables that the ranks need before torch and the C library are loaded.
        deepspeed: whether to import DeepSpeed, too; otherwise a rank that needs it imports it itself.

    Attributes:
        pids: pids of the forked ranks, by rank.
        exit_codes: exit codes of the ranks that have ended, by rank; negative for a rank killed by that signal.
    """

    def __init__(self, variables: Mapping[str, str], *, deepspeed: bool = False):
        self.variables = dict(variables)
        self.pids: dict[int, int] = {}
        self.exit_codes: dict[int, int] = {}
        self._ordered: set[int] = set()
        self._killed = False
        self._unread = b""
        with environment.child_environment(self.variables):
            # In its own session, because the launcher handles terminal signals.
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), *(["deepspeed"] if deepspeed else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )

    def serves(self, variables: Mapping[str, str]) -> bool:
        """Whether ranks with these environment variables can be forked from this server."""
        return (
            not self._killed
            and self._process.poll() is None
            and all(variables.get(name) == self.variables.get(name) for name in environment.FIXED_AT_START)
        )

    def start(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """Orders a rank to be forked as soon as the imports are done.

        Args:
            rank: number of the rank.
            command: `-m`, the module whose `main` the rank calls, and its arguments.
            variables: environment variables to add.
        """
        flag, module, *arguments = command
        assert flag == "-m", command
        self._ordered.add(rank)
        self.pids.pop(rank, None)
        self.exit_codes.pop(rank, None)
        order = {"rank": rank, "module": module, "arguments": arguments, "variables": dict(variables)}
        # `poll` detects a server that has died.
        with suppress(BrokenPipeError):
            os.write(_fileno(self._process.stdin), json.dumps(order).encode() + b"\n")

    def poll(self, timeout_s: float) -> None:
        """Waits up to a timeout for ranks to start or to end.

        Raises:
            UnhealthyNode: the server has died, and its ranks with it.
        """
        replies = _fileno(self._process.stdout)
        if not select.select([replies], [], [], timeout_s)[0]:
            return
        received = os.read(replies, 1 << 16)
        if not received:
            code = self._process.wait()
            if self._killed:
                self.exit_codes = dict.fromkeys(self._ordered, -signal.SIGKILL) | self.exit_codes
                return
            raise UnhealthyNode(
                f"the process that forks the ranks ended with {code}: its output is above; the kernel log "
                "(dmesg) shows whether memory ran out"
            )
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            known = self.exit_codes if "exit_code" in reply else self.pids
            known[reply["rank"]] = reply.get("exit_code", reply["pid"])

    @property
    def starting(self) -> bool:
        """Whether a rank has not been forked yet."""
        return not self._ordered <= self.pids.keys()

    def kill(self) -> None:
        """Kills the server and the ranks that it has forked; ranks not forked yet count as killed."""
        self._killed = True
        self._process.kill()

    def close(self) -> None:
        """Ends the server and the ranks that still run."""
        self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        _pipe(self._process.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _fileno(stream: IO[bytes] | None) -> int:
    return _pipe(stream).fileno()


def main() -> NoReturn:
    """Main function of the server: imports, then forks ranks on request until its standard input ends."""
    die_with_launcher(int(sys.argv[1]))
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    orders, replies = _take_pipes()
    for module in _PRELOADED_WITH_DEEPSPEED if "deepspeed" in sys.argv[2:] else _PRELOADED:
        try:
            importlib.import_module(module)
        except Exception:
            # Each rank will fail at the same import, with the error in its log and in the launcher's message.
            traceback.print_exc()
            break
    # A garbage collection that visits imported objects would copy their pages in every rank.
    gc.freeze()
    _serve(orders, replies)
    os._exit(0)


def _take_pipes() -> tuple[int, int]:
    """Moves the two pipes off descriptors 0 and 1, which an import could read from or print to."""
    orders, replies = os.dup(0), os.dup(1)
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    return orders, replies


def _serve(orders: int, replies: int) -> None:
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ranks: dict[int, int] = {}
    unread = b""
    server = os.getpid()
    while True:
        ready, _, _ = select.select([orders, ended], [], [])
        if ended in ready:
            os.read(ended, 1 << 16)
            for pid, status in ended_children():
                _reply(replies, {"rank": ranks.pop(pid), "pid": pid, "exit_code": os.waitstatus_to_exitcode(status)})
        if orders in ready:
            received = os.read(orders, 1 << 16)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become_rank(order, server, [orders, replies, ended, wake])
                ranks[pid] = order["rank"]
                _reply(replies, {"rank": order["rank"], "pid": pid})


def ended_children() -> list[tuple[int, int]]:
    """Reaps the child processes that have ended; returns their pids and wait statuses."""
    found = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(child)
    return found


def _reply(replies: int, content: dict[str, Any]) -> None:
    os.write(replies, json.dumps(content).encode() + b"\n")


def _become_rank(order: dict[str, Any], server: int, pipes: Sequence[int]) -> NoReturn:
    """Turns a process forked by the server (pid `server`) into a rank; never returns to the server's loop."""
    try:
        # First of all: if the server were killed before this, the rank would run unmonitored.
        die_with_launcher(server)
        os.setsid()
        signal.set_wakeup_fd(-1)
        for descriptor in pipes:
            os.close(descriptor)
        # Restores the defaults of a new process.
        for number in (*_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        environment.adopt_environment(order["variables"], server)
        sys.argv = [order["module"], *order["arguments"]]
        importlib.import_module(order["module"]).main()
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else EXIT_BUG)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(EXIT_BUG)


if __name__ == "__main__":
    main()
