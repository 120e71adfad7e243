"""Which nodes are not fit to train: pure functions of what they measured and of how pairs of them fared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megads.launch.node_check.config import CheckNodesConfig

Pair = tuple[str, str]
_GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """What a node found about itself.

    Attributes:
        devices: what computes, "cpu" or the names of the GPUs.
        tflops: of each device in matrix products, the best of many.
        wrong_products: devices whose products were not exact.
        memory_bytes: available.
        disk_free_bytes: in the folder of runs.
        write_bytes_per_s: into it, synced.
        read_bytes_per_s: from it.
        loopback_bytes_per_s: through a socket to itself.
        clock_offset_s: its clock less the coordinator's.
        clock_uncertainty_s: half of the time that asking took.
        errors: what failed, by the name of the measurement.
    """

    devices: tuple[str, ...]
    tflops: tuple[float, ...]
    wrong_products: tuple[str, ...]
    memory_bytes: float
    disk_free_bytes: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    loopback_bytes_per_s: float
    clock_offset_s: float
    clock_uncertainty_s: float
    errors: Mapping[str, str]

    def encode(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def decode(cls, content: Mapping[str, Any]) -> Measured:
        """Reads what `encode` made and JSON carried."""
        lists = {key: tuple(content[key]) for key in ("devices", "tflops", "wrong_products")}
        values: dict[str, Any] = {**content, **lists}
        return cls(**values)


def judge_nodes(measured: Mapping[str, Measured], config: CheckNodesConfig) -> dict[str, list[str]]:
    """Returns what is wrong with each node that answered, an empty list for nothing.

    Speeds are held against the median of all nodes, and against an absolute floor: a cluster of equally slow nodes
    has a median too.
    """
    slowest = {node: min(result.tflops, default=0.0) for node, result in measured.items()}
    problems = {node: _own_problems(result, config) for node, result in measured.items()}
    _add_slow(problems, slowest, config.min_of_median, "matrix products at", lambda value: f"{value:.3g} TFLOP/s")
    for name, key in (("writes to the folder at", "write_bytes_per_s"), ("reads from it at", "read_bytes_per_s")):
        speeds = {node: getattr(result, key) for node, result in measured.items()}
        _add_slow(problems, speeds, config.min_disk_of_median, name, lambda value: f"{value / 1e6:.0f} MB/s")
    return problems


def _own_problems(result: Measured, config: CheckNodesConfig) -> list[str]:
    """What is wrong whatever the other nodes are like."""
    problems = [f"{name}: {error}" for name, error in result.errors.items()]
    problems += [f"{device} computes wrong matrix products" for device in result.wrong_products]
    for device, tflops in zip(result.devices, result.tflops, strict=True):
        if tflops < config.min_tflops:
            problems.append(f"{device}: {tflops:.3g} TFLOP/s, min_tflops is {config.min_tflops:g}")
    if result.memory_bytes < config.min_memory_gib * _GIB:
        problems.append(f"{result.memory_bytes / _GIB:.2f} GiB of memory left, want {config.min_memory_gib:g}")
    if "disk" not in result.errors:
        if result.disk_free_bytes < config.min_disk_free_gib * _GIB:
            problems.append(f"{result.disk_free_bytes / _GIB:.2f} GiB of disk left, want {config.min_disk_free_gib:g}")
        if result.write_bytes_per_s < config.min_disk_mb_per_s * 1e6:
            problems.append(f"writes {result.write_bytes_per_s / 1e6:.1f} MB/s, want {config.min_disk_mb_per_s:g}")
    if abs(result.clock_offset_s) - result.clock_uncertainty_s > config.max_clock_offset_s:
        problems.append(f"its clock is off by {result.clock_offset_s:+.1f} s")
    return problems


def _add_slow(
    problems: dict[str, list[str]],
    speeds: Mapping[str, float],
    share: float,
    what: str,
    show: Callable[[float], str],
) -> None:
    if not speeds:
        return
    median = statistics.median(speeds.values())
    for node, speed in speeds.items():
        if speed < share * median:
            problems[node].append(f"{what} {show(speed)}, the median of the nodes is {show(median)}")


def first_round(nodes: Sequence[str]) -> list[Pair]:
    """Neighbours in pairs; of an odd number the last sits out."""
    return [(nodes[place], nodes[place + 1]) for place in range(0, len(nodes) - 1, 2)]


def second_round(nodes: Sequence[str], failed: Collection[Pair]) -> list[list[Pair]]:
    """Pairs each node that is not known to be good with one that is: of a pair that passed, or, where none did, the one
    that sat out, as a single faulty node is what to expect.

    Args:
        nodes: all that take part.
        failed: pairs of the first round that failed.

    Returns:
        Rounds of pairs; within one no node is in two of them. None where no node is known to be good, and where there
        is no doubt.
    """
    passed = [pair for pair in first_round(nodes) if pair not in failed]
    good = [node for pair in passed for node in pair] or list(nodes[len(nodes) // 2 * 2 :])
    doubtful = [node for node in nodes if node not in good]
    if not good:
        return []
    return [
        list(zip(doubtful[start : start + len(good)], good, strict=False))
        for start in range(0, len(doubtful), len(good))
    ]


def name_faulty(nodes: Sequence[str], first: Collection[Pair], second: Collection[Pair]) -> dict[str, str]:
    """Returns the nodes that fail in exchanging data, with the reason.

    A node that failed with its neighbour, and again with one that is known to be good, is faulty itself; its neighbour
    is not. Where nothing but a pair that failed is there, nobody can tell, and both are named.

    Args:
        nodes: all that took part.
        first: pairs of the first round that failed.
        second: pairs of the second round that failed, the doubtful node first.
    """
    if not second_round(nodes, first):
        return {
            node: f"exchanging data fails with {a if node == b else b}; one of the two is to blame"
            for a, b in first
            for node in (a, b)
        }
    partners = {node: b if node == a else a for a, b in first for node in (a, b)}
    return {
        node: "exchanging data fails with " + " and with ".join(filter(None, [partners.get(node), good]))
        for node, good in second
    }
