#!/usr/bin/env python3
"""Checks every kernel against fp64 on this device, then times it against torch eager, apex, torch.compile and a copy.

    python -m scripts.bench.gpu_kernels [--device cuda] [--dtype bf16] [--compiled] [--append bench.jsonl]
    python -m scripts.bench.gpu_kernels --sanitizer memcheck|racecheck|synccheck
    ncu --profile-from-start off --set full python -m scripts.bench.gpu_kernels --profiled --only RMSNorm

With --device cpu the CPU kernels run on small tensors, so that a machine without a GPU can check this file. --compiled
times only torch.compile's side, which takes longer than all others. Each kernel's line is appended as soon as it is
measured. Quantization to FP8 is compared with torch's operators bit for bit. --sanitizer runs all kernels once on small
tensors under compute-sanitizer; every tensor is a separate allocation then, because torch's caching allocator would
hide small out-of-bounds accesses. Without that tool the kernels run by themselves. Exit 1: a kernel's error is more
than twice that of torch's operators in the same dtype, or a finding.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch

from megads.ops import compiler
from megads.ops.apex import ApexState, find_apex
from megads.ops.config import FUSED, TORCH, Implementation, Kernels, OpsConfig
from megads.ops.norm import layer_norm, rms_norm
from megads.ops.resolve import load
from scripts.bench.device_clock import copy_bandwidth, median_seconds
from scripts.bench.gpu_table import Append, Line, add_line_options, appender
from scripts.bench.operators import (
    DTYPES,
    EPS,
    GPU,
    SMALL,
    Function,
    Operator,
    Quantization,
    errors,
    operators,
    quantizations,
    results,
)

APEX = Kernels(Implementation.apex, Implementation.apex)
SANITIZER = "compute-sanitizer"
SANITIZERS = ("memcheck", "racecheck", "synccheck")


def timings(operator: Operator, function: Function, device: str, rounds: int) -> Line:
    """Microseconds of forward without a graph, and of backward alone if it can be repeated (`moved` is not 0)."""
    leaves = [x.detach().requires_grad_() for x in operator.inputs]
    with torch.no_grad():
        found = {"fwd_us": median_seconds(lambda: function(*leaves), device, rounds) * 1e6}
    if not operator.moved[1]:
        return found
    out = function(*leaves)
    grad = torch.randn_like(out)

    def back() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return found | {"bwd_us": median_seconds(back, device, rounds) * 1e6}


def run_once(device: str) -> None:
    """Runs every kernel of megads forward and backward, on small tensors of every dtype."""
    for dtype in DTYPES.values():
        for operator in operators(SMALL, dtype, device):
            found = results(operator, FUSED, dtype)
            print(f"{operator.name}, {dtype}: sums {[x.double().sum().item() for x in found]}", flush=True)
        for quantization in quantizations(SMALL, dtype, device):
            sums = [found.values.double().sum().item() for found in quantization.function(FUSED, quantization.x)]
            print(f"{quantization.name}, {dtype}: sums {sums}", flush=True)


def quantization_line(quantization: Quantization, small: Quantization, device: str, rounds: int) -> Line:
    """Returns the result line of a quantization; `small` has odd sizes, and is checked only."""
    calls = {"ours": FUSED, "eager": TORCH}

    def timed(kernels: Kernels) -> float:
        return median_seconds(lambda: quantization.function(kernels, quantization.x), device, rounds) * 1e6

    exact = quantization.is_exact() and small.is_exact()
    return {
        "kernel": quantization.name,
        "moved_bytes": [quantization.moved_bytes, 0],
        "error": 0.0 if exact else float("inf"),
        "error_ratio": 0.0 if exact else float("inf"),
        "sides": {side: {"fwd_us": timed(kernels)} for side, kernels in calls.items()},
    }


def passes_of(operator: Operator) -> Callable[[], object]:
    """Returns a function that runs one kernel of megads forward and backward."""
    leaves = [x.detach().requires_grad_() for x in operator.inputs]
    grad = torch.randn_like(operator.function(FUSED, *leaves))
    return lambda: torch.autograd.grad(operator.function(FUSED, *leaves), leaves, grad)


def run_profiled(call: Callable[[], object], *, cuda: bool) -> None:
    """Runs a function between profiler marks, after one warmup call."""
    call()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
    call()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def findings(output: str) -> str:
    """Returns compute-sanitizer's summary and first finding; empty without a summary."""
    told = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    summary = next((line for line in reversed(told) if re.search(r"(ERROR|RACECHECK) SUMMARY", line)), "")
    first = next((line for line in told if re.match(r"(Invalid|Error|Barrier|Race|Program hit|.*[Hh]azard)", line)), "")
    return "; first: ".join(text for text in (summary, first) if text)


def sanitized(tool: str, device: str, append: Append) -> int:
    """Runs this module with --once under a tool of compute-sanitizer; returns the exit code."""
    path = shutil.which(SANITIZER) if device == "cuda" else None
    options = [
        "--tool",
        tool,
        "--error-exitcode",
        "86",
        "--print-limit",
        "20",
        "--target-processes",
        "application-only",
    ]
    kernels = [sys.executable, "-m", "scripts.bench.gpu_kernels", "--once", "--device", device]
    uncached = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [path, *options, *kernels] if path else kernels
    done = subprocess.run(command, env=uncached, capture_output=True, text=True, check=False)
    print(done.stdout[-20000:], done.stderr[-8000:])
    found = findings(done.stdout) if path else f"{SANITIZER} is not on the path; the kernels ran without it"
    verdict = f"{found or 'no summary'}{f', exit code {done.returncode}' if done.returncode else ''}"
    append({"name": f"sanitizer, {tool}", "verdict": verdict})
    print(verdict)
    return int(done.returncode != 0)


def sides_of(operator: Operator, compiled: bool) -> dict[str, Function]:
    """Returns the sides that are timed; NVIDIA apex has norms."""
    eager = operator.using(TORCH)
    if compiled:
        # A cache shared by all cases would be full after the eighth, and the rest would run eagerly.
        torch.compiler.reset()
        return {"compiled": compiler.compiled(eager)}
    sides = {"ours": operator.using(FUSED), "eager": eager}
    if find_apex().state is ApexState.present and operator.name == "LayerNorm":
        sides["apex"] = lambda x, weight, bias: layer_norm(x, weight, bias, EPS, APEX)
    if find_apex().state is ApexState.present and operator.name == "RMSNorm":
        sides["apex"] = lambda x, weight: rms_norm(x, weight, EPS, APEX)
    return sides


def main() -> int:
    """Checks and times the kernels, and appends the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", help="only the kernel of this name")
    parser.add_argument("--compiled", action="store_true", help="time only torch.compile's side")
    parser.add_argument("--once", action="store_true", help="run megads' kernels once on small tensors")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="the same under compute-sanitizer")
    parser.add_argument("--profiled", action="store_true", help="run --only once on large tensors; for ncu")
    args = parser.parse_args()
    device, cuda, append = args.device, args.device == "cuda", appender(args, "gpu_kernels")
    if args.sanitizer:
        return sanitized(args.sanitizer, device, appender(args, "gpu_sanitizer"))
    load(OpsConfig(Implementation.fused), print, cuda=cuda)
    sizes, dtype = GPU if cuda else SMALL, DTYPES[args.dtype]
    if args.once:
        run_once(device)
        return 0
    chosen = [operator for operator in operators(sizes, dtype, device) if args.only in (None, operator.name)]
    rounded = [found for found in quantizations(sizes, dtype, device) if args.only in (None, found.name)]
    if args.profiled:
        run_profiled(
            *map(passes_of, chosen), *(partial(found.function, FUSED, found.x) for found in rounded), cuda=cuda
        )
        return 0
    bandwidth = copy_bandwidth(device, args.rounds, 2**30 if cuda else 2**20)
    small, wrong = {operator.name: operator for operator in operators(SMALL, dtype, device)}, []
    for operator in chosen:
        line: Line = {"kernel": operator.name, "dtype": args.dtype, "copy_bytes_per_s": bandwidth}
        line["moved_bytes"] = [moved * dtype.itemsize for moved in operator.moved]
        if not args.compiled:
            (_, of_small), (relative, ratio) = errors(small[operator.name]), errors(operator)
            line |= {"error": relative, "error_ratio": max(of_small, ratio)}
            wrong += [operator.name] if not (of_small <= 2 and ratio <= 2) else []
        sides = sides_of(operator, args.compiled)
        line["sides"] = {side: timings(operator, function, device, args.rounds) for side, function in sides.items()}
        append(line)
        took = {side: [round(taken, 1) for taken in times.values()] for side, times in line["sides"].items()}
        print(f"{operator.name}: microseconds forward and backward {took}", flush=True)
    small_ones = {found.name: found for found in quantizations(SMALL, dtype, device)}
    for quantization in [] if args.compiled else rounded:
        line = {"dtype": args.dtype, "copy_bytes_per_s": bandwidth}
        line |= quantization_line(quantization, small_ones[quantization.name], device, args.rounds)
        wrong += [quantization.name] if line["error"] else []
        append(line)
        print(f"{quantization.name}: microseconds {line['sides']}", flush=True)
    if wrong:
        print(f"gpu_kernels: errors of more than twice torch's: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
