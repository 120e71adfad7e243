#!/usr/bin/env python3
"""Benchmark 1: one training step, megads against Hugging Face BLOOM with AdamW, eager and compiled, fp32 and bf16.

    python -m scripts.bench.train_step [--rounds 5] [--threads 2] [--precision bf16] [--eager-only]

Each side runs in a separate process, with the threads and allocator settings of a rank; the sides alternate step by
step. All start with the same weights (a name table maps megads' to the peers'), see the same tokens, and use the same
clipping and weight decay. If a side's losses or gradient norms differ from megads', nothing is judged, and the exit
code is 1. In bf16 Hugging Face keeps weights and moments in bf16, as its users do, or, under autocast, all in fp32;
megads keeps fp32 master weights, gradients and moments in addition to bf16 weights. Targets are judged by the fastest
step after the warmup or, with --by processor_ms --threads 1, by CPU time, because wall-clock time is unreliable on a
machine that others use. The limit is model FLOPs (full causal attention, no recomputation) at the throughput of the
fastest GEMM measured between the steps, torch's or megads'.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megads.ops.config import OpsConfig
from megads.ops.resolve import prepare
from megads.runtime.environment import available_cores
from scripts.bench.processes import Taken, Turn, in_turns, side_processes
from scripts.bench.results import Verdict, add_results_option, against_time, record
from scripts.bench.training_sides import DTYPES, TrainingWork, hugging_face_side, machine_side, megads_side
from scripts.bench.turns import COLUMNS, Times, add_judge_option

ROW = 1
OURS, OURS_TORCH = "megads, ops.impl=fused", "megads, ops.impl=torch"
EAGER, COMPILED = "Hugging Face, eager", "Hugging Face, compiled"
AUTOCAST = "Hugging Face, autocast"
MACHINE = "machine"
SMALL: dict[str, Any] = {"layers": 2, "hidden": 48, "heads": 6, "vocabulary": 512, "batch": 2, "seq_len": 32}
LIMITS = {"GEMM peak": "flops_per_s", "torch's GEMM peak": "torch_flops_per_s"}
"""Throughput of the fastest GEMM of any kernel here, and of torch's: on some processors megads' is faster."""
GEMM_SHARE = 0.85
"""Target in fp32."""
TARGETS = {("bf16", EAGER): 1.5}
"""Speedup over a peer; 1 for all other peers."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the relative differences between runs of the same training due to rounding.

    Attributes:
        first: losses of the first step.
        norm: gradient norms of the first step.
        curve: losses of any later step.
    """

    first: float
    norm: float
    curve: float


BOUNDS = {"fp32": Bounds(first=1e-6, norm=1e-4, curve=1e-4), "bf16": Bounds(first=2e-4, norm=1e-2, curve=2e-3)}
"""fp32: N3 of docs/numerics.md for the first loss. torch sums the squares of an embedding's 16 million gradients in
fp32, so that its norm, and the clipped gradients, are off by 3e-5; megads' kernel gives the norm of fp64. bf16: N4 for
the first loss; without fp32 master weights Hugging Face loses updates smaller than half a unit in the last place of a
weight, so that the curves drift apart."""


def sides_of(work: TrainingWork, with_compiled: bool) -> dict[str, tuple[Callable[..., Turn], tuple[Any, ...]]]:
    """Returns the alternating sides."""
    sides: dict[str, tuple[Callable[..., Turn], tuple[Any, ...]]] = {
        OURS: (megads_side, (work, "fused")),
        OURS_TORCH: (megads_side, (work, "torch")),
        EAGER: (hugging_face_side, (work, False)),
    }
    if work.precision == "bf16":
        sides[AUTOCAST] = (hugging_face_side, (work, False, True))
    if with_compiled:
        sides[COMPILED] = (hugging_face_side, (work, True))
    return sides | {MACHINE: (machine_side, (work,))}


def apart(value: float, other: float) -> float:
    """Relative difference."""
    return abs(value / other - 1)


def losses(steps: list[dict[str, float]]) -> list[float]:
    """Losses of all steps."""
    return [step["loss"] for step in steps]


def faults(
    reference: list[dict[str, float]], other: list[dict[str, float]], precision: str, bounds: Bounds | None = None
) -> list[str]:
    """Returns where two trainings differ by more than rounding; empty if they are the same.

    Args:
        reference: loss and grad_norm of every step.
        other: likewise.
        precision: precision of both.
        bounds: bounds on the differences; None: those of BOUNDS.
    """
    bounds = bounds or BOUNDS[precision]
    found = [
        f"step 1: {key} {other[0][key]:.7g} against {reference[0][key]:.7g}, off by {off:.1e}, bound {bound:.0e}"
        for key, bound in (("loss", bounds.first), ("grad_norm", bounds.norm))
        if not (off := apart(other[0][key], reference[0][key])) <= bound
    ]
    found += [
        f"step {number}: loss {theirs:.7g} against {ours:.7g}, off by {off:.1e}, bound {bounds.curve:.0e}"
        for number, (ours, theirs) in enumerate(zip(losses(reference), losses(other), strict=True), start=1)
        if not (off := apart(theirs, ours)) <= bounds.curve
    ]
    return found


def figures_of(work: TrainingWork, taken: list[Taken], peak_flops_per_s: float, by: str) -> dict[str, float]:
    """Figures of one side from its timed steps; speeds use the time by which targets are judged."""
    times = Times([1e3 * turn.clock_s for turn in taken], [1e3 * turn.processor_s for turn in taken]).summary
    seconds = times[by] / 1e3
    return times | {
        "tokens_per_s": work.tokens / seconds,
        "share_of_gemm_peak": work.flops / seconds / peak_flops_per_s,
        "peak_bytes": float(max(turn.peak_bytes for turn in taken)),
    }


def work_name(work: TrainingWork) -> str:
    """Name of the work in verdicts."""
    return f"train step, {work.precision}"


def verdicts_of(
    work: TrainingWork, sides: dict[str, dict[str, float]], machine: dict[str, float], by: str
) -> list[Verdict]:
    """Compares megads with the other sides and the limits; none if megads did not run."""
    if OURS not in sides:
        return []
    name, ours_ms = work_name(work), sides[OURS][by]
    limits = {name: 1e3 * work.flops / machine[key] for name, key in LIMITS.items()}
    share = GEMM_SHARE if work.precision == "fp32" else None
    return [
        *(against_time(ROW, name, ours_ms, limit, ms, share, limit=True) for limit, ms in limits.items()),
        *(
            against_time(ROW, name, ours_ms, peer, found[by], TARGETS.get((work.precision, peer), 1.0))
            for peer, found in sides.items()
            if peer != OURS
        ),
    ]


def show(
    sides: dict[str, dict[str, float]], wrong: dict[str, list[str]], rate: str, text: Callable[[dict[str, float]], str]
) -> None:
    """Prints a table of the sides that trained the same, and the faults of the others.

    Args:
        sides: figures of each side.
        wrong: what differs, of the sides that train something else.
        rate: head of a column.
        text: its cell, of a side's figures.
    """
    heads = ("side", *(f"{title}, ms" for title in COLUMNS.values()), "tokens/s", rate, "peak memory")
    print(f"\n| {' | '.join(heads)} |\n|{len(heads) * '---|'}")
    for name, found in sides.items():
        if name not in wrong:
            cells = [name, *(f"{found[key]:.0f}" for key in COLUMNS), f"{found['tokens_per_s']:,.0f}"]
            cells += [text(found), f"{found['peak_bytes'] / 2**30:.2f} GiB"]
            print(f"| {' | '.join(cells)} |")
    print(flush=True)
    for name, differ in wrong.items():
        print(f"{name} trains something else, so nothing is judged: {'; '.join(differ[:3])}")


def take(work: TrainingWork, arguments: argparse.Namespace) -> tuple[dict[str, list[Taken]], dict[str, float]]:
    """Runs every side's steps, and measures the machine's peak throughput in between."""
    with side_processes(sides_of(work, with_compiled=not arguments.eager_only), arguments.threads, print) as sides:
        taken = in_turns(sides, arguments.warm_up, arguments.rounds)
    rates = [turn.found for turn in taken.pop(MACHINE)]
    return taken, {key: max(found[key] for found in rates) for key in rates[0]}


def measure(work: TrainingWork, arguments: argparse.Namespace) -> bool:
    """Measures one precision; returns whether all sides trained the same."""
    taken, machine = take(work, arguments)
    peak = machine["flops_per_s"]
    found = {name: [turn.found for turn in turns] for name, turns in taken.items()}
    reference = next(iter(found.values()))
    wrong = {name: differ for name, steps in found.items() if (differ := faults(reference, steps, work.precision))}
    timed = {name: figures_of(work, turns[arguments.warm_up :], peak, arguments.by) for name, turns in taken.items()}
    print(f"{work.text}: {work.flops / 1e9:.0f} GFLOP a step; best GEMM {peak / 1e9:.0f} GFLOP/s "
          f"(torch's {machine['torch_flops_per_s'] / 1e9:.0f}), "
          f"best copy {machine['copied_bytes_per_s'] / 1e9:.1f} GB/s read and written")  # fmt: skip
    show(timed, wrong, "of GEMM peak", lambda found: f"{found['share_of_gemm_peak']:.0%}")
    figures = {"threads": arguments.threads, "rounds": arguments.rounds, "by": arguments.by, "faults": wrong}
    record(
        arguments.append,
        "train_step",
        {
            **asdict(work),
            **figures,
            **machine,
            "sides": timed,
            "losses": {name: losses(of) for name, of in found.items()},
        },
        [] if wrong else verdicts_of(work, timed, machine, arguments.by),
        unjudged=work_name(work) if wrong else "",
    )
    return not wrong


def parse_options(description: str | None) -> argparse.Namespace:
    """Reads the command line of a benchmark of training steps, and loads megads' kernels."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side")
    parser.add_argument(
        "--warm-up", type=int, default=2, help="untimed steps before; included in the comparison of losses"
    )
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--precision", choices=DTYPES, action="append")
    parser.add_argument("--eager-only", action="store_true", help="omit torch.compile, which takes long to compile")
    parser.add_argument("--small", action="store_true", help="smoke test with a tiny model")
    add_judge_option(parser)
    add_results_option(parser)
    arguments = parser.parse_args()
    print(f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    prepare(OpsConfig(), print, cuda=False)
    return arguments


def main() -> int:
    """The command line."""
    arguments = parse_options(__doc__)
    shape = SMALL if arguments.small else {}
    precisions = arguments.precision or list(DTYPES)
    same = [measure(TrainingWork(**shape, precision=precision), arguments) for precision in precisions]
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
