"""DeepSpeed options for the launcher, without importing DeepSpeed: which runs use it, extra settings, its AdamW."""

from __future__ import annotations

import difflib
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megads.errors import ConfigError
from megads.ops.config import Implementation
from megads.parallel.config import EngineKind

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
_BF16_OPTIMIZER, _ZERO_1_FP32, _ZERO_2, _ZERO_3 = "ZeRO-1 in bf16", "ZeRO-1 in fp32", "ZeRO-2", "ZeRO-3"
_PASSED_ZERO = {
    "allgather_bucket_size": (_BF16_OPTIMIZER, _ZERO_1_FP32, _ZERO_2),
    "enable_sanity_checks": (_ZERO_3,),
    "log_trace_cache_warnings": (_ZERO_3,),
    "overlap_comm": (_ZERO_2, _ZERO_3),
    "reduce_bucket_size": (_ZERO_1_FP32, _ZERO_2, _ZERO_3),
    "stage3_max_live_parameters": (_ZERO_3,),
    "stage3_max_reuse_distance": (_ZERO_3,),
    "stage3_param_persistence_threshold": (_ZERO_3,),
    "stage3_prefetch_bucket_size": (_ZERO_3,),
}
"""Settings of `zero_optimization` that are passed on, with the optimizers of DeepSpeed 0.19.8 that read them: ZeRO-1 in
bf16 is its BF16_Optimizer, and ZeRO-0 reads none."""
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
    "pipeline": "parallel decides layout, recomputation and what is sent between stages",
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


def check_deepspeed_options(options: Mapping[str, Any], engine: EngineKind, zero_stage: int, *, bf16: bool) -> None:
    """Rejects settings that DeepSpeed would not read, or that would break megads' guarantees.

    Args:
        options: config section `deepspeed`.
        engine: the engine that trains, native or deepspeed.
        zero_stage: value of parallel.zero_stage.
        bf16: whether weights are in bf16.

    Raises:
        ConfigError: a setting is rejected; the message gives the reason.
    """
    if not options:
        return
    if engine is not EngineKind.deepspeed:
        raise ConfigError(
            f"deepspeed.{next(iter(options))} only applies to engine=deepspeed, but parallel.zero_stage = {zero_stage} "
            "is trained by the native engine: remove it, or set engine=deepspeed"
        )
    _check_keys(options, "", _PASSED)
    zero = options.get(_ZERO, {})
    if not isinstance(zero, Mapping):
        raise ConfigError(f"deepspeed.{_ZERO} = {zero}: want settings by name, deepspeed.{_ZERO}.<setting>=<value>")
    _check_keys(zero, f"{_ZERO}.", tuple(_PASSED_ZERO))
    used = f"ZeRO-{zero_stage}"
    if zero_stage == 1:
        used = _BF16_OPTIMIZER if bf16 else _ZERO_1_FP32
    for name in zero:
        if used not in _PASSED_ZERO[name]:
            raise ConfigError(
                f"deepspeed.{_ZERO}.{name} is only read by {' and '.join(_PASSED_ZERO[name])}, but this run uses "
                f"{used}: remove it"
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


def uses_deepspeed(engine: EngineKind, optimizer: Implementation) -> bool:
    """Whether the ranks of a run import DeepSpeed.

    Args:
        engine: the resolved engine, native or deepspeed.
        optimizer: config `optim.impl`.
    """
    return engine is EngineKind.deepspeed or optimizer is Implementation.deepspeed


def build_adam(print_line: Callable[[str], None], *, cuda: bool) -> None:
    """Compiles DeepSpeed's AdamW before the ranks start, unless it is in torch's cache; in a subprocess.

    Args:
        print_line: prints a line.
        cuda: whether ranks compute on GPUs.

    Raises:
        ConfigError: it cannot be compiled or loaded on this machine.
    """
    print_line(f"optim.impl=deepspeed: compiling DeepSpeed's {'FusedAdam' if cuda else 'CPUAdam'} unless it is cached")
    command = [sys.executable, "-m", "megads.engine.deepspeed_adam", "cuda" if cuda else "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ConfigError(
            next((line for line in said if line.startswith("optim.impl")), said[-1] if said else "no message")
        )
