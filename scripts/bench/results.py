"""Results of a benchmark: a line of figures in bench.jsonl, and verdicts, each comparing megads with one other side."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megads.runtime.environment import available_cores
from megads.runtime.metrics import JsonLinesWriter, read_json_lines
from scripts.bench.turns import COLUMNS, take_turns


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


@dataclass(frozen=True)
class Comparison:
    """Sides that do the same work, alternating in this process.

    Attributes:
        row, work: see `Verdict`.
        sides: what each side does, by name.
        ours: megads' side.
        targets: other sides to compare with, and the target of each; those that are not among `sides` are left out.
        limit: the side that is a hardware limit.
        items: number of items that a call of each side handles; empty: times are compared, not rates.
        unit: unit of the rates.
    """

    row: int
    work: str
    sides: Mapping[str, Callable[[], object]]
    ours: str
    targets: Mapping[str, float | None]
    limit: str = ""
    items: Mapping[str, float] = field(default_factory=dict)
    unit: str = ""

    def measure(self, rounds: int, warm_up: int = 2) -> dict[str, dict[str, float]]:
        """Runs all sides; prints and returns their milliseconds by side and column of `COLUMNS`."""
        found = {side: times.summary for side, times in take_turns(self.sides, rounds, warm_up).items()}
        print(f"{self.work}: ms (in brackets: over ours)")
        for side, ms in found.items():
            cells = [f"{name} {ms[key]:9.2f} ({ms[key] / found[self.ours][key]:5.2f})" for key, name in COLUMNS.items()]
            print(f"  {side:<32} {'   '.join(cells)}", flush=True)
        return found

    def verdicts(self, found: Mapping[str, Mapping[str, float]], by: str) -> list[Verdict]:
        """Compares megads' side with the others by one of the columns."""
        said = []
        for side, target in self.targets.items():
            if side not in found:
                continue
            ours, theirs, limit = found[self.ours][by], found[side][by], side == self.limit
            if self.items:
                rates = (1e3 * self.items[name] / ms for name, ms in ((self.ours, ours), (side, theirs)))
                said.append(against_rate(self.row, self.work, next(rates), side, next(rates), self.unit, target, limit))
            else:
                said.append(against_time(self.row, self.work, ours, side, theirs, target, limit))
        return said


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


def table(verdicts: list[Verdict]) -> str:
    """Formats a Markdown table, one row per verdict."""
    heads = ("row", "work", "ours", "against", "theirs", "times as good", "target", "reached")
    lines = [heads, tuple("---" for _ in heads)]
    for verdict in verdicts:
        target = "" if verdict.target is None else f"{verdict.target:.2f}"
        share = f"{verdict.times:.2f}" + (" of the limit" if verdict.limit else "")
        reached = {None: "", True: "yes", False: "NO"}[verdict.reached]
        row = str(verdict.row) if verdict.row else ""
        lines.append((row, verdict.work, verdict.ours, verdict.against, verdict.theirs, share, target, reached))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(verdicts: list[Verdict]) -> str:
    """Number of targets reached, and those not reached."""
    judged = [verdict for verdict in verdicts if verdict.reached is not None]
    missed = [f"{verdict.work} ({verdict.against})" for verdict in judged if not verdict.reached]
    text = f"{len(judged) - len(missed)} of {len(judged)} targets reached"
    return text + (f"; not: {'; '.join(missed)}" if missed else "") + "."


def page(results: Path, path: Path) -> None:
    """Writes the page of the docs."""
    verdicts = latest_verdicts(results)
    lines = [
        "# Benchmarks",
        "",
        "Generated by `python -m scripts.bench.suite --page docs/notes/benchmarks.md` from the last results of `make",
        "bench`; [performance.md](performance.md) explains what is compared and how. A target of 1.00: not worse than",
        "the peer. Dates and conditions:",
        "",
        *(f"- {condition}" for condition in conditions(results)),
        "",
        summary(verdicts),
        "",
        table(verdicts),
    ]
    path.write_text("\n".join(lines) + "\n")
    print(f"page: {path}")
