"""Which ranks go where: a layout against the nodes that a SLURM job has, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megads.config import RootConfig
from megads.errors import ConfigError
from megads.launch.launcher import LaunchSpec
from megads.launch.node_ranks import Ranks, require_devices
from megads.launch.slurm_ranks import SlurmRanks
from megads.launch.slurm_scheduler import end_chain, send_back
from megads.runtime.config import ClusterKind
from megads.runtime.slurm import Allocation, Node, SlurmJob, find_allocation


@dataclass(frozen=True)
class SlurmPlacement:
    """The nodes of a SLURM job that take part in a run.

    Attributes:
        allocation: the job.
        nodes: those that the ranks are on, in the order of the ranks; what is left of the allocation are spares.
        ranks_per_node: neighbouring ranks on each.
    """

    allocation: Allocation
    nodes: tuple[Node, ...]
    ranks_per_node: int

    def ranks(self, spec: LaunchSpec, config: RootConfig) -> Ranks:
        """The run's ranks, to be started.

        Raises:
            ConfigError: this node, as every other, has GPUs, but fewer than ranks.
        """
        if not spec.cpu:
            require_devices(self.ranks_per_node, "ranks on each node")
        part = spec.node_part(self.ranks_per_node, num_nodes=len(self.nodes))
        return SlurmRanks(part, self.allocation, self.nodes, config.cluster.srun_options, config.cluster.wrapper)

    def on(self, names: Sequence[str]) -> SlurmPlacement:
        """The same on other nodes of the job, in the order given."""
        by_name = {node.name: node for node in self.allocation.nodes}
        return replace(self, nodes=tuple(by_name[name] for name in names))

    def hand_over(self, config: RootConfig, exit_code: int, excluded: Sequence[str] = ()) -> str:
        """Sees to what follows this job, when the run directory is free again; returns a line about it, or none.

        Args:
            config: of the run.
            exit_code: of the run.
            excluded: nodes that the job should not get again.
        """
        if config.cluster.chain:
            return end_chain(self.allocation, exit_code)
        run_dir = Path(str(config.run.dir))
        return send_back(self.allocation, exit_code, config.cluster.max_requeues, run_dir, excluded)

    def __str__(self) -> str:
        names = ", ".join(node.name for node in self.nodes)
        used = {node.name for node in self.nodes}
        others = [node.name for node in self.allocation.nodes if node.name not in used]
        kept = f"; not used: {', '.join(others)}" if others else ""
        return f"SLURM job {self.allocation.job.id} on {names}, {self.ranks_per_node} ranks on each{kept}"


def find_placement(config: RootConfig) -> SlurmPlacement | None:
    """Returns where the ranks go on SLURM; None where they stay on this machine.

    A dry run outside of a job takes cluster.nodes for its nodes, and knows no place without it.

    Raises:
        ConfigError: this is no SLURM job, or the layout does not fit its nodes.
    """
    if config.cluster.kind is not ClusterKind.slurm:
        return None
    try:
        allocation = find_allocation()
    except ConfigError:
        if not config.run.dry_run:
            raise
        if config.cluster.nodes is None:
            return None
        allocation = _expected(config.cluster.nodes)
    return place_ranks(config, allocation)


def _expected(nodes: int) -> Allocation:
    """The job that a dry run stands for."""
    names = [f"node {number}" for number in range(nodes)]
    return Allocation(SlurmJob("", 0, ""), tuple(Node(name, name) for name in names))


def place_ranks(config: RootConfig, allocation: Allocation) -> SlurmPlacement:
    """Shares the ranks out over all nodes of a job but cluster.spare_nodes.

    Raises:
        ConfigError: they do not fill the nodes.
    """
    spare = config.cluster.spare_nodes
    ranks, nodes = config.parallel.world_size, len(allocation.nodes) - spare
    if nodes < 1:
        raise ConfigError(
            f"cluster.spare_nodes = {spare}, but SLURM job {allocation.job.id} has {len(allocation.nodes)} nodes: ask "
            "for as many more as are spare (sbatch --nodes)"
        )
    given, gpus = config.cluster.ranks_per_node, allocation.gpus_per_node
    product = f"{config.parallel.product} = {ranks} ranks"
    where = f"the {nodes} nodes of SLURM job {allocation.job.id}" if allocation.job.id else f"{nodes} nodes"
    where += " that are not spare" if spare else ""
    per_node = given or gpus or (ranks // nodes if ranks % nodes == 0 else 0)
    if per_node == 0:
        fewer = max(count for count in range(1, nodes + 1) if ranks % count == 0)
        raise ConfigError(
            f"{product} cannot be shared out evenly over {where}: ask for another number of nodes "
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
            f"cluster.ranks_per_node = {per_node}, but the job has {gpus} GPUs on each node: lower it, or ask for more "
            "(sbatch --gpus-per-node)"
        )
    return SlurmPlacement(allocation, allocation.nodes[:nodes], per_node)
