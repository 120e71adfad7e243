"""A real SLURM with several nodes on this machine: munged, slurmctld and one slurmd per node, in a separate folder.

Options of slurm.conf: https://slurm.schedmd.com/slurm.conf.html
"""

from __future__ import annotations

import json
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from megads.api import MegadsError, user_name
from megads.runtime.environment import outside_slurm
from megads.tools.rehearse import keeper


@dataclass(frozen=True)
class ClusterSize:
    """Resources that the private cluster claims. They may exceed the machine's; processes share its CPUs.

    Attributes:
        num_nodes: number of compute nodes.
        cpus_per_node: CPUs per node.
        memory_mib_per_node: memory per node; not enforced.
        gpus_per_node: GPUs per node as SLURM counts them; their device files are empty files.
        partitions: names of the partitions; the first is the default, and each contains all nodes.
    """

    num_nodes: int = 4
    cpus_per_node: int = 8
    memory_mib_per_node: int = 16000
    gpus_per_node: int = 0
    partitions: tuple[str, ...] = ("debug",)


def _write_configuration(folder: Path, size: ClusterSize, controller_port: int, node_ports: Mapping[str, int]) -> None:
    """Writes slurm.conf and gres.conf, and creates the files of the GPUs.

    Args:
        folder: the cluster's folder, which the daemons also write to.
        size: resources that the cluster claims to have.
        controller_port: port of slurmctld.
        node_ports: port of the slurmd of each node.
    """
    (folder / "state").mkdir(exist_ok=True)
    user, gpus = user_name(), size.gpus_per_node
    lines = [
        "ClusterName=private",
        "SlurmctldHost=localhost",
        f"SlurmctldPort={controller_port}",
        "AuthType=auth/munge",
        # cred_expire is also the delay before a requeued job may start.
        f"AuthInfo=socket={folder}/munge.socket,cred_expire=5",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.%n.pid",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "JobRequeue=1",
        "KillWait=5",
        "SlurmctldTimeout=30",
        # The controller retries a node that does not respond until this time has passed.
        "MessageTimeout=5",
        "MailProg=/bin/true",
        # The controller polls, so it takes 10 to 20 s longer until a lost node is down.
        "SlurmdTimeout=5",
        "AccountingStorageType=accounting_storage/none",
        "JobAcctGatherType=jobacct_gather/none",
        *(["GresTypes=gpu"] if gpus else []),
    ]
    for name, port in node_ports.items():
        lines.append(
            f"NodeName={name} NodeHostname=localhost NodeAddr={name} Port={port} CPUs={size.cpus_per_node} "
            f"RealMemory={size.memory_mib_per_node} State=UNKNOWN" + (f" Gres=gpu:{gpus}" if gpus else "")
        )
    for index, partition in enumerate(size.partitions):
        default = "YES" if index == 0 else "NO"
        lines.append(f"PartitionName={partition} Nodes=ALL Default={default} MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    # slurmd reports only GPUs that have a file.
    for index in range(gpus):
        (folder / f"gpu{index}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")


DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
# Below Linux's ephemeral ports and above the well-known ports.
_PORTS = range(20000, 32000)
# The path of a Unix socket has at most 107 characters, and a job step appends 75 to this folder.
_LONGEST_FOLDER = 32
_START_TRIES = 3
_START_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 30.0


class SlurmUnavailableError(MegadsError):
    """A private SLURM cannot be started on this machine."""

    exit_code = 2


class _DaemonEndedError(Exception):
    """A daemon ended while the cluster was starting; the message contains its name and the end of its log."""


def unavailable_reason() -> str | None:
    """Returns why this machine cannot run a private SLURM and the remedy, or None if it can."""
    missing = [name for name in (*DAEMONS, *CLIENTS) if _executable(name) is None]
    if missing:
        return (
            f"SLURM is not installed: no {', '.join(missing)} on this machine; install it as root with "
            "scripts/install_slurm.sh (Debian, Ubuntu: apt-get install slurm-wlm munge)"
        )
    if not sys.platform.startswith("linux"):
        return f"SLURM's daemons run on Linux only, this is {sys.platform}"
    return None


def _executable(name: str) -> str | None:
    """Returns the path of a program; also searches the sbin folders, which are not on every user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


class PrivateSlurm:
    """Context manager that runs a real SLURM and removes all its processes and files on exit.

    Nodes are named after their addresses, 127.x.y.1 and so on, so that every process can resolve them. Several private
    clusters can run at once, and at the same time as a real one: none uses a fixed port, socket or folder. If the
    process that started it dies, even by SIGKILL, the daemons and their jobs are killed too.

    Args:
        size: number of nodes and the resources that each claims to have.

    Attributes:
        folder: folder of configuration, logs and state; removed at the end.
        nodes: names of the nodes.

    Raises:
        SlurmUnavailableError: SLURM is not installed, or does not start here.
    """

    def __init__(self, size: ClusterSize | None = None):
        self.size = size or ClusterSize()
        self.folder = Path()
        self.nodes: list[str] = []
        self._keeper: subprocess.Popen[str] | None = None
        self._pids: dict[str, int] = {}
        # Group processes of each daemon's starts, see `keeper`.
        self._groups: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the daemons and waits until every node is idle."""
        if reason := unavailable_reason():
            raise SlurmUnavailableError(reason)
        for attempt in range(_START_TRIES):
            try:
                self._start_once()
                return
            except _DaemonEndedError as error:
                # Another process may have taken a port before the daemon bound it.
                self.stop()
                if attempt == _START_TRIES - 1:
                    raise SlurmUnavailableError(f"the private SLURM does not start: {error}") from error
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Kills the daemons and everything they run, and removes the folder. Idempotent."""
        if self._keeper is None:
            return
        assert self._keeper.stdin and self._keeper.stdout
        self._keeper.stdin.close()
        self._keeper.wait()
        self._keeper.stdout.close()
        self._keeper = None
        self._pids.clear()
        self._groups.clear()

    def environment(self) -> dict[str, str]:
        """Returns this process's environment without SLURM's variables, with SLURM_CONF set to this cluster's."""
        return outside_slurm({"SLURM_CONF": str(self.folder / "slurm.conf")})

    def command(self, *arguments: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Runs a client command and returns its output, stripped.

        Args:
            arguments: program and arguments, as in `command("squeue", "-h")`.
            timeout_s: time after which the command is killed.

        Raises:
            subprocess.CalledProcessError: the command failed; stderr contains the reason.
        """
        done = subprocess.run(
            arguments, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=True
        )
        return done.stdout.strip()

    def node_states(self) -> dict[str, str]:
        """Returns the state of each node as printed by sinfo: idle, mixed, allocated, down*, drained, ..."""
        lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for_nodes(self, state: str, nodes: list[str] | None = None, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Waits until nodes are in a state.

        Args:
            state: prefix of the state: "down" includes "down*", a down node that does not respond.
            nodes: names of the nodes; all by default.
            timeout_s: longest wait.

        Raises:
            TimeoutError: a node is still in another state.
        """
        deadline, wanted = time.monotonic() + timeout_s, nodes or self.nodes
        while True:
            states: dict[str, str] = {}
            # slurmctld may not respond yet.
            with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
                states = self.node_states()
            if states and all(states.get(node, "").startswith(state) for node in wanted):
                return
            self._check_daemons()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes {wanted} are not {state} after {timeout_s:.0f} s, but {states or None}")
            time.sleep(0.05)

    def log(self, name: str) -> str:
        """Returns the log of "slurmctld", of "munged" or, by node name, of a slurmd."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start_once(self) -> None:
        parent = tempfile.gettempdir()
        parent = parent if len(parent) <= _LONGEST_FOLDER else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="megads-slurm-", dir=parent))
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-S", "-E", str(keeper.__file__), str(self.folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(self.folder)
            raise SlurmUnavailableError(
                f"the private SLURM does not start: {sys.executable}: {error.strerror}"
            ) from error
        # A random loopback network; nodes are named after their addresses, so that every process can resolve them.
        network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        self.nodes = [f"{network}.{index + 1}" for index in range(self.size.num_nodes)]
        controller_port, *node_ports = _free_ports(1 + self.size.num_nodes)
        _write_configuration(self.folder, self.size, controller_port, dict(zip(self.nodes, node_ports, strict=True)))
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key": "munge.key", "pid": "munge.pid", "log": "munge.messages", "seed": "munge.seed"}
        # --force: munged requires that other users can enter the socket's folder, which is not needed here.
        command = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"]
        self._start_daemon(
            "munged", [*command, *(f"--{name}-file={self.folder / file}" for name, file in files.items())]
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (self.folder / "munge.socket").exists():
            self._check_daemons()
            if time.monotonic() > deadline:
                raise _DaemonEndedError(f"munged created no socket: {self.log('munged')[-500:]}")
            time.sleep(0.01)
        self._start_daemon("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self._start_daemon(node, ["slurmd", "-D", "-N", node])
        self.wait_for_nodes("idle")

    def _start_daemon(self, name: str, command: list[str]) -> None:
        assert self._keeper and self._keeper.stdin and self._keeper.stdout
        program = _executable(command[0])
        assert program, f"{command[0]} was there a moment ago"
        order = {
            "command": [program, *command[1:]],
            "environment": self.environment(),
            "log": str(self.folder / f"{name}.log"),
        }
        self._keeper.stdin.write(json.dumps(order) + "\n")
        self._keeper.stdin.flush()
        started = json.loads(self._keeper.stdout.readline())
        self._pids[name] = started["pid"]
        self._groups.setdefault(name, []).append(started["group"])

    def _check_daemons(self) -> None:
        """Raises _DaemonEndedError if a daemon has ended."""
        for name, pid in self._pids.items():
            if not psutil.pid_exists(pid):
                raise _DaemonEndedError(f"{name} ended (user {user_name()}): {self.log(name)[-500:]}")


def _free_ports(count: int) -> list[int]:
    """Returns unused ports."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            if port not in ports:
                ports.append(port)
    return ports
