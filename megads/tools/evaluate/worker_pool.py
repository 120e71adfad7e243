"""Runs the workers of one machine, with restarts.

A local coordinator does so in its own process; on SLURM every task of the job array does:
`python -m megads.tools.evaluate.worker_pool <folder>`. With --role it is one of the workers.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from megads.api import EXIT_BUG, EXIT_OK, ConfigError, MegadsError, available_core_numbers
from megads.runtime.environment import HIDDEN_GPUS, openmp_wait_variables
from megads.runtime.machine_memory import visible_gpus
from megads.tools.evaluate.config import EvaluateConfig
from megads.tools.evaluate.evaluation_plan import EvaluationPlan
from megads.tools.evaluate.work_queue import METRICS, MODEL, QueueState, WorkQueue
from megads.tools.generate import print_line
from megads.tools.jobs import ChildProcesses, MachineShare, machine_shares

_POLL_S = 0.5


def model_shares(config: EvaluateConfig) -> list[MachineShare]:
    """Shares of this machine, one for each model worker.

    Raises:
        ConfigError: there are fewer GPUs than workers, or device=cuda without a GPU.
    """
    if config.device.startswith("cuda:"):
        raise ConfigError(f"device = {config.device}: each worker takes its own GPU; give auto, cpu or cuda")
    gpus = [] if config.device == "cpu" else visible_gpus()
    if config.device == "cuda" and not gpus:
        raise ConfigError("device = cuda, but no GPU is visible: give device=cpu, or auto")
    workers = config.workers or len(gpus) or 1
    if gpus and workers > len(gpus):
        raise ConfigError(f"workers = {workers}: there are {len(gpus)} GPUs, and each worker takes one")
    shares = machine_shares(available_core_numbers(), gpus[:workers], workers)
    return shares if gpus else [replace(share, variables=HIDDEN_GPUS) for share in shares]


def run_workers(
    config: EvaluateConfig, queue: WorkQueue, tag: str = "", show: Callable[[QueueState], None] = lambda _state: None
) -> None:
    """Runs workers until every task has its metrics or has failed, or no worker is left to continue.

    Args:
        config: config of the workers.
        queue: work queue.
        tag: prefix of the names of the workers' logs.
        show: called with every state of the queue.
    """
    roles, shares = dict[str, str](), dict[str, MachineShare]()
    for number, share in enumerate(model_shares(config)):
        roles[f"{tag}model-{number}"], shares[f"{tag}model-{number}"] = MODEL, share
    for number in range(config.metric_workers):
        name = f"{tag}metrics-{number}"
        roles[name], shares[name] = METRICS, MachineShare(variables=HIDDEN_GPUS)
    # They apply before a worker imports torch and tqdm.
    quiet = {"TQDM_DISABLE": "1", **openmp_wait_variables()}
    starts, missing = Counter[str](), set(roles)
    with ChildProcesses() as processes:
        while not (state := queue.read_state()).is_over():
            show(state)
            for name in sorted(missing):
                log, share = queue.folder / "logs" / f"{name}.log", shares[name]
                command = ("-m", "megads.tools.evaluate.worker_pool", str(queue.folder), "--role", roles[name])
                processes.start(name, command, log, replace(share, variables={**share.variables, **quiet}))
                starts[name] += 1
            missing.clear()
            if not state.has_useful_workers({roles[name] for name in processes.names}):
                return
            time.sleep(_POLL_S)
            for name, code in processes.ended().items():
                if code != EXIT_OK:
                    gave_up = starts[name] >= config.attempts
                    end = "that was its last start" if gave_up else "it is started again"
                    print_line(f"worker {name} ended with {code}, see {queue.folder / 'logs' / f'{name}.log'}; {end}")
                    missing |= set() if gave_up else {name}


def main() -> NoReturn:
    """Runs the workers of this node, or one of them, until the evaluation is over or they can do no remaining work."""
    parser = argparse.ArgumentParser(prog="python -m megads.tools.evaluate.worker_pool")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", default="", help="prefix of the names of logs")
    parser.add_argument("--role", choices=(MODEL, METRICS), help="be a worker of this role")
    given = parser.parse_args()
    # Exits on SIGTERM, so that a pool stops its workers and a worker releases its locks.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    plan = EvaluationPlan.read(given.folder)
    queue = WorkQueue(given.folder, plan.units, plan.config.attempts)
    if given.role is None:
        run_workers(plan.config, queue, given.tag)
    else:
        # It imports lm-eval.
        from megads.tools.evaluate.worker import run_worker

        run_worker(plan, queue, given.role)
    sys.exit(EXIT_OK)


if __name__ == "__main__":
    try:
        main()
    except MegadsError as error:
        print(f"megads: {error}", file=sys.stderr)
        sys.exit(error.exit_code or EXIT_BUG)
