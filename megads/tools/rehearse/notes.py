"""The folder of one rehearsal: what `megads rehearse` tells the job's `megads train`, and what that answers.

A `megads train` whose environment names such a folder checks its config on paper, writes down what it found, and trains
a scaled one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megads.tools.doctor.finding import Finding, Status

OUTPUT_FILE = "job.out"
VOCAB_SIZE = 512
"""Of the dataset and the model of the scaled training."""
_ORDERS_FILE = "orders.json"


@dataclass(frozen=True)
class Orders:
    """What the job's `megads train` must know.

    Attributes:
        nodes: that the user asks for.
        gpus_per_node: that the user asks for.
        gpu_memory_gib: of one GPU; None where nobody said it.
        scaled_nodes: of the job that is rehearsed.
        max_ranks: most ranks of the scaled layout.
        data: prefix of the small dataset to train on.
        last_step: of the scaled training.
        elsewhere: this is not the cluster, so that files and folders that are missing here may be there.
        refused: something is wrong already, so that nothing is trained.
    """

    nodes: int
    gpus_per_node: int
    gpu_memory_gib: float | None
    scaled_nodes: int
    max_ranks: int
    data: str
    last_step: int
    elsewhere: bool
    refused: bool


@dataclass(frozen=True)
class RehearsedStart:
    """One `megads train` of the job.

    Attributes:
        findings: what its config showed on paper.
        run: the run directory that the user's config names.
        scaled_run: the one that is really written; empty when nothing is trained.
        layout: of the scaled training.
    """

    findings: tuple[Finding, ...]
    run: str
    scaled_run: str = ""
    layout: str = ""

    @property
    def refused(self) -> bool:
        return any(finding.status is Status.problem for finding in self.findings)


def write_orders(folder: Path, orders: Orders) -> None:
    """Writes the orders; the file appears whole or not at all."""
    _write(folder / _ORDERS_FILE, dataclasses.asdict(orders))


def read_orders(folder: Path) -> Orders:
    """Reads the orders."""
    return Orders(**json.loads((folder / _ORDERS_FILE).read_text()))


def write_start(folder: Path, start: RehearsedStart) -> None:
    """Adds a start to those of the job."""
    _write(folder / f"start_{len(read_starts(folder)):03d}.json", dataclasses.asdict(start))


def read_starts(folder: Path) -> list[RehearsedStart]:
    """Returns the starts of the job so far, the first one first."""
    found = []
    for path in sorted(folder.glob("start_*.json")):
        content = json.loads(path.read_text())
        findings: Sequence[dict[str, str]] = content.pop("findings")
        read = [Finding(**{**finding, "status": Status(finding["status"])}) for finding in findings]  # type: ignore[arg-type]
        found.append(RehearsedStart(findings=tuple(read), **content))
    return found


def _write(path: Path, content: object) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)
