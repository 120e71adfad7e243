"""Output of `megads plan`: tables, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.api import (
    ConfigError,
    Machine,
    Recompute,
    RootConfig,
    VisibleConsole,
    available_memory,
    gib,
    output_width,
    resolve_auto,
)
from megads.launch.layout import this_machine
from megads.model.model_size import active_parameter_count, hardware_flops_per_token, model_flops_per_token
from megads.tools.plan import tables
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.devices import Device
from megads.tools.plan.host_copies import copies_json
from megads.tools.plan.longest_sequence import LongestSequence, longest_json, longest_sequences, longest_table
from megads.tools.plan.memory import MemoryPlan
from megads.tools.plan.run_plan import (
    MemoryNeed,
    engine_text,
    largest_phase,
    machine_of,
    memory_need,
    micro_batches,
    parameter_text,
    parts,
    plan_of,
    step_model_of,
    step_of,
    worst_load_peak,
)
from megads.tools.plan.search_output import show_search
from megads.tools.plan.step import (
    device_of,
    expected_graphs,
    network_of,
    placement_json,
    print_step,
    step_json,
    write_plot,
)
from megads.tools.plan.step_estimate import StepEstimate
from megads.tools.plan.step_time import ScheduleForecast, Speed, perfetto_trace, simulated_step
from megads.tools.report.config import require_matplotlib

_TABLE_WIDTH = 176
"""Width of the widest table in characters; a narrower terminal wraps lines, which is better than cut numbers."""


@dataclass(frozen=True)
class RunPlan:
    """A run with its plan, as printed.

    Attributes:
        asked: what to plan and how to print it.
        run: config of the run, with explicit values instead of auto.
        choices: lines that explain these values.
        config: config of the training phase with the highest peak memory of a rank, which is planned.
        cuda: whether ranks compute on GPUs.
        memory: memory of all ranks.
        need: what of that the machine has; None if not known.
        forecast: the pipeline schedule.
        compared: other schedules of the layout; empty if not asked for.
        longest: longest sequences that fit; empty if not asked for.
        device: device of known speed; None if none is named.
        step: estimated step on this device.
    """

    asked: PlanConfig
    run: RootConfig
    choices: Sequence[str]
    config: RootConfig
    cuda: bool
    memory: MemoryPlan
    need: MemoryNeed | None
    forecast: ScheduleForecast
    compared: list[tables.Candidate]
    longest: list[LongestSequence]
    device: Device | None
    step: StepEstimate | None


def show(asked: PlanConfig) -> None:
    """Prints the plan of a run; draws the files of `timeline` and `plot` if they are set."""
    device, width = device_of(asked), output_width(_TABLE_WIDTH)
    if asked.search and device is not None:
        show_search(asked, device, width)
        return
    plan = plan_run(asked, device)
    if asked.timeline is not None:
        _draw(plan.forecast, Path(asked.timeline), timed=asked.rank_tflops is not None)
    if plan.step is not None and device is not None and asked.plot is not None:
        write_plot(Path(asked.plot), plan.step, device)
    if asked.json:
        print(json.dumps(as_json(plan), indent=2))
        return
    console = VisibleConsole(highlight=False)
    console.width = width
    if tables.has_groups(plan.run):
        console.print(tables.parameter_group_table(plan.run))
    if plan.run.train.phases:
        network = network_of(asked)
        console.print(tables.phase_table(plan.run, cuda=plan.cuda, device=device, network=network))
        console.print("the rest of the plan is for the training phase with the highest peak memory of a rank")
    _print(console, plan)
    if plan.step is not None and device is not None:
        print_step(console, plan.step, plan.config, device, network_of(asked))
    _print_asked(console, plan)


def _print_asked(console: VisibleConsole, plan: RunPlan) -> None:
    """Prints the tables that keys ask for."""
    asked = plan.asked
    if plan.compared:
        console.print(tables.schedule_table(plan.compared, in_seconds=asked.rank_tflops is not None))
        for one in plan.compared:
            if one.outlook is None:
                console.print(f"{one.name} with {one.virtual_stages} stages a rank: {one.reason}")
    if plan.longest:
        console.print(longest_table(plan.longest))
    if asked.ranks:
        console.print(tables.rank_table(plan.config, cuda=plan.cuda))


def plan_run(asked: PlanConfig, device: Device | None) -> RunPlan:
    """Plans a run.

    Args:
        asked: the plan's config.
        device: device of known speed; None if none is named.

    Raises:
        ConfigError: The layout is invalid, or depends on GPU memory that is not known.
    """
    machine = machine_of(device) if device else _machine(asked, asked.device)
    if machine is None and asked.parallel.recompute is Recompute.auto:
        raise ConfigError(
            "parallel.recompute = auto depends on GPU memory, and this machine has no GPU: set "
            "cluster.gpu_memory_gib, or plan with device=cpu"
        )
    if machine is None and asked.longest_sequence:
        raise ConfigError(
            "longest_sequence = true depends on GPU memory, and this machine has no GPU: name a device (device=h100), "
            "or set cluster.gpu_memory_gib"
        )
    run, choices = resolve_auto(asked, machine)
    if device is not None:
        run, expected = expected_graphs(run, device, network_of(asked))
        choices += [expected] if expected else []
    if run.model.block.is_custom:
        name = run.model.block.name
        choices.append(f"activation memory of model.block.name={name} is not modelled: the built-in block's is used")
    cuda = machine is None or machine.per_gpu
    config = largest_phase(run, cuda=cuda)
    memory = plan_of(config, cuda=cuda)
    speed = Speed(asked.rank_tflops or 1.0, asked.link_gigabytes_per_s, asked.link_latency_us)
    return RunPlan(
        asked=asked,
        run=run,
        choices=choices,
        config=config,
        cuda=cuda,
        memory=memory,
        need=memory_need(machine, memory) if machine else None,
        forecast=tables.forecast_of(config, speed),
        compared=list(tables.candidates(config, machine, speed)) if asked.schedules else [],
        longest=longest_sequences(config, machine, device) if asked.longest_sequence and machine else [],
        device=device,
        step=step_of(config, device, network_of(asked)) if device else None,
    )


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
        "hardware_flops_per_token": hardware_flops_per_token(
            config.model, train.seq_len, blocks, chunked_mlp=config.ops.mlp_chunk is not None
        ),
        "tokens_per_step": tokens,
        "flops_per_step": flops * tokens,
        "micro_batches": micro_batches(config),
    }


def as_json(plan: RunPlan) -> dict[str, Any]:
    """The plan as JSON-serializable values; all sizes in bytes."""
    config, memory, need = plan.config, plan.memory, plan.need
    stages = []
    for stage in memory.stages:
        entry = dataclasses.asdict(stage)
        entry["phases"] = [{"name": moment.name, "bytes": moment.total} for moment in stage.phases]
        entry |= {"fullest": dataclasses.asdict(stage.fullest), "permanent": stage.permanent, "peak": stage.peak}
        entry |= {"device_peak": stage.device_peak, "saved": stage.saved}
        stages.append(entry)
    printed = {
        "parameters": memory.parameters,
        "active_parameters": active_parameter_count(config.model),
        "largest_rank_worst_load_bytes": worst_load_peak(config, cuda=plan.cuda),
        "ranks": config.parallel.world_size,
        "engine": config.resolved_engine.value,
        "largest_rank": memory.largest.first_rank,
        "largest_rank_bytes": memory.largest.peak,
        "all_ranks_bytes": memory.all_ranks,
        "machine": None if need is None else {**dataclasses.asdict(need), "fits": need.fits},
        **step_compute(config, memory),
        "bubble_share": plan.forecast.unit_bubble_share,
        "pipeline": tables.forecast_json(plan.forecast),
        "stages": stages,
    }
    if plan.step is not None and plan.device is not None:
        # Of the device with the most memory in use; on a CPU, of such a rank.
        peak = need.needed if need is not None and need.per_gpu else memory.largest.peak
        printed |= step_json(plan.step, peak)
        printed["placement"] = placement_json(config.parallel, plan.device, network_of(plan.asked))
        if copies := step_model_of(config, plan.device, network_of(plan.asked)).copies():
            printed["offload"] = copies_json(copies)
    if plan.longest:
        printed["longest_sequences"] = longest_json(plan.longest)
    if plan.asked.ranks:
        printed["places"] = tables.places_json(config, cuda=plan.cuda)
    if plan.compared:
        printed["schedules"] = tables.schedules_json(plan.compared)
    if plan.run.train.phases:
        printed["training_phases"] = tables.phases_json(
            plan.run, cuda=plan.cuda, device=plan.device, network=network_of(plan.asked)
        )
    if tables.has_groups(plan.run):
        printed["parameter_groups"] = tables.parameter_groups(plan.run)
    return printed


def _print_host_memory(console: VisibleConsole, config: RootConfig, plan: MemoryPlan) -> None:
    """Prints what a rank holds in host memory: offloaded activations, and copies of the state for checkpoints."""
    if moved := max(stage.host_activations for stage in plan.stages):
        console.print(f"{gib(moved):>12} of host memory a rank for offloaded activations (parallel.offload)")
    if config.checkpoint.local_every_steps:
        size, text = tables.local_checkpoint_memory(config, plan)
        console.print(f"{gib(size):>12} {text}")
    elif config.checkpoint.copies(plan.largest.saved):
        console.print(
            f"{gib(plan.largest.saved):>12} of host memory for a copy of the state while a checkpoint is written, if "
            "available (checkpoint.async_save)"
        )


def _print(console: VisibleConsole, planned: RunPlan) -> None:
    config, plan, need, found = planned.config, planned.memory, planned.need, planned.forecast
    parallel, train, step = config.parallel, config.train, step_compute(config, plan)
    console.print(
        f"{parameter_text(config.model)} on {parallel.world_size} ranks = {parallel.product}, {train.precision}"
    )
    console.print(
        f"{step['flops_per_token']:.4g} FLOPs a token, {step['flops_per_step']:.4g} a step of "
        f"{step['tokens_per_step']:,} tokens = {step['micro_batches']} micro-batches x {train.micro_batch_size} "
        f"samples x {parallel.dp} replicas x {train.seq_len} tokens"
    )
    console.print(f"engine: {engine_text(config)}")
    if parallel.pp > 1:
        console.print(f"pipeline: {tables.schedule_line(found)}")
    hardware = step["hardware_flops_per_token"]
    if hardware > step["flops_per_token"]:
        more = hardware / step["flops_per_token"] - 1
        console.print(f"{hardware:.4g} hardware FLOPs a token including recomputation, {more:+.1%}")
    for choice in planned.choices:
        console.print(choice)
    unit, size = ("GiB", 2**30) if plan.largest.peak >= 2**30 else ("MiB", 2**20)
    headers = ("stage", "parameters", "on a rank", "in flight", "recomputed", *parts(plan.largest), "peak")
    columns = (">" + header.replace(" ", "\n") for header in headers)
    table = tables.new_table(f"peak memory of one rank in {unit}, by pipeline stage", *columns, gap_left=True)
    for stage in plan.stages:
        modes = Counter(mode for mode in stage.recomputation if mode is not Recompute.none)
        recomputed = ", ".join(f"{count} of {len(stage.recomputation)} {mode}" for mode, count in modes.items())
        sizes = [f"{part / size:,.1f}" for part in (*parts(stage).values(), stage.peak)]
        counts = [f"{count:,}" for count in (stage.stage, stage.parameters, stage.rank_parameters, stage.in_flight)]
        table.add_row(*counts, recomputed or "none", *sizes, style="bold" if stage is plan.largest else "")
    console.print(table)
    largest = plan.largest
    console.print(
        f"peak: rank {largest.first_rank} with {gib(largest.peak)}, at {largest.fullest.name}; "
        f"{gib(largest.permanent)} of it permanent, plus in each part of a step:"
    )
    for moment in sorted(largest.phases, key=lambda phase: -phase.total):
        console.print(f"  {gib(moment.total):>12} {moment.name}")
    if (worst := worst_load_peak(config, cuda=planned.cuda)) is not None:
        console.print(
            f"this is with an even load of the experts: a rank whose experts get all tokens needs {gib(worst)}"
        )
    fullest = plan.fullest_device
    if fullest.non_tensor_memory:
        total = sum(fullest.non_tensor_memory.values())
        console.print(f"plus {gib(total)} on rank {fullest.first_rank}'s GPU outside of tensors (estimate):")
        for name, size in fullest.non_tensor_memory.items():
            console.print(f"  {gib(size):>12} {name}")
    _print_host_memory(console, config, plan)
    if need is not None:
        console.print(f"{need}: {'fits' if need.fits else 'does not fit'}")
