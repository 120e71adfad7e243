"""Starts of the ranks of one run in one job: the first, and those after a failure, a rollback or a phase."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.config.frozen import config_digest
from megads.config.root import RootConfig, learning_rate, planned_steps
from megads.engine.deepspeed_options import uses_deepspeed
from megads.errors import EXIT_BUG, EXIT_OK, CheckpointError, Preempted, RollBack, StopRequested, UnhealthyNode
from megads.launch.acceptance import AcceptedStart, discard_after_rollback, following_phase
from megads.launch.external_ranks import ExternalRanks, ExternalScheduler
from megads.launch.hang_detection import hang_settings
from megads.launch.in_process import InProcessRank
from megads.launch.launcher import LaunchSpec, launch
from megads.launch.layout import useful_threads
from megads.launch.object_storage import object_storage
from megads.launch.preflight import ResolvedRun, data_fault, saved_step
from megads.launch.rank import TRAIN
from megads.launch.rank_outcome import Outcome
from megads.launch.rank_server import RankServer
from megads.launch.run_length import warmup_warnings
from megads.launch.scheduler import Deadline, Scheduler, SlurmScheduler, stop_exit_code
from megads.monitor.console import Console, open_console
from megads.monitor.eta import Intervals
from megads.monitor.trackers import enabled_trackers
from megads.resilience.restarts import Attempt, GiveUp, Requeue, Restart, RestartMeans, first_attempt, next_attempt
from megads.runtime import environment, progress
from megads.runtime.config import ConsoleKind, parse_duration
from megads.runtime.lease import Lease
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.optional_tools import require_tool
from megads.runtime.run_dir import EVENTS_FILE, METRICS_FILE
from megads.runtime.slurm import time_left_s
from megads.runtime.stop import PREEMPTED

_PAUSE_POLL_S = 0.1
_SAVES = 20


@dataclass(frozen=True)
class JobEnd:
    """How the part of a run in one job ended.

    Attributes:
        exit_code: documented exit code.
        excluded: nodes to exclude from the job's next start.
    """

    exit_code: int
    excluded: tuple[str, ...] = ()


def open_run_console(resolved: ResolvedRun) -> Console:
    """Opens the console of one start of a run."""
    config = resolved.config
    planned = planned_steps(config) if config.train.length_is_known else None
    intervals = Intervals(config.evaluation.every_steps, config.evaluation.at_end, config.checkpoint.every_steps)
    logging = config.logging
    if config.cluster.in_process and logging.console is ConsoleKind.auto:
        # A panel would be drawn over the debugger.
        logging = dataclasses.replace(logging, console=ConsoleKind.plain)
    return open_console(resolved.run_dir, sys.stdout, logging, str(config.run.id), planned, intervals)


def print_plan(accepted: AcceptedStart, console: Console) -> None:
    """Reports the length of train.minutes, changes since the last start, and a warmup that does not fit the run."""
    accepted.print_changes(console.print_line)
    config = accepted.resolved.config
    # Only a dry run warns of a missing warmup, which may be intended and need not be repeated at every start.
    if config.train.length_is_known and learning_rate(config).warmup:
        for text in warmup_warnings(config):
            console.print_line(text, "warning")


def launch_spec(config: RootConfig) -> LaunchSpec:
    """Returns the launch spec of a resolved config whose data is prepared; without a length, of a timing start."""
    run_dir, times = str(config.run.dir), not config.train.length_is_known
    tracked = bool(enabled_trackers(config.logging)) and not times
    entry = ("--entry", "megads.launch.step_timing:time_steps") if times else ()
    return LaunchSpec(
        run_dir=Path(run_dir),
        num_ranks=config.parallel.world_size,
        command=("-m", "megads.launch.rank", run_dir, "--digest", config_digest(config), *entry),
        threads_per_rank=config.cluster.threads_per_rank,
        useful_threads=useful_threads(config),
        side_command=("-m", "megads.tools.trackers.process", run_dir, "--follow") if tracked else (),
        flush_s=config.logging.flush_s,
        heartbeat_timeout_s=None if config.cluster.is_debugged else config.cluster.heartbeat_timeout_s,
        hangs=hang_settings(config),
        kills_hung=config.cluster.kills_hung,
        ranks_per_gpu=config.cluster.ranks_per_gpu,
        one_hardware_queue=config.parallel.zero_stage < 3,
        deepspeed=uses_deepspeed(config.resolved_engine, config.optim.impl),
        cause_of_bus_error=lambda: data_fault(config),
        cpu=environment.rehearsal_folder() is not None,  # it may have more ranks than this machine has GPUs
    )


def in_process_rank(spec: LaunchSpec) -> InProcessRank:
    """Returns the rank of a run that trains in this process."""
    _, _, run_dir, _, digest, *entry = spec.command
    return InProcessRank(spec.node_part(1), (Path(run_dir), digest, entry[-1] if entry else TRAIN))


def wait_for_restart(wait_s: float) -> int | None:
    """Waits before the next start; a signal ends the wait and the run, which keeps its last checkpoint.

    Returns:
        The run's exit code after a signal; None after the wait.
    """
    if not wait_s:
        return None
    print(f"megads: the next start is in {wait_s:.0f} s", file=sys.stderr, flush=True)
    noted: list[int] = []
    caught = Scheduler.signals if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _frame: noted.append(number)) for number in caught}
    try:
        deadline = time.monotonic() + wait_s
        while not noted and time.monotonic() < deadline:
            time.sleep(_PAUSE_POLL_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if not noted:
        return None
    preempted = Scheduler().reason(signal.Signals(noted[0])) == PREEMPTED
    return Preempted.exit_code if preempted else StopRequested.exit_code


class Attempts:
    """All starts of the ranks of one run in one job, or on this machine; megads.resilience decides about restarts.

    Args:
        resolved: the run, with a frozen config.
        lease: lease on the run directory.
        server: rank server on this machine, for all attempts.
        accept: accepts the start again after a timing start and after a rollback.
    """

    def __init__(
        self,
        resolved: ResolvedRun,
        lease: Lease,
        server: RankServer | None = None,
        accept: Callable[[], AcceptedStart] | None = None,
    ):
        self._accept = accept
        config, placement = resolved.config, resolved.placement
        self.resolved, self._lease, self._server = resolved, lease, server
        self._config, self._run_dir, self._placement = config, resolved.run_dir, placement
        self._spec = dataclasses.replace(launch_spec(config), lease=lease.number)
        self._history: list[Attempt] = []
        self._rejected: dict[str, str] = {}
        self._from_step, self._began = 0, time.monotonic()
        self._means = RestartMeans(
            nodes=tuple(node.name for node in placement.allocation.nodes) if placement else (environment.node_name(),),
            needed=len(placement.nodes) if placement else 1,
            # A platform restarts the processes itself.
            max_restarts=config.cluster.restarts if resolved.meeting is None else 0,
            queue=placement is not None and not config.cluster.chain,
        )

    def run(self, console: Console) -> JobEnd:
        """Starts the ranks, and again until no further start follows.

        Args:
            console: console of the first attempt; later attempts open their own.
        """
        if self._placement is not None and self._config.cluster.checks_nodes:
            first = self._first_places(console)
            if first is not None:
                return first
        outcome = self._start(console)
        if outcome.exit_code == CheckpointError.exit_code and self._lost_is_restored(console):
            self._history.append(self._attempt(outcome))
            outcome = self._again(Restart(tuple(self._attempt(outcome).nodes)), outcome)
        while True:
            if (
                outcome.exit_code == RollBack.exit_code
                and discard_after_rollback(self._run_dir)
                and self._accept is not None
            ):
                if outcome.stopping:
                    return JobEnd(Preempted.exit_code)
                outcome = self._roll_back(self._accept())
                continue
            self._history.append(self._attempt(outcome))
            decision = next_attempt(self._history, self._means)
            if isinstance(decision, Restart) and self._config.cluster.checks_nodes:
                # Decided again after the check, which may find a lost node that was not blamed.
                self._check(decision.excluded)
                self._history[-1] = self._attempt(outcome)
                decision = next_attempt(self._history, self._means)
            if isinstance(decision, GiveUp):
                return self._give_up(decision, outcome)
            if isinstance(decision, Requeue):
                self._note("requeue", outcome, decision.excluded)
                return JobEnd(Preempted.exit_code, decision.excluded)
            if (code := wait_for_restart(decision.wait_s)) is not None:
                return JobEnd(code)
            outcome = self._again(decision, outcome)

    def _lost_is_restored(self, console: Console) -> bool:
        return object_storage(self.resolved.asked).restore_lost(self._config, console)

    def _first_places(self, console: Console) -> JobEnd | None:
        """Checks the nodes before the first start; returns the end of the job if too few are healthy."""
        assert self._placement is not None
        console.print_line(f"checking the health of {len(self._means.nodes)} nodes")
        progress.enter("checking the nodes")
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
        return JobEnd(Preempted.exit_code, decision.excluded)

    def _check(self, excluded: Collection[str]) -> None:
        """Runs the health check on the nodes of the job that are still in use; records those that are rejected."""
        placement = self._placement
        if placement is None:
            return
        allocation = placement.allocation
        asked = tuple(name for name in self._means.nodes if name not in excluded and name not in self._rejected)
        cluster = self._config.cluster
        options, wrapper = tuple(cluster.srun_options), tuple(cluster.wrapper)
        tool = require_tool("doctor.node_check", "cluster.check_nodes")
        place = tool.CheckTarget(asked, allocation.nodes[0].address, allocation, options, wrapper)
        begin = time.monotonic()
        rejected: dict[str, str] = tool.check_nodes(tool.CheckNodesConfig(folder=str(self._run_dir)), place).rejected
        with closing(EventWriter(self._run_dir)) as events:
            took_s = time.monotonic() - begin
            events.write("nodes_checked", level="debug", nodes=list(asked), rejected=rejected, check_s=took_s)
        for node, reason in rejected.items():
            print(f"megads: node {node} is not fit to train: {reason}", file=sys.stderr, flush=True)
        self._rejected |= rejected

    def _roll_back(self, accepted: AcceptedStart) -> Outcome:
        """Restarts the ranks from the checkpoint that they decided on, skipping the samples that they named."""
        self._take(accepted)
        with open_run_console(self.resolved) as console:
            step = saved_step(self._run_dir, self._config.checkpoint.load)
            console.print_line(f"rolled back to step {step}", "warning")
            return self._start(console)

    def _take(self, accepted: AcceptedStart) -> None:
        """Records another accepted start, which the next ranks execute."""
        accepted.record()
        self.resolved = dataclasses.replace(accepted.resolved, placement=self._placement)
        self._config = accepted.resolved.config
        self._spec = launch_spec(self._config)
        self._renew_lease()

    def _renew_lease(self) -> None:
        self._lease.renew()
        self._spec = dataclasses.replace(self._spec, lease=self._lease.number)

    def _again(self, decision: Restart, outcome: Outcome) -> Outcome:
        """Restarts the ranks."""
        self._renew_lease()
        if self._spec.hangs is not None:
            hangs = dataclasses.replace(self._spec.hangs, patience=decision.patience)
            self._spec = dataclasses.replace(self._spec, hangs=hangs)
        where = {"nodes": list(decision.nodes)} if self._placement else {}
        self._note("restart", outcome, decision.excluded, restart=self._restarts, **where)
        if self._placement is not None:
            self._placement = self._placement.on(decision.nodes)
        with open_run_console(self.resolved) as console:
            excluded = f", without {', '.join(decision.excluded)}" if decision.excluded else ""
            console.print_line(f"restart {self._restarts} from the last checkpoint{excluded}", "warning")
            return self._start(console)

    @property
    def _restarts(self) -> int:
        """Number of failed attempts."""
        return sum(attempt.exit_code != EXIT_OK for attempt in self._history)

    def _start(self, console: Console) -> Outcome:
        """Starts the ranks, and again after a timing start and after every training phase, from its checkpoint."""
        self._began = time.monotonic()
        outcome = self._start_once(console)
        if outcome.exit_code == EXIT_OK and not self._config.train.length_is_known and self._accept is not None:
            if outcome.stopping:
                return dataclasses.replace(outcome, exit_code=stop_exit_code(self._run_dir))
            self._take(accepted := self._accept())
            with open_run_console(self.resolved) as timed:
                print_plan(accepted, timed)
                outcome = self._start_once(timed)
        while outcome.exit_code == EXIT_OK and (phase := following_phase(self._run_dir)):
            if outcome.stopping:
                return dataclasses.replace(outcome, exit_code=stop_exit_code(self._run_dir))
            self._history.append(self._attempt(outcome))
            self._renew_lease()
            with open_run_console(self.resolved) as following:
                following.print_line(f"starting training phase {phase}")
                outcome = self._start_once(following)
        return outcome

    def _start_once(self, console: Console) -> Outcome:
        placement, lease = self._placement, self._lease
        self._from_step = self._saved_step()
        if self._spec.hangs is not None:
            hangs = dataclasses.replace(self._spec.hangs, saves_s=save_durations(self._run_dir))
            self._spec = dataclasses.replace(self._spec, hangs=hangs)
        if (meeting := self.resolved.meeting) is not None:
            ranks = ExternalRanks(self._spec.node_part(meeting.sharing), meeting)
            return launch(self._spec, console, ranks, ExternalScheduler(lease, self._deadline(lambda: None)))
        if placement is None:
            scheduler = Scheduler(lease, self._deadline(lambda: None))
            rank = in_process_rank(self._spec) if self._config.cluster.in_process else None
            return launch(self._spec, console, rank, scheduler, self._server)
        console.print_line(str(placement))
        deadline = self._deadline(lambda: time_left_s(placement.allocation.job.id))
        scheduler = SlurmScheduler(placement.allocation, lease, deadline)
        return launch(self._spec, console, placement.ranks(self._spec, self._config), scheduler)

    def _deadline(self, time_left: Callable[[], float | None]) -> Deadline:
        """Returns the time limits of this start."""
        run = self._config.run
        limit_s = None
        if run.exit_after is not None:
            # The limit covers all training phases of this start.
            limit_s = max(1.0, parse_duration(run.exit_after) - (time.monotonic() - self._began))
        return Deadline(self._run_dir, limit_s, time_left, run.save_before_limit_s, run.stop_timeout_s)

    def _attempt(self, outcome: Outcome) -> Attempt:
        """Returns the attempt as input of the restart policy."""
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
            self._last_step(),
            outcome.message.partition("\n")[0] if outcome.exit_code == EXIT_BUG and outcome.signal is None else "",
            outcome.hung,
        )

    def _give_up(self, decision: GiveUp, outcome: Outcome) -> JobEnd:
        if decision.reason:
            self._note("gave_up", outcome, (), reason=decision.reason, exit_code=decision.exit_code, level="error")
            print(f"megads: not started again: {decision.reason}", file=sys.stderr, flush=True)
        return JobEnd(decision.exit_code)

    def _note(self, event: str, outcome: Outcome, excluded: tuple[str, ...], **fields: Any) -> None:
        """Records the reaction to a failure, with its cause and the lost steps."""
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
        """Last step in metrics.jsonl."""
        return max((int(line["step"]) for line in read_json_lines(self._run_dir / METRICS_FILE)), default=0)

    def _saved_step(self) -> int:
        """Step of the newest checkpoint; local checkpoints count only if all ranks are on this machine."""
        saved, config = saved_step(self._run_dir, self._config.checkpoint.load), self._config.checkpoint
        if not config.local_every_steps or self._placement is not None:
            return saved
        from megads.checkpoint.local_files import held_in_memory

        return max(saved, held_in_memory(Path(config.local_folder), self._run_dir)[0])


def save_durations(run_dir: Path) -> tuple[float, ...]:
    """Returns how long the last saves of a run took, in seconds."""
    events = read_json_lines(run_dir / EVENTS_FILE)
    return tuple([float(event["save_s"]) for event in events if "save_s" in event][-_SAVES:])
