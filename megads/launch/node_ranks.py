"""The ranks of one node: starts and monitors them, kills hung ones, and reports how they ended.

Used by the launcher on a single machine, and by the agent of every node on SLURM (megads.launch.node_agent).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megads.errors import ConfigError, UnhealthyNode
from megads.launch.evidence import EvidenceCollection
from megads.launch.hang_detection import HangDetector, HangSettings
from megads.launch.rank_outcome import FailureRecord, NodeReport, RankExit, hung_record, read_exits, read_failures
from megads.launch.rank_server import RankServer
from megads.runtime import environment
from megads.runtime.heartbeat import HeartbeatMonitor, RankPosition, process_stat, render_positions
from megads.runtime.ports import gloo_interface, read_secret, secret_path
from megads.runtime.run_dir import evidence_path

if TYPE_CHECKING:
    from megads.runtime.control_store import ControlStore

POLL_S = 0.1
NVIDIA_SMI_S = 30.0
_PF_EXITING = 0x4
"""Flag of an exiting process, from the kernel's sched.h."""
KILL_AFTER_S = 3.0
"""How long after the first failure peers that SIGTERM does not end, such as stopped processes, are killed."""
_MAX_COLLECTIONS = 4
"""Maximum number of evidence collections in one start."""


class Ranks(Protocol):
    """The ranks of a run, on this machine or on SLURM nodes.

    An implementation that inherits from it has ranks without heartbeats, and nodes without agents.
    """

    def start(self) -> None: ...

    def poll(self) -> bool:
        """Waits briefly and handles what happened; returns False once all ranks have ended."""
        ...

    def kill(self) -> None:
        """Kills the ranks that still run, without waiting for their end; `poll` observes it."""
        ...

    def silences(self) -> list[RankPosition]:
        """Ranks whose heartbeats stopped or returned since the last call."""
        return []

    def phase(self) -> str:
        """Current phase of rank 0 according to its heartbeats; empty if unknown."""
        return ""

    def hang(self) -> list[RankPosition]:
        """The hung ranks that all others wait for, once their evidence is collected; empty if none hangs."""
        return []

    def silent_nodes(self) -> Mapping[str, float]:
        """Nodes whose agents have stopped sending messages, with the seconds since the last one."""
        return {}

    def lost_nodes(self) -> Mapping[str, float]:
        """The silent nodes that the ranks of all other nodes wait for."""
        return {}

    def reports(self) -> list[NodeReport]:
        """How the ranks of each node ended."""
        ...

    def description(self) -> dict[str, object]:
        """Nodes of the ranks, for events.jsonl."""
        ...


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """What holds for the ranks of all nodes.

    Attributes:
        cpu: whether the ranks compute on the CPU even if there are GPUs.
        lease: number of this start of the run; None for a start that holds no lease.
        heartbeat_timeout_s: time without a heartbeat after which a rank is killed; None disables this.
        hangs: settings of hang detection; None disables it.
        ranks_per_gpu: number of consecutive ranks that share a GPU.
        one_hardware_queue: whether GPUs before Blackwell get one hardware queue, see `environment.rank_variables`.
        deepspeed: whether the ranks use DeepSpeed, so that a process that forks them imports it once.
    """

    cpu: bool = False
    lease: int | None = None
    heartbeat_timeout_s: float | None = None
    hangs: HangSettings | None = None
    ranks_per_gpu: int = 1
    one_hardware_queue: bool = True
    deepspeed: bool = False


@dataclass(frozen=True)
class NodePart(RankSettings):
    """One node's share of a run.

    Attributes:
        run_dir: the run directory.
        command: arguments after the Python interpreter, the same for every rank.
        num_ranks: number of ranks on this node, the same on every node.
        threads_per_rank: CPU threads of each rank.
        node: number of this node.
        num_nodes: number of all nodes.
        address: address of this node for the other nodes.
        local_rank: rank on this machine of the one rank of a process that a platform started; else None.
        local_ranks: number of ranks on this machine, of such a process.
        one_machine: whether all nodes are on this machine.
    """

    run_dir: Path
    command: tuple[str, ...]
    num_ranks: int
    threads_per_rank: int
    node: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"
    local_rank: int | None = None
    local_ranks: int = 0
    one_machine: bool = False

    @property
    def first_rank(self) -> int:
        return self.node * self.num_ranks

    @property
    def ranks(self) -> range:
        """Numbers of this node's ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def require_devices(num_ranks: int, what: str, ranks_per_gpu: int = 1) -> None:
    """Raises ConfigError if there are GPUs, but too few for the ranks.

    NCCL refuses two ranks on one GPU with an unclear message.

    Args:
        num_ranks: number of ranks on this node.
        what: config keys that determine this number, for the message.
        ranks_per_gpu: number of ranks that share a GPU.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus * ranks_per_gpu < num_ranks:
        shared = f" for {ranks_per_gpu} ranks each (cluster.ranks_per_gpu)" if ranks_per_gpu > 1 else ""
        raise ConfigError(
            f"{what} = {num_ranks} ranks, but this machine has {gpus} GPUs{shared}: lower one of them, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )


def gpu_index_of_process(local_rank: int) -> int:
    """Returns the index of the GPU of a process that a platform started.

    Args:
        local_rank: its rank on this machine.

    Raises:
        ConfigError: there are GPUs, but none for this process.
    """
    import torch

    gpus = torch.cuda.device_count()
    if local_rank < gpus:
        return local_rank
    if gpus == 1 and environment.visible_gpu_setting() is not None:
        return 0  # the platform shows every process its own
    raise ConfigError(
        f"LOCAL_RANK = {local_rank}, but this process sees {gpus} GPUs: start as many processes as GPUs on a machine "
        "(torchrun --nproc-per-node), or show every process its own (srun --gpus-per-task=1)"
    )


def lowest_compute_capability() -> tuple[int, int] | None:
    """Lowest compute capability of this machine's GPUs according to nvidia-smi; None if it fails.

    torch is not asked, because it would initialize a device in this process.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
        found = [line.strip().split(".") for line in done.stdout.splitlines() if line.strip()]
        return min((int(major), int(minor)) for major, minor in found)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logging.getLogger(__name__).warning(
            "%s reports no compute capability (%s): CUDA_DEVICE_MAX_CONNECTIONS is left unchanged", command[0], error
        )
        return None


class _NewProcesses:
    """Starts every rank as a new process, with the interface of `RankServer`."""

    def __init__(self, variables: Mapping[str, str]):
        self._variables = variables
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int, command: Sequence[str], variables: Mapping[str, str]) -> None:
        with environment.child_environment({**self._variables, **variables}):
            process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # stderr goes to the terminal until the rank opens its log.
                start_new_session=True,
            )
        self._processes[rank] = process

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def exit_codes(self) -> dict[int, int]:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def poll(self, timeout_s: float) -> None:
        time.sleep(timeout_s)

    def close(self) -> None:
        """Does nothing: all ranks have ended."""


class NodeRanks(Ranks):
    """The ranks of this node.

    Args:
        part: what to start.
        control: store for the rendezvous of the ranks; None serves one for this node alone.
        server: forks ranks that compute on the CPU, and is kept running afterwards; None starts one for them.
    """

    def __init__(self, part: NodePart, control: ControlStore | None = None, server: RankServer | None = None):
        self.part = part
        self._control = control
        self._server = server
        self._processes: RankServer | _NewProcesses | None = None
        self._killed: set[int] = set()
        self._hung: dict[int, FailureRecord] = {}
        self._monitor = HeartbeatMonitor(self._node)
        self._silences: list[RankPosition] = []
        self._positions: list[RankPosition] = []
        self._returned: set[int] = set()
        self._exits: list[RankExit] = []
        self._failed_at: float | None = None
        self._error = ""
        self._detector = HangDetector(part.hangs) if part.hangs is not None else None
        self._looks = self._collections = 0
        self._suspects: tuple[RankPosition, ...] = ()
        self._evidence: EvidenceCollection | None = None
        self._of_failure: EvidenceCollection | None = None

    def start(self) -> None:
        # Imported here: it imports torch, which would delay the refusal of a config.
        import torch

        from megads.runtime.control_store import ControlStore

        part = self.part
        secret = secret_path(part.run_dir, part.lease)
        # Kept alive: the ranks use this store until they end.
        self._control = self._control or ControlStore(read_secret(secret), part.address)
        cuda = torch.cuda.is_available() and not part.cpu
        capability = lowest_compute_capability() if cuda and part.one_hardware_queue else None
        shared = environment.rank_variables(part.threads_per_rank, cuda, part.lease, capability, self._monitor.folder)
        host, port = self._control.host, self._control.port
        alone = part.one_machine or part.num_nodes == 1
        interface = None if alone else gloo_interface(host)
        shared |= environment.meeting_variables(secret, host, port, alone, interface)
        shared |= environment.HIDDEN_GPUS if part.cpu else {}
        if cuda or part.command[:1] != ("-m",) or part.local_rank is not None:
            self._processes = _NewProcesses(shared)
        else:
            ready = self._server if self._server is not None and self._server.serves(shared) else None
            self._processes = ready or RankServer(shared, deepspeed=part.deepspeed)
        world_size = part.num_ranks * part.num_nodes
        for local_rank, rank in enumerate(part.ranks, part.local_rank or 0):
            numbers = environment.rank_numbers(rank, local_rank, world_size, part.local_ranks or part.num_ranks)
            if cuda:
                numbers |= environment.shared_gpu_numbers(rank, local_rank, part.ranks_per_gpu)
                if part.local_rank is not None and part.ranks_per_gpu == 1:
                    numbers |= environment.gpu_numbers(local_rank, gpu_index_of_process(local_rank))
            self._processes.start(rank, part.command, shared | numbers)

    def poll(self) -> bool:
        """Waits briefly and handles what happened; returns False once all ranks have ended."""
        assert self._processes is not None
        try:
            self._processes.poll(POLL_S)
        except UnhealthyNode as error:
            self._error = str(error)
            self._monitor.close()
            return False
        codes = self._processes.exit_codes
        if not self._exits and not (self._examining and len(codes) < self.part.num_ranks):
            self._exits = [RankExit(rank, code) for rank, code in codes.items() if code]
            if self._exits:
                self._collect_before_the_end()
                # Peers may wait in a collective for minutes.
                self._signal(signal.SIGTERM)
        if len(codes) == self.part.num_ranks:
            self._monitor.close()
            if self._processes is not self._server:
                self._processes.close()
            return False
        self._watch_heartbeats()
        if self._failed_at is None and (self._hung or (not self._examining and self._some_rank_failed())):
            self._failed_at = time.monotonic()
            self._note_positions()
        if self._failed_at is not None and time.monotonic() - self._failed_at > KILL_AFTER_S:
            if self._of_failure is None:
                self._of_failure = self._collect("peers did not end within seconds of a failure")
            if self._of_failure is None or self._of_failure.finished:
                self.kill()
        return True

    @property
    def failing(self) -> bool:
        """Whether a rank has failed, once `poll` saw it."""
        return self._failed_at is not None

    def kill(self) -> None:
        """Kills every rank that still runs, and its child processes."""
        self._note_positions()
        if isinstance(self._processes, RankServer) and self._processes.starting:
            self._processes.kill()
        for rank, pid in self._pids().items():
            self._kill(rank, pid)

    def silences(self) -> list[RankPosition]:
        """Ranks whose heartbeats stopped or returned since the last call."""
        found, self._silences = self._silences, []
        return found

    def phase(self) -> str:
        """Current phase of rank 0; empty on other nodes, or if unknown."""
        return self._monitor.phase(0)

    def hang(self) -> list[RankPosition]:
        """The hung ranks that all others of this node wait for; empty until their evidence is collected."""
        return [] if self._examining else list(self._suspects)

    def reports(self) -> list[NodeReport]:
        """How the ranks of this node ended, as far as they have."""
        ranks = self.part.ranks
        return [
            NodeReport(
                node=self._node,
                failures=[*read_failures(self.part.run_dir, ranks, self.part.lease), *self._hung.values()],
                exits=list(self._exits),
                killed=sorted(self._killed),
                returned=read_exits(self.part.run_dir, ranks, self.part.lease),
                positions=self._positions,
                error=self._error,
                exit_code=UnhealthyNode.exit_code,
            )
        ]

    def description(self) -> dict[str, object]:
        return {"node": environment.node_name()}

    @property
    def _node(self) -> str:
        """Name of this node; empty on a run of one node."""
        return environment.node_name() if self.part.num_nodes > 1 else ""

    @property
    def _examining(self) -> bool:
        """Whether evidence of a hang is being collected.

        A rank that ends meanwhile is not the cause of that hang. faulthandler reads the frames of threads that run, and
        rarely crashes its process by it.
        """
        return self._evidence is not None and not self._evidence.finished

    def _kill(self, rank: int, pid: int) -> None:
        if rank not in self._exit_codes and _exists(pid):
            self._killed.add(rank)
            _signal_group(pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for rank, pid in self._pids().items():
            if rank not in self._exit_codes:
                _signal_group(pid, number)

    def _watch_heartbeats(self) -> None:
        """Kills ranks without a heartbeat for too long, as a stopped process ignores SIGTERM; looks for hangs."""
        pids, limit_s = self._pids(), self.part.heartbeat_timeout_s
        self._silences += self._monitor.poll(pids)
        for position in self._monitor.positions():
            if limit_s is not None and position.silent_s >= limit_s and position.rank not in self._hung:
                self._hung[position.rank] = hung_record(position)
                if (evidence := self._collect(f"hung: {position}")) is not None:
                    evidence.wait()
                self._kill(position.rank, pids[position.rank])
        if self._detector is not None and self._looks != self._monitor.looks and self._failed_at is None:
            self._looks = self._monitor.looks
            before, self._suspects = self._suspects, self._detector.observe(self._monitor.positions())
            if self._suspects and not before:
                self._evidence = self._collect(f"hung: {render_positions(self._suspects)}")

    def _collect(self, reason: str) -> EvidenceCollection | None:
        """Starts to collect evidence of the ranks that still run; None after the maximum number of collections."""
        if self._collections >= _MAX_COLLECTIONS:
            return None
        self._collections += 1
        part, exited = self.part, self._exit_codes
        name = time.strftime("%Y%m%d-%H%M%S") + (f"_node_{part.node}" if part.num_nodes > 1 else "")
        running = {rank: pid for rank, pid in self._pids().items() if rank not in exited and not _ended(pid)}
        folder = evidence_path(part.run_dir, part.lease, name)
        return EvidenceCollection(
            folder, part.run_dir, self._monitor.folder, running, self._monitor.positions(), reason
        )

    def _collect_before_the_end(self) -> None:
        """Collects evidence if a rank failed only because it waited for another, which may still run."""
        failed = read_failures(self.part.run_dir, [end.rank for end in self._exits], self.part.lease)
        if any(record.consequence for record in failed) and len(self._exit_codes) < self.part.num_ranks:
            self._of_failure = self._collect(f"rank {failed[0].rank} waited for another one: {failed[0].message}")
            if self._of_failure is not None:
                self._of_failure.wait()

    def _note_positions(self) -> None:
        """Records the ranks' positions before they are killed; a rank silent by then caused its peers' failure."""
        if self._positions:
            return
        self._positions = self._monitor.positions()
        self._hung |= {at.rank: hung_record(at) for at in self._positions if at.lost and at.rank not in self._hung}

    def _some_rank_failed(self) -> bool:
        """Returns whether a rank has ended without returning.

        Called ten times a second, so it checks the processes, which is cheap. A rank writes its record right before it
        ends; the record is read only after that, because all ranks share the disk.
        """
        codes = self._exit_codes
        running = {rank: pid for rank, pid in self._pids().items() if rank not in self._returned}
        ended = [rank for rank, pid in running.items() if rank in codes or _ended(pid)]
        self._returned.update(read_exits(self.part.run_dir, ended, self.part.lease))
        return not self._returned.issuperset(ended)

    def _pids(self) -> dict[int, int]:
        """Pids by rank; empty until the ranks are started."""
        return dict(self._processes.pids) if self._processes is not None else {}

    @property
    def _exit_codes(self) -> Mapping[int, int]:
        """Exit codes of the ranks that have ended; their pids may have been reused since."""
        return self._processes.exit_codes if self._processes is not None else {}


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signals a rank and its child processes; only the rank if it has no session of its own yet."""
    for send in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            send(pid, number)
            return


def _ended(pid: int) -> bool:
    """Whether a process has ended or is exiting, even if it is not reaped yet or its exit takes a while in a driver."""
    fields = process_stat(pid)
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING) if fields else not _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
