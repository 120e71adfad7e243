"""What an evaluation prints, and its files about several checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.api import VisibleConsole, atomic_writer, render_duration
from megads.tools.evaluate.evaluation_plan import EvaluationPlan, PlannedCheckpoint
from megads.tools.evaluate.job import Evaluated
from megads.tools.evaluate.packing import Cluster, TaskCost, lower_bound_s, simulate, simulate_jobs
from megads.tools.generate import print_line

TABLE_FILE, CHART_FILE = "table.json", "table.png"
_TABLE_WIDTH = 110
"""Width of the widest table in characters; a narrower terminal wraps its lines instead of truncating cells."""
_TEXTS = ("set", "task", "filter", "metric", "checkpoint")
_MOST_UNITS = 40
_MARKERS = "osD^v<>PX*"


def show(result: Evaluated) -> None:
    """Prints the results of a checkpoint as tables; task results with the columns of lm-eval's table."""
    if result.kept:
        print_line(f"reused cached answers: {', '.join(result.kept)}")
    if result.harness_file is not None:
        content = json.loads(Path(result.harness_file).read_text(encoding="utf-8"))
        rows: list[tuple[str, ...]] = []
        # Groups precede their tasks.
        for task, metrics in content["results"].items():
            documents = content.get("n-samples", {}).get(task, {}).get("effective", "")
            shown = (metrics.get("alias", task), str(content["versions"].get(task, "")))
            for key, value in metrics.items():
                metric, _, chosen = key.partition(",")
                if not chosen or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                    continue
                error = metrics.get(f"{metric}_stderr,{chosen}")
                told = f"± {error:.4f}" if isinstance(error, float) else ""
                few = str(content["n-shot"].get(task, ""))
                rows.append((*shown, chosen, few, str(documents), metric, f"{value:.4f}", told))
                shown = ("", "")
        _print_table(("task", "version", "filter", "examples", "documents", "metric", "value", "error"), rows)
    if result.sets:
        _show_sets(result.sets)
    if result.needles is not None:
        cells = {(cell["depth"], cell["length"]): cell for cell in result.needles["cells"]}
        lengths, depths = (sorted({place[index] for place in cells}) for index in (1, 0))
        rows = [
            (f"{100 * depth:g}%", *(f"{cells[depth, length]['accuracy']:.0%}" for length in lengths))
            for depth in depths
        ]
        _print_table(("needles found at depth", *(f"{length:,} tokens" for length in lengths)), rows)
    for path in (result.harness_file, result.sets_file, result.needles_file):
        if path is not None:
            print_line(path)


def _show_sets(sets: Mapping[str, Mapping[str, Any]]) -> None:
    rows = []
    for name, values in sets.items():
        numbers = (f"{values[key]:.4f}" for key in ("loss", "perplexity", "bits_per_byte"))
        rows.append((name, *numbers, *(f"{values[key]:,}" for key in ("tokens", "bytes"))))
    _print_table(("set", "loss", "perplexity", "bits per byte", "tokens", "bytes"), rows)
    by_range: dict[tuple[int, int], dict[str, str]] = {}
    for name, values in sets.items():
        for one in values["by_position"]:
            by_range.setdefault((one["first"], one["last"]), {})[name] = f"{one['loss']:.4f}"
    rows = [
        (_range_text(first, last), *(losses.get(name, "") for name in sets))
        for (first, last), losses in sorted(by_range.items())
    ]
    _print_table(("loss at position", *sets), rows)


def _range_text(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, justify="left" if header in _TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = VisibleConsole(highlight=False, soft_wrap=True)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(table)


def show_plan(plan: EvaluationPlan, nodes: int, workers: int) -> None:
    """Prints the units in the order in which a single worker would take them, and the predicted makespans.

    Args:
        plan: plan of the evaluation.
        nodes: number of nodes.
        workers: number of model workers per node.
    """
    ordered = sorted(plan.units, key=lambda unit: (-unit.priority, -unit.cost_s - unit.tail_s, unit.checkpoint))
    rows = []
    for unit in ordered[:_MOST_UNITS]:
        part = f"{(unit.part or 0) + 1} of {unit.parts}" if unit.parts > 1 else ""
        rows.append((unit.checkpoint, unit.task, part, str(unit.priority or ""), f"{unit.cost_s:.1f}"))
    _print_table(("checkpoint", "task", "part", "priority", "seconds"), rows)
    console = VisibleConsole(highlight=False, soft_wrap=True)
    if len(ordered) > _MOST_UNITS:
        console.print(f"and {len(ordered) - _MOST_UNITS} shorter units")
    tasks = [
        TaskCost(*unit.key, unit.cost_s * unit.parts, unit.parts, unit.priority, tail_s=unit.tail_s)
        for unit in plan.units
        if unit.part == 0
    ]
    cluster = Cluster(nodes, workers, plan.config.metric_workers, plan.costs)
    bound_s = lower_bound_s(tasks, cluster)
    ours, theirs, bound = map(
        render_duration, (simulate(tasks, cluster).seconds, simulate_jobs(tasks, cluster).seconds, bound_s)
    )
    console.print(
        f"{len(plan.checkpoints)} checkpoints, {len(plan.units)} units on {nodes} x {workers} workers: about {ours}; "
        f"one job per task would take {theirs}; lower bound {bound}"
    )


def write_table(
    folder: Path, checkpoints: Sequence[PlannedCheckpoint], found: Mapping[str, Mapping[str, float]]
) -> None:
    """Prints the task metrics of all checkpoints, and writes them to table.json and, as curves over steps, table.png.

    Args:
        folder: folder of the files.
        checkpoints: checkpoints in order.
        found: metrics by checkpoint id.
    """
    there = [one for one in checkpoints if one.id in found]
    names = list(dict.fromkeys(name for one in there for name in found[one.id]))
    shown = [name for name in names if "_stderr" not in name and not name.endswith("/sample_len")]
    if not there:
        return
    rows = []
    for name in shown:
        values = [found[one.id].get(name) for one in there]
        rows.append((name, *("" if value is None else f"{value:.4f}" for value in values)))
    _print_table(("metric", *(one.id for one in there)), rows)
    listed: list[dict[str, Any]] = [
        {"id": one.id, "run": one.run, "step": one.step, "folder": str(one.folder), "metrics": found[one.id]}
        for one in there
    ]
    with atomic_writer(folder / TABLE_FILE) as file:
        file.write((json.dumps({"checkpoints": listed}, indent=2) + "\n").encode())
    print_line(folder / TABLE_FILE)
    if len({one.step for one in there}) == 1:
        return
    try:
        from megads.tools.report.style import close_panel, count_axis, house_style, open_panel, png
    except ModuleNotFoundError as error:
        print_line(f"no picture, as {error.name} is not installed: pip install 'megads[report]'")
        return
    with house_style():
        figure, axes = open_panel("Tasks", wide=True)
        runs = list(dict.fromkeys(one.run for one in there))
        for (run, name), marker in zip(((run, name) for run in runs for name in shown), cycle(_MARKERS), strict=False):
            points = sorted(
                (one.step, found[one.id][name]) for one in there if one.run == run and name in found[one.id]
            )
            if points:
                label = f"{run} {name}" if len(runs) > 1 else name
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, linewidth=1, label=label)
        count_axis(axes)
        close_panel(axes, "step", "")
        with atomic_writer(folder / CHART_FILE) as file:
            file.write(png(figure))
    print_line(folder / CHART_FILE)
