"""The time of a step as `megads plan device=<name>` prints it: a table of parts, with bars, or JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.config import RootConfig
from megads.launch.preflight_memory import gib, plan_of, settle_auto
from megads.launch.step_plan import connected_device, machine_of, step_of
from megads.parallel.config import ParallelConfig
from megads.plan.collectives import Network, crosses_nodes, placement
from megads.plan.devices import Device
from megads.plan.step_estimate import StepEstimate
from megads.runtime.visible_console import VisibleConsole
from megads.tools.plan.config import PlanConfig

_BAR = 40
"""Characters of a bar as long as the step."""
_WORTH_SAYING = 0.03
"""Share of a step that CUDA graphs would save."""
MEANING = {
    "matmul": "matrix products",
    "attention": "attention cores",
    "elementwise": "norms, activations, residuals, dropouts, loss",
    "host": "Python, autograd and launches, for which the device waits",
    "recompute": "forward passes made again in backward",
    "gradient sums": "gradients added to fp32 sums",
    "tp": "tensor parallelism: what passes wait for",
    "cp": "context parallelism: keys, values and their gradients",
    "pipeline": "waits of the pipeline: bubble, messages, uneven stages",
    "reduction": "gradients reduced after the last backward pass",
    "weights": "weights gathered by ZeRO-3",
    "optimizer": "norm and update",
    "new weights": "new weights gathered (ZeRO-1)",
    "saves": "copies for checkpoints, on average",
    "stragglers": "the slowest rank of all",
}


def device_of(asked: PlanConfig) -> Device | None:
    """The device that is asked for by name or file, as the cluster connects it; None for auto, cpu and cuda."""
    if not asked.names_device:
        return None
    return connected_device(asked.device, asked, asked.nic_gigabytes_per_s)


def network_of(asked: PlanConfig) -> Network:
    """What is beyond the nodes."""
    return Network(asked.pod_ranks, asked.oversubscription)


def planned_step(asked: PlanConfig) -> StepEstimate | None:
    """The time of a step of the layout, whatever in it is auto; None where no device is named."""
    device = device_of(asked)
    if device is None:
        return None
    config, _choices = settle_auto(asked, machine_of(device))
    return step_of(config, device, network_of(asked))


def step_json(estimate: StepEstimate, memory_bytes: int) -> dict[str, Any]:
    """As plain values; seconds, bytes."""
    return {
        "step_time_s": estimate.step_time_s,
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "tflops_per_device": estimate.tflops_per_device,
        "mfu": estimate.mfu,
        "memory_bytes": memory_bytes,
        "parts": dict(sorted(estimate.parts.items(), key=lambda part: -part[1])),
    }


def step_line(estimate: StepEstimate, device: Device) -> str:
    """One line about a step."""
    return (
        f"a step on {estimate.ranks:,} x {device.name}: {seconds_text(estimate.step_time_s)}, "
        f"{estimate.tokens_per_s_per_device:,.0f} tokens/s and {estimate.tflops_per_device:.1f} model TFLOPs a device, "
        f"MFU {estimate.mfu:.1%} of {estimate.peak_tflops:g}"
    )


def placement_json(parallel: ParallelConfig, device: Device, network: Network) -> dict[str, Any]:
    """The groups of ranks as plain values."""
    return {
        axes: {"ranks": group.size, "nodes": group.nodes, "ranks_a_node": group.per_node, "slowdown": group.slowdown}
        for axes, group in placement(parallel, device.ranks_per_node, network).items()
    }


def placement_line(parallel: ParallelConfig, device: Device, network: Network) -> str:
    """One line about which axis crosses nodes and pods."""
    said = []
    for axes, group in placement(parallel, device.ranks_per_node, network).items():
        where = "inside a node"
        if crosses_nodes(group):
            near = f", {group.per_node} ranks a node" if group.per_node > 1 else ""
            beyond = f", beyond pods of {network.pod_ranks}, {group.slowdown:g} x slower" if group.slowdown > 1 else ""
            where = f"over {group.nodes} nodes{near}{beyond}"
        said.append(f"{axes} {group.size} {where}")
    order = ", ".join(parallel.rank_order)
    return f"nodes of {device.ranks_per_node}, rank_order {order}: {'; '.join(said) or 'a rank alone'}"


def graphs_line(estimate: StepEstimate, config: RootConfig, device: Device, network: Network) -> str:
    """What CUDA graphs would save and need, where that is worth a line and the device has room; else empty."""
    graphs = replace(config, ops=replace(config.ops, cuda_graphs=True))
    if device.on_cpu or config.ops.cuda_graphs or config.parallel.why_no_cuda_graphs():
        return ""
    without, captured = estimate.step_time_s, step_of(graphs, device, network).step_time_s
    if captured > (1 - _WORTH_SAYING) * without:
        return ""
    machine = machine_of(device)
    plain, room = (machine.room(plan_of(one, cuda=True)) for one in (config, graphs))
    if not room.fits:
        return ""
    more = f", with {gib(room.needed - plain.needed)} more on a GPU" if room.needed > plain.needed else ""
    return (
        f"the host launches more slowly than the device computes: with ops.cuda_graphs=true a step is "
        f"{seconds_text(captured)} ({captured / without - 1:+.0%}){more}"
    )


def print_step(
    console: VisibleConsole, estimate: StepEstimate, config: RootConfig, device: Device, network: Network
) -> None:
    """Prints a step's time, what crosses nodes, and the parts."""
    console.print(step_line(estimate, device))
    console.print(placement_line(config.parallel, device, network))
    if said := graphs_line(estimate, config, device, network):
        console.print(said)
    console.print(step_table(estimate))


def step_table(estimate: StepEstimate) -> Table:
    """One row a part of the busiest pipeline rank's step, the largest first."""
    table = Table(title="where a step's time goes", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what")
    whole = estimate.step_time_s
    for name, seconds in sorted(estimate.parts.items(), key=lambda part: -part[1]):
        bar = "█" * round(_BAR * seconds / whole)
        table.add_row(name, seconds_text(seconds), f"{seconds / whole:.1%}", bar, MEANING[name])
    return table


def seconds_text(seconds: float) -> str:
    """12.3 s, or milliseconds below one."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"
