"""Checker on one node of a health check: `python -m megads.tools.doctor.node_checker --store ... --node ...`.

It measures memory, disk, loopback and matrix multiplications with known results, and exchanges data with other nodes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]

from megads.api import Secret, child_environment
from megads.runtime.environment import gloo_variables
from megads.runtime.ports import gloo_interface
from megads.tools.doctor.node_check import CheckStore, NodeMeasurements

_CHUNK_BYTES = 2**20
_MOST_CHUNKS = 64
_CPU_SIZE = 256
_GPU_SIZE = 8192
_TIMEOUT_S = 20.0


def measure(folder: Path, seconds: float, clock: tuple[float, float]) -> NodeMeasurements:
    """Measures this node; failed measurements are in `errors`.

    Args:
        folder: folder to write to and read from; created if missing.
        seconds: duration of each speed measurement.
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
    speeds = [tried(f"GEMM on {device}", partial(matmul_speed, device, seconds), 2) for device in devices]
    return NodeMeasurements(
        devices=list(map(str, devices)),
        tflops=[tflops for tflops, _ in speeds],
        wrong_products=[
            str(device)
            for device, (_, exact) in zip(devices, speeds, strict=True)
            if not exact and f"GEMM on {device}" not in errors
        ],
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
    """Returns the GPUs of this node, or its CPU if it has none."""
    if not torch.cuda.is_available():
        return [torch.device("cpu")]
    return [torch.device("cuda", number) for number in range(torch.cuda.device_count())]


def matmul_speed(device: torch.device, seconds: float) -> tuple[float, float]:
    """Multiplies matrices of small integers, whose result is exact in fp32, and checks each result.

    The speed is that of the fastest of many short multiplications, on a CPU with one core. This distinguishes a slow
    device from one that is shared. The check is Freivalds' algorithm, C x = A (B x) for a random x, exact in float64.

    Returns:
        TFLOP/s, and 1.0 if all results were exact, else 0.0.
    """
    size = _CPU_SIZE if device.type == "cpu" else _GPU_SIZE
    rows, columns = torch.arange(size)[:, None], torch.arange(size)[None]
    a = ((rows * 7 + columns * 3) % 5 - 2).float().to(device)
    b = ((rows * 5 + columns * 11) % 7 - 3).float().to(device)
    x = torch.randint(0, 8, (size,), generator=torch.Generator().manual_seed(size)).double().to(device)
    expected = a.double() @ (b.double() @ x)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True  # exact for these integers, and used in training
    best_s, exact, deadline = float("inf"), True, time.perf_counter() + seconds
    product = torch.empty_like(a)
    while time.perf_counter() < deadline:
        begin = time.perf_counter()
        torch.mm(a, b, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - begin)
        exact = exact and bool(torch.equal(product.double() @ x, expected))
    return 2 * size**3 / best_s / 1e12, float(exact)


def disk_speed(folder: Path, seconds: float) -> tuple[float, float, float]:
    """Writes a file, syncs it, reads it back and compares.

    Returns:
        Free bytes, write speed and read speed in bytes/s; reads may be served from the page cache.

    Raises:
        OSError: the folder cannot be written to.
        AssertionError: the data read differs from the data written.
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
    """Sends known data through a loopback socket; returns bytes/s.

    Raises:
        OSError: the socket fails.
        AssertionError: the data received differs from the data sent.
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
            # Received data may cross the end of the chunk, which is sent repeatedly.
            assert data == (chunk + chunk)[start : start + len(data)], f"wrong bytes after {received}"
            received += len(data)
    thread.join()
    assert received == sent, f"{sent} bytes were sent, {received} arrived"
    return received / (time.perf_counter() - begin)


ELEMENTS = 1 << 20
"""Number of fp32 elements that each node of a pair sends, 4 MB."""


def run_checker(board: CheckStore, node: str) -> None:
    """Runs the checker of a node until the check ends.

    Args:
        board: store shared with the coordinator.
        node: name of this node.
    """
    # Several threads on shared cores wait for each other, and would measure the load instead of the node.
    torch.set_num_threads(1)
    asked = time.time()
    board.put(f"hello/{node}", asked)
    settings = board.wait(f"settings/{node}", 60.0)
    if settings is None:
        return
    answered = time.time()
    # As in NTP, the answer is assumed to originate from the middle of the round trip.
    clock = ((asked + answered) / 2 - settings["time"], (answered - asked) / 2)
    measured = measure(Path(settings["folder"]), settings["seconds"], clock)
    board.put(f"measured/{node}", asdict(measured))
    number = 0
    # Long, because the coordinator waits for the slowest node between two rounds.
    while (pairs := board.wait(f"round/{number}", 4 * settings["timeout_s"])) not in (None, []):
        for pair in pairs:
            if node in pair:
                store = board.part(f"pair/{number}/{pair[0]}")
                board.put(f"paired/{number}/{node}", exchange(store, pair.index(node), settings["timeout_s"]))
        number += 1


def exchange(store: Store, rank: int, timeout_s: float) -> str:
    """All-gathers known data between two nodes; returns the error, empty for success.

    Args:
        store: store for the rendezvous of the two nodes.
        rank: rank in the pair, 0 or 1.
        timeout_s: timeout of the rendezvous and of the collective.
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
    """Data that a rank of a pair sends: fp32 integers of shape [ELEMENTS]."""
    return ((torch.arange(ELEMENTS) * 31 + rank * 97) % 251).float()


def _pair_group(store: Store, rank: int, device: torch.device, timeout: timedelta) -> Any:
    """Process group of two ranks: NCCL between GPUs, gloo between CPUs."""
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # type: ignore[attr-defined]

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, 2, options)
    return ProcessGroupGloo(store, rank, 2, timeout=timeout)


def main() -> None:
    """Runs the checker of this node until the check ends."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.doctor.node_checker")
    parser.add_argument("--store", required=True, help="host:port of the coordinator's store")
    parser.add_argument("--node", required=True, help="name of this node")
    arguments = parser.parse_args()
    host, _, port = arguments.store.rpartition(":")
    try:
        secret = Secret.decode(sys.stdin.readline())
    except ValueError:
        sys.exit(
            "megads check_nodes: this checker got no secret on its standard input, which srun and the container must "
            "forward: leave --input out of the options of srun"
        )
    with child_environment(gloo_variables(gloo_interface(host))):
        run_checker(CheckStore(secret, host, int(port)), arguments.node)
    sys.stdout.flush()
    # Skips the interpreter's shutdown, which a process group whose partner is gone could block.
    os._exit(0)


if __name__ == "__main__":
    main()
