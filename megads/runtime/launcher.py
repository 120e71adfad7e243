"""Starts a run's ranks on this machine with torch's elastic agent, watches them, and says how they ended.

The agent runs in a thread of its own, so that it installs no signal handlers: the main thread shows the console and
answers signals. The first SIGINT, SIGHUP, SIGTERM or SIGUSR1 asks the run to save and stop; the second kills it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megads.errors import ConfigError, MegadsError
from megads.runtime import environment
from megads.runtime.console import Console
from megads.runtime.metrics import EventWriter
from megads.runtime.rank_outcome import Outcome, RankExit, clear_records, judge, read_failures
from megads.runtime.run_dir import exit_path, tracker_log_path
from megads.runtime.side_process import SideProcess
from megads.runtime.stop_file import INTERRUPTED, PREEMPTED, clear_stop, request_stop

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

EXIT_KILLED = 130
_POLL_S = 0.1
# A peer that SIGTERM does not end (a stopped process) is killed this long after the first failure.
_KILL_AFTER_S = 3.0
# The process beside the ranks keeps to LaunchSpec.flush_s itself; this much later it is taken to hang.
_FLUSH_MARGIN_S = 2.0
_KILLED_FLUSH_S = 1.0
_STOP_REASONS = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGHUP: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
}


@dataclass(frozen=True)
class LaunchSpec:
    """What to start.

    Attributes:
        run_dir: the run directory.
        num_ranks: processes to start on this machine.
        command: arguments after the Python interpreter, the same for every rank.
        threads_per_rank: CPU threads of each rank; None shares the cores out evenly.
        side_command: arguments after the Python interpreter of the process beside the ranks; empty for none.
        flush_s: how long that process may go on after the ranks.
        cpu: the ranks compute on the CPU, whatever GPUs there are.
        saves: the ranks save and stop when asked; where they do not, the first signal kills them.
        cause_of_bus_error: asked when a rank was killed by SIGBUS; the fault that it finds in a mapped file, if any.
    """

    run_dir: Path
    num_ranks: int
    command: tuple[str, ...]
    threads_per_rank: int | None = None
    side_command: tuple[str, ...] = ()
    flush_s: float = 10.0
    cpu: bool = False
    saves: bool = True
    cause_of_bus_error: Callable[[], MegadsError | None] | None = None


def launch(spec: LaunchSpec, console: Console) -> int:
    """Runs the ranks to their end; the caller holds the run directory (run_dir.claimed).

    Returns:
        The exit code: what the ranks returned, the first failing rank's own, or 130 when killed by a second signal.

    Raises:
        ConfigError: there are GPUs, but fewer than ranks; nothing is started.
    """
    if not spec.cpu:
        _require_devices(spec.num_ranks)
    clear_records(spec.run_dir)
    clear_stop(spec.run_dir)
    side = _start_side(spec, console)
    with environment.exported(_rank_variables(spec)):
        return _Launch(spec, console, side).run()


def _start_side(spec: LaunchSpec, console: Console) -> SideProcess | None:
    """Starts the process beside the ranks; a run goes on without it."""
    if not spec.side_command:
        return None
    try:
        return SideProcess(spec.side_command, tracker_log_path(spec.run_dir))
    except OSError as error:
        console.say(f"trackers cannot be started ({error}): the run is not recorded by them", "warning")
        return None


def _require_devices(num_ranks: int) -> None:
    """NCCL refuses two ranks on one GPU, with a message that nobody understands."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < num_ranks:
        raise ConfigError(
            f"parallel.tp * cp * pp * dp = {num_ranks} ranks, but this machine has {gpus} GPUs: lower one of them, or "
            "hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )


def _rank_variables(spec: LaunchSpec) -> dict[str, str]:
    import torch

    threads = spec.threads_per_rank or environment.share_of_cores(spec.num_ranks)
    if spec.cpu:
        return environment.rank_variables(threads, cuda=False) | environment.HIDDEN_GPUS
    return environment.rank_variables(threads, cuda=torch.cuda.is_available())


class _Launch:
    """One start of a run's ranks."""

    def __init__(self, spec: LaunchSpec, console: Console, side: SideProcess | None):
        self._spec = spec
        self._console = console
        self._side = side
        self._side_failed = False
        self._events = EventWriter(spec.run_dir)
        self._signals: list[int] = []
        self._signals_answered = 0
        self._killed_ranks: set[int] = set()
        self._exits: list[RankExit] = []
        self._agent_error: BaseException | None = None
        self._agent = _make_agent(spec)
        # Daemonic: should the main thread fail, the process ends, and the kernel kills the ranks with it.
        self._thread = threading.Thread(target=self._run_agent, name="elastic-agent", daemon=True)

    def run(self) -> int:
        """Starts the ranks, watches them to the end and returns the exit code."""
        self._events.write("launch", ranks=self._spec.num_ranks, pid=os.getpid(), level="debug")
        with self._signals_caught():
            self._thread.start()
            failed_at: float | None = None
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
                self._console.poll()
                self._watch_side()
                self._answer_signals()
                if failed_at is None and self._some_rank_failed():
                    failed_at = time.monotonic()
                if failed_at is not None and time.monotonic() - failed_at > _KILL_AFTER_S:
                    self._kill_ranks()
            self._console.poll()
            if self._agent_error is not None:
                raise self._agent_error
            exit_code = self._conclude()
            self._end_side(killed=exit_code == EXIT_KILLED)
        self._events.close()
        self._console.close()
        return exit_code

    def _run_agent(self) -> None:
        """Body of the agent's thread."""
        try:
            result = self._agent.run()
            self._exits = [RankExit(rank, failure.exitcode) for rank, failure in result.failures.items()]
        except BaseException as error:
            self._agent_error = error

    def _conclude(self) -> int:
        """Judges how the ranks ended, says so once and records it."""
        if self._killing_from(len(self._signals)):
            cause = "a second signal; the last checkpoint is untouched" if self._spec.saves else "a signal"
            self._events.write("killed", level="debug", cause=cause, exit_code=EXIT_KILLED)
            self._console.poll()
            self._console.say(f"killed by {cause}", "error")
            self._console.close()
            return EXIT_KILLED
        outcome = self._explained(judge(self._spec.run_dir, self._spec.num_ranks, self._exits, self._killed_ranks))
        if outcome.message:
            self._events.write(
                "failure", level="error", rank=outcome.rank, exit_code=outcome.exit_code, message=outcome.message
            )
        self._events.write("exit", exit_code=outcome.exit_code, level="debug")
        self._console.poll()
        self._console.close()
        if outcome.message:
            with suppress(OSError):
                sys.stderr.write(f"megads: {outcome.message}\n")
        return outcome.exit_code

    def _explained(self, outcome: Outcome) -> Outcome:
        """The kernel's only word on a mapped file that lost its end is a signal: the file itself says more."""
        if outcome.signal != signal.SIGBUS or self._spec.cause_of_bus_error is None:
            return outcome
        cause = self._spec.cause_of_bus_error()
        if cause is None:
            return outcome
        return dataclasses.replace(outcome, exit_code=cause.exit_code, message=f"{outcome.message}\n  cause: {cause}")

    def _watch_side(self) -> None:
        """Says it once when the process beside the ranks fails; what fails within it, it says itself."""
        if self._side is not None and self._side.failure and not self._side_failed:
            self._side_failed = True
            self._warn_of_side(f"the tracker process {self._side.failure}; the training goes on without it")

    def _end_side(self, killed: bool) -> None:
        """Waits shortly for the process beside the ranks; a further signal ends the wait."""
        if self._side is None:
            return
        limit_s = _KILLED_FLUSH_S if killed else self._spec.flush_s + _FLUSH_MARGIN_S
        answered = len(self._signals)
        if not self._side.finish(limit_s, lambda: len(self._signals) > answered):
            self._side_failed = True
            self._warn_of_side("the tracker process was killed at the end of the run before it had everything")
        self._watch_side()
        self._console.poll()

    def _warn_of_side(self, message: str) -> None:
        remedy = f"python -m {self._spec.side_command[1]} {self._spec.run_dir} sends what is missing"
        log = tracker_log_path(self._spec.run_dir)
        self._events.write("tracker_failed", level="warning", message=f"{message}; {remedy}\n  log: {log}")

    @contextmanager
    def _signals_caught(self) -> Iterator[None]:
        """Collects signals while the ranks run; handlers only note them, the loop answers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # nohup ignores SIGHUP, and means it.
        numbers = [n for n in _STOP_REASONS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._note_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _answer_signals(self) -> None:
        """The first signal asks ranks that save for a stop, every other one kills."""
        while self._signals_answered < len(self._signals):
            number = signal.Signals(self._signals[self._signals_answered])
            self._signals_answered += 1
            if self._killing_from(self._signals_answered):
                self._kill_ranks()
                continue
            reason = _STOP_REASONS[number]
            request_stop(self._spec.run_dir, reason)
            self._events.write("stop_requested", level="debug", signal=number.name, reason=reason)
            self._console.say(
                f"{number.name}: saving and stopping after the current step; a second signal kills at once", "warning"
            )

    def _killing_from(self, signals: int) -> bool:
        """Whether so many signals kill."""
        return signals > (1 if self._spec.saves else 0)

    def _some_rank_failed(self) -> bool:
        """True once a rank left a record of a failure, or vanished without having returned."""
        if read_failures(self._spec.run_dir):
            return True
        vanished = [rank for rank, pid in self._pids().items() if not _exists(pid)]
        return any(not exit_path(self._spec.run_dir, rank).exists() for rank in vanished)

    def _kill_ranks(self) -> None:
        """Kills every rank that still runs, and what it started."""
        for rank, pid in self._pids().items():
            if _exists(pid):
                self._killed_ranks.add(rank)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def _pids(self) -> dict[int, int]:
        """Pids of the ranks by rank; empty until they are started."""
        workers = self._agent.get_worker_group().workers
        return {worker.global_rank: worker.id for worker in workers if isinstance(worker.id, int)}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _make_agent(spec: LaunchSpec) -> LocalElasticAgent:
    """Builds torch's agent for one machine: no restarts, a store on a free port, failures polled every 0.1 s."""
    # torch.distributed.elastic is imported here: it takes a second, and a refused config should not wait for it.
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # The agent reports failures in several screens of text; this module reports them in one message.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous = get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint="localhost:0",
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr="127.0.0.1",
        )
    )
    worker_spec = WorkerSpec(
        role="default",
        local_world_size=spec.num_ranks,
        entrypoint=sys.executable,
        args=spec.command,
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_POLL_S,
        local_addr="127.0.0.1",
    )
    # Ranks open their own logs: the agent's would start empty at every start.
    return LocalElasticAgent(worker_spec, DefaultLogsSpecs(log_dir=os.devnull))
