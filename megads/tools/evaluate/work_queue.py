"""Work queue of an evaluation: files shared by workers on all nodes, without a server.

<folder>/
  plan.json                       the evaluation plan
  workers/<name>.json             identity of a worker and the checkpoint it holds; touched while the worker is alive
  claims/<unit>.<attempt>         a hard link, atomic also on network file systems, to a file with the worker's name
  failures/<unit>.<attempt>.json  reason why an attempt failed
  parts/<unit>.json               answers to a part of a task's batches
  metrics/<unit>.json             lm-eval's results of a task
  logs/                           logs of the workers

A unit is done when its file exists. A claim is valid while its worker is alive, see `megads.runtime.claims`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megads.api import EXIT_BUG, RankKilled, atomic_writer, parse_json, read_regular
from megads.runtime.claims import Participant, Presence, latest_claims, link_claim, live_members
from megads.tools.evaluate.packing import WorkUnit

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


@dataclass(frozen=True)
class QueueState:
    """Snapshot of the queue.

    Attributes:
        units: units by role, in order.
        done: ids of units that are done.
        attempts: number of attempts by id.
        busy: name of the live worker by id, for units in progress.
        failed: last reason and exit code by id, for units without attempts left.
        workers: live workers.
    """

    units: dict[str, list[WorkUnit]]
    done: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    busy: dict[str, str] = field(default_factory=dict)
    failed: dict[str, tuple[str, int]] = field(default_factory=dict)
    workers: list[WorkerRecord] = field(default_factory=list)

    def unfinished(self, role: str) -> list[WorkUnit]:
        """Units of a role that are not done, without those of tasks that have a failed unit."""
        lost = {unit.key for units in self.units.values() for unit in units if unit.id in self.failed}
        return [unit for unit in self.units[role] if unit.id not in self.done and unit.key not in lost]

    def open_units(self, role: str) -> list[WorkUnit]:
        """Units that a worker of a role can take; metrics need all parts of their task."""
        waiting = {unit.key for unit in self.units[MODEL] if unit.id not in self.done} if role == METRICS else set()
        return [unit for unit in self.unfinished(role) if unit.id not in self.busy and unit.key not in waiting]

    def is_over(self) -> bool:
        """Whether every task has its metrics or has failed."""
        return not self.unfinished(METRICS)

    def has_useful_workers(self, roles: Collection[str]) -> bool:
        """Whether the live workers can do any of the remaining work.

        Args:
            roles: roles of running workers that may not have joined the queue yet.
        """
        return any(
            self.open_units(role) or any(unit.id in self.busy for unit in self.unfinished(role))
            for role in {*roles, *(worker.role for worker in self.workers)}
        )


class WorkQueue:
    """Work queue in the files of an evaluation.

    Args:
        folder: folder of the files.
        units: parts of tasks; every task has a unit for its metrics besides.
        attempts: attempts per unit before it counts as failed.
    """

    def __init__(self, folder: Path, units: Sequence[WorkUnit], attempts: int) -> None:
        self.folder, self._attempts = folder, attempts
        first = {unit.key: unit for unit in reversed(units)}
        metrics = [replace(first[key], part=None, cost_s=0.0) for key in dict.fromkeys(unit.key for unit in units)]
        self.units = {MODEL: list(units), METRICS: metrics}
        for name in ("workers", "claims", "failures", "parts", "metrics", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def path(self, unit: WorkUnit) -> Path:
        """File for the result of a unit."""
        return self.folder / ("metrics" if unit.part is None else "parts") / f"{unit.id}.json"

    def read_state(self) -> QueueState:
        """Reads the state of all units and workers."""
        members = live_members(self.folder / "workers", WorkerRecord)
        state = QueueState(self.units, workers=[one for one in members if one is not None])
        names = {worker.name for worker in state.workers}
        claims, failures = latest_claims(self.folder / "claims"), latest_claims(self.folder / "failures")
        # Read after the claims, so that work finished in between counts as done.
        for name in ("parts", "metrics"):
            state.done.update(path.stem for path in (self.folder / name).glob("*.json"))
        state.attempts.update(claims)
        for unit, last in claims.items():
            if unit in state.done:
                continue
            try:
                owner = (self.folder / "claims" / f"{unit}.{last}").read_text()
            except FileNotFoundError:
                owner = ""
            if failures.get(unit) != last and owner in names:
                state.busy[unit] = owner
            elif last >= self._attempts and unit in failures:
                note = read_json_note(self.folder / "failures" / f"{unit}.{failures[unit]}.json")
                state.failed[unit] = str(note.get("reason", "")), int(note.get("exit_code", EXIT_BUG))
            elif last >= self._attempts:
                state.failed[unit] = "its worker was killed in every attempt", RankKilled.exit_code
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
        for folder in ("claims", "failures"):
            for path in (self.folder / folder).glob("[!.]*"):
                if path.name.removesuffix(".json").rpartition(".")[0] not in state.busy:
                    path.unlink(missing_ok=True)
        names = {worker.name for worker in state.workers}
        for path in (self.folder / "workers").glob("*.json"):
            if path.stem not in names:
                path.unlink(missing_ok=True)

    def joined(self, record: WorkerRecord) -> Presence[WorkerRecord]:
        """Context manager that registers a worker while it is active."""
        return Presence(self.folder / "workers" / f"{record.name}.json", record)


def read_json_note(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; {} if the file is missing or invalid."""
    try:
        content = parse_json(read_regular(path))
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
