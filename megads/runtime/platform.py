"""Which rank this process is, if a platform has started one process per rank.

torchrun, the operators of Kubernetes (PyTorchJob, Volcano) and SageMaker set torchrun's variables. srun sets its own.
A platform that sets some of them but not all is refused: every process would otherwise train a model of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from megads.errors import ConfigError
from megads.runtime import environment, slurm
from megads.runtime.config import ClusterKind

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
_FIRST_PORT, _PORTS = 15000, 15000
_LOCAL = "cluster=local starts all ranks of the layout on this machine, whatever these variables say"


@dataclass(frozen=True)
class PlatformRank:
    """The rank that a platform started this process as.

    Attributes:
        rank: global rank.
        world_size: number of processes of the job.
        local_rank: rank on this machine; None if the platform does not say.
        host: address at which all processes meet, that of rank 0.
        port: port at which they meet.
        serves: whether rank 0 has to serve the store at which they meet; torchrun serves it itself.
        attempt: names this start of the processes, among all starts that use the same store.
        source: where the numbers come from, for messages.
    """

    rank: int
    world_size: int
    local_rank: int | None
    host: str
    port: int
    serves: bool
    attempt: str
    source: str


def find_platform_rank(kind: ClusterKind) -> PlatformRank | None:
    """Returns the rank that a platform started this process as; None if the launcher is to start the ranks.

    Args:
        kind: value of cluster.kind.

    Raises:
        ConfigError: the platform's variables are incomplete or contradict each other, or do not fit `kind`.
    """
    if kind is ClusterKind.local:
        return None
    of_step = slurm.current_step_task()
    if kind is ClusterKind.slurm:
        if of_step is not None:
            raise ConfigError(
                f"cluster.kind = slurm starts the ranks itself, but srun has started {of_step.tasks} launchers, of "
                f"which this is number {of_step.task}: run `megads train cluster=slurm` once, in the batch script and "
                "without srun, or let every task be one rank with cluster=external"
            )
        return None
    variables = environment.set_variables(*_NEEDED, "LOCAL_RANK", *_OF_TORCHRUN)
    if _names_a_rank(variables, kind):
        found = _of_variables(variables)
    elif of_step is not None:
        found = _of_step(of_step, variables)
    elif kind is ClusterKind.external:
        raise ConfigError(
            "cluster.kind = external, but no platform has started this process as a rank (RANK and WORLD_SIZE are not "
            "set): start it with torchrun, or leave cluster out"
        )
    else:
        return None
    # A platform that starts one process leaves it to the launcher how many ranks there are.
    return found if kind is ClusterKind.external or found.world_size > 1 else None


def _names_a_rank(variables: Mapping[str, str], kind: ClusterKind) -> bool:
    """Whether the variables name one of several ranks; scripts often set MASTER_ADDR alone."""
    given = variables.get("RANK"), variables.get("WORLD_SIZE")
    if kind is ClusterKind.auto:
        return given[0] not in (None, "0") or given[1] not in (None, "1")
    return given != (None, None)


def _of_variables(variables: Mapping[str, str]) -> PlatformRank:
    if missing := [name for name in _NEEDED if name not in variables]:
        given = " and ".join(f"{name} = {variables[name]}" for name in _NEEDED if name in variables)
        raise ConfigError(
            f"{given} in the environment, without {' and '.join(missing)}: a platform that starts the ranks sets all "
            f"of {', '.join(_NEEDED)}. Set or unset them; {_LOCAL}"
        )
    rank, world_size = _number(variables, "RANK", 0), _number(variables, "WORLD_SIZE", 1)
    local_rank = _number(variables, "LOCAL_RANK", 0) if "LOCAL_RANK" in variables else None
    port = _number(variables, "MASTER_PORT", 1)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank or 0)):
        if value >= world_size:
            raise ConfigError(
                f"{name} = {value} in the environment, but WORLD_SIZE = {world_size}: unset them; {_LOCAL}"
            )
    if port > 65535:
        raise ConfigError(f"MASTER_PORT = {port} in the environment: a port is at most 65535")
    # torchrun's store outlives a restart of the processes.
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    serves = variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    source = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "RANK and WORLD_SIZE"
    return PlatformRank(rank, world_size, local_rank, variables["MASTER_ADDR"], port, serves, attempt, source)


def _of_step(task: slurm.StepTask, variables: Mapping[str, str]) -> PlatformRank:
    """The rank of a task of a SLURM step; without MASTER_PORT, the port is derived from the number of the step."""
    derived = _FIRST_PORT + zlib.crc32(task.step.encode()) % _PORTS
    port = _number(variables, "MASTER_PORT", 1) if "MASTER_PORT" in variables else derived
    host = variables.get("MASTER_ADDR") or slurm.first_address(task.nodes)
    source = f"SLURM step {task.step}"
    return PlatformRank(task.task, task.tasks, task.local_task, host, port, True, "0", source)


def _number(variables: Mapping[str, str], name: str, least: int) -> int:
    text = variables[name].strip()
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name} = {text} in the environment: want a whole number of at least {least}; unset it if no platform "
            f"starts the ranks; {_LOCAL}"
        )
    return int(text)
