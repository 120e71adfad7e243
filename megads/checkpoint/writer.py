"""Saves in two stages: a rank copies its state into an image and trains on; a process of its own does the rest.

A rank has a writer process for the disk, and one more where it keeps local checkpoints; both are forked before the rank
has threads, a process group or a GPU. The former writes the same file as a synchronous save. Writers meet in the
checkpoint's folder: each leaves its part of the manifest there, and that of rank 0 commits once all parts are in. The
latter completes images in memory (`local`). Nothing here talks to another rank.

A writer dies with its rank. It writes nothing without an order, and a new order is given only when the last one is
done, so that memory is never copied over while it is read.
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
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import NoReturn, Protocol

from pydantic import TypeAdapter

from megads.checkpoint.image import StateImage
from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.rank_file import write_rank_file
from megads.checkpoint.retention import Retention
from megads.checkpoint.store import Part, commit, failure_of, hidden_folder, remove_old
from megads.errors import CheckpointError, Fenced
from megads.runtime.distributed import ControlPlane
from megads.runtime.files import atomic_writer, read_regular
from megads.runtime.heartbeat import process_stat
from megads.runtime.lease import Fence
from megads.runtime.process import die_with_parent

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.5
"""Between two looks for the parts of the others."""
_END_S = 5.0
"""A killed writer that is not gone by then waits for a disk; it is left to the kernel."""
_PART = TypeAdapter(Part)


class Stage(Enum):
    """Where an order is."""

    idle = "idle"
    writing = "writing"
    done = "done"
    failed = "failed"
    lost = "lost"


@dataclass(frozen=True)
class SaveProgress:
    """Of the last order.

    Attributes:
        stage: where it is.
        reason: why it failed, or why the writer is lost.
        seconds: from the order to the commit, of rank 0's when done.
    """

    stage: Stage
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Worker:
    """What an order knows of the process that carries it out.

    Attributes:
        rank: whose writer it is.
        world_size: ranks, each of which has a writer.
        fence: of the start that they belong to.
        cancelled: whether the rank has given the order up.
    """

    rank: int
    world_size: int
    fence: Fence | None
    cancelled: Callable[[], bool]


class WriterOrder(Protocol):
    """What a writer does with an image."""

    @property
    def image(self) -> int:
        """Number of the image, see `CheckpointWriter.attach`."""
        ...

    def carry_out(self, image: StateImage, worker: Worker) -> SaveProgress:
        """Runs in the writer process; returns done or failed."""
        ...


@dataclass(frozen=True)
class SaveOrder:
    """Writes an image to disk, as this rank's file of a checkpoint.

    Attributes:
        image: number of the one that holds the state.
        folder: of the checkpoint once it is committed; its hidden folder exists.
        run: what the manifest says of the run.
        software: what it says of versions.
        keys: of everything this rank holds.
        keep: which checkpoints stay once this one is committed.
    """

    image: int
    folder: Path
    run: RunRecord
    software: dict[str, str]
    keys: list[str]
    keep: Retention

    def carry_out(self, image: StateImage, worker: Worker) -> SaveProgress:
        """Writes this rank's part; as rank 0 waits for the others' and commits."""
        begin, partial = time.perf_counter(), hidden_folder(self.folder, "partial")
        try:
            part = (write_rank_file(partial, worker.rank, image.owned), self.keys)
            if worker.rank:
                write_part(partial, worker.rank, part)
                return SaveProgress(Stage.done)
            others = range(1, worker.world_size)
            parts = [part, *(await_part(partial, other, worker.cancelled) for other in others)]
            for other in others:
                (partial / _part_name(other)).unlink()
            if worker.fence is not None:
                worker.fence.check()
            commit(partial, self.folder, self.run, parts, self.software)
            remove_old(self.folder.parent.parent, self.run.state["step"], self.keep)
        except (CheckpointError, OSError, Fenced) as error:
            return SaveProgress(Stage.failed, failure_of(error)[0])
        return SaveProgress(Stage.done, seconds=time.perf_counter() - begin)


class CheckpointWriter:
    """The rank's end. Made by `train` before everything else: the process is forked then.

    Args:
        rank: of this process.
        world_size: ranks, each of which has a writer.
        fence: of the start that the ranks belong to.
    """

    def __init__(self, rank: int, world_size: int, fence: Fence | None = None) -> None:
        self._connection, theirs = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _serve(parent, theirs, rank, world_size, fence)
        theirs.close()
        self._progress = SaveProgress(Stage.idle)
        self._ordered_s = 0.0

    @property
    def pid(self) -> int:
        """Of the writer process."""
        return self._pid

    def attach(self, images: Sequence[StateImage]) -> None:
        """Gives the writer the memory that its orders are about; called once.

        Raises:
            OSError: the writer is gone.
        """
        self._connection.send([image.layout for image in images])
        for image in images:
            send_handle(self._connection, image.descriptor, self._pid)

    def announce(self) -> None:
        """From now on an order counts as being carried out that another thread is going to give."""
        self._progress, self._ordered_s = SaveProgress(Stage.writing), time.perf_counter()

    def write(self, order: WriterOrder) -> None:
        """Lets the writer carry out an order; its image must not change until that is done."""
        self.announce()
        try:
            self._connection.send(order)
        except OSError:
            self._progress = self._lost()

    def progress(self, timeout_s: float = math.inf) -> SaveProgress:
        """Where the last order is; costs a system call while it is being written.

        Args:
            timeout_s: a writer that takes longer is lost: it hangs.
        """
        if self._progress.stage is Stage.writing:
            try:
                if self._connection.poll():
                    self._progress = self._connection.recv()
                elif process_stat(self._pid)[:1] == ["T"]:  # "t" is a tracer's, and over in a moment
                    self._progress = SaveProgress(Stage.lost, f"its writer, process {self._pid}, is stopped (SIGSTOP)")
            except (EOFError, OSError):
                self._progress = self._lost()
        if self._progress.stage is Stage.writing and self.elapsed_s() > timeout_s:
            return SaveProgress(Stage.lost, f"its writer has not ended after {timeout_s:.0f} s")
        return self._progress

    def cancel(self) -> None:
        """Ends the wait for the parts of other ranks; `progress` tells when that has happened."""
        try:
            self._connection.send(None)
        except OSError:
            self._progress = self._lost()

    def elapsed_s(self) -> float:
        """Seconds since the last order."""
        return time.perf_counter() - self._ordered_s

    def _lost(self) -> SaveProgress:
        return SaveProgress(Stage.lost, f"its writer, process {self._pid}, has ended")

    def close(self) -> None:
        """Ends the writer, whatever it is doing: what it has begun and not committed is no checkpoint."""
        if self._pid == 0:
            return
        os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_S
        while os.waitpid(self._pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.001)
        self._connection.close()
        self._pid = 0


def gather_progress(progress: SaveProgress, control: ControlPlane) -> list[SaveProgress]:
    """Where the last orders of all ranks are, by rank; collective."""
    found = control.gather((progress.stage.value, progress.reason, progress.seconds), tuple[str, str, float])
    return [SaveProgress(Stage(stage), reason, seconds) for stage, reason, seconds in found]


def _serve(parent: int, connection: Connection, rank: int, world_size: int, fence: Fence | None) -> NoReturn:
    """The writer process: takes the memory, then orders until its rank is gone."""
    die_with_parent(parent, signal.SIGKILL)
    # A stop is the rank's affair: it waits for what is being written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    worker = Worker(rank, world_size, fence, connection.poll)
    try:
        images = [StateImage(layout, recv_handle(connection)) for layout in connection.recv()]
        while True:
            order = connection.recv()
            if order is not None:  # an order was cancelled when it was done already
                connection.send(order.carry_out(images[order.image], worker))
    except (EOFError, OSError):
        # The rank has closed its end.
        os._exit(0)
    except Exception:  # a bug: it is in the rank's log, and the rank goes on without this process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def write_part(partial: Path, rank: int, part: Part) -> None:
    """Leaves a rank's part where rank 0's writer looks for it: its file is on disk."""
    with atomic_writer(partial / _part_name(rank)) as file:
        file.write(_PART.dump_json(part))


def await_part(partial: Path, rank: int, cancelled: Callable[[], bool]) -> Part:
    """Of another rank, once it has written its file.

    Raises:
        CheckpointError: the rank of this writer has given the save up.
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
