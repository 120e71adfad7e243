#!/usr/bin/env python3
"""Shows the last verdicts of bench.jsonl: a table, and one figure of ratios to peers and fractions of hardware limits.

    python -m scripts.bench.picture bench.jsonl --picture bench.png
    python -m scripts.bench.picture bench.jsonl --page docs/notes/benchmarks.md

The second command writes the page of the docs and its figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.bench.results import Verdict, conditions, latest_verdicts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_INCHES = 0.19
HEAD_INCHES = 1.1
WIDTH_INCHES = 11.6


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


def draw(verdicts: list[Verdict]) -> Figure:
    """One row per benchmark: on the left the ratio to each peer, on the right the share of the limit."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    from megads.tools.report.style import INK

    works = list(dict.fromkeys(verdict.work for verdict in verdicts))
    figure = Figure(figsize=(WIDTH_INCHES, HEAD_INCHES + LINE_INCHES * len(works)))
    figure.suptitle("megads against its peers and the limits of the machine", x=0.01, ha="left", color=INK)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _panel(left, works, [verdict for verdict in verdicts if not verdict.limit], "times as good as the peer")
    _panel(right, works, [verdict for verdict in verdicts if verdict.limit], "share of the limit")
    left.set_xscale("log")
    left.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    left.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    left.xaxis.set_minor_formatter(NullFormatter())
    right.set_xlim(left=0)
    left.set_yticks(range(len(works)), works)
    left.set_ylim(len(works) - 0.5, -0.5)
    _legend(figure)
    return figure


def _marker(against: str) -> str:
    compiled = "compiled" in against or "inductor" in against
    return "^" if compiled else "s" if "ops.impl=torch" in against else "o"


def _colour(verdict: Verdict) -> str:
    from megads.tools.report.style import BLUE, GREEN, RED

    return {None: BLUE, True: GREEN, False: RED}[verdict.reached]


def _panel(axes: Axes, works: list[str], verdicts: list[Verdict], label: str) -> None:
    from megads.tools.report.style import GRID, INK, MUTED

    axes.axvline(1.0, color=MUTED, linewidth=0.8)
    for line in range(len(works)):
        axes.axhline(line, color=GRID, linewidth=0.5, zorder=0)
    for verdict in verdicts:
        line = works.index(verdict.work)
        if verdict.target is not None:
            axes.plot([verdict.target], [line], marker="|", markersize=10, markeredgewidth=1.6, color=INK)
        axes.plot([verdict.times], [line], _marker(verdict.against), markersize=5.5, color=_colour(verdict), alpha=0.85)
    axes.set_xlabel(label)
    axes.grid(False)


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    from megads.tools.report.style import BLUE, GREEN, INK, MUTED, RED

    looks: dict[str, tuple[str, str]] = {
        "target": ("|", INK),
        "reached": ("o", GREEN),
        "not reached": ("o", RED),
        "no target": ("o", BLUE),
        "eager or another program": ("o", MUTED),
        "compiled": ("^", MUTED),
        "our ops.impl=torch": ("s", MUTED),
    }
    handles = [
        Line2D([], [], linestyle="", marker=marker, color=colour, label=text, markersize=7 if marker == "|" else 5.5)
        for text, (marker, colour) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def save(verdicts: list[Verdict], path: Path, say: Callable[[str], None]) -> None:
    """Saves the figure, or reports that matplotlib is missing."""
    try:
        from megads.tools.report.style import house_style, png
    except ImportError as error:
        say(f"no picture: {error}; pip install -c constraints.txt 'megads[bench]'")
        return
    with house_style():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(draw(verdicts)))
    say(f"picture: {path}")


def page(results: Path, verdicts: list[Verdict], path: Path) -> None:
    """Writes the page of the docs, and its figure to pictures/ in the same folder."""
    picture = path.parent / "pictures" / f"{path.stem}.png"
    save(verdicts, picture, print)
    lines = [
        "# Benchmarks",
        "",
        "Generated by `python -m scripts.bench.picture bench.jsonl --page docs/notes/benchmarks.md` from the last",
        "results of `make bench`; [performance.md](performance.md) explains what is compared and how. A target of",
        "1.00: not worse than the peer. Dates and conditions:",
        "",
        *(f"- {condition}" for condition in conditions(results)),
        "",
        f"![Every benchmark compared with its peers and hardware limits](pictures/{picture.name})",
        "",
        summary(verdicts),
        "",
        table(verdicts),
    ]
    path.write_text("\n".join(lines) + "\n")
    print(f"page: {path}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file of results, as bench.jsonl")
    parser.add_argument("--picture", type=Path, help="PNG to write")
    parser.add_argument("--page", type=Path, help="page of the docs to write")
    parser.add_argument("--row", type=int, action="append", help="only these benchmarks")
    arguments = parser.parse_args()
    verdicts = [v for v in latest_verdicts(arguments.results) if arguments.row is None or v.row in arguments.row]
    if not verdicts:
        print(f"{arguments.results} holds no verdict of these benchmarks: run `make bench` first", file=sys.stderr)
        return 1
    print(f"{table(verdicts)}\n\n{summary(verdicts)}")
    if arguments.picture:
        save(verdicts, arguments.picture, print)
    if arguments.page:
        page(arguments.results, verdicts, arguments.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
