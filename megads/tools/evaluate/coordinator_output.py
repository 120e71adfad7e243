"""What a coordinator shows: its plan, and the metrics of tasks by checkpoint, as a table, a file and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.runtime.files import atomic_writer
from megads.runtime.progress import render_duration
from megads.runtime.visible_console import VisibleConsole
from megads.tools.evaluate.evaluation_plan import EvaluationPlan, PlannedCheckpoint
from megads.tools.evaluate.packing import WorkUnit
from megads.tools.evaluate.packing_simulation import (
    ONE_JOB_A_TASK,
    SimulatedCluster,
    SimulatedTask,
    lower_bound_s,
    simulate,
)
from megads.tools.generate import say

TABLE_FILE, CHART_FILE = "table.json", "table.png"
_LEAST_WIDTH = 100
_MOST_UNITS = 40
_MARKERS = "osD^v<>PX*"


def show_plan(plan: EvaluationPlan, nodes: int, workers: int) -> None:
    """Prints the units in the order in which one worker would take them, and the predicted makespans.

    Args:
        plan: to show.
        nodes: of the evaluation.
        workers: of each node.
    """
    console = VisibleConsole(highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("checkpoint", "task", "part", "priority", "seconds"):
        table.add_column(header, justify="left" if header in ("checkpoint", "task") else "right", no_wrap=True)
    ordered = sorted(plan.units, key=lambda unit: (-unit.priority, -unit.cost_s - unit.tail_s, unit.checkpoint))
    for unit in ordered[:_MOST_UNITS]:
        part = f"{unit.part + 1} of {unit.parts}" if unit.parts > 1 else ""
        table.add_row(unit.checkpoint, unit.task, part, str(unit.priority or ""), f"{unit.cost_s:.1f}")
    console.print(table)
    if len(ordered) > _MOST_UNITS:
        console.print(f"and {len(ordered) - _MOST_UNITS} shorter units")
    ours, theirs, bound = predicted_s(plan, nodes, workers)
    console.print(
        f"{len(plan.checkpoints)} checkpoints, {len(plan.units)} units on {nodes} x {workers} workers: about "
        f"{render_duration(ours)}; one job a task would take {render_duration(theirs)}, and nothing less than "
        f"{render_duration(bound)}"
    )


def predicted_s(plan: EvaluationPlan, nodes: int, workers: int) -> tuple[float, float, float]:
    """Seconds of the coordinator, of one job a task, and of what no schedule undercuts, all by predicted times."""
    cost_s: dict[tuple[str, str], float] = {}
    first: dict[tuple[str, str], WorkUnit] = {}
    for unit in plan.units:
        cost_s[unit.key] = cost_s.get(unit.key, 0.0) + unit.cost_s
        first.setdefault(unit.key, unit)
    tasks = [
        SimulatedTask(*key, cost, first[key].tail_s, cost, first[key].parts, first[key].priority, first[key].tail_s)
        for key, cost in cost_s.items()
    ]
    costs = plan.costs
    cluster = SimulatedCluster(nodes, workers, plan.config.metric_workers, costs.start_s, costs.stage_s, costs.load_s)
    seconds = (simulate(tasks, cluster, rules).seconds for rules in (None, ONE_JOB_A_TASK))
    return next(seconds), next(seconds), lower_bound_s(tasks, cluster)


def write_table(
    folder: Path, checkpoints: Sequence[PlannedCheckpoint], found: Mapping[str, Mapping[str, float]]
) -> None:
    """Prints the metrics of tasks by checkpoint, and writes them to table.json and, drawn over steps, table.png.

    Args:
        folder: of the files.
        checkpoints: in order.
        found: metrics by the checkpoints' ids.
    """
    there = [one for one in checkpoints if one.id in found]
    names = list(dict.fromkeys(name for one in there for name in found[one.id]))
    shown = [name for name in names if "_stderr" not in name and not name.endswith("/sample_len")]
    if not there:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("metric", no_wrap=True)
    for one in there:
        table.add_column(one.id, justify="right")
    for name in shown:
        table.add_row(name, *(_cell(found[one.id].get(name)) for one in there))
    console = VisibleConsole(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH)
    console.print(table)
    content = {
        "checkpoints": [
            {"id": one.id, "run": one.run, "step": one.step, "folder": str(one.folder), "metrics": found[one.id]}
            for one in there
        ]
    }
    with atomic_writer(folder / TABLE_FILE) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())
    say(folder / TABLE_FILE)
    if len({one.step for one in there}) > 1:
        _draw(folder / CHART_FILE, there, shown, found)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _draw(
    path: Path,
    checkpoints: Sequence[PlannedCheckpoint],
    names: Sequence[str],
    found: Mapping[str, Mapping[str, float]],
) -> None:
    """Draws each metric over the steps, a line a run."""
    try:
        from megads.tools.report.style import close_panel, count_axis, house_style, open_panel, png
    except ModuleNotFoundError as error:
        say(f"no picture, as {error.name} is not installed: pip install 'megads[report]'")
        return
    with house_style():
        figure, axes = open_panel("Tasks", wide=True)
        runs = list(dict.fromkeys(one.run for one in checkpoints))
        for (run, name), marker in zip(((run, name) for run in runs for name in names), cycle(_MARKERS), strict=False):
            points = [
                (one.step, found[one.id][name]) for one in checkpoints if one.run == run and name in found[one.id]
            ]
            if points:
                label = f"{run} {name}" if len(runs) > 1 else name
                axes.plot(*zip(*sorted(points), strict=True), marker=marker, markersize=4, linewidth=1, label=label)
        count_axis(axes)
        close_panel(axes, "step", "")
        with atomic_writer(path) as file:
            file.write(png(figure))
    say(path)
