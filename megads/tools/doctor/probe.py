"""Runs checks that can crash or hang, in a separate process: `python -m megads.tools.doctor.probe`.

Prints one line of JSON when a probe begins and one with its result, so that the parent knows which probe was running
when the process died. Output of libraries goes to stderr.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from megads.runtime.environment import exported, rank_variables
from megads.runtime.listener import LOOPBACK, listen

ALL_REDUCE_S = 2.0
"""Timeout of a collective between two processes on this machine."""


def probe_torch() -> dict[str, Any]:
    """Imports torch."""
    start = time.perf_counter()
    import torch

    return {
        "version": torch.__version__,
        "seconds": time.perf_counter() - start,
        "cuda": torch.version.cuda,
        "path": str(torch.__file__),
    }


def probe_gloo() -> dict[str, Any]:
    """Runs an all-reduce over two processes on gloo's default network interface; if that fails, on the loopback."""
    start = time.perf_counter()
    failure = _all_reduce({})
    if failure is None:
        return {"seconds": time.perf_counter() - start, "interface": None}
    again = _all_reduce({"GLOO_SOCKET_IFNAME": "lo"})
    return {"seconds": None, "failure": failure, "interface": "lo" if again is None else None}


def _all_reduce(variables: Mapping[str, str]) -> str | None:
    """Runs an all-reduce between two forked processes; returns the error, or None."""
    children: dict[int, int] = {}
    with exported(variables), listen(LOOPBACK) as server:
        for rank in range(2):
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                _run_rank(rank, server, write_end)
            os.close(write_end)
            children[child] = read_end
    failures = [failure for child, pipe in children.items() if (failure := _outcome(child, pipe))]
    return failures[0] if failures else None


def _run_rank(rank: int, server: socket.socket, pipe: int) -> None:
    """Body of a forked rank: writes the error, if any, to the pipe and exits. Rank 0 serves the store."""
    signal.alarm(round(ALL_REDUCE_S) + 1)
    try:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        torch.set_num_threads(1)
        limit, port = timedelta(seconds=ALL_REDUCE_S), server.getsockname()[1]
        descriptor = server.fileno() if rank == 0 else None
        store = TCPStore(LOOPBACK, port, 2, rank == 0, limit, wait_for_workers=False, master_listen_fd=descriptor)
        dist.init_process_group("gloo", timeout=limit, store=store, world_size=2, rank=rank)
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        message = "" if value.item() == 3.0 else f"1 + 2 gave {value.item()}"
    except BaseException as error:
        message = f"{type(error).__name__}: {first_line(error)}"
    os.write(pipe, message.encode()[:1000])
    # No clean-up: it could hang, and the objects belong to the parent.
    os._exit(0)


def _outcome(child: int, pipe: int) -> str | None:
    """Waits for a forked rank, which is ended by its alarm at the latest; returns its error, or None."""
    with os.fdopen(pipe, "rb") as file:
        message = file.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        killed = os.WTERMSIG(status)
        if killed == signal.SIGALRM:
            return f"no result within {ALL_REDUCE_S:.0f} s"
        return f"killed by {signal.Signals(killed).name}"
    return message or None


def probe_gpus() -> dict[str, Any]:
    """Reads the properties and free memory of every GPU, and which pairs lack peer access."""
    import torch

    if not torch.cuda.is_available():
        reason = None
        if torch.version.cuda:
            try:
                torch.cuda.init()
            except Exception as error:
                reason = first_line(error)
        return {"gpus": [], "reason": reason}
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(
            {
                "name": properties.name,
                "free_bytes": free,
                "total_bytes": total,
                "capability": [properties.major, properties.minor],
            }
        )
    pairs = [(a, b) for a in range(len(gpus)) for b in range(len(gpus)) if a != b]
    apart = [[a, b] for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    nccl = None
    with suppress(Exception):
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    return {"gpus": gpus, "apart": apart, "nccl": nccl}


def probe_deepspeed() -> dict[str, Any]:
    """Imports DeepSpeed as a rank does."""
    import torch

    with exported(rank_variables(1, cuda=torch.cuda.is_available())):
        start = time.perf_counter()
        from megads.engine.deepspeed_adapter import require_deepspeed

        seconds = time.perf_counter() - start
        require_deepspeed()
    return {"seconds": seconds}


def probe_kernels() -> dict[str, Any]:
    """Loads megads' CPU kernels, if they are compiled, and compares one of them with PyTorch."""
    from megads.ops.build import KernelsUnavailable, library_path

    try:
        path = library_path()
    except KernelsUnavailable as error:
        return {"state": "unavailable", "reason": str(error)}
    if not path.exists():
        return {"state": "not compiled"}
    import torch

    from megads.ops.activation import gelu
    from megads.ops.config import FUSED, TORCH
    from megads.ops.resolve import load_library

    load_library(path)
    x = torch.linspace(-4.0, 4.0, 33)
    return {"state": "loaded", "error": float((gelu(x, FUSED) - gelu(x, TORCH)).abs().max())}


def first_line(error: BaseException) -> str:
    """Returns the first non-empty line of an error's message, or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# The gloo probe forks, so it must run before any probe that starts threads or CUDA.
PROBES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "torch": probe_torch,
    "gloo": probe_gloo,
    "gpus": probe_gpus,
    "deepspeed": probe_deepspeed,
    "kernels": probe_kernels,
}


def main() -> None:
    """Runs every probe and reports failures; if importing torch fails, skips the other probes."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: Mapping[str, Any]) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    for name, probe in PROBES.items():
        say({"begin": name})
        try:
            say({"end": name, "result": probe()})
        except Exception as error:
            say({"end": name, "error": f"{type(error).__name__}: {first_line(error)}"})
            if name == "torch":
                # All other probes need torch.
                break
    out.close()
    # Skips the libraries' exit handlers, which could fail or hang after an error.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
