"""Items of scripts/bench/gpu.sh: one process each, in order of value, with a time limit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from megads.ops.apex import ApexState, find_apex
from scripts.bench.gpu_layouts import LAYOUTS
from scripts.bench.gpu_nccl import CASES

NCCL = "nccl"
"""Stage with several ranks on one GPU. It has its own budget: it runs only if it is named."""
STAGES = ("sanitizer", "tests", "resume", "memory", "kernels", "attention", "train", "profile", "plan", "layouts")
ALWAYS = "start"
"""Stage that all other stages need."""
BUILD = "build"
"""The item that compiles the kernels."""
NEEDS = "needs"
"""Prefix of the reason for an item that needs more GPUs."""
SANITIZERS = ("memcheck", "racecheck", "synccheck")
"""Tools of compute-sanitizer."""
ENDING_S = 10.0
"""Time that an item with --limit-s takes to end after its limit."""
CUDA_GRAPHS = "ops.cuda_graphs=true"
CHECKED = ("one device", "parallel.dp=2")
"""Layouts that --check starts."""


@dataclass(frozen=True)
class Item:
    """One process of gpu.sh.

    Attributes:
        stage: one of STAGES, or ALWAYS.
        name: short name.
        arguments: arguments of Python.
        expected_s: expected duration, an estimate until measured on a GPU; with less time left it is not started.
        most_s: time limit.
        devices: number of GPUs it needs.
        appends: accepts --device, --append and --run.
        alone: runs exclusively, because it measures time; the others run concurrently with their neighbors.
        group: of the others, only those of one group run concurrently.
        kernels: needs the compiled kernels.
        limited: accepts --limit-s, at which it ends by itself.
    """

    stage: str
    name: str
    arguments: tuple[str, ...]
    expected_s: float = 30.0
    most_s: float = 75.0
    devices: int = 1
    appends: bool = True
    alone: bool = True
    group: str = ""
    kernels: bool = False
    limited: bool = False


def bench(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this folder."""
    return ("-m", f"scripts.bench.{module}", *arguments)


def items(check: bool, work: Path, overrides: list[str]) -> list[Item]:
    """Returns all items, in order of value.

    Args:
        check: on a CPU, with tiny shapes.
        work: folder of data and runs.
        overrides: overrides of `megads train` in the layout runs.
    """
    if check:
        return checked(work, overrides)
    return [
        Item(ALWAYS, "device", bench("gpu_device"), 5.0),
        Item(ALWAYS, BUILD, bench("gpu_build"), 40.0, 200.0),
        # None of these is timed, so they share the GPU.
        *(sanitizer(tool) for tool in SANITIZERS),
        Item("tests", "GPU tests", bench("gpu_tests"), 130.0, 240.0, alone=False, limited=True),
        resume("fused", work),
        resume("fused", work, CUDA_GRAPHS),
        resume("torch", work),
        Item("kernels", "kernels", bench("gpu_kernels"), 10.0, kernels=True),
        Item("attention", "kinds", bench("gpu_attention"), 25.0, kernels=True),
        training("1.3b", "fused", 40.0),
        training("8b", "fused", 55.0, 120.0),
        training("1.3b", "fused_free", 40.0),
        training("350m", "fused", 25.0),
        training("350m", "fused_graphs", 25.0),
        training("bloom_1b1", "fused", 25.0),
        training("bloom_1b1", "hf", 25.0),
        training("llama_1b", "fused", 25.0),
        training("llama_1b", "torchtitan", 45.0, 100.0),
        Item("profile", "slowest kernels", bench("gpu_profile", "--work", str(work)), 40.0, 90.0, kernels=True),
        Item("plan", "calibration and steps", bench("gpu_plan"), 180.0, 300.0, kernels=True),
        Item("memory", "process and communicators", bench("gpu_communicators"), 20.0),
        training("1.3b", "torch", 25.0),
        training("1.3b", "fused_compiled", 45.0, 120.0),
        Item("kernels", "torch.compile", bench("gpu_kernels", "--compiled"), 40.0, 120.0),
        training("bloom_1b1", "torch", 25.0),
        training("llama_1b", "torch", 25.0),
        training("bloom_1b1", "hf_compiled", 60.0, 120.0),
        training("8b", "fused_compiled", 80.0, 150.0),
        *([training("1.3b", "apex", 25.0)] if find_apex().state is ApexState.present else []),
        *layouts(work, overrides),
        *nccl(work),
    ]


def checked(work: Path, overrides: list[str]) -> list[Item]:
    """Returns items that run every stage's code once, as far as a CPU can."""
    kernels = bench("gpu_kernels", "--dtype", "fp32", "--rounds", "1")
    started = [item for item in layouts(work, overrides) if item.name in CHECKED]
    found = [
        Item(ALWAYS, "device", bench("gpu_device")),
        Item(ALWAYS, BUILD, bench("gpu_build")),
        sanitizer(SANITIZERS[0]),
        Item("tests", "GPU tests", bench("gpu_tests"), alone=False, limited=True),
        resume("fused", work),
        Item("memory", "process and communicators", bench("gpu_communicators")),
        Item("kernels", "kernels", kernels, kernels=True),
        Item("attention", "kinds", bench("gpu_attention", "--rounds", "1"), kernels=True),
        *(training("1.3b", side) for side in ("fused", "fused_free", "fused_compiled")),
        *(training("bloom_1b1", side) for side in ("torch", "hf")),
        *(training("llama_1b", side) for side in ("torch", "torchtitan")),
        Item("profile", "slowest kernels", bench("gpu_profile", "--work", str(work), "--kernels", "1"), kernels=True),
        Item("plan", "calibration and steps", bench("gpu_plan", "--seconds", "0.001")),
        Item("kernels", "torch.compile", (*kernels, "--compiled", "--only", "RMSNorm")),
        Item("layouts", "configs", bench("gpu_layouts", "--work", str(work), *overrides, "--configs")),
        *started,
        *(replace(item, alone=True) for item in nccl(work)),
    ]
    # Without a GPU there is no need to hurry, and a shared machine may be slow.
    return [replace(item, expected_s=10.0, most_s=600.0 if item.stage == NCCL else 240.0) for item in found]


def sanitizer(tool: str) -> Item:
    """Runs a tool of compute-sanitizer over all kernels."""
    return Item("sanitizer", tool, bench("gpu_sanitizer", "--tool", tool), 15.0, 100.0, alone=False, kernels=True)


def training(size: str, side: str, expected_s: float = 30.0, most_s: float = 75.0) -> Item:
    """A row of the training table."""
    arguments = bench("gpu_train", "--size", size, "--side", side)
    return Item("train", f"{size} {side}", arguments, expected_s, most_s, kernels=side.startswith("fused"))


def resume(impl: str, work: Path, *overrides: str) -> Item:
    """A killed and resumed run with these operators."""
    arguments = bench("gpu_resume", "--impl", impl, "--work", str(work), *overrides)
    return Item("resume", " ".join((impl, *overrides)), arguments, 100.0, 185.0, alone=False, kernels=impl == "fused")


def layouts(work: Path, overrides: list[str]) -> list[Item]:
    """`megads train` in each layout; the first is the reference."""
    module = bench("gpu_layouts", "--work", str(work), *overrides)
    return [
        Item("layouts", layout.name, (*module, "--number", str(number)), 30.0, 90.0, devices=layout.devices)
        for number, layout in enumerate(LAYOUTS)
    ]


def nccl(work: Path) -> list[Item]:
    """Cases over NCCL with several ranks on one GPU."""
    module = bench("gpu_nccl", "--work", str(work))
    return [
        Item(
            *(NCCL, case.name, (*module, "--case", case.name), case.expected_s, case.most_s),
            alone=not case.group,
            group=case.group,
            kernels=case.kernels,
        )
        for case in CASES
    ]


def chosen(found: list[Item], stages: list[str]) -> list[Item]:
    """Items of these stages and the items they depend on; kernels are built when the first of them needs kernels."""
    build = [item for item in found if (item.stage, item.name) == (ALWAYS, BUILD)]
    wanted = [item for item in found if (item.stage == ALWAYS or item.stage in stages) and item not in build]
    first = next((place for place, item in enumerate(wanted) if item.kernels), 1)
    return [*wanted[:first], *build, *wanted[first:]]


def rounds(found: list[Item]) -> list[list[Item]]:
    """Items in execution order; those of one list run concurrently."""
    numbered = list(enumerate(found))
    together = groupby(numbered, key=lambda pair: pair[0] if pair[1].alone else pair[1].group)
    return [[item for _, item in group] for _, group in together]


def command(item: Item, device: str, append: Path, run: str, limit_s: float) -> list[str]:
    """Command line of an item; the process is killed after the limit."""
    results = ["--device", device, "--append", str(append), "--run", run] if item.appends else []
    limit = ["--limit-s", f"{max(1.0, limit_s - ENDING_S):.0f}"] if item.limited else []
    return [sys.executable, *item.arguments, *results, *limit]
