"""Pool of worker processes on one machine, with restarts.

A local coordinator has one pool in its own process; on SLURM every task of the job array runs one:
`python -m megads.tools.evaluate.worker_pool <folder>`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from megads.errors import EXIT_BUG, EXIT_OK, ConfigError, MegadsError
from megads.runtime.environment import HIDDEN_GPUS, available_core_numbers
from megads.runtime.files import atomic_writer
from megads.runtime.machine_memory import visible_gpus
from megads.runtime.process import signal_child, start_child
from megads.runtime.slurm import ask
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.evaluation_plan import EvaluationPlan
from megads.tools.evaluate.work_queue import METRICS, MODEL, WorkQueue, has_useful_workers, is_over, read_json_note

_POLL_S = 0.5
_STOP_WITHIN_S = 10.0
_JOB_FILE = "job.json"


@dataclass
class _Slot:
    """One worker of the pool, across its restarts."""

    name: str
    role: str
    cores: Sequence[int]
    variables: dict[str, str]
    starts: int = 0
    gave_up: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


def gpus_of(config: EvaluateConfig) -> list[str]:
    """The GPUs of this machine for workers; empty for device=cpu."""
    if config.device == "cpu":
        return []
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device = {config.device}: each worker takes its own GPU; give auto, cpu or cuda")
    gpus = visible_gpus()
    if config.device == "cuda" and not gpus:
        raise ConfigError("device = cuda, but no GPU is visible: give device=cpu, or auto")
    return gpus


def workers_of(config: EvaluateConfig) -> int:
    """Number of model workers on this machine.

    Raises:
        ConfigError: there are fewer GPUs than workers, or device=cuda without a GPU.
    """
    gpus = gpus_of(config)
    workers = config.workers or len(gpus) or 1
    if gpus and workers > len(gpus):
        raise ConfigError(f"workers = {workers}: there are {len(gpus)} GPUs, and each worker takes one")
    return workers


def _slots(config: EvaluateConfig, tag: str) -> list[_Slot]:
    cores, gpus, workers = available_core_numbers(), gpus_of(config), workers_of(config)
    width = max(len(cores) // workers, 1)
    slots = []
    for number in range(workers):
        # With more workers than cores, several workers share a core, with one thread each.
        first = number * width % len(cores)
        variables = {"CUDA_VISIBLE_DEVICES": gpus[number]} if gpus else HIDDEN_GPUS
        slots.append(_Slot(f"{tag}model-{number}", MODEL, cores[first : first + width], dict(variables)))
    numbers = range(config.metric_workers)
    return slots + [_Slot(f"{tag}metrics-{number}", METRICS, (), dict(HIDDEN_GPUS)) for number in numbers]


class WorkerPool:
    """Context manager that runs the workers of this machine.

    Args:
        folder: folder of the evaluation.
        config: config with the number of workers.
        tag: prefix of the names of their logs.
    """

    def __init__(self, folder: Path, config: EvaluateConfig, tag: str = "") -> None:
        self._folder, self._starts = folder, config.attempts
        self._slots = _slots(config, tag)

    def __enter__(self) -> Self:
        self.start_missing()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the workers that still run."""
        left = [slot.process for slot in self._slots if slot.process is not None]
        for process in left:
            signal_child(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_WITHIN_S
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            signal_child(process, signal.SIGKILL)
            process.wait()

    def start_missing(self) -> list[str]:
        """Starts new workers and restarts those that died; returns a message for each death."""
        said = []
        for slot in self._slots:
            code = None if slot.process is None else slot.process.poll()
            if slot.process is not None and code is None:
                continue
            if code == EXIT_OK or slot.gave_up:
                continue
            if code is not None:
                slot.gave_up = slot.starts >= self._starts
                end = "that was its last start" if slot.gave_up else "it is started again"
                said.append(f"worker {slot.name} ended with {code}, see {self.log(slot.name)}; {end}")
            if slot.gave_up:
                continue
            command = ("-m", "megads.tools.evaluate.worker", str(self._folder), slot.role)
            slot.process = start_child(command, self.log(slot.name), slot.cores, slot.variables)
            slot.starts += 1
        return said

    @property
    def roles(self) -> set[str]:
        """Roles of the running workers."""
        return {slot.role for slot in self._slots if slot.process is not None and slot.process.poll() is None}

    def log(self, name: str) -> Path:
        """The log file of a worker."""
        return self._folder / "logs" / f"{name}.log"


class WorkerJob:
    """The SLURM job array whose tasks are worker pools.

    Args:
        folder: folder of the evaluation, which stores the job id for later commands.

    Attributes:
        id: id of the job submitted last; empty before the first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.id = str(read_json_note(folder / _JOB_FILE).get("job", ""))

    def is_queued(self) -> bool:
        """Whether any of its tasks is running or pending; assumed while SLURM does not respond."""
        if not self.id:
            return False
        try:
            return bool(ask("squeue", "--noheader", "--jobs", self.id, "--format", "%i"))
        except ConfigError as error:
            # SLURM drops a job minutes after its end.
            return "Invalid job id" not in str(error)

    def submit(self, config: EvaluateConfig) -> str:
        """Submits the array and returns its id.

        Raises:
            ConfigError: sbatch rejects the job or is not installed.
        """
        answer = ask(
            "sbatch",
            "--parsable",
            f"--array=0-{config.nodes - 1}",
            f"--job-name=evaluate-{self._folder.name[:8]}",
            f"--output={self._folder.absolute()}/logs/job-%A_%a.out",
            *shlex.split(config.sbatch_options),
            str(Path(config.sbatch).absolute()),
            str(self._folder.absolute()),
        )
        # <id>, or <id>;<cluster> on federated clusters.
        self.id = answer.partition(";")[0]
        with atomic_writer(self._folder / _JOB_FILE) as file:
            file.write(json.dumps({"job": self.id}).encode())
        return self.id


def main() -> NoReturn:
    """Runs the workers of this node until the evaluation is over or none of the remaining work can be done."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.evaluate.worker_pool")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", default="", help="prefix of the names of logs")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    plan = EvaluationPlan.read(given.folder)
    queue = WorkQueue(given.folder, plan.config.attempts)
    with WorkerPool(given.folder, plan.config, given.tag) as pool:
        while not is_over(plan.units, state := queue.read_state()):
            for line in pool.start_missing():
                print(line, flush=True)
            if not has_useful_workers(plan.units, state, pool.roles):
                break
            time.sleep(_POLL_S)
    sys.exit(EXIT_OK)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    try:
        main()
    except MegadsError as error:
        print(f"megads: {error}", file=sys.stderr)
        sys.exit(error.exit_code or EXIT_BUG)
