#!/usr/bin/env python3
"""Trains one run in a placement group of Ray, one bundle per rank.

    ray_placement_group.py --ranks 16 [--gpus 1] [--cpus 1] [--max-restarts 3] experiment=bloom_1b1 parallel.dp=16 ...

Needs Ray (`pip install 'megads[ray]'`) and megads on every machine, and a run.dir that all of them see. Starts from the
machine of the driver, or as `ray job submit -- python ray_placement_group.py ...`. If the ranks end with 6 (preempted),
9 (unhealthy) or 10 (killed from outside), or Ray loses one, they are started again, on other machines if one is gone,
and the run continues from its last checkpoint. Exits with megads' exit code.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

WORTH_A_RESTART = (6, 9, 10)
LOST = 9


@ray.remote(max_retries=0)
def free_address() -> tuple[str, int]:
    """Returns the address of this machine and a port that is free on it."""
    with socket.socket() as one:
        one.bind(("", 0))
        return ray.util.get_node_ip_address(), int(one.getsockname()[1])


@ray.remote(max_retries=0)
def train(rank: int, ranks: int, address: tuple[str, int], overrides: list[str]) -> int:
    """Runs one rank; returns its exit code. Ray has set the GPU that it sees."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": address[0], "MASTER_PORT": address[1]}
    variables = os.environ | {name: str(value) for name, value in place.items()}
    # Ray sets OMP_NUM_THREADS to the number of a task's CPUs; megads has cluster.threads_per_rank.
    variables.pop("OMP_NUM_THREADS", None)
    return subprocess.run(["megads", "train", "cluster=external", *overrides], env=variables, check=False).returncode


def attempt(group: PlacementGroup, resources: dict[str, float], overrides: list[str]) -> int:
    """Runs all ranks once; returns the run's exit code."""
    ranks = group.bundle_count
    bundles = [PlacementGroupSchedulingStrategy(group, bundle) for bundle in range(ranks)]
    options = {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0)}
    try:
        address = ray.get(free_address.options(scheduling_strategy=bundles[0], **options).remote())
        tasks = [
            train.options(scheduling_strategy=bundle, **options).remote(rank, ranks, address, overrides)
            for rank, bundle in enumerate(bundles)
        ]
        codes = ray.get(tasks)
    except RayError as error:
        print(f"a rank is lost: {error}", file=sys.stderr)
        return LOST
    # All ranks end with the code of the cause, unless one was killed.
    return next((code for code in codes if code), 0)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=1, help="per rank; 0 trains on CPUs")
    parser.add_argument("--cpus", type=float, default=1, help="per rank")
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of megads train")
    asked = parser.parse_args()
    ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=True)
    resources = {"CPU": asked.cpus} | ({"GPU": asked.gpus} if asked.gpus else {})
    # PACK places ranks on as few machines as possible, and bundles with neighbouring numbers beside each other.
    group = placement_group([resources] * asked.ranks, strategy="PACK")
    ray.get(group.ready())
    for _ in range(asked.max_restarts + 1):
        code = attempt(group, resources, asked.overrides)
        if code not in WORTH_A_RESTART:
            break
    return code


if __name__ == "__main__":
    sys.exit(main())
