"""Sides of a benchmark that run in separate processes and alternate; none affects another's heap or peak memory.

All have the environment of a rank: the same threads and allocator settings. A side that waits sleeps.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megads.runtime.environment import child_environment, rank_variables

Turn = Callable[[], dict[str, float]]
"""One unit of work; returns what it found, such as its loss."""

_END_S = 10.0
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""Environment of a single rank."""


class UnavailableError(Exception):
    """A side that cannot run here, with the reason and the remedy; the other sides run."""


@dataclass(frozen=True)
class Taken:
    """Measurements of one turn.

    Attributes:
        clock_s: wall-clock seconds.
        processor_s: CPU seconds of all threads; threads that wait for each other count as busy.
        found: return value.
        peak_bytes: peak resident memory of its process (VmHWM).
    """

    clock_s: float
    processor_s: float
    found: dict[str, float]
    peak_bytes: int


class SideProcess:
    """A side in a separate process, in which `make` and every turn run.

    Attributes:
        name: name of the side.
    """

    def __init__(self, name: str, make: Callable[..., Turn], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Waits until the side is built.

        Raises:
            UnavailableError: it cannot run here.
            RuntimeError: it failed.
        """
        self._receive()

    def take_turn(self) -> Taken:
        """Runs one turn, while the other sides sleep.

        Raises:
            RuntimeError: it failed.
        """
        self._connection.send(True)
        taken = self._receive()
        assert isinstance(taken, Taken)
        return taken

    def _receive(self) -> object:
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join(_END_S)
            raise RuntimeError(f"{self.name}: its process died with exit code {self._process.exitcode}") from None
        if isinstance(answer, UnavailableError):
            raise answer
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name} failed:\n{answer}")
        return answer

    def close(self) -> None:
        """Ends the process, and kills it if it is busy."""
        with suppress(BrokenPipeError):
            self._connection.send(False)
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, make: Callable[..., Turn], arguments: tuple[Any, ...]) -> None:
    # Output of libraries is not part of the results; errors are returned through the connection.
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
    try:
        turn = make(*arguments)
        connection.send(None)
        while connection.recv():
            begin, busy = time.perf_counter(), time.process_time()
            found = turn()
            taken = time.perf_counter() - begin, time.process_time() - busy
            connection.send(Taken(*taken, found, peak_resident_bytes()))
    except UnavailableError as reason:
        connection.send(reason)
    except EOFError:
        return
    except BaseException:
        connection.send(traceback.format_exc())


def peak_resident_bytes() -> int:
    """Peak resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


@contextmanager
def side_processes(
    makes: dict[str, tuple[Callable[..., Turn], tuple[Any, ...]]], threads: int, say: Callable[[str], None]
) -> Iterator[list[SideProcess]]:
    """Builds sides one after the other and yields those that can run; ends them all at exit.

    Args:
        makes: by name, the factory of a side's turn, and its arguments; both are pickled.
        threads: threads of each side.
        say: called with the sides that cannot run, and the reason.
    """
    with ExitStack() as stack:
        ready = []
        for name, (make, arguments) in makes.items():
            with child_environment(rank_variables(threads, cuda=False) | ONE_RANK):
                side = SideProcess(name, make, arguments)
            stack.callback(side.close)
            try:
                side.wait_until_ready()
            except UnavailableError as reason:
                say(f"{name}: left out: {reason}")
                continue
            ready.append(side)
        yield ready


def in_turns(sides: list[SideProcess], warm_up: int, rounds: int) -> dict[str, list[Taken]]:
    """Runs every side's turns, one side after the other: `warm_up` untimed ones, then `rounds`."""
    taken: dict[str, list[Taken]] = {side.name: [] for side in sides}
    for _ in range(warm_up + rounds):
        for side in sides:
            taken[side.name].append(side.take_turn())
    return taken
