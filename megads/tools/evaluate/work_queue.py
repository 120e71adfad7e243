"""Work queue of an evaluation: files shared by workers on all nodes, without a server.

<folder>/
  plan.json                       the evaluation plan
  workers/<name>.json             identity of a worker and the checkpoint it holds; touched while the worker is alive
  claims/<unit>.<attempt>         a hard link, atomic also on network file systems, to a file with the worker's name
  failures/<unit>.<attempt>.json  reason why an attempt failed
  parts/<unit>.json               answers to a part of a task's batches
  metrics/<task>.json             lm-eval's results of a task
  logs/                           logs of the workers

A unit is done when its file exists. A claim is valid while its worker is alive, which is determined by the pid for a
process on this machine, else by the age of the worker's file on the file server's clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megads.errors import EXIT_BUG, RankKilled
from megads.runtime.claims import Participant, Presence, link_claim, live_members
from megads.runtime.files import atomic_writer, parse_json, read_regular
from megads.tools.evaluate.packing import WorkerView, WorkUnit

MODEL, METRICS = "model", "metrics"
"""Roles of workers: model workers run inference, metrics workers compute metrics."""


@dataclass(frozen=True)
class WorkerRecord(Participant):
    """Record of a worker in the queue.

    Attributes:
        role: MODEL or METRICS.
        loaded: checkpoint that the worker holds.
        unit: readable name of its current work; empty if idle.
    """

    role: str
    loaded: str | None = None
    unit: str = ""

    @property
    def name(self) -> str:
        """Unique name of the worker."""
        return f"{self.node}-{self.pid}-{self.born}"


def job_id(checkpoint: str, task: str) -> str:
    """Id of a task on a checkpoint, used in file names."""
    return hashlib.sha256(f"{checkpoint}\n{task}".encode()).hexdigest()[:12]


def unit_id(unit: WorkUnit) -> str:
    """Id of a unit, used in file names."""
    return f"{job_id(*unit.key)}-{unit.part}of{unit.parts}"


@dataclass(frozen=True)
class QueueState:
    """Snapshot of the queue.

    Attributes:
        done: ids of units and jobs that are done.
        attempts: number of attempts by id.
        busy: name of the live worker by id, for work in progress.
        failed: last reason and exit code by id, for work without attempts left.
        workers: live workers.
    """

    done: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    busy: dict[str, str] = field(default_factory=dict)
    failed: dict[str, tuple[str, int]] = field(default_factory=dict)
    workers: list[WorkerRecord] = field(default_factory=list)

    def is_open(self, name: str) -> bool:
        """Whether a unit or job waits for a worker."""
        return not (name in self.done or name in self.busy or name in self.failed)


class WorkQueue:
    """Work queue in the files of an evaluation.

    Args:
        folder: folder of the files.
        attempts: attempts per unit before it counts as failed.
    """

    def __init__(self, folder: Path, attempts: int) -> None:
        self.folder, self._attempts = folder, attempts
        for name in ("workers", "claims", "failures", "parts", "metrics", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def part_path(self, unit: WorkUnit) -> Path:
        """File for the answers of a unit."""
        return self.folder / "parts" / f"{unit_id(unit)}.json"

    def metrics_path(self, checkpoint: str, task: str) -> Path:
        """File for lm-eval's results of a task."""
        return self.folder / "metrics" / f"{job_id(checkpoint, task)}.json"

    def read_state(self) -> QueueState:
        """Reads the state of all units, jobs and workers."""
        state = QueueState(
            workers=[one for one in live_members(self.folder / "workers", WorkerRecord) if one is not None]
        )
        names = {worker.name for worker in state.workers}
        claims = self._numbered("claims")
        failures = self._numbered("failures")
        # Read after the claims, so that work finished in between counts as done.
        for name in ("parts", "metrics"):
            state.done.update(path.stem for path in (self.folder / name).glob("*.json"))
        for unit, numbers in claims.items():
            last = max(numbers)
            state.attempts[unit] = last
            if unit in state.done:
                continue
            owner = self._owner(unit, last)
            if last not in failures.get(unit, ()) and owner in names:
                state.busy[unit] = owner
            elif last >= self._attempts:
                state.failed[unit] = self._reason(unit, failures.get(unit, ()))
        return state

    def claim(self, unit: str, state: QueueState, worker: str) -> bool:
        """Claims a unit; returns False if another worker was faster."""
        return link_claim(self.folder / "claims" / f"{unit}.{state.attempts.get(unit, 0) + 1}", worker)

    def fail(self, unit: str, attempt: int, reason: str, exit_code: int) -> None:
        """Records the reason and exit code of a failed attempt."""
        with atomic_writer(self.folder / "failures" / f"{unit}.{attempt}.json") as file:
            file.write(json.dumps({"reason": reason, "exit_code": exit_code}).encode())

    def forget_attempts(self) -> None:
        """Resets the attempts of all units, except those claimed by live workers."""
        state = self.read_state()
        for name, numbers in self._numbered("claims").items():
            if name not in state.busy:
                for number in numbers:
                    (self.folder / "claims" / f"{name}.{number}").unlink(missing_ok=True)
                    (self.folder / "failures" / f"{name}.{number}.json").unlink(missing_ok=True)
        names = {worker.name for worker in state.workers}
        for path in (self.folder / "workers").glob("*.json"):
            if path.stem not in names:
                path.unlink(missing_ok=True)

    def joined(self, record: WorkerRecord) -> Presence[WorkerRecord]:
        """Context manager that registers a worker while it is active."""
        return Presence(self.folder / "workers" / f"{record.name}.json", record)

    def _numbered(self, folder: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for path in (self.folder / folder).iterdir():
            unit, _, number = path.name.removesuffix(".json").rpartition(".")
            if number.isdigit():
                found.setdefault(unit, []).append(int(number))
        return found

    def _owner(self, unit: str, attempt: int) -> str:
        try:
            return (self.folder / "claims" / f"{unit}.{attempt}").read_text()
        except FileNotFoundError:
            return ""

    def _reason(self, unit: str, failures: Collection[int]) -> tuple[str, int]:
        if not failures:
            return "its worker was killed in every attempt", RankKilled.exit_code
        note = read_json_note(self.folder / "failures" / f"{unit}.{max(failures)}.json")
        return str(note.get("reason", "")), int(note.get("exit_code", EXIT_BUG))


def read_json_note(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; {} if the file is missing or invalid."""
    try:
        content = parse_json(read_regular(path))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def open_units(units: Sequence[WorkUnit], state: QueueState) -> list[WorkUnit]:
    """Units that wait for a worker, without those of tasks that have a failed unit."""
    lost = {unit.key for unit in units if unit_id(unit) in state.failed}
    return [unit for unit in units if unit.key not in lost and state.is_open(unit_id(unit))]


def ready_jobs(units: Sequence[WorkUnit], state: QueueState) -> list[tuple[str, str]]:
    """(checkpoint, task) pairs whose parts are all done and whose metrics are open, in the order of the units."""
    missing = {unit.key for unit in units if unit_id(unit) not in state.done}
    keys = dict.fromkeys(unit.key for unit in units)
    return [key for key in keys if key not in missing and state.is_open(job_id(*key))]


def is_over(units: Sequence[WorkUnit], state: QueueState) -> bool:
    """Whether every task has its metrics or has failed."""
    failed = {unit.key for unit in units if unit_id(unit) in state.failed}
    keys = {unit.key for unit in units}
    return all(key in failed or job_id(*key) in state.done or job_id(*key) in state.failed for key in keys)


def has_useful_workers(units: Sequence[WorkUnit], state: QueueState, roles: Collection[str]) -> bool:
    """Whether the workers that run or are alive can do any of the remaining work.

    Args:
        units: units of the evaluation.
        state: snapshot of the queue.
        roles: roles of running workers, which may not have joined the queue yet.
    """
    present = {*roles, *(worker.role for worker in state.workers)}
    inference = bool(open_units(units, state)) or any(unit_id(unit) in state.busy for unit in units)
    metrics = bool(ready_jobs(units, state)) or any(job_id(*unit.key) in state.busy for unit in units)
    return (inference and MODEL in present) or (metrics and METRICS in present)


def views_of(state: QueueState, name: str) -> tuple[WorkerView, list[WorkerView]]:
    """WorkerViews for `packing`: the worker with this name, and the other model workers."""
    views = {one.name: WorkerView(one.name, one.loaded) for one in state.workers if one.role == MODEL}
    return views.pop(name, WorkerView(name)), list(views.values())
