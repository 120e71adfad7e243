#!/usr/bin/env python3
"""The table of scripts/bench/gpu.sh, made from its result lines: under 80 lines, 120 columns wide.

    python -m scripts.bench.gpu_table bench.jsonl [--runs 1]

Shows the last run in the file or, of the last few, the newest result of everything. Kernels: microseconds of forward
and backward pass, and the share of the measured copy bandwidth that the necessary bytes reach; `error` is the relative
difference to fp64 (norms), `ratio` is its ratio to the error of torch's operators in the same dtype, at most 2.
`reached` says whether the forward pass reaches its target. Training: `same` says whether a side's losses and first
gradient norm equal those of megads' torch operators (of the fused ones if these did not run), up to rounding; `target`
is MFU, tokens per second, how much longer a deterministic step takes (nondeterm.), the share of the dense model's FLOP
rate that experts reach, or megads' speed over a peer's.
"""

from __future__ import annotations

import argparse
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megads.runtime.metrics import JsonLinesWriter, read_json_lines
from scripts.bench.train_step import faults

WIDTH, LONGEST = 120, 79
COPY_TARGET = 0.9
"""Target share of the copy bandwidth, forward: docs/notes/performance.md."""
TARGET_KERNELS = ("ALiBi softmax", "LayerNorm", "RMSNorm")
MFU_TARGETS = {"1.3b": 0.5}
"""llm-foundry publishes 41.8% for its 1.3B on H100s."""
SPEED_TARGETS = {"124m": 463_000, "8b": 10_471}
"""Tokens per second of one GPU: llm.c's GPT-2 124M, 10 billion tokens in 45 minutes on 8 H100s; KempnerForge's
Llama-3-8B on an H200, full recomputation, without fp32 master weights."""
DETERMINISM_TARGET = 0.05
"""Largest overhead of a deterministic step; Megatron-LM's is 15%."""
DENSE_OF = {"qwen3_moe": "qwen3_dense"}
"""Dense sizes with the active parameters of a mixture of experts."""
EXPERTS_TARGET = 0.85
"""Share of the dense model's FLOP rate that a mixture of experts should reach; nanochat's is 0.76."""
PEERS = ("hf", "hf_compiled", "plain", "torchtitan")
"""Sides that are not megads'."""
KERNEL_SIDES = ("ours", "eager", "compiled", "apex")
SIDE_NAMES = {
    "fused": "megads fused",
    "fused_compiled": "fused, compile=blocks",
    "fused_free": "fused, nondeterm.",
    "fused_fp8": "fused, FP8",
    "fused_fp8_rows": "fused, FP8 rows",
    "fused_graphs": "fused, CUDA graphs",
    "fused_graphs_auto": "fused, graphs=auto",
    "fused_loop": "fused, loop of GEMMs",
    "torch": "megads torch",
    "apex": "megads apex",
    "hf": "Hugging Face",
    "hf_compiled": "HF, compiled",
    "plain": "plain torch, compiled",
    "torchtitan": "torchtitan",
}

PREFIX = "gpu_"
"""Prefix of the names of these benchmarks."""

Append = Callable[[Mapping[str, Any]], None]
"""Keeps one result."""
Line = dict[str, Any]
NEEDS = "needs"
"""Prefix of the reason for an item that needs more GPUs."""
RUNS = ("nccl", "resume", "layouts")
"""Stages whose items are cases of scripts.bench.gpu_runs."""
Rows = list[Line]


def add_line_options(parser: argparse.ArgumentParser) -> None:
    """Adds --device, --append and --run."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--append", type=Path, help="file of results, JSON lines")
    parser.add_argument("--run", default="", help="name of the run of gpu.sh to which the results belong")


def appender(arguments: argparse.Namespace, bench: str) -> Append:
    """Returns a function that appends results of one benchmark to the file given on the command line, if any.

    Args:
        arguments: those of `add_line_options`.
        bench: name of the benchmark, beginning with PREFIX.
    """
    assert bench.startswith(PREFIX), bench
    writer = JsonLinesWriter(arguments.append) if arguments.append else None

    def append(result: Mapping[str, Any]) -> None:
        if writer is not None:
            writer.write_line({"bench": bench, "run": arguments.run, "time": time.time(), **result})

    return append


def lines_of_runs(path: Path, runs: int = 1) -> list[Line]:
    """Returns the lines of the last runs in a file, in the order in which they were written.

    Args:
        path: bench.jsonl, possibly with results of other benchmarks.
        runs: number of runs.

    Raises:
        SystemExit: there is no such line.
    """
    lines = [line for line in read_json_lines(path) if str(line.get("bench", "")).startswith(PREFIX)]
    if not lines:
        raise SystemExit(f"{path}: no line of scripts/bench/gpu.sh in it: run that first")
    names = list(dict.fromkeys(line["run"] for line in lines))[-runs:]
    return [line for line in lines if line["run"] in names]


def table(lines: Rows) -> str:
    """Formats all sections that have lines.

    Args:
        lines: result lines in the order in which they were written; of duplicates the last is used.
    """
    found: dict[str, Rows] = {}
    for line in lines:
        found.setdefault(line["bench"].removeprefix("gpu_"), []).append(line)
    rows: list[str] = []
    found["runs"] = lines
    before: Callable[[Rows], list[str]] | None = None
    for bench, make in SECTIONS.items():
        shown = make(found[bench]) if bench in found else []
        if shown:
            apart = rows and not (before is verdict_rows and make is verdict_rows)
            rows += ["", *shown] if apart else shown
            before = make
    rows = [row[:WIDTH].rstrip() for row in rows]
    if len(rows) <= LONGEST:
        return "\n".join(rows)
    return "\n".join([*rows[: LONGEST - 1], f"... and {len(rows) - LONGEST + 1} lines more"])


def newest(lines: Rows, *keys: str) -> dict[tuple[object, ...], Line]:
    """Returns the last line of each combination of these fields, ordered by the first occurrence."""
    found: dict[tuple[object, ...], Line] = {}
    for line in lines:
        found[tuple(line[key] for key in keys)] = line
    return found


def device_rows(lines: Rows) -> list[str]:
    """Rows on device and versions."""
    line = lines[-1]
    when = datetime.fromtimestamp(line["time"], UTC)
    driver, cuda = (
        f", {name} {line[key]}" if line[key] else "" for name, key in (("driver", "driver"), ("CUDA", "cuda"))
    )
    memory = f", {line['memory_bytes'] / 2**30:.0f} GiB" if line["memory_bytes"] else ""
    peers = ", ".join(f"{name} {found}" for name, found in line["peers"].items())
    memory += "" if line["cuda"] else ", a check without a GPU: its figures are meaningless"
    rows = [
        f"{line['devices']} x {line['device']}{memory}{driver}{cuda}; {when:%Y-%m-%d %H:%M} UTC; run {line['run']}",
        f"copy {line['copy_bytes_per_s'] / 1e9:,.0f} GB/s; bf16 GEMM {line['matrix_tflops']:,.1f} TFLOP/s of "
        f"{line['peak_tflops']:,.1f} peak (MFU is of the peak)",
        f"megads {line['megads']}, python {line['python']}, torch {line['torch']}, deepspeed {line['deepspeed']}, "
        f"{peers}",
    ]
    return [part for row in rows for part in textwrap.wrap(row, WIDTH, subsequent_indent="    ")]


def item_rows(lines: Rows) -> list[str]:
    """Rows of items that did not run or failed."""
    last = list(newest(lines, "stage", "name").values())
    too_few = [line for line in last if line["reason"].startswith(NEEDS)]
    last = [line for line in last if line not in too_few and line["stage"] not in RUNS]
    rows = [f"NOT RUN: {len(too_few)} layouts that need more GPUs"] if too_few else []
    for outcome in ("failed", "ended for lack of time", "not run"):
        of_outcome = [line for line in last if line["outcome"] == outcome]
        if of_outcome:
            names = "; ".join(
                f"{line['stage']}: {line['name']}" + (f" ({line['reason']})" if line["reason"] else "")
                for line in of_outcome
            )
            rows += textwrap.wrap(f"{outcome.upper()}: {names}", WIDTH, subsequent_indent="    ")[:10]
    return rows


def kernel_rows(lines: Rows) -> list[str]:
    """One row per kernel, merged from different runs."""
    joined: dict[tuple[object, ...], Line] = {}
    for line in lines:
        key = (line["kernel"], line["dtype"])
        before = joined.get(key, {"sides": {}})
        joined[key] = before | line | {"sides": before["sides"] | line["sides"]}
    sides = [side for side in KERNEL_SIDES if any(side in line["sides"] for line in joined.values())]
    dtypes = ", ".join(dict.fromkeys(str(dtype) for _, dtype in joined))
    heads = "".join(f"{'ours (of copy)' if side == 'ours' else side:>{cell_width(side)}}" for side in sides)
    rows = [f"{f'{dtypes}, us fwd + bwd':27}{'error':>8}{'ratio':>6}{'GB/s':>6}{heads}  reached"]
    for (kernel, _), line in joined.items():
        ours = line["sides"].get("ours")
        rate = f"{line['moved_bytes'][0] / ours['fwd_us'] / 1e3:6.0f}" if ours else f"{'':6}"
        error = f"{line['error']:8.1e}{line['error_ratio']:6.2f}" if "error" in line else f"{'':14}"
        cells = "".join(f"{kernel_cell(line, side):>{cell_width(side)}}" for side in sides)
        rows.append(f"{kernel:27.27}{error}{rate}{cells}  {reached(line)}")
    return rows


def cell_width(side: str) -> int:
    """Columns of a side; megads' side also shows shares of the copy bandwidth."""
    return 24 if side == "ours" else 12


def kernel_cell(line: Line, side: str) -> str:
    """Times of a side, and for megads the share of the copy bandwidth."""
    times = line["sides"].get(side)
    if times is None:
        return "-"
    shown = [f"{times[way]:.0f}" if way in times else "-" for way in ("fwd_us", "bwd_us")]
    if side != "ours":
        return " + ".join(shown)
    shares = [share_of_copy(line, way) for way in ("fwd_us", "bwd_us")]
    return f"{' + '.join(shown)} ({', '.join('-' if share is None else f'{share:.0%}' for share in shares)})"


def share_of_copy(line: Line, way: str) -> float | None:
    """Share of the copy bandwidth of megads' kernel; None if not timed."""
    taken_us = line["sides"].get("ours", {}).get(way)
    moved = line["moved_bytes"][("fwd_us", "bwd_us").index(way)]
    return None if taken_us is None else float(moved / taken_us * 1e6 / line["copy_bytes_per_s"])


def reached(line: Line) -> str:
    """Whether the kernel is correct and, if it has a target, fast enough."""
    if line.get("error_ratio", 0.0) > 2 or line.get("error_ratio", 0.0) != line.get("error_ratio", 0.0):
        return "WRONG"
    share = share_of_copy(line, "fwd_us")
    if line["kernel"] not in TARGET_KERNELS or share is None:
        return ""
    return "yes" if share >= COPY_TARGET else f"no, <{COPY_TARGET:.0%}"


def train_rows(lines: Rows) -> list[str]:
    """Rows of the training sizes and sides."""
    last = newest(lines, "size", "side")
    heads = f"{'ms':>9}{'tokens/s':>10}{'TFLOP/s':>9}{'MFU':>7}{'GiB':>7}{'planned':>8}{'micro':>8}{'attention':>15}"
    rows = [f"{'training step, bf16':27}{heads}  same? target"]
    for size in dict.fromkeys(str(size) for size, _ in last):
        sides = {str(side): line for (of_size, side), line in last.items() if of_size == size}
        dense = last.get((DENSE_OF.get(size), "fused"))
        rows += [train_row(sides[side], sides, dense) for side in SIDE_NAMES if side in sides]
    return rows


def train_row(line: Line, sides: dict[str, Line], dense: Line | None = None) -> str:
    """Row of one size and side; `sides` are all sides of the size, `dense` is the dense model to compare it with."""
    name = f"{line['size']} {SIDE_NAMES[line['side']]}"
    if line["outcome"] != "done":
        return f"{name:27}{line['outcome']}: {line['reason']}"
    micro = f"{line['micro_batch']}/{line['batch']}"
    attention = "" if line["side"] in PEERS else line["attention"]
    if line["recompute"] != "none":
        attention += f", {line['recompute'][:4]}."
    return (
        f"{name:27}{line['step_s'] * 1e3:9.1f}{line['tokens_per_s']:10,.0f}"
        f"{line['tflops_per_device']:9.1f}{line['mfu']:7.1%}{line['peak_memory_bytes'] / 2**30:7.1f}"
        f"{line['planned_bytes'] / 2**30:8.1f}{micro:>8}{attention:>15}  "
        f"{same(line, sides):6}{target_of(line, sides, dense)}"
    )


def target_of(line: Line, sides: dict[str, Line], dense: Line | None) -> str:
    """Returns the target of a side and whether it is reached."""
    size, side = line["size"], line["side"]
    done = {name: of for name, of in sides.items() if of["outcome"] == "done"}
    said = []
    if side in ("fused", "fused_compiled") and size in MFU_TARGETS:
        said.append(f"MFU {MFU_TARGETS[size]:.0%}: {'yes' if line['mfu'] >= MFU_TARGETS[size] else 'no'}")
    if side in ("fused", "fused_compiled") and size in SPEED_TARGETS:
        said.append(f">{SPEED_TARGETS[size]}: {'yes' if line['tokens_per_s'] > SPEED_TARGETS[size] else 'no'}")
    if side in ("fused", "fused_loop") and dense is not None and dense["outcome"] == "done":
        share = line["tflops_per_device"] / dense["tflops_per_device"]
        said.append(f"{share:.0%}: {'yes' if share >= EXPERTS_TARGET else 'no'}")
    if side == "fused_free" and "fused" in done:
        cost = done["fused"]["step_s"] / line["step_s"] - 1
        said.append(f"{cost:+.1%}: {'yes' if cost <= DETERMINISM_TARGET else 'no'}")
    if side in PEERS and "fused" in done:
        said.append(f"ours {done['fused']['tokens_per_s'] / line['tokens_per_s']:.2f} x")
    return ", ".join(said)


def same(line: Line, sides: dict[str, Line]) -> str:
    """Whether a side's training equals that of megads' torch operators, or the fused ones, as far as both ran."""
    reference = next((sides[side] for side in ("torch", "fused") if sides.get(side, {}).get("losses")), None)
    if reference is None or reference is line:
        return "-"
    count = min(len(line["losses"]), len(reference["losses"]))
    expected, found = (
        [{"loss": loss, "grad_norm": norm} for loss, norm in zip(of["losses"], of["grad_norms"], strict=True)][:count]
        for of in (reference, line)
    )
    return "NO" if faults(expected, found, line["precision"]) else "yes"


def verdict_rows(lines: Rows) -> list[str]:
    """Rows of results that contain their verdict."""
    said = [f"{line['name']}: {line['verdict']}" for line in newest(lines, "name").values()]
    return [row for text in said for row in textwrap.wrap(text, WIDTH, subsequent_indent="    ")[:3]]


def run_rows(lines: Rows, names: Sequence[str] | None = None) -> list[str]:
    """Rows of the cases of gpu_runs, finished or not.

    Args:
        lines: result lines, also of other benchmarks.
        names: cases to show; None shows all, below a heading.
    """
    verdicts = newest([line for line in lines if line["bench"] == "gpu_runs"], "name")
    items = newest([line for line in lines if line["bench"] == "gpu_item" and line["stage"] in RUNS], "name")
    rows = [] if names is not None else [f"{'runs of megads':42}{'s':>5}  verdict"]
    for (name,), item in items.items():
        if item["reason"].startswith(NEEDS) or (names is not None and name not in names):
            continue
        verdict = verdicts.get((name,))
        said = verdict["verdict"] if verdict is not None else f"{item['outcome'].upper()}: {item['reason']}"
        text = f"{name:42}{item['seconds']:5.0f}  {'' if verdict is None or verdict['good'] else 'NO: '}{said}"
        rows += textwrap.wrap(text, WIDTH, subsequent_indent=" " * 49)[:3]
    return rows if items else []


SECTIONS: dict[str, Callable[[Rows], list[str]]] = {
    "device": device_rows,
    "item": item_rows,
    "build": verdict_rows,
    "sanitizer": verdict_rows,
    "tests": verdict_rows,
    "memory": verdict_rows,
    "kernels": kernel_rows,
    "train": train_rows,
    "plan": verdict_rows,
    "runs": run_rows,
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=Path("bench.jsonl"))
    parser.add_argument(
        "--runs", type=int, default=1, help="number of last runs from which the newest results are shown"
    )
    arguments = parser.parse_args()
    print(table(lines_of_runs(arguments.path, arguments.runs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
