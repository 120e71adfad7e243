"""The agent of one node: `python -m megads.launch.agent <run_dir> ... -- <command of a rank>`, started by srun only.

It starts the ranks of its node and talks with the launcher. It ends when its ranks have, when the launcher says so, and
when the launcher is gone: no rank outlives it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megads.errors import EXIT_BUG, EXIT_OK, ConfigError, MegadsError
from megads.launch.node_ranks import NodePart, NodeRanks, require_devices
from megads.launch.rank import redirect_output
from megads.launch.rank_outcome import NodeReport
from megads.runtime import environment, slurm
from megads.runtime.environment import node_name
from megads.runtime.run_dir import agent_log_path
from megads.runtime.run_secret import read_secret, secret_path

if TYPE_CHECKING:
    from megads.runtime.control_store import ControlStore

_POLL_S = 2.0
_GIVE_UP_S = 900.0
# SLURM marks a node that does not answer with a star, before it takes it to be down.
_GONE = ("*", "DOWN", "FAIL", "NOT_RESPONDING")


def send_back_when_orphaned() -> str:
    """Puts the job back into the queue once SLURM finds the batch script's node gone; returns what happened.

    Called on another node of the job when the launcher is not there any more. Does nothing where the job ends by
    itself: then the launcher ended, and not its node. SLURM may end this process before, with its step.
    """
    job = environment.slurm_variables().get("SLURM_JOB_ID")
    if job is None:
        return ""
    deadline = time.monotonic() + _GIVE_UP_S
    first: str | None = None
    while time.monotonic() < deadline:
        try:
            found = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "job", job))
            first = found.get("Restarts", "0") if first is None else first
            if found.get("JobState") != "RUNNING" or found.get("Restarts", "0") != first:
                return f"job {job} is {found.get('JobState')}: it ends without help"
            host = found.get("BatchHost", "")
            state = slurm.fields(slurm.ask("scontrol", "--oneliner", "show", "node", host)).get("State", "")
            if any(sign in state for sign in _GONE):
                slurm.ask("scontrol", "requeue", job)
                return f"job {job} is requeued: its batch script was on {host}, which is {state}"
        except ConfigError as error:
            sys.stdout.write(f"{error}\n")  # the agent's log
        time.sleep(_POLL_S)
    return f"job {job} still runs, and its batch node answers"


REPORT = "report"
FAILING = "failing"
SIGNALLED = "signalled"
SILENCE = "silence"
_END_WITHIN_S = 5.0
_STOPS = (signal.SIGTERM, signal.SIGUSR1)
_IGNORED = (signal.SIGINT, signal.SIGHUP)


def run_agent(part: NodePart, host: str, port: int) -> NoReturn:
    """Runs the node's ranks to their end; never returns.

    The process exits 0 when all ranks returned, whatever their codes: the launcher knows them from the report.

    Args:
        part: what to start.
        host: address of the launcher's control store.
        port: its port.
    """
    redirect_output(agent_log_path(part.run_dir, part.node))
    name, now = environment.node_name(), time.strftime("%F %T%z")
    sys.stdout.write(f"--- node {part.node} of {part.num_nodes}, {name}, pid {os.getpid()}, {now}\n")
    from megads.runtime.control_store import ControlStore

    code = EXIT_BUG
    try:
        control = ControlStore(read_secret(secret_path(part.run_dir, part.lease)), host, port)
        ranks = NodeRanks(part, control)
        report = _report(ranks, control, _note_signals())
        control.say({"word": REPORT, "number": part.node, "report": report.encode()})
        code = EXIT_BUG if report.failed else EXIT_OK
    except RuntimeError:
        # The launcher is gone: with its node?
        traceback.print_exc()
        sys.stdout.write(f"{send_back_when_orphaned()}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        # Without the interpreter's shutdown, in which a thread that waits for other nodes could hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _report(ranks: NodeRanks, control: ControlStore, signals: list[int]) -> NodeReport:
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


def _watch(ranks: NodeRanks, control: ControlStore, signals: list[int]) -> None:
    """Waits for the end of the ranks, which may be ordered.

    Args:
        ranks: started.
        control: where the launcher listens.
        signals: those that came, live; they are the launcher's to answer.
    """
    told, ordered_at = False, 0.0
    while ranks.poll():
        if signals:
            signals.clear()
            control.say({"word": SIGNALLED, "number": ranks.part.node})
        for position in ranks.silences():
            control.say({"word": SILENCE, "number": ranks.part.node, "position": dataclasses.asdict(position)})
        if ranks.failing and not told:
            told = True
            control.say({"word": FAILING, "number": ranks.part.node})
        if control.end_ordered():
            ordered_at = ordered_at or time.monotonic()
            ranks.kill()
            # A process in an uninterruptible call outlives SIGKILL.
            if time.monotonic() - ordered_at > _END_WITHIN_S:
                return


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


def main() -> NoReturn:
    """Starts the ranks of this node and stays until they have ended."""
    parser = argparse.ArgumentParser(prog="python -m megads.launch.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--store", required=True, help="host:port of the launcher's control store")
    parser.add_argument("--nodes", required=True, help="name=address of every node, in the order of their ranks")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on each node")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of each rank")
    parser.add_argument("--lease", type=int, help="number of this start of the run")
    parser.add_argument("--heartbeat-timeout", type=float, help="seconds without a heartbeat until a rank is killed")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU, whatever GPUs there are")
    parser.add_argument("command", nargs="+", help="arguments after the Python interpreter of every rank")
    arguments = parser.parse_args()
    host, _, port = arguments.store.rpartition(":")
    nodes = dict(node.split("=", 1) for node in arguments.nodes.split(","))
    name = node_name()
    part = NodePart(
        run_dir=arguments.run_dir,
        command=tuple(arguments.command),
        num_ranks=arguments.ranks,
        threads_per_rank=arguments.threads,
        cpu=arguments.cpu,
        lease=arguments.lease,
        node=list(nodes).index(name),
        num_nodes=len(nodes),
        address=nodes[name],
        heartbeat_timeout_s=arguments.heartbeat_timeout,
    )
    run_agent(part, host, int(port))


if __name__ == "__main__":
    main()
