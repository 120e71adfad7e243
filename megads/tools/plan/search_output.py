"""Output of `megads plan search=true`: the fastest layouts, why others are worse, and overrides of the fastest."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from megads.api import ConfigError, Partition, RootConfig, VisibleConsole, gib
from megads.parallel.config import Offload
from megads.tools.plan.collectives import communication_group
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.devices import Device
from megads.tools.plan.run_plan import machine_of
from megads.tools.plan.search import (
    MOST_FITTING,
    EvaluatedCandidate,
    Found,
    LayoutCandidate,
    LayoutQuery,
    find_layouts,
    overrides,
)
from megads.tools.plan.step import network_of, seconds_text, step_json
from megads.tools.plan.tables import new_table

_MIN_SHARE = 0.03
"""Smallest increase of a part, as a share of the step time, that is listed as a reason."""


def show_search(asked: PlanConfig, device: Device, width: int) -> None:
    """Searches for the fastest layouts of a config and prints them.

    Args:
        asked: the plan's config.
        device: device of each rank.
        width: width of the output in characters.

    Raises:
        ConfigError: The number of devices is not given.
    """
    devices = asked.gpus if asked.gpus is not None else asked.parallel.world_size
    if asked.gpus is None and devices == 1:
        raise ConfigError("search = true needs a number of devices: set gpus=1024, for example")
    config: RootConfig = asked
    if asked.parallel.partition is Partition.auto:
        parallel = replace(asked.parallel, partition=Partition.weighted, layer_costs=None)
        config = replace(asked, parallel=parallel)
    query = LayoutQuery(config, devices, device, machine_of(device).available, network_of(asked))
    found = find_layouts(query)
    if asked.json:
        print(json.dumps(answer_json(query, found), indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = width
    print_answer(console, query, found)


def layout_text(candidate: LayoutCandidate) -> str:
    """For example tp 8 sp, pp 8 interleaved x 3, dp 16, micro-batch 2, recompute selective, ZeRO-1."""
    own = candidate.parallel
    cut = " sp" if own.sequence_parallel else ""
    virtual = f" x {own.virtual_stages}" if own.virtual_stages else ""
    pipeline = f", pp {own.pp} {own.schedule}{virtual}" if own.pp > 1 else ""
    context = f", cp {own.cp} {own.context_text}" if own.cp > 1 else ""
    context += f", ep {own.ep}" if own.ep > 1 else ""
    context += "" if own.expert_tp else ", whole experts"
    saving = f", offload {own.offload}" if own.offload is not Offload.none else ""
    saving += f", MLP in chunks of {candidate.mlp_chunk}" if candidate.mlp_chunk is not None else ""
    return (
        f"tp {own.tp}{cut}{context}{pipeline}, dp {own.dp}, micro-batch {candidate.micro_batch_size}, recompute "
        f"{own.recompute}{saving}, ZeRO-{own.zero_stage}"
    )


def reasons(asked: LayoutQuery, loser: EvaluatedCandidate, winner: EvaluatedCandidate) -> str:
    """Why a layout is worse than the fastest: an error, missing memory, or the parts of its step that take longer."""
    if loser.refused:
        return loser.refused
    if loser.estimate is None or loser.memory_bytes > asked.memory_bytes:
        return f"does not fit by {gib(loser.memory_bytes - asked.memory_bytes)}"
    assert winner.estimate is not None
    base = winner.estimate.step_time_s
    slower = loser.seconds / base - 1
    parts = {
        name: (seconds - winner.estimate.parts.get(name, 0.0)) / base for name, seconds in loser.estimate.parts.items()
    }
    grown = [(name, share) for name, share in sorted(parts.items(), key=lambda one: -one[1]) if share >= _MIN_SHARE]
    axes = {"tp": ("tp",), "cp": ("cp",), "grad_reduce": ("cp", "dp"), "param_gather": ("cp", "dp")}
    why = []
    for name, share in grown[:3]:
        over = ""
        if name in axes:
            group = communication_group(
                loser.candidate.parallel, axes[name], asked.device.ranks_per_node, asked.network
            )
            over = " over nodes" if group.nodes > 1 else ""
        why.append(f"{name}{over} {share:+.0%}")
    return f"{slower:+.1%}: {', '.join(why) or 'no single part'}"


def print_answer(console: VisibleConsole, asked: LayoutQuery, found: Found) -> None:
    """Prints the result as a table with explanations."""
    console.print(
        f"{found.considered:,} layouts of {asked.devices:,} x {asked.device.name} in {found.seconds:.1f} s; "
        f"{found.pruned:,} cannot fit {gib(asked.memory_bytes)}, {found.examined} planned "
        "exactly"
    )
    if not found.complete:
        console.print(f"stopped after {MOST_FITTING} layouts that fit: a faster one is possible")
    if not found.best:
        nearest = ""
        if found.unfit:
            least = min(found.unfit, key=lambda one: one.memory_bytes)
            missing = gib(least.memory_bytes - asked.memory_bytes)
            nearest = f"{layout_text(least.candidate)} needs {missing} more; "
        console.print(f"none fits: {nearest}use more devices, or a smaller model")
        return
    columns = (">step", ">MFU", ">tokens/s\na device", ">memory", ">pipeline", ">tp", "layout")
    table, winner = new_table("fastest layouts that fit", *columns), found.best[0]
    for one in found.best:
        assert one.estimate is not None
        table.add_row(
            seconds_text(one.seconds),
            f"{one.estimate.mfu:.1%}",
            f"{one.estimate.tokens_per_s_per_device:,.0f}",
            gib(one.memory_bytes),
            *(f"{one.estimate.parts.get(name, 0.0) / one.seconds:.1%}" for name in ("pipeline", "tp")),
            layout_text(one.candidate),
            style="bold" if one is winner else "",
        )
    console.print(table)
    console.print("alternatives to the fastest layout:")
    for what, other in found.others:
        console.print(f"  {what}: {reasons(asked, other, winner)}")
    for one in sorted(found.unfit, key=lambda one: one.candidate.bound_s)[:3]:
        console.print(f"  {layout_text(one.candidate)}: {reasons(asked, one, winner)}")
    console.print("overrides of the fastest layout:")
    console.print(f"  {overrides(winner.candidate)}", soft_wrap=True)


def answer_json(asked: LayoutQuery, found: Found) -> dict[str, Any]:
    """The result as JSON-serializable values."""
    best = []
    for one in found.best:
        assert one.estimate is not None
        figures = step_json(one.estimate, one.memory_bytes)
        best.append({"layout": layout_text(one.candidate), "overrides": overrides(one.candidate), **figures})
    return {
        "devices": asked.devices,
        "considered": found.considered,
        "cannot_fit": found.pruned,
        "examined": found.examined,
        "complete": found.complete,
        "seconds": found.seconds,
        "best": best,
        "overrides": best[0]["overrides"] if best else None,
        "others": [{"change": what, "reason": reasons(asked, one, found.best[0])} for what, one in found.others],
    }
