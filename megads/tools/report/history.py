"""Reads the files of a run: metrics as columns, events, config and checkpoints. Unreadable content is skipped."""

from __future__ import annotations

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from megads.api import (
    CONFIG_FILE,
    EVENTS_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    ConfigError,
    Span,
    list_checkpoints,
    read_json,
    read_json_lines,
    recorded_config,
)
from megads.monitor.accounting import Accounting, StepTime, account
from megads.runtime.files import is_readable
from megads.tools.plan.step_time import RankTrace

FloatArray = npt.NDArray[np.float64]

TIMELINE_FOLDER = "timeline"
PHASE_EVENTS = ("training_phase", "training_stage")
"""Names of the event of a training phase that begins; the second one of runs made before November 2026."""
STEP_KEYS = (
    "samples", "tokens", "loss", "grad_norm", "lr", "step_time_s", "data_time_s", "tokens_per_s", "tflops_per_device",
    "mfu", "peak_memory_bytes", "skipped", "seq_len", "global_batch_size", "time", "validate_time_s", "save_time_s",
    "moe/balance_loss", "moe/z_loss", "moe/router_entropy",
)  # fmt: skip
"""Columns read from the step lines; NaN where a line lacks the key."""


@dataclass(frozen=True)
class Validation:
    """Validation losses of one dataset.

    Attributes:
        name: name of the dataset.
        step: step after which each validation ran, ascending.
        loss: validation losses in nats per token.
        unigram_loss: loss of the best model without context, in nats per token; NaN if not known.
    """

    name: str
    step: FloatArray
    loss: FloatArray
    unigram_loss: float


@dataclass(frozen=True)
class TaskMetric:
    """Values of one metric of an lm-eval task during training.

    Attributes:
        name: "<task>/<metric>".
        step: step after which each evaluation ran, ascending.
        value: values of the metric.
    """

    name: str
    step: FloatArray
    value: FloatArray


@dataclass(frozen=True)
class ExpertLoads:
    """Load of the experts by layer.

    Attributes:
        layers: indices of the layers with experts, ascending.
        step: recorded steps, ascending.
        max_load: tokens of the busiest expert over the mean, [layers, steps]; NaN where none is recorded.
        dead: number of experts without tokens, [layers, steps]; likewise.
    """

    layers: tuple[int, ...]
    step: FloatArray
    max_load: FloatArray
    dead: FloatArray


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk.

    Attributes:
        name: name of its folder.
        step: step after which it was saved.
        size_bytes: total size of its files.
        committed: whether it has a manifest; without one it is not used.
    """

    name: str
    step: int
    size_bytes: int
    committed: bool


@dataclass(frozen=True)
class RunHistory:
    """Data of a run that a report shows.

    Attributes:
        run_dir: run directory.
        run_id: id of the run.
        step: step numbers, ascending and unique.
        columns: one array per key of STEP_KEYS, as long as `step`.
        validations: validation losses, one entry per dataset.
        tasks: task metrics, one entry per metric of a task.
        events: events in file order.
        config: frozen config; empty if it cannot be read.
        config_text: content of the config file.
        checkpoints: checkpoints on disk, ascending by step.
        unreadable_lines: number of complete lines in metrics and events that are not JSON objects.
        accounting: breakdown of wall time; None for runs of an earlier version that recorded no times.
        loads: load of experts by layer; None if none is recorded.
        by_position: the last validation's losses by position (evaluation.by_position): its step, and the losses in nats
            by the first position of a range, by dataset.
    """

    run_dir: Path
    run_id: str
    step: FloatArray
    columns: Mapping[str, FloatArray]
    validations: tuple[Validation, ...] = ()
    tasks: tuple[TaskMetric, ...] = ()
    events: tuple[dict[str, Any], ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    config_text: str = ""
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    unreadable_lines: int = 0
    accounting: Accounting | None = None
    loads: ExpertLoads | None = None
    by_position: Mapping[str, tuple[float, Mapping[int, float]]] = field(default_factory=dict)

    @cached_property
    def evaluation_results(self) -> list[dict[str, Any]]:
        """Contents of the result files of `megads evaluate`, in the order of their events; those gone are left out."""
        found = []
        for event in self.events:
            files = event.get("files") if event.get("event") == "evaluation" else None
            for name in files if isinstance(files, list) else ():
                path = Path(str(name))
                # The run may have been moved since.
                moved = self.run_dir / "evaluation" / path.parent.name / path.name
                content = _read_object(moved) or _read_object(path)
                found += [content] if content else []
        return found

    @cached_property
    def timed_steps(self) -> dict[int, list[RankTrace]]:
        """The last timed steps, see `read_steps`."""
        return read_steps(self.run_dir)

    def setting(self, key: str) -> Any:
        """Value of a dotted config key; None if it does not exist."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def last_event(self, name: str) -> dict[str, Any]:
        """Latest event with this name; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == name), {})

    @property
    def restarts(self) -> list[int]:
        """Steps from which the run was resumed, except for starts that began the next training phase."""
        starts = [event for event in self.events if event.get("event") == "start"]
        steps = [int(step) for step in (number(event.get("step")) for event in starts[1:]) if math.isfinite(step)]
        for begin in self.phase_begins[1:]:
            if begin in steps:
                steps.remove(begin)
        return steps

    @property
    def phase_begins(self) -> list[int]:
        """Unique steps after which training phases began; empty for a run without phases."""
        found = [number(event.get("step")) for event in self.events if event.get("event") in PHASE_EVENTS]
        return sorted({int(step) for step in found if math.isfinite(step)})


def read_history(run_dir: Path) -> RunHistory:
    """Reads a run directory.

    Raises:
        ConfigError: The directory does not exist or is not a run's, or the run has not finished a step.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}: give the folder that megads train names at its start")
    if not any((run_dir / name).exists() for name in (METRICS_FILE, EVENTS_FILE, CONFIG_FILE)):
        raise ConfigError(
            f"{run_dir} is not a run directory: it holds no {METRICS_FILE}, {EVENTS_FILE} or {CONFIG_FILE}; "
            "give the folder that megads train names at its start"
        )
    table: dict[str, array[float]] = {key: array("d") for key in ("step", *STEP_KEYS)}
    validated: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    evaluated: dict[str, list[tuple[float, float]]] = defaultdict(list)
    loads: dict[float, dict[int, tuple[float, float]]] = {}
    by_position: dict[str, tuple[float, dict[int, float]]] = {}
    num_objects = 0
    for record in read_json_lines(run_dir / METRICS_FILE):
        num_objects += 1
        step = number(record.get("step"))
        if not math.isfinite(step):
            continue
        if "loss" in record:
            table["step"].append(step)
            for key in STEP_KEYS:
                table[key].append(number(record.get(key)))
            continue
        loads.update(_expert_loads_in(record, step))
        by_position |= _position_losses_in(record, step)
        for key, value in record.items():
            if key.startswith("valid/") and key.endswith("/loss"):
                name = key.removeprefix("valid/").removesuffix("/loss")
                validated[name].append((step, number(value), number(record.get(f"valid/{name}/unigram_loss"))))
            if key.startswith("eval/") and not key.endswith(("_stderr", "/documents")):
                evaluated[key.removeprefix("eval/")].append((step, number(value)))
    if not table["step"]:
        raise ConfigError(
            f"{run_dir / METRICS_FILE} has no step yet: the run has just started, or failed before its first step "
            f"(then {run_dir / 'logs'} says why); report again once it has made one"
        )
    columns = dict(zip(table, _last_of_each_step(list(table.values())), strict=True))
    step_times = _step_times(columns)
    validations = []
    for name, rows in validated.items():
        steps, loss, unigram = _last_of_each_step(list(zip(*rows, strict=True)))
        validations.append(Validation(name, steps, loss, float(unigram[-1])))
    events = tuple(read_json_lines(run_dir / EVENTS_FILE))
    config, config_text = _read_config(run_dir / CONFIG_FILE)
    run_section = config.get("run")
    run_id = run_section.get("id") if isinstance(run_section, Mapping) else None
    lines = _complete_lines(run_dir / METRICS_FILE) + _complete_lines(run_dir / EVENTS_FILE)
    return RunHistory(
        run_dir=run_dir,
        run_id=str(run_id or run_dir.resolve().name),
        step=columns.pop("step"),
        columns=columns,
        validations=tuple(validations),
        tasks=tuple(
            TaskMetric(name, *_last_of_each_step(list(zip(*rows, strict=True)))) for name, rows in evaluated.items()
        ),
        events=events,
        config=config,
        config_text=config_text,
        checkpoints=tuple(_read_checkpoints(run_dir)),
        unreadable_lines=max(0, lines - num_objects - len(events)),
        accounting=account(events, step_times),
        loads=_expert_loads(loads),
        by_position=by_position,
    )


def _step_times(columns: Mapping[str, FloatArray]) -> list[StepTime]:
    times = [columns[key] for key in ("time", "step_time_s", "validate_time_s", "save_time_s")]
    return [
        StepTime(ended_s, step_s, validate_s, save_s, int(step))
        for ended_s, step_s, validate_s, save_s, step in zip(
            times[0].tolist(), *(np.nan_to_num(spent).tolist() for spent in times[1:]), columns["step"], strict=True
        )
    ]


_POSITION_KEY = re.compile(r"valid/(.+)/position_(\d+)")


def _position_losses_in(record: Mapping[str, Any], step: float) -> dict[str, tuple[float, dict[int, float]]]:
    """Losses by position in a line of metrics.jsonl, as in RunHistory."""
    found: dict[str, tuple[float, dict[int, float]]] = {}
    for key, value in record.items():
        if match := _POSITION_KEY.fullmatch(key):
            found.setdefault(match[1], (step, {}))[1][int(match[2])] = number(value)
    return found


_EXPERT_LOAD_KEY = re.compile(r"layers/blocks\.(\d+)/max_load")


def _expert_loads_in(record: Mapping[str, Any], step: float) -> dict[float, dict[int, tuple[float, float]]]:
    """The step of a line of metrics.jsonl with maximum load and number of dead experts by layer; empty without any."""
    found = {}
    for key, value in record.items():
        if match := _EXPERT_LOAD_KEY.fullmatch(key):
            found[int(match[1])] = number(value), number(record.get(f"layers/blocks.{match[1]}/dead_experts"))
    return {step: found} if found else {}


def _expert_loads(by_step: Mapping[float, Mapping[int, tuple[float, float]]]) -> ExpertLoads | None:
    if not by_step:
        return None
    layers, steps = sorted({layer for of_step in by_step.values() for layer in of_step}), sorted(by_step)
    missing = (math.nan, math.nan)
    values = np.array([[by_step[step].get(layer, missing) for step in steps] for layer in layers], dtype=np.float64)
    return ExpertLoads(tuple(layers), np.array(steps), values[..., 0], values[..., 1])


def number(value: Any) -> float:
    """Converts a JSON value to a float; NaN if it is not a number."""
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _last_of_each_step(columns: Sequence[Sequence[float]]) -> list[FloatArray]:
    """Sorts columns by the first, steps, and keeps the last row of each step; a resumed run may have repeated one."""
    arrays = [np.array(column, dtype=np.float64) for column in columns]
    _, from_the_end = np.unique(arrays[0][::-1], return_index=True)
    return [array[len(array) - 1 - from_the_end] for array in arrays]


def _complete_lines(path: Path) -> int:
    """Number of complete lines; a line that a running process is still writing does not count."""
    if not is_readable(path):
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _read_config(path: Path) -> tuple[dict[str, Any], str]:
    """The config as a dict and as text; both are empty if it cannot be read, which does not prevent a report."""
    try:
        text = recorded_config(path)
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}, ""
    return (content if isinstance(content, dict) else {}), text


def _read_checkpoints(run_dir: Path) -> list[StoredCheckpoint]:
    found = []
    for step, folder in list_checkpoints(run_dir).items():
        try:
            size_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        except OSError:
            continue  # removed by the running training in the meantime
        found.append(StoredCheckpoint(folder.name, step, size_bytes, (folder / MANIFEST_FILE).exists()))
    return found


_TIMELINE_FILE = re.compile(r"step_(\d+)\.rank_(\d+)\.json")
_MOST_STEPS = 5
"""Number of timed steps that are read, from the last; with many ranks each has thousands of events."""


def read_steps(run_dir: Path) -> dict[int, list[RankTrace]]:
    """Timed steps of a run, ascending, each with the traces of the ranks whose files are readable, by rank.

    Times are on rank 0's clock, relative to the first span of any rank.
    """
    files = defaultdict[int, list[Path]](list)
    for path in sorted((run_dir / TIMELINE_FOLDER).glob("step_*.json")):
        if name := _TIMELINE_FILE.fullmatch(path.name):
            files[int(name[1])].append(path)
    steps: dict[int, list[RankTrace]] = {}
    for step, paths in sorted(files.items())[-_MOST_STEPS:]:
        traces = sorted(filter(None, map(_read_trace, paths)), key=lambda trace: trace.rank)
        begin = min((bar.start_s for trace in traces for bar in trace.bars), default=0.0)
        for trace in traces:
            bars = [replace(bar, start_s=bar.start_s - begin, end_s=bar.end_s - begin) for bar in trace.bars]
            steps.setdefault(step, []).append(replace(trace, bars=tuple(bars)))
    return steps


def _read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing or malformed."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _read_trace(path: Path) -> RankTrace | None:
    """The trace of a rank; None if its file is malformed, as after a kill or with a full disk."""
    try:
        record = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("spans"), list):
        return None
    rank = number(record.get("rank"))
    if not math.isfinite(rank):
        return None
    numbers = [number(record.get(key)) for key in ("clock_offset_s", "pp", "dp", "cp", "tp")]
    offset_s, pp, *replica = (value if math.isfinite(value) else 0.0 for value in numbers)
    bars = []
    for span in record["spans"]:
        if not isinstance(span, dict) or not isinstance(span.get("kind"), str):
            continue
        start_s, end_s = (number(span.get(key)) + offset_s for key in ("start_s", "end_s"))
        places = [span.get(key) for key in ("micro_batch", "stage")]
        micro_batch, stage = (place if isinstance(place, int) and place >= 0 else None for place in places)
        if start_s <= end_s:
            bars.append(Span(span["kind"], micro_batch, stage, start_s, end_s))
    bars.sort(key=lambda bar: (bar.start_s, -bar.end_s))
    return RankTrace(int(rank), int(pp), tuple(map(int, replica)), tuple(bars))
