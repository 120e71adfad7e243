#!/usr/bin/env python3
"""Cost of a SLURM job's launcher, and response time to a fault, by number of nodes: up to 16,000 GPUs.

    python -m scripts.bench.supervisor_scale [--nodes 100 500 2000] [--ranks 8]

The launcher is real (megads.launch.launcher with SlurmRanks, in a separate process), and so are the agents' protocol
and its TCP connections. srun, the network and the ranks of all but two nodes are simulated. On these two, agents and
ranks are processes, and faults are injected into them: a rank is killed (dead), a rank makes no progress while all
others wait for it (hung), no rank makes progress and none is behind (stuck), a node stops with its agent (silent).
After each the launcher restarts all agents.

The agents share the machine's cores with the launcher, so use the launcher's own CPU seconds per second; `pace` is the
share of their checks that the simulated agents found time for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console as Terminal
from rich.table import Table

from megads.launch.hang_detection import HangSettings
from megads.launch.node_ranks import POLL_S
from scripts.bench import supervisor_fleet
from scripts.bench.supervisor_fleet import Lockstep, Slurm, run_fleet

SPAWN = multiprocessing.get_context("spawn")
FAULTS = ("dead", "hung", "stuck", "silent")
_RAMP_S = 12.0
"""Seconds of training before a fault, from which the agents learn the duration of a step."""
_GIVEN_UP_S = 150.0
"""Longest wait for the reaction to a fault."""


@dataclass
class Measured:
    """Results for one number of nodes.

    Attributes:
        nodes: nodes of the run.
        ranks: ranks per node.
        start_s: from the launcher's start of the agents until the last one has its assignment.
        messages_per_s: messages per second received by the launcher's store.
        received_bytes_per_s: bytes per second received by the store.
        sent_bytes_per_s: bytes per second sent by the store.
        cpu: CPU seconds per second of the launcher.
        memory_bytes: resident memory of the launcher.
        connections: open files of the launcher.
        pace: share of their checks that the simulated agents found time for.
        faults: by fault, in seconds since it: detected (the launcher knows), ordered (it orders the end), agreed (the
            last agent has the order to end), ended (all agents have), restarted (the last agent has its new
            assignment); and the CPU seconds of the launcher and of the simulated agents until all agents had ended.
    """

    nodes: int
    ranks: int
    start_s: float = 0.0
    messages_per_s: float = 0.0
    received_bytes_per_s: float = 0.0
    sent_bytes_per_s: float = 0.0
    cpu: float = 0.0
    memory_bytes: int = 0
    connections: int = 0
    pace: float = 0.0
    faults: dict[str, dict[str, float | None]] = field(default_factory=dict)


def run_launcher(told: Any, folder: Path, nodes: int, ranks: int, hang_min_s: float, starts: int) -> None:
    """Body of the launcher's process: starts the ranks repeatedly, as `megads train` does after a fault.

    Args:
        told: connection to report how each start ended.
        folder: folder of the run directory.
        nodes: nodes that take part; one more is a spare.
        ranks: ranks per node.
        hang_min_s: value of cluster.hang_min_s.
        starts: number of starts.
    """
    from megads.config.root import RootConfig
    from megads.launch.launcher import LaunchSpec, launch
    from megads.launch.scheduler import Scheduler
    from megads.launch.slurm_ranks import SlurmPlacement, SlurmRanks
    from megads.monitor.console import Console
    from megads.runtime.slurm import Allocation, Node, SlurmJob

    all_nodes = [Node(name, f"127.0.{n // 250}.{n % 250 + 1}") for n, name in enumerate(names(nodes + 1))]
    placement = SlurmPlacement(Allocation(SlurmJob("1", 0, "bench"), tuple(all_nodes)), tuple(all_nodes[:nodes]), ranks)
    spec = LaunchSpec(
        run_dir=folder / "run",
        num_ranks=nodes * ranks,
        command=(supervisor_fleet.__file__, str(folder / "lockstep")),
        threads_per_rank=1,
        cpu=True,
        hangs=HangSettings(hang_min_s, 480.0),
        kills_hung=True,
    )
    with (folder / "launcher.log").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        for start in range(1, starts + 1):
            spec = LaunchSpec(**{**vars(spec), "lease": start})
            group = placement.ranks(spec, RootConfig())
            assert isinstance(group, SlurmRanks)
            told.send(("starting", time.monotonic()))
            outcome = launch(spec, Console(spec.run_dir, said), group, Scheduler())
            times = {"failed": group._failed_at, "ordered": group._ended_at, "ended": time.monotonic()}
            told.send(("ended", times, outcome.exit_code, outcome.rank, list(outcome.nodes), outcome.message))
            lost = set(outcome.nodes) if outcome.lost else set()
            kept = [node.name for node in all_nodes if node.name not in lost]
            placement = placement.on(kept[:nodes])


def names(count: int) -> list[str]:
    """Names of nodes, of a length that is common on clusters."""
    return [f"gpu-node-{number:05d}" for number in range(count)]


class Simulation:
    """One run: its launcher, its agents, and the faults.

    Args:
        folder: folder of all files.
        nodes: nodes of the run.
        ranks: ranks per node.
        processes: processes that run the simulated agents.
        poll_s: polling interval of a simulated agent.
        hang_min_s: value of cluster.hang_min_s.
        faults: faults to inject, in this order.
    """

    def __init__(
        self, folder: Path, nodes: int, ranks: int, processes: int, poll_s: float, hang_min_s: float, faults: list[str]
    ) -> None:
        (folder / "run" / "logs").mkdir(parents=True)
        self.measured = Measured(nodes, ranks)
        self._nodes, self._ranks, self._poll_s, self._faults = nodes, ranks, poll_s, faults
        self._lockstep = Lockstep.create(folder / "lockstep")
        pipes = [SPAWN.Pipe() for _ in range(processes)]
        self._processes = [
            SPAWN.Process(target=run_fleet, args=(theirs, folder / "lockstep", poll_s), daemon=True)
            for _, theirs in pipes
        ]
        for process in self._processes:
            process.start()
        all_names = names(nodes + 1)
        # Not the first node, whose agent also reports the phase of rank 0.
        self._victim = all_names[nodes - 1]
        self._slurm = Slurm(folder, [ours for ours, _ in pipes], all_names[nodes - 2 : nodes])
        self._told, told = SPAWN.Pipe()
        before = os.environ["PATH"]
        os.environ["PATH"] = f"{folder / 'bin'}:{before}"
        arguments = (told, folder, nodes, ranks, hang_min_s, len(faults) + 1)
        self._launcher = SPAWN.Process(target=run_launcher, args=arguments)
        self._launcher.start()
        os.environ["PATH"] = before

    def run(self, steady_s: float, ramp_s: float) -> Measured:
        """Measures a healthy run, then each fault.

        Args:
            steady_s: duration of the measurement of the healthy run.
            ramp_s: seconds of training before it, and before each further fault.
        """
        self._ramp_s, measured = ramp_s, self.measured
        measured.start_s = self._await_start()
        self._steady(steady_s)
        for fault in self._faults:
            measured.faults[fault] = self._inject(fault)
            if measured.faults[fault]["restarted"] is None:
                break
        return measured

    def close(self) -> None:
        """Ends all remaining processes."""
        for process in (self._launcher, *self._processes):
            process.kill()
        for agent in self._slurm.agents.values():
            for process in _family(agent.pid):
                process.kill()

    def _await_start(self) -> float:
        """Waits until all agents have their assignment; returns the seconds until the last one."""
        word, began = self._told.recv()
        assert word == "starting"
        simulated = self._nodes - 2
        self._await(lambda: len(self._slurm.tell()[1]) >= simulated, "all agents started")
        self._await(lambda: all(map(self._has_ranks, self._slurm.agents.values())), "the real agents have ranks")
        self._lockstep.begin()
        return max(self._slurm.tell()[1]) - began

    def _has_ranks(self, agent: subprocess.Popen[bytes]) -> bool:
        return agent.poll() is not None or len(_ranks_of(agent.pid)) >= self._ranks

    def _steady(self, seconds: float) -> None:
        """Measures the healthy run."""
        time.sleep(self._ramp_s)
        launcher = psutil.Process(self._launcher.pid)
        begin, before, cpu_before, polls = time.monotonic(), launcher.io_counters(), _cpu_s(launcher), self._polls()
        time.sleep(seconds)
        took_s = time.monotonic() - begin
        after, measured = launcher.io_counters(), self.measured
        # The store's server (libuv) reads one message per call; the client in its own process is not counted.
        measured.messages_per_s = (after.read_count - before.read_count) / took_s
        measured.received_bytes_per_s = (after.read_chars - before.read_chars) / took_s
        measured.sent_bytes_per_s = (after.write_chars - before.write_chars) / took_s
        measured.cpu = (_cpu_s(launcher) - cpu_before) / took_s
        measured.memory_bytes, measured.connections = launcher.memory_info().rss, launcher.num_fds()
        measured.pace = (self._polls() - polls) / took_s * self._poll_s / (self._nodes - 2)

    def _polls(self) -> int:
        return self._slurm.tell()[0]

    def _inject(self, fault: str) -> dict[str, float | None]:
        """Injects a fault; returns the seconds from it to each event."""
        time.sleep(0 if self.measured.faults == {} else self._ramp_s)
        culprit = self._nodes * self._ranks - 1
        agent = self._slurm.agents[self._victim]
        # The real agent's ranks are its children.
        family, ranks = _family(agent.pid), _ranks_of(agent.pid)
        steps = self._slurm.steps
        cpu_before = self._cpu_seconds()
        at = self._lockstep.stop(None if fault == "stuck" else culprit)
        if fault == "dead":
            ranks[str(culprit)].kill()
        elif fault == "silent":
            for process in family:
                process.suspend()
        found: dict[str, float | None] = {
            "detected": None,
            "ordered": None,
            "agreed": None,
            "ended": None,
            "restarted": None,
            "launcher_cpu_s": None,
            "agents_cpu_s": None,
        }
        if not self._told.poll(_GIVEN_UP_S):
            return found
        _, times, code, rank, nodes, message = self._told.recv()
        took = [now - before for now, before in zip(self._cpu_seconds(), cpu_before, strict=True)]
        found["launcher_cpu_s"], found["agents_cpu_s"] = took
        ordered = self._slurm.tell()[2]
        print(f"  {fault}: exit {code}, rank {rank}, nodes {nodes[:3]}: {message.splitlines()[0][:150]}", flush=True)
        known = [times[name] for name in ("failed", "ordered") if times[name] is not None]
        found["detected"] = min(known) - at if known else None
        found["ordered"] = times["ordered"] - at if times["ordered"] is not None else None
        found["agreed"] = max(ordered) - at if len(ordered) == self._nodes - 2 else None
        found["ended"] = times["ended"] - at
        for process in family:
            if process.is_running():
                process.kill()
        self._await(lambda: self._slurm.steps > steps, "the next start")
        self._await_start()
        found["restarted"] = max(self._slurm.tell()[1]) - at
        return found

    def _cpu_seconds(self) -> tuple[float, float]:
        """CPU seconds of the launcher, and of the processes that run simulated agents."""
        fleets = (psutil.Process(process.pid) for process in self._processes)
        return _cpu_s(psutil.Process(self._launcher.pid)), sum(map(_cpu_s, fleets))

    def _await(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _GIVEN_UP_S
        while not condition():
            if time.monotonic() > deadline or not self._launcher.is_alive():
                raise RuntimeError(f"{what}: not within {_GIVEN_UP_S:g} s")
            time.sleep(0.05)


def _family(pid: int) -> list[psutil.Process]:
    """A process and its descendants that still run."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _ranks_of(agent: int) -> dict[str, psutil.Process]:
    """The rank processes that an agent has started so far, by global rank."""
    found: dict[str, psutil.Process] = {}
    for process in _family(agent)[1:]:
        with suppress(psutil.Error):  # it has ended meanwhile
            if (rank := process.environ().get("RANK")) is not None:
                found.setdefault(rank, process)
    return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def simulate(
    nodes: int,
    ranks: int = 8,
    processes: int = 2,
    poll_s: float | None = None,
    hang_min_s: float = 20.0,
    steady_s: float = 10.0,
    ramp_s: float = _RAMP_S,
    faults: list[str] | None = None,
) -> Measured:
    """Simulates a run; see `Simulation`."""
    with tempfile.TemporaryDirectory(prefix="megads-scale-", ignore_cleanup_errors=True) as folder:
        pace = poll_s or max(POLL_S, nodes / 4000)
        chosen = list(FAULTS) if faults is None else faults
        simulation = Simulation(Path(folder), nodes, ranks, processes, pace, hang_min_s, chosen)
        try:
            return simulation.run(steady_s, ramp_s)
        finally:
            simulation.close()


def _show(found: list[Measured]) -> None:
    table = Table(title="The launcher of a healthy run")
    for name in (
        "nodes",
        "ranks",
        "messages/s",
        "in kB/s",
        "out kB/s",
        "CPU s/s",
        "memory MiB",
        "files",
        "start s",
        "pace",
    ):
        table.add_column(name, justify="right")
    for one in found:
        table.add_row(
            f"{one.nodes}",
            f"{one.nodes * one.ranks}",
            f"{one.messages_per_s:.0f}",
            f"{one.received_bytes_per_s / 1e3:.1f}",
            f"{one.sent_bytes_per_s / 1e3:.1f}",
            f"{one.cpu:.3f}",
            f"{one.memory_bytes / 2**20:.0f}",
            f"{one.connections}",
            f"{one.start_s:.2f}",
            f"{one.pace:.0%}",
        )
    faults = Table(title="Seconds after a fault")
    for name in (
        "nodes",
        "fault",
        "detected",
        "ordered",
        "all agreed",
        "all ended",
        "all restarted",
        "launcher CPU",
        "agents CPU",
    ):
        faults.add_column(name, justify="right")
    for one in found:
        for fault, times in one.faults.items():
            shown = ["-" if at is None else f"{at:.2f}" for at in times.values()]
            faults.add_row(f"{one.nodes}", fault, *shown)
    terminal = Terminal(width=120)
    terminal.print(table)
    terminal.print(faults)


def main() -> None:
    """Simulates each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--ranks", type=int, default=8, help="ranks per node")
    parser.add_argument("--processes", type=int, default=2, help="processes that run the simulated agents")
    parser.add_argument("--poll-s", type=float, help="polling interval of a simulated agent; a real one's is 0.1")
    parser.add_argument("--hang-min-s", type=float, default=20.0, help="value of cluster.hang_min_s")
    parser.add_argument("--steady-s", type=float, default=10.0, help="how long a healthy run is measured")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--json", type=Path, help="file to which a JSON line per number of nodes is appended")
    given = parser.parse_args()
    found = []
    for nodes in given.nodes:
        print(f"{nodes} nodes, {nodes * given.ranks} ranks", flush=True)
        one = simulate(
            nodes,
            given.ranks,
            given.processes,
            given.poll_s,
            given.hang_min_s,
            given.steady_s,
            faults=given.faults,
        )
        found.append(one)
        if given.json is not None:
            with given.json.open("a") as file:
                file.write(json.dumps(vars(one)) + "\n")
    _show(found)


if __name__ == "__main__":
    main()
