"""How fast a step was: tokens per second, TFLOPs per device and MFU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """Speed of one step.

    Attributes:
        tokens_per_s: over all devices.
        tflops_per_device: model TFLOPs (the convention of megads.plan.flops) each device did a second.
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
