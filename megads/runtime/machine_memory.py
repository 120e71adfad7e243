"""Available memory of this machine, of its cgroup and of its GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from megads.runtime.environment import visible_gpu_setting

PROCESS_BYTES = 320 * 2**20
"""Upper bound of the private memory of a rank in addition to its tensors. Measured on a CPU in a process of its own,
after three steps: 301 MiB with DeepSpeed's engine, 174 MiB with the native one, 144 MiB of each after importing torch.
Ranks forked by the rank server share most of the imports: 217 and 63 MiB of private memory each."""
HEAP_SHARE = 1.25
"""Ratio of resident to allocated bytes on a CPU: ranks keep freed blocks on the heap (`rank_variables`), which is then
fragmented. Measured: 1.19 in bf16, 1.28 in fp32."""

_CGROUPS = Path("/sys/fs/cgroup")
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""CUDA or ROCm needs one of these devices: NVIDIA's driver, WSL's, or AMD's."""
_GPU_QUERY = (
    "import json, torch; print(json.dumps([torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]))"
)
_GPU_QUERY_TIMEOUT_S = 60.0


def may_have_gpus() -> bool:
    """Whether CUDA or ROCm could find a device, without calling a driver."""
    return any(device.exists() for device in _GPU_DEVICES)


def available_memory(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the bytes that new processes on this machine can use without swapping.

    The minimum of the kernel's estimate and what the limits of this process's cgroup and of its ancestors leave. Page
    cache counts as free, as the kernel reclaims it first.

    Args:
        cgroup_root: mount point of the cgroup file systems.
        membership: file with this process's cgroups.
    """
    left = psutil.virtual_memory().available
    for folder in _cgroup_folders(cgroup_root, membership):
        free = _cgroup_free_bytes(folder)
        left = left if free is None else min(left, free)
    return max(0, left)


def oom_kills(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Returns the number of OOM kills in this process's cgroup so far; None if the kernel keeps no count.

    Args:
        cgroup_root: mount point of the cgroup file systems.
        membership: file with this process's cgroups.
    """
    return memory_events(cgroup_root, membership).get("oom_kill")


def memory_events(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> dict[str, int]:
    """Returns the memory events of this process's cgroup, such as reclaims, hits of the limit and OOM kills.

    Args:
        cgroup_root: mount point of the cgroup file systems.
        membership: file with this process's cgroups.
    """
    for folder in _cgroup_folders(cgroup_root, membership):
        for name in ("memory.events", "memory.oom_control"):
            try:
                fields = dict(line.split() for line in (folder / name).read_text().splitlines())
                counts = {key: int(value) for key, value in fields.items()}
            except (OSError, ValueError):
                continue
            if "oom_kill" in counts:
                return counts
    return {}


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """Returns the cgroups of this process up to the root, of cgroup v2 and of v1's memory controller."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "memory" if "memory" in controllers.split(",") else None
        if base is None:
            continue
        own = base / path.lstrip("/")
        folders += [own, *(parent for parent in own.parents if parent.is_relative_to(base))]
    return folders


def _cgroup_free_bytes(folder: Path) -> int | None:
    """Returns the bytes left below a cgroup's limit; None without a limit."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            usage = int((folder / usage_file).read_text())
            cache = _inactive_file(folder)
        except (OSError, ValueError):
            continue
        # cgroup v1 represents "no limit" as the largest number of whole pages.
        if limit == "max" or int(limit) >= 2**62:
            return None
        return int(limit) - usage + cache
    return None


def _inactive_file(folder: Path) -> int:
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def free_gpu_memory() -> list[int]:
    """Returns the free bytes of every visible GPU; empty without GPUs.

    Queried in a child process: the query creates a CUDA context, which takes half a GB of each GPU until the process
    ends.
    """
    # Avoids importing torch, which takes seconds, on machines without GPUs.
    if not may_have_gpus():
        return []
    answer = subprocess.run(
        [sys.executable, "-c", _GPU_QUERY], capture_output=True, text=True, timeout=_GPU_QUERY_TIMEOUT_S, check=False
    )
    if answer.returncode:
        return []
    free: list[int] = json.loads(answer.stdout.splitlines()[-1])
    return free


def visible_gpus() -> list[str]:
    """Returns the visible GPUs in the format of CUDA_VISIBLE_DEVICES; empty without GPUs."""
    count = len(free_gpu_memory())
    return (visible_gpu_setting() or [str(index) for index in range(count)])[:count]


def gib(size: int) -> str:
    """Formats bytes as GiB, or as MiB below one GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
