"""The agent of one node of a SLURM job: starts and monitors the node's ranks, and reports to the launcher.

srun starts it on every node as `python -m megads.launch.node_agent`; its counterpart in the launcher is
megads.launch.slurm_ranks. It ends when its ranks have ended, when the launcher orders it, and when the launcher is
gone. No rank outlives it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from megads.errors import EXIT_BUG, EXIT_OK, ConfigError, MegadsError
from megads.launch.hang_detection import HangSettings
from megads.launch.node_ranks import NodePart, NodeRanks, Ranks, require_devices
from megads.launch.rank import redirect_output
from megads.launch.rank_outcome import NodeReport
from megads.runtime import environment, slurm
from megads.runtime.heartbeat import SLOW_PHASES
from megads.runtime.ports import read_secret, secret_path
from megads.runtime.run_dir import agent_log_path

if TYPE_CHECKING:
    from megads.runtime.control_store import ControlStore, EndOrder

AGENT = ("-m", "megads.launch.node_agent")
"""Python arguments that start an agent; `read_orders` parses the arguments after them."""

ALIVE_EVERY_S = 5.0
"""Interval of the keep-alive messages, by whose absence a node without power or network is detected."""
_END_WITHIN_S = 5.0
_STOPS = (signal.SIGTERM, signal.SIGUSR1)
_IGNORED = (signal.SIGINT, signal.SIGHUP)
_ASK_SLURM_EVERY_S = 1.0
# A slurmd that is being restarted answers again soon.
_SILENT_TIMES = 2
# Requests from all nodes of a large job at once would overload SLURM.
_NODES_THAT_ASK = 4
_ORPHAN_GIVES_UP_S = 900.0
# SLURM marks a node that does not answer with a star before it sets its state to down.
_GONE = ("*", "DOWN", "FAIL", "NOT_RESPONDING")


class MessageKind(StrEnum):
    """Kinds of the messages from an agent to the launcher."""

    alive = "alive"
    failing = "failing"
    hang = "hang"
    phase = "phase"
    report = "report"
    signalled = "signalled"
    silence = "silence"


class RanksOfNode(Ranks, Protocol):
    """The ranks of one node, with what its agent needs to know about them."""

    @property
    def part(self) -> NodePart:
        """The part of the run that this node starts."""
        ...

    @property
    def failing(self) -> bool:
        """Whether a rank has failed, once `poll` saw it."""
        ...


def _requeue_if_orphaned() -> str:
    """Requeues the job if the node of its batch script is gone; returns what happened.

    Called on another node of the job when the launcher is gone. Does nothing if the job is ending: then the launcher
    ended, but not its node. It does not wait until SLURM sets the node down, because SLURM then kills the step and this
    process with it, and with --no-kill the job would idle until its time limit.
    """
    job = environment.slurm_variables().get("SLURM_JOB_ID")
    if job is None:
        return ""
    deadline = time.monotonic() + _ORPHAN_GIVES_UP_S
    first: dict[str, str] = {}
    silent = 0
    while time.monotonic() < deadline:
        try:
            found = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "job", job))
            first = first or found
            if found.get("JobState") != "RUNNING" or found.get("Restarts") != first.get("Restarts"):
                return f"job {job} is {found.get('JobState')}: it ends by itself"
            # From the first answer, because SLURM removes a lost node from the job.
            host = first.get("BatchHost", "")
            state = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "node", host)).get("State", "")
            silent = 0 if slurm.slurmd_answers(host) else silent + 1
            if silent >= _SILENT_TIMES or any(sign in state for sign in _GONE):
                slurm.ask("scontrol", "requeue", job)
                return f"job {job} is requeued: its batch script was on {host}, which does not answer ({state})"
        except ConfigError as error:
            sys.stdout.write(f"{error}\n")  # the agent's log
        time.sleep(_ASK_SLURM_EVERY_S)
    return f"job {job} still runs, and its batch node answers"


@dataclass(frozen=True)
class AgentOrders:
    """Parsed command line of an agent, the same on every node.

    Attributes:
        part: what to start; the node's number and address come from the launcher's control store.
        host: address of the control store.
        port: port of the control store.
    """

    part: NodePart
    host: str
    port: int


def place_of(number: int, num_nodes: int, address: str) -> dict[str, Any]:
    """Returns what the launcher assigns to a node through its store, see `NodePart`."""
    return {"node": number, "num_nodes": num_nodes, "address": address}


class LauncherContact:
    """An agent's connection to the launcher: sends keep-alive messages and receives the order to end.

    Args:
        control: the launcher's control store.
        number: number of the node.
        order: receives the launcher's order to end.
    """

    def __init__(self, control: ControlStore, number: int, order: EndOrder) -> None:
        self._control, self._number, self._order = control, number, order
        self._next_s, self._ordered = -math.inf, False

    def end_ordered(self) -> bool:
        """Whether the launcher has ordered the ranks to be killed; to be polled.

        Raises:
            RuntimeError: the launcher is gone.
        """
        now = time.monotonic()
        if now >= self._next_s:
            # All agents start at the same time; a random delay spreads their messages.
            wait_s = ALIVE_EVERY_S * (random.random() if math.isinf(self._next_s) else 1.0)
            self._next_s = now + wait_s
            self._control.send({"kind": MessageKind.alive, "number": self._number})
            # Network devices between two nodes may drop a connection that is idle for days.
            self._ordered = self._control.end_ordered()
        return self._ordered or self._order.given()


def run_agent(
    orders: AgentOrders,
    name: str,
    signals: list[int],
    make_ranks: Callable[[NodePart, ControlStore], RanksOfNode] = NodeRanks,
    begin: Callable[[NodePart], None] | None = None,
) -> int:
    """Runs the node's ranks to their end, and reports the result to the launcher.

    Args:
        orders: the agent's command line.
        name: name of this node.
        signals: received signals, appended as they arrive; forwarded to the launcher, which handles them.
        make_ranks: called with the part and the control store; replaced in tests.
        begin: called with the part once the node's number is known.

    Returns:
        0 if all ranks returned, whatever their exit codes, which are in the report; else EXIT_BUG.

    Raises:
        RuntimeError: the launcher is gone, or has no ranks for this node.
    """
    from megads.runtime.control_store import ControlStore, EndOrder

    part = orders.part
    secret = read_secret(secret_path(part.run_dir, part.lease))
    control = ControlStore(secret, orders.host, orders.port)
    place = control.assigned(name)
    if place is None:
        raise RuntimeError(f"the launcher at {orders.host} has no ranks for node {name}")
    part = dataclasses.replace(part, **place)
    if begin is not None:
        begin(part)
    order = EndOrder(ControlStore(secret, orders.host, orders.port))
    contact = LauncherContact(control, part.node, order)
    report = _report(make_ranks(part, control), control, signals, contact.end_ordered)
    control.report({"kind": MessageKind.report, "number": part.node, "report": report.encode()})
    return EXIT_BUG if report.failed else EXIT_OK


def _begin_log(part: NodePart) -> None:
    """Redirects the output to the agent's log; earlier output is in srun's log."""
    redirect_output(agent_log_path(part.run_dir, part.node))
    name, now = environment.node_name(), time.strftime("%F %T%z")
    sys.stdout.write(f"--- node {part.node} of {part.num_nodes}, {name}, pid {os.getpid()}, {now}\n")


def _run_process(orders: AgentOrders) -> NoReturn:
    """`run_agent` as this process's only work; never returns."""
    code = EXIT_BUG
    try:
        code = run_agent(orders, environment.node_name(), collect_signals(), begin=_begin_log)
    except RuntimeError:
        # The launcher is gone, possibly with its node.
        traceback.print_exc()
        if int(environment.slurm_variables().get("SLURM_PROCID", "0")) < _NODES_THAT_ASK:
            sys.stdout.write(f"{_requeue_if_orphaned()}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        # Skips the interpreter's shutdown, which a thread that waits for other nodes could block.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report(
    ranks: RanksOfNode, control: ControlStore, signals: list[int], end_ordered: Callable[[], bool]
) -> NodeReport:
    """Starts and monitors the ranks; returns how they ended."""
    part = ranks.part
    try:
        if not part.cpu:
            require_devices(part.num_ranks, "ranks of a node", part.ranks_per_gpu)
        ranks.start()
        _watch(ranks, control, signals, end_ordered)
    except MegadsError as error:
        return NodeReport(environment.node_name(), error=str(error), exit_code=error.exit_code)
    except Exception as error:
        traceback.print_exc()
        ranks.kill()
        of_ranks = ranks.reports()[0]
        log = agent_log_path(part.run_dir, part.node)
        return dataclasses.replace(of_ranks, error=f"{type(error).__name__}: {error}\n  log: {log}")
    return ranks.reports()[0]


def _watch(ranks: RanksOfNode, control: ControlStore, signals: list[int], end_ordered: Callable[[], bool]) -> None:
    """Monitors the ranks until they end or the launcher orders their end.

    Args:
        ranks: the started ranks.
        control: the launcher's control store.
        signals: received signals, appended as they arrive; forwarded to the launcher.
        end_ordered: returns whether the launcher has ordered the ranks to be killed.
    """

    def tell(kind: MessageKind, **content: Any) -> None:
        control.send({"kind": kind, "number": ranks.part.node, **content})

    told, ordered_at, told_phase, told_hang = False, 0.0, "", False
    while ranks.poll():
        if signals:
            signals.clear()
            tell(MessageKind.signalled)
        for position in ranks.silences():
            tell(MessageKind.silence, position=dataclasses.asdict(position))
        if ranks.part.node == 0 and (phase := _slow_phase(ranks)) != told_phase:
            told_phase = phase
            tell(MessageKind.phase, phase=phase)
        if bool(hang := ranks.hang()) != told_hang:
            told_hang = bool(hang)
            tell(MessageKind.hang, positions=[dataclasses.asdict(position) for position in hang])
        if ranks.failing and not told:
            told = True
            tell(MessageKind.failing)
        if end_ordered():
            ordered_at = ordered_at or time.monotonic()
            ranks.kill()
            # A process in an uninterruptible call outlives SIGKILL.
            if time.monotonic() - ordered_at > _END_WITHIN_S:
                return


def _slow_phase(ranks: RanksOfNode) -> str:
    """The slow phase that rank 0 is in; empty while it executes steps."""
    phase = ranks.phase()
    return phase if phase.startswith(SLOW_PHASES) else ""


def collect_signals() -> list[int]:
    """Returns a list that collects the scheduler's signals to the step, which the launcher may not receive itself."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    for number in _STOPS:
        signal.signal(number, note)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    return noted


def read_orders(arguments: Sequence[str]) -> AgentOrders:
    """Parses the command line of an agent, without `AGENT`."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.node_agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--store", required=True, help="host:port of the launcher's control store")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on each node")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of each rank")
    parser.add_argument("--lease", type=int, help="number of this start of the run")
    parser.add_argument("--heartbeat-timeout", type=float, help="seconds without a heartbeat until a rank is killed")
    parser.add_argument("--hangs", type=json.loads, help="when a rank counts as hung, as JSON")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU even if there are GPUs")
    parser.add_argument("--ranks-per-gpu", type=int, default=1, help="ranks that share a GPU")
    parser.add_argument("--several-hardware-queues", action="store_true", help="leave the number to CUDA on all GPUs")
    parser.add_argument("--deepspeed", action="store_true", help="the ranks use DeepSpeed")
    parser.add_argument("command", nargs="+", help="arguments after the Python interpreter of every rank")
    given = parser.parse_args(arguments)
    host, _, port = given.store.rpartition(":")
    part = NodePart(
        run_dir=given.run_dir,
        command=tuple(given.command),
        num_ranks=given.ranks,
        threads_per_rank=given.threads,
        cpu=given.cpu,
        lease=given.lease,
        heartbeat_timeout_s=given.heartbeat_timeout,
        hangs=HangSettings(**given.hangs) if given.hangs is not None else None,
        ranks_per_gpu=given.ranks_per_gpu,
        one_hardware_queue=not given.several_hardware_queues,
        deepspeed=given.deepspeed,
    )
    return AgentOrders(part, host, int(port))


def main() -> NoReturn:
    """Runs the ranks of this node to their end."""
    _run_process(read_orders(sys.argv[1:]))


if __name__ == "__main__":
    main()
