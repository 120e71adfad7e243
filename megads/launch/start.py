"""Starts a run: resolves it, freezes its config, starts its ranks, and restarts them after a failure."""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.config import RootConfig, check_config, learning_rate, planned_steps
from megads.engine.deepspeed_options import build_adam
from megads.errors import (
    EXIT_BUG,
    EXIT_OK,
    CheckpointError,
    ConfigError,
    MegadsError,
    Preempted,
    RankKilled,
    RestartsExhausted,
    RollBack,
    StopRequested,
    UnhealthyNode,
)
from megads.frozen_config import config_digest
from megads.launch.acceptance import (
    AcceptedStart,
    accept_start,
    finish_rollback,
    finished_text,
    following_stage,
    leave_behind,
)
from megads.launch.dry_run_warnings import warmup_warnings
from megads.launch.hang_detection import hang_settings
from megads.launch.launcher import EXIT_KILLED, LaunchSpec, launch
from megads.launch.node_check import CheckNodesConfig, CheckTarget, check_nodes
from megads.launch.preflight import (
    ResolvedRun,
    build_index_maps,
    data_fault,
    prepare_data,
    refuse_early,
    resolve_run,
    saved_step,
    stopping_files,
)
from megads.launch.rank_outcome import Outcome
from megads.launch.rank_server import RankServer
from megads.launch.run_plan import refuse_unfit, useful_threads
from megads.launch.scheduler import Deadline, Scheduler, SlurmScheduler, code_of_stop
from megads.launch.slurm_ranks import SlurmPlacement, find_placement
from megads.launch.uploads import prepare_checkpoints, restore_lost, uploading
from megads.monitor.console import Console
from megads.monitor.eta import Intervals
from megads.monitor.trackers import wanted_trackers
from megads.ops.config import Implementation
from megads.ops.resolve import prepare
from megads.resilience.restarts import Attempt, GiveUp, Means, Requeue, Restart, first_attempt, next_attempt
from megads.runtime import environment, progress
from megads.runtime.config import ConsoleKind, parse_duration
from megads.runtime.lease import Lease, claimed, refuse_in_use
from megads.runtime.machine_memory import may_have_gpus
from megads.runtime.metrics import EventWriter, read_json_lines
from megads.runtime.run_dir import METRICS_FILE, refuse_unwritable
from megads.runtime.slurm import time_left_s
from megads.runtime.stop import PREEMPTED
from megads.runtime.url import is_url

_PAUSE_POLL_S = 0.1
_INTERRUPTED = (
    EXIT_KILLED,
    *(kind.exit_code for kind in (StopRequested, Preempted, RestartsExhausted, UnhealthyNode, RankKilled)),
)
"""Exit codes of runs that the same command can continue."""


@dataclass(frozen=True)
class StartRequest:
    """Parameters of a start that are not in its config.

    Attributes:
        choices: selected option of each config group, None for none.
        claimed_dirs: values of run.dir or run.id of earlier points of the same sweep; shared by all its points.
        describe: returns the text that a dry run shows.
    """

    choices: Mapping[str, str | None]
    claimed_dirs: set[str]
    describe: Callable[[ResolvedRun], str]


@dataclass(frozen=True)
class _Ended:
    """How the part of a run in one job ended.

    Attributes:
        exit_code: documented exit code.
        excluded: nodes to exclude from the job's next start.
    """

    exit_code: int
    excluded: tuple[str, ...] = ()


def start_run(asked: RootConfig, start: StartRequest) -> int:
    """Starts or resumes the run that the config describes, and returns its exit code.

    Raises:
        MegadsError: the run cannot be started; the SLURM job has been requeued, or its chain ended, if necessary.
    """
    quiet = asked.logging.console is ConsoleKind.quiet or asked.logging.level in ("warning", "error")
    progress.configure(quiet=quiet, plain_on_stdout=not asked.run.dry_run)
    progress.enter("planning the run")
    try:
        return _start(asked, start)
    finally:
        progress.leave()
        progress.configure(quiet=False, plain_on_stdout=False)


def _start(asked: RootConfig, start: StartRequest) -> int:
    check_config(asked)
    placement = None if asked.run.prepare_only else find_placement(asked)
    try:
        with _early_server(asked, placement) as server:
            _refuse_shared_place(asked, start.claimed_dirs)
            resolved = resolve_run(asked, start.choices, placement)
            if asked.run.dry_run:
                accepted = _preview(resolved)
                print(start.describe(accepted.resolved if accepted else resolved))
                if accepted:
                    accepted.say_changes(lambda text, _level: print(text))
                if resolved.planned.model.vocab_size is not None:
                    refuse_unfit(resolved.planned, resolved.machine)
                return EXIT_OK
            ended = _run(resolved, server)
            # After the run directory is released for the next job.
            _requeue(placement, resolved.config, ended)
            return ended.exit_code
    except MegadsError as error:
        _requeue(placement, asked, _Ended(error.exit_code))
        raise


@contextmanager
def _early_server(config: RootConfig, placement: SlurmPlacement | None) -> Iterator[RankServer | None]:
    """Starts a rank server, which imports while the launcher checks the run; None if it does not fork the ranks."""
    if placement is not None or config.run.dry_run or config.run.prepare_only or may_have_gpus():
        yield None
        return
    ranks, cluster = config.parallel.world_size, config.cluster
    threads = environment.threads_of_rank(ranks, cluster.threads_per_rank, useful_threads(config))
    server = RankServer(environment.rank_variables(threads, cuda=False))
    try:
        yield server
    finally:
        server.close()


def _run(resolved: ResolvedRun, server: RankServer | None) -> _Ended:
    """Prepares and starts the run; returns how it ended."""
    config, placement = resolved.config, resolved.placement
    job = placement.allocation.job if placement else None
    if not config.run.prepare_only:
        refuse_early(resolved)
        refuse_unwritable(resolved.run_dir)
        refuse_in_use(resolved.run_dir, job)
    with _open_console(resolved) as console:
        console.say(f"run {config.run.id} in {resolved.run_dir}, {config.parallel.world_size} ranks")
        for choice in resolved.choices:
            console.say(choice)
        kernels = prepare(config.ops, console.say, cuda=resolved.machine.per_gpu, optimizer=config.optim.impl)
        # A warning if faster kernels are unavailable, such as without a compiler.
        console.say(kernels.text, "warning" if kernels.reason else "info")
        if config.optim.impl is Implementation.deepspeed:
            build_adam(console.say, cuda=resolved.machine.per_gpu)
        if not config.run.prepare_only:
            prepare_checkpoints(config, resolved.asked.checkpoint.load, console, job)
        progress.enter("checking the data")
        if not config.run.prepare_only:
            finish_rollback(resolved.run_dir, job)
        prepared = prepare_data(resolved, console)
        accepted = accept_start(prepared)
        resolved = accepted.resolved
        if config.run.prepare_only:
            build_index_maps(resolved.config, console)
            return _Ended(EXIT_OK)
        if finished := accepted.finished():
            console.say(finished)
            return _Ended(EXIT_OK)
        _say_plan(accepted, console)
        with claimed(resolved.run_dir, job) as lease:
            accepted.record()
            with uploading(resolved.config, placement.allocation if placement else None) as uploads:
                again = dataclasses.replace(prepared, made=None)
                attempts = _Attempts(resolved, lease, server, lambda: accept_start(again))
                ended = attempts.run(console)
                if uploads is not None:
                    uploads.finish(ended.exit_code, console)
        _say_what_follows(attempts.resolved, ended, console)
        return ended


def _preview(resolved: ResolvedRun) -> AcceptedStart | None:
    """Accepts or refuses the run of a dry run as a start would; None if the data that this needs is missing."""
    known = dataclasses.replace(resolved, config=resolved.planned)
    # A start would fetch it.
    unseen = is_url(resolved.asked.checkpoint.load) and not Path(known.config.checkpoint.load).is_dir()
    if known.config.model.vocab_size is None or not resolved.data.made or unseen:
        return None
    return accept_start(known)


def _say_what_follows(resolved: ResolvedRun, ended: _Ended, console: Console) -> None:
    """Reports that the run is finished, or how to continue it; on SLURM `_requeue` reports it."""
    config = resolved.config
    if ended.exit_code == EXIT_OK:
        console.say(finished_text(resolved))
        return
    if resolved.placement is not None:
        return
    in_memory = _say_what_memory_holds(resolved, console) if config.checkpoint.local_every_steps else 0
    if ended.exit_code in _INTERRUPTED:
        load = config.checkpoint.load
        step = max(saved_step(resolved.run_dir, load), in_memory)
        where = f"continues it from step {step}" if step else "starts it from step 0: it has no checkpoint yet"
        if load == "none" and step:
            where = f"with checkpoint.load=auto {where}; with checkpoint.load=none it starts afresh"
        files = stopping_files(config)
        first = f"remove {' and '.join(map(str, files))}, then " if files else ""
        console.say(f"interrupted: {first}the same command {where}")


def _say_what_memory_holds(resolved: ResolvedRun, console: Console) -> int:
    """Reports the memory that local checkpoints occupy until the run is resumed; returns their step."""
    from megads.checkpoint.local_files import held_in_memory, node_folder

    root = Path(resolved.config.checkpoint.local_folder)
    step, size = held_in_memory(root, resolved.run_dir)
    if size:
        console.say(
            f"this machine's memory holds the state of step {step} for the next start: {size / 2**30:.2f} GiB in "
            f"{node_folder(root, resolved.run_dir)}, which can be removed"
        )
    return step


def _open_console(resolved: ResolvedRun) -> Console:
    # Imports rich, which would delay shell completion.
    from megads.monitor.live_console import open_console

    config = resolved.config
    planned = planned_steps(config) if config.train.length_is_known else None
    intervals = Intervals(config.evaluation.every_steps, config.evaluation.at_end, config.checkpoint.every_steps)
    return open_console(resolved.run_dir, sys.stdout, config.logging, str(config.run.id), planned, intervals)


def _requeue(placement: SlurmPlacement | None, config: RootConfig, ended: _Ended) -> None:
    """Requeues the SLURM job or ends its chain, and reports it."""
    if placement is None or config.run.dry_run:
        return
    said = placement.requeue_or_end_chain(config, ended.exit_code, ended.excluded)
    if said:
        print(said, flush=True)


def _say_plan(accepted: AcceptedStart, console: Console) -> None:
    """Reports the length of train.minutes, changes since the last start, and a warmup that does not fit the run."""
    accepted.say_changes(console.say)
    config = accepted.resolved.config
    # Only a dry run warns of a missing warmup, which may be intended and need not be repeated at every start.
    if config.train.length_is_known and learning_rate(config).warmup:
        for text in warmup_warnings(config):
            console.say(text, "warning")


def launch_spec(config: RootConfig) -> LaunchSpec:
    """Returns the launch spec of a resolved config whose data is prepared; without a length, of a timing start."""
    run_dir, times = str(config.run.dir), not config.train.length_is_known
    tracked = bool(wanted_trackers(config.logging)) and not times
    entry = ("--entry", "megads.launch.step_timing:time_steps") if times else ()
    return LaunchSpec(
        run_dir=Path(run_dir),
        num_ranks=config.parallel.world_size,
        command=("-m", "megads.launch.rank", run_dir, "--digest", config_digest(config), *entry),
        threads_per_rank=config.cluster.threads_per_rank,
        useful_threads=useful_threads(config),
        side_command=("-m", "megads.launch.tracker", run_dir, "--follow") if tracked else (),
        flush_s=config.logging.flush_s,
        heartbeat_timeout_s=config.cluster.heartbeat_timeout_s,
        hangs=hang_settings(config),
        kills_hung=config.cluster.kills_hung,
        ranks_per_gpu=config.cluster.ranks_per_gpu,
        one_hardware_queue=config.parallel.zero_stage < 3,
        cause_of_bus_error=lambda: data_fault(config),
        cpu=environment.rehearsal_folder() is not None,  # it may have more ranks than this machine has GPUs
    )


def _refuse_shared_place(config: RootConfig, claimed_dirs: set[str]) -> None:
    """Refuses a run.id or run.dir that an earlier point of the sweep uses: the second would resume the first."""
    given = config.run.dir or config.run.id
    if given is None:
        return
    if given in claimed_dirs:
        raise ConfigError(
            f"run.id or run.dir = {given} is shared by several points of the sweep: leave it out, so that every point "
            "gets its own, or sweep over it too"
        )
    claimed_dirs.add(given)


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


class _Attempts:
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
        self._means = Means(
            nodes=tuple(node.name for node in placement.allocation.nodes) if placement else (environment.node_name(),),
            needed=len(placement.nodes) if placement else 1,
            max_restarts=config.cluster.restarts,
            queue=placement is not None and not config.cluster.chain,
        )

    def run(self, console: Console) -> _Ended:
        """Starts the ranks, and again until no further start follows.

        Args:
            console: console of the first attempt; later attempts open their own.
        """
        if self._placement is not None and self._config.cluster.checks_nodes:
            first = self._first_places(console)
            if first is not None:
                return first
        outcome = self._start(console)
        if outcome.exit_code == CheckpointError.exit_code and restore_lost(self._config, console):
            self._history.append(self._attempt(outcome))
            outcome = self._again(Restart(tuple(self._attempt(outcome).nodes)), outcome)
        while True:
            if outcome.exit_code == RollBack.exit_code and leave_behind(self._run_dir) and self._accept is not None:
                if outcome.stopping:
                    return _Ended(Preempted.exit_code)
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
                return _Ended(Preempted.exit_code, decision.excluded)
            if (code := wait_for_restart(decision.wait_s)) is not None:
                return _Ended(code)
            outcome = self._again(decision, outcome)

    def _first_places(self, console: Console) -> _Ended | None:
        """Checks the nodes before the first start; returns the end of the job if too few are healthy."""
        assert self._placement is not None
        console.say(f"checking the health of {len(self._means.nodes)} nodes")
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
        return _Ended(Preempted.exit_code, decision.excluded)

    def _check(self, excluded: Collection[str]) -> None:
        """Runs the health check on the nodes of the job that are still in use; records those that are rejected."""
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

    def _roll_back(self, accepted: AcceptedStart) -> Outcome:
        """Restarts the ranks from the checkpoint that they decided on, skipping the samples that they named."""
        self._take(accepted)
        with _open_console(self.resolved) as console:
            step = saved_step(self._run_dir, self._config.checkpoint.load)
            console.say(f"rolled back to step {step}", "warning")
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
        with _open_console(self.resolved) as console:
            excluded = f", without {', '.join(decision.excluded)}" if decision.excluded else ""
            console.say(f"restart {self._restarts} from the last checkpoint{excluded}", "warning")
            return self._start(console)

    @property
    def _restarts(self) -> int:
        """Number of failed attempts."""
        return sum(attempt.exit_code != EXIT_OK for attempt in self._history)

    def _start(self, console: Console) -> Outcome:
        """Starts the ranks, and again after a timing start and after every training stage, from its checkpoint."""
        self._began = time.monotonic()
        outcome = self._start_once(console)
        if outcome.exit_code == EXIT_OK and not self._config.train.length_is_known and self._accept is not None:
            if outcome.stopping:
                return dataclasses.replace(outcome, exit_code=code_of_stop(self._run_dir))
            self._take(accepted := self._accept())
            with _open_console(self.resolved) as timed:
                _say_plan(accepted, timed)
                outcome = self._start_once(timed)
        while outcome.exit_code == EXIT_OK and (stage := following_stage(self._run_dir)):
            if outcome.stopping:
                return dataclasses.replace(outcome, exit_code=code_of_stop(self._run_dir))
            self._history.append(self._attempt(outcome))
            self._renew_lease()
            with _open_console(self.resolved) as following:
                following.say(f"starting training stage {stage}")
                outcome = self._start_once(following)
        return outcome

    def _start_once(self, console: Console) -> Outcome:
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
        """Returns the time limits of this start."""
        run = self._config.run
        limit_s = None
        if run.exit_after is not None:
            # The limit covers all training stages of this start.
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

    def _give_up(self, decision: GiveUp, outcome: Outcome) -> _Ended:
        if decision.reason:
            self._note("gave_up", outcome, (), reason=decision.reason, exit_code=decision.exit_code, level="error")
            print(f"megads: not started again: {decision.reason}", file=sys.stderr, flush=True)
        return _Ended(decision.exit_code)

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
