"""Information about SLURM jobs and nodes, from environment variables, squeue and scontrol.

Tested with SLURM 22.05.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from megads.errors import ConfigError
from megads.runtime import environment
from megads.runtime.config import clock_seconds

T = TypeVar("T")

_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 3.0
_SLURMD_PORT = "6818"
_NO_LIMIT = ("UNLIMITED", "NOT_SET", "INVALID", "")


@dataclass(frozen=True)
class SlurmJob:
    """One start of a SLURM job.

    Attributes:
        id: job id; every task of a job array has its own.
        restarts: number of requeues before this start.
        cluster: name of the SLURM cluster.
    """

    id: str
    restarts: int
    cluster: str


@dataclass(frozen=True)
class Node:
    """A node of an allocation.

    Attributes:
        name: name in SLURM.
        address: address at which the other nodes reach it.
    """

    name: str
    address: str


@dataclass(frozen=True)
class Allocation:
    """Job and resources of this process's allocation, as seen by the batch script.

    Attributes:
        job: the job.
        nodes: nodes in SLURM's order; the batch script runs on the first.
        gpus_per_node: number of GPUs per node; 0 if SLURM does not say.
        cpus_per_node: CPUs of the job on a node, the fewest of all nodes, if it names a number of them for a task; None
            if it does not.
        array: id of the job array that the job is a task of; None if it is not an array task.
    """

    job: SlurmJob
    nodes: tuple[Node, ...]
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    array: str | None = None


@dataclass(frozen=True)
class StepTask:
    """This process as one of several tasks that an srun has started.

    Attributes:
        step: job and number of the step, as in 42.0.
        task: number of the task.
        tasks: number of tasks of the step.
        local_task: number of the task on this node.
        nodes: compressed names of the step's nodes.
    """

    step: str
    task: int
    tasks: int
    local_task: int
    nodes: str


def current_step_task() -> StepTask | None:
    """Returns which task of a step this process is; None outside of a step, and in one of a single task."""
    variables = environment.slurm_variables()
    try:
        tasks = int(variables["SLURM_STEP_NUM_TASKS"])
        numbers = int(variables["SLURM_PROCID"]), tasks, int(variables["SLURM_LOCALID"])
        step = f"{variables['SLURM_JOB_ID']}.{variables['SLURM_STEP_ID']}"
    except (KeyError, ValueError):
        return None
    nodes = variables.get("SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", ""))
    return StepTask(step, *numbers, nodes) if tasks > 1 else None


def first_address(names: str) -> str:
    """Returns the address of the first node of a compressed list.

    Raises:
        ConfigError: SLURM does not answer.
    """
    return _nodes(names)[0].address


def find_allocation() -> Allocation:
    """Returns the allocation of this process.

    Raises:
        ConfigError: this process is not part of a SLURM job, or SLURM does not answer.
    """
    variables = environment.slurm_variables()
    job = variables.get("SLURM_JOB_ID")
    if job is None:
        raise ConfigError(
            "cluster.kind = slurm, but this is no SLURM job (SLURM_JOB_ID is not set): submit it with "
            "sbatch scripts/slurm/train.sbatch <overrides>, run it inside salloc, or set run.dry_run=true"
        )
    nodes = _nodes(variables.get("SLURM_JOB_NODELIST", ""))
    return Allocation(
        job=SlurmJob(job, int(variables.get("SLURM_RESTART_COUNT", "0")), variables.get("SLURM_CLUSTER_NAME", "")),
        nodes=nodes,
        gpus_per_node=_gpus(variables, len(nodes)),
        cpus_per_node=_cpus(variables),
        array=array_of_job(),
    )


def step_options(allocation: Allocation) -> list[str]:
    """Returns the options with which srun gives the one task of each node all CPUs and GPUs that the job has there.

    They are named, because a step without such options takes over those of the job: of `--gpus-per-task=1
    --ntasks-per-node=8` a step of one task per node gets one GPU, of `--gpus=16` one node gets the rest. The variables
    of the job's options must be removed, see `environment.for_srun`.
    """
    gpus, cpus = allocation.gpus_per_node, allocation.cpus_per_node
    named = [f"--gpus-per-node={gpus}"] if gpus else []
    # Only where the job names a number: by default a step has all of the job's CPUs on its nodes.
    return [*named, *([f"--cpus-per-task={cpus}"] if cpus is not None else [])]


def array_of_job() -> str | None:
    """Returns the id of the job array that this job is a task of; None if it is none."""
    return environment.slurm_variables().get("SLURM_ARRAY_JOB_ID")


def array_index() -> tuple[int, int] | None:
    """Returns the index of this job array task, from 0, and the number of tasks; None if there is no array."""
    variables = environment.slurm_variables()
    try:
        task = int(variables["SLURM_ARRAY_TASK_ID"]) - int(variables["SLURM_ARRAY_TASK_MIN"])
        tasks = max(int(variables["SLURM_ARRAY_TASK_COUNT"]), 1)
    except (KeyError, ValueError):
        return None
    return task % tasks, tasks


def ask(*command: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Runs a SLURM command and returns its output.

    Raises:
        ControllerOutage: it does not answer within the timeout, or does not reach the controller.
        ConfigError: the command is not installed, or fails.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"{command[0]} is not on the PATH: SLURM's client commands are needed on the nodes")
    text = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ControllerOutage(
            f"{text}: no answer within {timeout_s:g} s: does the controller run (scontrol ping)?"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise (ControllerOutage if is_controller_outage(said) else ConfigError)(f"{text}: {said}")
    return done.stdout.strip()


class ControllerOutage(ConfigError):
    """SLURM's controller does not answer; it may do so later."""


OUTAGE_S = 900.0
"""How long a controller that does not answer is asked again."""
_ASK_AGAIN_S = 5.0
_OUTAGE = re.compile(
    r"unable to contact slurm controller|timed out|communication|connection refused|connection reset|no route to host"
    r"|zero bytes were transmitted|transport endpoint|unable to confirm allocation|backup controller|in standby",
    re.IGNORECASE,
)


def is_controller_outage(error: str) -> bool:
    """Whether a message of a SLURM command means that the controller, or the way to it, failed for the moment."""
    return _OUTAGE.search(error) is not None


def retry_outage(question: Callable[[], T], limit_s: float = OUTAGE_S, pause_s: float = _ASK_AGAIN_S) -> T:
    """Returns the answer to a question; asks again while the controller does not answer.

    Args:
        question: calls functions of this module; may be called many times.
        limit_s: longest time until the last question.
        pause_s: time between two questions.

    Raises:
        ConfigError: the controller does not answer within the limit, or refuses.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return question()
        except ControllerOutage:
            if time.monotonic() >= deadline:
                raise
        time.sleep(pause_s)


def ask_job(job_id: str) -> tuple[str, int]:
    """Returns the state of a job, such as RUNNING, and its number of requeues; the state of an unknown job is empty.

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
    """Returns the remaining time of a job in seconds; None without a time limit.

    Raises:
        ConfigError: SLURM does not answer.
    """
    return parse_squeue_time_left(ask("squeue", "--noheader", "--jobs", job_id, "--format", "%L"))


def parse_squeue_time_left(text: str) -> float | None:
    """Parses squeue's %L; returns seconds, 0 or less for an overdue job, None for a job without a time limit."""
    text = text.strip()
    if text in _NO_LIMIT:
        return None
    overdue = text.startswith("-")
    seconds = clock_seconds(text.removeprefix("-"))
    if seconds is None:
        return None
    return -seconds if overdue else seconds


def running_steps(job_id: str, name: str) -> list[str]:
    """Returns the running steps of a job with a given name, for example 42.0.

    Raises:
        ConfigError: SLURM does not answer.
    """
    lines = ask("squeue", "--noheader", "--steps", "--jobs", job_id, "--format", "%i %j").splitlines()
    return [step for step, found in (line.split(maxsplit=1) for line in lines) if found.strip() == name]


def slurmd_answers(node: str) -> bool:
    """Whether slurmd's port on a node accepts connections; faster than SLURM's own detection (SlurmdTimeout, minutes).

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
    """Parses the KEY=VALUE fields of a line of scontrol."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def compressed(names: Iterable[str]) -> str:
    """Compresses node names to SLURM's format, for example n[1-4,7]; their order is lost.

    The kernel limits an argument to 128 KiB, which the names of some thousand nodes would exceed.
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
        # Within a range, number minus position is constant.
        runs = [[number for _, number in run] for _, run in groupby(enumerate(ordered), lambda at: at[1] - at[0])]
        ranges = [f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in runs]
        plain.append(f"{prefix}[{','.join(ranges)}]" if len(ordered) > 1 else f"{prefix}{ranges[0]}")
    return ",".join(plain)


def _nodes(names: str) -> tuple[Node, ...]:
    """Returns the nodes of a compressed list such as n[1-4], in its order."""
    shown = ask("scontrol", "--oneliner", "show", "node", names)
    addresses = {of["NodeName"]: of.get("NodeAddr", of["NodeName"]) for of in map(fields, shown.splitlines()) if of}
    ordered = ask("scontrol", "show", "hostnames", names).split()
    return tuple(Node(name, addresses.get(name, name)) for name in ordered)


def _tasks_per_node(variables: dict[str, str]) -> int:
    """Returns the number of the job's tasks on a node, the smallest of all nodes; as in 8(x2) or 8,7."""
    numbers = re.findall(r"(?:^|,)(\d+)", variables.get("SLURM_TASKS_PER_NODE", ""))
    return min(map(int, numbers), default=1)


def _cpus(variables: dict[str, str]) -> int | None:
    """Returns the number of CPUs of the job on a node if --cpus-per-task was given.

    Whole nodes (--exclusive) have more than --cpus-per-task times the number of tasks.
    """
    per_task = variables.get("SLURM_CPUS_PER_TASK")
    if not per_task:
        return None
    given = [int(number) for number in re.findall(r"(?:^|,)(\d+)", variables.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    return min(given, default=int(per_task) * _tasks_per_node(variables))


def _gpus(variables: dict[str, str], nodes: int) -> int:
    """Returns the number of GPUs per node; the variable depends on how they were requested.

    Raises:
        ConfigError: the nodes have different numbers.
    """
    in_all = re.findall(r"(?:^|:)(\d+)", variables.get("SLURM_GPUS", ""))
    if in_all and int(in_all[-1]) % nodes:
        raise ConfigError(
            f"--gpus = {in_all[-1]} gives the {nodes} nodes of the job different numbers of GPUs: ask for the same on "
            "every node with --gpus-per-node"
        )
    on_node, per_node, per_task = (
        # As in 8, a100:8 or gpu:a100:8(S:0-1).
        (re.findall(r"(?:^|:)(\d+)", variables.get(f"SLURM_GPUS_{name}", "")) or [None])[-1]
        for name in ("ON_NODE", "PER_NODE", "PER_TASK")
    )
    # Whole nodes (--exclusive) have more than the job asks for, and then it gets all of them.
    if per_node is not None:
        return int(per_node)
    if in_all:
        return int(in_all[-1]) // nodes
    return int(per_task) * _tasks_per_node(variables) if per_task is not None else int(on_node or 0)
