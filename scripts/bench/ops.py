#!/usr/bin/env python3
"""Benchmarks 2 to 5: each operator by megads, torch eager, torch.compile, and the hardware limit.

    python -m scripts.bench.ops [--rounds 15] [--threads 2] [--only attention] [--append bench.jsonl]

The sides alternate in one process with the allocator settings of a rank. `limit` is the time to read and write the
operator's necessary bytes at the copy bandwidth measured in the same round, or of its GEMMs at the measured GEMM peak.
Targets are judged by the fastest round or, with --by processor_ms --threads 1, by CPU time, because wall-clock time is
unreliable on a machine that others use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megads.ops.config import FUSED, Implementation, OpsConfig
from megads.ops.linear import linear
from megads.ops.resolve import load
from megads.runtime.environment import available_cores
from scripts.bench.operators.activation import bias_gelu_case, gelu_case, swiglu_case
from scripts.bench.operators.attention import attention_case
from scripts.bench.operators.case import LIMIT, OURS, SMALL, Call, Case, Sizes, Target
from scripts.bench.operators.cross_entropy import cross_entropy_case
from scripts.bench.operators.linear import linear_case
from scripts.bench.operators.model import model_case
from scripts.bench.operators.norm import add_layer_norm_case, layer_norm_case, rms_norm_case
from scripts.bench.operators.optimizer import adamw_case
from scripts.bench.operators.rotary import rotary_case
from scripts.bench.operators.softmax import softmax_case
from scripts.bench.results import Verdict, add_results_option, against_time, record
from scripts.bench.turns import COLUMNS, add_judge_option, take_turns, with_rank_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES: dict[str, Callable[[Sizes, torch.dtype], Case]] = {
    "attention": attention_case,
    "softmax": softmax_case,
    "bias_gelu": bias_gelu_case,
    "gelu": gelu_case,
    "swiglu": swiglu_case,
    "layer_norm": layer_norm_case,
    "add_layer_norm": add_layer_norm_case,
    "rms_norm": rms_norm_case,
    "rotary": rotary_case,
    "cross_entropy": cross_entropy_case,
    "linear": linear_case,
    "adamw": adamw_case,
    "model": model_case,
}


def limit_of(case: Case, dtype: torch.dtype) -> Call:
    """Hardware limit: time to move the bytes, or for the FLOPs in large GEMMs by the kernel that megads chooses."""
    if case.moved_bytes:
        source = torch.empty(max(1, int(case.moved_bytes / 2 / dtype.itemsize)), dtype=dtype).normal_()
        if case.in_place:
            return source.neg_
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    size = 1024
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    count = max(1, round(case.flops / (2 * size**3)))

    def products() -> None:
        for _ in range(count):
            linear(left, right, None, FUSED)

    return products


def measure(
    names: list[str], sizes: Sizes, rounds: int, with_compiled: bool
) -> Iterator[tuple[Case, str, dict[str, dict[str, float]]]]:
    """Yields case, dtype, and milliseconds by side and column."""
    for name in names:
        for dtype_name, dtype in DTYPES.items():
            case = CASES[name](sizes, dtype)
            sides = {name: side for name, side in case.sides.items() if with_compiled or "inductor" not in name}
            times = take_turns(sides | {LIMIT: limit_of(case, dtype)}, rounds)
            yield case, dtype_name, {side: of_side.summary for side, of_side in times.items()}


def verdicts_of(case: Case, dtype_name: str, sides: dict[str, dict[str, float]], by: str) -> list[Verdict]:
    """Verdicts on the case's targets, and always on the share of the limit."""
    asked = [target for target in case.targets if dtype_name in target.dtypes and target.side in sides]
    moves = "pass over its bytes in place" if case.in_place else "copy of its bytes"
    limit_name = moves if case.moved_bytes else "GEMM of its products"
    found: list[tuple[Target, float | None]] = [(target, target.times) for target in asked]
    if not any(target.side == LIMIT for target in asked):
        found.append((Target(LIMIT, 0.0), None))
    return [
        against_time(
            case.row,
            f"{case.name}, {dtype_name}",
            sides[OURS][by],
            limit_name if target.side == LIMIT else target.side,
            sides[target.side][by],
            times,
            target.side == LIMIT,
        )
        for target, times in found
    ]


def show(case: Case, dtype_name: str, sides: dict[str, dict[str, float]]) -> None:
    print(f"{case.name}, {dtype_name}: ms (in brackets: over ours)")
    for side, found in sides.items():
        cells = [f"{title} {found[key]:9.2f} ({found[key] / sides[OURS][key]:5.2f})" for key, title in COLUMNS.items()]
        print(f"  {side:<28} {'   '.join(cells)}", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--only", choices=CASES, action="append")
    add_judge_option(parser)
    parser.add_argument("--small", action="store_true", help="smoke test with tiny shapes, nothing compiled")
    parser.add_argument("--eager-only", action="store_true", help="omit torch.compile, which takes long to compile")
    add_results_option(parser)
    arguments = parser.parse_args()
    with_rank_settings(arguments.threads, "scripts.bench.ops")
    load(OpsConfig(Implementation.fused), print, cuda=False)
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    sizes, names = SMALL if arguments.small else Sizes(), arguments.only or list(CASES)
    compiled = not (arguments.small or arguments.eager_only)
    for case, dtype_name, sides in measure(names, sizes, arguments.rounds, compiled):
        show(case, dtype_name, sides)
        figures: dict[str, Any] = {"case": case.name, "dtype": dtype_name, "threads": arguments.threads}
        verdicts = verdicts_of(case, dtype_name, sides, arguments.by)
        record(arguments.append, "ops", {**figures, "by": arguments.by, "sides": sides}, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
