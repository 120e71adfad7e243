"""Saves in two stages: a rank copies its state into shared memory and trains on; a process of its own writes that.

Each rank has one writer process, forked before the rank has threads, a process group or a GPU. It writes the same file
as a synchronous save. Writers meet in the checkpoint's folder: each leaves its part of the manifest there, and that of
rank 0 commits once all parts are in. Nothing here talks to another rank.

A writer dies with its rank. It writes nothing without an order, and a new order is given only when the last one is
done, so that memory is never copied over while it is read.
"""

from __future__ import annotations

import mmap
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
from typing import NoReturn

import torch
from pydantic import TypeAdapter
from torch import Tensor

from megads.checkpoint.manifest import RunRecord
from megads.checkpoint.rank_file import write_rank_file
from megads.checkpoint.retention import Retention
from megads.checkpoint.store import Part, commit, failure_of, hidden_folder, remove_old
from megads.engine.interface import Shard
from megads.errors import CheckpointError, Fenced
from megads.runtime.files import atomic_writer, read_regular
from megads.runtime.heartbeat import process_stat
from megads.runtime.lease import Fence
from megads.runtime.process import die_with_parent

_ALIGNMENT = 64
"""Of every tensor in shared memory, in bytes."""
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
class SaveOrder:
    """What to write; all of it but the tensors, which are in shared memory.

    Attributes:
        folder: of the checkpoint once it is committed; its hidden folder exists.
        run: what the manifest says of the run.
        software: what it says of versions.
        keys: of everything this rank holds.
        keep: which checkpoints stay once this one is committed.
    """

    folder: Path
    run: RunRecord
    software: dict[str, str]
    keys: list[str]
    keep: Retention


@dataclass(frozen=True)
class _Place:
    """Of a tensor in shared memory: a `Shard` with its first byte there in place of the tensor."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    def tensor(self, memory: Tensor) -> Tensor:
        """A view of the memory, which is a tensor of bytes."""
        count = self.dtype.itemsize * torch.Size(self.shape).numel()
        return memory[self.start : self.start + count].view(self.dtype).reshape(self.shape)


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
        self._places: list[_Place] = []
        self._views: list[Tensor] = []
        self._progress = SaveProgress(Stage.idle)
        self._ordered_s = 0.0

    @property
    def pid(self) -> int:
        """Of the writer process."""
        return self._pid

    def allocate(self, shards: Sequence[Shard]) -> None:
        """Makes the shared memory, all of it resident, for shards of these shapes.

        Raises:
            OSError: the machine has not that much.
        """
        kept, start = [shard for shard in shards if shard.tensor.numel()], 0
        for shard in kept:
            tensor = shard.tensor
            place = _Place(
                shard.key, tuple(shard.global_shape), tuple(shard.offset), tuple(tensor.shape), tensor.dtype, start
            )
            self._places.append(place)
            start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        descriptor = os.memfd_create("megads-checkpoint", os.MFD_CLOEXEC)
        try:
            size = max(start, _ALIGNMENT)
            # Allocated here: a page that is missing later would kill with SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._connection.send((self._places, size))
            send_handle(self._connection, descriptor, self._pid)
        finally:
            os.close(descriptor)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        if any(shard.tensor.is_cuda for shard in kept):
            # Pinned, so that copies from the GPU run at the bus's speed.
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)))
        self._views = [place.tensor(memory) for place in self._places]

    def copy(self, shards: Sequence[Shard]) -> None:
        """Copies the rank's state; returns when it may change. Only while no order is being written.

        Args:
            shards: those of `allocate`, with what they hold now.
        """
        assert self.progress().stage is not Stage.writing, "the writer reads that memory"
        kept = [shard for shard in shards if shard.tensor.numel()]
        for place, view, shard in zip(self._places, self._views, kept, strict=True):
            assert (place.key, place.shape, place.offset) == (shard.key, tuple(shard.tensor.shape), tuple(shard.offset))
            view.copy_(shard.tensor, non_blocking=True)
        if any(shard.tensor.is_cuda for shard in kept):
            torch.cuda.current_stream().synchronize()

    def write(self, order: SaveOrder) -> None:
        """Lets the writer bring what was copied to disk."""
        self._progress, self._ordered_s = SaveProgress(Stage.writing), time.perf_counter()
        try:
            self._connection.send(order)
        except OSError:
            self._progress = self._lost()

    def progress(self) -> SaveProgress:
        """Where the last order is; costs a system call while it is being written."""
        if self._progress.stage is Stage.writing:
            try:
                if self._connection.poll():
                    self._progress = self._connection.recv()
                elif process_stat(self._pid)[:1] == ["T"]:  # "t" is a tracer's, and over in a moment
                    self._progress = SaveProgress(Stage.lost, f"its writer, process {self._pid}, is stopped (SIGSTOP)")
            except (EOFError, OSError):
                self._progress = self._lost()
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


def _serve(parent: int, connection: Connection, rank: int, world_size: int, fence: Fence | None) -> NoReturn:
    """The writer process: takes the memory, then orders until its rank is gone."""
    die_with_parent(parent, signal.SIGKILL)
    # A stop is the rank's affair: it waits for what is being written.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        places, size = connection.recv()
        descriptor = recv_handle(connection)
        memory = torch.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8)
        shards = [Shard(place.key, place.global_shape, place.offset, place.tensor(memory)) for place in places]
        while True:
            order = connection.recv()
            if order is not None:  # an order was cancelled when it was done already
                connection.send(_carry_out(order, shards, rank, world_size, fence, connection.poll))
    except (EOFError, OSError):
        # The rank has closed its end.
        os._exit(0)
    except Exception:  # a bug: it is in the rank's log, and the rank goes on without this process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _carry_out(
    order: SaveOrder,
    shards: Sequence[Shard],
    rank: int,
    world_size: int,
    fence: Fence | None,
    cancelled: Callable[[], bool],
) -> SaveProgress:
    """Writes this rank's part; as rank 0 waits for the others' and commits."""
    begin, partial = time.perf_counter(), hidden_folder(order.folder, "partial")
    try:
        part = (write_rank_file(partial, rank, shards), order.keys)
        if rank:
            write_part(partial, rank, part)
            return SaveProgress(Stage.done)
        parts = [part, *(await_part(partial, other, cancelled) for other in range(1, world_size))]
        for other in range(1, world_size):
            (partial / _part_name(other)).unlink()
        if fence is not None:
            fence.check()
        commit(partial, order.folder, order.run, parts, order.software)
        remove_old(order.folder.parent.parent, order.run.state["step"], order.keep)
    except (CheckpointError, OSError, Fenced) as error:
        return SaveProgress(Stage.failed, failure_of(error)[0])
    return SaveProgress(Stage.done, seconds=time.perf_counter() - begin)


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
