"""Child processes of a rank, and the one that writes its checkpoints from an image of its state.

Each rank has a writer process, forked before the rank has threads, a process group or a CUDA context. It writes a
`Save` as the ranks do in a synchronous save, except that writers do not communicate: each leaves its part of the
manifest in the checkpoint's folder, and the writer of rank 0 commits once all parts exist.

A child dies with its rank. A writer writes only on order, and a new order is sent only after the last one is done, so
an image is never overwritten while it is read.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter

from megads.checkpoint.image import StateBuffer
from megads.checkpoint.rank_file import WrittenPart, write_rank_file
from megads.checkpoint.store import Save, failure_of
from megads.engine.interface import Shard
from megads.errors import CheckpointError, Fenced
from megads.runtime.files import atomic_writer, read_regular
from megads.runtime.heartbeat import process_stat
from megads.runtime.process import die_with_parent

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
"""Shortest and longest polling interval for the parts of other ranks."""
_END_S = 5.0
"""Longest wait for a killed child to end; one that takes longer is blocked on I/O, and is left to the kernel."""
_PART = TypeAdapter(WrittenPart)


class ChildProcess:
    """A process that carries out orders of its rank, until the rank ends.

    It is forked before the rank has threads, a process group or a CUDA context.

    Attributes:
        connection: pipe to the process.
        pid: pid of the process.

    Args:
        serve: what the process does with its end of the pipe, until that raises EOFError.
    """

    def __init__(self, serve: Callable[[Connection], object]) -> None:
        self.connection, theirs = Pipe()
        self._status: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.connection.close()
            run_child(parent, theirs, serve)
        theirs.close()

    def kill(self) -> str:
        """Kills the process unless it has ended; returns how it ended."""
        self.connection.close()
        deadline = time.monotonic() + _END_S
        # After a wait, the pid may belong to another process.
        if not self._has_ended():
            os.kill(self.pid, signal.SIGKILL)
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.001)
        status = self._status
        return "" if status is None else f"killed by signal {-status}" if status < 0 else f"ended with code {status}"

    def _has_ended(self) -> bool:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status is not None


def run_child(parent: int, connection: Connection, serve: Callable[[Connection], object]) -> NoReturn:
    """Body of a child process of a rank.

    Args:
        parent: pid of the rank, with which this process dies.
        connection: connection to the rank.
        serve: see `ChildProcess`.
    """
    die_with_parent(parent, signal.SIGKILL)
    # The rank handles these signals, and waits for this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        serve(connection)
    except (EOFError, OSError):
        # The rank has closed its end.
        os._exit(0)
    except Exception:  # a bug: logged in the rank's log; the rank continues without this process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


class SaveState(Enum):
    """State of a save in the writer processes."""

    idle = "idle"
    writing = "writing"
    done = "done"
    failed = "failed"
    lost = "lost"


@dataclass(frozen=True)
class SaveProgress:
    """Progress of the last save.

    Attributes:
        state: state of the save.
        reason: why it failed, or why the writer is lost.
        seconds: duration up to the commit; only set on rank 0, which commits.
    """

    state: SaveState
    reason: str = ""
    seconds: float = 0.0


class CheckpointWriter(ChildProcess):
    """The rank's handle of its writer process. `train` creates it first of all, since it forks the process.

    Args:
        rank: this rank.
        world_size: number of ranks, each with a writer.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(partial(_serve, rank, world_size))
        self._progress = SaveProgress(SaveState.idle)
        self._ordered_s = 0.0

    def attach(self, images: Sequence[StateBuffer]) -> None:
        """Shares the images with the writer; called once.

        Raises:
            OSError: the writer has ended.
        """
        self.connection.send([image.layout for image in images])
        for image in images:
            send_handle(self.connection, image.descriptor, self.pid)

    def announce(self) -> None:
        """Sets the progress to writing, for an order that another thread will send."""
        self._progress, self._ordered_s = SaveProgress(SaveState.writing), time.perf_counter()

    def write(self, save: Save, image: int) -> None:
        """Orders a save of an image, given by its number; it must not change until the order is done."""
        self.announce()
        self._send((save, image))

    def cancel(self) -> None:
        """Cancels the wait for the parts of other ranks; the outcome is in `progress`."""
        self._send(None)

    def _send(self, order: tuple[Save, int] | None) -> None:
        try:
            self.connection.send(order)
        except OSError:
            self._progress = self._lost()

    def progress(self, timeout_s: float = math.inf) -> SaveProgress:
        """Progress of the last order; costs system calls while it is being written.

        Args:
            timeout_s: a writer that takes longer is considered hung, and counts as lost.
        """
        if self._progress.state is SaveState.writing:
            try:
                if self.connection.poll():
                    self._progress = self.connection.recv()
                elif process_stat(self.pid)[:1] == ["T"]:  # not "t": a tracer stops it only for a moment
                    self._progress = SaveProgress(
                        SaveState.lost, f"its writer, process {self.pid}, is stopped (SIGSTOP)"
                    )
            except (EOFError, OSError):
                self._progress = self._lost()
        if self._progress.state is SaveState.writing and self.elapsed_s() > timeout_s:
            return SaveProgress(SaveState.lost, f"its writer has not ended after {timeout_s:.0f} s")
        return self._progress

    def elapsed_s(self) -> float:
        """Seconds since the last order."""
        return time.perf_counter() - self._ordered_s

    def _lost(self) -> SaveProgress:
        return SaveProgress(SaveState.lost, f"its writer, process {self.pid}, has ended")

    def close(self) -> None:
        """Kills the writer at any time: uncommitted files do not count as a checkpoint."""
        if self.pid:
            self.kill()
            self.pid = 0


def _serve(rank: int, world_size: int, connection: Connection) -> None:
    """What the writer process does: receives the images, then carries out orders."""
    images = [StateBuffer(layout, recv_handle(connection)) for layout in connection.recv()]
    while True:
        order = connection.recv()
        if order is not None:  # None: the last order was cancelled after it was done
            save, image = order
            connection.send(_carry_out(save, images[image].owned, rank, world_size, connection.poll))


def _carry_out(
    save: Save, shards: Sequence[Shard], rank: int, world_size: int, cancelled: Callable[[], bool]
) -> SaveProgress:
    """Writes this rank's part of a checkpoint; on rank 0, then waits for the other parts and commits."""
    begin = time.perf_counter()
    try:
        part = write_rank_file(save.partial, rank, shards, save.keys)
        if rank:
            with atomic_writer(_part_path(save, rank)) as file:
                file.write(_PART.dump_json(part))
            return SaveProgress(SaveState.done)
        others = range(1, world_size)
        parts = [part, *(_await_part(save, other, cancelled) for other in others)]
        for other in others:
            _part_path(save, other).unlink()
        if save.fence is not None:
            save.fence.check()
        save.commit(parts)
    except (CheckpointError, OSError, Fenced) as error:
        return SaveProgress(SaveState.failed, failure_of(error)[0])
    return SaveProgress(SaveState.done, seconds=time.perf_counter() - begin)


def _part_path(save: Save, rank: int) -> Path:
    """File that holds a rank's part for rank 0's writer; it is written once the rank's file is on disk."""
    return save.partial / f"rank_{rank:05d}.part"


def _await_part(save: Save, rank: int, cancelled: Callable[[], bool]) -> WrittenPart:
    """Waits for the part of another rank.

    Raises:
        CheckpointError: this writer's rank has cancelled the save.
    """
    path, wait_s = _part_path(save, rank), _SHORTEST_WAIT_S
    while not path.exists():
        if cancelled():
            raise CheckpointError(f"rank {rank} has not written its part")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    return _PART.validate_json(read_regular(path))
