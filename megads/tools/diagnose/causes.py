"""Root causes that a diagnosis can name, each with its domain, whether a restart helps, and advice.

The names are the labels of public collections of failed training jobs, except for `node_lost`, which only the records
of a run show.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Root cause of a failure."""

    cuda_oom = "cuda_oom"
    host_oom_kill = "host_oom_kill"
    cuda_ecc_or_xid = "cuda_ecc_or_xid"
    nvlink_error = "nvlink_error"
    nccl_timeout_hang = "nccl_timeout_hang"
    nccl_remote_or_network = "nccl_remote_or_network"
    cuda_illegal_access = "cuda_illegal_access"
    cudnn_or_cublas_error = "cudnn_or_cublas_error"
    driver_mismatch_or_no_gpu = "driver_mismatch_or_no_gpu"
    disk_full = "disk_full"
    filesystem_io = "filesystem_io"
    checkpoint_corrupt_or_mismatch = "checkpoint_corrupt_or_mismatch"
    data_corrupt = "data_corrupt"
    dataloader_worker_killed = "dataloader_worker_killed"
    nan_or_loss_divergence = "nan_or_loss_divergence"
    config_or_shape_error = "config_or_shape_error"
    import_or_build_error = "import_or_build_error"
    aux_service_network = "aux_service_network"
    preempted_or_time_limit = "preempted_or_time_limit"
    port_or_rendezvous = "port_or_rendezvous"
    user_code_exception = "user_code_exception"
    process_killed_unknown = "process_killed_unknown"
    node_lost = "node_lost"


class Domain(StrEnum):
    """Origin of a fault: hardware, network, storage or cluster; the software stack; the user's program."""

    infrastructure = "infrastructure"
    framework = "framework"
    script = "script"


@dataclass(frozen=True)
class CauseFacts:
    """Defaults of a cause; a signature may override them.

    Attributes:
        title: the cause in words.
        domain: origin of the fault.
        restartable: whether a restart, or a restart without the named node, is enough.
        advice: recommended action.
    """

    title: str
    domain: Domain
    restartable: bool
    advice: str


_INFRASTRUCTURE, _FRAMEWORK, _SCRIPT = Domain.infrastructure, Domain.framework, Domain.script

FACTS: dict[Cause, CauseFacts] = {
    Cause.cuda_oom: CauseFacts(
        "out of GPU memory",
        _FRAMEWORK,
        False,
        "Lower the micro-batch size or the sequence length, recompute activations, or shard more (tensor parallel, "
        "ZeRO). If the message says that much memory is reserved but unallocated, set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Look for another process on the GPU with nvidia-smi.",
    ),
    Cause.host_oom_kill: CauseFacts(
        "out of host memory",
        _INFRASTRUCTURE,
        False,
        "The kernel killed a process because host memory ran out. Request more memory from the scheduler (--mem), "
        "start fewer ranks or dataloader workers per node, and offload less to the CPU.",
    ),
    Cause.cuda_ecc_or_xid: CauseFacts(
        "fault of a GPU",
        _INFRASTRUCTURE,
        True,
        "The GPU itself reports a fault. Restart without the named node; drain the node, reset the GPU and check its "
        "health (dcgmi diag, nvidia-smi -q -d ECC,ROW_REMAPPER).",
    ),
    Cause.nvlink_error: CauseFacts(
        "fault of NVLink",
        _INFRASTRUCTURE,
        True,
        "The NVLink or NVSwitch fabric of a node failed. Restart without that node; check nvidia-smi nvlink -e, the "
        "fabric manager and its version.",
    ),
    Cause.nccl_timeout_hang: CauseFacts(
        "a collective timed out, or a rank hangs",
        _FRAMEWORK,
        True,
        "A collective did not complete in time: some rank did not enter it, or entered another one. Find that rank "
        "with the flight recorder (TORCH_FR_BUFFER_SIZE=20000, then flight_recorder=<folder of dumps>). Usual reasons: "
        "control flow that differs between ranks, one rank that saves or validates alone for long, a slow dataloader.",
    ),
    Cause.nccl_remote_or_network: CauseFacts(
        "a connection between ranks failed",
        _INFRASTRUCTURE,
        True,
        "A connection between ranks failed, and no rank logged why it exited. Check the links and the fabric of the "
        "nodes in the message, NCCL_SOCKET_IFNAME and NCCL_IB_HCA; NCCL_DEBUG=INFO shows which interface is used.",
    ),
    Cause.cuda_illegal_access: CauseFacts(
        "illegal access in a GPU kernel",
        _FRAMEWORK,
        False,
        "A kernel accessed memory outside its tensors, or an assertion in it failed. Run with "
        "CUDA_LAUNCH_BLOCKING=1 to see which operation it is; check indices, labels and vocabulary sizes; "
        "compute-sanitizer finds the access.",
    ),
    Cause.cudnn_or_cublas_error: CauseFacts(
        "a CUDA library call failed",
        _FRAMEWORK,
        False,
        "A CUDA library call failed. Possible reasons are too little memory, an earlier asynchronous error and mixed "
        "library versions: run with CUDA_LAUNCH_BLOCKING=1, compare the versions of torch, CUDA and cuDNN, and use "
        "less memory.",
    ),
    Cause.driver_mismatch_or_no_gpu: CauseFacts(
        "no usable GPU",
        _INFRASTRUCTURE,
        False,
        "The GPU cannot be used by this software: no device is visible, the driver is too old or does not match its "
        "library, or the binary has no kernel for this GPU. Check nvidia-smi, CUDA_VISIBLE_DEVICES and megads doctor; "
        "install a build of torch for this driver and GPU.",
    ),
    Cause.disk_full: CauseFacts(
        "disk or quota full",
        _INFRASTRUCTURE,
        False,
        "A disk, a quota or /dev/shm is full. Free space or move the output; keep fewer checkpoints.",
    ),
    Cause.filesystem_io: CauseFacts(
        "a file system operation failed",
        _INFRASTRUCTURE,
        False,
        "A file system operation failed. Check the mount on the node (stale handles, locks, a file server that does "
        "not respond), permissions and limits; remount, then restart.",
    ),
    Cause.checkpoint_corrupt_or_mismatch: CauseFacts(
        "unusable checkpoint",
        _FRAMEWORK,
        False,
        "The checkpoint does not fit the model or is damaged. Compare the model's config with the checkpoint's, load "
        "an earlier checkpoint, or copy the file again.",
    ),
    Cause.data_corrupt: CauseFacts(
        "unreadable data",
        _FRAMEWORK,
        False,
        "Part of the data cannot be read. Find the file or record in the message, and repair or remove it.",
    ),
    Cause.dataloader_worker_killed: CauseFacts(
        "a dataloader worker was killed",
        _FRAMEWORK,
        False,
        "A dataloader worker was killed. Use fewer workers or less prefetching, give the container more shared memory "
        "(--shm-size, --ipc=host), and look for an out-of-memory kill in the kernel log.",
    ),
    Cause.nan_or_loss_divergence: CauseFacts(
        "training diverged",
        _FRAMEWORK,
        False,
        "Training diverged. Lower the learning rate or warm up for longer, clip gradients, use bf16 instead of fp16, "
        "inspect the data of the step, and continue from an earlier checkpoint.",
    ),
    Cause.config_or_shape_error: CauseFacts(
        "wrong setting or shape",
        _FRAMEWORK,
        False,
        "A setting, a path, or the shape, dtype or device of a tensor is wrong. Correct what the message names.",
    ),
    Cause.import_or_build_error: CauseFacts(
        "missing module or failed build",
        _FRAMEWORK,
        False,
        "A module cannot be imported or an extension cannot be built. Install the missing package, or compatible "
        "versions; for extensions check nvcc, the compiler and CUDA_HOME.",
    ),
    Cause.aux_service_network: CauseFacts(
        "an external service did not respond",
        _INFRASTRUCTURE,
        True,
        "An external service (model hub, experiment tracker, object store) did not respond. Try again later, or run "
        "without it: HF_HUB_OFFLINE=1 with files downloaded before, WANDB_MODE=offline.",
    ),
    Cause.preempted_or_time_limit: CauseFacts(
        "ended from outside, or out of time",
        _INFRASTRUCTURE,
        True,
        "The scheduler or a person ended the job. Restart it from the last checkpoint; save before the time limit.",
    ),
    Cause.port_or_rendezvous: CauseFacts(
        "the ranks did not find each other",
        _INFRASTRUCTURE,
        True,
        "The rendezvous of the ranks failed. Check that the address of the first node is correct and reachable from "
        "all nodes, that every node started, and that no firewall blocks the port; choose a free port.",
    ),
    Cause.user_code_exception: CauseFacts(
        "the program raised an exception",
        _SCRIPT,
        False,
        "The program raised an exception. Read the traceback from its last frame upwards.",
    ),
    Cause.process_killed_unknown: CauseFacts(
        "a process was killed or crashed, reason unknown",
        _INFRASTRUCTURE,
        False,
        "A process was killed or crashed, and the log does not say why. After SIGKILL look for an out-of-memory kill "
        "(dmesg, sacct, the cgroup's memory.events); after SIGSEGV run with PYTHONFAULTHANDLER=1 to see the stack.",
    ),
    Cause.node_lost: CauseFacts(
        "a node was lost",
        _INFRASTRUCTURE,
        True,
        "The node stopped answering: it crashed, was rebooted, or lost its network. Restart without it; look at its "
        "console, the scheduler's log and sinfo -R before it is used again.",
    ),
}
