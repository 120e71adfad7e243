"""What `megads plan` prints: tables for people, JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megads.cli.memory_check import Room, gib, micro_batches, parts, plan_of, room_for
from megads.cli.rank_table import places_json, rank_table
from megads.config import RootConfig
from megads.plan.flops import model_flops_per_token
from megads.plan.memory import MemoryPlan, bubble_share
from megads.runtime.machine_memory import free_gpu_memory

_TABLE_WIDTH = 160
"""Characters of the widest table; a narrower terminal wraps its lines, which reads better than cut figures."""


def show(config: RootConfig, device: str, *, as_text: bool, ranks: bool) -> None:
    """Prints the plan of a run.

    Args:
        config: the run.
        device: "cpu", "cuda", or "auto" for what this machine has.
        as_text: tables, else JSON.
        ranks: say also which rank holds what.
    """
    free_gpus = free_gpu_memory() if device != "cpu" else []
    cuda = bool(free_gpus) or device == "cuda"
    plan = plan_of(config, cuda=cuda)
    # What another machine's GPUs have is not known here.
    room = room_for(plan, free_gpus) if cuda == bool(free_gpus) else None
    if as_text:
        _print(config, plan, room, ranks)
    else:
        held = {"places": places_json(config)} if ranks else {}
        print(json.dumps(as_json(config, plan, room) | held, indent=2))


def compute(config: RootConfig) -> dict[str, Any]:
    """What a step of the full batch size computes, by name, for people and machines alike."""
    train, parallel = config.train, config.parallel
    flops = model_flops_per_token(config.model, train.seq_len)
    tokens = train.global_batch_size * train.seq_len
    return {
        "flops_per_token": flops,
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
        **compute(config),
        "stages": stages,
    }


def _print(config: RootConfig, plan: MemoryPlan, room: Room | None, ranks: bool) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    parallel, train, step = config.parallel, config.train, compute(config)
    console.print(
        f"{plan.parameters:,} parameters on {parallel.world_size} ranks = tp {parallel.tp} x pp {parallel.pp} x "
        f"dp {parallel.dp}, {train.precision}"
    )
    console.print(
        f"{step['flops_per_token']:.4g} FLOPs a token, {step['flops_per_step']:.4g} a step of "
        f"{step['tokens_per_step']:,} tokens = {step['micro_batches']} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas x {train.seq_len} tokens; pipeline bubble {step['bubble_share']:.1%}"
    )
    console.print(_table(plan))
    largest = plan.largest
    console.print(
        f"largest: rank {largest.first_rank} with {gib(largest.peak)}, at {largest.fullest.name}; "
        f"it always holds {gib(largest.permanent)}, and in each phase of a step"
    )
    for moment in sorted(largest.phases, key=lambda phase: -phase.total):
        console.print(f"  {gib(moment.total):>12} more: {moment.name}")
    if room is not None:
        subject = "each GPU" if room.per_gpu else "all ranks and their processes"
        verdict = "fits" if room.fits else "does not fit"
        console.print(f"{subject}: {gib(room.needed)} of {gib(room.available)} available here: {verdict}")
    if ranks:
        console.print(rank_table(config))


def _table(plan: MemoryPlan) -> Table:
    """One row a stage, one column a part of the peak."""
    unit, size = ("GiB", 2**30) if plan.largest.peak >= 2**30 else ("MiB", 2**20)
    table = Table(
        title=f"{unit} of one rank at its fullest moment, by pipeline stage",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for header in ("stage", "parameters", "on a rank", "in flight", *parts(plan.largest), "peak"):
        table.add_column(header.replace(" ", "\n"), justify="right", no_wrap=True)
    for stage in plan.stages:
        sizes = [f"{part / size:,.1f}" for part in (*parts(stage).values(), stage.peak)]
        counts = [f"{count:,}" for count in (stage.stage, stage.parameters, stage.rank_parameters, stage.in_flight)]
        table.add_row(*counts, *sizes, style="bold" if stage is plan.largest else "")
    return table
