"""Results of a benchmark: a line of figures in bench.jsonl, and verdicts, each comparing megads with one other side."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megads.runtime.environment import available_cores
from megads.runtime.metrics import JsonLinesWriter, read_json_lines
from scripts.bench.turns import COLUMNS


@dataclass(frozen=True)
class Verdict:
    """A figure of megads compared with one of a peer or a hardware limit.

    Attributes:
        row: number of the benchmark in docs/notes/performance.md; 0 if it is not in its table.
        work: what was measured, and the dtype.
        ours: megads' figure with its unit.
        against: name of the peer or limit.
        theirs: its figure with its unit.
        times: ratio by which megads is better: 1.5 is 50% faster; for a limit, 0.8 is 80% of it.
        target: target of `times`; None without one.
        limit: `against` is a hardware limit, not a peer.
    """

    row: int
    work: str
    ours: str
    against: str
    theirs: str
    times: float
    target: float | None = None
    limit: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.times >= self.target


def against_time(
    row: int, work: str, ours_ms: float, against: str, theirs_ms: float, target: float | None, limit: bool = False
) -> Verdict:
    """A verdict on two times in milliseconds."""
    shown = (f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms" for milliseconds in (
        ours_ms, theirs_ms))  # fmt: skip
    return Verdict(row, work, next(shown), against, next(shown), theirs_ms / ours_ms, target, limit)


def against_rate(
    row: int, work: str, ours: float, against: str, theirs: float, unit: str, target: float | None, limit: bool = False
) -> Verdict:
    """A verdict on two figures of which the larger is better."""
    return Verdict(row, work, f"{ours:,.3g} {unit}", against, f"{theirs:,.3g} {unit}", ours / theirs, target, limit)


def add_results_option(parser: argparse.ArgumentParser) -> None:
    """Adds --append."""
    parser.add_argument("--append", type=Path, help="file of results, JSON lines")


def record(
    path: Path | None, bench: str, figures: Mapping[str, Any], verdicts: Iterable[Verdict] = (), unjudged: str = ""
) -> None:
    """Appends figures and verdicts with their time and machine as one line; prints the verdicts.

    Args:
        path: file of results; None writes nothing.
        bench: name of the benchmark.
        figures: measured figures.
        verdicts: conclusions.
        unjudged: benchmarks that could not be judged; earlier verdicts on them are no longer shown.
    """
    verdicts = list(verdicts)
    for verdict in verdicts:
        print(f"  {one_line(verdict)}", flush=True)
    if path is None:
        return
    taken = {"time": time.time(), "load": os.getloadavg()[0], "cores": available_cores(), "torch": version("torch")}
    writer = JsonLinesWriter(path)
    writer.write_line(
        {
            "bench": bench,
            **taken,
            **figures,
            "unjudged": unjudged,
            "verdicts": [asdict(verdict) for verdict in verdicts],
        }
    )
    writer.close()


def one_line(verdict: Verdict) -> str:
    """Formats a verdict for the console."""
    wanted = "" if verdict.target is None else f", target {verdict.target:.2f}"
    end = {None: "", True: ": reached", False: ": NOT reached"}[verdict.reached]
    kind = "of the limit," if verdict.limit else "times"
    return (
        f"[{verdict.row}] {verdict.work}: {verdict.ours}, {verdict.times:.2f} {kind} {verdict.against} "
        f"({verdict.theirs}){wanted}{end}"
    )


def conditions(path: Path) -> list[str]:
    """When each benchmark last ran, the load of the machine, and the measure used."""
    last = {line["bench"]: line for line in read_json_lines(path) if line.get("verdicts")}
    return [
        f"{bench}: {datetime.fromtimestamp(line['time'], UTC):%Y-%m-%d %H:%M} UTC, load {line['load']:.1f} on "
        f"{line['cores']} cores, torch {line['torch']}"
        + (f", {line['threads']} threads, judged by {COLUMNS[line['by']]} time" if "by" in line else "")
        for bench, line in last.items()
    ]


def latest_verdicts(path: Path) -> list[Verdict]:
    """The verdicts on each benchmark from its last run, in the order of the rows."""
    found: dict[str, list[Verdict]] = {}
    for line in read_json_lines(path):
        verdicts = [Verdict(**fields) for fields in line.get("verdicts", ())]
        for work in {line.get("unjudged", ""), *(verdict.work for verdict in verdicts)}:
            found[work] = [verdict for verdict in verdicts if verdict.work == work]
    return sorted(
        (verdict for of_work in found.values() for verdict in of_work),
        key=lambda verdict: (verdict.row == 0, verdict.row, verdict.work),
    )
