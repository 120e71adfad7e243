"""Files of a sweep other than its points: settings (sweep.yaml), result tables and the best config."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from megads.api import (
    CONFIG_FILE,
    ConfigError,
    VisibleConsole,
    atomic_writer,
    read_regular,
    recorded_config,
    render_duration,
)
from megads.runtime.files import require_bounded_yaml
from megads.tools.sweep.config import Direction, Space, SweepConfig
from megads.tools.sweep.points import Point, PointState

SWEEP_FILE = "sweep.yaml"
_MAY_CHANGE = (
    "trials", "parallel", "launcher", "point_limit_s", "sbatch", "sbatch_options",
    "ray_address", "ray_cpus", "ray_gpus", "poll_s", "retry_failed", "name",
    "dir", "repeat_best", "repeats",
)  # fmt: skip
"""Settings that may change when a sweep is resumed: they affect how much is run and where, not the search."""


@dataclass(frozen=True)
class SweepRecord:
    """Definition of a sweep, stored in sweep.yaml.

    Attributes:
        name: name of the sweep.
        fixed: overrides common to all points.
        space: description of the search space by key.
        settings: fields of SweepConfig.
    """

    name: str
    fixed: tuple[str, ...]
    space: Mapping[str, str]
    settings: Mapping[str, Any]

    @property
    def direction(self) -> Direction:
        """Optimization direction of the objective."""
        return Direction(self.settings["direction"])

    @property
    def objective_name(self) -> str:
        """Name of the objective in tables and charts."""
        return str(self.settings["objective"] or "loss")


def make_record(name: str, fixed: Sequence[str], space: Space, config: SweepConfig) -> SweepRecord:
    """Creates the record of a sweep; a derived name depends on its definition, so the same command resumes it.

    Args:
        name: prefix of a derived name: the name of the experiment, or else of the model.
        fixed: overrides common to all points.
        space: search space.
        config: settings of the sweep.
    """
    settings = json.loads(json.dumps(asdict(config)))
    texts = {key: str(parameter) for key, parameter in space.items()}
    record = SweepRecord(config.name or name, tuple(fixed), texts, settings)
    if config.name is not None:
        return record
    digest = hashlib.sha256(json.dumps(_identity(record), sort_keys=True).encode()).hexdigest()
    return SweepRecord(f"{name}-{digest[:8]}", record.fixed, record.space, record.settings)


def _identity(record: SweepRecord) -> dict[str, Any]:
    settings = {key: value for key, value in record.settings.items() if key not in _MAY_CHANGE}
    return {"fixed": sorted(record.fixed), "space": dict(record.space), "settings": settings}


def write_record(folder: Path, record: SweepRecord) -> None:
    """Writes sweep.yaml.

    Raises:
        ConfigError: the folder holds another sweep or is not writable.
    """
    try:
        before = read_record(folder)
    except FileNotFoundError:
        before = record
    was, now = _identity(before), _identity(record)
    if was != now:
        part = next(key for key in was if was[key] != now[key])
        raise ConfigError(
            f"{folder} holds another sweep: its {part} is {was[part]}, and now it would be {now[part]}; give this one "
            "another sweep.name or sweep.dir"
        )
    try:
        with atomic_writer(folder / SWEEP_FILE) as file:
            file.write(yaml.safe_dump(asdict(record) | {"fixed": list(record.fixed)}, sort_keys=False).encode())
    except OSError as error:
        raise ConfigError(f"the sweep's folder {folder} cannot be written to ({error.strerror})") from error


def read_record(folder: Path) -> SweepRecord:
    """Reads sweep.yaml.

    Raises:
        FileNotFoundError: the file does not exist.
        ConfigError: the file cannot be read.
    """
    text = read_regular(folder / SWEEP_FILE)
    try:
        require_bounded_yaml(text.decode())
        content = yaml.safe_load(text)
        return SweepRecord(content["name"], tuple(content["fixed"]), content["space"], content["settings"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder / SWEEP_FILE} is not a valid record of a sweep: {error}") from error


@dataclass(frozen=True)
class Ranked:
    """A finished point of the search and the objectives of all its seeds.

    Attributes:
        point: the point.
        objectives: objective of the point, followed by those of its repetitions.
    """

    point: Point
    objectives: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean objective over the seeds."""
        return statistics.fmean(self.objectives)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds (Bessel's correction); None for a single seed."""
        return statistics.stdev(self.objectives) if len(self.objectives) > 1 else None

    @property
    def seeds(self) -> str:
        """Describes the mean; empty for a single seed."""
        spread = self.spread
        return "" if spread is None else f"mean of {len(self.objectives)} seeds, standard deviation {spread:.3g}"


def ranking(points: Sequence[Point], direction: Direction) -> list[Ranked]:
    """Ranks the finished points of the search, the best first.

    Points with several seeds rank before points with one: the best of many single runs is biased by seed noise, so
    means are not compared with single values.
    """
    objectives: dict[int, list[float]] = {}
    for point in points:
        if point.state is PointState.finished and point.objective is not None and math.isfinite(point.objective):
            objectives.setdefault(point.number if point.repeats is None else point.repeats, []).append(point.objective)
    finished = [point for point in points if point.repeats is None and point.state is PointState.finished]
    found = [Ranked(point, tuple(objectives[point.number])) for point in finished if point.number in objectives]
    sign = 1 if direction is Direction.minimize else -1
    return sorted(found, key=lambda ranked: (len(ranked.objectives) == 1, sign * ranked.mean, ranked.point.number))


def points_to_repeat(points: Sequence[Point], direction: Direction, count: int) -> list[Point]:
    """The best points of the search by the objective of their original seed."""
    alone = [point for point in points if point.repeats is None]
    return [ranked.point for ranked in ranking(alone, direction)[:count]]


RESULTS_FILES = ("results.csv", "results.json")
BEST_CONFIG = Path("experiment") / "best.yaml"
BEST_COMMAND = "best.sh"
_LEFT_OUT = ("run",)
"""Config sections of the best point that identify its run only."""


def write_results(folder: Path, record: SweepRecord, points: Sequence[Point]) -> None:
    """Writes results.csv and results.json and, once a point has finished, best.sh and experiment/best.yaml."""
    rows = [
        {
            "point": point.number,
            "state": str(point.state),
            "exit_code": point.exit_code,
            record.objective_name: point.objective,
            "step": point.step,
            "trained_s": point.trained_s,
            "repeats": point.repeats,
            **point.assignment,
            "run_dir": point.run_dir,
            "reason": point.reason,
        }
        for point in points
    ]
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    ranked = ranking(points, record.direction)
    content = {
        "objective": record.objective_name,
        "direction": str(record.direction),
        "points": [dataclasses.asdict(point) for point in points],
        "ranking": [
            {
                "point": item.point.number,
                "mean": item.mean,
                "spread": item.spread,
                "seeds": len(item.objectives),
                "objectives": item.objectives,
            }
            for item in ranked
        ],
        "best_command": shlex.join(best_command(ranked[0].point, record)) if ranked else None,
    }
    for name, body in zip(RESULTS_FILES, (text.getvalue(), json.dumps(content, indent=1) + "\n"), strict=True):
        _write(folder / name, body)
    if ranked:
        _write_best(folder, record, ranked[0])


def best_command(point: Point, record: SweepRecord) -> list[str]:
    """Command line that trains the config of a point in a new run."""
    overrides = [given for given in point.overrides if given.partition("=")[0] not in ("run.id", "run.dir", "run.name")]
    return ["megads", "train", *overrides, f"run.name={record.name}-best"]


def _write_best(folder: Path, record: SweepRecord, best: Ranked) -> None:
    told = f"point {best.point.number} of {record.name}, {record.objective_name} {best.mean:.6g}"
    command = shlex.join(best_command(best.point, record))
    _write(
        folder / BEST_COMMAND,
        f"#!/bin/sh\n# The winner: {told}.\n# Its length, for example: sh {folder}/{BEST_COMMAND} train.steps=10000\n"
        f'exec {command} "$@"\n',
    )
    config = Path(best.point.run_dir) / CONFIG_FILE
    if not config.exists():
        return
    try:
        content: dict[str, Any] = dict(yaml.safe_load(recorded_config(config)))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{config}: {str(error).splitlines()[0]}: megads did not write this file, so it is not copied to "
            f"{folder / BEST_CONFIG}; {folder / BEST_COMMAND} trains the winner"
        ) from error
    for section in _LEFT_OUT:
        content.pop(section, None)
    head = (
        f"# @package _global_\n# The winner: {told}.\n# megads train --config-dir {folder} experiment=best "
        "train.steps=10000\n"
    )
    (folder / BEST_CONFIG).parent.mkdir(exist_ok=True)
    _write(folder / BEST_CONFIG, head + yaml.safe_dump(content, sort_keys=False))


def state_counts(points: Sequence[Point]) -> dict[str, int]:
    """Number of points in each state that occurs."""
    counts = {str(state): sum(point.state is state for point in points) for state in PointState}
    return {state: number for state, number in counts.items() if number}


def state_text(point: Point) -> str:
    """State of a point, for tables."""
    return str(point.state) if point.repeats is None else f"{point.state}, seed of {point.repeats}"


def number_texts(point: Point) -> tuple[str, str, str]:
    """Objective, steps and time of a point, for tables; empty if not known."""
    return (
        "" if point.objective is None else f"{point.objective:.6g}",
        f"{point.step:,}" if point.step else "",
        render_duration(point.trained_s) if point.trained_s else "",
    )


def summary(record: SweepRecord, points: Sequence[Point], width: int) -> str:
    """Text with the table of all points and the winner, at most `width` characters wide."""
    keys = list(dict.fromkeys(key for point in points for key in point.assignment))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("", "exit", record.objective_name, "steps", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("state", *keys, "run or reason"):
        table.add_column(header, overflow="fold")
    for point in points:
        table.add_row(
            str(point.number),
            "" if point.exit_code is None else str(point.exit_code),
            *number_texts(point),
            state_text(point),
            *(point.assignment.get(key, "") for key in keys),
            point.reason if point.state in (PointState.infeasible, PointState.failed) else point.run_id,
        )
    console = VisibleConsole(highlight=False, width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    counts = ", ".join(f"{number} {state}" for state, number in state_counts(points).items())
    return "\n".join([f"=== sweep {record.name}: {counts}", captured.get().strip("\n"), *winner_lines(record, points)])


def winner_lines(record: SweepRecord, points: Sequence[Point]) -> list[str]:
    """Lines about the best point: objective, margin to the next relative to seed noise, and its command line."""
    ranked = ranking(points, record.direction)
    if not ranked and any(point.state is PointState.finished for point in points):
        return [f"no finished point has a finite {record.objective_name} in its metrics.jsonl, so there is no best one"]
    if not ranked:
        return ["no point has finished, so there is no best one"]
    best = ranked[0]
    of_seeds = f" ({best.seeds})" if best.seeds else ""
    lines = [f"best: point {best.point.number}, {record.objective_name} {best.mean:.6g}{of_seeds}: {best.point.label}"]
    noise = [item.spread for item in ranked if item.spread is not None]
    if len(ranked) > 1 and noise:
        gap, typical = abs(ranked[1].mean - best.mean), statistics.fmean(noise)
        if gap < typical:
            lines.append(f"      the next is only {gap:.3g} worse, less than the deviation of the seeds, {typical:.3g}")
    return [*lines, f"      train it: {shlex.join(best_command(best.point, record))}"]


def _write(path: Path, text: str) -> None:
    with atomic_writer(path) as file:
        file.write(text.encode())
