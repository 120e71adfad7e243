"""Peak memory as torch's CPU allocator counts it: every allocation, including those inside kernels and gloo.

The profiler reports each allocation and free, except frees on gloo's own threads, so the total would grow. Therefore
every collective waits a moment until gloo has released its tensors; and a later allocation at an address that overlaps
a block proves that the block was freed.
"""

from __future__ import annotations

import ctypes
import gc
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from megads.engine import activation_offload
from megads.engine.activation_offload import HostBuffers
from megads.model.attention import causal_bias
from megads.ops import processor
from megads.ops.config import Implementation
from megads.ops.resolve import assumes_fused_kernels
from megads.parallel.config import ParallelConfig
from megads.tools.plan import memory_timeline
from megads.tools.plan.memory import MemoryPlan, memory_plan
from megads.tools.plan.workload import Workload
from tests.parity import Scenario, build_engine, step_batches

COLLECTIVES = (
    *("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast"),
    *("send", "recv", "isend", "irecv", "all_to_all_single"),
)
PRODUCTS = (
    *(torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.bmm.default),
    *(torch.ops.aten.addmm.default, torch.ops.aten.addmm.out, torch.ops.aten.addmm_.default),
)
PAUSE_S = 1e-3
M_MMAP_THRESHOLD = -3  # malloc.h


@dataclass
class Ledger:
    """Live blocks, by address."""

    sizes: dict[int, int] = field(default_factory=dict)
    addresses: list[int] = field(default_factory=list)
    total: int = 0
    peak: int = 0

    def allocate(self, address: int, size: int) -> None:
        place = bisect_left(self.addresses, address)
        if place and self.addresses[place - 1] + self.sizes[self.addresses[place - 1]] > address:
            self.free(self.addresses[place - 1])
            place -= 1
        while place < len(self.addresses) and self.addresses[place] < address + size:
            self.free(self.addresses[place])
        self.sizes[address] = size
        insort(self.addresses, address)
        self.total += size
        self.peak = max(self.peak, self.total)

    def free(self, address: int) -> None:
        if address in self.sizes:
            self.total -= self.sizes.pop(address)
            self.addresses.pop(bisect_left(self.addresses, address))


def allocator_ledger(run: Callable[[], None]) -> Ledger:
    """Allocations inside `run`: `total` is live at its end, `peak` is the maximum."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = []
    stack = list(record.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size))
    ledger = Ledger()
    for _, address, size in sorted(events):
        if size > 0:
            ledger.allocate(address, size)
        else:
            ledger.free(address)
    return ledger


class PatientWork:
    """An asynchronous collective whose wait includes the same pause."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        time.sleep(PAUSE_S)


@contextmanager
def patient_collectives() -> Iterator[None]:
    """Gives gloo's threads time to drop their references while the caller still has its own."""
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def patient(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            time.sleep(PAUSE_S)
            return None if result is None else PatientWork(result)

        return call

    for name, original in originals.items():
        setattr(dist, name, patient(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class ZeroProducts(TorchDispatchMode):
    """bf16 GEMMs that return zeros: outputs are allocated as torch allocates them, but not computed.

    torch's GEMMs take minutes on processors for which it has only plain loops; memory does not depend on values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        last = args[-1] if args else None
        if func not in PRODUCTS or not isinstance(last, Tensor) or last.dtype is not torch.bfloat16:
            return func(*args, **(kwargs or {}))
        left, right = args[-2:]
        out = (kwargs or {}).get("out")
        if out is None and func is torch.ops.aten.addmm_.default:
            out = args[0]
        if out is not None:
            return out.zero_()
        return left.new_zeros(*left.shape[:-1], right.shape[-1])


@contextmanager
def with_bf16_gemms() -> Iterator[None]:
    """Runs as on a processor for which PyTorch has bf16 GEMMs, as the plan of ops.impl=torch assumes."""
    loops = processor.torch_loops_over_bf16
    if not loops():
        yield
        return
    processor.torch_loops_over_bf16 = lambda: False
    try:
        with ZeroProducts():
            yield
    finally:
        processor.torch_loops_over_bf16 = loops


def train_steps(scenario: Scenario, parallel: ParallelConfig, steps: int = 2) -> None:
    """Builds the engine and trains: two steps, as the first starts without what earlier ones left in the pipeline."""
    causal_bias.__wrapped__.cache_clear()  # type: ignore[attr-defined]
    engine = build_engine(scenario, parallel)
    with with_bf16_gemms() if scenario.ops.impl is Implementation.torch else nullcontext():
        for step in range(steps):
            engine.step(step_batches(scenario, step, engine.grid.dp.rank, parallel.dp), scenario.lr)
    causal_bias.__wrapped__.cache_clear()  # type: ignore[attr-defined]


@contextmanager
def another_host() -> Iterator[None]:
    """Offloads to memory that torch's allocator does not know, as a GPU's allocator does not know the host's; tensors
    leave however small they are."""
    inner, smallest = HostBuffers._allocate, activation_offload.SMALLEST_OFFLOADED_BYTES
    HostBuffers._allocate = lambda _, size: torch.from_numpy(numpy.empty(size, numpy.uint8))  # type: ignore[method-assign]
    activation_offload.SMALLEST_OFFLOADED_BYTES = 1
    try:
        yield
    finally:
        HostBuffers._allocate = inner  # type: ignore[method-assign]
        activation_offload.SMALLEST_OFFLOADED_BYTES = smallest


def measured_peaks(cases: list[tuple[Scenario, ParallelConfig]]) -> list[int]:
    """This rank's peak memory in each case, one after the other."""
    with patient_collectives(), another_host():
        return [allocator_ledger(lambda s=scenario, p=parallel: train_steps(s, p)).peak for scenario, parallel in cases]


def resident_growth(first: Scenario, scenario: Scenario, parallel: ParallelConfig) -> int:
    """Bytes by which the kernel's high-water mark of this process (VmHWM) exceeds what was resident before.

    Args:
        first: trained before, so that code and libraries that load at first use are loaded.
        scenario: the scenario to measure.
        parallel: the layout.
    """
    # Every large block is mapped from the kernel and returned to it, so no holes in the heap count as resident.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16) == 1
    train_steps(first, parallel)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    train_steps(scenario, parallel)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def planned(scenario: Scenario, parallel: ParallelConfig) -> MemoryPlan:
    """The memory plan of what `train_steps` runs."""
    workload = Workload(
        seq_len=scenario.seq_len,
        micro_batch_size=scenario.micro_batch_size,
        micro_batches=scenario.global_batch_size // scenario.micro_batch_size // parallel.dp,
        weight_bytes=scenario.dtype.itemsize,
        document_mask=scenario.documents,
        fused=assumes_fused_kernels(scenario.ops, cuda=False),
        loss_chunk=scenario.ops.loss_chunk,
        mlp_chunk=scenario.ops.mlp_chunk,
        optim=scenario.optim,
    )
    with mock.patch.object(memory_timeline, "SMALLEST_OFFLOADED_BYTES", 1):
        return memory_plan(scenario.model, parallel, workload)
