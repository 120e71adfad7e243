"""Compares the ledgers of two runs step by step, their data and their configs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import megads
from megads.api import (
    DATA_FILE,
    METRICS_FILE,
    ChangeClass,
    ConfigError,
    DataError,
    RootConfig,
    change_class,
    config_dict,
    find_run,
    read_json,
    read_json_lines,
)
from megads.tools.compare.config import CompareConfig
from megads.tools.report.history import FloatArray, RunHistory, number, read_history

REFERENCE_FILE = "reference.json"
"""What a reference run records beside its ledger: command, machine, tolerances by step."""
REFERENCES = Path("docs") / "runs"
LOSS_TOLERANCE, GRAD_NORM_TOLERANCE = 1e-5, 1e-4
"""Relative bounds of fp32 runs over 50 steps in any layout (docs/numerics.md, N3), for references without their own."""
RATE_TOLERANCE = 1e-9
"""The learning rate is computed in fp64 from the samples: a larger difference is another schedule."""
_INIT_FROM = "checkpoint.init_from"
_RECORDING = ("run", "logging", "checkpoint")
"""Sections that say where and how a run is recorded, not what it computes; except checkpoint.init_from."""
_PLACES = ("data.raw", "data.train", "tokenizer.path")
"""Keys that say where the data is; its content is compared instead."""


@dataclass(frozen=True)
class Tolerance:
    """Largest relative difference by step.

    Attributes:
        steps: steps from which each value applies, ascending; the first also applies before it.
        values: relative differences.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, steps: FloatArray) -> FloatArray:
        """Values at these steps."""
        places = np.searchsorted(np.array(self.steps), steps, side="right") - 1
        return np.array(self.values)[np.maximum(places, 0)]


@dataclass(frozen=True)
class Departure:
    """A value outside of the tolerance.

    Attributes:
        quantity: loss, grad_norm, lr, or valid/<dataset>/loss.
        step: its step.
        found: value of the run.
        wanted: value of the reference.
        allowed: largest relative difference allowed at this step.
    """

    quantity: str
    step: int
    found: float
    wanted: float
    allowed: float


@dataclass(frozen=True)
class Quantity:
    """One quantity, compared at the steps that both runs have.

    Attributes:
        name: loss, grad_norm, lr, or valid/<dataset>/loss.
        count: number of steps compared.
        largest: largest relative difference; infinite where only one of the values is finite.
        at_step: the step of it.
        allowed: tolerance at that step.
        left: the first value outside of the tolerance; None if there is none.
    """

    name: str
    count: int
    largest: float
    at_step: int
    allowed: float
    left: Departure | None


@dataclass(frozen=True)
class Comparison:
    """A run beside its reference.

    Attributes:
        run: folder of the run.
        reference: folder of the reference.
        machine: what the reference ran on; empty if not recorded.
        steps: steps of the run that were compared.
        planned: number of steps of the reference.
        quantities: what was compared; the loss is the first.
        other_samples: the first step that trained on other samples; None if there is none, or it is not recorded.
        data: what differs between the datasets and tokenizers.
        trains: config keys that change what is trained, with the reference's and the run's value.
        rounds: config keys that change rounding, or what is measured, likewise.
        notes: what limits the comparison.
    """

    run: Path
    reference: Path
    machine: str
    steps: FloatArray
    planned: int
    quantities: tuple[Quantity, ...]
    other_samples: int | None
    data: tuple[str, ...]
    trains: Mapping[str, tuple[Any, Any]]
    rounds: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...]

    @property
    def left(self) -> Departure | None:
        """The first value outside of its tolerance, of all quantities."""
        found = [quantity.left for quantity in self.quantities if quantity.left is not None]
        return min(found, key=lambda departure: departure.step, default=None)

    @property
    def is_within(self) -> bool:
        """Whether the run trained on the reference's samples and every value is within its tolerance."""
        return self.left is None and self.other_samples is None


def find_reference(name: str) -> Path:
    """Returns the folder of a reference: a path, a name in docs/runs of checkout or package, or the id of a run.

    Raises:
        ConfigError: there is none.
    """
    package = Path(megads.__file__).resolve().parent
    homes = (REFERENCES, package / REFERENCES, package.parent / REFERENCES)
    for folder in (Path(name), *(home / name for home in homes)):
        if (folder / METRICS_FILE).is_file():
            return folder
    try:
        return find_run(name)
    except ConfigError:
        known = sorted({path.parent.name for home in homes for path in home.glob(f"*/{METRICS_FILE}")})
        shown = f"references are {', '.join(known)}" if known else f"there are none in {REFERENCES} here"
        raise ConfigError(f"reference = {name}: neither a reference nor a run has this name; {shown}") from None


def compare(config: CompareConfig) -> Comparison:
    """Compares a run with its reference.

    Raises:
        ConfigError: a folder does not exist, or the runs have no step in common.
        DataError: the ledger lacks steps in between, or the reference's tolerances are unreadable.
    """
    run_dir, reference_dir = find_run(config.run), find_reference(config.reference)
    run, reference = read_history(run_dir), read_history(reference_dir)
    record = _record_of(reference_dir)
    steps = np.intersect1d(run.step, reference.step)
    if not len(steps):
        raise ConfigError(
            f"run = {config.run} and reference = {config.reference} have no step in common: {_range(run)} and "
            f"{_range(reference)}"
        )
    _require_no_gap(run, reference)
    loss = _tolerance(config.loss_tolerance, record, "loss", LOSS_TOLERANCE)
    norm = _tolerance(config.grad_norm_tolerance, record, "grad_norm", GRAD_NORM_TOLERANCE)
    rate = Tolerance((1,), (RATE_TOLERANCE,))
    quantities = []
    for name, tolerance in (("loss", loss), ("grad_norm", norm), ("lr", rate)):
        columns = _at(run.step, run.columns[name], steps), _at(reference.step, reference.columns[name], steps)
        quantities.append(_compare_values(name, steps, *columns, tolerance))
    validated = {validation.name: validation for validation in run.validations}
    for wanted in reference.validations:
        if (found := validated.get(wanted.name)) is not None:
            common = np.intersect1d(found.step, wanted.step)
            columns = _at(found.step, found.loss, common), _at(wanted.step, wanted.loss, common)
            quantities.append(_compare_values(f"valid/{wanted.name}/loss", common, *columns, loss))
    if quantities[0] is None:
        raise ConfigError(f"reference = {config.reference} has no finite loss at these steps: give another one")
    trains, rounds = config_differences(reference.config, run.config)
    return Comparison(
        run_dir,
        reference_dir,
        str(record.get("machine", "")),
        steps,
        len(reference.step),
        tuple(quantity for quantity in quantities if quantity is not None),
        _other_samples(run_dir, reference_dir),
        tuple(_data_differences(reference_dir, run_dir)),
        trains,
        rounds,
        tuple(_notes(run)),
    )


def _record_of(folder: Path) -> Mapping[str, Any]:
    """What a reference records beside its ledger; empty for a run."""
    path = folder / REFERENCE_FILE
    if not path.exists():
        return {}
    try:
        record = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): restore it, or give another reference") from error
    if not isinstance(record, dict):
        raise DataError(f"{path} is not a JSON object: restore it, or give another reference")
    return record


def _tolerance(given: float | None, record: Mapping[str, Any], name: str, usual: float) -> Tolerance:
    if given is not None or "tolerance" not in record:
        return Tolerance((1,), (usual if given is None else given,))
    try:
        steps, values = zip(*((int(step), float(value)) for step, value in record["tolerance"][name]), strict=True)
    except (KeyError, TypeError, ValueError):
        raise DataError(
            f"{REFERENCE_FILE} of the reference has no tolerance.{name} as a list of [step, relative difference]: "
            f"restore it, or give {name}_tolerance"
        ) from None
    return Tolerance(steps, values)


def _require_no_gap(run: RunHistory, reference: RunHistory) -> None:
    """Refuses a ledger that lacks steps of the reference between its first and its last one: they may have left it."""
    inside = reference.step[(reference.step >= run.step[0]) & (reference.step <= run.step[-1])]
    missing = np.setdiff1d(inside, run.step)
    if len(missing):
        unreadable = f" and has {run.unreadable_lines} unreadable lines" if run.unreadable_lines else ""
        raise DataError(
            f"{run.run_dir / METRICS_FILE} lacks {len(missing)} steps between its first and its last, the first is "
            f"{missing[0]:.0f}{unreadable}: nothing can be said of these; continue or repeat the run"
        )


def _at(steps: FloatArray, values: FloatArray, common: FloatArray) -> FloatArray:
    return values[np.searchsorted(steps, common)]


def _compare_values(
    name: str, steps: FloatArray, found: FloatArray, wanted: FloatArray, tolerance: Tolerance
) -> Quantity | None:
    """Compares one quantity; None if the reference has no value of it at these steps."""
    if not np.isfinite(wanted).any():
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = np.abs(found - wanted) / np.abs(wanted)
    equal = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    differences = np.where(equal, 0.0, np.where(np.isfinite(differences), differences, math.inf))
    allowed = tolerance.at(steps)
    largest = int(np.argmax(differences))
    outside = np.flatnonzero(differences > allowed)
    left = None
    if len(outside):
        first = int(outside[0])
        left = Departure(name, int(steps[first]), float(found[first]), float(wanted[first]), float(allowed[first]))
    return Quantity(name, len(steps), float(differences[largest]), int(steps[largest]), float(allowed[largest]), left)


def _other_samples(run_dir: Path, reference_dir: Path) -> int | None:
    found, wanted = _batch_hashes(run_dir), _batch_hashes(reference_dir)
    return min((step for step in found.keys() & wanted.keys() if found[step] != wanted[step]), default=None)


def _batch_hashes(run_dir: Path) -> dict[int, str]:
    """The hash of each step's samples; the last of a step that was repeated after a resume."""
    return {
        int(step): record["batch_hash"]
        for record in read_json_lines(run_dir / METRICS_FILE)
        if isinstance(record.get("batch_hash"), str) and math.isfinite(step := number(record.get("step")))
    }


def _data_differences(before_dir: Path, now_dir: Path) -> list[str]:
    """What differs between the data of two runs, by content; nothing if one did not record it."""
    try:
        before, now = read_json(before_dir / DATA_FILE), read_json(now_dir / DATA_FILE)
        tokens = [[item.get("content") for item in record["datasets"]] for record in (before, now)]
        tokenizers = [(record.get("tokenizer") or {}).get("sha256") for record in (before, now)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    found = []
    if tokenizers[0] != tokenizers[1]:
        found.append("the tokenizer is another one")
    if tokens[0] != tokens[1]:
        found.append("the datasets have other tokens")
    return found


def config_differences(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Returns the keys that differ and change what is trained, and all others that differ, each with both values.

    A key that one of the two lacks has its default there: an earlier version of megads did not know it.

    Args:
        before: config of the reference; empty if unknown, as `now`: then no key differs.
        now: config of the run.
    """
    trains, rounds = dict[str, tuple[Any, Any]](), dict[str, tuple[Any, Any]]()
    if not before or not now:
        return trains, rounds
    flat, defaults = [dict(_flat(config)) for config in (before, now)], dict(_flat(config_dict(RootConfig())))
    for key in sorted(flat[0].keys() | flat[1].keys()):
        pair = flat[0].get(key, defaults.get(key)), flat[1].get(key, defaults.get(key))
        recording = key.partition(".")[0] in _RECORDING and key != _INIT_FROM
        if pair[0] == pair[1] or recording or key in _PLACES:
            continue
        (trains if key == _INIT_FROM or change_class(key) is not ChangeClass.safe else rounds)[key] = pair
    return trains, rounds


def _flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = list[tuple[str, Any]]()
    for key, value in section.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return found


def _notes(run: RunHistory) -> list[str]:
    found = []
    if run.unreadable_lines:
        found.append(f"{run.unreadable_lines} lines of the run's files are unreadable; no step is missing")
    if run.restarts:
        found.append(f"the run was resumed after step {', '.join(map(str, run.restarts))}; its config is the last one")
    if not run.config:
        found.append("the run's config cannot be read, so that configs are not compared")
    return found


def _range(history: RunHistory) -> str:
    return f"steps {history.step[0]:.0f} to {history.step[-1]:.0f}"
