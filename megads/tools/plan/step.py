"""Output of `megads plan device=<name>`: step time and its breakdown, as a table with bars, JSON or a picture."""

from __future__ import annotations

import html
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.api import (
    LEAST_GRAPHS_SAVING,
    ConfigError,
    ParallelConfig,
    RootConfig,
    VisibleConsole,
    gib,
    resolve_auto,
)
from megads.tools.plan.collectives import Network, context_messages, placement, received_bytes
from megads.tools.plan.config import PlanConfig
from megads.tools.plan.devices import Device
from megads.tools.plan.host_copies import copies_line
from megads.tools.plan.run_plan import (
    bytes_per_element,
    connected_device,
    machine_of,
    memory_need,
    plan_of,
    step_model_of,
    step_of,
    with_graphs,
)
from megads.tools.plan.step_estimate import StepEstimate
from megads.tools.plan.tables import new_table
from megads.tools.report.config import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 40
"""Width in characters of a bar that stands for the whole step."""
MEANING = {
    "matmul": "GEMMs",
    "attention": "attention cores",
    "elementwise": "norms, activations, residuals, dropouts, loss",
    "host": "Python, autograd and kernel launches that the device waits for",
    "recompute": "activation recomputation in the backward pass",
    "main_grad": "fp32 gradient accumulation (main_grad)",
    "tp": "exposed tensor-parallel communication",
    "cp": "exposed context-parallel communication of attention",
    "ep": "exposed all-to-alls of the experts' rows",
    "offload": "exposed copies of offloaded activations to the host and back",
    "pipeline": "pipeline idle time: bubble, exposed p2p, stage imbalance",
    "grad_reduce": "exposed gradient reduction",
    "zero3_gather": "exposed ZeRO-3 weight all-gathers",
    "optimizer": "gradient norm and weight update",
    "param_gather": "all-gather of updated weights (ZeRO-1)",
    "checkpoint": "state copies for checkpoints, averaged over steps",
    "stragglers": "waiting for the slowest rank",
}


def device_of(asked: PlanConfig) -> Device | None:
    """The device given by name or file, with the cluster's links; None for auto, cpu and cuda."""
    if not asked.names_device:
        return None
    return connected_device(asked.device, asked, asked.nic_gigabytes_per_s)


def network_of(asked: PlanConfig) -> Network:
    """The network between nodes."""
    return Network(asked.pod_ranks, asked.oversubscription)


def planned_step(asked: PlanConfig) -> StepEstimate | None:
    """Estimates a step of the layout, resolving settings that are auto; None if no device is named."""
    device = device_of(asked)
    if device is None:
        return None
    config, _choices = resolve_auto(asked, machine_of(device))
    config, _expected = expected_graphs(config, device, network_of(asked))
    return step_of(config, device, network_of(asked))


def step_json(estimate: StepEstimate, memory_bytes: int) -> dict[str, Any]:
    """The estimate as JSON-serializable values, in seconds and bytes."""
    return {
        "step_time_s": estimate.step_time_s,
        "likely_range_s": list(estimate.likely_range_s),
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "tflops_per_device": estimate.tflops_per_device,
        "mfu": estimate.mfu,
        "memory_bytes": memory_bytes,
        "parts": dict(by_size(estimate)),
    }


def step_line(estimate: StepEstimate, device: Device) -> str:
    """One-line summary of the estimate."""
    low, high = estimate.likely_range_s
    return (
        f"a step on {estimate.ranks:,} x {device.name}: {seconds_text(estimate.step_time_s)} "
        f"(likely {seconds_text(low)} to {seconds_text(high)}), "
        f"{estimate.tokens_per_s_per_device:,.0f} tokens/s and {estimate.tflops_per_device:.1f} model TFLOPs a device, "
        f"MFU {estimate.mfu:.1%} of {estimate.peak_tflops:g}"
    )


def placement_json(parallel: ParallelConfig, device: Device, network: Network) -> dict[str, Any]:
    """Communication groups of the layout as JSON-serializable values."""
    return {
        axes: {"ranks": group.size, "nodes": group.nodes, "ranks_a_node": group.per_node, "slowdown": group.slowdown}
        for axes, group in placement(parallel, device.ranks_per_node, network).items()
    }


def placement_line(parallel: ParallelConfig, device: Device, network: Network) -> str:
    """One line that says which axes cross nodes and pods."""
    said = []
    for axes, group in placement(parallel, device.ranks_per_node, network).items():
        where = "inside a node"
        if group.nodes > 1:
            near = f", {group.per_node} ranks a node" if group.per_node > 1 else ""
            beyond = f", beyond pods of {network.pod_ranks}, {group.slowdown:g} x slower" if group.slowdown > 1 else ""
            where = f"over {group.nodes} nodes{near}{beyond}"
        said.append(f"{axes} {group.size} {where}")
    order = ", ".join(parallel.rank_order)
    return f"nodes of {device.ranks_per_node}, rank_order {order}: {'; '.join(said) or 'a single rank'}"


def context_line(config: RootConfig) -> str:
    """One line with the bytes that context parallelism communicates; empty without it."""
    parallel, train = config.parallel, config.train
    if parallel.cp == 1:
        return ""
    samples, layers = train.micro_batch_size, dict[tuple[float, float], int]()
    tokens = samples * train.seq_len / parallel.cp
    for kind, count in config.model.layer_kinds():
        received = received_bytes(context_messages(kind, parallel, tokens, bytes_per_element(config), samples))
        layers[received] = layers.get(received, 0) + count
    said = []
    for sizes, count in layers.items():
        where = "each layer" if len(layers) == 1 else f"each of {count} layers"
        forward, backward = (f"{size / 2**20:,.1f} MiB" for size in sizes)
        most = "at most " if parallel.is_ring else ""
        said.append(f"in {where} and micro-batch a rank receives {most}{forward} in the forward and {backward} in the")
    return f"context parallelism by {parallel.context_text}: {' backward pass, '.join(said)} backward pass"


def graphs_line(estimate: StepEstimate, config: RootConfig, device: Device, network: Network) -> str:
    """Time saved and memory needed by CUDA graphs; empty if the saving is too small or the memory does not suffice."""
    graphs, moe = with_graphs(config), config.model.moe
    shapes_vary = moe.enabled and moe.capacity_factor is None
    if device.on_cpu or config.ops.cuda_graphs or shapes_vary or config.parallel.why_no_cuda_graphs():
        return ""
    without, captured = estimate.step_time_s, step_of(graphs, device, network).step_time_s
    if captured > (1 - LEAST_GRAPHS_SAVING) * without:
        return ""
    machine = machine_of(device)
    plain, room = (memory_need(machine, plan_of(one, cuda=True)) for one in (config, graphs))
    if not room.fits:
        return ""
    more = f", with {gib(room.needed - plain.needed)} more on a GPU" if room.needed > plain.needed else ""
    return (
        f"kernel launches are slower than the device: with ops.cuda_graphs=true a step takes "
        f"{seconds_text(captured)} ({captured / without - 1:+.0%}){more}"
    )


def expected_graphs(config: RootConfig, device: Device, network: Network) -> tuple[RootConfig, str]:
    """Replaces ops.cuda_graphs=auto by the value that a run on a device is expected to measure.

    Args:
        config: config in which `resolve_auto` has left auto.
        device: device of the run.
        network: network between nodes.

    Returns:
        The config, and a line that explains the value; empty if it is not auto.
    """
    if not config.ops.graphs_undecided:
        return config, ""
    graphs, eager = with_graphs(config), replace(config, ops=replace(config.ops, cuda_graphs=False))
    captured_s, eager_s = (step_of(one, device, network).step_time_s for one in (graphs, eager))
    takes = captured_s <= (1 - LEAST_GRAPHS_SAVING) * eager_s
    return graphs if takes else eager, (
        f"ops.cuda_graphs=auto is expected to measure that a step takes {seconds_text(captured_s)} with graphs, "
        f"{seconds_text(eager_s)} without: {'graphs' if takes else 'no graphs'}"
    )


def print_step(
    console: VisibleConsole, estimate: StepEstimate, config: RootConfig, device: Device, network: Network
) -> None:
    """Prints step time, placement on nodes, advice on CUDA graphs, copies to the host, and the breakdown of the busiest
    pipeline rank."""
    console.print(step_line(estimate, device))
    console.print(placement_line(config.parallel, device, network))
    if said := context_line(config):
        console.print(said)
    if said := graphs_line(estimate, config, device, network):
        console.print(said)
    if said := copies_line(step_model_of(config, device, network).copies(), device):
        console.print(said)
    table, whole = new_table("where a step's time goes", "part", ">time", ">share", "", "what"), estimate.step_time_s
    for name, seconds in by_size(estimate):
        bar = "█" * round(_BAR * seconds / whole)
        table.add_row(name, seconds_text(seconds), f"{seconds / whole:.1%}", bar, MEANING[name])
    console.print(table)


def seconds_text(seconds: float) -> str:
    """Formats a time in seconds, or in milliseconds below one second."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"


_WORK = {"matmul", "attention", "elementwise", "recompute", "main_grad", "optimizer"}
"""Parts in which ranks compute; in the others they communicate or wait."""


def write_plot(path: Path, estimate: StepEstimate, device: Device) -> None:
    """Draws the parts of a step, the largest first.

    Args:
        path: output file: .png, .svg or .html.
        estimate: estimated step.
        device: device on which the step is planned.

    Raises:
        ConfigError: The file cannot be written, or matplotlib is not installed.
    """
    require_matplotlib()
    from megads.api import atomic_writer
    from megads.tools.report.html_page import document, footer, picture, table
    from megads.tools.report.style import house_style, png, svg

    said = step_line(estimate, device)
    with house_style():
        figure = draw_step_parts(estimate)
        if path.suffix == ".png":
            content = png(figure)
        elif path.suffix == ".svg":
            buffer = io.BytesIO()
            figure.savefig(buffer, format="svg", facecolor="white")
            content = buffer.getvalue()
        else:
            rows = (
                (name, seconds_text(seconds), f"{seconds / estimate.step_time_s:.1%}", MEANING[name])
                for name, seconds in by_size(estimate)
            )
            body = [
                f"<header><h1>{html.escape(said)}</h1></header>",
                f'<div class="charts">{picture(svg(figure, "parts", "", said), None, wide=True)}</div>',
                table(("part", ">time", ">share", "what"), rows),
                footer(0),
            ]
            content = document("planned step", body).encode()
    try:
        with atomic_writer(path) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"plot = {path} cannot be written ({error.strerror}): choose another file") from error


def by_size(estimate: StepEstimate) -> list[tuple[str, float]]:
    """Parts of the step with their seconds, the largest first."""
    return sorted(estimate.parts.items(), key=lambda part: -part[1])


def draw_step_parts(estimate: StepEstimate) -> Figure:
    """One bar per part, with one colour for compute and another for waiting."""
    from megads.tools.report.style import BLUE, INK, ORANGE, close_panel, open_panel

    figure, axes = open_panel("Where a step's time goes", wide=True)
    parts = by_size(estimate)
    for label, color, works in (("computes", BLUE, True), ("waits", ORANGE, False)):
        own = [(row, seconds) for row, (name, seconds) in enumerate(parts) if (name in _WORK) is works]
        if own:
            rows, lengths = zip(*own, strict=True)
            axes.barh(rows, lengths, color=color, height=0.7, label=label)
    for row, (_, seconds) in enumerate(parts):
        axes.text(seconds, row, f" {seconds / estimate.step_time_s:.1%}", va="center", color=INK, fontsize=8)
    axes.set_yticks(range(len(parts)), [name for name, _ in parts])
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=INK)
    axes.grid(visible=False, axis="y")
    close_panel(axes, f"seconds of {seconds_text(estimate.step_time_s)}", "")
    return figure
