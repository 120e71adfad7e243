"""Measures the components of a training step on all ranks at once, and writes the device file for planning.

GEMMs, attention and copies are measured one by one (`operators`), the other costs of a pass by training models
(`passes`), and collectives between the ranks here. With GPUs, each rank has its own and NCCL connects them; otherwise
gloo does. All results are medians of rank 0, measured while every rank does the same.

A GPU is measured with the kernels and the attention implementation that a run would choose. Shapes are typical of
training on GPUs. Times are device times: while the GPU is busy the host runs ahead, so kernel launches count only where
they take longer than the launched kernels (`RankOperators.host`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import yaml

from megads.api import (
    AttentionKind,
    ConfigError,
    Implementation,
    Kernels,
    OpsConfig,
    Position,
    Progress,
    Recompute,
    atomic_writer,
    available_cores,
    available_memory,
    build_grid,
    child_environment,
    load,
    loopback_variables,
    rank_variables,
)
from megads.model.peak import data_sheet_tflops
from megads.ops.linear import linear
from megads.runtime import progress
from megads.runtime.environment import rank_numbers, threads_of_rank
from megads.runtime.process import bind_to_own_cores, disable_reduced_precision_sums, make_deterministic
from megads.tools.autotune.choice import autotune_attention
from megads.tools.plan.calibrate import operators, passes
from megads.tools.plan.calibrate.config import CalibrateConfig
from megads.tools.plan.calibrate.operators import Bench, RepeatedBench
from megads.tools.plan.calibrate.passes import GPU_TRIALS, LAUNCH_TRIALS, PLAIN, Trial, TrialTimes
from megads.tools.plan.devices import built_in_device_of, device_from, non_negative
from megads.tools.plan.operators import FP32

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


def gpu_kernels() -> Kernels:
    """megads' kernels if they are available, else torch's.

    A run autotunes each kernel on its own shapes (ops.impl=auto) and mostly chooses megads'; here all of them are used.
    """
    found = load(OpsConfig(), lambda _message: None, cuda=True)
    if found.model is not Implementation.auto:
        return found
    return replace(found, model=Implementation.fused, optimizer=Implementation.fused)


def _chosen_attention(bench: Bench) -> dict[bool, AttentionKind]:
    """Autotuned attention implementations, keyed by whether ALiBi is used; all ranks use rank 0's choice."""
    cuda = bench.device.type == "cuda"
    if cuda:
        import torch._dynamo.config as dynamo  # imported late: only GPUs need the compiler

        dynamo.recompile_limit = _RECOMPILED
    grid = build_grid(passes.replicas(dist.get_world_size()), dist.get_rank(), dist.get_world_size())
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for position in (Position.learned, Position.alibi):
            model = operators.attention_model(bench.shapes, position)
            work = replace(
                model.attention_work(),
                bf16=bench.dtype is torch.bfloat16,
                cuda=cuda,
                impl=bench.kernels.model,
                seq_len=_TUNED_LENGTH,
                micro_batch_size=max(1, bench.shapes.attended // _TUNED_LENGTH),
                deterministic=True,
            )
            found[position is Position.alibi] = autotune_attention(model, work, grid, bench.device, Path(folder)).kind
    return found


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
        products = operators.measured_gemms(bench)
    with Progress("measuring attention"):
        plain, alibi = (
            operators.measured_attention(bench, position) for position in (Position.learned, Position.alibi)
        )
    best = max(rate for *_, rate in products["products"])
    sheet = data_sheet_tflops(gpu.name) if bench.dtype is torch.bfloat16 else None
    peak = max(best, sheet or best)
    copied, kernel_s = operators.copied_bytes_per_s(bench) / 1e9, operators.smallest_s(bench)
    found = {
        "name": f"{gpu.name} x {ranks}",
        **_links(gpu.name, links, copied, kernel_s),
        "peak_tflops": peak,
        **({"fp32_tflops": best} if bench.dtype is torch.float32 else {}),
        "memory_gib": round(gpu.memory_bytes / 2**30, 2),
        "memory_gigabytes_per_s": round(copied, 3),
        "memory_efficiency": 1.0,
        "processors": gpu.processors,
        "host_gigabytes_per_s": round(operators.host_bytes_per_s(bench) / 1e9, 3),
        "matmul_efficiency": round(best / peak, 9),
        "attention_efficiency": round(min(1.0, max(rate for _, *rates in plain for rate in rates) / peak), 9),
        "kernel_us": round(1e6 * kernel_s, 3),
        "attention_rates": plain,
        "alibi_attention_rates": alibi,
        **products,
    }
    device, width = device_from(found, "gpu"), bench.dtype.itemsize
    busy, waiting = _trained(trials, bench), _trained(launches, bench)
    found |= passes.pass_costs(busy, device, width, waiting)
    again = {mode: _trained(launches[-1:], bench, mode)[0] for mode in (Recompute.selective, Recompute.full)}
    return found | {"layout_costs": passes.launches_again(waiting[-1], again)}


def _links(gpu: str, measured: Mapping[str, Any], copied: float, kernel_s: float) -> dict[str, Any]:
    """Link attributes: measured, else of the shipped device of this name, else derived from the GPU's own memory."""
    like = built_in_device_of(gpu)
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


def _trained(trials: Sequence[Trial], bench: Bench, recompute: Recompute = Recompute.none) -> list[TrialTimes]:
    """Trains each model once, with plain data parallelism."""
    found = []
    for number, trial in enumerate(trials, 1):
        with Progress(f"training model {number} of {len(trials)}"):
            found += passes.time_trials(
                [trial], bench, {PLAIN: passes.replicas(dist.get_world_size(), recompute)}, rounds=1
            )[PLAIN]
    return found


_SIZES = (2**14, 2**18, 2**21, 2**24)
"""Buffer sizes of the measured collectives, in bytes."""
_TIMEOUT_S = 120.0
_OTHERS_CORES = 0.03
"""Share of all cores in use by other programs above which a warning is printed."""
_UNSTEADY = 0.1
"""Relative difference between two measurements above which a warning is printed: plans should be within 10%."""


def calibrate(config: CalibrateConfig) -> dict[str, Any]:
    """Measures this machine and returns its device attributes, as read by `megads.tools.plan.devices.read_device`.

    Raises:
        ConfigError: There are fewer GPUs than ranks, or a rank failed.
    """
    gpus = torch.cuda.device_count()
    if 0 < gpus < config.ranks:
        raise ConfigError(f"ranks = {config.ranks}, but this machine has {gpus} GPUs: lower ranks")
    threads = threads_of_rank(config.ranks, config.threads)
    before, begin = _processor_times(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.yaml"
        run_on_ranks(config.ranks, threads, _rank, config, threads, str(result))
        found: dict[str, Any] = yaml.safe_load(result.read_text(encoding="utf-8"))
    if gpus:  # other programs on the cores hardly affect GPU measurements
        return found
    busy_s, own_s = (after - earlier for after, earlier in zip(_processor_times(), before, strict=True))
    others = (busy_s - own_s) / (time.monotonic() - begin)
    if others > _OTHERS_CORES * available_cores():
        print(
            f"warning: other programs used {others:.1f} of {available_cores()} cores during the measurement, so plans "
            "from this file will be too slow: calibrate again on an idle machine",
            file=sys.stderr,
        )
    return found


def _processor_times() -> tuple[float, float]:
    """Busy CPU seconds of the machine so far, and of this process with its children that have ended."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy_s = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - getattr(machine, "guest", 0.0)
    return busy_s, own.user + own.system + own.children_user + own.children_system


def run_on_ranks(ranks: int, threads: int, work: Callable[..., None], *arguments: Any) -> None:
    """Runs work(*arguments) in local processes started like those of a run, in one process group.

    Args:
        ranks: number of processes.
        threads: CPU threads per process.
        work: function at module level (it is pickled).
        arguments: picklable arguments.

    Raises:
        ConfigError: A process failed or was killed.
    """
    context = multiprocessing.get_context("spawn")
    variables = rank_variables(threads, cuda=torch.cuda.is_available()) | loopback_variables()
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with tempfile.TemporaryDirectory() as folder, child_environment(variables):
        processes = []
        for rank in range(ranks):
            with child_environment(rank_numbers(rank, rank, ranks, ranks)):
                arguments_of_rank = (rank, ranks, threads, f"file://{folder}/store", work, arguments)
                processes.append(context.Process(target=_enter, args=arguments_of_rank))
                processes[-1].start()
        for process in processes:
            process.join()
    if code := next((process.exitcode for process in processes if process.exitcode), 0):
        how = f"ended with exit code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        raise ConfigError(f"a rank {how}; see above")


def _enter(rank: int, ranks: int, threads: int, store: str, work: Callable[..., None], arguments: Any) -> None:
    """Sets up one rank (cores, threads, process group) and runs the work; discards stdout, where DeepSpeed prints."""
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 1)
    if ranks * threads <= available_cores():
        bind_to_own_cores(rank, ranks)
    torch.set_num_threads(threads)
    cuda = torch.cuda.is_available()
    if cuda:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        disable_reduced_precision_sums()
        make_deterministic(device)  # as runs do
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    progress.configure(quiet=rank > 0, plain_on_stdout=False)
    work(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    # Threads of gloo groups sometimes abort an interpreter that exits normally, which would lose minutes of measuring.
    sys.stderr.flush()
    os._exit(0)


def write(config: CalibrateConfig, found: dict[str, Any]) -> Path:
    """Writes the device file and returns its path.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = Path(config.out)
    try:
        with atomic_writer(path) as file:
            file.write(yaml.safe_dump(found, sort_keys=False).encode())
    except OSError as error:
        raise ConfigError(f"out = {path} cannot be written ({error.strerror}): choose another file") from error
    return path


def _rank(config: CalibrateConfig, threads: int, result: str) -> None:
    """Measurements of one rank; rank 0 writes the results."""
    dtype = torch.float32 if config.fp32 else torch.bfloat16
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_rank())
        with Progress("loading kernels"):
            kernels = gpu_kernels()
        bench = Bench(device, dtype, kernels, config.seconds, operators.GPU_SHAPES)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        gpu = Gpu(torch.cuda.get_device_name(device), processors, torch.cuda.mem_get_info(device)[1])
        found = measured_gpu(bench, gpu, _measured_links(bench) | _hidden_cost(bench))
    else:
        kernels = load(OpsConfig(), lambda _message: None, cuda=False)
        moment = RepeatedBench(torch.device("cpu"), dtype, kernels, config.seconds, operators.CPU_SHAPES)
        found = _measured_cpu(config, moment, threads)
    if dist.get_rank() == 0:
        Path(result).write_text(yaml.safe_dump(found, sort_keys=False), encoding="utf-8")


def _measured_cpu(config: CalibrateConfig, bench: RepeatedBench, threads: int) -> dict[str, Any]:
    """Measures the device attributes of a machine without GPUs."""
    with Progress("measuring GEMMs, attention and copies"):
        _operators_of_cpu(config, bench, threads)
    parallel, width = passes.layouts(config.ranks), bench.dtype.itemsize
    with Progress("training small models"):
        trials = passes.time_trials(passes.TRIALS, bench, {PLAIN: parallel[PLAIN]})[PLAIN]
    with Progress("measuring GEMMs, attention and copies again"):
        again = bench.again()
        found = _operators_of_cpu(config, again, threads) | _hidden_cost(bench)
    if dist.get_rank() == 0:
        warn_of_drift(again.slower)
    found |= passes.pass_costs(trials, device_from(found, "cpu"), width)
    with Progress("training small models in several layouts"):
        in_layouts = passes.time_trials(passes.IN_LAYOUTS, bench, parallel)
    return found | {"layout_costs": passes.layout_costs(in_layouts, device_from(found, "cpu"), width)}


def warn_of_drift(slower: Sequence[float]) -> None:
    """Warns if operators took longer at one moment than at another.

    Args:
        slower: relative increase of each operator's time at the slower moment.
    """
    if (middle := median(slower)) > _UNSTEADY:
        print(
            f"warning: the same operators took {middle:.0%} longer at one moment than at another (median of "
            f"{len(slower)}): the speed of this machine's cores varies, as in a VM on a shared host, and plans from "
            "this file may be off by as much: calibrate again when the machine is less busy",
            file=sys.stderr,
        )


def _operators_of_cpu(config: CalibrateConfig, bench: Bench, threads: int) -> dict[str, Any]:
    """Measures all device attributes except the costs of passes."""
    products = operators.measured_gemms(bench)
    attention = operators.measured_attention(bench)
    peak = max(rate for *_, rate in products["products"])
    links = _measured_links(bench)
    smallest, copied = operators.smallest_s(bench), operators.copied_bytes_per_s(bench) / 1e9
    if not links:
        sides = {"gigabytes_per_s": copied, "latency_us": smallest * 1e6}
        links = {f"{of}_{what}": value for what, value in sides.items() for of in ("node", "nic")}
        links |= {"ranks_per_node": config.ranks, "collectives": []}
    return {
        "name": f"cpu x {config.ranks}",
        "on_cpu": True,
        "peak_tflops": peak,
        **({"fp32_tflops": peak} if config.fp32 else {}),
        "memory_gib": round((available_memory() // config.ranks) / 2**30, 2),
        "memory_gigabytes_per_s": round(copied, 3),
        "memory_efficiency": 1.0,
        "processors": threads,
        "link_efficiency": 1.0,
        "nic_efficiency": 1.0,
        **links,
        "host_gigabytes_per_s": round(copied / 2, 3),
        "matmul_efficiency": 1.0,
        "attention_efficiency": round(min(1.0, max(rate for _, rate, _ in attention) / peak), 4),
        "kernel_us": round(1e6 * smallest, 2),
        "attention_rates": attention,
        **products,
    }


def _measured_links(bench: Bench) -> dict[str, Any]:
    """Measured link attributes; empty for one rank."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return {}
    collectives = _collectives(bench)
    *_, (latency_us, link) = [rest[1:] for name, *rest in collectives if name == "all_reduce"]
    return {
        "ranks_per_node": ranks,
        "node_gigabytes_per_s": link,
        "nic_gigabytes_per_s": link,
        "link_efficiency": 1.0,
        "nic_efficiency": 1.0,
        "node_latency_us": latency_us,
        "nic_latency_us": latency_us,
        "collectives": collectives,
    }


def _collectives(bench: Bench) -> list[list[Any]]:
    """Rows of collective name, bytes per element, latency per ring step in microseconds, and bus bandwidth in GB/s."""
    ranks, found = dist.get_world_size(), []
    for dtype in (torch.bfloat16, torch.float32):
        width = dtype.itemsize
        for name, around in (("all_gather", 1), ("reduce_scatter", 1), ("message", 1), ("all_reduce", 2)):
            features, times = [], []
            for size in _SIZES:
                call = _collective(name, size // width, dtype, bench.device)
                steps = 1 if name == "message" else around * (ranks - 1)
                share = 1.0 if name == "message" else around * (ranks - 1) / ranks
                features.append([steps, share * size])
                times.append(bench.time_s(call) / (2 if name == "message" else 1))
            measured = np.array(times)
            latency, byte = non_negative(np.array(features), measured, measured)
            # Bounds: at 0.1 us per step and 1 TB/s the cost is negligible.
            found.append([name, width, round(max(1e6 * latency, 0.1), 2), round(1e-9 / max(byte, 1e-12), 4)])
    return found


def _collective(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Returns a function that calls a collective on a buffer of `elements`; "message" is a p2p round trip."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole, own = torch.zeros(elements, dtype=dtype, device=device), torch.zeros(elements // ranks, dtype=dtype)
    own = own.to(device)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, own)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(own, whole)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)

    def round_trip() -> None:
        if rank == 0:
            dist.send(whole, 1)
            dist.recv(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)
            dist.send(whole, 0)

    return round_trip


def _hidden_cost(bench: Bench) -> dict[str, float]:
    """How much an all-reduce slows down concurrent GEMMs, as a share of its own time; empty for one rank."""
    if dist.get_world_size() == 1:
        return {}
    whole = torch.zeros(_SIZES[-1] // FP32, device=bench.device)
    x_mi, w_oi = (torch.randn(512, 512, device=bench.device).to(bench.dtype) for _ in range(2))
    alone_s = bench.time_s(lambda: dist.all_reduce(whole))
    count = max(1, int(1.5 * alone_s / bench.time_s(lambda: linear(x_mi, w_oi, None, bench.kernels))))
    counts = torch.tensor([count], device=bench.device)
    dist.broadcast(counts, 0)
    count = int(counts.item())

    def work() -> None:
        for _ in range(count):
            linear(x_mi, w_oi, None, bench.kernels)

    def both() -> None:
        handle = dist.all_reduce(whole, async_op=True)
        work()
        handle.wait()

    longer_s = bench.time_s(both) - bench.time_s(work)
    return {"hidden_cost": round(min(1.0, max(0.0, longer_s / alone_s)), 3)}
