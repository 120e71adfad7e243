"""What scripts/bench/gpu.sh runs: items, each a process, in the order of their worth."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from megads.ops.apex import ApexState, find_apex
from scripts.bench.gpu_layouts import LAYOUTS

STAGES = ("kernels", "attention", "train", "resume", "tests", "layouts")
ALWAYS = "start"
"""The stage of what every other one needs."""
NEEDS = "needs"
"""How the reason begins why an item has too few GPUs."""
TRAINED = ("fused", "torch", "hf")
"""Sides of a training step."""
CHECKED = ("one device", "parallel.dp=2")
"""Layouts that a check starts."""


@dataclass(frozen=True)
class Item:
    """One process.

    Attributes:
        stage: one of STAGES, or ALWAYS.
        name: of it, short.
        arguments: of Python.
        least_s: it is not begun with less time left. As `most_s` a guess: no GPU was at hand.
        most_s: it is ended after that.
        devices: GPUs that it needs.
        appends: takes --device, --append and --run.
    """

    stage: str
    name: str
    arguments: tuple[str, ...]
    least_s: float = 10.0
    most_s: float = 120.0
    devices: int = 1
    appends: bool = True


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
        Item(ALWAYS, "device", bench("gpu_device"), most_s=60.0),
        Item(ALWAYS, "build", bench("gpu_build", "--device", "cuda"), most_s=240.0, appends=False),
        Item("kernels", "kernels", bench("gpu_kernels"), 20.0),
        Item("attention", "kinds", bench("gpu_attention"), 20.0),
        *(training("1.3b", side) for side in TRAINED),
        *(training("125m", side) for side in TRAINED),
        resume("torch", work),
        *(training(size, side) for size in ("350m", "760m") for side in TRAINED),
        resume("fused", work),
        training("1.3b", "fused_compiled", 40.0, 150.0),
        *([training("1.3b", "apex")] if find_apex().state is ApexState.present else []),
        Item("kernels", "torch.compile", bench("gpu_kernels", "--compiled"), 25.0, 150.0),
        Item("tests", "GPU tests", bench("gpu_tests"), 20.0, 180.0),
        training("125m", "hf_compiled", 60.0, 150.0),
        training("125m", "fused_graphs", 40.0, 150.0),
        *layouts(work, overrides),
    ]


def checked(work: Path, overrides: list[str]) -> list[Item]:
    """Every stage's code once, as far as a CPU can run it."""
    kernels = bench("gpu_kernels", "--dtype", "fp32", "--rounds", "1")
    started = [item for item in layouts(work, overrides) if item.name in CHECKED]
    return [
        Item(ALWAYS, "device", bench("gpu_device")),
        Item(ALWAYS, "build", bench("gpu_build", "--device", "cpu"), most_s=240.0, appends=False),
        Item("kernels", "kernels", kernels),
        Item("attention", "kinds", bench("gpu_attention", "--rounds", "1")),
        *(training("1.3b", side) for side in (*TRAINED, "fused_compiled")),
        resume("fused", work),
        Item("kernels", "torch.compile", (*kernels, "--compiled", "--only", "RMSNorm")),
        Item("tests", "GPU tests", bench("gpu_tests")),
        Item("layouts", "configs", bench("gpu_layouts", "--work", str(work), *overrides, "--configs")),
        *started,
    ]


def training(size: str, side: str, least_s: float = 20.0, most_s: float = 90.0) -> Item:
    """A row of trainings."""
    return Item("train", f"{size} {side}", bench("gpu_train", "--size", size, "--side", side), least_s, most_s)


def resume(impl: str, work: Path) -> Item:
    """A killed run with these operators."""
    return Item("resume", impl, bench("gpu_resume", "--impl", impl, "--work", str(work)), 40.0, 150.0)


def layouts(work: Path, overrides: list[str]) -> list[Item]:
    """The real command in each layout; the first is what the others must agree with."""
    module = bench("gpu_layouts", "--work", str(work), *overrides)
    return [
        Item("layouts", layout.name, (*module, "--number", str(number)), least_s=30.0, devices=layout.devices)
        for number, layout in enumerate(LAYOUTS)
    ]


def chosen(found: list[Item], stages: list[str]) -> list[Item]:
    """Items of these stages, and what they need."""
    return [item for item in found if item.stage == ALWAYS or item.stage in stages]


def command(item: Item, device: str, append: Path, run: str) -> list[str]:
    """Its command line."""
    results = ["--device", device, "--append", str(append), "--run", run] if item.appends else []
    return [sys.executable, *item.arguments, *results]
