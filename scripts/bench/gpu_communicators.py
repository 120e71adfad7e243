#!/usr/bin/env python3
"""GPU memory of a rank in addition to its tensors: CUDA context, kernels, cuBLAS, and every NCCL communicator.

    python -m scripts.bench.gpu_communicators [--device cuda] [--append bench.jsonl]

One rank per GPU. The communicators are those of a run with as many ranks (tensor, pipeline and data parallelism of 2
each as far as they go), as megads.tools.plan.memory lists them; tests/engine/test_communicators.py shows that a run
opens no others. Each is used once, because NCCL allocates at the first use; its memory is the decrease of the device's
free memory. On a CPU the resident memory of two gloo ranks is measured instead, to check that the script runs.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from functools import partial

import psutil
import torch
import torch.distributed as dist
from torch import multiprocessing

from megads.ops.config import Implementation, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig, axis_ranks
from megads.parallel.grid import Axis, build_grid
from megads.tools.plan.memory import communicators
from scripts.bench.gpu_lines import Line, add_line_options, appender

MESSAGE_ELEMENTS = 2**24
"""fp32 elements of a collective, enough to use every channel."""


def layout_of(world_size: int) -> ParallelConfig:
    """Layout with pipeline, tensor and data parallelism of 2, in this order; data parallelism takes the rest."""
    pp = 2 if world_size % 2 == 0 else 1
    tp = 2 if world_size % (2 * pp) == 0 and world_size > pp else 1
    return ParallelConfig(tp=tp, pp=pp, dp=world_size // (tp * pp))


def used_bytes(cuda: bool) -> int:
    """Device memory in use, without torch's blocks; resident memory on a CPU."""
    if not cuda:
        return int(psutil.Process().memory_info().rss)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def steps_of(rank: int, world_size: int, device: str) -> list[tuple[str, Callable[[], object]]]:
    """Returns what is created one after the other, by name."""
    cuda, parallel = device == "cuda", layout_of(world_size)
    grid = build_grid(parallel, rank, world_size)
    groups = {"all ranks": None, "tensor parallel": grid.tp, "gradients": grid.data, "pipeline": grid.pp}
    message = torch.ones(MESSAGE_ELEMENTS if cuda else 64, device=device)

    def multiply() -> None:
        for dtype in (torch.bfloat16, torch.float32):
            torch.mm(*(torch.ones(512, 512, device=device, dtype=dtype) for _ in range(2)))

    def collective(axis: Axis | None) -> None:
        group, size = (None, world_size) if axis is None else (axis.group, axis.size)
        dist.all_reduce(message, group=group)
        dist.all_gather_into_tensor(torch.empty(size * message.numel(), device=device), message, group=group)

    def pair() -> None:
        made = {line: dist.new_group(list(line)) for line in axis_ranks("pp", parallel)}
        own, peer = made[grid.pp.ranks], grid.pp.ranks[1 - grid.pp.rank]
        ways = [dist.P2POp(dist.isend, message, peer, own),
                dist.P2POp(dist.irecv, torch.empty_like(message), peer, own)]  # fmt: skip
        for request in dist.batch_isend_irecv(ways):
            request.wait()

    def step(planned: str, size: int, room: int) -> tuple[str, Callable[[], object]]:
        made = pair if planned.startswith("p2p") else partial(collective, groups[planned])
        return f"communicator, {planned}, {size} ranks, planned {room / 2**20:.0f} MiB", made

    return [
        ("kernels", lambda: load(OpsConfig(Implementation.fused), print, cuda=cuda)),
        ("GEMMs", multiply),
        *(step(one.name, one.ranks, one.bytes) for one in communicators(parallel, grid.pp.rank, tied=False)),
    ]


def measure(rank: int, world_size: int, device: str, port: int, found: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    """Runs one rank; rank 0 reports."""
    cuda = device == "cuda"
    lines: list[Line] = []
    if cuda:
        torch.cuda.set_device(rank)
        torch.ones(1, device=device)
        lines.append({"name": "memory, CUDA context", "verdict": f"{used_bytes(cuda) / 2**20:,.0f} MiB"})
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if cuda else "gloo", address, rank=rank, world_size=world_size)
    for name, opened in steps_of(rank, world_size, device):
        before = used_bytes(cuda)
        opened()
        lines.append({"name": f"memory, {name}", "verdict": f"{(used_bytes(cuda) - before) / 2**20:,.0f} MiB"})
    dist.barrier()
    if rank == 0:
        found.put(lines)
    dist.destroy_process_group()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    arguments = parser.parse_args()
    world_size = torch.cuda.device_count() if arguments.device == "cuda" else 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(measure, (world_size, arguments.device, port, found), world_size)
    lines = found.get()
    taken = "; ".join(f"{line['name'].removeprefix('memory, ')} {line['verdict']}" for line in lines)
    appender(arguments, "gpu_memory")({"name": f"beside tensors, {world_size} ranks", "verdict": taken, "lines": lines})
    print(taken)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
