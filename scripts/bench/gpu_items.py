"""What scripts/bench/gpu.sh runs: items, each a process, the most valuable first, with the time that each may take."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from megads.ops.apex import ApexState, find_apex
from scripts.bench.gpu_layouts import LAYOUTS

STAGES = ("sanitizer", "tests", "resume", "memory", "kernels", "attention", "train", "profile", "plan", "layouts")
ALWAYS = "start"
"""The stage of what every other one needs."""
BUILD = "build"
"""The item that compiles the kernels."""
NEEDS = "needs"
"""How the reason begins why an item has too few GPUs."""
SANITIZERS = ("memcheck", "racecheck", "synccheck")
"""Tools of compute-sanitizer."""
ENDING_S = 10.0
"""What an item with a limit of its own takes to end."""
CUDA_GRAPHS = "ops.cuda_graphs=true"
CHECKED = ("one device", "parallel.dp=2")
"""Layouts that a check starts."""


@dataclass(frozen=True)
class Item:
    """One process.

    Attributes:
        stage: one of STAGES, or ALWAYS.
        name: of it, short.
        arguments: of Python.
        expected_s: how long it takes; an estimate until a GPU has run it. It is not begun with less time left.
        most_s: it is ended after that.
        devices: GPUs that it needs.
        appends: takes --device, --append and --run.
        alone: nothing else may run beside it, because it measures time; the others run beside their neighbours.
        kernels: needs the compiled kernels.
        limited: takes --limit-s, by which it ends on its own.
    """

    stage: str
    name: str
    arguments: tuple[str, ...]
    expected_s: float = 30.0
    most_s: float = 75.0
    devices: int = 1
    appends: bool = True
    alone: bool = True
    kernels: bool = False
    limited: bool = False


def bench(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this folder."""
    return ("-m", f"scripts.bench.{module}", *arguments)


def items(check: bool, work: Path, overrides: list[str]) -> list[Item]:
    """All that there is, the most valuable first.

    Args:
        check: on a CPU, with tiny shapes.
        work: folder of data and runs.
        overrides: of `megads train`, in the layouts' trainings.
    """
    if check:
        return checked(work, overrides)
    return [
        Item(ALWAYS, "device", bench("gpu_device"), 5.0),
        Item(ALWAYS, BUILD, bench("gpu_build"), 40.0, 200.0),
        # Nothing of these is timed, so they share the GPU.
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
    ]


def checked(work: Path, overrides: list[str]) -> list[Item]:
    """Every stage's code once, as far as a CPU can run it."""
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
    ]
    # Nobody waits for a GPU here, and a machine that others use may be slow.
    return [replace(item, expected_s=10.0, most_s=240.0) for item in found]


def sanitizer(tool: str) -> Item:
    """A tool of compute-sanitizer over all kernels."""
    return Item("sanitizer", tool, bench("gpu_sanitizer", "--tool", tool), 15.0, 100.0, alone=False, kernels=True)


def training(size: str, side: str, expected_s: float = 30.0, most_s: float = 75.0) -> Item:
    """A row of trainings."""
    arguments = bench("gpu_train", "--size", size, "--side", side)
    return Item("train", f"{size} {side}", arguments, expected_s, most_s, kernels=side.startswith("fused"))


def resume(impl: str, work: Path, *overrides: str) -> Item:
    """A killed run with these operators."""
    arguments = bench("gpu_resume", "--impl", impl, "--work", str(work), *overrides)
    return Item("resume", " ".join((impl, *overrides)), arguments, 100.0, 185.0, alone=False, kernels=impl == "fused")


def layouts(work: Path, overrides: list[str]) -> list[Item]:
    """The real command in each layout; the first is what the others must agree with."""
    module = bench("gpu_layouts", "--work", str(work), *overrides)
    return [
        Item("layouts", layout.name, (*module, "--number", str(number)), 30.0, 90.0, devices=layout.devices)
        for number, layout in enumerate(LAYOUTS)
    ]


def chosen(found: list[Item], stages: list[str]) -> list[Item]:
    """Items of these stages, and what they need."""
    return [item for item in found if item.stage == ALWAYS or item.stage in stages]


def rounds(found: list[Item]) -> list[list[Item]]:
    """Items in the order in which they run; those of one list run beside each other."""
    numbered = list(enumerate(found))
    together = groupby(numbered, key=lambda pair: pair[0] if pair[1].alone else None)
    return [[item for _, item in group] for _, group in together]


def command(item: Item, device: str, append: Path, run: str, limit_s: float) -> list[str]:
    """Its command line; it is ended after the limit."""
    results = ["--device", device, "--append", str(append), "--run", run] if item.appends else []
    limit = ["--limit-s", f"{max(1.0, limit_s - ENDING_S):.0f}"] if item.limited else []
    return [sys.executable, *item.arguments, *results, *limit]
