"""Peak TFLOPs of one device, the denominator of MFU."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from megads.ops.config import FUSED, TORCH, Kernels
from megads.ops.linear import linear_into
from megads.ops.resolve import loaded_kernels
from megads.runtime.environment import user_cache_dir
from megads.runtime.files import atomic_writer, read_json

KNOWN_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
)
"""Dense bf16 TFLOPs from the vendors' data sheets (half of those with sparsity), by words of the device name. The first
entry whose words all occur in the name is used."""

_GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
_MEASURE_S = 1.0


def device_peak_tflops(
    device: torch.device,
    dtype: torch.dtype,
    threads: int,
    configured: float | None = None,
    cache_dir: Path | None = None,
) -> float:
    """Peak TFLOPs of one device.

    Returns the configured value if there is one, else the data sheet's for a known GPU in bf16, else the rate of the
    fastest GEMM measured on this device, PyTorch's or that of this process's loaded kernels. The measurement is cached.
    If several ranks share a CPU, call this on one rank while the others wait, so that they do not slow it down.

    Args:
        device: device of the rank.
        dtype: dtype of the GEMMs.
        threads: CPU threads of the rank; ignored on a GPU.
        configured: value of cluster.peak_tflops.
        cache_dir: folder for cached measurements; None: ~/.cache/megads.
    """
    if configured is not None:
        return configured
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = data_sheet_tflops(name)
        if known is not None and dtype is torch.bfloat16:
            return known
    else:
        name = cpu_model()
    kernels = loaded_kernels()
    key = {"device": name, "threads": threads, "dtype": str(dtype), "torch": torch.__version__, "kernels": kernels}
    key |= {"clock": "processor time" if device.type == "cpu" else "time"}
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_dir if cache_dir is not None else user_cache_dir()
    path = folder / f"peak_{digest}.json"
    cached = _read_cache(path, key)
    if cached is not None:
        return cached
    tried = (TORCH, FUSED) if kernels != "torch" else (TORCH,)
    measured = max(_measure_tflops(device, dtype, threads, candidate) for candidate in tried)
    _write_cache(path, {**key, "tflops": measured})
    return measured


def data_sheet_tflops(name: str) -> float | None:
    """Dense bf16 TFLOPs of a GPU according to its data sheet.

    Args:
        name: the driver's name of the GPU, for example "NVIDIA A100-SXM4-80GB".

    Returns:
        None for a GPU that is not in the table, and for a MIG slice, which is only a part of a GPU.
    """
    words = set(name.upper().replace("-", " ").split())
    if "MIG" in words:
        return None
    return next((tflops for known, tflops in KNOWN_BF16_TFLOPS if words.issuperset(known.upper().split())), None)


def cpu_model() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _read_cache(path: Path, key: dict[str, object]) -> float | None:
    """The cached value; None if it is missing, corrupt or belongs to another key."""
    try:
        entry = read_json(path)
        tflops = float(entry.pop("tflops"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tflops if entry == key and tflops > 0 else None


def _write_cache(path: Path, entry: dict[str, object]) -> None:
    """Writes the entry atomically. An unwritable folder is ignored: the next run measures again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_writer(path) as file:
            file.write(json.dumps(entry).encode())


def _measure_tflops(device: torch.device, dtype: torch.dtype, threads: int, kernels: Kernels) -> float:
    """TFLOPs of the fastest of several square GEMMs, measured for about a second.

    On a CPU, CPU time is measured instead of wall time, so that other processes do not lower the cached peak.
    """
    size = _GEMM_SIZE.get(device.type, 1024)
    left = torch.ones(size, size, dtype=dtype, device=device)
    right, product = torch.ones_like(left), torch.empty_like(left)
    best_s = float("inf")
    with _num_threads(threads):
        stop = time.perf_counter() + _MEASURE_S
        while time.perf_counter() < stop:
            start, computed_s = time.perf_counter(), time.process_time()
            linear_into(product, left, right, kernels)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                best_s = min(best_s, time.perf_counter() - start)
            else:
                best_s = min(best_s, (time.process_time() - computed_s) / threads)
    return 2 * size**3 / best_s / 1e12


@contextmanager
def _num_threads(threads: int) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
