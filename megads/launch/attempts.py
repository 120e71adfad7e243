"""Starts a run's ranks, again after a fault, on other nodes where one is lost; resilience/restarts.py decides."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.checkpoint.config import LATEST_FILE, checkpoints_folder, step_of
from megads.config import RootConfig, planned_steps
from megads.errors import Preempted, UnhealthyNode
from megads.launch.launcher import LaunchSpec, launch
from megads.launch.node_check.check import CheckTarget, check_nodes
from megads.launch.node_check.config import CheckNodesConfig
from megads.launch.placement import SlurmPlacement
from megads.launch.rank_outcome import Outcome
from megads.launch.rank_server import RankServer
from megads.launch.scheduler import Deadline, Scheduler
from megads.launch.slurm_scheduler import SlurmScheduler
from megads.monitor.console import Console
from megads.monitor.console_choice import open_console
from megads.resilience.restarts import Attempt, GiveUp, Means, Requeue, Restart, first_attempt, next_attempt
from megads.runtime import environment
from megads.runtime.config import parse_duration
from megads.runtime.files import read_regular
from megads.runtime.lease import Lease
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE
from megads.runtime.slurm import time_left_s


@dataclass(frozen=True)
class Ended:
    """How a job's part in a run ended.

    Attributes:
        exit_code: as documented.
        excluded: nodes that the job should not get again.
    """

    exit_code: int
    excluded: tuple[str, ...] = ()


class Attempts:
    """All starts of the ranks of one run in one job, or on this machine.

    Args:
        config: as frozen.
        spec: what to start.
        placement: where on SLURM; None for this machine.
        lease: hold on the run directory.
        server: forks ranks on this machine, in every attempt.
    """

    def __init__(
        self,
        config: RootConfig,
        spec: LaunchSpec,
        placement: SlurmPlacement | None,
        lease: Lease,
        server: RankServer | None = None,
    ):
        self._config, self._spec, self._placement, self._lease = config, spec, placement, lease
        self._server = server
        self._run_dir = Path(str(config.run.dir))
        self._history: list[Attempt] = []
        self._rejected: dict[str, str] = {}
        self._from_step = 0
        self._means = Means(
            nodes=tuple(node.name for node in placement.allocation.nodes) if placement else (environment.node_name(),),
            needed=len(placement.nodes) if placement else 1,
            max_restarts=config.cluster.restarts,
            queue=placement is not None and not config.cluster.chain,
        )

    def run(self, console: Console) -> Ended:
        """Starts the ranks until nothing follows.

        Args:
            console: shows the first attempt; others open their own.
        """
        if self._placement is not None and self._config.cluster.checks_nodes:
            first = self._first_places(console)
            if first is not None:
                return first
        outcome = self._start(console)
        while True:
            self._history.append(self._attempt(outcome))
            decision = next_attempt(self._history, self._means)
            if isinstance(decision, Restart) and self._config.cluster.checks_nodes:
                # Once more, knowing more: a node may be gone without having been blamed.
                self._check(decision.excluded)
                self._history[-1] = self._attempt(outcome)
                decision = next_attempt(self._history, self._means)
            if isinstance(decision, GiveUp):
                return self._give_up(decision, outcome)
            if isinstance(decision, Requeue):
                self._note("requeue", outcome, decision.excluded)
                return Ended(Preempted.exit_code, decision.excluded)
            outcome = self._again(decision, outcome)

    def _first_places(self, console: Console) -> Ended | None:
        """Checks the nodes before anything runs on them; returns the end where they are too few."""
        assert self._placement is not None
        console.say(f"checking the health of {len(self._means.nodes)} nodes")
        self._check(())
        places = [node.name for node in self._placement.nodes]
        decision = first_attempt(places, self._rejected, self._means)
        if isinstance(decision, Restart):
            self._placement = self._placement.on(decision.nodes)
            return None
        outcome = Outcome(UnhealthyNode.exit_code, None, "; ".join(self._rejected.values()), tuple(self._rejected))
        if isinstance(decision, GiveUp):
            return self._give_up(decision, outcome)
        self._note("requeue", outcome, decision.excluded)
        return Ended(Preempted.exit_code, decision.excluded)

    def _check(self, excluded: Collection[str]) -> None:
        """Asks the nodes of the job that are still in use; notes those that are not fit."""
        placement = self._placement
        if placement is None:
            return
        allocation = placement.allocation
        asked = tuple(name for name in self._means.nodes if name not in excluded and name not in self._rejected)
        cluster = self._config.cluster
        options, wrapper = tuple(cluster.srun_options), tuple(cluster.wrapper)
        place = CheckTarget(asked, allocation.nodes[0].address, allocation, options, wrapper)
        begin = time.monotonic()
        rejected = check_nodes(CheckNodesConfig(folder=str(self._run_dir)), place).rejected
        with closing(EventWriter(self._run_dir)) as events:
            took_s = time.monotonic() - begin
            events.write("nodes_checked", level="debug", nodes=list(asked), rejected=rejected, check_s=took_s)
        for node, reason in rejected.items():
            print(f"megads: node {node} is not fit to train: {reason}", file=sys.stderr, flush=True)
        self._rejected |= rejected

    def _again(self, decision: Restart, outcome: Outcome) -> Outcome:
        """Starts the ranks once more."""
        self._lease.renew()
        self._spec = dataclasses.replace(self._spec, lease=self._lease.number)
        where = {"nodes": list(decision.nodes)} if self._placement else {}
        self._note("restart", outcome, decision.excluded, restart=len(self._history), **where)
        if self._placement is not None:
            self._placement = self._placement.on(decision.nodes)
        title, steps = str(self._config.run.id), planned_steps(self._config)
        with open_console(self._run_dir, sys.stdout, self._config.logging, title, steps) as console:
            excluded = f", without {', '.join(decision.excluded)}" if decision.excluded else ""
            console.say(f"restart {len(self._history)} from the last checkpoint{excluded}", "warning")
            return self._start(console)

    def _start(self, console: Console) -> Outcome:
        placement, lease = self._placement, self._lease
        self._from_step = self._saved_step()
        if placement is None:
            scheduler = Scheduler(lease, self._deadline(lambda: None))
            return launch(self._spec, console, scheduler=scheduler, server=self._server)
        console.say(str(placement))
        deadline = self._deadline(lambda: time_left_s(placement.allocation.job.id))
        scheduler = SlurmScheduler(placement.allocation, lease, deadline)
        return launch(self._spec, console, placement.ranks(self._spec, self._config), scheduler)

    def _deadline(self, time_left: Callable[[], float | None]) -> Deadline:
        """The time limits of this start."""
        run = self._config.run
        limit_s = parse_duration(run.exit_after) if run.exit_after is not None else None
        return Deadline(self._run_dir, limit_s, time_left, run.save_before_limit_s, run.stop_timeout_s)

    def _attempt(self, outcome: Outcome) -> Attempt:
        """What the policy has to know of an attempt."""
        nodes = tuple(node.name for node in self._placement.nodes) if self._placement else self._means.nodes
        return Attempt(
            nodes,
            outcome.exit_code,
            outcome.nodes,
            outcome.lost,
            dict(self._rejected),
            outcome.stopping,
            self._from_step,
            self._saved_step(),
        )

    def _give_up(self, decision: GiveUp, outcome: Outcome) -> Ended:
        if decision.reason:
            self._note("gave_up", outcome, (), reason=decision.reason, exit_code=decision.exit_code, level="error")
            print(f"megads: not started again: {decision.reason}", file=sys.stderr, flush=True)
        return Ended(decision.exit_code)

    def _note(self, event: str, outcome: Outcome, excluded: tuple[str, ...], **fields: Any) -> None:
        """Records what follows a fault, with what it was and what it cost."""
        detected, last, saved = time.time(), self._last_step(), self._saved_step()
        with closing(EventWriter(self._run_dir)) as events:
            events.write(
                event,
                **({"level": "warning"} | fields),
                cause=outcome.message,
                blamed=list(outcome.nodes),
                excluded=list(excluded),
                first_sign=outcome.first_sign_s,
                detected=detected,
                last_step=last,
                from_step=saved,
                lost_steps=max(0, last - saved),
            )

    def _last_step(self) -> int:
        """The last step that is recorded."""
        return max((int(line["step"]) for line in read_json_lines(self._run_dir / METRICS_FILE)), default=0)

    def _saved_step(self) -> int:
        """The step of the newest checkpoint that was committed."""
        try:
            name = read_regular(checkpoints_folder(self._run_dir) / LATEST_FILE).decode(errors="replace").strip()
        except OSError:
            return 0
        return step_of(Path(name)) or 0
