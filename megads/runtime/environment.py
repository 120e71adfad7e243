"""The process environment: the only module that reads or writes environment variables."""

from __future__ import annotations

import netrc
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from megads.errors import ConfigError

_LAUNCHER_PID_VARIABLE = "MEGADS_LAUNCHER_PID"
_LEASE_VARIABLE = "MEGADS_LEASE"
_HEARTBEATS_VARIABLE = "MEGADS_HEARTBEATS"
_SECRET_VARIABLE = "MEGADS_SECRET_FILE"

_OTHER_FILES = 256
REHEARSAL_VARIABLE = "MEGADS_REHEARSAL"
"""Names the folder of the rehearsal that a batch script takes part in; see `resilience.rehearsal.notes`."""

HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""What makes a process compute on the CPU where there are GPUs."""


@dataclass(frozen=True)
class RankEnvironment:
    """Who a rank is, in the variables of torchrun; a process started by hand is rank 0 of 1.

    Attributes:
        rank: number over all machines.
        local_rank: number on this machine; the GPU it takes.
        world_size: ranks over all machines.
        local_world_size: ranks on this machine.
        lease: number of the start of the run that it belongs to, see megads.runtime.lease; None where nobody said.
        heartbeats: folder of this node's heartbeats, see megads.runtime.heartbeat; None where nobody watches.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    lease: int | None = None
    heartbeats: Path | None = None


def rank_environment() -> RankEnvironment:
    """Returns who this process is."""
    heartbeats = os.environ.get(_HEARTBEATS_VARIABLE)
    return RankEnvironment(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        lease=int(os.environ[_LEASE_VARIABLE]) if os.environ.get(_LEASE_VARIABLE) else None,
        heartbeats=Path(heartbeats) if heartbeats else None,
    )


def launcher_pid() -> int | None:
    """Returns the pid of the launcher that started this rank, or None for a process started by hand."""
    value = os.environ.get(_LAUNCHER_PID_VARIABLE)
    return int(value) if value else None


def become_child(variables: Mapping[str, str], parent: int) -> None:
    """Sets variables for good, and the process that forked this one (its pid) as its launcher."""
    os.environ.update(variables)
    os.environ[_LAUNCHER_PID_VARIABLE] = str(parent)


def secret_file() -> Path | None:
    """Returns where the secret of this rank's start is (megads.runtime.run_secret); None for one started by hand."""
    value = os.environ.get(_SECRET_VARIABLE)
    return Path(value) if value else None


def store_address() -> tuple[str, int]:
    """Returns host and port of the store at which the ranks meet."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def available_cores() -> int:
    """Returns the number of cores this process may run on."""
    return len(available_core_numbers())


def available_core_numbers() -> list[int]:
    """Returns the cores this process may run on, as the kernel numbers them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def chosen_gpus() -> list[str] | None:
    """Returns the GPUs that the user lets this process see, None for all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def share_of_cores(num_ranks: int) -> int:
    """Returns the threads of each of `num_ranks` ranks on this machine, equal on all and at least one."""
    return max(1, available_cores() // num_ranks)


def user_cache_dir() -> Path:
    """Returns the user's cache folder for megads; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megads"


def cpp_compiler() -> str | None:
    """Returns the C++ compiler that the user names in CXX, or None."""
    return os.environ.get("CXX") or None


def cuda_home() -> str | None:
    """Returns the folder of the CUDA toolkit that the user names in CUDA_HOME, or None."""
    return os.environ.get("CUDA_HOME") or None


def hide_progress_bars() -> None:
    """Makes tqdm's bars, which other libraries draw, invisible; before tqdm is imported."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def show_full_hydra_errors() -> None:
    """Makes Hydra raise its errors instead of printing them and exiting 1."""
    os.environ["HYDRA_FULL_ERROR"] = "1"


def no_color() -> bool:
    """Tells whether the user wants no colors (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def terminal_is_dumb() -> bool:
    """Tells whether the terminal knows no control codes."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")


def can_redraw(out: TextIO) -> bool:
    """Tells whether a line on a stream can be drawn again: on a terminal that knows control codes.

    A CI job may have a terminal too, but its log keeps every frame.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return out.isatty() and not terminal_is_dumb() and not in_ci


def tokenize_on_one_thread() -> None:
    """Keeps `tokenizers` from using all cores in this process: others tokenize beside it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def wandb_mode() -> str | None:
    """Returns the user's WANDB_MODE, or None."""
    return os.environ.get("WANDB_MODE") or None


def prepare_wandb() -> None:
    """Keeps wandb from reporting its own errors to its makers, unless the user asked for it: it can hang in that."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


BLACKWELL = (10, 0)
"""Its compute capability."""


FIXED_AT_START = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"),
    *("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"),
)
"""Variables that the C library, OpenMP or an import reads once in the life of a process."""


def rank_variables(
    threads: int,
    cuda: bool,
    lease: int | None = None,
    capability: tuple[int, int] | None = None,
    heartbeats: Path | None = None,
) -> dict[str, str]:
    """Returns what every rank's environment must hold.

    Args:
        threads: CPU threads of each rank.
        cuda: ranks compute on GPUs.
        lease: number of this start of the run.
        capability: the lowest compute capability of the GPUs; None where it is not known.
        heartbeats: folder for the ranks' heartbeats; None where nobody watches.
    """
    # torch takes its thread count from here when it is imported. It must be equal on all ranks: LayerNorm's gradient
    # depends on it bit for bit.
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    variables[_LAUNCHER_PID_VARIABLE] = str(os.getpid())
    variables[_LEASE_VARIABLE] = "" if lease is None else str(lease)
    variables[_HEARTBEATS_VARIABLE] = str(heartbeats or "")
    # Ranks on a CPU free and take back the same large activations every micro-batch. By default glibc maps each of
    # them afresh, and the kernel zeroes the pages again: keep them on the heap, and do not give the heap back. Huge
    # pages (glibc >= 2.35) spare most of what is looked up of their addresses.
    # The flight recorder's memory of collectives, 0.5 MB: torch keeps one for NCCL, but none for gloo unless told.
    defaults = {"TOKENIZERS_PARALLELISM": "false", "TORCH_FR_BUFFER_SIZE": "500"}
    if cuda and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same
        # Segments that grow: activations of many shapes leave no holes in a GPU's memory that nobody can use.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not cuda:
        defaults |= {
            "DS_ACCELERATOR": "cpu",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": "100000000000",
            "MALLOC_TOP_PAD_": str(64 * 2**20),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
    # Before Blackwell a collective that is launched just before the product beside it may be scheduled after it, and
    # finds no free multiprocessor until it ends. With one hardware queue for all streams kernels start in the order of
    # their launches; Megatron-LM demands it for tensor parallelism. CUDA reads it when a process opens the device.
    if cuda and capability is not None and capability < BLACKWELL:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables | {name: os.environ.get(name, value) for name, value in defaults.items()}


def meeting_variables(secret: Path, host: str, port: int, one_machine: bool) -> dict[str, str]:
    """Returns what the environment of ranks must hold for them to find each other.

    Args:
        secret: file of the start's secret.
        host: of the store at which they meet.
        port: of that store.
        one_machine: all ranks are on it.
    """
    variables = {_SECRET_VARIABLE: str(secret.absolute()), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    # For init_process_group() without arguments: the launcher serves the store, rank 0 must not.
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return variables | (loopback_variables() if one_machine else {})


def rank_numbers(rank: int, local_rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """Returns the variables in which torchrun, and so everybody's code, says who a rank is."""
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(number) for name, number in numbers.items()}


def loopback_variables() -> dict[str, str]:
    """Returns what makes gloo and NCCL listen on the loopback; a user's own choice of an interface stays."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is None:
        return {}
    defaults = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def wait_passively() -> None:
    """Makes CPU threads sleep while they wait for each other; to be called before torch is imported.

    A generated token is many short parallel loops. Threads that spin at the end of each cost little on an idle machine,
    but where a training shares the cores, spinning waits for a thread that cannot run: measured, 110 ms a token
    instead of 17.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def fix_cublas_workspace() -> bool:
    """Gives cuBLAS memory of a fixed size, without which it may sum a product in another order in another run.

    To be called before its first product. Eight buffers of 4 MiB are as much as torch gives it on an H100; a user's own
    setting stays.

    Returns:
        Whether the size is ours.
    """
    ours = _CUBLAS_WORKSPACE not in os.environ
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    return ours


def forget_cublas_workspace() -> None:
    """Takes the size of the workspace out of the environment; see `megads.runtime.process.make_deterministic`."""
    os.environ.pop(_CUBLAS_WORKSPACE, None)


NCCL_ALGORITHMS = "^NVLS,NVLSTree"
"""All of NCCL's but those that sum in the NVLink switch, which may do so in another order in another run."""


def fix_nccl_algorithms() -> None:
    """Keeps NCCL from algorithms whose sums may differ from run to run; to be called before its first communicator.

    A user's own setting stays, as in Megatron-LM, if it leaves them out.

    Raises:
        ConfigError: it does not.
    """
    asked = os.environ.setdefault("NCCL_ALGO", NCCL_ALGORITHMS)
    listed = {name.strip().lower() for name in re.split(r"[,;:^=@]", asked)}
    left_out = "nvls" in listed if asked.startswith("^") else not any(name.startswith("nvls") for name in listed)
    if not left_out:
        raise ConfigError(
            f"NCCL_ALGO = {asked} with train.deterministic = true: NVLS sums in the switch, in another order from run "
            f"to run; use NCCL_ALGO={NCCL_ALGORITHMS}, Ring or Tree, leave it unset, or set train.deterministic=false"
        )


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for the children started inside the block, then restores what was there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def thread_settings() -> dict[str, str]:
    """Returns the thread counts that the user's environment asks for."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def slurm_job() -> str | None:
    """Returns the id of the SLURM job that this process is part of."""
    return os.environ.get("SLURM_JOB_ID")


def rehearsal_folder() -> Path | None:
    """Returns the folder of the rehearsal that this process takes part in."""
    value = os.environ.get(REHEARSAL_VARIABLE)
    return Path(value) if value else None


def without_commands(names: Sequence[str]) -> dict[str, str]:
    """Returns variables that make commands do nothing in the bash scripts that inherit them.

    Args:
        names: of the commands.
    """
    return {f"BASH_FUNC_{name}%%": "() {  :\n}" for name in names}


def slurm_variables() -> dict[str, str]:
    """Returns what SLURM tells a job of itself, by the names of its variables."""
    return {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SLURMD_"))}


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files, often 1,024, where it is too low for so many connections.

    Args:
        count: of connections; some files are open beside them.

    Raises:
        ConfigError: the system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"the launcher needs {needed} open files, one for each connection of an agent or a rank, but may have "
            f"{hard} (ulimit -Hn): raise LimitNOFILE of slurmd, or start fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def node_name() -> str:
    """Returns the name of this node: SLURM's, which need not be the machine's, else the machine's."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def outside_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without what a SLURM job or its user's defaults put there.

    Args:
        variables: added to it.
    """
    theirs = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)} | dict(variables)


def wandb_login() -> str | None:
    """Returns where wandb would find a key, or None when nobody is logged in; the key itself stays where it is."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        known = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    return str(path) if url.hostname in known else None
