"""DeepSpeed options for the launcher, without importing DeepSpeed: which runs use it, extra settings, its AdamW."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.parallel.config import GRADIENT_STAGES

_ZERO = "zero_optimization"
_PASSED = (
    "comms_logger",
    "dump_state",
    "flops_profiler",
    "memory_breakdown",
    "steps_per_print",
    "wall_clock_breakdown",
    _ZERO,
)
_STAGE_3 = "stage3_"
_PASSED_ZERO = (
    "allgather_bucket_size",
    "enable_sanity_checks",
    "log_trace_cache_warnings",
    "overlap_comm",
    "reduce_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_prefetch_bucket_size",
)
_PRECISION = "train.precision decides it: weights in bf16 or fp32, master weights and gradient accumulation in fp32"
_BATCHES = "train.global_batch_size and train.micro_batch_size decide it; the loss is a mean over tokens"
_REDUCTION = "gradients accumulate and reduce in fp32, as sums over tokens"
_OPTIMIZER = "optim and schedule decide it"
_STATE = "checkpoints need the optimizer's state where megads expects it: complete, in fp32, on the device"
_REFUSED = {
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "data_types": _REDUCTION,
    "communication_data_type": _REDUCTION,
    "seq_parallel_communication_data_type": _REDUCTION,
    "prescale_gradients": _REDUCTION,
    "gradient_predivide_factor": _REDUCTION,
    "gradient_allreduce_op": _REDUCTION,
    "sparse_gradients": _REDUCTION,
    "gradient_clipping": "optim.clip_grad decides it",
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _BATCHES,
    "optimizer": _OPTIMIZER,
    "scheduler": _OPTIMIZER,
    "zero_allow_untested_optimizer": _OPTIMIZER,
    "tensor_parallel": "parallel decides the layout",
    "pipeline": "parallel decides the layout",
    "activation_checkpointing": "parallel.recompute decides it",
    "compression_training": "megads saves the weights that it trains",
    "weight_quantization": "megads saves the weights that it trains",
    "checkpoint": "megads writes its own checkpoints (checkpoint.every_steps)",
    "tensorboard": "logging.tensorboard decides it",
    "wandb": "logging.wandb decides it",
    f"{_ZERO}.stage": "parallel.zero_stage decides it",
    f"{_ZERO}.offload_optimizer": _STATE,
    f"{_ZERO}.offload_param": _STATE,
    f"{_ZERO}.round_robin_gradients": _STATE,
    f"{_ZERO}.sub_group_size": _STATE,
    f"{_ZERO}.elastic_checkpoint": _STATE,
    f"{_ZERO}.contiguous_gradients": _STATE,
    f"{_ZERO}.reduce_scatter": _REDUCTION,
    f"{_ZERO}.zero_quantized_weights": "layers would compute with other weights than those that are trained",
    f"{_ZERO}.zero_quantized_gradients": _REDUCTION,
    f"{_ZERO}.zero_hpz_partition_size": "parallel.zero_shard_size sets the ranks that weights are sharded over",
}


def check_deepspeed_options(options: Mapping[str, Any], zero_stage: int) -> None:
    """Rejects settings that DeepSpeed would not read, or that would break megads' guarantees.

    Args:
        options: config section `deepspeed`.
        zero_stage: value of parallel.zero_stage.

    Raises:
        ConfigError: a setting is rejected; the message gives the reason.
    """
    if not options:
        return
    if zero_stage not in GRADIENT_STAGES:
        raise ConfigError(
            f"deepspeed.{next(iter(options))} only applies to parallel.zero_stage=2 and 3, which use DeepSpeed's own "
            f"ZeRO engine, but parallel.zero_stage = {zero_stage}: remove it"
        )
    _check_keys(options, "", _PASSED)
    zero = options.get(_ZERO, {})
    if not isinstance(zero, Mapping):
        raise ConfigError(f"deepspeed.{_ZERO} = {zero}: want settings by name, deepspeed.{_ZERO}.<setting>=<value>")
    _check_keys(zero, f"{_ZERO}.", _PASSED_ZERO)
    for name in zero:
        if name.startswith(_STAGE_3) and zero_stage != 3:
            raise ConfigError(
                f"deepspeed.{_ZERO}.{name} only applies to parallel.zero_stage=3, but parallel.zero_stage = "
                f"{zero_stage}: remove it"
            )


def with_options(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns megads' DeepSpeed settings overridden by the user's; `zero_optimization` is merged key by key."""
    return {**settings, **options, _ZERO: {**settings[_ZERO], **options.get(_ZERO, {})}}


def _check_keys(given: Mapping[str, Any], prefix: str, passed: tuple[str, ...]) -> None:
    for name in given:
        reason = _REFUSED.get(f"{prefix}{name}")
        if reason is not None:
            raise ConfigError(f"deepspeed.{prefix}{name} cannot be set: {reason}")
        if name not in passed:
            close = difflib.get_close_matches(name, passed, n=1, cutoff=0.7)
            hint = f": did you mean {close[0]}?" if close else ""
            raise ConfigError(f"deepspeed.{prefix}{name} is not passed on{hint} (megads passes on {', '.join(passed)})")


def uses_deepspeed(zero_stage: int, optimizer: Implementation) -> bool:
    """Whether the ranks of a run import DeepSpeed.

    Args:
        zero_stage: ZeRO stage of the layout.
        optimizer: config `optim.impl`.
    """
    return zero_stage in GRADIENT_STAGES or optimizer is Implementation.deepspeed


def build_adam(say: Callable[[str], None], *, cuda: bool) -> None:
    """Compiles DeepSpeed's AdamW before the ranks start, unless it is in torch's cache; in a subprocess.

    Args:
        say: prints a line.
        cuda: whether ranks compute on GPUs.

    Raises:
        ConfigError: it cannot be compiled or loaded on this machine.
    """
    say(f"optim.impl=deepspeed: compiling DeepSpeed's {'FusedAdam' if cuda else 'CPUAdam'} unless it is cached")
    command = [sys.executable, "-m", "megads.engine.deepspeed_adam", "cuda" if cuda else "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ConfigError(
            next((line for line in said if line.startswith("optim.impl")), said[-1] if said else "no message")
        )
