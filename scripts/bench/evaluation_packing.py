"""Simulates the evaluation of checkpoints on many tasks: the coordinator's rules against one job per task.

    python -m scripts.bench.evaluation_packing [--nodes 1 2 4 8] [--seeds 20] [--checkpoints 1] [--prior-error 0.3]

Acme's coordinator (Hu et al., arXiv 2403.07648, section 6.2) evaluates a 7B model on 63 datasets, and finishes 1.3
times (one node) and 1.8 times (four nodes) sooner than one job per dataset. The paper's text was not available here, so
the following is quoted from memory: these figures; that in an evaluation of a 7B model on HumanEval loading the model
and the data takes 29.5% of the time, and the metric 19% (42 s), while the GPU idles; that nodes of 8 GPUs share a link
of 25 Gb/s to the storage. Everything else is assumed:

- the inference time of a dataset is log-normal, median 113 s (the rest of HumanEval's) and sigma 1.0, limited to 10 s
  to 1 h: a heavy tail, in which one dataset of 63 takes about 15 minutes;
- the metric of one dataset in three is a computation (programs that are run, a judge), log-normal, median 42 s and
  sigma 1.0; that of the others takes 1 s;
- a process starts in 30 s (imports, data); 14 GB of weights take 4.5 s over an unshared link, 2 s from memory to a GPU;
- a unit costs 2 s in addition to its inference; a node has two CPU processes for metrics; tasks are submitted in any
  order;
- the coordinator's time estimates are wrong by a log-normal factor of sigma 0.3.

The simulator is `megads.tools.evaluate.packing_simulation`; the rules are those of a real evaluation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from megads.tools.evaluate.packing_simulation import (
    ONE_JOB_A_TASK,
    PackingRules,
    SimulatedCluster,
    SimulatedTask,
    lower_bound_s,
    simulate,
)
from scripts.bench.results import Verdict, add_results_option, record

TASKS, GPUS_A_NODE = 63, 8
PAPER = {1: 1.3, 4: 1.8}
"""Speedup over one job per task in the paper, by number of nodes."""
RULE_BY_RULE = {
    "one job a task": ONE_JOB_A_TASK,
    "+ cached once a node": PackingRules(decoupled=False, ordered=False, split=False),
    "+ metrics on CPUs": PackingRules(ordered=False, split=False),
    "+ longest first": PackingRules(split=False),
    "+ long tasks split": PackingRules(),
}
"""One job a task, and then one rule after the other, by what each adds."""
WITHOUT = {
    "all but staging": PackingRules(cached=False),
    "all but metrics on CPUs": PackingRules(decoupled=False),
    "all but longest first": PackingRules(ordered=False),
    "all but splitting": PackingRules(split=False),
}


def trace(seed: int, checkpoints: int, prior_error: float) -> list[SimulatedTask]:
    """Tasks on checkpoints, in submission order; task times are the same for every checkpoint."""
    draw = np.random.default_rng(seed)
    inference_s = np.clip(draw.lognormal(np.log(113.0), 1.0, TASKS), 10.0, 3600.0)
    computed = draw.random(TASKS) < 1 / 3
    metric_s = np.where(computed, draw.lognormal(np.log(42.0), 1.0, TASKS), 1.0)
    predicted_s, predicted_metric_s = (
        seconds * draw.lognormal(0.0, prior_error, TASKS) for seconds in (inference_s, metric_s)
    )
    return [
        SimulatedTask(
            f"step_{checkpoint}",
            f"task_{task:02d}",
            float(inference_s[task]),
            float(metric_s[task]),
            float(predicted_s[task]),
            pieces=1000,
            predicted_metric_s=float(predicted_metric_s[task]),
        )
        for checkpoint in range(checkpoints)
        for task in draw.permutation(TASKS)
    ]


def cluster(nodes: int) -> SimulatedCluster:
    """Nodes of 8 GPUs; see the module docstring."""
    return SimulatedCluster(
        nodes, GPUS_A_NODE, metric_workers=2, start_s=30.0, read_s=14e9 / (25e9 / 8), load_s=2.0, unit_s=2.0
    )


def makespans(nodes: int, seeds: int, checkpoints: int, prior_error: float) -> dict[str, np.ndarray]:
    """Seconds by rules, for every seed."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        tasks, where = trace(seed, checkpoints, prior_error), cluster(nodes)
        for name, rules in {**RULE_BY_RULE, **WITHOUT}.items():
            found.setdefault(name, []).append(simulate(tasks, where, rules).seconds)
        found.setdefault("lower bound", []).append(lower_bound_s(tasks, where))
    return {name: np.array(seconds) for name, seconds in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=20, help="number of random traces")
    parser.add_argument("--checkpoints", type=int, default=1)
    parser.add_argument(
        "--prior-error", type=float, default=0.3, help="sigma of the log-normal error of the time estimates"
    )
    add_results_option(parser)
    given = parser.parse_args(arguments)
    report(given.nodes, given.seeds, given.checkpoints, given.prior_error, given.append)


def report(nodes: Sequence[int], seeds: int, checkpoints: int, prior_error: float, append: Path | None) -> None:
    """Prints the means over the traces, and the speedups over one job per task."""
    by_nodes = {number: makespans(number, seeds, checkpoints, prior_error) for number in nodes}
    whole = list(RULE_BY_RULE)
    table = Table(box=SIMPLE_HEAD, title=f"{TASKS} tasks x {checkpoints} checkpoints: minutes, times shorter")
    table.add_column("rules", no_wrap=True)
    for number in nodes:
        table.add_column(f"{number} nodes", justify="right", no_wrap=True)
    for name in [*whole, *WITHOUT, "lower bound"]:
        cells = []
        for number in nodes:
            found = by_nodes[number]
            ratio = found[whole[0]] / found[name]
            cells.append(f"{found[name].mean() / 60:.1f} {ratio.mean():5.2f}")
        table.add_row(name, *cells, end_section=name in (whole[-1], list(WITHOUT)[-1]))
    Console().print(table)
    verdicts = []
    for number in nodes:
        found = by_nodes[number]
        ratio = found[whole[0]] / found[whole[-1]]
        print(
            f"{number} nodes: {ratio.mean():.2f} times shorter (of {seeds} traces {ratio.min():.2f} to "
            f"{ratio.max():.2f}); {(found[whole[-1]] / found['lower bound']).mean():.2f} of the lower bound"
        )
        ours, theirs = (f"{found[name].mean() / 60:.1f} min" for name in (whole[-1], whole[0]))
        work = f"evaluation, {TASKS} tasks x {checkpoints}, {number} x {GPUS_A_NODE} GPUs, simulated"
        wanted = PAPER.get(number) if checkpoints == 1 else None
        verdicts.append(Verdict(0, work, ours, whole[0], theirs, float(ratio.mean()), wanted))
    record(append, "evaluation_packing", {"nodes": list(nodes), "seeds": seeds, "checkpoints": checkpoints}, verdicts)


if __name__ == "__main__":
    main()
