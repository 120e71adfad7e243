"""Runs a function on several gloo ranks, forked by a server that has already imported torch and DeepSpeed."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing as mp
import os
import random
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0
# Every rank imports its test's module. What test modules import is loaded once, in the fork server, which saves half a
# second per rank, a sixth of what `make test` computed. The engine imports torch._dynamo and DeepSpeed's Muon late.
PRELOADED = [
    "torch",
    "tests.deepspeed_import",
    "deepspeed.runtime.pipe.engine",
    "megads.engine.native_engine",
    "megads.engine.zero_engine",
    "torch._dynamo",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "pytest",
    "hypothesis.strategies",
    "megads.checkpoint.hook",
    "megads.tools.convert.universal",
    "tests.parity",
]


def free_port() -> int:
    """Returns a port that no process listens on now.

    It is below the range from which the kernel takes ports for outgoing connections: a connection of another rank that
    starts meanwhile could take a port of that range before it is listened on.
    """
    for port in random.sample(range(10_000, 32_000), 100):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports tried, none free")


def _context() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank_main(connection: Any, fn: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DS_ACCELERATOR="cpu",
    )  # fmt: skip
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 1)
    torch.set_num_threads(1)
    # DeepSpeed runs garbage collection eight times while it builds an optimizer; preloaded objects are excluded.
    gc.freeze()
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S))
        connection.send((True, fn(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        connection.send((False, traceback.format_exc()))
        os._exit(1)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Calls fn(*args) on `world_size` ranks of a gloo group; returns the results by rank.

    Results are pickled: return numbers, numpy arrays or dicts of them. The first failing rank's traceback is raised
    here and the others are killed.
    """
    context, port = _context(), free_port()
    connections, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(theirs, fn, rank, world_size, port, args), daemon=True)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            pending = {c: r for r, c in enumerate(connections) if r not in results}
            ready = wait(list(pending), timeout=TIMEOUT_S)
            assert ready, f"ranks {sorted(pending.values())} gave no result within {TIMEOUT_S} s"
            for connection in ready:
                rank = pending[connection]
                try:
                    ok, value = connection.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    raise AssertionError(f"rank {rank}: {value}")
                results[rank] = value
        for process in processes:
            process.join(30)
            assert process.exitcode == 0, f"a rank left with {process.exitcode}"
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(world_size)]
