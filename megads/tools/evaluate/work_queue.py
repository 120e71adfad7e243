"""The work queue of an evaluation: files that workers on any node share, without a server.

<folder>/
  plan.json                       what there is to do
  workers/<name>.json             who a worker is, and which checkpoint it holds; touched while it lives
  claims/<unit>.<attempt>         a hard link, which is atomic on network file systems too, to a note of the worker
  failures/<unit>.<attempt>.json  why an attempt failed
  parts/<unit>.json               answers to a part of a task's batches
  metrics/<task>.json             lm-eval's results of a task
  logs/                           of the workers

A unit is done when its file is there. A claim counts while its worker lives: a process of this machine by its pid, one
elsewhere by the age of its file, by the file server's clock.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megads.errors import EXIT_BUG, RankKilled
from megads.runtime.claims import Participant, Presence, link_claim, living
from megads.runtime.files import atomic_writer, parse_json, read_regular
from megads.tools.evaluate.packing import WorkerView, WorkUnit

MODEL, METRICS = "model", "metrics"
"""Roles of workers: those that hold a model, and those that compute metrics."""


@dataclass(frozen=True)
class WorkerRecord(Participant):
    """A worker.

    Attributes:
        role: MODEL or METRICS.
        loaded: the checkpoint that it holds.
        unit: what it computes, for people.
    """

    role: str
    loaded: str | None = None
    unit: str = ""

    @property
    def name(self) -> str:
        """Unlike any other worker's."""
        return f"{self.node}-{self.pid}-{self.born}"


def job_id(checkpoint: str, task: str) -> str:
    """Names a task on a checkpoint in names of files."""
    return hashlib.sha256(f"{checkpoint}\n{task}".encode()).hexdigest()[:12]


def unit_id(unit: WorkUnit) -> str:
    """Names a unit in names of files."""
    return f"{job_id(*unit.key)}-{unit.part}of{unit.parts}"


@dataclass(frozen=True)
class QueueState:
    """A look at the files.

    Attributes:
        done: ids of units and jobs whose files are there.
        attempts: of each id, how many there were.
        busy: ids at which a living worker is, with its name.
        failed: ids of which no attempt is left, with the last reason and its exit code.
        workers: those that live.
    """

    done: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    busy: dict[str, str] = field(default_factory=dict)
    failed: dict[str, tuple[str, int]] = field(default_factory=dict)
    workers: list[WorkerRecord] = field(default_factory=list)

    def is_open(self, name: str) -> bool:
        """Whether something waits for a worker."""
        return not (name in self.done or name in self.busy or name in self.failed)


class WorkQueue:
    """The files of an evaluation.

    Args:
        folder: with them.
        attempts: at a unit, before it is given up.
    """

    def __init__(self, folder: Path, attempts: int) -> None:
        self.folder, self._attempts = folder, attempts
        for name in ("workers", "claims", "failures", "parts", "metrics", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def part_path(self, unit: WorkUnit) -> Path:
        """Where the answers of a unit go."""
        return self.folder / "parts" / f"{unit_id(unit)}.json"

    def metrics_path(self, checkpoint: str, task: str) -> Path:
        """Where lm-eval's results of a task go."""
        return self.folder / "metrics" / f"{job_id(checkpoint, task)}.json"

    def look(self) -> QueueState:
        """Reads what is done and who is at what."""
        state = QueueState(workers=[one for one in living(self.folder / "workers", WorkerRecord) if one is not None])
        names = {worker.name for worker in state.workers}
        claims = self._numbered("claims")
        failures = self._numbered("failures")
        # After the claims: what is done in between is seen as done.
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
        """Takes a unit; False where another worker was quicker."""
        return link_claim(self.folder / "claims" / f"{unit}.{state.attempts.get(unit, 0) + 1}", worker)

    def fail(self, unit: str, attempt: int, reason: str, exit_code: int) -> None:
        """Notes that an attempt failed, and the exit code that this means."""
        with atomic_writer(self.folder / "failures" / f"{unit}.{attempt}.json") as file:
            file.write(json.dumps({"reason": reason, "exit_code": exit_code}).encode())

    def forget_attempts(self) -> None:
        """Lets every unit that is not done be tried again; claims of living workers stay."""
        state = self.look()
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
        """Makes a worker known as long as a block runs."""
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
            return "its worker was killed every time", RankKilled.exit_code
        note = read_note(self.folder / "failures" / f"{unit}.{max(failures)}.json")
        return str(note.get("reason", "")), int(note.get("exit_code", EXIT_BUG))


def read_note(path: Path) -> dict[str, Any]:
    """A JSON object of a file that was written whole; {} where there is none."""
    try:
        content = parse_json(read_regular(path))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def open_units(units: Sequence[WorkUnit], state: QueueState) -> list[WorkUnit]:
    """Units that wait for a worker; those of a task that failed elsewhere wait no longer."""
    lost = {unit.key for unit in units if unit_id(unit) in state.failed}
    return [unit for unit in units if unit.key not in lost and state.is_open(unit_id(unit))]


def ready_jobs(units: Sequence[WorkUnit], state: QueueState) -> list[tuple[str, str]]:
    """Checkpoints and tasks of which all parts are done and the metrics wait, in the order of the units."""
    missing = {unit.key for unit in units if unit_id(unit) not in state.done}
    keys = dict.fromkeys(unit.key for unit in units)
    return [key for key in keys if key not in missing and state.is_open(job_id(*key))]


def is_over(units: Sequence[WorkUnit], state: QueueState) -> bool:
    """Whether every task has its metrics or failed."""
    failed = {unit.key for unit in units if unit_id(unit) in state.failed}
    keys = {unit.key for unit in units}
    return all(key in failed or job_id(*key) in state.done or job_id(*key) in state.failed for key in keys)


def can_go_on(units: Sequence[WorkUnit], state: QueueState, roles: Collection[str]) -> bool:
    """Whether any of the work that is left can be done: by workers of some roles, or by those that were seen alive.

    Args:
        units: of the evaluation.
        state: a look at the queue.
        roles: of workers that run, and may not have joined the queue yet.
    """
    present = {*roles, *(worker.role for worker in state.workers)}
    inference = bool(open_units(units, state)) or any(unit_id(unit) in state.busy for unit in units)
    metrics = bool(ready_jobs(units, state)) or any(job_id(*unit.key) in state.busy for unit in units)
    return (inference and MODEL in present) or (metrics and METRICS in present)


def views_of(state: QueueState, name: str) -> tuple[WorkerView, list[WorkerView]]:
    """A worker, and the others that have models, as `packing` sees them."""
    views = {one.name: WorkerView(one.name, one.loaded) for one in state.workers if one.role == MODEL}
    return views.pop(name, WorkerView(name)), list(views.values())
