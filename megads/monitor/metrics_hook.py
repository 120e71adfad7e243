"""Writes the step line of metrics.jsonl."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from megads.runtime.hooks import StepInfo, TrainState
from megads.runtime.metrics import MetricsWriter


@dataclass(frozen=True)
class Throughput:
    """Speed of one step.

    Attributes:
        tokens_per_s: over all devices.
        tflops_per_device: model TFLOPs (the convention of megads.plan.model_size) each device did a second.
        mfu: tflops_per_device over the device's peak; 0.5 is 50%.
    """

    tokens_per_s: float
    tflops_per_device: float
    mfu: float


def throughput(tokens: int, seconds: float, world_size: int, flops_per_token: float, peak_tflops: float) -> Throughput:
    """Speed of `tokens` computed on `world_size` devices in `seconds`.

    Args:
        tokens: tokens computed, masked ones included: they cost the same.
        seconds: wall time, above 0.
        world_size: devices (on a CPU: ranks).
        flops_per_token: model operations a token, forward and backward.
        peak_tflops: peak of one device.
    """
    tokens_per_s = tokens / seconds
    tflops_per_device = tokens_per_s * flops_per_token / world_size / 1e12
    return Throughput(tokens_per_s, tflops_per_device, tflops_per_device / peak_tflops)


class MetricsHook:
    """Writes one line a step.

    Args:
        metrics: where lines go.
        flops_per_token: model operations a token, forward and backward.
        world_size: devices.
        peak_tflops: peak of one device.
        restarts: how often the run was started before.
    """

    def __init__(
        self,
        metrics: MetricsWriter,
        flops_per_token: float,
        world_size: int,
        peak_tflops: float,
        restarts: int = 0,
    ) -> None:
        self._metrics = metrics
        self._flops_per_token = flops_per_token
        self._world_size = world_size
        self._peak_tflops = peak_tflops
        self._restarts = restarts

    def on_start(self, state: TrainState) -> None:
        pass

    def on_step(self, info: StepInfo) -> None:
        speed = throughput(
            info.global_batch_size * info.seq_len,
            info.step_time_s,
            self._world_size,
            self._flops_per_token,
            self._peak_tflops,
        )
        self._metrics.write(
            {
                "step": info.step,
                "samples": info.samples,
                "tokens": info.tokens,
                "loss": info.loss,
                "grad_norm": info.grad_norm,
                "lr": info.lr,
                "global_batch_size": info.global_batch_size,
                "seq_len": info.seq_len,
                "step_time_s": info.step_time_s,
                "data_time_s": info.data_time_s,
                "tokens_per_s": speed.tokens_per_s,
                "tflops_per_device": speed.tflops_per_device,
                "mfu": speed.mfu,
                "peak_memory_bytes": peak_memory_bytes(),
                "skipped": info.skipped,
                "batch_hash": info.batch_hash,
                "restarts": self._restarts,
            }
        )

    def on_end(self, state: TrainState) -> None:
        pass


def peak_memory_bytes() -> int:
    """Most memory this rank has held: allocated on its GPU, or resident where it has none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
