#!/usr/bin/env python3
"""Checks every kernel against fp64 on this device, then times it against torch eager, apex, torch.compile and a copy.

    python -m scripts.bench.gpu_kernels [--device cuda] [--dtype bf16] [--compiled] [--append bench.jsonl]

With --device cpu the CPU kernels run on small tensors, so that a machine without a GPU can check this file. --compiled
times only torch.compile's side, which takes longer than all others. Each kernel's line is appended as soon as it is
measured; `python -m scripts.bench.gpu_table` shows them. Exit 1: a kernel's error is more than twice that of torch's
operators in the same dtype.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megads.model.attention import alibi_slopes, rotary_tables
from megads.ops.activation import bias_gelu, gelu, swiglu
from megads.ops.apex import ApexState, find_apex
from megads.ops.config import FUSED, TORCH, Implementation, Kernels, OpsConfig
from megads.ops.dropout import DropoutMask, dropout, site_key, threshold_of
from megads.ops.norm import add_layer_norm, layer_norm, rms_norm
from megads.ops.resolve import load
from megads.ops.rotary import rotate
from megads.ops.softmax import masked_softmax
from megads.parallel.grid import single_rank_grid
from megads.parallel.loss import loss_in_place, vocab_parallel_token_losses
from scripts.bench.device_clock import copy_bandwidth, median_seconds
from scripts.bench.gpu_lines import Line, add_line_options, appender

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AXIS = single_rank_grid().tp
EPS = 1e-5

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases: rows and width of norms, width of the MLP, scores, logits, queries.

    Every tensor is more than twice the size of a GPU's L2 cache, so that repeated calls do not measure the cache.
    """

    rows: int = 16384
    width: int = 4096
    scores: tuple[int, int, int] = (4, 16, 2048)
    tokens: int = 4096
    vocabulary: int = 50304
    heads: tuple[int, int, int, int] = (16, 2048, 16, 128)


APEX = Kernels(Implementation.apex, Implementation.apex)
SMALL = Sizes(12, 40, (1, 3, 48), 7, 130, (2, 5, 3, 8))


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: name of the operator.
        function: takes the kernels and the inputs, in any floating dtype.
        inputs: leaves that get gradients.
        moved: minimum of elements read and written, forward and backward.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: list[Tensor]
    moved: tuple[int, int]

    def using(self, kernels: Kernels) -> Function:
        """Returns the operator as a function of its inputs only."""
        return partial(self.function, kernels)


def cases(sizes: Sizes, dtype: torch.dtype, device: str) -> list[Case]:
    """Returns all operators, with inputs drawn from one seed."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    rows, width, (batch, heads, length) = sizes.rows, sizes.width, sizes.scores
    x, weight, bias = draw(rows, width), draw(width), draw(width)
    count, seen = x.numel(), batch * heads * length * (length + 1) // 2
    slopes = alibi_slopes(heads).to(device)
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens), generator=generator, device=device)
    weights = torch.rand(labels.shape, generator=generator, device=device, dtype=torch.float64)
    tables = rotary_tables(torch.arange(sizes.heads[1], device=device), sizes.heads[3], 1e4, torch.float32)
    scores, query = draw(batch, heads, length, length), draw(*sizes.heads)
    logits = draw(1, sizes.tokens, sizes.vocabulary)

    def normed_sum(kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, added = add_layer_norm(x, residual, weight, bias, EPS, kernels)
        return out + added

    def turned(kernels: Kernels, x: Tensor) -> Tensor:
        wide = x.dtype == torch.float64
        cos, sin = (table.double() if wide else table for table in tables)
        return rotate(x, cos, sin, kernels)

    mask = DropoutMask(site_key(0, "dropout"), threshold_of(0.1), torch.zeros(1, dtype=torch.int64, device=device))

    def dropped(kernels: Kernels, x: Tensor, residual: Tensor) -> Tensor:
        return dropout(x[None], mask, None, residual[None], kernels).squeeze(0)

    def loss(kernels: Kernels, x: Tensor) -> Tensor:
        if kernels is FUSED:
            # The kernel writes the gradient over the logits, in the forward pass.
            logits = x.clone() if torch.is_grad_enabled() else x
            return loss_in_place(logits, labels, weights, sizes.vocabulary, AXIS)
        return (vocab_parallel_token_losses(x, labels, sizes.vocabulary, AXIS) * weights).sum()

    return [
        Case("ALiBi softmax", lambda kernels, x: masked_softmax(x, 0.1, slopes.to(x.dtype) if x.dtype == torch.float64
             else slopes, kernels=kernels), [scores], (seen + scores.numel(), 2 * seen + scores.numel())),
        Case("LayerNorm", lambda kernels, x, w, b: layer_norm(x, w, b, EPS, kernels), [x, weight, bias],
             (2 * count, 3 * count)),
        Case("RMSNorm", lambda kernels, x, w: rms_norm(x, w, EPS, kernels), [x, weight], (2 * count, 3 * count)),
        Case("residual + LayerNorm + sum", normed_sum, [x, draw(rows, width), weight, bias],
             (7 * count, 4 * count)),
        Case("GELU", lambda kernels, x: gelu(x, kernels), [x], (2 * count, 3 * count)),
        Case("bias GELU", lambda kernels, x, b: bias_gelu(x, b, kernels), [x, bias], (2 * count, 3 * count)),
        Case("SwiGLU", lambda kernels, x: swiglu(x, kernels), [x], (3 * count // 2, 5 * count // 2)),
        Case("dropout + residual", dropped, [x, draw(rows, width)], (3 * count, 2 * count)),
        Case("rotary", turned, [query], (2 * query.numel(), 2 * query.numel())),
        Case("cross entropy, no gradient", loss, [logits], (logits.numel(), 0)),
    ]  # fmt: skip


def results(case: Case, kernels: Kernels, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, with inputs in `dtype`."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in case.inputs]
    out = case.function(kernels, *leaves)
    generator = torch.Generator(out.device).manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, device=out.device)
    out.backward(grad.to(case.inputs[0].dtype).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@dataclass(frozen=True)
class Error:
    """Error of a kernel against fp64, the maximum over output and gradients.

    Attributes:
        relative: norm of the difference over the norm of the exact result.
        ratio: error relative to that of torch's operators in the same dtype.
    """

    relative: float = 0.0
    ratio: float = 0.0


def error(case: Case) -> Error:
    """Error of megads' kernel, in the dtype of the case's inputs."""
    dtype = case.inputs[0].dtype
    ours, eager = results(case, FUSED, dtype), results(case, TORCH, dtype)
    relative = ratio = 0.0
    for mine, theirs, exact in zip(ours, eager, results(case, TORCH, torch.float64), strict=True):
        if exact.numel() == 1:
            continue  # the error of a single number is random
        off, measure = ((found.double() - exact).norm().item() for found in (mine, theirs))
        found = off / measure if measure else (0.0 if off == 0 else float("inf"))
        # max() may ignore a NaN.
        ratio = found if not found <= ratio else ratio
        relative = max(relative, off / max(exact.norm().item(), 1e-300))
    return Error(relative, ratio)


def error_ratio(case: Case) -> float:
    """Error of megads' kernel over that of torch's operators in the same dtype, against fp64; the maximum."""
    return error(case).ratio


def timings(case: Case, function: Function, device: str, rounds: int) -> Line:
    """Microseconds of forward without a graph, and of backward alone if it can be repeated (`moved` is not 0)."""
    leaves = [x.detach().requires_grad_() for x in case.inputs]
    with torch.no_grad():
        found = {"fwd_us": median_seconds(lambda: function(*leaves), device, rounds) * 1e6}
    if not case.moved[1]:
        return found
    out = function(*leaves)
    grad = torch.randn_like(out)

    def back() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return found | {"bwd_us": median_seconds(back, device, rounds) * 1e6}


def run_once(device: str) -> int:
    """Runs every kernel of megads forward and backward, on small tensors of every dtype."""
    for dtype in DTYPES.values():
        for case in cases(SMALL, dtype, device):
            found = results(case, FUSED, dtype)
            print(f"{case.name}, {dtype}: sums {[x.double().sum().item() for x in found]}", flush=True)
    return 0


def run_profiled(case: Case) -> int:
    """Runs one kernel of megads forward and backward between profiler marks, after one warmup call."""
    leaves = [x.detach().requires_grad_() for x in case.inputs]
    out = case.function(FUSED, *leaves)
    grad = torch.randn_like(out)
    torch.autograd.grad(out, leaves, grad)
    cuda = out.is_cuda
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
    torch.autograd.grad(case.function(FUSED, *leaves), leaves, grad)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    return 0


def apex_norms() -> dict[str, Function]:
    """NVIDIA apex's norms, through megads' interface, by name of the case; empty without apex."""
    if find_apex().state is not ApexState.present:
        return {}
    return {
        "LayerNorm": lambda x, weight, bias: layer_norm(x, weight, bias, EPS, APEX),
        "RMSNorm": lambda x, weight: rms_norm(x, weight, EPS, APEX),
    }


def sides_of(case: Case, compiled: bool) -> dict[str, Function]:
    """Returns the sides that are timed."""
    eager = case.using(TORCH)
    if compiled:
        # A cache shared by all cases would be full after the eighth, and the rest would run eagerly.
        torch.compiler.reset()
        return {"compiled": torch.compile(eager, dynamic=False)}
    apex = apex_norms()
    sides = {"ours": case.using(FUSED), "eager": eager}
    return sides | ({"apex": apex[case.name]} if case.name in apex else {})


def main() -> int:
    """Checks and times the kernels, and appends the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_line_options(parser)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", help="only the kernel of this name")
    parser.add_argument("--compiled", action="store_true", help="time only torch.compile's side")
    parser.add_argument(
        "--once", action="store_true", help="run megads' kernels once on small tensors; for compute-sanitizer"
    )
    parser.add_argument("--profiled", action="store_true", help="run --only once on large tensors; for ncu")
    args = parser.parse_args()
    device, cuda, append = args.device, args.device == "cuda", appender(args, "gpu_kernels")
    load(OpsConfig(Implementation.fused), print, cuda=cuda)
    sizes, dtype = Sizes() if cuda else SMALL, DTYPES[args.dtype]
    if args.once:
        return run_once(device)
    if args.profiled:
        return run_profiled(next(case for case in cases(sizes, dtype, device) if case.name == args.only))
    bandwidth = copy_bandwidth(device, args.rounds, 2**30 if cuda else 2**20)
    small, wrong = {case.name: case for case in cases(SMALL, dtype, device)}, []
    for case in cases(sizes, dtype, device):
        if args.only not in (None, case.name):
            continue
        line: Line = {"kernel": case.name, "dtype": args.dtype, "copy_bytes_per_s": bandwidth}
        line["moved_bytes"] = [moved * dtype.itemsize for moved in case.moved]
        if not args.compiled:
            found = [error(small[case.name]), error(case)]
            line |= {"error": found[-1].relative, "error_ratio": max(e.ratio for e in found)}
            wrong += [case.name] if not all(e.ratio <= 2 for e in found) else []
        sides = sides_of(case, args.compiled)
        line["sides"] = {side: timings(case, function, device, args.rounds) for side, function in sides.items()}
        append(line)
        took = {side: [round(taken, 1) for taken in times.values()] for side, times in line["sides"].items()}
        print(f"{case.name}: microseconds forward and backward {took}", flush=True)
    if wrong:
        print(f"gpu_kernels: errors of more than twice torch's: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
