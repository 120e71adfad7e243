"""A rank that waits for a debugger (cluster.debug_rank): debugpy if it is installed, else pdb on a Unix socket.

`python -m megads.tools.debug.debugger <socket>` connects to the latter. The socket is in a folder that only this user
can enter: whoever is connected runs code as this user.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pdb
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from megads.api import EventWriter, make_own, node_name, own_path

_HOST = "127.0.0.1"


def wait_for_debugger(run_dir: Path, rank: int, port: int) -> None:
    """Waits until a debugger is attached to this process, and says where it waits in events.jsonl and in its log.

    Args:
        run_dir: the run directory.
        rank: this rank.
        port: port for debugpy.
    """
    place = f"rank {rank} on {node_name()}"
    if importlib.util.find_spec("debugpy") is not None:
        debugpy = importlib.import_module("debugpy")
        debugpy.listen((_HOST, port))
        _say(run_dir, rank, f"{place} waits for a debugger: attach debugpy to {_HOST}:{port}", port=port)
        debugpy.wait_for_client()
        return
    sessions = PdbSessions(run_dir, rank, place)
    sys.breakpointhook = sessions.stop
    sessions.stop_at(sys._getframe(1))


def ignore_breakpoints() -> None:
    """Makes breakpoint() do nothing in this rank, because another one is debugged."""
    sys.breakpointhook = lambda *_args, **_options: None


def _say(run_dir: Path, rank: int, message: str, **fields: Any) -> None:
    events = EventWriter(run_dir)
    # A warning, so that it is shown with any logging.level but error.
    events.write("debugger", level="warning", rank=rank, message=message, **fields)
    events.close()
    print(message, flush=True)


def socket_path(run_dir: Path, rank: int) -> Path:
    """Returns the path of the socket on which pdb waits in a rank; its length does not depend on the run's."""
    digest = hashlib.sha256(str(run_dir.absolute()).encode()).hexdigest()[:8]
    return own_path("debug") / f"{digest}.rank_{rank:05d}"


class RemotePdb(pdb.Pdb):
    """pdb on a connection. At its end the program goes on without breakpoints."""

    def __init__(self, stdin: TextIO, stdout: TextIO, rank: int) -> None:
        # nosigint: the launcher handles Ctrl+C.
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        self.use_rawinput = False
        self.prompt = f"(rank {rank}) "

    def do_EOF(self, arg: str) -> bool | None:  # noqa: N802
        """Ends the session of a client that is gone."""
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_quit = do_q = do_exit = do_EOF  # the launcher ends runs


class PdbSessions:
    """Sessions of pdb in one rank, one after another.

    Args:
        run_dir: the run directory.
        rank: this rank.
        place: rank and node, for messages.
    """

    def __init__(self, run_dir: Path, rank: int, place: str) -> None:
        self._run_dir, self._rank, self._place = run_dir, rank, place
        self._path = socket_path(run_dir, rank)
        self._pdb: RemotePdb | None = None
        self._connection: socket.socket | None = None

    def stop(self, *_args: Any, **_options: Any) -> None:
        """Stops at the caller, as breakpoint() does."""
        self.stop_at(sys._getframe(1))

    def stop_at(self, frame: FrameType) -> None:
        """Stops at a frame; waits for a client if none is connected."""
        if self._pdb is None or self._connection is None or _is_closed(self._connection):
            self._connection = self._accept()
            # Two streams: one for both would forget what was typed ahead as soon as it writes.
            stdin = self._connection.makefile("r", encoding="utf-8", errors="replace")
            stdout = self._connection.makefile("w", encoding="utf-8", errors="replace")
            self._pdb = RemotePdb(stdin, stdout, self._rank)
        self._pdb.set_trace(frame)

    def _accept(self) -> socket.socket:
        """Waits for a client; the socket exists meanwhile."""
        make_own(self._path.parent)
        self._path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(1)
            command = f"{sys.executable} -m {__name__} {self._path}"
            _say(self._run_dir, self._rank, f"{self._place} waits for a debugger: {command}", socket=str(self._path))
            connection, _ = listener.accept()
        self._path.unlink(missing_ok=True)
        return connection


def _is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def main() -> None:
    """Connects the terminal to the pdb of a rank."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])

    def show() -> None:
        while received := connection.recv(1 << 16):
            sys.stdout.write(received.decode(errors="replace"))
            sys.stdout.flush()

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    with suppress(BrokenPipeError, KeyboardInterrupt):
        for line in sys.stdin:
            connection.sendall(line.encode())
        connection.shutdown(socket.SHUT_WR)
    shown.join(timeout=60)


if __name__ == "__main__":
    main()
