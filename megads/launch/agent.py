"""One node of a run: `python -m megads.launch.agent <run_dir> ... -- <command of a rank>`, started by srun only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from megads.launch.node_agent import run_agent
from megads.launch.node_ranks import NodePart
from megads.runtime.environment import node_name


def main() -> NoReturn:
    """Starts the ranks of this node and stays until they have ended."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--store", required=True, help="host:port of the launcher's control store")
    parser.add_argument("--nodes", required=True, help="name=address of every node, in the order of their ranks")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on each node")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of each rank")
    parser.add_argument("--lease", type=int, help="number of this start of the run")
    parser.add_argument("--heartbeat-timeout", type=float, help="seconds without a heartbeat until a rank is killed")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever GPUs there are")
    parser.add_argument("command", nargs="+", help="arguments after the Python interpreter of every rank")
    arguments = parser.parse_args()
    host, _, port = arguments.store.rpartition(":")
    nodes = dict(node.split("=", 1) for node in arguments.nodes.split(","))
    name = node_name()
    part = NodePart(
        run_dir=arguments.run_dir,
        command=tuple(arguments.command),
        num_ranks=arguments.ranks,
        threads_per_rank=arguments.threads,
        cpu=arguments.cpu,
        lease=arguments.lease,
        node=list(nodes).index(name),
        num_nodes=len(nodes),
        address=nodes[name],
        heartbeat_timeout_s=arguments.heartbeat_timeout,
    )
    run_agent(part, host, int(port))


if __name__ == "__main__":
    main()
