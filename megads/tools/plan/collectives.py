"""Time of collectives and point-to-point transfers, by the algorithms that NCCL chooses from.

A group of n ranks communicates m bytes; k of its ranks share a node. A ring's bus bandwidth (nccl-tests,
doc/PERFORMANCE.md) is that of its slowest hop: the device's links within a node, or the k network ports of a node's
ranks together between nodes.

    reduce-scatter, all-gather  (n - 1) / n * m / bus + steps * latency
    all-reduce, ring            twice that
    all-reduce, tree            2 m / bus + 2 log2(nodes) * latency   (double binary trees, Sanders et al. 2009)
    all-reduce, hierarchical    reduce-scatter in the node, all-reduce of 1/k over nodes, all-gather in the node
    all-to-all                  (k - 1) / n * m over the device's links, beside (n - k) / n * m over its network port
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, log2, prod

from megads.api import (
    ContextParallelKind,
    ModelConfig,
    ParallelConfig,
    context_kinds,
    exchanged_kv_heads,
    ring_shifts,
)
from megads.parallel.ring_shifts import most_window_rows
from megads.tools.plan.devices import Device, MeasuredCollective
from megads.tools.plan.micro_batch import FP32


@dataclass(frozen=True)
class Network:
    """Inter-node network: pods and oversubscription.

    Attributes:
        pod_ranks: ranks per pod, within which ports reach each other at full speed; None: all ranks.
        oversubscription: factor by which ports are slower between pods.
    """

    pod_ranks: int | None = None
    oversubscription: float = 1.0


FLAT = Network()
"""A network without oversubscription: every port reaches every other at full speed."""


@dataclass(frozen=True)
class CommunicationGroup:
    """Size and placement of a communication group.

    Attributes:
        size: number of ranks.
        per_node: number of ranks per node.
        slowdown: slowdown factor of the network ports where the group spans pods of an oversubscribed tree.
    """

    size: int
    per_node: int
    slowdown: float = 1.0

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.per_node)


def communication_group(
    parallel: ParallelConfig, axes: tuple[str, ...], node: int, network: Network = FLAT
) -> CommunicationGroup:
    """The communication group over one or more axes; ("cp", "dp") are the ranks that hold the same weights.

    Args:
        parallel: the layout.
        axes: axes along which the group's ranks differ.
        node: ranks per node.
        network: network between nodes.
    """
    # Stride in global ranks between neighbours along each axis.
    order = parallel.rank_order
    distance = {axis: prod(getattr(parallel, inner) for inner in order[:at]) for at, axis in enumerate(order)}
    sizes = [getattr(parallel, axis) for axis in axes]
    size, last = 1, 0
    for axis, length in zip(axes, sizes, strict=True):
        size *= length
        last += (length - 1) * distance[axis]
    # Ranks that share a node with rank 0. Along each axis there are at most as many as fit into a node.
    near = (range(min(length, ceil(node / distance[axis]))) for axis, length in zip(axes, sizes, strict=True))
    per_node = sum(
        sum(place * distance[axis] for place, axis in zip(places, axes, strict=True)) < node
        for places in product(*near)
    )
    beyond = network.pod_ranks is not None and last >= network.pod_ranks
    return CommunicationGroup(size, max(1, min(per_node, size)), network.oversubscription if beyond else 1.0)


def expert_groups(
    parallel: ParallelConfig, node: int, network: Network = FLAT
) -> tuple[CommunicationGroup, CommunicationGroup]:
    """The ranks that together hold all experts of a layer, and those that hold the same experts, see `axis_ranks`.

    Args:
        parallel: the layout.
        node: ranks per node.
        network: network between nodes.
    """
    ranks = _ranks_along(parallel, ("cp", "dp") if parallel.expert_tp else ("tp", "cp", "dp"))
    return _group_of(ranks[: parallel.ep], node, network), _group_of(ranks[:: parallel.ep], node, network)


def context_groups(
    parallel: ParallelConfig, node: int, network: Network = FLAT
) -> tuple[CommunicationGroup, CommunicationGroup]:
    """The context-parallel ranks that exchange heads, and those that exchange keys and values: `cp_inner` and
    `cp_outer` of the grid.

    Args:
        parallel: the layout.
        node: ranks per node.
        network: network between nodes.
    """
    ranks, size = _ranks_along(parallel, ("cp",)), parallel.ulysses_size
    return _group_of(ranks[:size], node, network), _group_of(ranks[::size], node, network)


def _ranks_along(parallel: ParallelConfig, axes: Sequence[str]) -> list[int]:
    """Ranks that differ from rank 0 along the axes alone, in ascending order."""
    order, strides = parallel.rank_order, dict[str, range]()
    for at, axis in enumerate(order):
        distance = prod(getattr(parallel, inner) for inner in order[:at])
        strides[axis] = range(0, getattr(parallel, axis) * distance, distance)
    return sorted(sum(places) for places in product(*(strides[axis] for axis in axes)))


def _group_of(ranks: Sequence[int], node: int, network: Network) -> CommunicationGroup:
    """The communication group of some ranks in ascending order, rank 0 first."""
    beyond = network.pod_ranks is not None and ranks[-1] >= network.pod_ranks
    near = sum(rank < node for rank in ranks)
    return CommunicationGroup(len(ranks), near, network.oversubscription if beyond else 1.0)


def placement(parallel: ParallelConfig, node: int, network: Network = FLAT) -> dict[str, CommunicationGroup]:
    """Groups along each axis with at least two ranks, along cp and dp together, and subgroups of cp and dp; shows which
    span nodes or pods."""
    axes: list[tuple[str, ...]] = [(axis,) for axis in parallel.rank_order if getattr(parallel, axis) > 1]
    axes += [("cp", "dp")] if parallel.cp > 1 and parallel.dp > 1 else []
    found = {" x ".join(of_group): communication_group(parallel, of_group, node, network) for of_group in axes}
    if parallel.is_two_level:
        found["cp, heads"], found["cp, keys and values"] = context_groups(parallel, node, network)
    return found | ({"ep": expert_groups(parallel, node, network)[0]} if parallel.ep > 1 else {})


def context_choices(
    model: ModelConfig, parallel: ParallelConfig, node: int
) -> tuple[tuple[ContextParallelKind, int], ...]:
    """Values of (parallel.cp_kind, parallel.cp_ulysses) that a model allows in a layout and that can be worth it.

    Besides each kind alone: allgather and ring with heads exchanged among as many ranks of a node as possible.

    Args:
        model: the model.
        parallel: the layout, whose own kind is ignored.
        node: ranks per node.
    """
    kinds, cp = context_kinds(model, parallel.tp, parallel.cp), parallel.cp
    near, heads = communication_group(parallel, ("cp",), node).per_node, model.num_heads // parallel.tp
    sizes = [size for size in range(2, min(near, cp - 1) + 1) if not (cp % size or near % size or heads % size)]
    # The head count of a plugin's attention core is unknown.
    most = 1 if model.block.is_custom else max(sizes, default=1)
    alone = tuple((kind, 1) for kind in kinds)
    if most == 1:
        return alone
    return alone + tuple((kind, most) for kind in kinds if kind is not ContextParallelKind.ulysses)


def _bus_bandwidth(device: Device, group: CommunicationGroup) -> float:
    """Bandwidth of a ring's slowest hop, in bytes per second."""
    inside = device.node_bytes_per_s if group.per_node > 1 else float("inf")
    between = device.nic_bytes_per_s * group.per_node / group.slowdown if group.nodes > 1 else float("inf")
    return min(inside, between)


def _ring_seconds(device: Device, group: CommunicationGroup, size: float, name: str, width: int) -> float:
    """Seconds of one pass around a ring; uses the measured collective if all ranks share a node."""
    if group.size == 1:
        return 0.0
    share = (group.size - 1) / group.size * size
    found = measured_collective(device, name, width) if group.nodes == 1 else None
    if found is None:
        between = group.nodes if group.nodes > 1 else 0
        inside = group.size - 1 - max(0, between - 1)
        latency = 1e-6 * (inside * device.node_latency_us + between * device.nic_latency_us)
        return share / _bus_bandwidth(device, group) + latency
    return share / (found.gigabytes_per_s * 1e9) + 1e-6 * (group.size - 1) * found.latency_us


def measured_collective(device: Device, name: str, width: int) -> MeasuredCollective | None:
    """The measurement of a collective whose element width (bytes) is closest to `width`; None without measurements."""
    found = [measured for measured in device.collectives if measured.name == name]
    return min(found, key=lambda measured: abs(measured.width - width), default=None)


def all_gather(device: Device, group: CommunicationGroup, size: float, width: int = 2) -> float:
    """Seconds of an all-gather.

    Args:
        device: device of the ranks.
        group: the communication group.
        size: bytes of the gathered tensor.
        width: bytes per element.
    """
    return _ring_seconds(device, group, size, "all_gather", width)


def reduce_scatter(device: Device, group: CommunicationGroup, size: float, width: int = 2) -> float:
    """Seconds of a reduce-scatter of a tensor of `size` bytes; arguments as in `all_gather`."""
    return _ring_seconds(device, group, size, "reduce_scatter", width)


def all_reduce(device: Device, group: CommunicationGroup, size: float, width: int = 2) -> float:
    """Seconds of an all-reduce of `size` bytes with the fastest algorithm; arguments as in `all_gather`."""
    if group.size == 1:
        return 0.0
    ring = 2 * _ring_seconds(device, group, size, "all_reduce", width)
    inner = CommunicationGroup(group.per_node, group.per_node)
    outer = CommunicationGroup(group.nodes, 1, group.slowdown)
    if outer.size == 1:
        return ring
    hops = 2 * ceil(log2(outer.size)) * 1e-6 * device.nic_latency_us + 2 * 1e-6 * device.node_latency_us
    tree = 2 * size / _bus_bandwidth(device, group) + hops
    across = 2 * all_gather(device, outer, size / inner.size)
    return min(ring, tree, 2 * all_gather(device, inner, size) + across)


def all_to_all(
    device: Device, group: CommunicationGroup, size: float, width: int = 2, copies: float | None = None
) -> float:
    """Seconds of an all-to-all with equal splits, in which every rank sends `size` bytes, its own share included.

    Links within a node and the network are used at the same time.

    Args:
        device: device of the ranks.
        group: the communication group.
        size: bytes that a rank sends.
        width: bytes per element.
        copies: bytes that a rank sends over the network; None: its share of `size`.
    """
    if group.size == 1:
        return 0.0
    if group.nodes == 1 and (found := measured_collective(device, "message", width)) is not None:
        sent = (group.size - 1) / group.size * size
        return sent / (found.gigabytes_per_s * 1e9) + 1e-6 * (group.size - 1) * found.latency_us
    inside = (group.per_node - 1) / group.size * size / device.node_bytes_per_s
    crossing = (group.size - group.per_node) / group.size * size if copies is None else copies
    outside = crossing * group.slowdown / device.nic_bytes_per_s
    latency = 1e-6 * (device.nic_latency_us if group.nodes > 1 else device.node_latency_us)
    return max(inside, outside) + latency


@dataclass(frozen=True)
class ContextMessages:
    """Sizes of the messages among context-parallel ranks in one layer and micro-batch, see `megads.parallel.context`.

    Attributes:
        ranks: number of ranks among which they are.
        kind: what the messages are. allgather: an all-gather in the forward pass, and a reduce-scatter in fp32 in the
            backward pass. ulysses: all-to-alls, the same in both passes. ring: shifts between pairs of ranks, or the
            all-to-all of rows that windows reach, which come from one or two ranks.
        forward: bytes in the forward pass. Of a collective those of its whole buffer: what is gathered, or what a rank
            sends in an all-to-all, its own share included. Of shifts and windows the most that a rank receives.
        backward: bytes in the backward pass; of a ring, keys and values first, then their gradients.
        overlapped: whether shifts overlap with attention.
    """

    ranks: int
    kind: ContextParallelKind
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    overlapped: bool = True

    @property
    def received(self) -> tuple[float, float]:
        """Bytes that a rank receives from the others in the forward and in the backward pass; for ring the most."""
        share = 1.0 if self.kind is ContextParallelKind.ring else (self.ranks - 1) / self.ranks
        return share * sum(self.forward), share * sum(self.backward)


def context_messages(
    model: ModelConfig, parallel: ParallelConfig, tokens: float, width: int, samples: int = 1
) -> tuple[ContextMessages, ContextMessages]:
    """The messages of a layer's attention: among the ranks that exchange heads, and among those that exchange keys and
    values. The groups are those of `context_groups`.

    Args:
        model: settings of the layer.
        parallel: the layout.
        tokens: tokens of a micro-batch on a rank.
        width: bytes per element of activations.
        samples: samples of a micro-batch.
    """
    exchanging, kv_heads = parallel.ulysses_size, model.local_kv_heads(parallel.tp)
    head = tokens * model.head_dim * width
    queries, exchanged = model.num_heads // parallel.tp * head, exchanged_kv_heads(kv_heads, exchanging)
    passes = queries + 2 * exchanged * head, queries
    heads = ContextMessages(exchanging, ContextParallelKind.ulysses, passes, passes[::-1])

    cp, kind, wide = parallel.core_cp, parallel.cp_kind, max(width, FP32) / width
    tokens, kv_heads = exchanging * tokens, exchanged // exchanging
    chunk, row = int(tokens / samples) // 2, 2 * kv_heads * samples * model.head_dim * width
    if parallel.is_ring:
        shifts = zip(*(ring_shifts(rank, cp, chunk, model.window) for rank in range(cp)), strict=True)
        arriving, returning = [], []
        for shift in shifts:
            arriving.append(max(row * sum(map(len, of_rank.arriving)) for of_rank in shift))
            returning.append(max(wide * row * sum(map(len, of_rank.leaving)) for of_rank in shift))
        return heads, ContextMessages(cp, kind, tuple(arriving), (*arriving, *returning))
    if (rows := most_window_rows(cp, chunk, model.window)) is not None:
        received, returned = (row * rows[0],), (wide * row * rows[1],)
        return heads, ContextMessages(cp, ContextParallelKind.ring, received, returned, overlapped=False)
    gathered = 2 * cp * kv_heads * tokens * model.head_dim * width
    return heads, ContextMessages(cp, ContextParallelKind.allgather, (gathered,), (gathered * wide,))


def received_bytes(messages: Sequence[ContextMessages]) -> tuple[float, float]:
    """Bytes that a rank receives from others in a layer's forward and in its backward pass; with a ring the most."""
    forward, backward = zip(*(level.received for level in messages), strict=True)
    return sum(forward), sum(backward)


def overlapped_seconds(device: Device, communication: float, compute: float) -> float:
    """Cost in seconds of communication that overlaps with compute: its exposed part, and the slowdown of the compute.

    The slowdown is `Device.hidden_cost` times the overlapped part: communication kernels use processors and memory
    bandwidth.
    """
    return max(0.0, communication - compute) + device.hidden_cost * min(communication, compute)


def context_seconds(
    device: Device,
    groups: Sequence[CommunicationGroup],
    messages: Sequence[ContextMessages],
    width: int,
    attention: tuple[float, float] = (0.0, 0.0),
) -> tuple[float, float]:
    """Exposed seconds of the messages among context-parallel ranks in a layer's forward and backward pass.

    Args:
        device: device of the ranks.
        groups: ranks among which the messages are.
        messages: sizes of the messages.
        width: bytes per element of activations.
        attention: seconds of the attention core's passes: a ring's shifts overlap with all of its blocks but one.
    """
    levels = [
        _level_seconds(device, group, level, width, attention) for group, level in zip(groups, messages, strict=True)
    ]
    return sum(forward for forward, _ in levels), sum(backward for _, backward in levels)


def _level_seconds(
    device: Device, group: CommunicationGroup, messages: ContextMessages, width: int, attention: tuple[float, float]
) -> tuple[float, float]:
    """`context_seconds` of the messages in one group."""
    if messages.kind is ContextParallelKind.ulysses:
        forward, backward = (
            sum(all_to_all(device, group, size, width) for size in sizes)
            for sizes in (messages.forward, messages.backward)
        )
        return forward, backward
    if messages.kind is ContextParallelKind.ring:
        share = (messages.ranks - 1) / messages.ranks if messages.overlapped else 0.0
        forward, backward = (
            overlapped_seconds(
                device, sum(sum(p2p(device, size, between_nodes=group.nodes > 1)) for size in sizes), share * compute
            )
            for sizes, compute in zip((messages.forward, messages.backward), attention, strict=True)
        )
        return forward, backward
    return (
        sum(all_gather(device, group, size, width) for size in messages.forward),
        sum(reduce_scatter(device, group, size, FP32) for size in messages.backward),
    )


def p2p(device: Device, size: float, *, between_nodes: bool, width: int = 2) -> tuple[float, float]:
    """Transfer time, during which the link is occupied, and latency of a point-to-point transfer, in seconds."""
    if between_nodes:
        return size / device.nic_bytes_per_s, 1e-6 * device.nic_latency_us
    found = measured_collective(device, "message", width)
    if found is not None:
        return size / (found.gigabytes_per_s * 1e9), 1e-6 * found.latency_us
    return size / device.node_bytes_per_s, 1e-6 * device.node_latency_us
