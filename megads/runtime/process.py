"""Processes: a rank's own settings (its cores, deterministic algorithms, garbage collection) and child processes.

A child keeps to some cores or GPUs and ends when this process dies. Torch is imported only where a rank needs it.
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
    forget_cublas_workspace,
)
from megads.runtime.hooks import StepInfo, TrainState

if TYPE_CHECKING:
    import torch

_PR_SET_PDEATHSIG = 1
_CORES = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")

_GENERATION = 1
"""Older objects are those of the run itself; a scan of them takes a second and finds nothing."""


def start_child(
    command: Sequence[str], log: Path, cores: Collection[int] = (), variables: Mapping[str, str] = {}
) -> subprocess.Popen[bytes]:
    """Starts a command in a session of its own, so that no signal of the terminal reaches it.

    When this process dies, even by SIGKILL, the kernel sends the child SIGTERM.

    Args:
        command: arguments after the Python interpreter.
        log: file that takes what it prints, behind what is there.
        cores: those it may run on; empty for all.
        variables: added to its environment.

    Raises:
        OSError: it cannot be started.
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
            # It only makes system calls, so no lock that a thread holds can hang it.
            preexec_fn=_in_the_child(os.getpid(), cores),  # noqa: PLW1509
        )


def die_with_parent(parent: int, number: int) -> None:
    """Asks the kernel to send this process a signal when its parent dies, even by SIGKILL; ends it if that is gone.

    Args:
        parent: its pid, known before this process was made.
        number: of the signal.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the call above.
    if os.getppid() != parent:
        os._exit(EXIT_BUG)


def _in_the_child(parent: int, cores: Collection[int]) -> Callable[[], None]:
    """What the child does between fork and exec: system calls only, everything else is looked up before."""
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
    """Sends a signal to a child that may have ended."""
    with suppress(ProcessLookupError):
        process.send_signal(number)


def bind_to_share(local_rank: int, local_world_size: int) -> list[int]:
    """Binds all threads of this process, and those to come, to one rank's share of the cores that it may run on.

    Args:
        local_rank: of this process among the ranks of its machine.
        local_world_size: ranks of the machine.

    Returns:
        The cores, as the kernel numbers them; empty where there are fewer cores than ranks, and nothing is bound.
    """
    own = share_of(available_core_numbers(), local_rank, local_world_size)
    if own:
        for task in _TASKS.iterdir():
            # A thread may have ended since it was listed.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), own)
    return own


def share_of(cores: Sequence[int], local_rank: int, local_world_size: int, folder: Path = _CORES) -> list[int]:
    """One of equal shares of the cores; those left over stay idle, as all ranks must have as many threads.

    Neighbours in a share are neighbours in the machine: by socket, die and core. The kernel numbers the second threads
    of all cores after the first ones, so that equal runs of its numbers would put two ranks on every core.

    Args:
        cores: as the kernel numbers them.
        local_rank: whose share.
        local_world_size: how many there are.
        folder: where the kernel describes the cores.
    """
    width = len(cores) // local_world_size
    ordered = sorted(cores, key=lambda core: (*_place(folder / f"cpu{core}" / "topology"), core))
    return sorted(ordered[local_rank * width : (local_rank + 1) * width])


def _place(folder: Path) -> tuple[int, ...]:
    """Socket, die and core of a thread; zeros for what the kernel does not say."""
    found = []
    for name in ("physical_package_id", "die_id", "core_id"):
        try:
            found.append(int((folder / name).read_text()))
        except (OSError, ValueError):
            found.append(0)
    return tuple(found)


def make_deterministic(device: torch.device) -> None:
    """Takes torch's deterministic algorithms from here on, in this process; before its first matrix product on a GPU
    and its first process group.

    A CPU computes the same bits anyway, with as many threads.

    Args:
        device: that this process computes on.

    Raises:
        ConfigError: the user's NCCL_ALGO does not allow it.
    """
    if device.type != "cuda":
        return
    import torch  # here, as whoever starts child processes need not wait for it

    fixed = fix_cublas_workspace()
    fix_nccl_algorithms()
    torch.use_deterministic_algorithms(True)
    # Else every tensor that is made empty would be filled first; nothing here reads what nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if fixed and torch.cuda.is_available():
        # torch looks for the setting at its first product, and remembers that it was there. But up to 2.12 it also
        # parses it at every product, by a regular expression, up to three times: 50 to 140 us on a host that launches
        # a kernel in 6. Without it torch takes the size that it has for this GPU, as fixed as ours.
        square = torch.ones(16, 16, device=device)
        torch.mm(square, square)
        forget_cublas_workspace()


def sum_in_fp32() -> None:
    """Keeps cuBLAS from adding up parts of a bf16 or fp16 product in that dtype.

    It may by torch's default: a product that is split over many blocks then rounds each block's part.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False


class GarbageCollectionHook:
    """Collects garbage after every `interval_steps` steps, and never in between.

    Args:
        interval_steps: steps from one collection to the next; None leaves the collector to Python.
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
