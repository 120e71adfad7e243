"""How much memory this machine can still give: what its processes, its cgroup and its GPUs leave free."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from megads.runtime.environment import chosen_gpus

PROCESS_BYTES = 320 * 2**20
"""Private memory of a rank beside its tensors: 168 MiB with torch and DeepSpeed imported, 143 more once an engine is
built; measured on a CPU."""
HEAP_SHARE = 1.25
"""Resident over allocated bytes on a CPU: ranks keep freed blocks on the heap (`rank_variables`), which leaves holes.
1.19 and 1.28 measured, in bf16 and fp32."""

_CGROUPS = Path("/sys/fs/cgroup")
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""One of these is there where CUDA or ROCm can work: NVIDIA's driver, Windows' for Linux guests, AMD's."""
_GPU_QUERY = (
    "import json, torch; print(json.dumps([torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]))"
)
_GPU_QUERY_TIMEOUT_S = 60.0


def may_have_gpus() -> bool:
    """Whether CUDA or ROCm could find a device; asks no driver."""
    return any(device.exists() for device in _GPU_DEVICES)


def available_memory(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that new processes on this machine may take without swapping.

    The kernel's estimate, or what the limits of this process's cgroup and of those around it leave, if that is less;
    page cache counts as free, as the kernel gives it up first.

    Args:
        cgroup_root: where the cgroup file systems are mounted.
        membership: the kernel's list of this process's cgroups.
    """
    left = psutil.virtual_memory().available
    for folder in _cgroup_folders(cgroup_root, membership):
        room = _cgroup_room(folder)
        left = left if room is None else min(left, room)
    return max(0, left)


def oom_kills(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Processes that the kernel has killed so far for want of memory in this process's cgroup; None where it keeps no
    count.

    Args:
        cgroup_root: where the cgroup file systems are mounted.
        membership: the kernel's list of this process's cgroups.
    """
    return memory_events(cgroup_root, membership).get("oom_kill")


def memory_events(cgroup_root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> dict[str, int]:
    """What the kernel counted in this process's cgroup: how often memory was reclaimed, was at its limit, ran out.

    Args:
        cgroup_root: where the cgroup file systems are mounted.
        membership: the kernel's list of this process's cgroups.
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
    """The cgroups this process is in, from its own to the root, of version 2 and of version 1's memory controller."""
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


def _cgroup_room(folder: Path) -> int | None:
    """Bytes below a cgroup's limit; None where it has none."""
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
        # Version 1 writes "no limit" as the largest number of whole pages.
        if limit == "max" or int(limit) >= 2**62:
            return None
        return int(limit) - usage + cache
    return None


def _inactive_file(folder: Path) -> int:
    fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))


def free_gpu_memory() -> list[int]:
    """Free bytes of every visible GPU; empty where there is none.

    Asked in a process of its own: asking opens a CUDA context, which takes half a GB of each GPU until it ends.
    """
    # Most machines can be told apart without the seconds that importing torch takes.
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
    """Names of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES takes them; empty where there is none."""
    count = len(free_gpu_memory())
    return (chosen_gpus() or [str(index) for index in range(count)])[:count]
