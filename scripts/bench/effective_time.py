"""Replays the interruptions of Llama 3's pre-training through megads' restart policy: the effective training time.

    python -m scripts.bench.effective_time [--spares 0 16] [--start-s 30 60 120 300] [--save-every-s 60 1800]

The faults are those of Table 5 of The Llama 3 Herd of Models (arXiv 2407.21783): 419 unexpected interruptions in 54
days on 16,384 GPUs, here at random times. `next_attempt` of `megads.resilience.restarts` decides each as in a real run:
restart in place, with a spare node for a lost one, or requeue when the spares are used up. Their costs at
that size were not measured: the options set them, and the table shows what depends on them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megads.errors import RankKilled, UnhealthyNode
from megads.resilience.restarts import Attempt, GiveUp, Requeue, RestartMeans, next_attempt
from megads.tools.plan.life import LLAMA3, FailureSign

GPUS_PER_NODE = 8
NODES = 16_384 // GPUS_PER_NODE
DAYS, DAY_S = 54, 86_400.0


_GIVEN = ("spares", "save every", "start")
_FOUND = {
    "effective": "train",
    "lost work": "lost_work",
    "recover": "recover",
    "detect": "detect",
    "save": "save",
    "queue": "queue",
}


@dataclass(frozen=True)
class Costs:
    """Cost of each part, in seconds.

    Attributes:
        crash: until the exit of a rank is detected.
        hang: until a hung rank is detected.
        start: from the decision to the first step: node check, processes, process groups, load.
        save_every: interval between two states that survive the fault.
        stall: time for which each save blocks the training.
        queue: queue time of a job for new nodes.
    """

    crash: float
    hang: float
    start: float
    save_every: float
    stall: float
    queue: float


@dataclass
class Spent:
    """Seconds of a replay by cause, and the decisions of the policy."""

    train: float = 0.0
    save: float = 0.0
    detect: float = 0.0
    recover: float = 0.0
    lost_work: float = 0.0
    queue: float = 0.0
    restarts: int = 0
    requeues: int = 0

    @property
    def wall(self) -> float:
        """Total seconds."""
        return self.train + self.save + self.detect + self.recover + self.lost_work + self.queue


def replay(costs: Costs, spares: int, seed: int) -> Spent:
    """Replays the interruptions of 54 days, at random moments of the ranks' run time."""
    draw = np.random.default_rng(seed)
    causes = [cause for cause in LLAMA3.causes for _ in range(int(cause.count))]
    gaps = draw.exponential(DAYS * DAY_S / len(causes), len(causes))
    means = RestartMeans(
        tuple(f"node-{number}" for number in range(NODES + spares)), NODES, max_restarts=10, queue=True
    )
    places, history, spent = means.nodes[:NODES], list[Attempt](), Spent()
    for number, (gap, index) in enumerate(zip(gaps.tolist(), draw.permutation(len(causes)).tolist(), strict=True)):
        cause = causes[index]
        saves, since_save = divmod(gap, costs.save_every + costs.stall)
        spent.save += saves * costs.stall
        spent.lost_work += since_save
        spent.train += saves * costs.save_every
        spent.detect += costs.hang if cause.sign is FailureSign.hang else costs.crash
        blamed = places[int(draw.integers(NODES))]
        code = UnhealthyNode.exit_code if cause.loses_node else RankKilled.exit_code
        # A start made progress over the previous one if it saved once.
        saved = number + int(saves > 0)
        history.append(Attempt(places, code, (blamed,), lost=cause.loses_node, from_step=number, saved_step=saved))
        decision = next_attempt(history, means)
        if isinstance(decision, GiveUp):
            raise RuntimeError(f"the policy gave up after {number + 1} interruptions: {decision.reason}")
        spent.recover += costs.start
        if isinstance(decision, Requeue):
            spent.requeues += 1
            spent.queue += costs.queue
            places, history = means.nodes[:NODES], []
        else:
            spent.restarts += 1
            places = decision.nodes
    return spent


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of replays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spares", type=int, nargs="+", default=[0, 16], help="spare nodes of the job")
    parser.add_argument("--start-s", type=float, nargs="+", default=[30, 60, 120, 300])
    parser.add_argument("--save-every-s", type=float, nargs="+", default=[60, 1800])
    parser.add_argument("--stall-s", type=float, default=0.5)
    parser.add_argument("--crash-s", type=float, default=2.0)
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--queue-s", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, default=3, help="replays per row; the table shows their mean")
    options = parser.parse_args(arguments)
    table = Table(box=SIMPLE_HEAD)
    for name in (
        "spares",
        "save every",
        "start",
        "effective",
        "lost work",
        "recover",
        "detect",
        "save",
        "queue",
        "requeues",
    ):
        table.add_column(name, justify="right")
    for spares, save_every, start in product(options.spares, options.save_every_s, options.start_s):
        costs = Costs(options.crash_s, options.hang_s, start, save_every, options.stall_s, options.queue_s)
        runs = [replay(costs, spares, seed) for seed in range(options.seeds)]
        share = {
            name: f"{100 * sum(getattr(run, name) / run.wall for run in runs) / len(runs):.2f}%"
            for name in _FOUND.values()
        }
        requeues = f"{sum(run.requeues for run in runs) / len(runs):.0f}"
        table.add_row(str(spares), f"{save_every:g} s", f"{start:g} s", *share.values(), requeues)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
