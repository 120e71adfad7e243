"""What `megads plan` prints: tables for people, JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megads.cli.memory_check import Machine, Room, choose_recompute, gib, micro_batches, parts, plan_of, this_machine
from megads.cli.rank_table import places_json, rank_table
from megads.config import RootConfig
from megads.errors import ConfigError
from megads.parallel.config import Recompute
from megads.plan.flops import hardware_flops_per_token, model_flops_per_token
from megads.plan.memory import MemoryPlan, StageMemory, bubble_share
from megads.runtime.machine_memory import available_memory

_TABLE_WIDTH = 176
"""Characters of the widest table; a narrower terminal wraps its lines, which reads better than cut figures."""


def show(config: RootConfig, device: str, *, as_text: bool, ranks: bool) -> None:
    """Prints the plan of a run.

    Args:
        config: the run.
        device: "cpu", "cuda", or "auto" for what this machine has.
        as_text: tables, else JSON.
        ranks: say also which rank holds what.
    """
    machine = _machine(config, device)
    if machine is None and config.parallel.recompute is Recompute.auto:
        raise ConfigError(
            "parallel.recompute = auto goes by the memory of a GPU, and this machine has none: set "
            "cluster.gpu_memory_gib, or plan with device=cpu"
        )
    config, choice = choose_recompute(config, machine) if machine else (config, "")
    plan = plan_of(config, cuda=machine is None or machine.per_gpu)
    room = machine.room(plan) if machine else None
    if as_text:
        _print(config, plan, room, choice, ranks)
    else:
        held = {"places": places_json(config)} if ranks else {}
        print(json.dumps(as_json(config, plan, room) | held, indent=2))


def _machine(config: RootConfig, device: str) -> Machine | None:
    """Where ranks would run; None for the GPUs of another machine of which nothing is known."""
    if device == "cpu":
        return Machine(available_memory(), per_gpu=False)
    here = this_machine()
    if device == "auto" or here.per_gpu:
        return here
    size = config.cluster.gpu_memory_gib
    return None if size is None else Machine(int(size * 2**30), per_gpu=True)


def compute(config: RootConfig, plan: MemoryPlan) -> dict[str, Any]:
    """What a step of the full batch size computes, by name, for people and machines alike."""
    train, parallel = config.train, config.parallel
    flops = model_flops_per_token(config.model, train.seq_len)
    blocks = [mode for stage in plan.stages for mode in stage.recomputation]
    tokens = train.global_batch_size * train.seq_len
    return {
        "flops_per_token": flops,
        "hardware_flops_per_token": hardware_flops_per_token(config.model, train.seq_len, blocks),
        "tokens_per_step": tokens,
        "flops_per_step": flops * tokens,
        "micro_batches": micro_batches(config),
        "bubble_share": bubble_share(parallel.pp, micro_batches(config)),
    }


def as_json(config: RootConfig, plan: MemoryPlan, room: Room | None) -> dict[str, Any]:
    """The plan as plain dicts; all sizes in bytes."""
    stages = []
    for stage in plan.stages:
        entry = dataclasses.asdict(stage)
        entry["phases"] = [{"name": moment.name, "bytes": moment.total} for moment in stage.phases]
        entry |= {"fullest": dataclasses.asdict(stage.fullest), "permanent": stage.permanent, "peak": stage.peak}
        stages.append(entry)
    return {
        "parameters": plan.parameters,
        "ranks": config.parallel.world_size,
        "largest_rank": plan.largest.first_rank,
        "largest_rank_bytes": plan.largest.peak,
        "all_ranks_bytes": plan.all_ranks,
        "machine": None if room is None else {**dataclasses.asdict(room), "fits": room.fits},
        **compute(config, plan),
        "stages": stages,
    }


def _print(config: RootConfig, plan: MemoryPlan, room: Room | None, choice: str, ranks: bool) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    parallel, train, step = config.parallel, config.train, compute(config, plan)
    console.print(
        f"{plan.parameters:,} parameters on {parallel.world_size} ranks = {parallel.product}, {train.precision}"
    )
    console.print(
        f"{step['flops_per_token']:.4g} FLOPs a token, {step['flops_per_step']:.4g} a step of "
        f"{step['tokens_per_step']:,} tokens = {step['micro_batches']} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas x {train.seq_len} tokens; pipeline bubble {step['bubble_share']:.1%}"
    )
    hardware = step["hardware_flops_per_token"]
    if hardware > step["flops_per_token"]:
        more = hardware / step["flops_per_token"] - 1
        console.print(f"{hardware:.4g} hardware FLOPs a token with what is recomputed, {more:+.1%}")
    if choice:
        console.print(choice)
    console.print(_table(plan))
    largest = plan.largest
    console.print(
        f"largest: rank {largest.first_rank} with {gib(largest.peak)}, at {largest.fullest.name}; "
        f"it always holds {gib(largest.permanent)}, and in each phase of a step"
    )
    for moment in sorted(largest.phases, key=lambda phase: -phase.total):
        console.print(f"  {gib(moment.total):>12} more: {moment.name}")
    if room is not None:
        console.print(f"{room}: {'fits' if room.fits else 'does not fit'}")
    if ranks:
        console.print(rank_table(config))


def _recomputation(stage: StageMemory) -> str:
    """none, or how many of the stage's blocks are recomputed and what of them: 2 of 6 full."""
    counts = Counter(mode for mode in stage.recomputation if mode is not Recompute.none)
    return ", ".join(f"{count} of {len(stage.recomputation)} {mode}" for mode, count in counts.items()) or "none"


def _table(plan: MemoryPlan) -> Table:
    """One row a stage, one column a part of the peak."""
    unit, size = ("GiB", 2**30) if plan.largest.peak >= 2**30 else ("MiB", 2**20)
    table = Table(
        title=f"{unit} of one rank at its fullest moment, by pipeline stage",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for header in ("stage", "parameters", "on a rank", "in flight", "recomputed", *parts(plan.largest), "peak"):
        table.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True)
    for stage in plan.stages:
        sizes = [f"{part / size:,.1f}" for part in (*parts(stage).values(), stage.peak)]
        counts = [f"{count:,}" for count in (stage.stage, stage.parameters, stage.rank_parameters, stage.in_flight)]
        table.add_row(*counts, _recomputation(stage), *sizes, style="bold" if stage is plan.largest else "")
    return table
