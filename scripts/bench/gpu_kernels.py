#!/usr/bin/env python3
"""Holds every kernel to fp64 on the device at hand, then times it beside torch eager, torch.compile and a copy.

    python -m scripts.bench.gpu_kernels [--device cuda] [--dtype bf16] [--no-compile] [--append bench.jsonl]

With --device cpu the CPU's kernels run on small tensors: so a machine without a GPU checks that this file works. The
last thing printed is a table; `of copy` is the share of the measured copy bandwidth that the bytes which must be moved
come to. Exit 1: a kernel's error is more than twice that of torch's operators in the same dtype.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megads.model.alibi import alibi_slopes
from megads.model.rotary import rotary_tables
from megads.ops.bias_gelu import bias_gelu
from megads.ops.choice import load
from megads.ops.config import Implementation, OpsConfig
from megads.ops.dropout import apply_mask
from megads.ops.gelu import gelu
from megads.ops.norm import add_layer_norm, layer_norm, rms_norm
from megads.ops.rotary import rotate
from megads.ops.softmax import masked_softmax
from megads.ops.swiglu import swiglu
from megads.parallel.cross_entropy import loss_in_place, vocab_parallel_token_losses
from megads.parallel.grid import single_rank_grid
from megads.runtime.metrics import JsonLinesWriter

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
AXIS = single_rank_grid().tp
EPS = 1e-5

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Sizes:
    """Shapes of all cases: rows and width of norms, width of the MLP, scores, logits, queries."""

    rows: int = 8192
    width: int = 4096
    scores: tuple[int, int, int] = (4, 16, 2048)
    tokens: int = 4096
    vocabulary: int = 50304
    heads: tuple[int, int, int, int] = (4, 2048, 16, 128)


SMALL = Sizes(12, 40, (1, 3, 48), 7, 130, (2, 5, 3, 8))


@dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: of it.
        function: takes `fused` and the inputs, in any floating dtype.
        inputs: leaves that get gradients.
        moved: elements read and written at least, forward and backward.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: list[Tensor]
    moved: tuple[int, int]


def cases(sizes: Sizes, dtype: torch.dtype, device: str) -> list[Case]:
    """All operators, with inputs drawn from one seed."""
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

    def normed_sum(fused: bool, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out, added = add_layer_norm(x, residual, weight, bias, EPS, fused)
        return out + added

    def turned(fused: bool, x: Tensor) -> Tensor:
        wide = x.dtype == torch.float64
        return rotate(x, *(table.double() if wide else table for table in tables), fused)

    keep = torch.empty(x.shape, dtype=torch.uint8, device=device).bernoulli_(0.9, generator=generator)
    masked = count // dtype.itemsize  # as many bytes as elements

    def dropped(fused: bool, x: Tensor, residual: Tensor) -> Tensor:
        return apply_mask(x, keep, 1 / 0.9, residual, fused)

    def loss(fused: bool, x: Tensor) -> Tensor:
        if fused:
            # The kernel writes the gradient over the logits, in the forward pass.
            logits = x.clone() if torch.is_grad_enabled() else x
            return loss_in_place(logits, labels, weights, sizes.vocabulary, AXIS)
        return (vocab_parallel_token_losses(x, labels, sizes.vocabulary, AXIS) * weights).sum()

    return [
        Case("ALiBi softmax", lambda fused, x: masked_softmax(x, 0.1, slopes.to(x.dtype) if x.dtype == torch.float64
             else slopes, fused=fused), [scores], (seen + scores.numel(), 2 * seen + scores.numel())),
        Case("LayerNorm", lambda fused, x, w, b: layer_norm(x, w, b, EPS, fused), [x, weight, bias],
             (2 * count, 3 * count)),
        Case("RMSNorm", lambda fused, x, w: rms_norm(x, w, EPS, fused), [x, weight], (2 * count, 3 * count)),
        Case("residual + LayerNorm (and a sum)", normed_sum, [x, draw(rows, width), weight, bias],
             (7 * count, 4 * count)),
        Case("GELU", lambda fused, x: gelu(x, fused), [x], (2 * count, 3 * count)),
        Case("bias GELU", lambda fused, x, b: bias_gelu(x, b, fused), [x, bias], (2 * count, 3 * count)),
        Case("SwiGLU", lambda fused, x: swiglu(x, fused), [x], (3 * count // 2, 5 * count // 2)),
        Case("dropout + residual", dropped, [x, draw(rows, width)], (3 * count + masked, 2 * count + masked)),
        Case("rotary", turned, [query], (2 * query.numel(), 2 * query.numel())),
        Case("cross entropy, without gradient", loss, [logits], (logits.numel(), 0)),
    ]  # fmt: skip


def results(case: Case, fused: bool, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients, with inputs in `dtype`."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in case.inputs]
    out = case.function(fused, *leaves)
    generator = torch.Generator(out.device).manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, device=out.device)
    out.backward(grad.to(case.inputs[0].dtype).to(out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def error_ratio(case: Case) -> float:
    """Our error over that of torch's operators in the same dtype, the worst of output and gradients; against fp64."""
    dtype = case.inputs[0].dtype
    ours, eager = results(case, True, dtype), results(case, False, dtype)
    worst = 0.0
    for mine, theirs, exact in zip(ours, eager, results(case, False, torch.float64), strict=True):
        if exact.numel() == 1:
            continue  # the error of one number is chance
        off, measure = ((found.double() - exact).norm().item() for found in (mine, theirs))
        worst = max(worst, off / measure if measure else (0.0 if off == 0 else float("inf")))
    return worst


def seconds(call: Callable[[], object], device: str, rounds: int) -> float:
    """Median of `rounds` calls, after three that do not count; on a GPU by its own clock."""
    times = []
    for number in range(rounds + 3):
        if device == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            call()
            events[1].record()
            events[1].synchronize()
            taken = events[0].elapsed_time(events[1]) / 1e3
        else:
            start = time.perf_counter()
            call()
            taken = time.perf_counter() - start
        times += [taken] if number >= 3 else []
    return statistics.median(times)


def timings(case: Case, function: Function, device: str, rounds: int) -> tuple[float, float]:
    """Seconds forward without a graph, and backward alone."""
    leaves = [x.detach().requires_grad_() for x in case.inputs]
    with torch.no_grad():
        forward = seconds(lambda: function(*leaves), device, rounds)
    out = function(*leaves)
    grad = torch.ones_like(out)

    def back() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    return forward, seconds(back, device, rounds)


def copy_bandwidth(device: str, rounds: int, count: int) -> float:
    """Bytes a second, read and written, of a copy of `count` bytes."""
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / seconds(lambda: target.copy_(source), device, rounds)


def main() -> int:
    """Checks, times, prints the table, appends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--append", type=Path)
    args = parser.parse_args()
    device, cuda = args.device, args.device == "cuda"
    load(OpsConfig(Implementation.fused), print, cuda=cuda)
    sizes, dtype = Sizes() if cuda else SMALL, DTYPES[args.dtype]
    bandwidth = copy_bandwidth(device, args.rounds, 2**30 if cuda else 2**20)
    lines, wrong = [], []
    for case in cases(sizes, dtype, device):
        small = next(other for other in cases(SMALL, dtype, device) if other.name == case.name)
        ratio = max(error_ratio(small), error_ratio(case))
        wrong += [case.name] if not ratio <= 2 else []
        line: dict[str, object] = {"kernel": case.name, "dtype": args.dtype, "error_ratio": ratio}
        sides = {"ours": lambda *x, case=case: case.function(True, *x),
                 "eager": lambda *x, case=case: case.function(False, *x)}  # fmt: skip
        if not args.no_compile:
            sides["compiled"] = torch.compile(sides["eager"], dynamic=False)
        for side, function in sides.items():
            taken_both = timings(case, function, device, args.rounds)
            for way, taken, moved in zip(("fwd", "bwd"), taken_both, case.moved, strict=True):
                line[f"{side}_{way}_us"] = taken * 1e6
                line[f"{side}_{way}_of_copy"] = moved * dtype.itemsize / taken / bandwidth
        lines.append(line)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    if args.append:
        writer = JsonLinesWriter(args.append)
        for line in lines:
            writer.write_line({"benchmark": "gpu_kernels", "device": name, "copy_bytes_per_s": bandwidth} | line)
    print(table(lines, name, bandwidth))
    if wrong:
        print(f"gpu_kernels: errors of more than twice torch's: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def table(lines: list[dict[str, object]], device: str, bandwidth: float) -> str:
    """What is printed last."""
    sides = [side for side in ("ours", "eager", "compiled") if f"{side}_fwd_us" in lines[0]]
    head = f"{device}, copy {bandwidth / 1e9:.0f} GB/s; microseconds (share of copy bandwidth)"
    columns = [f"{side} {way}" for side in sides for way in ("fwd", "bwd")]
    found = [head, f"{'':34}{'error':>6}" + "".join(f"{column:>16}" for column in columns)]
    for line in lines:
        cells = [
            f"{line[f'{side}_{way}_us']:8.0f} ({line[f'{side}_{way}_of_copy']:4.0%})"
            for side in sides
            for way in ("fwd", "bwd")
        ]
        found.append(f"{line['kernel']:34}{line['error_ratio']:6.2f}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(found)


if __name__ == "__main__":
    sys.exit(main())
