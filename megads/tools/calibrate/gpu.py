"""Measurements of a rank on a GPU, with the kernels and the attention implementation that a run would choose.

Shapes are typical of training on GPUs. Times are device times: while the GPU is busy the host runs ahead, so kernel
launches count only where they take longer than the launched kernels (`RankOperators.host`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megads.engine.autotune import autotune_attention
from megads.model.config import ModelConfig, Position
from megads.ops.attention_kinds import AttentionKind, AttentionWork
from megads.ops.config import Implementation, Kernels, OpsConfig
from megads.ops.resolve import load
from megads.parallel.config import ParallelConfig, Recompute
from megads.parallel.grid import build_grid
from megads.plan.devices import device_from, shipped_device
from megads.plan.peak import data_sheet_tflops
from megads.runtime.progress import Progress
from megads.tools.calibrate.operators import (
    Bench,
    attention_model,
    copied_bytes_per_s,
    host_bytes_per_s,
    measured_attention,
    measured_products,
    smallest_s,
)
from megads.tools.calibrate.passes import (
    GPU_TRIALS,
    LAUNCH_TRIALS,
    PLAIN,
    Trained,
    Trial,
    launches_again,
    pass_costs,
    trained,
)

_TUNED_LENGTH = 2048
"""Sequence length at which attention implementations are autotuned; the fastest is used for all lengths."""
_RECOMPILED = 64
"""dynamo recompile limit: shapes for which FlexAttention is compiled before it falls back to eager; runs have one."""
_OF_NODE = frozenset(
    ("ranks_per_node", "node_gigabytes_per_s", "node_latency_us", "link_efficiency", "collectives", "hidden_cost")
)
"""Link attributes that ranks of one node can measure."""


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that are not measured.

    Attributes:
        name: name reported by the driver.
        processors: number of streaming multiprocessors.
        memory_bytes: total memory that programs can allocate.
    """

    name: str
    processors: int
    memory_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Properties of a CUDA device."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(torch.cuda.get_device_name(device), processors, torch.cuda.mem_get_info(device)[1])


def gpu_kernels() -> Kernels:
    """megads' kernels if they are available, else torch's.

    A run autotunes each kernel on its own shapes (ops.impl=auto) and mostly chooses megads'; here all of them are used.
    """
    found = load(OpsConfig(), lambda _message: None, cuda=True)
    if found.model is not Implementation.auto:
        return found
    return replace(found, model=Implementation.fused, optimizer=Implementation.fused)


def attention_asked(bench: Bench, position: Position) -> tuple[ModelConfig, AttentionWork]:
    """Model config and workload for which attention implementations are autotuned."""
    model = attention_model(bench.shapes, position)
    work = replace(
        model.attention_work(),
        bf16=bench.dtype is torch.bfloat16,
        cuda=bench.device.type == "cuda",
        impl=bench.kernels.model,
        seq_len=_TUNED_LENGTH,
        micro_batch_size=max(1, bench.shapes.attended // _TUNED_LENGTH),
        deterministic=True,
    )
    return model, work


def _chosen_attention(bench: Bench) -> dict[bool, AttentionKind]:
    """Autotuned attention implementations, keyed by whether ALiBi is used; all ranks use rank 0's choice."""
    if bench.device.type == "cuda":
        import torch._dynamo.config as dynamo  # imported late: only GPUs need the compiler

        dynamo.recompile_limit = _RECOMPILED
    grid = build_grid(_replicas(), dist.get_rank(), dist.get_world_size())
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for position in (Position.learned, Position.alibi):
            tuned = autotune_attention(*attention_asked(bench, position), grid, bench.device, Path(folder))
            found[position is Position.alibi] = tuned.kind
    return found


def _replicas(recompute: Recompute = Recompute.none) -> ParallelConfig:
    """Plain data parallelism over all ranks, without ZeRO."""
    return ParallelConfig(dp=dist.get_world_size(), zero_stage=0, recompute=recompute)


def measured_gpu(
    bench: Bench,
    gpu: Gpu,
    links: Mapping[str, Any],
    trials: Sequence[Trial] = GPU_TRIALS,
    launches: Sequence[Trial] = LAUNCH_TRIALS,
) -> dict[str, Any]:
    """Measures the attributes of a device; link attributes that were not measured come from a shipped device, `like`.

    Args:
        bench: bench of this rank; its attention implementation is chosen here.
        gpu: properties of the GPU.
        links: link attributes measured between ranks.
        trials: models that keep the GPU busy.
        launches: models that are bound by kernel launches on the host.
    """
    ranks = dist.get_world_size()
    with Progress("autotuning attention"):
        bench = replace(bench, attention=_chosen_attention(bench))
    with Progress("measuring GEMMs"):
        products = measured_products(bench)
    with Progress("measuring attention"):
        plain, alibi = (measured_attention(bench, position) for position in (Position.learned, Position.alibi))
    best = max(rate for *_, rate in products["products"])
    sheet = data_sheet_tflops(gpu.name) if bench.dtype is torch.bfloat16 else None
    peak = max(best, sheet or best)
    copied, kernel_s = copied_bytes_per_s(bench) / 1e9, smallest_s(bench)
    found = {
        "name": f"{gpu.name} x {ranks}",
        **_links(gpu.name, links, copied, kernel_s),
        "peak_tflops": peak,
        **({"fp32_tflops": best} if bench.dtype is torch.float32 else {}),
        "memory_gib": round(gpu.memory_bytes / 2**30, 2),
        "memory_gigabytes_per_s": round(copied, 3),
        "memory_efficiency": 1.0,
        "processors": gpu.processors,
        "host_gigabytes_per_s": round(host_bytes_per_s(bench) / 1e9, 3),
        "matmul_efficiency": round(best / peak, 9),
        "attention_efficiency": round(min(1.0, max(rate for _, *rates in plain for rate in rates) / peak), 9),
        "kernel_us": round(1e6 * kernel_s, 3),
        "attention_rates": plain,
        "alibi_attention_rates": alibi,
        **products,
    }
    device, width = device_from(found, "gpu"), bench.dtype.itemsize
    busy, waiting = _trained(trials, bench), _trained(launches, bench)
    found |= pass_costs(busy, device, width, waiting)
    again = {mode: _trained(launches[-1:], bench, mode)[0] for mode in (Recompute.selective, Recompute.full)}
    return found | {"layout_costs": launches_again(waiting[-1], again)}


def _links(gpu: str, measured: Mapping[str, Any], copied: float, kernel_s: float) -> dict[str, Any]:
    """Link attributes: measured, else of the shipped device of this name, else derived from the GPU's own memory."""
    like = shipped_device(gpu)
    known: dict[str, Any] = {} if like is None else {"like": like}
    if measured:
        return known | {key: value for key, value in measured.items() if like is None or key in _OF_NODE}
    if known:
        return known | {"collectives": []}
    return {
        "ranks_per_node": 1,
        "node_gigabytes_per_s": copied,
        "nic_gigabytes_per_s": copied,
        "node_latency_us": round(1e6 * kernel_s, 2),
        "nic_latency_us": round(1e6 * kernel_s, 2),
        "collectives": [],
    }


def _trained(trials: Sequence[Trial], bench: Bench, recompute: Recompute = Recompute.none) -> list[Trained]:
    """Trains each model once, with plain data parallelism."""
    found = []
    for number, trial in enumerate(trials, 1):
        with Progress(f"training model {number} of {len(trials)}"):
            found += trained([trial], bench, {PLAIN: _replicas(recompute)}, rounds=1)[PLAIN]
    return found
