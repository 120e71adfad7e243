"""The process environment: the only module that reads or writes environment variables."""

from __future__ import annotations

import getpass
import netrc
import os
import re
import resource
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from megads.errors import ConfigError
from megads.runtime.cgroups import cpu_quota
from megads.runtime.own_folder import make_own, own_path

_LAUNCHER_PID_VARIABLE = "MEGADS_LAUNCHER_PID"
_LEASE_VARIABLE = "MEGADS_LEASE"
_HEARTBEATS_VARIABLE = "MEGADS_HEARTBEATS"
_SECRET_VARIABLE = "MEGADS_SECRET_FILE"
_LOCAL_RANK_VARIABLE = "MEGADS_LOCAL_RANK"
"""Rank on this machine where LOCAL_RANK, which DeepSpeed and PyTorch take for the GPU's index, is another number."""
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_OTHER_FILES = 256
REHEARSAL_VARIABLE = "MEGADS_REHEARSAL"
"""Folder of the rehearsal that a batch script is part of; see `megads.tools.rehearse.notes`."""

HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""Variables that make a process compute on the CPU of a machine with GPUs."""


@dataclass(frozen=True)
class RankEnvironment:
    """Identity of a rank, from torchrun's environment variables; a process started by hand is rank 0 of 1.

    Attributes:
        rank: global rank.
        local_rank: rank on this machine.
        world_size: number of ranks.
        local_world_size: number of ranks on this machine.
        lease: number of the start that the rank belongs to, see `megads.runtime.lease`; None if started by hand.
        heartbeats: folder of this node's heartbeats, see `megads.runtime.heartbeat`; None if they are not monitored.
        gpu: index of its GPU, which it may share with other ranks (cluster.ranks_per_gpu).
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    lease: int | None = None
    heartbeats: Path | None = None
    gpu: int = 0


def rank_environment() -> RankEnvironment:
    """Returns the identity of this process."""
    heartbeats = os.environ.get(_HEARTBEATS_VARIABLE)
    gpu = os.environ.get("LOCAL_RANK", "0")
    return RankEnvironment(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get(_LOCAL_RANK_VARIABLE) or gpu),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        lease=int(os.environ[_LEASE_VARIABLE]) if os.environ.get(_LEASE_VARIABLE) else None,
        heartbeats=Path(heartbeats) if heartbeats else None,
        gpu=int(gpu),
    )


def launcher_pid() -> int | None:
    """Returns the pid of the launcher that started this rank, or None for a process started by hand."""
    value = os.environ.get(_LAUNCHER_PID_VARIABLE)
    return int(value) if value else None


def adopt_environment(variables: Mapping[str, str], parent: int) -> None:
    """Sets environment variables in a forked process, and its parent's pid as that of its launcher."""
    os.environ.update(variables)
    os.environ[_LAUNCHER_PID_VARIABLE] = str(parent)


def secret_file() -> Path | None:
    """Returns the file with the secret of this rank's start (`megads.runtime.ports`); None if started by hand."""
    value = os.environ.get(_SECRET_VARIABLE)
    return Path(value) if value else None


def store_address() -> tuple[str, int]:
    """Returns host and port of the rendezvous store of the ranks."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def available_cores(root: Path = Path("/")) -> int:
    """Returns the number of cores that this process can keep busy: those it may run on, or fewer with a CPU quota or in
    a SLURM job.

    A container with a quota (`docker run --cpus=2`) sees all cores of the machine. With a thread on each of them the
    quota is used up early in every period, and all threads wait for the rest of it.

    Args:
        root: folder that contains proc and sys.
    """
    limits = [len(available_core_numbers()), cpu_quota(root), cpus_of_job()]
    return max(1, min(int(limit) for limit in limits if limit is not None))


def cpus_of_job() -> int | None:
    """Returns the CPUs of this process's SLURM job on this node, to which not every site binds it; None outside."""
    number = os.environ.get("SLURM_CPUS_ON_NODE", "")
    return int(number) if number.isdecimal() and "SLURM_JOB_ID" in os.environ else None


def available_core_numbers() -> list[int]:
    """Returns the numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def visible_gpu_setting() -> list[str] | None:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES; None if it is not set."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [name.strip() for name in names.split(",") if name.strip()]


def threads_of_rank(num_ranks: int, configured: int | None = None, useful: int | None = None) -> int:
    """Returns the number of CPU threads of each rank: as configured, else OMP_NUM_THREADS, else a share of the cores.

    Args:
        num_ranks: number of ranks on this machine.
        configured: cluster.threads_per_rank.
        useful: number of threads that make the rank faster; None: any number.

    Raises:
        ConfigError: OMP_NUM_THREADS is not a number of threads.
    """
    asked = configured or requested_threads()
    if asked is not None:
        return asked
    share = max(1, available_cores() // num_ranks)
    return share if useful is None else min(share, max(1, useful))


def requested_threads() -> int | None:
    """Returns the user's OMP_NUM_THREADS, of which the first of several levels counts; None if it is not set.

    Raises:
        ConfigError: it is not a number of threads.
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    if not text:
        return None
    first = text.partition(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise ConfigError(f"OMP_NUM_THREADS = {text}: must be at least 1 thread; correct or unset it")
    return int(first)


def home_dir() -> Path | None:
    """Returns the user's home directory; None for a user id without a name (`docker run --user`) and without HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def user_name() -> str:
    """Returns the user's login name, or the user id if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Python before and since 3.13
        return str(os.getuid())


def user_cache_dir() -> Path:
    """Returns megads' folder in the user's cache folder; it may not exist yet.

    If the home directory cannot be written, or there is none, it is a folder of this user in the temporary folder:
    without a cache, kernels could not be compiled.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "megads"
    home = home_dir()
    if home is not None and _can_create(home / ".cache" / "megads"):
        return home / ".cache" / "megads"
    with suppress(OSError):
        # Libraries are loaded from it: nobody else may have put them there.
        return make_own(own_path("cache"))
    return home / ".cache" / "megads" if home is not None else Path(tempfile.mkdtemp(prefix="megads-cache-"))


def set_default(name: str, value: str) -> str:
    """Sets a variable of this process unless it is set, and returns its value."""
    return os.environ.setdefault(name, value)


def _can_create(folder: Path) -> bool:
    """Whether a folder can be written to, or created."""
    nearest = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def cpp_compiler() -> str | None:
    """Returns the C++ compiler given in CXX, or None."""
    return os.environ.get("CXX") or None


def cpu_isa_limit() -> str | None:
    """Returns the instruction set to which MEGADS_CPU_ISA limits megads' CPU kernels and its choice of GEMMs, or None.

    Raises:
        ConfigError: it is not a known one.
    """
    limit = os.environ.get("MEGADS_CPU_ISA", "").lower()
    if limit not in ("", "native", "avx2"):
        raise ConfigError(
            f"MEGADS_CPU_ISA = {limit}: use avx2, to compute as an x86 CPU without AVX-512 does, or leave it unset"
        )
    return limit if limit == "avx2" else None


def onednn_below_avx512() -> bool:
    """Whether ONEDNN_MAX_CPU_ISA excludes AVX-512, and with it oneDNN's bf16 GEMMs on x86."""
    return os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in ("SSE41", "AVX", "AVX2", "AVX2_VNNI")


def cuda_home() -> str | None:
    """Returns the folder of the CUDA toolkit given in CUDA_HOME, or None."""
    return os.environ.get("CUDA_HOME") or None


def hide_progress_bars() -> None:
    """Disables tqdm's progress bars in other libraries; to be called before tqdm is imported."""
    os.environ.setdefault("TQDM_DISABLE", "1")


def show_full_hydra_errors() -> None:
    """Makes Hydra raise its errors instead of printing them and exiting 1."""
    os.environ["HYDRA_FULL_ERROR"] = "1"


def no_color() -> bool:
    """Whether the user has disabled colors (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def terminal_is_dumb() -> bool:
    """Whether the terminal does not support control codes."""
    return os.environ.get("TERM", "dumb") in ("dumb", "unknown", "")


def can_redraw(out: TextIO) -> bool:
    """Whether lines on a stream can be redrawn: it is a terminal with control codes.

    CI jobs are excluded even on a terminal, as their log keeps every frame.
    """
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return out.isatty() and not terminal_is_dumb() and not in_ci


def tokenize_on_one_thread() -> None:
    """Disables the threads of `tokenizers` in this process: several processes tokenize at the same time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def wandb_mode() -> str | None:
    """Returns the user's WANDB_MODE, or None."""
    return os.environ.get("WANDB_MODE") or None


BLACKWELL = (10, 0)
"""Compute capability of Blackwell GPUs."""


FIXED_AT_START = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"),
    *("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"),
    *("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"),
)
"""Variables that the C library, OpenMP or an import reads only once in a process."""


def rank_variables(
    threads: int,
    cuda: bool,
    lease: int | None = None,
    capability: tuple[int, int] | None = None,
    heartbeats: Path | None = None,
) -> dict[str, str]:
    """Returns the environment variables of every rank.

    Args:
        threads: CPU threads per rank.
        cuda: whether ranks compute on GPUs.
        lease: number of this start of the run.
        capability: lowest compute capability of the GPUs; None leaves the number of hardware queues to CUDA, as do
            unknown GPUs and ZeRO-3. There a prefetched all-gather waits in NCCL's stream for the one before it, and in
            a single queue the computation that was launched after it would wait too; Megatron-LM forbids a single
            queue for FSDP.
        heartbeats: folder for the ranks' heartbeats; None if they are not monitored.
    """
    # PyTorch reads its thread count from these when it is imported. It must be the same on all ranks, as the bits of
    # LayerNorm's gradient depend on it.
    variables = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    variables[_LAUNCHER_PID_VARIABLE] = str(os.getpid())
    variables[_LEASE_VARIABLE] = "" if lease is None else str(lease)
    variables[_HEARTBEATS_VARIABLE] = str(heartbeats or "")
    variables |= openmp_wait_variables()
    # The flight recorder's buffer, 0.5 MB, must be set for gloo: PyTorch enables the recorder by default for NCCL only.
    defaults = {"TOKENIZERS_PARALLELISM": "false", "TORCH_FR_BUFFER_SIZE": "500"}
    if cuda and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # older name of PYTORCH_ALLOC_CONF
        # Expandable segments: activations of many shapes do not fragment GPU memory.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if not cuda:
        # Ranks free and allocate the same large activations every micro-batch. By default glibc mmaps each of them
        # anew, and the kernel zeroes the pages again: keep them on the heap, and do not trim the heap. Huge pages
        # (glibc >= 2.35) avoid most TLB misses.
        defaults |= {
            "DS_ACCELERATOR": "cpu",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": "100000000000",
            "MALLOC_TOP_PAD_": str(64 * 2**20),
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
    # Before Blackwell, a collective launched just before the GEMM that it overlaps with may be scheduled after it, and
    # gets no SM until the GEMM ends. With one hardware queue for all streams, kernels start in launch order;
    # Megatron-LM requires it for tensor parallelism. CUDA reads the variable when a process opens the device.
    if cuda and capability is not None and capability < BLACKWELL:
        defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables | {name: os.environ.get(name, value) for name, value in defaults.items()}


def meeting_variables(
    secret: Path, host: str, port: int, one_machine: bool, interface: str | None = None
) -> dict[str, str]:
    """Returns the environment variables for the rendezvous of the ranks.

    Args:
        secret: file with the secret of the start.
        host: host of the rendezvous store.
        port: port of the rendezvous store.
        one_machine: whether all ranks are on this machine.
        interface: network interface for gloo between several machines, see `megads.runtime.ports.gloo_interface`.
    """
    variables = {_SECRET_VARIABLE: str(secret.absolute()), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    # For init_process_group() without arguments: the launcher serves the store, so rank 0 must not.
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return variables | (loopback_variables() if one_machine else gloo_variables(interface))


def rank_numbers(rank: int, local_rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
    """Returns torchrun's environment variables for the identity of a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    return {name: str(number) for name, number in numbers.items()}


_ALONE_ON_ITS_HOST = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
_QUICK_ON_SOCKETS = {"NCCL_MAX_NCHANNELS": "2", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}


def shared_gpu_numbers(rank: int, local_rank: int, ranks_per_gpu: int) -> dict[str, str]:
    """Returns environment variables of a rank that shares its GPU with others; empty if it does not.

    NCCL refuses two ranks on one device of one host, but takes ranks with different NCCL_HOSTID to be on different
    hosts, which it connects by sockets. What needs a common host or RDMA is disabled. Few channels leave room on the
    GPU, because a kernel that waits for a peer occupies multiprocessors that the peer needs too; a setting of the user
    is kept.

    Args:
        rank: global rank.
        local_rank: rank on this machine.
        ranks_per_gpu: number of ranks that share a GPU.
    """
    if ranks_per_gpu == 1:
        return {}
    numbers = {"LOCAL_RANK": str(local_rank // ranks_per_gpu), _LOCAL_RANK_VARIABLE: str(local_rank)}
    quick = {name: os.environ.get(name, value) for name, value in _QUICK_ON_SOCKETS.items()}
    return numbers | {"NCCL_HOSTID": f"megads-rank-{rank}"} | _ALONE_ON_ITS_HOST | quick


def gpu_numbers(local_rank: int, gpu: int) -> dict[str, str]:
    """Returns environment variables of a rank whose GPU has another index than its rank on the machine."""
    return {} if gpu == local_rank else {"LOCAL_RANK": str(gpu), _LOCAL_RANK_VARIABLE: str(local_rank)}


def loopback_variables() -> dict[str, str]:
    """Returns variables that make gloo and NCCL use the loopback interface, unless the user has chosen one."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is None:
        return {}
    defaults = {_GLOO_INTERFACE: loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def gloo_variables(interface: str | None) -> dict[str, str]:
    """Returns the variable that makes gloo use a network interface, unless the user has chosen one.

    NCCL needs none: it never selects the loopback while there is another interface.

    Args:
        interface: name of the interface; None leaves the choice to gloo.
    """
    return {} if interface is None else {_GLOO_INTERFACE: os.environ.get(_GLOO_INTERFACE, interface)}


SPIN_COUNT = 2000
"""Iterations of libgomp's waiting loop, some 50 us: about the time that it takes to wake a sleeping thread."""


def openmp_wait_variables() -> dict[str, str]:
    """Returns variables that make OpenMP threads sleep soon when they wait for each other, unless the user has set any.

    By default libgomp's threads spin for milliseconds at the end of every parallel loop. If another process runs on
    one of the cores, they spin while the thread that they wait for has no core: beside one busy loop on two cores a
    training step takes 30 times as long. A thread that sleeps leaves its core to that thread. Spinning for as long as
    it takes to wake a thread costs at most twice the better of the two.
    """
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    set_variables = {name: os.environ[name] for name in names if name in os.environ}
    return set_variables or {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": str(SPIN_COUNT)}


def use_passive_openmp_wait() -> None:
    """Applies `openmp_wait_variables` to this process; to be called before torch is imported."""
    os.environ.update(openmp_wait_variables())


_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def fix_cublas_workspace() -> bool:
    """Fixes the size of the cuBLAS workspace; otherwise a GEMM may reduce in another order from run to run.

    To be called before the first GEMM. Eight buffers of 4 MiB are PyTorch's default on an H100. A setting of the user
    is kept.

    Returns:
        Whether the size was set here, not by the user.
    """
    ours = _CUBLAS_WORKSPACE not in os.environ
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    return ours


def remove_cublas_workspace_setting() -> None:
    """Removes the workspace setting from the environment; see `megads.runtime.process.make_deterministic`."""
    os.environ.pop(_CUBLAS_WORKSPACE, None)


NCCL_ALGORITHMS = "^NVLS,NVLSTree"
"""All NCCL algorithms except those that reduce in the NVLink switch, whose order may differ from run to run."""


def fix_nccl_algorithms() -> None:
    """Excludes NCCL algorithms whose results may differ from run to run; to be called before the first communicator.

    As in Megatron-LM, a setting of the user is kept.

    Raises:
        ConfigError: the user's NCCL_ALGO allows such algorithms.
    """
    asked = os.environ.setdefault("NCCL_ALGO", NCCL_ALGORITHMS)
    listed = {name.strip().lower() for name in re.split(r"[,;:^=@]", asked)}
    left_out = "nvls" in listed if asked.startswith("^") else not any(name.startswith("nvls") for name in listed)
    if not left_out:
        raise ConfigError(
            f"NCCL_ALGO = {asked} with train.deterministic = true: NVLS reduces in the switch, in an order that varies "
            f"between runs; use NCCL_ALGO={NCCL_ALGORITHMS}, Ring or Tree, leave it unset, or set "
            "train.deterministic=false"
        )


@contextmanager
def child_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for child processes started inside the block, then restores the old values."""
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


def explicit_thread_counts() -> dict[str, str]:
    """Returns the thread counts set in the environment."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: os.environ[name] for name in names if name in os.environ}


def slurm_job() -> str | None:
    """Returns the id of the SLURM job of this process; None outside of SLURM."""
    return os.environ.get("SLURM_JOB_ID")


def rehearsal_folder() -> Path | None:
    """Returns the folder of the rehearsal that this process is part of; None if there is none."""
    value = os.environ.get(REHEARSAL_VARIABLE)
    return Path(value) if value else None


def without_commands(names: Sequence[str]) -> dict[str, str]:
    """Returns variables that turn commands into no-ops in bash scripts that inherit them.

    Args:
        names: names of the commands.
    """
    return {f"BASH_FUNC_{name}%%": "() {  :\n}" for name in names}


def set_variables(*patterns: str) -> dict[str, str]:
    """Returns the environment variables with these names that are set and not empty; `*` stands for any characters."""
    return {name: text for name, text in os.environ.items() if text and any(fnmatchcase(name, one) for one in patterns)}


def slurm_variables() -> dict[str, str]:
    """Returns the SLURM_* and SLURMD_* environment variables."""
    return {name: value for name, value in os.environ.items() if name.startswith(("SLURM_", "SLURMD_"))}


_OF_THE_JOBS_TASKS = (
    *("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "GPU_BIND", "TRES_BIND", "TRES_PER_TASK"),
    *("CPUS_PER_TASK", "CPUS_PER_GPU", "CPU_BIND", "MEM_BIND", "DISTRIBUTION", "EXACT"),
    *("NTASKS_PER_GPU", "NTASKS_PER_SOCKET", "NTASKS_PER_CORE", "NTASKS_PER_TRES"),
)
"""Options of a job that srun reads from the environment, and that mean something else for one task per node."""


def for_srun() -> dict[str, str]:
    """Returns this process's environment for an srun that starts one task per node, without the job's options of tasks.

    sbatch exports its options as SLURM_*, and srun takes them as its own: `--ntasks-per-gpu` it refuses beside
    `--ntasks-per-node`, and `--gpus-per-task` would leave the one task of a node with one task's GPUs.
    `megads.runtime.slurm.step_options` names what the task gets; cluster.srun_options can add to it.
    """
    removed = {f"{prefix}_{name}" for prefix in ("SLURM", "SRUN") for name in _OF_THE_JOBS_TASKS}
    return {name: value for name, value in os.environ.items() if name not in removed}


def allow_open_files(count: int) -> None:
    """Raises this process's limit of open files, often 1,024, if it is too low for a number of connections.

    Args:
        count: number of connections; the limit also leaves room for other files.

    Raises:
        ConfigError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"the launcher needs {needed} open files, one per connection of an agent or a rank, but the limit is "
            f"{hard} (ulimit -Hn): raise LimitNOFILE of slurmd, or start fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def node_name() -> str:
    """Returns SLURM's name of this node, which may differ from the host name; outside of SLURM the host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def outside_slurm(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without the variables of SLURM and of the user's SLURM defaults.

    Args:
        variables: variables to add.
    """
    theirs = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(theirs)} | dict(variables)


def wandb_login() -> str | None:
    """Returns where wandb would find an API key, or None if there is none; the key is not returned."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    path = Path(os.environ.get("NETRC") or (home_dir() or Path("/")) / ".netrc")
    try:
        known = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    return str(path) if url.hostname in known else None
