"""The agent of one node of a SLURM job: starts the node's ranks, watches them, and talks with the launcher.

srun starts it on every node, `python -m megads.launch.node_agent`; megads.launch.slurm_ranks is the launcher's end. It
ends when its ranks have, when the launcher says so, and when the launcher is gone: no rank outlives it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Protocol

from megads.errors import EXIT_BUG, EXIT_OK, ConfigError, MegadsError
from megads.launch.hang_detection import HangSettings
from megads.launch.node_ranks import NodePart, NodeRanks, Ranks, require_devices
from megads.launch.rank import redirect_output
from megads.launch.rank_outcome import NodeReport
from megads.runtime import environment, slurm
from megads.runtime.heartbeat import SLOW_PHASES
from megads.runtime.run_dir import agent_log_path
from megads.runtime.run_secret import read_secret, secret_path

if TYPE_CHECKING:
    from megads.runtime.control_store import ControlStore

AGENT = ("-m", "megads.launch.node_agent")
"""Arguments of Python that start an agent; `read_part` reads what follows."""

# What an agent says to the launcher.
REPORT = "report"
FAILING = "failing"
SIGNALLED = "signalled"
SILENCE = "silence"
PHASE = "phase"
HANG = "hang"
_END_WITHIN_S = 5.0
_STOPS = (signal.SIGTERM, signal.SIGUSR1)
_IGNORED = (signal.SIGINT, signal.SIGHUP)
_ASK_SLURM_EVERY_S = 1.0
# A slurmd that is only restarted answers again.
_SILENT_TIMES = 2
# All nodes of a large job asking SLURM at once would be the next failure.
_NODES_THAT_ASK = 4
_ORPHAN_GIVES_UP_S = 900.0
# SLURM marks a node that does not answer with a star, before it takes it to be down.
_GONE = ("*", "DOWN", "FAIL", "NOT_RESPONDING")


class RanksOfNode(Ranks, Protocol):
    """The ranks of one node, as its agent needs them."""

    @property
    def part(self) -> NodePart:
        """What is started."""
        ...

    @property
    def failing(self) -> bool:
        """Whether a rank has failed, once `poll` saw it."""
        ...


def _send_back_when_orphaned() -> str:
    """Puts the job back into the queue when the batch script's node is gone; returns what happened.

    Called on another node of the job when the launcher is not there any more. Does nothing where the job ends by
    itself: then the launcher ended, and not its node. It does not wait until SLURM takes the node to be down: then
    SLURM kills the step, this process with it, and with --no-kill the job would idle until its time limit.
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
                return f"job {job} is {found.get('JobState')}: it ends without help"
            # As first told: SLURM takes a lost node off the job.
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


def run_agent(
    part: NodePart,
    host: str,
    port: int,
    signals: list[int],
    make_ranks: Callable[[NodePart, ControlStore], RanksOfNode] = NodeRanks,
) -> int:
    """Runs the node's ranks to their end, and reports it to the launcher.

    Args:
        part: what to start.
        host: address of the launcher's control store.
        port: its port.
        signals: those that came, live; they are the launcher's to answer.
        make_ranks: called with the part and the control store; simulations have their own.

    Returns:
        0 when all ranks returned, whatever their codes: the launcher knows them from the report.

    Raises:
        RuntimeError: the launcher is gone.
    """
    from megads.runtime.control_store import ControlStore

    control = ControlStore(read_secret(secret_path(part.run_dir, part.lease)), host, port)
    report = _report(make_ranks(part, control), control, signals)
    control.say({"word": REPORT, "number": part.node, "report": report.encode()})
    return EXIT_BUG if report.failed else EXIT_OK


def _run_process(part: NodePart, host: str, port: int) -> NoReturn:
    """`run_agent` as this process's only work; never returns."""
    redirect_output(agent_log_path(part.run_dir, part.node))
    name, now = environment.node_name(), time.strftime("%F %T%z")
    sys.stdout.write(f"--- node {part.node} of {part.num_nodes}, {name}, pid {os.getpid()}, {now}\n")
    code = EXIT_BUG
    try:
        code = run_agent(part, host, port, _note_signals())
    except RuntimeError:
        # The launcher is gone: with its node?
        traceback.print_exc()
        if part.node < _NODES_THAT_ASK:
            sys.stdout.write(f"{_send_back_when_orphaned()}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the interpreter's shutdown, in which a thread that waits for other nodes could hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report(ranks: RanksOfNode, control: ControlStore, signals: list[int]) -> NodeReport:
    """Starts and watches the ranks; returns how it ended."""
    part = ranks.part
    try:
        if not part.cpu:
            require_devices(part.num_ranks, "ranks of a node")
        ranks.start()
        _watch(ranks, control, signals)
    except MegadsError as error:
        return NodeReport(environment.node_name(), error=str(error), exit_code=error.exit_code)
    except Exception as error:
        traceback.print_exc()
        ranks.kill()
        of_ranks = ranks.reports()[0]
        return dataclasses.replace(of_ranks, error=f"{type(error).__name__}: {error}\n  log: {_log(part)}")
    return ranks.reports()[0]


def _watch(ranks: RanksOfNode, control: ControlStore, signals: list[int]) -> None:
    """Waits for the end of the ranks, which may be ordered.

    Args:
        ranks: started.
        control: where the launcher listens.
        signals: those that came, live; they are the launcher's to answer.
    """
    told, ordered_at, told_phase, told_hang = False, 0.0, "", False
    while ranks.poll():
        if signals:
            signals.clear()
            control.say({"word": SIGNALLED, "number": ranks.part.node})
        for position in ranks.silences():
            control.say({"word": SILENCE, "number": ranks.part.node, "position": dataclasses.asdict(position)})
        if ranks.part.node == 0 and (phase := _slow_phase(ranks)) != told_phase:
            told_phase = phase
            control.say({"word": PHASE, "number": ranks.part.node, "phase": phase})
        if bool(hang := ranks.hang()) != told_hang:
            told_hang = bool(hang)
            positions = [dataclasses.asdict(position) for position in hang]
            control.say({"word": HANG, "number": ranks.part.node, "positions": positions})
        if ranks.failing and not told:
            told = True
            control.say({"word": FAILING, "number": ranks.part.node})
        if control.end_ordered():
            ordered_at = ordered_at or time.monotonic()
            ranks.kill()
            # A process in an uninterruptible call outlives SIGKILL.
            if time.monotonic() - ordered_at > _END_WITHIN_S:
                return


def _slow_phase(ranks: RanksOfNode) -> str:
    """What holds up the steps of rank 0; empty while it steps."""
    phase = ranks.phase()
    return phase if phase.startswith(SLOW_PHASES) else ""


def _note_signals() -> list[int]:
    """Returns the list in which a scheduler's signals to the step will be; the launcher may not get them itself."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    for number in _STOPS:
        signal.signal(number, note)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    return noted


def _log(part: NodePart) -> Path:
    return agent_log_path(part.run_dir, part.node)


def read_part(arguments: Sequence[str], name: str) -> tuple[NodePart, str, int]:
    """What the command line of the agents asks of one of them.

    Args:
        arguments: after `AGENT`.
        name: of the agent's node.

    Returns:
        What to start, and the address and the port of the launcher's control store.
    """
    parser = argparse.ArgumentParser(prog="python -m megads.launch.node_agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--store", required=True, help="host:port of the launcher's control store")
    parser.add_argument("--nodes", required=True, help="name=address of every node, in the order of their ranks")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on each node")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of each rank")
    parser.add_argument("--lease", type=int, help="number of this start of the run")
    parser.add_argument("--heartbeat-timeout", type=float, help="seconds without a heartbeat until a rank is killed")
    parser.add_argument("--hangs", type=json.loads, help="when a rank counts as hung, as JSON")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever GPUs there are")
    parser.add_argument("command", nargs="+", help="arguments after the Python interpreter of every rank")
    given = parser.parse_args(arguments)
    host, _, port = given.store.rpartition(":")
    nodes = dict(node.split("=", 1) for node in given.nodes.split(","))
    part = NodePart(
        run_dir=given.run_dir,
        command=tuple(given.command),
        num_ranks=given.ranks,
        threads_per_rank=given.threads,
        cpu=given.cpu,
        lease=given.lease,
        node=list(nodes).index(name),
        num_nodes=len(nodes),
        address=nodes[name],
        heartbeat_timeout_s=given.heartbeat_timeout,
        hangs=HangSettings(**given.hangs) if given.hangs is not None else None,
    )
    return part, host, int(port)


def main() -> NoReturn:
    """Starts the ranks of this node and stays until they have ended."""
    _run_process(*read_part(sys.argv[1:], environment.node_name()))


if __name__ == "__main__":
    main()
