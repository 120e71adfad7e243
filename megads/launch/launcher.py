"""Runs one start of a run: starts its ranks, monitors them, handles signals, and reports how they ended.

The ranks run on this machine (node_ranks) or on the nodes of a SLURM job (slurm_ranks). The main thread polls them,
updates the console and handles signals. The first SIGINT, SIGHUP, SIGTERM or SIGUSR1 asks the run to save and stop; the
second kills it, unless the scheduler decides otherwise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType

from megads.errors import EXIT_BUG, MegadsError, Preempted, RankKilled, UnhealthyNode
from megads.launch.evidence import evidence_folders
from megads.launch.in_process import InProcessRank
from megads.launch.node_ranks import NodePart, NodeRanks, Ranks, RankSettings, require_devices
from megads.launch.rank_outcome import (
    NodeReport,
    Outcome,
    clear_records,
    determine_outcome,
    hang_outcome,
    lost_nodes_outcome,
    signal_name,
)
from megads.launch.rank_server import RankServer
from megads.launch.scheduler import Scheduler
from megads.monitor.console import Console
from megads.runtime import environment
from megads.runtime.heartbeat import RankPosition, process_started_s, render_positions
from megads.runtime.machine_memory import oom_kills
from megads.runtime.metrics import EventWriter
from megads.runtime.optional_tools import find_tool
from megads.runtime.ports import start_secret
from megads.runtime.run_dir import rank_log_path, tracker_log_path
from megads.runtime.stop import PREEMPTED, TIME_LIMIT, clear_stop, request_stop

_POLL_S = 0.05


class SideProcess:
    """A process in its own session, so that no terminal signal reaches it.

    Its standard input is a pipe to which nothing is written. End-of-file tells it that the run is over, however the
    launcher ended.

    Args:
        command: arguments after the Python interpreter.
        log: file that its output is appended to.
        before: command line before the Python interpreter, such as srun's for a process on each of several nodes.
        variables: its environment; None: this process's.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        before: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ):
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*before, sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    @property
    def failure(self) -> str:
        """How the process failed; empty while it runs and after exit code 0."""
        code = self._process.poll()
        if not code:
            return ""
        return f"killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def terminate(self, limit_s: float) -> None:
        """Sends SIGTERM, on which srun ends its step, and SIGKILL after the time limit."""
        self._process.terminate()
        self.finish(limit_s, lambda: False)

    def finish(self, limit_s: float, hurry: Callable[[], bool]) -> bool:
        """Closes the standard input, which tells the process that the run is over, and waits for its end.

        Args:
            limit_s: longest wait; after it the process and its children are killed.
            hurry: polled during the wait; True ends the wait at once.

        Returns:
            True if the process ended by itself.

        """
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None:
            if time.monotonic() >= deadline or hurry():
                self._kill()
                return False
            time.sleep(_POLL_S)
        return True

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


EXIT_KILLED = 130
_UNEXPLAINED = (EXIT_BUG, UnhealthyNode.exit_code, RankKilled.exit_code)
"""Exit codes of failures whose message contains no remedy."""
# The side process observes LaunchSpec.flush_s itself; after this margin it is taken to hang.
_FLUSH_MARGIN_S = 2.0
_KILLED_FLUSH_S = 1.0
_STOPPED_RANK_S = 10.0
"""How long a requested stop waits for a rank whose process is stopped by a signal."""


@dataclass(frozen=True)
class LaunchSpec(RankSettings):
    """What a launch starts, and how it is monitored.

    Attributes:
        run_dir: the run directory.
        num_ranks: number of ranks on all nodes.
        command: arguments after the Python interpreter, the same for every rank.
        threads_per_rank: CPU threads of each rank; None distributes the cores evenly.
        useful_threads: number of threads above which a rank does not get faster; None: unknown.
        side_command: arguments after the Python interpreter of the tracker process; empty for none.
        flush_s: how long the tracker process may continue after the ranks have ended.
        saves: whether the ranks save and stop on request; if not, the first signal kills them.
        kills_hung: whether a start that hangs is killed; otherwise only a warning is given.
        cause_of_bus_error: called when a rank was killed by SIGBUS; returns the fault found in a mapped file, if any.
    """

    run_dir: Path
    num_ranks: int
    command: tuple[str, ...]
    threads_per_rank: int | None = None
    useful_threads: int | None = None
    side_command: tuple[str, ...] = ()
    flush_s: float = 10.0
    saves: bool = True
    kills_hung: bool = False
    cause_of_bus_error: Callable[[], MegadsError | None] | None = None

    def node_part(self, ranks_per_node: int, **place: int | str) -> NodePart:
        """Returns the part that one node starts; without `place`, the whole run."""
        threads = environment.threads_of_rank(ranks_per_node, self.threads_per_rank, self.useful_threads)
        settings = {field.name: getattr(self, field.name) for field in fields(RankSettings)}
        return NodePart(self.run_dir, self.command, ranks_per_node, threads, **settings | place)


def launch(
    spec: LaunchSpec,
    console: Console,
    ranks: Ranks | None = None,
    scheduler: Scheduler | None = None,
    server: RankServer | None = None,
) -> Outcome:
    """Runs the ranks to their end; the caller holds the lease on the run directory (lease.claimed).

    Args:
        spec: what to start.
        console: console that shows the run.
        ranks: the ranks; None starts them on this machine.
        scheduler: decides when the run must stop; None handles signals only.
        server: see `NodeRanks`.

    Returns:
        How the ranks ended. The exit code is the one that the ranks returned, that of the root cause, or 130 after a
        kill by a second signal.

    Raises:
        ConfigError: there are GPUs, but fewer than ranks; nothing is started.
        MegadsError: the scheduler ends this start; its ranks are killed.
    """
    if ranks is None:
        if not spec.cpu:
            require_devices(spec.num_ranks, "parallel.tp * cp * pp * dp", spec.ranks_per_gpu)
        ranks = NodeRanks(spec.node_part(spec.num_ranks), server=server)
    clear_records(spec.run_dir)
    clear_stop(spec.run_dir)
    with start_secret(spec.run_dir, spec.lease):
        side = _start_tracker(spec, console)
        return _Launch(spec, console, side, ranks, scheduler or Scheduler()).run()


def _start_tracker(spec: LaunchSpec, console: Console) -> SideProcess | None:
    """Starts the tracker process; the run continues without it if that fails."""
    if not spec.side_command:
        return None
    try:
        return SideProcess(spec.side_command, tracker_log_path(spec.run_dir))
    except OSError as error:
        console.print_line(f"the tracker process cannot be started ({error}): no tracker records this run", "warning")
        return None


class _Launch:
    """One start of a run's ranks."""

    def __init__(
        self, spec: LaunchSpec, console: Console, side: SideProcess | None, ranks: Ranks, scheduler: Scheduler
    ):
        self._spec = spec
        self._console = console
        self._side = side
        self._side_failed = False
        self._ranks = ranks
        self._scheduler = scheduler
        self._events = EventWriter(spec.run_dir)
        self._signals: list[int] = []
        self._signals_answered = 0
        self._killed_by_signal = False
        self._silent: dict[int, RankPosition] = {}
        self._stop_reason = ""
        self._stop_requested_at: float | None = None
        self._overdue = ""
        self._hang_seen = False
        self._hang: Outcome | None = None
        self._silent_nodes: set[str] = set()
        self._oom_kills = oom_kills()
        self._overruled: MegadsError | None = None
        if isinstance(ranks, InProcessRank):
            ranks.between_steps = self._observe

    def run(self) -> Outcome:
        """Starts the ranks, monitors them to their end and returns how they ended."""
        spec = self._spec
        self._events.write(
            "launch",
            ranks=spec.num_ranks,
            pid=os.getpid(),
            level="debug",
            start=spec.lease,
            command_start=process_started_s(),
            **self._scheduler.description(),
            **self._ranks.description(),
        )
        with self._signals_caught():
            overruled = self._watch()
            outcome = self._conclude(overruled)
            self._end_tracker(killed=outcome.exit_code == EXIT_KILLED or overruled is not None)
        self._events.close()
        self._console.close()
        if overruled is not None:
            raise overruled
        if isinstance(self._ranks, InProcessRank) and self._ranks.failure is not None:
            raise self._ranks.failure
        return replace(outcome, stopping=bool(self._stop_reason))

    def _watch(self) -> MegadsError | None:
        """Monitors the ranks until they end; returns the scheduler's error if it had them killed, else None."""
        self._console.show_phase("")
        self._ranks.start()
        while self._ranks.poll():
            self._observe()
        self._console.poll()
        return self._overruled

    def _observe(self) -> None:
        """Shows what the ranks did, and handles what happened."""
        self._console.poll()
        if (phase := self._ranks.phase()) or not isinstance(self._ranks, InProcessRank):
            self._console.show_phase(phase)
        self._watch_tracker()
        self._watch_heartbeats()
        self._watch_hang()
        self._watch_nodes()
        self._answer_signals()
        self._enforce_stop()
        try:
            self._ask_scheduler()
        except MegadsError as error:
            self._overruled = self._overruled or error
            self._ranks.kill()

    def _conclude(self, overruled: MegadsError | None) -> Outcome:
        """Determines how the ranks ended, reports it once and records it."""
        if overruled is not None:
            self._console.poll()
            self._console.close()
            return Outcome(overruled.exit_code)
        if self._killed_by_signal or (isinstance(self._ranks, InProcessRank) and self._ranks.killed):
            cause = "a second signal; the last checkpoint is untouched" if self._spec.saves else "a signal"
            self._events.write("killed", level="debug", cause=cause, exit_code=EXIT_KILLED)
            self._console.poll()
            self._console.print_line(f"killed by {cause}", "error")
            self._console.close()
            return Outcome(EXIT_KILLED)
        reports = self._ranks.reports()
        outcome = self._hang or self._explained(determine_outcome(self._spec.run_dir, self._spec.num_ranks, reports))
        outcome = self._after_a_stop(outcome, reports)
        failure = self._failure(outcome)
        if outcome.message:
            self._events.write("failure", level="error", **failure)
        self._events.write("exit", exit_code=outcome.exit_code, level="debug")
        self._console.poll()
        self._console.close()
        if outcome.message:
            with suppress(OSError):
                sys.stderr.write(f"megads: {outcome.message}\n")
            self._diagnose(outcome, failure)
        return outcome

    def _failure(self, outcome: Outcome) -> dict[str, object]:
        """Fields of the failure event."""
        before, now = self._oom_kills, oom_kills()
        return {
            "rank": outcome.rank,
            "nodes": list(outcome.nodes),
            "exit_code": outcome.exit_code,
            "message": outcome.message,
            "first_sign": outcome.first_sign_s,
            "oom_kills": None if before is None or now is None else now - before,
            "evidence": [str(folder) for folder in evidence_folders(self._spec.run_dir, self._spec.lease)],
        }

    def _diagnose(self, outcome: Outcome, failure: Mapping[str, object]) -> None:
        """Records the diagnosis of the ranks' logs, and prints it if the message contains no remedy."""
        decision = find_tool("diagnose.decision")
        if decision is None:
            return
        order = sorted(range(self._spec.num_ranks), key=lambda rank: rank != outcome.rank)
        try:
            found = decision.diagnose_failure(failure, [rank_log_path(self._spec.run_dir, rank) for rank in order])
        except Exception as error:  # A bug in the diagnosis must not change the outcome of the run.
            self._events.write("diagnosis", level="debug", cause=None, error=f"{type(error).__name__}: {error}")
            return
        self._events.write("diagnosis", level="debug", **found.as_json())
        if outcome.exit_code in _UNEXPLAINED:
            with suppress(OSError):
                sys.stderr.write(
                    f"megads: diagnosis: {found.summary}; megads diagnose run={self._spec.run_dir} shows more\n"
                )

    def _explained(self, outcome: Outcome) -> Outcome:
        """Adds the cause of a SIGBUS: the signal is all that a truncated mapped file causes, so the file is checked."""
        if outcome.signal != signal.SIGBUS or self._spec.cause_of_bus_error is None:
            return outcome
        cause = self._spec.cause_of_bus_error()
        if cause is None:
            return outcome
        return replace(outcome, exit_code=cause.exit_code, message=f"{outcome.message}\n  cause: {cause}")

    def _after_a_stop(self, outcome: Outcome, reports: Sequence[NodeReport]) -> Outcome:
        """Makes a preempted run resumable even if a hung rank or a lost node prevented its last save."""
        if self._overdue:
            hung = outcome.exit_code == UnhealthyNode.exit_code
            found = render_positions(position for report in reports for position in report.positions)
            message = f"{self._overdue}\n  {outcome.message if hung else found}".rstrip()
            outcome = replace(outcome, message=message, exit_code=UnhealthyNode.exit_code)
        if outcome.exit_code == UnhealthyNode.exit_code and self._stop_reason in (PREEMPTED, TIME_LIMIT):
            return replace(outcome, exit_code=Preempted.exit_code)
        return outcome

    def _watch_heartbeats(self) -> None:
        """Reports ranks whose heartbeats stop, within seconds, and those whose heartbeats return."""
        for position in self._ranks.silences():
            if position.lost:
                self._silent[position.rank], event, text = position, "heartbeat_lost", str(position)
            else:
                self._silent.pop(position.rank, None)
                event, text = "heartbeat_back", "sends heartbeats again"
            self._events.write(
                event,
                level="warning",
                rank=position.rank,
                node=position.node,
                step=position.step,
                phase=position.phase,
                state=position.state,
                message=f"{position.name} {text}",
            )

    def _watch_hang(self) -> None:
        """Reports the ranks that all others wait for, once they exceed the limits learned from the run's own steps."""
        suspects = self._ranks.hang()
        if bool(suspects) == self._hang_seen or self._hang is not None:
            return
        self._hang_seen = bool(suspects)
        if not suspects:
            self._events.write("hang_over", level="warning", message="the ranks that seemed to hang make progress")
            return
        spec, folders = self._spec, evidence_folders(self._spec.run_dir, self._spec.lease)
        recorder = find_tool("diagnose.flight_recorder")
        flight = None if recorder is None else recorder.flight_recorder_verdict(folders)
        found = hang_outcome(spec.run_dir, suspects, flight, folders)
        ranks = sorted(position.rank for position in suspects)
        self._events.write(
            "hang_suspected",
            level="warning",
            rank=found.rank,
            ranks=ranks,
            nodes=list(found.nodes),
            step=suspects[0].step,
            phase=suspects[0].phase,
            phase_s=suspects[0].phase_s,
            evidence=[str(folder) for folder in folders],
            killed=spec.kills_hung,
            message=found.message,
        )
        if spec.kills_hung:
            self._hang = found
            self._ranks.kill()

    def _watch_nodes(self) -> None:
        """Reports nodes whose agents fall silent, and ends the start if all other nodes wait for them."""
        silent = self._ranks.silent_nodes()
        for name in silent.keys() - self._silent_nodes:
            text = f"no message from the agent of node {name} for {silent[name]:.0f} s"
            self._events.write("node_silent", level="warning", node=name, message=text)
        for name in self._silent_nodes - silent.keys():
            text = f"the agent of node {name} sends messages again"
            self._events.write("node_heard", level="warning", node=name, message=text)
        self._silent_nodes = set(silent)
        lost = self._ranks.lost_nodes() if silent and self._hang is None and self._spec.kills_hung else {}
        if lost:
            self._hang = lost_nodes_outcome(lost)
            self._ranks.kill()

    def _enforce_stop(self) -> None:
        """Kills ranks that do not stop in time on request; the run then resumes from its last checkpoint."""
        if self._stop_requested_at is None or self._overdue:
            return
        waited_s = time.monotonic() - self._stop_requested_at
        stopped = [position.name for position in self._silent.values() if position.stopped]
        if stopped and waited_s >= _STOPPED_RANK_S:
            cause = f"{', '.join(stopped)} cannot: stopped by SIGSTOP"
        elif waited_s >= self._scheduler.stop_timeout_s:
            cause = "run.stop_timeout_s has passed"
        else:
            return
        self._overdue = f"asked to stop {waited_s:.0f} s ago, but {cause}: killed; the last checkpoint remains"
        self._ranks.kill()

    def _watch_tracker(self) -> None:
        """Warns once if the tracker process itself fails; it reports failures of single trackers itself."""
        if self._side is not None and self._side.failure and not self._side_failed:
            self._side_failed = True
            self._warn_about_tracker(f"the tracker process {self._side.failure}; the training goes on without it")

    def _end_tracker(self, killed: bool) -> None:
        """Waits up to a time limit for the tracker process to end; a further signal ends the wait."""
        if self._side is None:
            return
        limit_s = _KILLED_FLUSH_S if killed else self._spec.flush_s + _FLUSH_MARGIN_S
        answered = len(self._signals)
        if not self._side.finish(limit_s, lambda: len(self._signals) > answered):
            self._side_failed = True
            self._warn_about_tracker("the tracker process was killed at the end of the run before it sent everything")
        self._watch_tracker()
        self._console.poll()

    def _warn_about_tracker(self, message: str) -> None:
        remedy = f"python -m {self._spec.side_command[1]} {self._spec.run_dir} sends what is missing"
        log = tracker_log_path(self._spec.run_dir)
        self._events.write("tracker_failed", level="warning", message=f"{message}; {remedy}\n  log: {log}")

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Collects signals while the ranks run; the handlers only record them, the polling loop acts on them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # SIGHUP stays ignored under nohup.
        wanted = self._scheduler.signals
        numbers = [n for n in wanted if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if isinstance(self._ranks, InProcessRank) and len(self._signals) > 1:
            raise KeyboardInterrupt  # now, as a step may take for ever

    def _answer_signals(self) -> None:
        """The first signal asks ranks that save to stop; a later one kills them if the scheduler says so."""
        while self._signals_answered < len(self._signals):
            number = signal.Signals(self._signals[self._signals_answered])
            self._signals_answered += 1
            if not self._spec.saves or (self._signals_answered > 1 and self._scheduler.kills(number)):
                self._killed_by_signal = True
                self._ranks.kill()
            elif self._signals_answered == 1:
                reason, again = self._scheduler.reason(number), self._scheduler.second_signal
                self._request_stop(reason, f"{number.name}: saving and stopping after the current step; {again}")

    def _ask_scheduler(self) -> None:
        """Requests a stop if the scheduler asks for one."""
        order = self._scheduler.poll()
        if order is not None:
            self._request_stop(order.reason, order.message)

    def _request_stop(self, reason: str, message: str) -> None:
        self._stop_reason, self._stop_requested_at = reason, self._stop_requested_at or time.monotonic()
        try:
            request_stop(self._spec.run_dir, reason)
        except OSError as error:
            message = f"the run cannot be asked to stop ({error}): it is killed"
            self._killed_by_signal = True
            self._ranks.kill()
        self._events.write("stop_requested", level="debug", reason=reason, cause=message)
        self._console.print_line(message, "warning")
