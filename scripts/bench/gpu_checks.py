#!/usr/bin/env python3
"""Checks of scripts/bench/gpu.sh that train nothing.

    python -m scripts.bench.gpu_checks device|build|memory|tests [--device cuda] [--append bench.jsonl]

device: its name, copy and GEMM throughput, and the versions of the software.

build: compiles megads' CPU and GPU kernels concurrently, and reports how long each took; exit code 1 and the reason if
one cannot be built, or cannot be loaded into this torch. An existing library takes no time.

memory: GPU memory of a rank in addition to its tensors: CUDA context, kernels, cuBLAS, and every NCCL communicator of a
run with one rank per GPU (tensor, pipeline and data parallelism of 2 each as far as they go), as `megads plan`
lists them; tests/engine/test_communicators.py shows that a run opens no others. Each is used once, because NCCL
allocates at the first use; its memory is the decrease of the device's free memory. On a CPU: resident memory of two
gloo ranks.

tests: the tests that need a GPU. Each test function runs in a separate pytest, concurrently with the others, because
most of their time goes into starting processes and compiling FlexAttention. When --limit-s is over, those that have
finished are counted, and the exit code is 1. On a CPU they report that they are skipped.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import multiprocessing

import megads
from megads.model.peak import device_peak_tflops
from megads.ops import build as kernels
from megads.ops.apex import find_apex
from megads.ops.build import KernelsUnavailable
from megads.ops.config import Implementation, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig, axis_ranks
from megads.parallel.grid import Axis, build_grid
from megads.runtime.environment import available_cores
from megads.tools.plan.memory import communicators
from scripts.bench.device_clock import copy_bandwidth, matrix_flops_per_s
from scripts.bench.gpu_table import Line, add_line_options, appender

PEERS = ("transformers", "flash-attn", "triton")
"""Packages that are benchmarked as peers if installed, and what torch.compile needs."""


def installed(package: str) -> str:
    """Version of a package, or that it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """Version of NVIDIA's driver; empty without its tool."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def device_line(device: str) -> Line:
    """Returns names, sizes, versions and measured throughputs."""
    cuda = device == "cuda"
    line: Line = {"device": "CPU", "devices": 1, "memory_bytes": 0, "driver": ""}
    if cuda:
        properties = torch.cuda.get_device_properties(0)
        line = {
            "device": properties.name, "devices": torch.cuda.device_count(), "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count, "driver": driver(),
        }  # fmt: skip
    return line | {
        "copy_bytes_per_s": copy_bandwidth(device, 20 if cuda else 3, 2**30 if cuda else 2**22),
        "matrix_tflops": matrix_flops_per_s(device, 20 if cuda else 3, 8192 if cuda else 256) / 1e12,
        "peak_tflops": device_peak_tflops(torch.device(device), torch.bfloat16, available_cores()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "megads": megads.__version__,
        "deepspeed": installed("deepspeed"),
        "peers": {package: installed(package) for package in PEERS} | {"NVIDIA apex": find_apex().state.value},
    }


def check_device(arguments: argparse.Namespace) -> int:
    """Prints the device."""
    line = device_line(arguments.device)
    appender(arguments, "gpu_device")(line)
    print(f"{line['devices']} x {line['device']}, torch {line['torch']}")
    return 0


def check_build(arguments: argparse.Namespace) -> int:
    """Builds and loads the kernels."""
    cuda = arguments.device == "cuda"

    def seconds_of(make: Callable[[Callable[[str], None]], Path]) -> float:
        begin = time.monotonic()
        print(make(lambda text: print(text, flush=True)), flush=True)
        return time.monotonic() - begin

    makes = {"CPU": kernels.build} | ({"CUDA": kernels.build_cuda} if cuda else {})
    try:
        with ThreadPoolExecutor() as threads:
            made = {name: threads.submit(seconds_of, make) for name, make in makes.items()}
        took = ", ".join(f"{name} {future.result():.0f} s" for name, future in made.items())
    except KernelsUnavailable as error:
        print(f"no kernels: {error}")
        return 1
    begin = time.monotonic()
    load(OpsConfig(Implementation.fused), print, cuda=cuda)
    verdict = f"{took}; loaded into torch in {time.monotonic() - begin:.0f} s"
    appender(arguments, "gpu_build")({"name": "kernels compiled", "verdict": verdict})
    print(verdict)
    return 0


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


def check_memory(arguments: argparse.Namespace) -> int:
    """Measures one rank per GPU."""
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


TESTS = Path(__file__).parents[2] / "tests"
NOTHING_SELECTED = 5
"""Pytest's exit code for no tests."""
STACKS_S = 5.0
"""Time for killed tests to print their stacks."""
_OUTCOME = re.compile(r"(tests/\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def parts(device: str) -> list[str]:
    """Returns the test functions for GPUs by file, because collecting all other tests takes longer than running these.

    On a CPU whole files: skipped tests do not need to run concurrently.
    """
    files = {path.relative_to(TESTS.parent): path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    found = {path: text for path, text in files.items() if "mark.gpu" in text}
    if device == "cpu":
        return list(map(str, found))
    return [f"{path}::{name}" for path, text in found.items() for name in re.findall(r"^def (test_\w+)", text, re.M)]


def run_part(part: str, end_s: float) -> tuple[int | None, dict[str, str]]:
    """Runs pytest on one part and shows its output; returns the exit code, None if the time was over, and outcomes."""
    options = ["-v", "-m", "gpu", "--durations=5", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, part], cwd=TESTS.parent, stdout=log,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(max(end_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
            process.kill()
            process.wait()
        log.seek(0)
        text = log.read()
    sys.stdout.write(f"=== {part}\n{text}\n")  # a single write, as others write too
    return code, dict(_OUTCOME.findall(text))


def verdict(outcomes: dict[str, str], unfinished: list[str]) -> str:
    """Returns the summary of all tests.

    Args:
        outcomes: outcomes of finished tests, by name.
        unfinished: parts with unfinished tests.
    """
    counts = Counter(outcomes.values())
    said = ", ".join(f"{count} {outcome.lower()}" for outcome, count in sorted(counts.items())) or "no test ended"
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    said += f"; failed: {', '.join(failed)}" if failed else ""
    return said + (f"; not finished: {', '.join(unfinished)}" if unfinished else "")


def check_tests(arguments: argparse.Namespace) -> int:
    """Runs the tests."""
    chosen, end_s = parts(arguments.device), time.monotonic() + arguments.limit_s
    with ThreadPoolExecutor(len(chosen)) as threads:
        ended = list(threads.map(partial(run_part, end_s=end_s), chosen))
    unfinished = [part.rpartition("::")[2] for part, (code, _) in zip(chosen, ended, strict=True) if code is None]
    text = verdict({name: outcome for _, outcomes in ended for name, outcome in outcomes.items()}, unfinished)
    print(text)
    codes = [code for code, _ in ended]
    appender(arguments, "gpu_tests")({"name": "GPU tests", "verdict": text, "exit_codes": codes})
    return int(any(code not in (0, NOTHING_SELECTED) for code in codes))


CHECKS = {"device": check_device, "build": check_build, "memory": check_memory, "tests": check_tests}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--limit-s", type=float, default=170.0, help="stop tests that are unfinished after this time")
    add_line_options(parser)
    arguments = parser.parse_args()
    return CHECKS[arguments.check](arguments)


if __name__ == "__main__":
    sys.exit(main())
