"""The ranks of one node, by torch's elastic agent: starts them, watches them, kills what hangs, reports how they ended.

The launcher uses it directly on one machine; on a cluster every node's agent does (megads.launch.node_agent).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megads.errors import ConfigError
from megads.launch.rank_outcome import FailureRecord, NodeReport, RankExit, hung, read_exits, read_failures
from megads.runtime import environment
from megads.runtime.heartbeat import HeartbeatMonitor, RankPosition, process_stat
from megads.runtime.run_secret import read_secret, secret_path

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from megads.runtime.control_store import ControlStore

POLL_S = 0.1
NVIDIA_SMI_S = 30.0
_PF_EXITING = 0x4
"""Of the flags of a process, in the kernel's sched.h."""
KILL_AFTER_S = 3.0
"""A peer that SIGTERM does not end (a stopped process) is killed this long after the first failure."""


class Ranks(Protocol):
    """The ranks of a run, wherever they are."""

    def start(self) -> None: ...

    def poll(self) -> bool:
        """Waits a moment and does what is due; False once all have ended."""
        ...

    def kill(self) -> None:
        """Kills what still runs, at once; poll to see the end of it."""
        ...

    def silences(self) -> list[RankPosition]:
        """Ranks whose heartbeats stopped or came back since the last call."""
        ...

    def reports(self) -> list[NodeReport]:
        """How they ended."""
        ...

    def description(self) -> dict[str, object]:
        """Where they are, for events.jsonl."""
        ...


@dataclass(frozen=True)
class NodePart:
    """One node's share of a run.

    Attributes:
        run_dir: the run directory.
        command: arguments after the Python interpreter, the same for every rank.
        num_ranks: ranks on this node; as many on every other.
        threads_per_rank: CPU threads of each rank.
        cpu: the ranks compute on the CPU, whatever GPUs there are.
        lease: number of this start of the run; None for a start that holds no lease.
        node: number of this node.
        num_nodes: all nodes.
        address: of this node, for the others.
        heartbeat_timeout_s: a rank that sends no heartbeat for so long is killed; None kills none.
    """

    run_dir: Path
    command: tuple[str, ...]
    num_ranks: int
    threads_per_rank: int
    cpu: bool = False
    lease: int | None = None
    node: int = 0
    num_nodes: int = 1
    address: str = "127.0.0.1"
    heartbeat_timeout_s: float | None = None

    @property
    def first_rank(self) -> int:
        return self.node * self.num_ranks

    @property
    def ranks(self) -> range:
        """Numbers of this node's ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


def require_devices(num_ranks: int, what: str) -> None:
    """Raises ConfigError where there are GPUs, but fewer than ranks.

    NCCL refuses two ranks on one GPU, with a message that nobody understands.

    Args:
        num_ranks: ranks on this node.
        what: the sizes that make them, for the message.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < num_ranks:
        raise ConfigError(
            f"{what} = {num_ranks} ranks, but this machine has {gpus} GPUs: lower one of them, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )


def lowest_compute_capability() -> tuple[int, int] | None:
    """Of this machine's GPUs, as the driver says: torch would open a device here. None where it does not say."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True)
        found = [line.strip().split(".") for line in done.stdout.splitlines() if line.strip()]
        return min((int(major), int(minor)) for major, minor in found)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logging.getLogger(__name__).warning(
            "%s tells no compute capability (%s): CUDA_DEVICE_MAX_CONNECTIONS is left as it is", command[0], error
        )
        return None


class NodeRanks:
    """The ranks of this node.

    The agent runs in a thread of its own, so that it installs no signal handlers and the main thread stays free.

    Args:
        part: what to start.
        control: where the nodes meet; None serves one for this node alone.
    """

    def __init__(self, part: NodePart, control: ControlStore | None = None):
        self.part = part
        self._control = control
        self._killed: set[int] = set()
        self._hung: dict[int, FailureRecord] = {}
        self._monitor = HeartbeatMonitor(self._node)
        self._silences: list[RankPosition] = []
        self._positions: list[RankPosition] = []
        self._returned: set[int] = set()
        self._exits: list[RankExit] = []
        self._failed_at: float | None = None
        self._error: BaseException | None = None
        self._agent: LocalElasticAgent | None = None
        # Daemonic: should the main thread fail, the process ends, and the kernel kills the ranks with it.
        self._thread = threading.Thread(target=self._run_agent, name="elastic-agent", daemon=True)

    def start(self) -> None:
        self._agent = self._make_agent()
        self._thread.start()

    def poll(self) -> bool:
        """Waits a moment and does what is due; False once all have ended.

        Raises:
            BaseException: the agent itself failed.
        """
        self._thread.join(POLL_S)
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive():
            self._monitor.close()
            return False
        self._watch_heartbeats()
        if self._failed_at is None and (self._hung or self._some_rank_failed()):
            self._failed_at = time.monotonic()
            self._note_positions()
        if self._failed_at is not None and time.monotonic() - self._failed_at > KILL_AFTER_S:
            self.kill()
        return True

    @property
    def failing(self) -> bool:
        """Whether a rank has failed, once `poll` saw it."""
        return self._failed_at is not None

    def kill(self) -> None:
        """Kills every rank that still runs, and what it started."""
        self._note_positions()
        for rank, pid in self._pids().items():
            self._kill(rank, pid)

    def silences(self) -> list[RankPosition]:
        """Ranks whose heartbeats stopped or came back since the last call."""
        found, self._silences = self._silences, []
        return found

    def reports(self) -> list[NodeReport]:
        """How the ranks ended, as far as they have."""
        ranks = self.part.ranks
        return [
            NodeReport(
                node=self._node,
                failures=[*read_failures(self.part.run_dir, ranks, self.part.lease), *self._hung.values()],
                exits=list(self._exits),
                killed=sorted(self._killed),
                returned=read_exits(self.part.run_dir, ranks, self.part.lease),
                positions=self._positions,
            )
        ]

    def description(self) -> dict[str, object]:
        return {"node": environment.node_name()}

    @property
    def _node(self) -> str:
        """Its name, where it need be told."""
        return environment.node_name() if self.part.num_nodes > 1 else ""

    def _kill(self, rank: int, pid: int) -> None:
        if _exists(pid):
            self._killed.add(rank)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def _watch_heartbeats(self) -> None:
        """Kills ranks that have been silent for too long: a stopped process ignores SIGTERM, and its peers wait."""
        pids, limit_s = self._pids(), self.part.heartbeat_timeout_s
        self._silences += self._monitor.look(pids)
        for position in self._monitor.positions():
            if limit_s is not None and position.silent_s >= limit_s and position.rank not in self._hung:
                self._hung[position.rank] = hung(position)
                self._kill(position.rank, pids[position.rank])

    def _note_positions(self) -> None:
        """Keeps where the ranks are before they are killed; one that is silent then is why its peers failed."""
        if self._positions:
            return
        self._positions = self._monitor.positions()
        self._hung |= {at.rank: hung(at) for at in self._positions if at.lost and at.rank not in self._hung}

    def _run_agent(self) -> None:
        """Body of the agent's thread."""
        assert self._agent is not None
        try:
            with environment.exported(self._variables()):
                result = self._agent.run()
            self._exits = [RankExit(rank, failure.exitcode) for rank, failure in result.failures.items()]
        except BaseException as error:
            self._error = error

    def _variables(self) -> Mapping[str, str]:
        """What every rank's environment must hold."""
        import torch

        part = self.part
        cuda = torch.cuda.is_available() and not part.cpu
        capability = lowest_compute_capability() if cuda else None
        heartbeats = self._monitor.folder
        variables = environment.rank_variables(part.threads_per_rank, cuda, part.lease, capability, heartbeats)
        variables |= environment.meeting_variables(secret_path(part.run_dir, part.lease), part.num_nodes == 1)
        return variables | (environment.HIDDEN_GPUS if part.cpu else {})

    def _some_rank_failed(self) -> bool:
        """True once a rank ended without having returned.

        A rank ends right after it has left its record. So the processes are asked, which costs nothing, and a record is
        looked for once: the disk is all ranks', and this comes ten times a second.
        """
        ended = [rank for rank, pid in self._pids().items() if rank not in self._returned and _ended(pid)]
        self._returned.update(read_exits(self.part.run_dir, ended, self.part.lease))
        return not self._returned.issuperset(ended)

    def _pids(self) -> dict[int, int]:
        """Pids of the ranks by rank; empty until they are started."""
        workers = self._agent.get_worker_group().workers if self._agent is not None else []
        return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}

    def _make_agent(self) -> LocalElasticAgent:
        """Builds torch's agent: no restarts, nodes in the order of their numbers, failures polled every 0.1 s."""
        # torch.distributed.elastic is imported here: it takes a second, and a refused config should not wait for it.
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from megads.runtime.control_store import ControlStore, NumberedNodes

        # The agent reports failures in several screens of text; the launcher reports them in one message.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        part = self.part
        self._control = self._control or ControlStore(read_secret(secret_path(part.run_dir, part.lease)), part.address)
        worker_spec = WorkerSpec(
            role="default",
            local_world_size=part.num_ranks,
            entrypoint=sys.executable,
            args=part.command,
            rdzv_handler=NumberedNodes(self._control, part.node, part.num_nodes),
            max_restarts=0,
            monitor_interval=POLL_S,
            local_addr=part.address,
        )
        # Ranks open their own logs: the agent's would start empty at every start.
        return LocalElasticAgent(worker_spec, DefaultLogsSpecs(log_dir=os.devnull))


def _ended(pid: int) -> bool:
    """Whether a process has ended or is about to: it is seen although nobody waited for it yet, and although its exit
    may take a while in a driver."""
    fields = process_stat(pid)
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING) if fields else not _exists(pid)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
