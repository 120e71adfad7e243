"""Output of `megads plan`: tables, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config.root import RootConfig
from megads.errors import ConfigError
from megads.launch.layout import Machine, resolve_auto, this_machine
from megads.model.model_size import hardware_flops_per_token, model_flops_per_token
from megads.parallel.config import Recompute
from megads.runtime.machine_memory import available_memory, gib
from megads.runtime.rich_console import VisibleConsole, output_width
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.devices import Device
from megads.tools.plan.memory import MemoryPlan, StageMemory
from megads.tools.plan.run_plan import (
    MemoryNeed,
    engine_text,
    largest_phase,
    machine_of,
    memory_need,
    micro_batches,
    parts,
    plan_of,
    step_of,
)
from megads.tools.plan.step import device_of, network_of, placement_json, print_step, step_json, write_plot
from megads.tools.plan.step_time import ScheduleForecast, Speed, perfetto_trace, simulated_step
from megads.tools.plan.tables import (
    candidates,
    forecast_json,
    forecast_of,
    has_groups,
    local_checkpoint_memory,
    parameter_group_table,
    parameter_groups_json,
    phase_table,
    phases_json,
    places_json,
    rank_table,
    refusals,
    schedule_line,
    schedule_table,
    schedules_json,
)
from megads.tools.report.config import require_matplotlib

_TABLE_WIDTH = 176
"""Width of the widest table in characters; a narrower terminal wraps lines, which is better than cut numbers."""


def show(asked: PlanConfig) -> None:
    """Prints the plan of a run; draws the files of `timeline` and `plot` if they are set."""
    device = device_of(asked)
    if asked.search and device is not None:
        _search(asked, device)
        return
    machine = machine_of(device) if device else _machine(asked, asked.device)
    config: RootConfig = asked
    if machine is None and config.parallel.recompute is Recompute.auto:
        raise ConfigError(
            "parallel.recompute = auto depends on GPU memory, and this machine has no GPU: set "
            "cluster.gpu_memory_gib, or plan with device=cpu"
        )
    config, choices = resolve_auto(config, machine)
    if config.model.block.is_custom:
        name = config.model.block.name
        choices = [
            *choices,
            f"activation memory of model.block.name={name} is not modelled: the built-in block's is used",
        ]
    cuda = machine is None or machine.per_gpu
    run, config = config, largest_phase(config, cuda=cuda)
    plan = plan_of(config, cuda=cuda)
    need = memory_need(machine, plan) if machine else None
    step = step_of(config, device, network_of(asked)) if device else None
    speed = Speed(asked.rank_tflops or 1.0, asked.link_gigabytes_per_s, asked.link_latency_us)
    found = forecast_of(config, speed)
    if asked.timeline is not None:
        _draw(found, Path(asked.timeline), timed=asked.rank_tflops is not None)
    if step is not None and device is not None and asked.plot is not None:
        write_plot(Path(asked.plot), step, device)
    compared = list(candidates(config, machine, speed)) if asked.schedules else []
    if asked.json:
        held = {"places": places_json(config, cuda=cuda)} if asked.ranks else {}
        schedules = {"schedules": schedules_json(compared)} if compared else {}
        timed = step_json(step, _memory_of_a_device(plan, need), device) if step and device else {}
        if device is not None:
            timed["placement"] = placement_json(config.parallel, device, network_of(asked))
        phases = {"training_phases": phases_json(run, cuda=cuda)} if run.train.phases else {}
        groups = {"parameter_groups": parameter_groups_json(run)} if has_groups(run) else {}
        print(json.dumps(as_json(config, plan, need, found) | timed | held | schedules | phases | groups, indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = output_width(_TABLE_WIDTH)
    _print_groups_and_phases(console, run, cuda=cuda)
    _print(console, config, plan, need, found, choices)
    if step is not None and device is not None:
        print_step(console, step, config, device, network_of(asked))
    if compared:
        console.print(schedule_table(compared, in_seconds=asked.rank_tflops is not None))
        for reason in refusals(compared):
            console.print(reason)
    if asked.ranks:
        console.print(rank_table(config, cuda=cuda))


def _print_groups_and_phases(console: VisibleConsole, run: RootConfig, *, cuda: bool) -> None:
    """Prints the tables of parameter groups and training phases, if the run has any."""
    if has_groups(run):
        console.print(parameter_group_table(run))
    if run.train.phases:
        console.print(phase_table(run, cuda=cuda))
        console.print("the rest of the plan is for the training phase with the highest peak memory of a rank")


def _search(asked: PlanConfig, device: Device) -> None:
    """Searches for the fastest layouts and prints them."""
    from megads.tools.plan.search import answer_json, find_layouts, layout_query, print_answer

    answer = find_layouts(asked, layout_query(asked, device))
    if asked.json:
        print(json.dumps(answer_json(answer), indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = output_width(_TABLE_WIDTH)
    print_answer(console, answer)


def _memory_of_a_device(plan: MemoryPlan, need: MemoryNeed | None) -> int:
    """Peak bytes of the device with the most memory in use; on a CPU, of such a rank."""
    return need.needed if need is not None and need.per_gpu else plan.largest.peak


def _draw(found: ScheduleForecast, path: Path, *, timed: bool) -> None:
    """Writes the simulated step as a picture or as a Perfetto trace.

    Raises:
        ConfigError: The file cannot be written, or matplotlib is not installed.
    """
    traces, schedule = simulated_step(found.timeline), found.schedule
    title = f"{schedule.name}, {schedule.placement.num_ranks} ranks, {schedule.micro_batches} micro-batches, planned"
    try:
        if path.suffix == ".json":
            path.write_text(json.dumps(perfetto_trace({title: traces})))
            return
        require_matplotlib()
        from megads.tools.report.style import house_style
        from megads.tools.report.timeline import Panel, draw_steps

        with house_style():
            draw_steps([Panel(title, traces)], timed=timed).savefig(path, facecolor="white", dpi=160)
    except OSError as error:
        raise ConfigError(f"timeline = {path} cannot be written ({error.strerror}): choose another file") from error


def _machine(config: RootConfig, device: str) -> Machine | None:
    """Memory of the machine on which ranks would run; None for GPUs of another machine whose memory is not known."""
    if device == "cpu":
        return Machine(available_memory(), per_gpu=False)
    share = config.cluster.ranks_per_gpu
    here = this_machine(ranks_per_gpu=share)
    if device == "auto" or here.per_gpu:
        return here
    size = config.cluster.gpu_memory_gib
    return None if size is None else Machine(int(size * 2**30), per_gpu=True, ranks_per_gpu=share)


def step_compute(config: RootConfig, plan: MemoryPlan) -> dict[str, Any]:
    """FLOPs, tokens and micro-batches of a step with the full global batch size."""
    train = config.train
    flops = model_flops_per_token(config.model, train.seq_len)
    blocks = [mode for stage in plan.stages for mode in stage.recomputation]
    tokens = train.global_batch_size * train.seq_len
    return {
        "flops_per_token": flops,
        "hardware_flops_per_token": hardware_flops_per_token(config.model, train.seq_len, blocks),
        "tokens_per_step": tokens,
        "flops_per_step": flops * tokens,
        "micro_batches": micro_batches(config),
    }


def as_json(config: RootConfig, plan: MemoryPlan, need: MemoryNeed | None, found: ScheduleForecast) -> dict[str, Any]:
    """The plan as JSON-serializable values; all sizes in bytes."""
    stages = []
    for stage in plan.stages:
        entry = dataclasses.asdict(stage)
        entry["phases"] = [{"name": moment.name, "bytes": moment.total} for moment in stage.phases]
        entry |= {"fullest": dataclasses.asdict(stage.fullest), "permanent": stage.permanent, "peak": stage.peak}
        entry |= {"device_peak": stage.device_peak, "saved": stage.saved}
        stages.append(entry)
    return {
        "parameters": plan.parameters,
        "ranks": config.parallel.world_size,
        "engine": config.resolved_engine.value,
        "largest_rank": plan.largest.first_rank,
        "largest_rank_bytes": plan.largest.peak,
        "all_ranks_bytes": plan.all_ranks,
        "machine": None if need is None else {**dataclasses.asdict(need), "fits": need.fits},
        **step_compute(config, plan),
        "bubble_share": found.unit_bubble_share,
        "pipeline": forecast_json(found),
        "stages": stages,
    }


def _print(
    console: VisibleConsole,
    config: RootConfig,
    plan: MemoryPlan,
    need: MemoryNeed | None,
    found: ScheduleForecast,
    choices: Sequence[str],
) -> None:
    parallel, train, step = config.parallel, config.train, step_compute(config, plan)
    console.print(
        f"{plan.parameters:,} parameters on {parallel.world_size} ranks = {parallel.product}, {train.precision}"
    )
    console.print(
        f"{step['flops_per_token']:.4g} FLOPs a token, {step['flops_per_step']:.4g} a step of "
        f"{step['tokens_per_step']:,} tokens = {step['micro_batches']} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas x {train.seq_len} tokens"
    )
    console.print(f"engine: {engine_text(config)}")
    if parallel.pp > 1:
        console.print(f"pipeline: {schedule_line(found)}")
    hardware = step["hardware_flops_per_token"]
    if hardware > step["flops_per_token"]:
        more = hardware / step["flops_per_token"] - 1
        console.print(f"{hardware:.4g} hardware FLOPs a token including recomputation, {more:+.1%}")
    for choice in choices:
        console.print(choice)
    console.print(_table(plan))
    largest = plan.largest
    console.print(
        f"peak: rank {largest.first_rank} with {gib(largest.peak)}, at {largest.fullest.name}; "
        f"{gib(largest.permanent)} of it permanent, plus in each part of a step:"
    )
    for moment in sorted(largest.phases, key=lambda phase: -phase.total):
        console.print(f"  {gib(moment.total):>12} {moment.name}")
    fullest = plan.fullest_device
    if fullest.non_tensor_memory:
        total = sum(fullest.non_tensor_memory.values())
        console.print(f"plus {gib(total)} on rank {fullest.first_rank}'s GPU outside of tensors (estimate):")
        for name, size in fullest.non_tensor_memory.items():
            console.print(f"  {gib(size):>12} {name}")
    if config.checkpoint.local_every_steps:
        size, text = local_checkpoint_memory(config, plan)
        console.print(f"{gib(size):>12} {text}")
    elif config.checkpoint.copies(largest.saved):
        console.print(
            f"{gib(largest.saved):>12} of host memory for a copy of the state while a checkpoint is written, if "
            "available (checkpoint.async_save)"
        )
    if need is not None:
        console.print(f"{need}: {'fits' if need.fits else 'does not fit'}")


def _recomputation(stage: StageMemory) -> str:
    """Number of recomputed blocks of a stage by mode, for example "2 of 6 full"; "none" without recomputation."""
    counts = Counter(mode for mode in stage.recomputation if mode is not Recompute.none)
    return ", ".join(f"{count} of {len(stage.recomputation)} {mode}" for mode, count in counts.items()) or "none"


def _table(plan: MemoryPlan) -> Table:
    """One row per pipeline stage, one column per part of the peak."""
    unit, size = ("GiB", 2**30) if plan.largest.peak >= 2**30 else ("MiB", 2**20)
    table = Table(
        title=f"peak memory of one rank in {unit}, by pipeline stage",
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
