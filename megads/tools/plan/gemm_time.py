"""Time of a GEMM: the larger of its compute time, in waves of tiles, and of its memory traffic; see `operators`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from math import ceil

from megads.tools.plan.devices import Device, gemm_seconds

Passes = tuple[float, float, float]
"""Seconds in the forward pass and in the two parts of the backward pass: dgrad and wgrad."""
_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.75))
"""Rows and columns of cuBLAS' tiles, and their rates relative to the largest (NVIDIA's guide, figure 2: less reuse)."""
_PROLOGUE = 128
"""Prologue and epilogue of a tile in steps of the inner dimension: the rate is scaled by k / (k + 128)."""
_ALIGNED = 64
_UNALIGNED_RATE = 0.8
"""Relative rate of GEMMs whose dimensions are not multiples of 64 elements, 128 bytes (NVIDIA's guide). Trials of
BLOOM: 94.4 TFLOPs with 14400 / 8 = 1800 columns, 120.1 with 13824 / 8 = 1728 (bigscience, tr11-176B-ml,
chronicles-prequel.md)."""


class Gemm(StrEnum):
    """GEMM of a linear layer (forward, dgrad or wgrad); they read, pack and write different operands."""

    forward = "forward"
    dgrad = "dgrad"
    wgrad = "wgrad"


def matmul_seconds(
    device: Device,
    m: float,
    n: float,
    k: float,
    count: float = 1.0,
    width: int = 2,
    kind: Gemm = Gemm.forward,
) -> float:
    """Seconds of a batch of `count` GEMMs [m, k] x [k, n].

    Args:
        device: device with its peak and processors, or with measured GEMMs.
        m, n, k: GEMM dimensions.
        count: batch size.
        width: bytes per element.
        kind: selects the measured GEMMs of forward, dgrad or wgrad, if there are any.
    """
    if device.products:
        measured = {Gemm.dgrad: device.input_products, Gemm.wgrad: device.weight_products}.get(kind)
        seconds = gemm_seconds(measured or device.products, m * count, n, k)
        return max(seconds, device.kernel_us * 1e-6)
    traffic = width * (m * k + k * n + m * n) * count / device.memory_bytes_per_s
    rate = device.peak_flops * device.matmul_efficiency * k / (k + _PROLOGUE)
    if m % _ALIGNED or n % _ALIGNED or k % _ALIGNED:
        rate *= _UNALIGNED_RATE
    waves = min(
        ceil(ceil(m / rows) * ceil(n / columns) * count / device.processors) * rows * columns / share
        for rows, columns, share in _TILES
    )
    return max(waves * device.processors * 2 * k / rate, traffic, device.kernel_us * 1e-6)


def add_passes(layers: Iterable[Passes]) -> Passes:
    """Sums the seconds of several layers, pass by pass."""
    forward, dgrad, wgrad = (sum(seconds) for seconds in zip(*layers, strict=True))
    return forward, dgrad, wgrad
