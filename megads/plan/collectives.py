"""Time of collectives and messages by the algorithms that NCCL chooses from, on nodes and a network.

A group of n ranks sends m bytes; k of its ranks share a node. A ring's bus bandwidth (nccl-tests, doc/PERFORMANCE.md)
is that of its slowest hop: the device's links in a node, and between nodes the k network ports that the ranks of a node
have together.

    reduce-scatter, all-gather  (n - 1) / n * m / bus + steps * latency
    all-reduce, ring            twice that
    all-reduce, tree            2 m / bus + 2 log2(nodes) * latency   (double binary trees, Sanders et al. 2009)
    all-reduce, hierarchical    reduce-scatter in the node, all-reduce of 1/k over nodes, all-gather in the node
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil, log2

from megads.parallel.config import ParallelConfig
from megads.plan.devices import Device, MeasuredCollective


@dataclass(frozen=True)
class Network:
    """What connects nodes beyond their ports.

    Attributes:
        pod_ranks: ranks whose ports reach each other at full speed; None: all do.
        oversubscription: how many times slower ports are beyond a pod.
    """

    pod_ranks: int | None = None
    oversubscription: float = 1.0


FLAT = Network()
"""Every port reaches every other at full speed."""


@dataclass(frozen=True)
class CommunicationGroup:
    """Ranks that communicate.

    Attributes:
        size: how many.
        per_node: how many of them share a node.
        slowdown: of their network ports, where they are in several pods of an oversubscribed tree.
    """

    size: int
    per_node: int
    slowdown: float = 1.0

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)


def strides(parallel: ParallelConfig) -> dict[str, int]:
    """Distance in global rank between neighbours along each axis."""
    found, stride = {}, 1
    for axis in parallel.rank_order:
        found[axis] = stride
        stride *= getattr(parallel, axis)
    return found


def group_of(parallel: ParallelConfig, axes: tuple[str, ...], node: int, network: Network = FLAT) -> CommunicationGroup:
    """The group along axes together: ("cp", "dp") are the ranks that hold the same weights.

    Args:
        parallel: the layout.
        axes: along which its ranks differ.
        node: ranks a node.
        network: beyond the node.
    """
    distance = strides(parallel)
    sizes = [getattr(parallel, axis) for axis in axes]
    size, last = 1, 0
    for axis, length in zip(axes, sizes, strict=True):
        size *= length
        last += (length - 1) * distance[axis]
    # Those that share a node with rank 0: no more than a node holds along each axis.
    near = (range(min(length, ceil(node / distance[axis]))) for axis, length in zip(axes, sizes, strict=True))
    per_node = sum(
        sum(place * distance[axis] for place, axis in zip(places, axes, strict=True)) < node
        for places in product(*near)
    )
    beyond = network.pod_ranks is not None and last >= network.pod_ranks
    return CommunicationGroup(size, max(1, min(per_node, size)), network.oversubscription if beyond else 1.0)


def placement(parallel: ParallelConfig, node: int, network: Network = FLAT) -> dict[str, CommunicationGroup]:
    """The group along each axis of two ranks or more, and of cp and dp together: what crosses nodes and pods."""
    axes: list[tuple[str, ...]] = [(axis,) for axis in parallel.rank_order if getattr(parallel, axis) > 1]
    axes += [("cp", "dp")] if parallel.cp > 1 and parallel.dp > 1 else []
    return {" x ".join(of_group): group_of(parallel, of_group, node, network) for of_group in axes}


def crosses_nodes(group: CommunicationGroup) -> bool:
    """Whether some of its ranks are on another node than others."""
    return group.nodes > 1


def _bus(device: Device, group: CommunicationGroup) -> float:
    """Bytes a second of the slowest hop of a ring."""
    inside = device.node_bytes_per_s if group.per_node > 1 else float("inf")
    between = device.nic_bytes_per_s * group.per_node / group.slowdown if group.nodes > 1 else float("inf")
    return min(inside, between)


def _latency(device: Device, group: CommunicationGroup) -> float:
    """Seconds of all steps of a ring, one way around."""
    between = group.nodes if group.nodes > 1 else 0
    inside = group.size - 1 - max(0, between - 1)
    return 1e-6 * (inside * device.node_latency_us + between * device.nic_latency_us)


def _around(device: Device, group: CommunicationGroup, size: float, name: str, width: int) -> float:
    """Seconds of a ring, once around: by what was measured of the collective where all ranks share a node."""
    if group.size == 1:
        return 0.0
    share = (group.size - 1) / group.size * size
    found = measured_collective(device, name, width) if group.nodes == 1 else None
    if found is None:
        return share / _bus(device, group) + _latency(device, group)
    return share / (found.gigabytes_per_s * 1e9) + 1e-6 * (group.size - 1) * found.latency_us


def measured_collective(device: Device, name: str, width: int) -> MeasuredCollective | None:
    """What was measured of a collective on elements of so many bytes, else on others; None: nothing was."""
    found = [measured for measured in device.collectives if measured.name == name]
    return min(found, key=lambda measured: abs(measured.width - width), default=None)


def all_gather(device: Device, group: CommunicationGroup, size: float, width: int = 2) -> float:
    """Seconds until every rank has all of `size` bytes, of elements of `width` bytes."""
    return _around(device, group, size, "all_gather", width)


def reduce_scatter(device: Device, group: CommunicationGroup, size: float, width: int = 2) -> float:
    """Seconds until every rank has its share of the sum of `size` bytes."""
    return _around(device, group, size, "reduce_scatter", width)


def all_reduce(device: Device, group: CommunicationGroup, size: float, width: int = 2) -> float:
    """Seconds of the sum of `size` bytes over a group, by the quickest algorithm."""
    if group.size == 1:
        return 0.0
    ring = 2 * _around(device, group, size, "all_reduce", width)
    inner = CommunicationGroup(group.per_node, group.per_node)
    outer = CommunicationGroup(group.nodes, 1, group.slowdown)
    if outer.size == 1:
        return ring
    hops = 2 * ceil(log2(outer.size)) * 1e-6 * device.nic_latency_us + 2 * 1e-6 * device.node_latency_us
    tree = 2 * size / _bus(device, group) + hops
    across = 2 * all_gather(device, outer, size / inner.size)
    return min(ring, tree, 2 * all_gather(device, inner, size) + across)


def message(device: Device, size: float, *, between_nodes: bool, width: int = 2) -> tuple[float, float]:
    """Seconds that a message occupies its way, and its latency."""
    if between_nodes:
        return size / device.nic_bytes_per_s, 1e-6 * device.nic_latency_us
    found = measured_collective(device, "message", width)
    if found is not None:
        return size / (found.gigabytes_per_s * 1e9), 1e-6 * found.latency_us
    return size / device.node_bytes_per_s, 1e-6 * device.node_latency_us
