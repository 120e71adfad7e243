"""What scripts/slurm/submit.sh asks before it submits: the number of nodes, and whether the time limit is allowed.

`python -m megads.cli.submission` prints the option of sbatch to add, or nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Sequence

from megads.cli.entry import run_verb
from megads.cli.train import VERB
from megads.cli.verb import Invocation
from megads.config.root import RootConfig
from megads.errors import EXIT_OK, ConfigError
from megads.runtime import environment, slurm
from megads.runtime.config import clock_seconds


def nodes_of_layout(config: RootConfig, gpus_per_node: int) -> int | None:
    """Returns the number of nodes that the layout fills, spare nodes included; None if that is not known.

    Args:
        config: config of the run.
        gpus_per_node: GPUs that the job asks for on each node; 0 for none.
    """
    cluster, ranks = config.cluster, config.parallel.world_size
    per_node = cluster.ranks_per_node or gpus_per_node * cluster.ranks_per_gpu
    if not per_node or ranks % per_node:
        return None
    return ranks // per_node + cluster.spare_nodes


def minutes(text: str) -> float | None:
    """Parses a time of SLURM, such as 90, 12:00:00 or 1-12; returns minutes, None for no limit."""
    if text.isdecimal():
        return float(text)
    days, dash, hours = text.partition("-")
    if dash and hours.isdecimal():
        return 60.0 * (24 * int(days) + int(hours))
    seconds = clock_seconds(text)
    return None if seconds is None else seconds / 60


def require_time_limit(text: str, partition: str) -> None:
    """Refuses a time limit above that of the partition: SLURM accepts the job by default, and never starts it.

    Args:
        text: the time limit, as given to sbatch.
        partition: name of the partition; empty for the default one.

    Raises:
        ConfigError: the limit is too long.
    """
    if shutil.which("sinfo") is None:
        return
    name = partition or "".join(environment.set_variables("SBATCH_PARTITION").values())
    lines = slurm.ask("sinfo", "--noheader", "--format=%P %l", *([f"--partition={name}"] if name else [])).splitlines()
    limits = {line.split()[0]: line.split()[1] for line in lines if len(line.split()) == 2}
    found = [(part, limit) for part, limit in limits.items() if name or part.endswith("*")]
    asked = minutes(text)
    allowed = [minutes(limit) for _, limit in found]
    if asked is None or not found or any(limit is None or asked <= limit for limit in allowed):
        return
    part, limit = found[-1]
    raise ConfigError(
        f"--time={text} is above the limit {limit} of partition {part.rstrip('*')}: the job would wait for ever. Lower "
        "it; a run that takes longer continues in the next job (submit.sh --chain)"
    )


def main(arguments: Sequence[str]) -> int:
    """Prints the option to add; returns the exit code.

    Args:
        arguments: values of options, `--`, the options of sbatch, `--`, the overrides of `megads train`.
    """
    first = arguments.index("--")
    second = arguments.index("--", first + 1)
    parser = argparse.ArgumentParser(prog="python -m megads.cli.submission")
    for name in ("nodes", "gpus-per-node", "time", "partition"):
        parser.add_argument(f"--{name}", default="")
    given = parser.parse_args(arguments[:first])
    options, overrides = arguments[first + 1 : second], arguments[second + 1 :]

    def derive(config: RootConfig, _invocation: Invocation) -> int:
        if given.time:
            require_time_limit(given.time, given.partition)
        nodes = nodes_of_layout(config, int(given.gpus_per_node or 0))
        named = any(option.startswith("--nodes=") for option in options)
        # One node is what the script says as shipped.
        if nodes is not None and given.nodes in ("", "1") and not named:
            print(f"--nodes={nodes}")
        return EXIT_OK

    return run_verb(dataclasses.replace(VERB, run=derive, refused=None), overrides)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
