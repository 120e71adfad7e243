"""`megads plan search=true`: the ten fastest layouts that fit, why others are worse, and overrides of the fastest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config.root import RootConfig, check_shape
from megads.errors import ConfigError
from megads.launch.layout import resolve_auto
from megads.parallel.config import Partition
from megads.runtime.machine_memory import gib
from megads.runtime.progress import Progress
from megads.runtime.rich_console import VisibleConsole
from megads.tools.plan.collectives import communication_group, crosses_nodes
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.devices import Device
from megads.tools.plan.layout_search import (
    MOST_FITTING,
    EvaluatedCandidate,
    Found,
    LayoutCandidate,
    LayoutQuery,
    neighbours,
    search,
    step_model,
)
from megads.tools.plan.run_plan import machine_of, megads_execution, memory_need, plan_of, shape_of
from megads.tools.plan.step import network_of, seconds_text, step_json

_MIN_SHARE = 0.03
"""Smallest increase of a part, as a share of the step time, that is listed as a reason."""


@dataclass(frozen=True)
class LayoutSearchResult:
    """Result of a layout search.

    Attributes:
        asked: model, devices and constraints of the search.
        found: fastest layouts, and those examined that do not fit.
        others: plausible alternatives to the fastest layout, each with a description of the change.
        seconds: duration of the search.
    """

    asked: LayoutQuery
    found: Found
    others: tuple[tuple[str, EvaluatedCandidate], ...]
    seconds: float


def layout_query(asked: PlanConfig, device: Device) -> LayoutQuery:
    """Returns the search that a config asks for.

    Raises:
        ConfigError: The number of devices is not given.
    """
    devices = asked.gpus if asked.gpus is not None else asked.parallel.world_size
    if asked.gpus is None and devices == 1:
        raise ConfigError("search = true needs a number of devices: set gpus=1024, for example")
    parallel = asked.parallel
    if parallel.partition is Partition.auto:
        parallel = replace(parallel, partition=Partition.weighted, layer_costs=None)
    return LayoutQuery(
        asked.model,
        parallel,
        asked.train.seq_len,
        asked.train.global_batch_size,
        devices,
        device,
        shape_of(replace(asked, parallel=replace(parallel, dp=1))).width,
        machine_of(device).available,
        network_of(asked),
        megads_execution(asked, device),
        asked.engine,
    )


def find_layouts(config: RootConfig, asked: LayoutQuery, most: int = 10) -> LayoutSearchResult:
    """Searches for the fastest layouts; examined candidates are validated like a run, with exact memory plans."""
    start = time.perf_counter()
    with Progress("planning layouts") as progress:
        counted = 0

        def examine(candidate: LayoutCandidate) -> EvaluatedCandidate:
            nonlocal counted
            counted += 1
            progress.update(note=f"{counted} so far")
            return examined(config, asked, candidate)

        found = search(asked, examine, most)
        others: list[tuple[str, EvaluatedCandidate]] = []
        while found.best:
            others = [(what, examine(one)) for what, one in neighbours(asked, found.best[0].candidate)]
            faster = [one for _, one in others if _fits(asked, one) and one.seconds < found.best[0].seconds]
            if not faster:
                break
            # Only if the search has stopped at its limit, or if a neighbour is none of its candidates.
            known = {overrides(one.candidate): one for one in (*found.best, *faster)}
            found = replace(found, best=tuple(sorted(known.values(), key=lambda one: one.seconds)[:most]))
    return LayoutSearchResult(asked, found, tuple(others), time.perf_counter() - start)


def _fits(asked: LayoutQuery, one: EvaluatedCandidate) -> bool:
    return not one.refused and one.memory_bytes <= asked.memory_bytes


def examined(config: RootConfig, asked: LayoutQuery, candidate: LayoutCandidate) -> EvaluatedCandidate:
    """Plans a candidate's memory exactly and, if it fits, its step time."""
    train = replace(config.train, micro_batch_size=candidate.micro_batch_size)
    config = replace(config, parallel=candidate.parallel, train=train)
    try:
        check_shape(config)
        if candidate.parallel.partition is Partition.auto:
            config, _ = resolve_auto(config, None)
        memory = _memory_of(config, asked)
        if memory > asked.memory_bytes:
            return EvaluatedCandidate(candidate, "", memory)
        return EvaluatedCandidate(candidate, "", memory, step_model(asked, candidate).estimate())
    except ConfigError as error:
        return EvaluatedCandidate(candidate, str(error))


def _memory_of(config: RootConfig, asked: LayoutQuery) -> int:
    """Peak bytes of a device: the maximum of the first pipeline rank, which has the most micro-batches in flight, the
    second, which has the most communicators, and the last, which has the logits. On a CPU all ranks share the memory.
    """
    cuda, last = not asked.device.on_cpu, config.parallel.pp - 1
    ranks = {0, min(1, last), last} if cuda else None
    return memory_need(machine_of(asked.device), plan_of(config, cuda=cuda, ranks=ranks)).needed


def overrides(candidate: LayoutCandidate) -> str:
    """The layout as overrides for `megads train experiment=...`."""
    parallel = candidate.parallel
    words = [f"parallel.{axis}={size}" for axis, size in parallel.sizes.items()]
    words += [f"parallel.schedule={parallel.schedule}"]
    if parallel.virtual_stages is not None:
        words.append(f"parallel.virtual_stages={parallel.virtual_stages}")
    words += [
        f"parallel.sequence_parallel={str(parallel.sequence_parallel).lower()}",
        f"parallel.recompute={parallel.recompute}",
        f"parallel.zero_stage={parallel.zero_stage}",
        f"train.micro_batch_size={candidate.micro_batch_size}",
    ]
    return " ".join(words)


def layout_text(candidate: LayoutCandidate) -> str:
    """For example tp 8 sp, pp 8 interleaved x 3, dp 16, micro-batch 2, recompute selective, ZeRO-1."""
    own = candidate.parallel
    cut = " sp" if own.sequence_parallel else ""
    virtual = f" x {own.virtual_stages}" if own.virtual_stages else ""
    pipeline = f", pp {own.pp} {own.schedule}{virtual}" if own.pp > 1 else ""
    context = f", cp {own.cp}" if own.cp > 1 else ""
    return (
        f"tp {own.tp}{cut}{context}{pipeline}, dp {own.dp}, micro-batch {candidate.micro_batch_size}, recompute "
        f"{own.recompute}, ZeRO-{own.zero_stage}"
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
    why = ", ".join(f"{_word(asked, name, loser)} {share:+.0%}" for name, share in grown[:3]) or "no single part"
    return f"{slower:+.1%}: {why}"


def _word(asked: LayoutQuery, name: str, of: EvaluatedCandidate) -> str:
    """Name of a part; marks communication that crosses nodes."""
    axes = {"tp": ("tp",), "cp": ("cp",), "grad_reduce": ("cp", "dp"), "param_gather": ("cp", "dp")}.get(name)
    if axes is None:
        return name
    group = communication_group(of.candidate.parallel, axes, asked.device.ranks_per_node, asked.network)
    return f"{name} over nodes" if crosses_nodes(group) else name


def print_answer(console: VisibleConsole, answer: LayoutSearchResult) -> None:
    """Prints the result as a table with explanations."""
    asked, found = answer.asked, answer.found
    console.print(
        f"{found.considered:,} layouts of {asked.devices:,} x {asked.device.name} in {answer.seconds:.1f} s; "
        f"{found.pruned:,} cannot fit {gib(asked.memory_bytes)}, {found.examined} planned "
        "exactly"
    )
    if not found.complete:
        console.print(f"stopped after {MOST_FITTING} layouts that fit: a faster one is possible")
    if not found.best:
        console.print(f"none fits: {_nearest(answer)}")
        return
    console.print(_table(found.best))
    winner = found.best[0]
    console.print("alternatives to the fastest layout:")
    for what, other in answer.others:
        console.print(f"  {what}: {reasons(asked, other, winner)}")
    faster = sorted(found.unfit, key=lambda one: one.candidate.bound_s)[:3]
    for one in faster:
        console.print(f"  {layout_text(one.candidate)}: {reasons(asked, one, winner)}")
    console.print("overrides of the fastest layout:")
    console.print(f"  {overrides(winner.candidate)}", soft_wrap=True)


def _nearest(answer: LayoutSearchResult) -> str:
    least = min(answer.found.unfit, key=lambda one: one.memory_bytes, default=None)
    if least is None:
        return "use more devices, or a smaller model"
    missing = gib(least.memory_bytes - answer.asked.memory_bytes)
    return f"{layout_text(least.candidate)} needs {missing} more; use more devices, or a smaller model"


def _table(best: Sequence[EvaluatedCandidate]) -> Table:
    table = Table(title="fastest layouts that fit", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("step", "MFU", "tokens/s\na device", "memory", "pipeline", "tp"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("layout")
    for number, one in enumerate(best):
        assert one.estimate is not None
        share = {name: seconds / one.seconds for name, seconds in one.estimate.parts.items()}
        table.add_row(
            seconds_text(one.seconds),
            f"{one.estimate.mfu:.1%}",
            f"{one.estimate.tokens_per_s_per_device:,.0f}",
            gib(one.memory_bytes),
            f"{share.get('pipeline', 0.0):.1%}",
            f"{share.get('tp', 0.0):.1%}",
            layout_text(one.candidate),
            style="bold" if number == 0 else "",
        )
    return table


def answer_json(answer: LayoutSearchResult) -> dict[str, Any]:
    """The result as JSON-serializable values."""
    found = answer.found

    def row(one: EvaluatedCandidate) -> dict[str, Any]:
        assert one.estimate is not None
        figures = step_json(one.estimate, one.memory_bytes, answer.asked.device)
        return {"layout": layout_text(one.candidate), "overrides": overrides(one.candidate), **figures}

    best = [row(one) for one in found.best]
    return {
        "devices": answer.asked.devices,
        "considered": found.considered,
        "cannot_fit": found.pruned,
        "examined": found.examined,
        "complete": found.complete,
        "seconds": answer.seconds,
        "best": best,
        "overrides": best[0]["overrides"] if best else None,
        "others": [
            {"change": what, "reason": reasons(answer.asked, one, found.best[0])} for what, one in answer.others
        ],
    }
