"""One node of a health check: `python -m megads.launch.node_checker --store ... --node ...`, started by the check.

It measures memory, disk, loopback, and matrix products whose result is known, and exchanges data with other nodes.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from megads.launch.node_check import Board, Measured
from megads.runtime.run_secret import Secret

_CHUNK_BYTES = 2**20
_MOST_CHUNKS = 64
_CPU_SIZE = 256
_GPU_SIZE = 8192
_TIMEOUT_S = 20.0


def measure(folder: Path, seconds: float, clock: tuple[float, float]) -> Measured:
    """Measures this node; what cannot be measured is in `errors`.

    Args:
        folder: to write to and read from; made if it is not there.
        seconds: how long each speed is measured.
        clock: offset and uncertainty of this node's clock.
    """
    errors: dict[str, str] = {}

    def tried(name: str, action: Callable[[], tuple[float, ...]], count: int) -> tuple[float, ...]:
        try:
            return action()
        except (OSError, RuntimeError, AssertionError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
            return (0.0,) * count

    devices = compute_devices()
    free, write, read = tried("disk", lambda: disk_speed(folder, seconds), 3)
    (loopback,) = tried("loopback", lambda: (loopback_speed(seconds),), 1)
    speeds = [tried(f"products on {device}", partial(products, device, seconds), 2) for device in devices]
    return Measured(
        devices=tuple(map(str, devices)),
        tflops=tuple(tflops for tflops, _ in speeds),
        wrong_products=tuple(
            str(device)
            for device, (_, exact) in zip(devices, speeds, strict=True)
            if not exact and f"products on {device}" not in errors
        ),
        memory_bytes=float(psutil.virtual_memory().available),
        disk_free_bytes=free,
        write_bytes_per_s=write,
        read_bytes_per_s=read,
        loopback_bytes_per_s=loopback,
        clock_offset_s=clock[0],
        clock_uncertainty_s=clock[1],
        errors=errors,
    )


def compute_devices() -> list[torch.device]:
    """The GPUs of this node, else its CPU."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def products(device: torch.device, seconds: float) -> tuple[float, float]:
    """Multiplies matrices of small integers, of which every sum is exact, and checks each product.

    The best of many short products counts, on a CPU of one core's: it tells a slow device from one that others use
    too. The check is Freivalds': C x = A (B x) for a random x, in float64, where it is exact as well.

    Returns:
        TFLOP/s, and 1.0 where all products were exact, else 0.0.
    """
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    rows, columns = torch.arange(size)[:, None], torch.arange(size)[None]
    a = ((rows * 7 + columns * 3) % 5 - 2).float().to(device)
    b = ((rows * 5 + columns * 11) % 7 - 3).float().to(device)
    x = torch.randint(0, 8, (size,), generator=torch.Generator().manual_seed(size)).double().to(device)
    expected = a.double() @ (b.double() @ x)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # exact for such integers, and what training uses
    best_s, exact, deadline = float("inf"), True, time.perf_counter() + seconds
    product = torch.empty_like(a)
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        torch.mm(a, b, out=product)
        _wait_for(product)
        best_s = min(best_s, time.perf_counter() - begin)
        exact = exact and bool(torch.equal(product.double() @ x, expected))
    return 2 * size**3 / best_s / 1e12, float(exact)


def _wait_for(tensor: Tensor) -> None:
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def disk_speed(folder: Path, seconds: float) -> tuple[float, float, float]:
    """Writes a file, syncs it, reads it back and compares.

    Returns:
        Free bytes, bytes/s written and bytes/s read; reading may be served from memory.

    Raises:
        OSError: the folder cannot be written to.
        AssertionError: what was read is not what was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".check-{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    chunk = os.urandom(_CHUNK_BYTES)
    try:
        chunks, begin = 0, time.perf_counter()
        with path.open("wb", buffering=0) as file:
            while chunks < _MOST_CHUNKS and (chunks == 0 or time.perf_counter() - begin < seconds):
                file.write(chunk)
                chunks += 1
            os.fsync(file.fileno())
        written_s = time.perf_counter() - begin
        begin = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            for number in range(chunks):
                assert file.read(_CHUNK_BYTES) == chunk, f"MiB {number} of {path} is not what was written"
        read_s = time.perf_counter() - begin
    finally:
        path.unlink(missing_ok=True)
    total = chunks * _CHUNK_BYTES
    return float(shutil.disk_usage(folder).free), total / written_s, total / read_s


def loopback_speed(seconds: float) -> float:
    """Sends known bytes to itself through a socket; returns bytes/s.

    Raises:
        OSError: the socket fails.
        AssertionError: what arrived is not what was sent.
    """
    chunk = os.urandom(_CHUNK_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_S)
        sender = socket.create_connection(server.getsockname(), timeout=_TIMEOUT_S)
        receiver, _ = server.accept()
    receiver.settimeout(_TIMEOUT_S)
    sent, begin = 0, time.perf_counter()

    def send() -> None:
        nonlocal sent
        with sender:
            while sent == 0 or time.perf_counter() - begin < seconds / 2:
                sender.sendall(chunk)
                sent += len(chunk)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    received = 0
    with receiver:
        while data := receiver.recv(_CHUNK_BYTES):
            start = received % _CHUNK_BYTES
            # A piece may run over the end of the chunk, which is sent again and again.
            assert data == (chunk + chunk)[start : start + len(data)], f"wrong bytes after {received}"
            received += len(data)
    thread.join()
    assert received == sent, f"{sent} bytes were sent, {received} arrived"
    return received / (time.perf_counter() - begin)


ELEMENTS = 1 << 20
"""Of what each of a pair sends, 4 MB."""


def run_checker(board: Board, node: str) -> None:
    """Takes part in a check to its end.

    Args:
        board: where the coordinator is.
        node: name of this node.
    """
    # Threads of a core that others use too wait for each other: then products would show the load, not the node.
    torch.set_num_threads(1)
    asked = time.time()
    board.put(f"hello/{node}", asked)
    settings = board.wait(f"settings/{node}", 60.0)
    if settings is None:
        return
    answered = time.time()
    # As NTP does: the answer is taken to come from the middle of the time that asking took.
    clock = ((asked + answered) / 2 - settings["time"], (answered - asked) / 2)
    board.put(f"measured/{node}", measure(Path(settings["folder"]), settings["seconds"], clock).encode())
    number = 0
    # Long, as the coordinator waits for the slowest node between two rounds.
    while (pairs := board.wait(f"round/{number}", 4 * settings["timeout_s"])) not in (None, []):
        for pair in pairs:
            if node in pair:
                store = board.part(f"pair/{number}/{pair[0]}")
                board.put(f"paired/{number}/{node}", exchange(store, pair.index(node), settings["timeout_s"]))
        number += 1


def exchange(store: Store, rank: int, timeout_s: float) -> str:
    """Gathers known data between two nodes; returns what went wrong, empty for nothing.

    Args:
        store: where the two meet.
        rank: 0 or 1.
        timeout_s: after which the other is given up.
    """
    device = compute_devices()[0]
    try:
        group = _pair_group(store, rank, device, timedelta(seconds=timeout_s))
        gathered = [torch.empty(ELEMENTS, device=device) for _ in range(2)]
        work = group.allgather([gathered], [known_data(rank).to(device)])
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for sender, data in enumerate(gathered):
        wrong = int((data.cpu() != known_data(sender)).sum())
        if wrong:
            return f"{wrong} of {ELEMENTS} elements of {'its own' if sender == rank else 'the other'} are wrong"
    return ""


def known_data(rank: int) -> Tensor:
    """What a rank of a pair sends: [ELEMENTS], fp32, integers."""
    return ((torch.arange(ELEMENTS) * 31 + rank * 97) % 251).float()


def _pair_group(store: Store, rank: int, device: torch.device, timeout: timedelta) -> Any:
    """A process group of two: NCCL between GPUs, gloo between CPUs."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, 2, options)
    return ProcessGroupGloo(store, rank, 2, timeout=timeout)


def main() -> None:
    """Takes part in the check to its end."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.node_checker")
    parser.add_argument("--store", required=True, help="host:port of the coordinator's store")
    parser.add_argument("--node", required=True, help="name of this node")
    parser.add_argument("--entry", help="module:function to run in place of run_checker; tests name their own")
    arguments = parser.parse_args()
    host, _, port = arguments.store.rpartition(":")
    work = run_checker
    if arguments.entry is not None:
        module, function = arguments.entry.split(":")
        work = getattr(importlib.import_module(module), function)
    try:
        secret = Secret.decode(sys.stdin.readline())
    except ValueError:
        sys.exit(
            "megads check_nodes: this checker got no secret through its input; srun and the container must pass it on: "
            "leave --input out of the options of srun"
        )
    work(Board(secret, host, int(port)), arguments.node)
    sys.stdout.flush()
    # Without the interpreter's shutdown, in which a process group whose partner is gone could hang.
    os._exit(0)


if __name__ == "__main__":
    main()
