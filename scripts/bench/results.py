"""What a benchmark leaves: a line of figures in bench.jsonl, and verdicts, ours against one other each."""

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
    """One figure of ours against one of a peer or of the machine.

    Attributes:
        row: number of the benchmark in docs/performance.md; 0 for what its table does not ask.
        work: what was done, in which dtype.
        ours: our figure with its unit.
        against: name of the peer or of the limit.
        theirs: its figure with its unit.
        times: how many times as good ours is: 1.5 is half as fast again, 0.8 of a limit is 80% of it.
        target: what `times` should reach; None where nothing is asked.
        limit: `against` is what the machine can do at best, not a peer.
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
        """None where there is no target."""
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


def record(path: Path | None, bench: str, figures: Mapping[str, Any], verdicts: Iterable[Verdict] = ()) -> None:
    """Appends one line of figures and verdicts with where and when they were taken; prints the verdicts.

    Args:
        path: the file of results; None keeps nothing.
        bench: name of the benchmark.
        figures: what was measured.
        verdicts: what that means.
    """
    verdicts = list(verdicts)
    for verdict in verdicts:
        print(f"  {one_line(verdict)}", flush=True)
    if path is None:
        return
    taken = {"time": time.time(), "load": os.getloadavg()[0], "cores": available_cores(), "torch": version("torch")}
    writer = JsonLinesWriter(path)
    writer.write_line({"bench": bench, **taken, **figures, "verdicts": [asdict(verdict) for verdict in verdicts]})
    writer.close()


def one_line(verdict: Verdict) -> str:
    """A verdict for the console."""
    wanted = "" if verdict.target is None else f", target {verdict.target:.2f}"
    end = {None: "", True: ": reached", False: ": NOT reached"}[verdict.reached]
    kind = "of the limit," if verdict.limit else "times"
    return (
        f"[{verdict.row}] {verdict.work}: {verdict.ours}, {verdict.times:.2f} {kind} {verdict.against} "
        f"({verdict.theirs}){wanted}{end}"
    )


def conditions(path: Path) -> list[str]:
    """When, how busy and by what measure each benchmark was taken last."""
    last = {line["bench"]: line for line in read_json_lines(path) if line.get("verdicts")}
    return [
        f"{bench}: {datetime.fromtimestamp(line['time'], UTC):%Y-%m-%d %H:%M} UTC, load {line['load']:.1f} on "
        f"{line['cores']} cores, torch {line['torch']}"
        + (f", {line['threads']} threads, judged by {COLUMNS[line['by']]} time" if "by" in line else "")
        for bench, line in last.items()
    ]


def latest_verdicts(path: Path) -> list[Verdict]:
    """The last verdict on each piece of work against each other side, in the order of the rows."""
    found: dict[tuple[int, str, str], Verdict] = {}
    for line in read_json_lines(path):
        for fields in line.get("verdicts", ()):
            verdict = Verdict(**fields)
            found[verdict.row, verdict.work, verdict.against] = verdict
    return sorted(found.values(), key=lambda verdict: (verdict.row == 0, verdict.row, verdict.work))
