"""Files in the folder of one rehearsal, through which `megads rehearse` and the job's `megads train` exchange data.

If the environment names such a folder, `megads train` checks its config without running it, records the findings and
trains a scaled config.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megads.api import atomic_writer
from megads.tools.doctor.finding import Finding

OUTPUT_FILE = "job.out"
VOCAB_SIZE = 512
"""Vocabulary size of the scaled run's dataset and model."""
_ORDERS_FILE = "orders.json"


@dataclass(frozen=True)
class Orders:
    """Instructions for the job's `megads train`.

    Attributes:
        nodes: number of nodes that the user requests.
        gpus_per_node: GPUs per node that the user requests.
        gpu_memory_gib: memory of one GPU; None if unknown.
        scaled_nodes: number of nodes of the rehearsed job.
        max_ranks: most ranks of the scaled layout.
        data: prefix of the small dataset to train on.
        last_step: last step of the scaled run.
        elsewhere: this machine is not the cluster, so files and folders that are missing here may exist there.
        refused: a problem was found before the job started, so nothing is trained.
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
    """One start of `megads train` in the job.

    Attributes:
        findings: findings of the checks of its config.
        run: run directory of the user's config.
        scaled_run: run directory of the scaled run; empty if nothing is trained.
        layout: layout of the scaled run.
    """

    findings: tuple[Finding, ...]
    run: str
    scaled_run: str = ""
    layout: str = ""


def write_orders(folder: Path, orders: Orders) -> None:
    """Writes the orders atomically."""
    _write(folder / _ORDERS_FILE, orders)


def read_orders(folder: Path) -> Orders:
    """Reads the orders."""
    return Orders(**json.loads((folder / _ORDERS_FILE).read_text()))


def write_start(folder: Path, start: RehearsedStart) -> None:
    """Records one more start of the job."""
    _write(folder / f"start_{len(read_starts(folder)):03d}.json", start)


def read_starts(folder: Path) -> list[RehearsedStart]:
    """Returns the starts of the job so far, in order."""
    found = []
    for path in sorted(folder.glob("start_*.json")):
        content = json.loads(path.read_text())
        findings = tuple(map(Finding.from_json, content.pop("findings")))
        found.append(RehearsedStart(findings, **content))
    return found


def _write(path: Path, content: Orders | RehearsedStart) -> None:
    with atomic_writer(path) as file:
        file.write(json.dumps(asdict(content)).encode())
