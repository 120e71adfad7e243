"""`megads check_nodes`: checks the health of the nodes of a SLURM job, or of this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from megads.cli.verb import Invocation, Verb
from megads.errors import EXIT_OK, UnhealthyNode
from megads.runtime import environment
from megads.runtime.config import ClusterKind
from megads.runtime.slurm import find_allocation
from megads.tools.doctor.node_check import CheckNodesConfig, CheckResult, CheckTarget, NodeMeasurements, check_nodes

_GIB = 2**30
_HEADER = ("node", "verdict", "TFLOP/s", "memory", "disk free", "write", "read", "loopback", "clock")


def run(config: CheckNodesConfig, _invocation: Invocation) -> int:
    """Checks the nodes, prints the verdicts, and returns 9 if a node is not healthy."""
    config.check()
    start = time.perf_counter()
    checked = check_nodes(config, nodes_to_check(config))
    seconds = time.perf_counter() - start
    if config.json:
        measured = {node: asdict(found) for node, found in checked.measured.items()}
        nodes = {
            node: {"problems": problems, "measured": measured.get(node)} for node, problems in checked.problems.items()
        }
        pairs = [{"nodes": pair, "problem": problem} for pair, problem in checked.pairs.items()]
        print(json.dumps({"seconds": round(seconds, 1), "nodes": nodes, "pairs": pairs}, indent=2))
    else:
        print(describe(checked))
        rejected, total = len(checked.rejected), len(checked.problems)
        words = "all healthy" if not rejected else f"{rejected} not healthy: {', '.join(checked.rejected)}"
        print(f"{total} node{'s' * (total > 1)}, {len(checked.pairs)} pairs, {words} ({seconds:.1f} s)")
    if checked.rejected and config.json:
        print(f"megads check_nodes: not healthy: {', '.join(checked.rejected)}", file=sys.stderr)
    return UnhealthyNode.exit_code if checked.rejected else EXIT_OK


def nodes_to_check(config: CheckNodesConfig) -> CheckTarget:
    """Returns the nodes to check.

    Raises:
        ConfigError: cluster=slurm outside of a SLURM job.
    """
    on_slurm = config.cluster is ClusterKind.slurm or (
        config.cluster is None and config.checkers == 1 and environment.slurm_job() is not None
    )
    if on_slurm:
        allocation = find_allocation()
        return CheckTarget(tuple(node.name for node in allocation.nodes), allocation.nodes[0].address, allocation)
    name = environment.node_name()
    if config.checkers == 1:
        return CheckTarget((name,))
    return CheckTarget(tuple(f"{name}/{number}" for number in range(config.checkers)))


def describe(checked: CheckResult) -> str:
    """Returns a table of the nodes, followed by the problems of nodes and of pairs."""
    rows = [_HEADER, *(_row(node, checked) for node in checked.problems)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{node}: {reason}" for node, reasons in checked.problems.items() for reason in reasons]
    lines += [f"pair {a}, {b}: {problem}" for (a, b), problem in checked.pairs.items() if problem]
    return "\n".join(lines)


def _row(node: str, checked: CheckResult) -> Sequence[str]:
    verdict = "REJECTED" if checked.problems[node] else "healthy"
    found = checked.measured.get(node)
    return (node, verdict, *(_figures(found) if found else ("-",) * (len(_HEADER) - 2)))


def _figures(found: NodeMeasurements) -> Sequence[str]:
    return (
        " ".join(f"{tflops:.3g}" for tflops in found.tflops),
        f"{found.memory_bytes / _GIB:.1f} GiB",
        f"{found.disk_free_bytes / _GIB:.1f} GiB",
        f"{found.write_bytes_per_s / 1e6:,.0f} MB/s",
        f"{found.read_bytes_per_s / 1e6:,.0f} MB/s",
        f"{found.loopback_bytes_per_s / 1e6:,.0f} MB/s",
        f"{1000 * found.clock_offset_s:+.0f} +- {1000 * found.clock_uncertainty_s:.0f} ms",
    )


VERB = Verb("check_nodes", CheckNodesConfig, run, flags={"--json": "json=true"})
