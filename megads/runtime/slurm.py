"""What SLURM says of the job that this process is part of, and what it can be asked: sbatch(1), squeue(1), scontrol.

Tested with SLURM 22.05.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.config import clock_seconds

_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 3.0
_SLURMD_PORT = "6818"
_NO_LIMIT = ("UNLIMITED", "NOT_SET", "INVALID", "")


@dataclass(frozen=True)
class SlurmJob:
    """One start of a SLURM job.

    Attributes:
        id: number of the job; every task of an array has its own.
        restarts: how often it was requeued before.
        cluster: name of the SLURM cluster.
    """

    id: str
    restarts: int
    cluster: str


@dataclass(frozen=True)
class Node:
    """A node of an allocation.

    Attributes:
        name: SLURM's.
        address: at which the other nodes reach it.
    """

    name: str
    address: str


@dataclass(frozen=True)
class Allocation:
    """A SLURM job as its batch script sees it.

    Attributes:
        job: which.
        nodes: in SLURM's order; the batch script runs on the first.
        gpus_per_node: as SLURM says; 0 where it says nothing.
        cpus_per_task: as asked for; None where nobody did.
        array: number of the array that the job is a task of; None for a job of its own.
    """

    job: SlurmJob
    nodes: tuple[Node, ...]
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    array: str | None = None


def find_allocation() -> Allocation:
    """Returns the job that this process is part of.

    Raises:
        ConfigError: it is part of none, or SLURM does not answer.
    """
    variables = environment.slurm_variables()
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        raise ConfigError(
            "cluster.kind = slurm, but this is no SLURM job (SLURM_JOB_ID is not set): submit it, "
            "sbatch scripts/slurm/train.sbatch <overrides>, call it inside salloc, or say run.dry_run=true"
        )
    cpus = variables.get("SLURM_CPUS_PER_TASK")
    return Allocation(
        job=SlurmJob(job, int(variables.get("SLURM_RESTART_COUNT", "0")), variables.get("SLURM_CLUSTER_NAME", "")),
        nodes=_nodes(variables.get("SLURM_JOB_NODELIST", "")),
        gpus_per_node=_gpus(variables),
        cpus_per_task=int(cpus) if cpus else None,
        array=variables.get("SLURM_ARRAY_JOB_ID"),
    )


def array_place() -> tuple[int, int] | None:
    """Returns which task of a job array this process belongs to, from 0, and how many there are; None for no array."""
    variables = environment.slurm_variables()
    try:
        task = int(variables["SLURM_ARRAY_TASK_ID"]) - int(variables["SLURM_ARRAY_TASK_MIN"])
        tasks = max(int(variables["SLURM_ARRAY_TASK_COUNT"]), 1)
    except (KeyError, ValueError):
        return None
    return task % tasks, tasks


def ask(*command: str) -> str:
    """Runs one of SLURM's commands and returns what it prints.

    Raises:
        ConfigError: it is not there, fails, or does not answer within 20 s.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not on the PATH: SLURM's client commands are needed on the nodes")
    text = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{text}: no answer within {_TIMEOUT_S:g} s: does the controller run (scontrol ping)?"
        ) from None
    if done.returncode:
        raise ConfigError(f"{text}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def ask_job(job_id: str) -> tuple[str, int]:
    """Returns the state of a job, RUNNING for instance, and how often it was requeued; an unknown job has no state.

    Raises:
        ConfigError: SLURM does not answer.
    """
    try:
        job = fields(ask("scontrol", "--oneliner", "show", "job", job_id))
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return "", 0
        raise
    return job.get("JobState", ""), int(job.get("Restarts", "0"))


def time_left_s(job_id: str) -> float | None:
    """Returns how long a job may still run, None without a limit.

    Raises:
        ConfigError: SLURM does not answer.
    """
    return parse_time_left(ask("squeue", "--noheader", "--jobs", job_id, "--format", "%L"))


def parse_time_left(text: str) -> float | None:
    """Returns what squeue prints as %L in seconds; None for a job without a limit. An overdue job has 0 or less."""
    text = text.strip()
    if text in _NO_LIMIT:
        return None
    overdue = text.startswith("-")
    seconds = clock_seconds(text.removeprefix("-"))
    if seconds is None:
        return None
    return -seconds if overdue else seconds


def steps(job_id: str, name: str) -> list[str]:
    """Returns the steps of a job that run under a name, as 42.0.

    Raises:
        ConfigError: SLURM does not answer.
    """
    lines = ask("squeue", "--noheader", "--steps", "--jobs", job_id, "--format", "%i %j").splitlines()
    return [step for step, found in (line.split(maxsplit=1) for line in lines) if found.strip() == name]


def slurmd_answers(node: str) -> bool:
    """Whether something listens where a node's slurmd should, without SLURM's own patience (SlurmdTimeout, minutes).

    Raises:
        ConfigError: SLURM does not answer, or does not know the node.
    """
    of = fields(ask("scontrol", "--oneliner", "show", "node", node))
    if "Port" in of:
        port = of["Port"]
    else:
        (port,) = re.findall(r"^SlurmdPort\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE) or [
            _SLURMD_PORT
        ]
    try:
        socket.create_connection((of.get("NodeAddr", node), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def fields(line: str) -> dict[str, str]:
    """Reads the KEY=VALUE words of one line of scontrol."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def compressed(names: Iterable[str]) -> str:
    """Returns names of nodes as SLURM writes them, n[1-4,7] for instance; their order is lost.

    The kernel takes no argument of more than 128 KiB, which the names of some thousand nodes fill.
    """
    numbers: dict[tuple[str, int], set[int]] = {}
    plain = []
    for name in names:
        found = re.fullmatch(r"(.*?)(\d+)", name)
        if found:
            numbers.setdefault((found[1], len(found[2])), set()).add(int(found[2]))
        else:
            plain.append(name)
    for (prefix, width), members in numbers.items():
        ordered = sorted(members)
        # A range goes on while the number grows with its place.
        runs = [[number for _, number in run] for _, run in groupby(enumerate(ordered), lambda at: at[1] - at[0])]
        ranges = [f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in runs]
        plain.append(f"{prefix}[{','.join(ranges)}]" if len(ordered) > 1 else f"{prefix}{ranges[0]}")
    return ",".join(plain)


def _nodes(names: str) -> tuple[Node, ...]:
    """Returns the nodes of a compressed list, n[1-4] for instance, in its order."""
    shown = ask("scontrol", "--oneliner", "show", "node", names)
    addresses = {of["NodeName"]: of.get("NodeAddr", of["NodeName"]) for of in map(fields, shown.splitlines()) if of}
    ordered = ask("scontrol", "show", "hostnames", names).split()
    return tuple(Node(name, addresses.get(name, name)) for name in ordered)


def _gpus(variables: dict[str, str]) -> int:
    """Returns the GPUs that a job has on each node; the variable depends on how they were asked for."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        # As in 8, a100:8 or gpu:a100:8(S:0-1).
        numbers = re.findall(r"(?:^|:)(\d+)", variables.get(name, ""))
        if numbers:
            return int(numbers[-1])
    return 0
