"""Process settings of a rank (core binding, deterministic algorithms, garbage collection), and child processes.

A child can be bound to cores or GPUs, and ends when this process dies. Only functions of ranks import torch.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megads.errors import EXIT_BUG
from megads.runtime.environment import (
    available_core_numbers,
    fix_cublas_workspace,
    fix_nccl_algorithms,
    remove_cublas_workspace_setting,
)
from megads.runtime.hooks import StepInfo, TrainState

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG = 1
_CORES = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")

_GENERATION = 1
"""Generation to collect. Older objects belong to the run itself; scanning them takes a second and frees nothing."""


def start_child(
    command: Sequence[str], log: Path, cores: Collection[int] = (), variables: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """Starts a command in a new session, so that signals of the terminal do not reach it.

    When this process dies, even by SIGKILL, the kernel sends the child SIGTERM.

    Args:
        command: arguments after the Python interpreter.
        log: file to which its output is appended.
        cores: cores it may run on; empty for all.
        variables: environment variables to add.

    Raises:
        OSError: the command cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(variables),
            start_new_session=True,
            # It only makes system calls, so it cannot deadlock on a lock that another thread holds.
            preexec_fn=_in_the_child(os.getpid(), cores),  # noqa: PLW1509
        )


def die_with_parent(parent: int, number: int) -> None:
    """Asks the kernel to signal this process when its parent dies, even by SIGKILL; exits if it is already dead.

    Args:
        parent: pid of the parent, determined before the fork.
        number: number of the signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the call above.
    if os.getppid() != parent:
        os._exit(EXIT_BUG)


def _in_the_child(parent: int, cores: Collection[int]) -> Callable[[], None]:
    """Returns the function that a child runs between fork and exec; it only makes system calls."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            # The parent may have died before the call above.
            if os.getppid() != parent:
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

    return prepare


def signal_child(process: subprocess.Popen[bytes], number: int) -> None:
    """Sends a signal to a child; does nothing if it has ended."""
    with suppress(ProcessLookupError):
        process.send_signal(number)


def bind_to_own_cores(local_rank: int, local_world_size: int) -> list[int]:
    """Binds all present and future threads of this process to its rank's share of the available cores.

    Args:
        local_rank: rank of this process on its machine.
        local_world_size: number of ranks on the machine.

    Returns:
        The core numbers; empty, with nothing bound, if there are fewer cores than ranks.
    """
    own = cores_of_rank(available_core_numbers(), local_rank, local_world_size)
    if own:
        for task in _TASKS.iterdir():
            # A thread may have ended since it was listed.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), own)
    return own


def cores_of_rank(cores: Sequence[int], local_rank: int, local_world_size: int, folder: Path = _CORES) -> list[int]:
    """Returns a rank's share of the cores.

    Shares are equal, and the remainder stays idle, as all ranks need the same number of threads. Cores of a share are
    adjacent by socket, die and core. The kernel numbers the second hardware threads of all cores after the first ones,
    so consecutive numbers would put two ranks on every physical core.

    Args:
        cores: core numbers of the kernel.
        local_rank: rank on the machine.
        local_world_size: number of ranks on the machine.
        folder: sysfs folder of the cores.
    """
    width = len(cores) // local_world_size
    ordered = sorted(cores, key=lambda core: (*_place(folder / f"cpu{core}" / "topology"), core))
    return sorted(ordered[local_rank * width : (local_rank + 1) * width])


def _place(folder: Path) -> tuple[int, ...]:
    """Returns socket, die and core of a hardware thread; zero for values that the kernel does not provide."""
    found = []
    for name in ("physical_package_id", "die_id", "core_id"):
        try:
            found.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            found.append(0)
    return tuple(found)


def make_deterministic(device: torch.device) -> None:
    """Enables PyTorch's deterministic algorithms in this process.

    To be called before the first GEMM on a GPU and the first process group. Results on a CPU are deterministic anyway,
    with the same number of threads.

    Args:
        device: device that this process computes on.

    Raises:
        ConfigError: the user's NCCL_ALGO allows non-deterministic algorithms.
    """
    if device.type != "cuda":
        return
    import torch  # imported late: code that only starts child processes does not need it

    fixed = fix_cublas_workspace()
    fix_nccl_algorithms()
    torch.use_deterministic_algorithms(True)
    # Otherwise torch.empty would fill tensors; nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if fixed and torch.cuda.is_available():
        # PyTorch checks for the setting at the first GEMM and caches that it was set. But up to 2.12 it also parses it
        # at every GEMM, up to three times, with a regular expression: 50 to 140 us on a host that launches a kernel in
        # 6 us. Without the setting PyTorch uses its default size for this GPU, which is fixed as well.
        square = torch.ones(16, 16, device=device)
        torch.mm(square, square)
        remove_cublas_workspace_setting()


def disable_reduced_precision_sums() -> None:
    """Disables reduced-precision reductions in cuBLAS GEMMs of bf16 and fp16.

    PyTorch allows them by default: split-K GEMMs then round each partial result to the low precision.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


class GarbageCollectionHook:
    """Runs Python's garbage collector every `interval_steps` steps, and never in between.

    Args:
        interval_steps: steps between collections; None keeps automatic collection.
    """

    def __init__(self, interval_steps: int | None) -> None:
        self._interval_steps = interval_steps

    def on_start(self, state: TrainState) -> None:
        if self._interval_steps is not None:
            gc.collect()
            gc.freeze()
            gc.disable()

    def on_step(self, info: StepInfo) -> None:
        if self._interval_steps is not None and info.step % self._interval_steps == 0:
            gc.collect(_GENERATION)

    def on_end(self, state: TrainState) -> None:
        if self._interval_steps is not None:
            gc.enable()
            gc.unfreeze()
