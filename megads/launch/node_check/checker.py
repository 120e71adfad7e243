"""One node of a check, started by the check: `python -m megads.launch.node_check.checker --store ... --node ...`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys


def main() -> None:
    """Takes part in the check to its end."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.node_check.checker")
    parser.add_argument("--store", required=True, help="host:port of the coordinator's store")
    parser.add_argument("--node", required=True, help="name of this node")
    entry = "megads.launch.node_check.measure:run_checker"
    parser.add_argument("--entry", default=entry, help="module:function to run; tests name their own")
    arguments = parser.parse_args()
    host, _, port = arguments.store.rpartition(":")
    module, function = arguments.entry.split(":")
    from megads.launch.node_check.board import Board
    from megads.runtime.run_secret import Secret

    try:
        secret = Secret.decode(sys.stdin.readline())
    except ValueError:
        sys.exit(
            "megads check_nodes: this checker got no secret through its input; srun and the container must pass it on: "
            "leave --input out of the options of srun"
        )
    getattr(importlib.import_module(module), function)(Board(secret, host, int(port)), arguments.node)
    sys.stdout.flush()
    # Without the interpreter's shutdown, in which a process group whose partner is gone could hang.
    os._exit(0)


if __name__ == "__main__":
    main()
