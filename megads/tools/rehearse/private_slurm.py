"""A real SLURM of several nodes on this machine: munged, slurmctld and one slurmd a node, in a folder of their own.

What the lines of its slurm.conf mean: https://slurm.schedmd.com/slurm.conf.html
"""

from __future__ import annotations

import getpass
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from megads.errors import MegadsError
from megads.runtime.environment import outside_slurm
from megads.tools.rehearse import keeper


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


def _write_configuration(folder: Path, size: ClusterSize, timing: Timing, addresses: Addresses) -> Path:
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


DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
# Below the range from which Linux takes the ports of outgoing connections, and above the well-known ones.
_PORTS = range(20000, 32000)
# The path of a socket may have 107 characters; 75 of them are what a job step appends to this.
_LONGEST_FOLDER = 32
_START_TRIES = 3
_START_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 30.0


class SlurmUnavailableError(MegadsError):
    """A private SLURM cannot be started on this machine."""

    exit_code = 2


class _DaemonEndedError(Exception):
    """A daemon ended while the cluster was starting; its message says which, with its last words."""


def unavailable_reason() -> str | None:
    """Returns why this machine cannot run a private SLURM and what to do about it, or None where it can."""
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
    """Returns the path of a program; daemons are in folders that are not on every user's PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin")


class PrivateSlurm:
    """A context manager: a real SLURM while inside, no process and no folder of it afterwards.

    Nodes are named after their addresses, 127.x.y.1 and so on, so that every process can resolve them. Several private
    clusters can run at once, and beside a real one: none uses a fixed port, socket or folder. If the process that
    started it dies, even by SIGKILL, the daemons and their jobs are killed too.

    Args:
        size: nodes and what each claims to have.
        timing: how fast it reacts.

    Attributes:
        folder: configuration, logs and state; removed at the end.
        nodes: names of the nodes.

    Raises:
        SlurmUnavailableError: SLURM is not installed, or does not start here.
    """

    def __init__(self, size: ClusterSize | None = None, timing: Timing | None = None):
        self.size = size or ClusterSize()
        self.timing = timing or Timing()
        self.folder = Path()
        self.nodes: list[str] = []
        self._keeper: subprocess.Popen[str] | None = None
        self._pids: dict[str, int] = {}
        # By daemon, the processes above its starts, see `keeper`.
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
                # Another process may have taken a port between our look and the daemon's.
                self.stop()
                if attempt == _START_TRIES - 1:
                    raise SlurmUnavailableError(f"the private SLURM does not start: {error}") from error
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Kills the daemons and everything they run, and removes the folder; does nothing the second time."""
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
        """Returns the environment in which SLURM's commands talk to this cluster: this process's, less SLURM's own."""
        return outside_slurm({"SLURM_CONF": str(self.folder / "slurm.conf")})

    def command(self, *arguments: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Runs a client command and returns its output, stripped.

        Args:
            arguments: program and arguments, as in `command("squeue", "-h")`.
            timeout_s: after which it is killed.

        Raises:
            subprocess.CalledProcessError: the command failed; its stderr says why.
        """
        done = subprocess.run(
            arguments, env=self.environment(), capture_output=True, text=True, timeout=timeout_s, check=True
        )
        return done.stdout.strip()

    def node_states(self) -> dict[str, str]:
        """Returns the state of each node as sinfo prints it: idle, mixed, allocated, down*, drained, ..."""
        lines = self.command("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def job_states(self) -> dict[str, str]:
        """Returns the state of each job that slurmctld still knows: PENDING, RUNNING, COMPLETED, ..."""
        lines = self.command("squeue", "--noheader", "--states=all", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for_nodes(self, state: str, nodes: list[str] | None = None, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Waits until nodes are in a state.

        Args:
            state: its beginning: "down" includes "down*", which is a down node that does not answer.
            nodes: all by default.
            timeout_s: after which it fails.

        Raises:
            TimeoutError: some node is still in another one.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            states = self._states_or_none()
            wanted = nodes or self.nodes
            if states and all(states.get(node, "").startswith(state) for node in wanted):
                return
            self._check_daemons()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nodes {wanted} are not {state} after {timeout_s:.0f} s, but {states}")
            time.sleep(0.05)

    def kill_slurmd(self, node: str) -> None:
        """Kills the slurmd of a node with SIGKILL; what the node runs goes on, as after a crash of slurmd."""
        self._kill([self._pids.pop(node)])

    def lose_node(self, node: str) -> None:
        """Kills the slurmd of a node and everything the node runs with SIGKILL, as a power cut would."""
        self._pids.pop(node, None)
        groups = [psutil.Process(pid) for pid in self._groups.pop(node, []) if psutil.pid_exists(pid)]
        below = [process for group in groups for process in group.children(recursive=True)]
        self._kill([process.pid for process in (*below, *groups)])

    def revive(self, node: str) -> None:
        """Starts the slurmd of a lost node again and waits until the node can run jobs."""
        self._start_daemon(node, ["slurmd", "-D", "-N", node])
        self.wait_for_nodes("idle", [node])

    def log(self, name: str) -> str:
        """Returns the log of "slurmctld", "munged" or of a node's slurmd."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start_once(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="megads-slurm-", dir=_short_folder()))
        try:
            self._keeper = _start_keeper(self.folder)
        except OSError as error:
            shutil.rmtree(self.folder)
            raise SlurmUnavailableError(
                f"the private SLURM does not start: {sys.executable}: {error.strerror}"
            ) from error
        addresses = _free_addresses(self.size.num_nodes)
        self.nodes = addresses.node_names()
        _write_configuration(self.folder, self.size, self.timing, addresses)
        self._start_munged()
        self._start_daemon("slurmctld", ["slurmctld", "-D"])
        for node in self.nodes:
            self._start_daemon(node, ["slurmd", "-D", "-N", node])
        self.wait_for_nodes("idle")

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.touch(mode=0o400)
        key.chmod(0o600)
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {"key": "munge.key", "pid": "munge.pid", "log": "munge.messages", "seed": "munge.seed"}
        # By force: others, who may not enter a private temporary folder, need not.
        command = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"]
        command += [f"--{name}-file={self.folder / file}" for name, file in files.items()]
        self._start_daemon("munged", command)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (self.folder / "munge.socket").exists():
            self._check_daemons()
            if time.monotonic() > deadline:
                raise _DaemonEndedError(f"munged made no socket: {self.log('munged')[-500:]}")
            time.sleep(0.01)

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
        """Raises if a daemon that should run has ended."""
        for name, pid in self._pids.items():
            if not psutil.pid_exists(pid):
                raise _DaemonEndedError(f"{name} ended, {getpass.getuser()} being the user: {self.log(name)[-500:]}")

    def _states_or_none(self) -> dict[str, str] | None:
        """Returns the nodes' states, or None while slurmctld does not answer yet."""
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return self.node_states()
        return None

    def _kill(self, pids: list[int]) -> None:
        # All stop first: in a power cut none sees another die, and srun ends no step because its own node's task went.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + _COMMAND_TIMEOUT_S
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() < deadline, f"{pids} survive SIGKILL"
            time.sleep(0.01)


def _start_keeper(folder: Path) -> subprocess.Popen[str]:
    """Starts the process that starts the daemons."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", str(keeper.__file__), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _short_folder() -> str:
    """Returns the folder for temporary files, or /tmp where its path is too long for the sockets below it."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= _LONGEST_FOLDER else "/tmp"


def _free_addresses(num_nodes: int) -> Addresses:
    """Returns a random loopback network and ports that nobody listens on."""
    network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
    ports: list[int] = []
    while len(ports) < num_nodes + 1:
        port = random.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            if port not in ports:
                ports.append(port)
    return Addresses(network, ports[0], tuple(ports[1:]))
