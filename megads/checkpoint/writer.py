"""Child processes of a rank, and those that write its checkpoints from an image of its state.

A rank has a writer process for the disk, and another one if local checkpoints are on; both are forked before the rank
has threads, a process group or a CUDA context. The first writes the same file as a synchronous save. Its writers
coordinate through the checkpoint's folder: each writes its part of the manifest there, and the writer of rank 0 commits
once all parts exist. The second completes images in memory (`local`). Writers do not communicate with other ranks.

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
from typing import NoReturn, Protocol

from pydantic import TypeAdapter

from megads.checkpoint.config import Retention
from megads.checkpoint.image import StateBuffer
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.rank_file import write_rank_file
from megads.checkpoint.store import Part, commit, failure_of, hidden_folder, remove_old
from megads.errors import CheckpointError, Fenced
from megads.runtime.distributed import ControlPlane
from megads.runtime.files import atomic_writer, read_regular
from megads.runtime.heartbeat import process_stat
from megads.runtime.lease import Fence
from megads.runtime.process import die_with_parent

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
"""Shortest and longest polling interval for the parts of other ranks."""
_POLL_S, _NAMED = 0.01, 3
_END_S = 5.0
"""Longest wait for a killed writer to end; one that takes longer is blocked on I/O, and is left to the kernel."""
_PART = TypeAdapter(Part)


class SaveState(Enum):
    """State of an order to a writer process."""

    idle = "idle"
    writing = "writing"
    done = "done"
    failed = "failed"
    lost = "lost"


@dataclass(frozen=True)
class SaveProgress:
    """Progress of the last order.

    Attributes:
        state: state of the order.
        reason: why it failed, or why the writer is lost.
        seconds: duration of the order up to the commit; for a save to disk only set on rank 0, which commits.
    """

    state: SaveState
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Worker:
    """The process that carries out an order, as the order sees it.

    Attributes:
        rank: rank that the writer belongs to.
        world_size: number of ranks, each with a writer.
        fence: fence of the ranks' start.
        cancelled: returns whether the rank has cancelled the order.
    """

    rank: int
    world_size: int
    fence: Fence | None
    cancelled: Callable[[], bool]


class WriterOrder(Protocol):
    """An order to process an image."""

    @property
    def image(self) -> int:
        """Number of the image, see `CheckpointWriter.attach`."""
        ...

    def carry_out(self, image: StateBuffer, worker: Worker) -> SaveProgress:
        """Carries out the order in the writer process; returns done or failed."""
        ...


@dataclass(frozen=True)
class SaveOrder:
    """Order to write an image to disk, as this rank's file of a checkpoint.

    Attributes:
        image: number of the image that holds the state.
        folder: folder of the committed checkpoint; its hidden "partial" folder exists.
        run: record of the run for the manifest.
        software: software versions for the manifest.
        keys: keys of all shards that this rank holds.
        keep: which checkpoints are kept once this one is committed.
    """

    image: int
    folder: Path
    run: RunRecord
    software: dict[str, str]
    keys: list[str]
    keep: Retention

    def carry_out(self, image: StateBuffer, worker: Worker) -> SaveProgress:
        """Writes this rank's part; on rank 0, then waits for the other parts and commits."""
        begin, partial = time.perf_counter(), hidden_folder(self.folder, "partial")
        try:
            part = (write_rank_file(partial, worker.rank, image.owned), self.keys)
            if worker.rank:
                write_part(partial, worker.rank, part)
                return SaveProgress(SaveState.done)
            others = range(1, worker.world_size)
            parts = [part, *(await_part(partial, other, worker.cancelled) for other in others)]
            for other in others:
                (partial / _part_name(other)).unlink()
            if worker.fence is not None:
                worker.fence.check()
            commit(partial, self.folder, self.run, parts, self.software)
            remove_old(self.folder.parent.parent, self.run.state["step"], self.keep)
        except (CheckpointError, OSError, Fenced) as error:
            return SaveProgress(SaveState.failed, failure_of(error)[0])
        return SaveProgress(SaveState.done, seconds=time.perf_counter() - begin)


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


class CheckpointWriter(ChildProcess):
    """The rank's handle of its writer process. `train` creates it first of all, since it forks the process.

    Args:
        rank: this rank.
        world_size: number of ranks, each with a writer.
        fence: fence of the ranks' start.
    """

    def __init__(self, rank: int, world_size: int, fence: Fence | None = None) -> None:
        super().__init__(partial(_serve, rank, world_size, fence))
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

    def write(self, order: WriterOrder) -> None:
        """Sends an order to the writer; its image must not change until the order is done."""
        self.announce()
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

    def cancel(self) -> None:
        """Cancels the wait for the parts of other ranks; the outcome is in `progress`."""
        try:
            self.connection.send(None)
        except OSError:
            self._progress = self._lost()

    def elapsed_s(self) -> float:
        """Seconds since the last order."""
        return time.perf_counter() - self._ordered_s

    def _lost(self) -> SaveProgress:
        return SaveProgress(SaveState.lost, f"its writer, process {self.pid}, has ended")

    def close(self) -> None:
        """Kills the writer in any stage: uncommitted files do not count as a checkpoint."""
        if self.pid:
            self.kill()
            self.pid = 0


def settled(progress: Callable[[], SaveProgress], control: ControlPlane, *, wait: bool) -> SaveProgress:
    """Outcome of the last order on all ranks: failed, lost, writing or done, in this order of priority; collective.

    Args:
        progress: returns the progress of this rank.
        control: control plane of all ranks.
        wait: wait until no rank is writing, or one has failed.

    Returns:
        The reason names the first few ranks that failed or are lost, or those that are writing; the time is rank 0's.
    """
    while True:
        own = progress()
        found = control.gather((own.state.value, own.reason, own.seconds), tuple[str, str, float])
        states = [SaveState(state) for state, *_ in found]
        for state in (SaveState.failed, SaveState.lost):
            if state in states:
                wrong = (SaveState.failed, SaveState.lost)
                named = [f"rank {at}: {reason}" for at, (_, reason, _) in enumerate(found) if states[at] in wrong]
                return SaveProgress(state, "; ".join(named[:_NAMED]))
        busy = [rank for rank, state in enumerate(states) if state is SaveState.writing]
        if not busy:
            return SaveProgress(SaveState.done, seconds=found[0][2])
        if not wait:
            return SaveProgress(
                SaveState.writing, f"rank {busy[0]}" + (f" and {len(busy) - 1} more" if busy[1:] else "")
            )
        time.sleep(_POLL_S)


def _serve(rank: int, world_size: int, fence: Fence | None, connection: Connection) -> None:
    """What the writer process does: receives the images, then carries out orders."""
    worker = Worker(rank, world_size, fence, connection.poll)
    images = [StateBuffer(layout, recv_handle(connection)) for layout in connection.recv()]
    while True:
        order = connection.recv()
        if order is not None:  # None: the last order was cancelled after it was done
            connection.send(order.carry_out(images[order.image], worker))


def write_part(partial: Path, rank: int, part: Part) -> None:
    """Writes a rank's part for rank 0's writer; requires that the rank's file is on disk."""
    with atomic_writer(partial / _part_name(rank)) as file:
        file.write(_PART.dump_json(part))


def await_part(partial: Path, rank: int, cancelled: Callable[[], bool]) -> Part:
    """Waits for the part of another rank, which follows that rank's file.

    Raises:
        CheckpointError: this writer's rank has cancelled the save.
    """
    path, wait_s = partial / _part_name(rank), _SHORTEST_WAIT_S
    while not path.exists():
        if cancelled():
            raise CheckpointError(f"rank {rank} has not written its part")
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    return _PART.validate_json(read_regular(path))


def _part_name(rank: int) -> str:
    return f"rank_{rank:05d}.part"
