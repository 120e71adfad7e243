"""The files of a private SLURM: several nodes on one machine (https://slurm.schedmd.com/slurm.conf.html)."""

from __future__ import annotations

import getpass
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ClusterSize:
    """What the private cluster claims to have. More CPUs than the machine has are allowed: processes share them.

    Attributes:
        num_nodes: compute nodes.
        cpus_per_node: CPUs of each.
        memory_mib_per_node: memory of each; nothing holds a job to it.
        gpus_per_node: GPUs of each, as SLURM counts them; they are empty files.
        partitions: names; the first one is the default, each holds all nodes.
    """

    num_nodes: int = 4
    cpus_per_node: int = 8
    memory_mib_per_node: int = 16000
    gpus_per_node: int = 0
    partitions: tuple[str, ...] = ("debug",)


@dataclass(frozen=True)
class Timing:
    """How fast the private cluster reacts.

    Attributes:
        node_lost_s: silence of a slurmd after which its node is down (SlurmdTimeout); the controller asks in rounds, so
            that it takes 10 to 20 s more.
        kill_wait_s: from SIGTERM to SIGKILL of a job (KillWait).
        cred_expire_s: life of a credential; a requeued job waits as long (AuthInfo=cred_expire).
        scheduler_s: between two rounds of the scheduler.
    """

    node_lost_s: int = 5
    kill_wait_s: int = 5
    cred_expire_s: int = 5
    scheduler_s: int = 1


@dataclass(frozen=True)
class Addresses:
    """Where the daemons listen.

    Attributes:
        network: first three numbers of the nodes' addresses in 127.0.0.0/8, all of which are this machine.
        controller_port: port of slurmctld.
        node_ports: port of each slurmd.
    """

    network: str
    controller_port: int
    node_ports: tuple[int, ...]

    def node_names(self) -> list[str]:
        """Returns the names of the nodes: addresses, so that every process can resolve them, as on a real cluster."""
        return [f"{self.network}.{index + 1}" for index in range(len(self.node_ports))]


def write_configuration(folder: Path, size: ClusterSize, timing: Timing, addresses: Addresses) -> Path:
    """Writes slurm.conf and gres.conf.

    Args:
        folder: of the cluster; its daemons write here too.
        size: what the cluster claims to have.
        timing: how fast it reacts.
        addresses: where its daemons listen.

    Returns:
        path of slurm.conf
    """
    (folder / "state").mkdir(exist_ok=True)
    path = folder / "slurm.conf"
    lines = [*_controller_lines(folder, timing, addresses), *_node_lines(size, addresses)]
    path.write_text("\n".join(lines) + "\n")
    (folder / "gres.conf").write_text(_gres_line(folder, size))
    return path


def _controller_lines(folder: Path, timing: Timing, addresses: Addresses) -> list[str]:
    user = getpass.getuser()
    round_s = timing.scheduler_s
    return [
        "ClusterName=private",
        "SlurmctldHost=localhost",
        f"SlurmctldPort={addresses.controller_port}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={folder}/munge.socket,cred_expire={timing.cred_expire_s}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        f"SchedulerParameters=bf_interval={round_s},sched_interval={round_s},sched_min_interval=0",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "JobRequeue=1",
        f"KillWait={timing.kill_wait_s}",
        "SlurmctldTimeout=30",
        # A lost node is asked again until this has passed.
        "MessageTimeout=5",
        "MailProg=/bin/true",
        f"SlurmdTimeout={timing.node_lost_s}",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
    ]


def _node_lines(size: ClusterSize, addresses: Addresses) -> list[str]:
    gpus = size.gpus_per_node
    lines = ["GresTypes=gpu"] if gpus else []
    for name, port in zip(addresses.node_names(), addresses.node_ports, strict=True):
        lines.append(
            f"NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} CPUs={size.cpus_per_node} "
            f"RealMemory={size.memory_mib_per_node} State=UNKNOWN" + (f" Gres=gpu:{gpus}" if gpus else "")
        )
    for index, partition in enumerate(size.partitions):
        default = "YES" if index == 0 else "NO"
        lines.append(f"PartitionName={partition} Nodes=ALL Default={default} MaxTime=INFINITE State=UP")
    return lines


def _gres_line(folder: Path, size: ClusterSize) -> str:
    """Returns the line that gives the GPUs their files: slurmd reports only GPUs that have one."""
    if not size.gpus_per_node:
        return ""
    for index in range(size.gpus_per_node):
        (folder / f"gpu{index}").touch()
    return f"Name=gpu File={folder}/gpu[0-{size.gpus_per_node - 1}]\n"
