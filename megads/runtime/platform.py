"""Which rank this process is, if a platform has started one process per rank.

torchrun, Ray Train, PyTorchJobs and Volcano's pytorch plugin set torchrun's variables. srun sets its own. Platforms
that start one container per machine describe machines, not ranks (`_MACHINES`): one process per machine is a rank, and
several need torchrun, whose options `python -m megads.runtime.platform` prints.

A platform that sets some variables but not all is refused: every process would otherwise train a model of its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.errors import ConfigError
from megads.runtime import environment, slurm
from megads.runtime.config import ClusterKind

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")
_FIRST_PORT, _PORTS = 15000, 15000
_LOCAL = "cluster=local starts all ranks of the layout on this machine, whatever these variables say"
_TORCHRUN_PORT = 29500
_TORCHRUN = "torchrun $(python -m megads.runtime.platform) --no-python megads train ..."


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


@dataclass(frozen=True)
class MachinePlace:
    """The place of this machine in a job of which a platform starts one container per machine.

    Attributes:
        index: number of this machine, from 0.
        machines: number of machines.
        host: address of machine 0.
        port: port at which the processes meet on machine 0.
        processes: number of processes per machine that the platform plans, or one of torchrun's words; None: unknown.
        source: where the numbers come from, for messages.
    """

    index: int
    machines: int
    host: str
    port: int
    processes: str | None
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
    elif (place := find_machine_place()) is not None:
        found = _only_process(place)
    elif kind is ClusterKind.external:
        raise ConfigError(
            "cluster.kind = external, but no platform has started this process as a rank (RANK and WORLD_SIZE are not "
            f"set, nor is any of {', '.join(_MACHINES)}): start it with torchrun, or leave cluster out"
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
    processes = environment.set_variables("PET_NPROC_PER_NODE").get("PET_NPROC_PER_NODE", "1")
    if "TORCHELASTIC_RUN_ID" not in variables and processes.isdecimal() and int(processes) > 1:
        raise ConfigError(
            f"PET_NPROC_PER_NODE = {processes} in the environment: a PyTorchJob with nprocPerNode leaves it to "
            f"torchrun to start the ranks of a pod. Let its command be: {_TORCHRUN}"
        )
    rank, world_size = _number(variables, "RANK", 0), _number(variables, "WORLD_SIZE", 1)
    local_rank = _number(variables, "LOCAL_RANK", 0) if "LOCAL_RANK" in variables else None
    port = _port(variables)
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank or 0)):
        if value >= world_size:
            raise ConfigError(
                f"{name} = {value} in the environment, but WORLD_SIZE = {world_size}: unset them; {_LOCAL}"
            )
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


def find_machine_place() -> MachinePlace | None:
    """Returns the place of this machine in a platform's job; None if no platform describes machines.

    Raises:
        ConfigError: the platform's variables are incomplete or contradict each other.
    """
    for name, place_of in _MACHINES.items():
        if name in environment.set_variables(name):
            place = place_of(environment.set_variables("MASTER_PORT", "CLUSTER_SPEC", "SM_*", "PET_*"))
            if not 0 <= place.index < place.machines:
                raise ConfigError(f"{place.source}: this is machine {place.index} of {place.machines}; {_LOCAL}")
            return place
    if hosts := environment.set_variables("VC_*_HOSTS"):
        return _of_volcano(hosts)
    # Without SageMaker's toolkit in the image there are no SM_* variables, but the file that it makes them from.
    base = environment.set_variables("SAGEMAKER_BASE_DIR").get("SAGEMAKER_BASE_DIR", "/opt/ml")
    file = Path(base) / "input/config/resourceconfig.json"
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}, which says what the machines of this job are, cannot be read: {error}") from error
    found = _json({str(file): text}, str(file), dict)
    variables = {"SM_HOSTS": json.dumps(found.get("hosts")), "SM_CURRENT_HOST": str(found.get("current_host"))}
    return dataclasses.replace(_of_sagemaker(variables), processes=None, source=str(file))


def _of_sagemaker(variables: Mapping[str, str]) -> MachinePlace:
    hosts, here = _json(variables, "SM_HOSTS", list), variables.get("SM_CURRENT_HOST")
    if here not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST = {here} in the environment is not one of SM_HOSTS = {hosts}; {_LOCAL}")
    # Without GPUs a host has one process.
    processes = str(max(1, _number({"SM_NUM_GPUS": "0"} | dict(variables), "SM_NUM_GPUS", 0)))
    return MachinePlace(hosts.index(here), len(hosts), hosts[0], _port(variables), processes, "SM_HOSTS of SageMaker")


def _of_vertex(variables: Mapping[str, str]) -> MachinePlace:
    """The place in Vertex AI's pools of workers; pools 2 and 3 are servers and evaluators."""
    spec = _json(variables, "CLUSTER_SPEC", dict)
    try:
        pools, task = spec["cluster"], spec["task"]
        first, others = pools["workerpool0"], pools.get("workerpool1", [])
        index = {"workerpool0": 0, "workerpool1": len(first)}[task["type"]] + int(task["index"])
        host, _, port = first[0].partition(":")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"CLUSTER_SPEC in the environment names no worker of workerpool0 or workerpool1 "
            f"({type(error).__name__}: {error}): {variables['CLUSTER_SPEC'][:200]}; {_LOCAL}"
        ) from None
    port_number = _port({"MASTER_PORT": port} | dict(variables) if port else variables)
    return MachinePlace(index, len(first) + len(others), host, port_number, None, "CLUSTER_SPEC of Vertex AI")


def _of_torchrun(variables: Mapping[str, str]) -> MachinePlace:
    """The place that a PyTorchJob or TrainJob of Kubeflow gives torchrun, which starts the ranks of a pod."""
    needed = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    if ":" in variables["PET_NNODES"] or any(name not in variables for name in needed):
        given = " and ".join(
            f"{name} = {value}" for name, value in sorted(variables.items()) if name.startswith("PET_")
        )
        raise ConfigError(
            f"{given} in the environment: only torchrun can read these. Let the command of the container be: torchrun "
            f"--no-python megads train ...; {_LOCAL}"
        )
    index, machines = _number(variables, "PET_NODE_RANK", 0), _number(variables, "PET_NNODES", 1)
    port = _port({"MASTER_PORT": variables["PET_MASTER_PORT"]})
    processes = variables.get("PET_NPROC_PER_NODE")
    return MachinePlace(index, machines, variables["PET_MASTER_ADDR"], port, processes, "PET_NNODES of Kubeflow")


def _of_volcano(hosts_of_tasks: Mapping[str, str]) -> MachinePlace:
    """The place among the pods of a Volcano job with the svc plugin, in the order of the names of its tasks."""
    hosts = [host for _, listed in sorted(hosts_of_tasks.items()) for host in listed.split(",")]
    pods, here = [host.partition(".")[0] for host in hosts], environment.node_name().partition(".")[0]
    source = f"{', '.join(sorted(hosts_of_tasks))} of Volcano"
    if here not in pods:
        raise ConfigError(f"{source}: this host, {here}, is not one of {', '.join(hosts)}; {_LOCAL}")
    port = _port(environment.set_variables("MASTER_PORT"))
    return MachinePlace(pods.index(here), len(pods), hosts[0], port, None, source)


_MACHINES: dict[str, Callable[[Mapping[str, str]], MachinePlace]] = {
    "SM_HOSTS": _of_sagemaker,
    "CLUSTER_SPEC": _of_vertex,
    "PET_NNODES": _of_torchrun,
}
"""Readers of platforms that start one container per machine, by the variable that tells which platform it is."""


def _only_process(place: MachinePlace) -> PlatformRank:
    """The rank of the only process of a machine.

    Raises:
        ConfigError: the platform plans several processes per machine.
    """
    if place.machines > 1 and place.processes not in (None, "1", "auto"):
        raise ConfigError(
            f"{place.source}: {place.machines} machines with {place.processes} processes each, but this is the only "
            f"process of its machine. Let the command of the container be: {_TORCHRUN}"
        )
    return PlatformRank(place.index, place.machines, None, place.host, place.port, True, "0", place.source)


def torchrun_options(place: MachinePlace) -> list[str]:
    """Returns the options with which torchrun starts the ranks of this machine, one per GPU where nothing else is said.

    Its rendezvous is c10d, so that `--max-restarts` restarts the ranks of all machines together.
    """
    return [
        f"--nnodes={place.machines}",
        f"--nproc-per-node={place.processes or 'auto'}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={place.host}:{place.port}",
        "--rdzv-id=megads",
    ]


def _port(variables: Mapping[str, str]) -> int:
    port = _number({"MASTER_PORT": str(_TORCHRUN_PORT)} | dict(variables), "MASTER_PORT", 1)
    if port > 65535:
        raise ConfigError(f"MASTER_PORT = {port} in the environment: a port is at most 65535")
    return port


def _json(variables: Mapping[str, str], name: str, kind: type) -> Any:
    try:
        found = json.loads(variables[name])
    except ValueError:
        found = None
    if not isinstance(found, kind):
        what = "a JSON list" if kind is list else "a JSON object"
        raise ConfigError(f"{name} = {variables[name][:200]} in the environment: want {what}; {_LOCAL}")
    return found


def _number(variables: Mapping[str, str], name: str, least: int) -> int:
    text = variables[name].strip()
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{name} = {text} in the environment: want a whole number of at least {least}; unset it if no platform "
            f"starts the ranks; {_LOCAL}"
        )
    return int(text)


def main() -> int:
    """Prints torchrun's options for this machine of a platform's job; exits with 2 if there is none."""
    try:
        place = find_machine_place()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if place is None:
        sys.stderr.write(f"no platform has started this container: none of {', '.join(_MACHINES)} is set\n")
        return ConfigError.exit_code
    sys.stdout.write(" ".join(torchrun_options(place)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
