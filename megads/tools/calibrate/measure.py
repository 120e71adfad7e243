"""Measures on all ranks at once: products by shape, copies, attention, and collectives between the ranks.

On GPUs each rank has one and NCCL connects them, else gloo does. All figures are medians of rank 0, taken while every
rank does the same.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

from megads.errors import ConfigError
from megads.runtime.environment import share_of_cores
from megads.runtime.files import atomic_writer
from megads.runtime.machine_memory import available_memory
from megads.tools.calibrate.config import CalibrateConfig

_TOKENS = (128, 512, 2048)
_FEATURES = ((256, 256), (256, 1024), (1024, 256), (1024, 1024), (1024, 4096), (4096, 1024))
_COPIED_BYTES = 256 * 2**20
_REDUCED_BYTES = 32 * 2**20
_TIMEOUT_S = 120.0


def calibrate(config: CalibrateConfig) -> dict[str, Any]:
    """The attributes of the device at hand, as `megads.plan.devices.read_device` takes them.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or the ranks did not come to an end.
    """
    gpus = torch.cuda.device_count()
    if 0 < gpus < config.ranks:
        raise ConfigError(f"ranks = {config.ranks}, but this machine has {gpus} GPUs: lower ranks")
    context = multiprocessing.get_context("spawn")
    threads = config.threads or share_of_cores(config.ranks)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.yaml"
        arguments = (config, threads, f"file://{folder}/store", str(result))
        processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(config.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if not result.is_file() or any(process.exitcode for process in processes):
            raise ConfigError(f"a rank ended with exit code {max(p.exitcode or 0 for p in processes)}; see above")
        found: dict[str, Any] = yaml.safe_load(result.read_text(encoding="utf-8"))
    return found


def write(config: CalibrateConfig, found: dict[str, Any]) -> Path:
    """Writes the device file.

    Raises:
        ConfigError: the file cannot be written.
    """
    path = Path(config.out)
    try:
        with atomic_writer(path) as file:
            file.write(yaml.safe_dump(found, sort_keys=False).encode())
    except OSError as error:
        raise ConfigError(f"out = {path} cannot be written ({error.strerror}): choose another file") from error
    return path


def _rank(rank: int, config: CalibrateConfig, threads: int, store: str, result: str) -> None:
    """One rank of the measurement; rank 0 writes what it found."""
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=config.ranks, timeout=timeout)
    found = _measured(config, device, threads)
    if rank == 0:
        Path(result).write_text(yaml.safe_dump(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Median seconds of some work, begun on all ranks together; as often on each, as rank 0 says."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    first = torch.tensor([once()], dtype=torch.float64, device=device)
    dist.broadcast(first, 0)
    repeats = max(5, min(2000, int(budget_s / max(first.item(), 1e-6))))
    dist.barrier()
    return median(once() for _ in range(repeats))


def _measured(config: CalibrateConfig, device: torch.device, threads: int) -> dict[str, Any]:
    """Everything of one rank."""
    dtype = torch.float32 if config.fp32 else torch.bfloat16
    products = []
    for tokens in _TOKENS:
        for outputs, inputs in _FEATURES:
            x_mi = torch.randn(tokens, inputs, device=device).to(dtype)
            w_oi = torch.randn(outputs, inputs, device=device).to(dtype)
            seconds = _seconds(lambda x=x_mi, w=w_oi: F.linear(x, w), device, config.seconds)  # type: ignore[misc]
            products.append([tokens, outputs, inputs, round(2 * tokens * outputs * inputs / seconds / 1e12, 5)])
    peak = max(rate for *_, rate in products)
    memory_bytes = available_memory() // config.ranks
    if device.type == "cuda":
        memory_bytes = torch.cuda.mem_get_info()[0]
    latency_us, bytes_per_s = _collectives(config, device)
    link = round(bytes_per_s / 1e9, 4)
    return {
        "name": f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu'} x {config.ranks}",
        "on_cpu": device.type == "cpu",
        "peak_tflops": peak,
        **({"fp32_tflops": peak} if config.fp32 else {}),
        "memory_gib": round(memory_bytes / 2**30, 2),
        "memory_gigabytes_per_s": round(_copies(config, device) / 1e9, 3),
        "memory_efficiency": 1.0,
        "processors": threads,
        "ranks_per_node": config.ranks,
        "node_gigabytes_per_s": link,
        "nic_gigabytes_per_s": link,
        "link_efficiency": 1.0,
        "nic_efficiency": 1.0,
        "node_latency_us": round(latency_us, 2),
        "nic_latency_us": round(latency_us, 2),
        "host_gigabytes_per_s": round(_copies(config, device) / 2e9, 3),
        "matmul_efficiency": 1.0,
        "attention_efficiency": round(_attention(config, device, dtype) / (peak * 1e12), 4),
        "kernel_us": round(1e6 * _small(config, device), 2),
        "products": products,
    }


def _copies(config: CalibrateConfig, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _seconds(lambda: target.copy_(source), device, config.seconds)


def _small(config: CalibrateConfig, device: torch.device) -> float:
    """Seconds of an operator on next to nothing."""
    one = torch.ones(8, device=device)
    return _seconds(lambda: one.add_(1.0), device, config.seconds)


def _attention(config: CalibrateConfig, device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second of causal attention forward and backward, hidden scores not counted."""
    batch, heads, tokens, dim = 1, 8, 512, 64
    q, k, v = (torch.randn(batch, heads, tokens, dim, device=device).to(dtype).requires_grad_() for _ in range(3))

    def both() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    products = 2 + 5
    return products * batch * heads * tokens**2 * dim / _seconds(both, device, config.seconds)


def _collectives(config: CalibrateConfig, device: torch.device) -> tuple[float, float]:
    """Microseconds of a step of a ring, and bytes a second of its bus."""
    few = torch.zeros(1, device=device)
    many = torch.zeros(_REDUCED_BYTES // 4, device=device)
    steps = 2 * (config.ranks - 1)
    latency = _seconds(lambda: dist.all_reduce(few), device, config.seconds) / steps
    seconds = _seconds(lambda: dist.all_reduce(many), device, config.seconds) - steps * latency
    return 1e6 * latency, steps / config.ranks * _REDUCED_BYTES / seconds
