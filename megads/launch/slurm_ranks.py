"""The ranks of a run on the nodes of a SLURM job: assigns them to nodes, and starts one agent per node.

srun starts the agents (`python -m megads.launch.node_agent`), which communicate with the launcher through a store. srun
ends the step when an agent fails or a node is lost; the launcher determines the cause from the agents' earlier reports.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megads.config.root import RootConfig
from megads.errors import ConfigError, UnhealthyNode
from megads.launch.agent_ranks import AgentRanks
from megads.launch.launcher import LaunchSpec
from megads.launch.node_agent import AGENT, place_of
from megads.launch.node_ranks import POLL_S, NodePart, Ranks, require_devices
from megads.launch.rank_outcome import NodeReport, lost_nodes
from megads.launch.scheduler import cancel_job_chain, requeue_job
from megads.runtime import environment, slurm
from megads.runtime.config import ClusterKind
from megads.runtime.files import last_line, read_regular
from megads.runtime.ports import LOOPBACK, launcher_address, read_secret, secret_path
from megads.runtime.run_dir import srun_log_path
from megads.runtime.slurm import Allocation, Node, SlurmJob, find_allocation

_STEP_NAME = "megads"
_CONNECTIONS_PER_NODE = 2
"""Store connections of each agent; each rank has one more."""
_WAIT_S = 60
_CANCEL_AFTER_S = 10.0
_GIVE_UP_AFTER_S = 30.0


@dataclass(frozen=True)
class SlurmPlacement:
    """The nodes of a SLURM job that take part in a run.

    Attributes:
        allocation: the job.
        nodes: nodes of the ranks, in rank order; the other nodes of the allocation are spares.
        ranks_per_node: number of consecutive ranks on each node.
    """

    allocation: Allocation
    nodes: tuple[Node, ...]
    ranks_per_node: int

    def ranks(self, spec: LaunchSpec, config: RootConfig) -> Ranks:
        """Returns the run's ranks, not started yet.

        Raises:
            ConfigError: this node has GPUs, but fewer than ranks; the other nodes are taken to be the same.
        """
        if not spec.cpu:
            require_devices(self.ranks_per_node, "ranks on each node", spec.ranks_per_gpu)
        part = spec.node_part(self.ranks_per_node, num_nodes=len(self.nodes))
        return SlurmRanks(part, self.allocation, self.nodes, config.cluster.srun_options, config.cluster.wrapper)

    def on(self, names: Sequence[str]) -> SlurmPlacement:
        """Returns the placement on other nodes of the job, in the given order."""
        by_name = {node.name: node for node in self.allocation.nodes}
        return replace(self, nodes=tuple(by_name[name] for name in names))

    def requeue_or_end_chain(self, config: RootConfig, exit_code: int, excluded: Sequence[str] = ()) -> str:
        """Requeues the job or ends its chain, after the run directory is released; returns a message or "".

        Args:
            config: config of the run.
            exit_code: exit code of the run.
            excluded: nodes to exclude from the job's next start.
        """
        if config.cluster.chain:
            return cancel_job_chain(exit_code)
        run_dir = Path(str(config.run.dir))
        return requeue_job(self.allocation, exit_code, config.cluster.max_requeues, run_dir, excluded)

    def __str__(self) -> str:
        names = ", ".join(node.name for node in self.nodes)
        used = {node.name for node in self.nodes}
        others = [node.name for node in self.allocation.nodes if node.name not in used]
        kept = f"; not used: {', '.join(others)}" if others else ""
        return f"SLURM job {self.allocation.job.id} on {names}, {self.ranks_per_node} ranks on each{kept}"


def find_slurm_placement(config: RootConfig) -> SlurmPlacement | None:
    """Returns the placement of the ranks on SLURM; None for a run on this machine.

    A dry run outside of a job assumes cluster.nodes nodes; without that key it has no placement.

    Raises:
        ConfigError: this process is not in a SLURM job, or the layout does not fit its nodes.
    """
    if config.cluster.kind is not ClusterKind.slurm:
        return None
    try:
        allocation = slurm.retry_outage(find_allocation)
    except ConfigError:
        if not config.run.dry_run:
            raise
        if config.cluster.nodes is None:
            return None
        allocation = _expected(config.cluster.nodes)
    return assign_ranks_to_nodes(config, allocation)


def _expected(nodes: int) -> Allocation:
    """The allocation that a dry run outside of a job assumes."""
    names = [f"node {number}" for number in range(nodes)]
    return Allocation(SlurmJob("", 0, ""), tuple(Node(name, name) for name in names))


def assign_ranks_to_nodes(config: RootConfig, allocation: Allocation) -> SlurmPlacement:
    """Distributes the ranks over all nodes of a job except cluster.spare_nodes.

    Raises:
        ConfigError: the ranks do not fill the nodes.
    """
    spare = config.cluster.spare_nodes
    ranks, nodes = config.parallel.world_size, len(allocation.nodes) - spare
    if nodes < 1:
        raise ConfigError(
            f"cluster.spare_nodes = {spare}, but SLURM job {allocation.job.id} has {len(allocation.nodes)} nodes: add "
            "the spare nodes to the number that you request (sbatch --nodes)"
        )
    given, gpus = config.cluster.ranks_per_node, allocation.gpus_per_node * config.cluster.ranks_per_gpu
    product = f"{config.parallel.product} = {ranks} ranks"
    where = f"the {nodes} nodes of SLURM job {allocation.job.id}" if allocation.job.id else f"{nodes} nodes"
    where += " that are not spare" if spare else ""
    per_node = given or gpus or (ranks // nodes if ranks % nodes == 0 else 0)
    if per_node == 0:
        fewer = max(count for count in range(1, nodes + 1) if ranks % count == 0)
        raise ConfigError(
            f"{product} cannot be distributed evenly over {where}: ask for another number of nodes "
            f"(sbatch --nodes={fewer + spare}), or change parallel.dp"
        )
    if ranks != per_node * nodes:
        why = "cluster.ranks_per_node" if given else "GPUs of each"
        remedy = f"ask for them with sbatch --nodes={ranks // per_node + spare}, " if ranks % per_node == 0 else ""
        raise ConfigError(
            f"{product}, but {where} take {per_node} each ({why}), {per_node * nodes} together: {remedy}change "
            f"parallel.dp, or set cluster.ranks_per_node{' to leave GPUs idle' if gpus and not given else ''}"
        )
    if 0 < gpus < per_node:
        raise ConfigError(
            f"cluster.ranks_per_node = {per_node}, but the job has {allocation.gpus_per_node} GPUs on each node: lower "
            "it, or ask for more (sbatch --gpus-per-node)"
        )
    return SlurmPlacement(allocation, allocation.nodes[:nodes], per_node)


_LOST_NODE = re.compile(
    r"launch for StepId=\S+ failed on node (\S+): (?:.*(?:connection|not respond|no route|timed out))"
    r"|Node failure on (\S+)",
    re.IGNORECASE,
)


def srun_failure(log: str, names: Collection[str]) -> list[NodeReport]:
    """Returns why srun ended before an agent sent a message: no node is to blame unless srun says that it is gone.

    Args:
        log: output of srun.
        names: nodes of the step.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    gone = {name for found in _LOST_NODE.findall(log) for name in found if name in names}
    if gone:
        return lost_nodes(sorted(gone), lines[-1])
    first = next((line for line in lines if "error" in line.lower() or "unrecognized" in line), (lines or [""])[0])
    said = first or "it printed nothing"
    if slurm.is_controller_outage(said):
        return [NodeReport(error=f"srun failed: {said}", exit_code=UnhealthyNode.exit_code)]
    remedy = "check cluster.srun_options, cluster.wrapper and the Software section of the batch script"
    return [NodeReport(error=f"srun failed before an agent started: {said}; {remedy}", exit_code=ConfigError.exit_code)]


class SlurmRanks(AgentRanks):
    """Ranks on the nodes of a SLURM job.

    Args:
        part: what each node starts; number and address are set on the node.
        allocation: the job.
        nodes: nodes of the ranks, in rank order.
        srun_options: further options of srun.
        wrapper: command line before the agent's command, such as that of a container.
    """

    def __init__(
        self,
        part: NodePart,
        allocation: Allocation,
        nodes: Sequence[Node],
        srun_options: Sequence[str] = (),
        wrapper: Sequence[str] = (),
    ):
        super().__init__(part, [node.name for node in nodes])
        self._allocation = allocation
        self._nodes = nodes
        self._srun_options = srun_options
        self._wrapper = wrapper
        self._cancelled = False
        self._srun: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Imported here: it imports torch, which would delay the refusal of a config.
        from megads.runtime.control_store import ControlStore

        # After an outage srun would fail, and the attempt be lost.
        slurm.retry_outage(lambda: slurm.ask_job(self._allocation.job.id))
        secret = read_secret(secret_path(self._part.run_dir, self._part.lease))
        environment.allow_open_files(_CONNECTIONS_PER_NODE * len(self._nodes) + len(self._nodes) * self._part.num_ranks)
        self._control = ControlStore(secret, self._store_address())
        count = len(self._nodes)
        self._control.assign(
            {node.name: place_of(number, count, node.address) for number, node in enumerate(self._nodes)}
        )
        with srun_log_path(self._part.run_dir).open("wb") as log:
            # In its own session: Ctrl-C in salloc is handled by the launcher.
            self._srun = subprocess.Popen(
                self.command(f"{self._control.host}:{self._control.port}"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment.for_srun(),
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Waits briefly and handles what happened; returns False once srun has ended."""
        assert self._srun is not None and self._control is not None
        with suppress(subprocess.TimeoutExpired):
            self._srun.wait(POLL_S)
        self.hear()
        if self._srun.poll() is not None:
            return False
        self.act()
        now = time.monotonic()
        if self._ended_at is not None and (now - self._ended_at > _CANCEL_AFTER_S or self._only_silent_left()):
            self._cancel(now)
        return True

    def reports(self) -> list[NodeReport]:
        if not self._heard_s and not self._reports:
            log = read_regular(srun_log_path(self._part.run_dir)).decode(errors="replace")
            return srun_failure(log, self._names)
        missing = [node.name for number, node in enumerate(self._nodes) if number not in self._reports]
        reports = [report for _, report in sorted(self._reports.items())]
        return reports + lost_nodes(missing, last_line(srun_log_path(self._part.run_dir)) if missing else "")

    def description(self) -> dict[str, object]:
        return {"nodes": [node.name for node in self._nodes], "ranks_per_node": self._part.num_ranks}

    def _store_address(self) -> str:
        """Address at which the launcher serves the control store."""
        if [node.name for node in self._nodes] == [environment.node_name()]:
            return LOOPBACK
        nodes = self._allocation.nodes
        return launcher_address(nodes[0].address, [node.address for node in nodes])

    def command(self, store: str) -> tuple[str, ...]:
        """Returns the srun command that starts one agent on every node.

        Args:
            store: host:port of the launcher's control store.
        """
        part, count = self._part, str(len(self._nodes))
        every_node = [
            *(sys.executable, *AGENT, str(part.run_dir), "--store", store),
            *("--ranks", str(part.num_ranks), "--threads", str(part.threads_per_rank)),
            *(["--lease", str(part.lease)] if part.lease is not None else []),
            *(["--heartbeat-timeout", str(part.heartbeat_timeout_s)] if part.heartbeat_timeout_s is not None else []),
            *(["--hangs", json.dumps(asdict(part.hangs))] if part.hangs is not None else []),
            *(["--cpu"] if part.cpu else []),
            *(["--ranks-per-gpu", str(part.ranks_per_gpu)] if part.ranks_per_gpu > 1 else []),
            *([] if part.one_hardware_queue else ["--several-hardware-queues"]),
            *(["--deepspeed"] if part.deepspeed else []),
            *("--", *part.command),
        ]
        return (
            *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node=1"),
            *slurm.step_options(self._allocation),
            # --overlap: the step of an earlier attempt remains until SLURM gives up the node that it lost.
            *("--overlap", "--nodelist", slurm.compressed(node.name for node in self._nodes)),
            *("--kill-on-bad-exit=1", f"--wait={_WAIT_S}", "--export=ALL", "--mpi=none", f"--job-name={_STEP_NAME}"),
            *self._srun_options,
            *self._wrapper,
            *every_node,
        )

    def _cancel(self, now: float) -> None:
        """Ends a step whose agents do not end: with scancel, then by killing srun."""
        assert self._srun is not None and self._ended_at is not None
        if not self._cancelled:
            self._cancelled = True
            # If the controller does not answer, killing srun remains.
            with suppress(ConfigError):
                for step in slurm.running_steps(self._allocation.job.id, _STEP_NAME):
                    slurm.ask("scancel", "--signal=KILL", step)
        if now - self._ended_at > _GIVE_UP_AFTER_S or self._only_silent_left():
            self._srun.kill()
