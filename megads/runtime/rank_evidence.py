"""Evidence from a hung rank: the stacks of its threads, and the flight recorder's list of collectives.

The monitor requests it by signals. faulthandler writes the stacks in the signal handler, even if native code holds the
GIL. The flight recorder's dump needs the GIL; a separate thread waits for that signal, as the main thread may never run
Python again.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

STACKS_SIGNAL = signal.SIGRTMIN + 6
FLIGHT_SIGNAL = signal.SIGRTMIN + 7
"""Real-time signals, as SLURM, PyTorch and Python use named ones."""
_SETTLED_S = 0.05
_POLL_S = 0.01


def stacks_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's stacks; it exists once the rank can answer requests."""
    return folder / f"stacks_{rank:05d}"


def flight_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's flight recorder dump."""
    return folder / f"flight_{rank:05d}"


def answer_requests(folder: Path | None, rank: int) -> None:
    """Prepares this process to answer requests; to be called by the main thread before it starts other threads.

    Args:
        folder: folder of this node's heartbeats; None if they are not monitored.
        rank: rank of this process.
    """
    if folder is None:
        return
    path = stacks_path(folder, rank)
    unready = path.with_suffix(".unready")
    with suppress(OSError):  # without disk space there will be no stacks
        # Kept open: faulthandler writes to the descriptor.
        file = unready.open("ab")
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
        # Blocked in all threads, so that only sigwait() receives it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
        unready.rename(path)


def dump_flights_on_request(folder: Path, rank: int) -> None:
    """Starts the thread that dumps the flight recorder; to be called after all forks, as forks need a single thread.

    Args:
        folder: folder given to `answer_requests`; if that was not called, no thread is started.
        rank: rank of this process.
    """
    if stacks_path(folder, rank).exists():
        threading.Thread(target=_dump_flights, args=(flight_path(folder, rank),), name="evidence", daemon=True).start()


def _dump_flights(path: Path) -> None:
    while True:
        signal.sigwait({FLIGHT_SIGNAL})
        partial = path.with_suffix(".partial")
        with suppress(OSError):
            partial.write_bytes(_flight_dump())
            partial.rename(path)


def _flight_dump() -> bytes:
    """Returns the flight recorder's record of this rank's collectives as JSON; empty if there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return b""
    native = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if torch.distributed.get_backend() == "nccl" else "_dump_fr_trace_json"
    dump = getattr(native, name, None)
    return bytes(dump()) if dump is not None else b""


def ask_ranks(folder: Path, pids: Mapping[int, int]) -> None:
    """Requests stacks and flight recorder dumps from ranks.

    Args:
        folder: folder of the node's heartbeats.
        pids: process ids by rank; a rank that is not ready yet is skipped, as the signals would kill it.
    """
    for rank, pid in pids.items():
        stacks = stacks_path(folder, rank)
        with suppress(OSError):
            flight_path(folder, rank).unlink(missing_ok=True)
            os.truncate(stacks, 0)
            os.kill(pid, STACKS_SIGNAL)
            os.kill(pid, FLIGHT_SIGNAL)


def wait_for_answers(folder: Path, ranks: Iterable[int], limit_s: float) -> None:
    """Waits until all ranks have answered completely, at most `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    waiting = {rank: (-1, time.monotonic()) for rank in ranks}
    while waiting and time.monotonic() < deadline:
        for rank, (size, since) in list(waiting.items()):
            try:
                now = stacks_path(folder, rank).stat().st_size
            except OSError:
                del waiting[rank]
                continue
            if now != size:
                waiting[rank] = (now, time.monotonic())
            elif now and time.monotonic() - since > _SETTLED_S and flight_path(folder, rank).exists():
                del waiting[rank]
        time.sleep(_POLL_S)
