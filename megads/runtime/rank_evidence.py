"""What a rank can say of itself while it hangs: the stacks of its threads and the collectives that it entered.

Whoever watches it asks by a signal. The stacks are written by faulthandler in the signal's handler, also where native
code holds the interpreter. The flight recorder's dump needs the interpreter: a thread of its own waits for the request,
as the main thread may never run Python again.
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
"""Signals that nothing else uses: SLURM, torch and Python's own take those with names."""
_SETTLED_S = 0.05
_POLL_S = 0.01


def stacks_path(folder: Path, rank: int) -> Path:
    """Returns the file that takes a rank's stacks; it is there from when the rank can answer."""
    return folder / f"stacks_{rank:05d}"


def flight_path(folder: Path, rank: int) -> Path:
    """Returns the file that takes a rank's dump of the flight recorder."""
    return folder / f"flight_{rank:05d}"


def answer_requests(folder: Path | None, rank: int) -> None:
    """Prepares this process to answer; to be called by its main thread before there are others.

    Args:
        folder: of this node's heartbeats; None where nobody watches.
        rank: of this process.
    """
    if folder is None:
        return
    path = stacks_path(folder, rank)
    unready = path.with_suffix(".unready")
    with suppress(OSError):  # without room for it, there will be no stacks
        # Kept open: faulthandler writes to the descriptor.
        file = unready.open("ab")
        faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
        # Blocked in every thread, so that only the one that waits for it gets it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
        unready.rename(path)


def dump_flights_on_request(folder: Path, rank: int) -> None:
    """Starts the thread that dumps the flight recorder; after the processes that a rank forks, which must do so alone.

    Args:
        folder: as `answer_requests` was told; without its call nobody asks.
        rank: of this process.
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
    """What torch recorded of this rank's collectives, as JSON; empty where it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return b""
    native = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if torch.distributed.get_backend() == "nccl" else "_dump_fr_trace_json"
    dump = getattr(native, name, None)
    return bytes(dump()) if dump is not None else b""


def ask_ranks(folder: Path, pids: Mapping[int, int]) -> None:
    """Asks ranks for their stacks and dumps.

    Args:
        folder: of the node's heartbeats.
        pids: of the ranks, by rank; one that cannot answer yet is left alone: the signals would end it.
    """
    for rank, pid in pids.items():
        stacks = stacks_path(folder, rank)
        with suppress(OSError):
            flight_path(folder, rank).unlink(missing_ok=True)
            os.truncate(stacks, 0)
            os.kill(pid, STACKS_SIGNAL)
            os.kill(pid, FLIGHT_SIGNAL)


def wait_for_answers(folder: Path, ranks: Iterable[int], limit_s: float) -> None:
    """Returns when all ranks have answered whole, or after a time."""
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
