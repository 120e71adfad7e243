"""The simulated part of scripts.bench.supervisor_scale: ranks that train in lockstep, agents of many nodes, and srun.

The agents of most nodes are threads that run the real agent (megads.launch.node_agent.run_agent) with `SimulatedRanks`
in place of a node's processes. A few are real processes with real ranks, which run this file as a script.
"""

from __future__ import annotations

import json
import mmap
import os
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megads.launch.node_ranks import NodePart
    from megads.launch.rank_outcome import NodeReport
    from megads.runtime.heartbeat import RankPosition

STEP_S = 1.0
_LOADING_S = 0.1
_STACK_BYTES = 256 << 10
_SWITCH_S = 0.2
SRUN = """import json, socket, sys
with socket.socket(socket.AF_UNIX) as slurm:
    slurm.connect({path!r})
    slurm.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    sys.exit(int(slurm.makefile().readline() or 1))
"""
SCONTROL = "#!/bin/sh\necho JobId=1 JobState=RUNNING Restarts=0\n"
"""What the launcher asks before each step, in case the controller is away."""


class Lockstep:
    """Position of the ranks, shared by the processes that simulate them: all step together until none makes progress.

    Args:
        path: path of a file made by `create`.
    """

    _RECORD = struct.Struct("<ddq")

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._record = mmap.mmap(file.fileno(), self._RECORD.size)

    @classmethod
    def create(cls, path: Path) -> Lockstep:
        path.write_bytes(cls._RECORD.pack(time.monotonic(), float("inf"), -1))
        return cls(path)

    def begin(self) -> None:
        """Starts with step 1."""
        self._record[:] = self._RECORD.pack(time.monotonic(), float("inf"), -1)

    def stop(self, culprit: int | None) -> float:
        """Stops the progress of all ranks; returns the time.

        Args:
            culprit: stays in this step, while the others wait for it in the next; None: all stop at the same position.
        """
        begin, now = self._RECORD.unpack(self._record[:])[0], time.monotonic()
        self._record[:] = self._RECORD.pack(begin, now, -1 if culprit is None else culprit)
        return now

    def place(self, rank: int, now: float) -> tuple[int, str, float]:
        """Step and phase of a rank, and the seconds it has been in that phase."""
        from megads.runtime.heartbeat import ENGINE_STEP, LOADING_DATA

        begin, stopped, culprit = self._RECORD.unpack(self._record[:])
        step, into_s = divmod(max(0.0, min(now, stopped) - begin), STEP_S)
        number = int(step) + 1
        if now > stopped:
            return number + (rank != culprit and culprit >= 0), ENGINE_STEP, now - stopped
        if into_s < _LOADING_S:
            return number, LOADING_DATA, into_s
        return number, ENGINE_STEP, into_s - _LOADING_S


class SimulatedRanks:
    """Simulated ranks of a node for its agent: positions and exits, instead of `NodeRanks`.

    Args:
        part: the assignment that would be started.
        fleet: fleet of the agent.
        name: name of the node.
    """

    def __init__(self, part: NodePart, fleet: Fleet, name: str) -> None:
        from megads.launch.hang_detection import HangDetector

        self._part, self._fleet, self._node = part, fleet, name
        self._detector = HangDetector(part.hangs) if part.hangs is not None else None
        self._looked, self._suspects = 0.0, list[Any]()
        self._killed = False

    @property
    def part(self) -> NodePart:
        return self._part

    @property
    def failing(self) -> bool:
        return False

    def start(self) -> None:
        self._fleet.assigned.append(time.monotonic())

    def poll(self) -> bool:
        from megads.runtime.heartbeat import INTERVAL_S

        if self._killed:
            return False
        time.sleep(self._fleet.poll_s)
        self._fleet.polls += 1
        now = time.monotonic()
        if self._detector is not None and now - self._looked >= INTERVAL_S:
            self._looked = now
            self._suspects = list(self._detector.observe(self._positions(now)))
        return True

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._fleet.ordered.append(time.monotonic())

    def silences(self) -> list[RankPosition]:
        return []

    def phase(self) -> str:
        return ""

    def hang(self) -> list[RankPosition]:
        return self._suspects

    def silent_nodes(self) -> dict[str, float]:
        return {}

    def lost_nodes(self) -> dict[str, float]:
        return {}

    def description(self) -> dict[str, object]:
        return {"node": self._node}

    def reports(self) -> list[NodeReport]:
        from megads.launch.rank_outcome import NodeReport, RankExit

        ranks = list(self.part.ranks)
        exits = [RankExit(rank, -signal.SIGKILL) for rank in ranks]
        return [NodeReport(self._node, exits=exits, killed=ranks, positions=self._positions(time.monotonic()))]

    def _positions(self, now: float) -> list[RankPosition]:
        from megads.runtime.heartbeat import RankPosition

        places = [(rank, *self._fleet.lockstep.place(rank, now)) for rank in self.part.ranks]
        return [RankPosition(*place, node=self._node) for place in places]


class Fleet:
    """The agents of many nodes, as threads of this process.

    Args:
        main: connection to the benchmark's process: receives orders, and sends the exits of agents.
        lockstep: file of the lockstep.
        poll_s: polling interval of an agent.
    """

    def __init__(self, main: Connection, lockstep: Path, poll_s: float) -> None:
        self._main, self._lock = main, threading.Lock()
        self.lockstep, self.poll_s = Lockstep(lockstep), poll_s
        self.polls = 0
        self.assigned: list[float] = []
        self.ordered: list[float] = []
        self._signals: list[list[int]] = []

    def serve(self) -> None:
        """Executes orders of the benchmark until it closes the connection."""
        with suppress(EOFError):
            while True:
                order, *arguments = self._main.recv()
                if order == "start":
                    self._start(*arguments)
                elif order == "signal":
                    for signals in self._signals:
                        signals.append(signal.SIGTERM)
                elif order == "tell":
                    self._send("told", self.polls, list(self.assigned), list(self.ordered))

    def _start(self, arguments: list[str], mine: list[str]) -> None:
        self.assigned, self.ordered = [], []
        self._signals = [[] for _ in mine]
        for name, signals in zip(mine, self._signals, strict=True):
            threading.Thread(target=self._run, args=(arguments, name, signals), daemon=True).start()

    def _run(self, arguments: list[str], name: str, signals: list[int]) -> None:
        from megads.launch.node_agent import read_orders, run_agent

        code = 1
        try:
            code = run_agent(read_orders(arguments), name, signals, lambda part, _: SimulatedRanks(part, self, name))
        except RuntimeError as error:
            sys.stderr.write(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}\n")
        self._send("ended", name, code)

    def _send(self, *words: Any) -> None:
        with self._lock:
            self._main.send(words)


def run_fleet(main: Connection, lockstep: Path, poll_s: float) -> None:
    """Body of a process that runs simulated agents."""
    # It warns for every connection that 127.0.0.1 has no name.
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    # Imported before agents start, because on a cluster each node imports it separately.
    import megads.launch.node_agent
    import megads.runtime.control_store  # noqa: F401

    threading.stack_size(_STACK_BYTES)
    # Each thread that waits for the GIL wakes once per interval, 5 ms by default: after a fault a thousand of them kept
    # both cores busy.
    sys.setswitchinterval(_SWITCH_S)
    main.send(("ready",))
    Fleet(main, lockstep, poll_s).serve()


class Slurm:
    """Simulates srun, scontrol and SLURM's daemons: starts agents, and ends a step as --kill-on-bad-exit does.

    Args:
        folder: folder of its files; `folder/bin` belongs into the launcher's PATH.
        fleets: processes with the simulated agents.
        real: nodes whose agents and ranks are processes.
    """

    def __init__(self, folder: Path, fleets: Sequence[Connection], real: Sequence[str]) -> None:
        self._fleets, self._real = fleets, set(real)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.told: dict[int, tuple[int, list[float], list[float]]] = {}
        self._running: set[str] = set()
        self._changed = threading.Condition()
        self._srun: socket.socket | None = None
        self.steps = 0
        self._signalled = 0
        path, commands = folder / "slurm", folder / "bin"
        commands.mkdir()
        (folder / "srun.py").write_text(SRUN.format(path=str(path)))
        # Not the first line of the script: it cannot name a Python in a folder with a space.
        srun = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(folder / "srun.py"))} "$@"\n'
        for name, text in (("srun", srun), ("scontrol", SCONTROL)):
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        for fleet in fleets:
            assert fleet.recv() == ("ready",)
        threading.Thread(target=self._serve, daemon=True).start()
        for number, fleet in enumerate(fleets):
            threading.Thread(target=self._hear, args=(number, fleet), daemon=True).start()

    def tell(self) -> tuple[int, list[float], list[float]]:
        """Returns the simulated agents' number of polls, and when each agent of this step was started and stopped."""
        with self._changed:
            self.told.clear()
            for fleet in self._fleets:
                fleet.send(("tell",))
            self._changed.wait_for(lambda: len(self.told) == len(self._fleets))
            polls, assigned, ordered = zip(*self.told.values(), strict=True)
        return sum(polls), [at for some in assigned for at in some], [at for some in ordered for at in some]

    def _serve(self) -> None:
        while True:
            srun, _ = self._server.accept()
            arguments = json.loads(srun.makefile().readline())
            first = arguments.index(sys.executable)
            nodes = _expanded(arguments[arguments.index("--nodelist") + 1])
            self._start(srun, arguments[first:], nodes)

    def _start(self, srun: socket.socket, command: list[str], nodes: list[str]) -> None:
        simulated = [name for name in nodes if name not in self._real]
        with self._changed:
            self._srun, self._running = srun, set(nodes)
        for number, fleet in enumerate(self._fleets):
            fleet.send(("start", command[3:], simulated[number :: len(self._fleets)]))
        for name in nodes:
            if name in self._real:
                agent = subprocess.Popen(command, env={**os.environ, "SLURMD_NODENAME": name}, start_new_session=True)
                self.agents[name] = agent
                threading.Thread(target=self._await, args=(name, agent), daemon=True).start()
        self.steps += 1

    def _await(self, name: str, agent: subprocess.Popen[bytes]) -> None:
        self._end(name, agent.wait())

    def _hear(self, number: int, fleet: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                word, *content = fleet.recv()
                if word == "ended":
                    self._end(*content)
                else:
                    with self._changed:
                        self.told[number] = tuple(content)
                        self._changed.notify_all()

    def _end(self, name: str, code: int) -> None:
        with self._changed:
            signals = code != 0 and self._signalled <= self.steps
            self._signalled = self.steps + 1 if signals else self._signalled
            self._running.discard(name)
            if not self._running and self._srun is not None:
                with suppress(OSError):
                    self._srun.sendall(b"%d\n" % bool(code))
                self._srun.close()
                self._srun = None
        if signals:
            for fleet in self._fleets:
                with suppress(OSError):  # the simulation is over
                    fleet.send(("signal",))
            for agent in self.agents.values():
                if agent.poll() is None:
                    agent.send_signal(signal.SIGTERM)


def _expanded(names: str) -> list[str]:
    """Expands a compressed node list whose names share one prefix."""
    prefix, _, ranges = names.rstrip("]").partition("[")
    bounds = [part.split("-") for part in ranges.split(",")]
    return [f"{prefix}{n:0{len(ends[0])}}" for ends in bounds for n in range(int(ends[0]), int(ends[-1]) + 1)]


def run_rank(lockstep: Path) -> None:
    """Runs a real rank that only sends heartbeats."""
    from megads.runtime.environment import rank_environment
    from megads.runtime.heartbeat import answer_requests, heartbeat

    own, agent, training = rank_environment(), os.getppid(), Lockstep(lockstep)
    answer_requests(own.heartbeats, own.rank)
    with heartbeat(own.heartbeats, own.rank) as sent:
        last: tuple[int, str] | None = None
        while os.getppid() == agent:
            step, phase, _ = training.place(own.rank, time.monotonic())
            if (step, phase) != last:
                last = (step, phase)
                sent.enter(phase, step)
            time.sleep(_LOADING_S / 4)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
