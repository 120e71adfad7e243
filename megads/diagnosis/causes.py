"""The causes that a diagnosis can name: where the fault lies, whether a restart helps, and what to do.

The names are those under which public collections of failed training jobs are labelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What failed first."""

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


class Domain(StrEnum):
    """Where the fault lies: hardware, network, storage and cluster; the software stack; the user's program."""

    infrastructure = "infrastructure"
    framework = "framework"
    script = "script"


@dataclass(frozen=True)
class CauseFacts:
    """What holds of a cause unless a message says otherwise.

    Attributes:
        domain: where the fault lies.
        restartable: a restart, or a restart without the named node, is enough.
        advice: what to do.
    """

    domain: Domain
    restartable: bool
    advice: str


_INFRASTRUCTURE, _FRAMEWORK, _SCRIPT = Domain.infrastructure, Domain.framework, Domain.script

FACTS: dict[Cause, CauseFacts] = {
    Cause.cuda_oom: CauseFacts(
        _FRAMEWORK,
        False,
        "Lower the micro-batch size or the sequence length, recompute activations, or shard more (tensor parallel, "
        "ZeRO). If the message says that much memory is reserved but unallocated, set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Look for another process on the GPU with nvidia-smi.",
    ),
    Cause.host_oom_kill: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "The kernel killed a process for want of host memory. Ask the scheduler for more memory (--mem), start fewer "
        "ranks or data workers a node, and offload less to the CPU.",
    ),
    Cause.cuda_ecc_or_xid: CauseFacts(
        _INFRASTRUCTURE,
        True,
        "The GPU itself reports a fault. Restart without the named node; have the node drained, the GPU reset and its "
        "health checked (dcgmi diag, nvidia-smi -q -d ECC,ROW_REMAPPER).",
    ),
    Cause.nvlink_error: CauseFacts(
        _INFRASTRUCTURE,
        True,
        "The NVLink or NVSwitch fabric of a node failed. Restart without that node; check nvidia-smi nvlink -e, the "
        "fabric manager and its version.",
    ),
    Cause.nccl_timeout_hang: CauseFacts(
        _FRAMEWORK,
        False,
        "A collective did not complete in time: some rank did not enter it, or entered another one. Find that rank "
        "with the flight recorder (TORCH_FR_BUFFER_SIZE=20000, then flight_recorder=<folder of dumps>). Usual reasons: "
        "control flow that differs between ranks, one rank that saves or validates alone for long, a slow data loader.",
    ),
    Cause.nccl_remote_or_network: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "A connection between ranks failed, and no rank says why it left. Check the links and the fabric of the nodes "
        "in the message, NCCL_SOCKET_IFNAME and NCCL_IB_HCA; NCCL_DEBUG=INFO shows which interface is used.",
    ),
    Cause.cuda_illegal_access: CauseFacts(
        _FRAMEWORK,
        False,
        "A kernel accessed memory outside of its tensors or an assertion in it failed. Run with "
        "CUDA_LAUNCH_BLOCKING=1 to see which operation it is; check indices, labels and vocabulary sizes; "
        "compute-sanitizer finds the access.",
    ),
    Cause.cudnn_or_cublas_error: CauseFacts(
        _FRAMEWORK,
        False,
        "A CUDA library refused a call. Out of memory, an earlier asynchronous error and mixed library versions look "
        "like this: run with CUDA_LAUNCH_BLOCKING=1, compare the versions of torch, CUDA and cuDNN, lower the memory.",
    ),
    Cause.driver_mismatch_or_no_gpu: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "The GPU cannot be used by this software: no device is visible, the driver is too old or does not match its "
        "library, or the binary has no kernel for this GPU. See nvidia-smi, CUDA_VISIBLE_DEVICES, megads doctor; "
        "install a build of torch for this driver and GPU.",
    ),
    Cause.disk_full: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "A disk, a quota or /dev/shm is full. Free space or move the output; keep fewer checkpoints.",
    ),
    Cause.filesystem_io: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "The file system did not answer as it should. Check the mount on the node (stale handles, locks, a file "
        "server that does not respond), permissions and limits; remount, then restart.",
    ),
    Cause.checkpoint_corrupt_or_mismatch: CauseFacts(
        _FRAMEWORK,
        False,
        "The checkpoint does not fit the model or is damaged. Compare the model's config with the checkpoint's, load "
        "an earlier checkpoint, or copy the file again.",
    ),
    Cause.data_corrupt: CauseFacts(
        _FRAMEWORK,
        False,
        "The data holds something that cannot be read. Find the file or record in the message and repair or leave it "
        "out.",
    ),
    Cause.dataloader_worker_killed: CauseFacts(
        _FRAMEWORK,
        False,
        "A data worker was killed. Use fewer workers or less prefetching, give the container more shared memory "
        "(--shm-size, --ipc=host), and look for an out-of-memory kill in the kernel's log.",
    ),
    Cause.nan_or_loss_divergence: CauseFacts(
        _FRAMEWORK,
        False,
        "The training diverged. Lower the learning rate or warm up for longer, clip gradients, use bf16 instead of "
        "fp16, look at the data of the step, and continue from a checkpoint before it.",
    ),
    Cause.config_or_shape_error: CauseFacts(
        _FRAMEWORK,
        False,
        "A setting, a path or a tensor's shape, type or device does not fit. Correct what the message names.",
    ),
    Cause.import_or_build_error: CauseFacts(
        _FRAMEWORK,
        False,
        "A module cannot be imported or an extension cannot be built. Install the missing package, or versions that "
        "fit each other; for extensions check nvcc, the compiler and CUDA_HOME.",
    ),
    Cause.aux_service_network: CauseFacts(
        _INFRASTRUCTURE,
        True,
        "A service beside the training (model hub, experiment tracker, object store) did not answer. Try again later, "
        "or do without it: HF_HUB_OFFLINE=1 with files downloaded before, WANDB_MODE=offline.",
    ),
    Cause.preempted_or_time_limit: CauseFacts(
        _INFRASTRUCTURE,
        True,
        "The scheduler or a person ended the job. Start it again from the last checkpoint; save before the limit.",
    ),
    Cause.port_or_rendezvous: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "The ranks could not meet. Check that the address of the first node is right and reachable from all, that "
        "every node started, and that no firewall is between; choose a free port.",
    ),
    Cause.user_code_exception: CauseFacts(
        _SCRIPT, False, "The program raised an exception. Read the traceback from its last frame upwards."
    ),
    Cause.process_killed_unknown: CauseFacts(
        _INFRASTRUCTURE,
        False,
        "A process was killed or crashed, and the log does not say why. After SIGKILL look for an out-of-memory kill "
        "(dmesg, sacct, the cgroup's memory.events); after SIGSEGV run with PYTHONFAULTHANDLER=1 to see the stack.",
    ),
}
