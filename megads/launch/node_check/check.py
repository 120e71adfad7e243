"""The check of nodes: starts a checker on each, asks them, pairs them twice, and says which are not fit to train."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megads.launch.node_check.config import CheckNodesConfig
from megads.launch.node_check.judge import Measured, Pair, first_round, judge_nodes, name_faulty, second_round
from megads.runtime.environment import exported, loopback_variables
from megads.runtime.listener import launcher_address
from megads.runtime.run_secret import Secret
from megads.runtime.slurm import Allocation

CHECKER = ("-m", "megads.launch.node_check.checker")
"""Arguments of Python that start a checker."""
_POLL_S = 0.02
_LEAVE_S = 5.0


@dataclass(frozen=True)
class Checked:
    """What came of a check.

    Attributes:
        measured: of each node that answered.
        problems: of each node, nothing for a healthy one.
        pairs: that exchanged data, and how that ended: empty for well.
    """

    measured: Mapping[str, Measured]
    problems: Mapping[str, list[str]]
    pairs: Mapping[Pair, str] = field(default_factory=dict)

    @property
    def rejected(self) -> dict[str, str]:
        """The nodes that are not fit to train, each with its reasons."""
        return {node: "; ".join(problems) for node, problems in self.problems.items() if problems}


@dataclass(frozen=True)
class CheckTarget:
    """Where checkers are started.

    Attributes:
        nodes: names of those to check.
        host: address at which they reach this process.
        allocation: the SLURM job; None starts them on this machine.
        srun_options: further options of srun.
        wrapper: words before a checker's command, a container's for instance.
        command: arguments of Python that start one.
    """

    nodes: tuple[str, ...]
    host: str = "127.0.0.1"
    allocation: Allocation | None = None
    srun_options: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    command: tuple[str, ...] = CHECKER

    def resolved(self) -> CheckTarget:
        """The same with the host's address as a number, the same for all nodes.

        Raises:
            ConfigError: a node's name does not resolve here.
        """
        if self.allocation is None:
            return self
        return replace(self, host=launcher_address(self.host, [node.address for node in self.allocation.nodes]))

    def arguments(self, node: str, port: int) -> list[str]:
        """The command that starts the checker of a node."""
        srun = []
        if self.allocation is not None:
            # A step of its own for each: with one step for all, a node that is gone would hold up the others.
            srun = ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={node}", "--export=ALL", "--mpi=none"]
            srun += ["--job-name=megads-check", "--kill-on-bad-exit=1", *self.srun_options]
        store = f"{self.host}:{port}"
        return [*srun, *self.wrapper, sys.executable, *self.command, "--store", store, "--node", node]


def check_nodes(config: CheckNodesConfig, place: CheckTarget) -> Checked:
    """Checks nodes; takes at most about three times config.timeout_s.

    Raises:
        ConfigError: this process cannot listen at the address of its node.
        OSError: a checker cannot be started.
    """
    # Imported here: it pulls in torch, for which a refused config should not wait.
    from megads.launch.node_check.board import Board

    secret, place = Secret.random(), place.resolved()
    board = Board(secret, place.host, timeout_s=config.timeout_s)
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with exported(loopback_variables() if place.allocation is None else {}):
            for node in place.nodes:
                started[node] = _start(place.arguments(node, board.port), secret)
        return _Check(config, board, started).run()
    finally:
        _end(started)


def _start(arguments: Sequence[str], secret: Secret) -> subprocess.Popen[bytes]:
    """Starts a checker and tells it the secret through its input, which srun and containers pass on.

    Nodes need not share a folder for a file of it: whether they do is what the check is to find out.
    """
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=sys.stderr.fileno())
    assert process.stdin is not None
    # One that ended at once is missed later.
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(f"{secret.encode()}\n".encode())
    return process


def _end(started: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Waits shortly for checkers, which have been told that it is over, and kills the others."""
    deadline = time.monotonic() + _LEAVE_S
    for process in started.values():
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


class _Check:
    def __init__(self, config: CheckNodesConfig, board: Any, started: Mapping[str, subprocess.Popen[bytes]]):
        self._config, self._board, self._started = config, board, started
        self._missing: dict[str, str] = {}
        self._pairs: dict[Pair, str] = {}
        self._round = 0

    def run(self) -> Checked:
        self._collect("hello", list(self._started), self._answer)
        answered = [node for node in self._started if node not in self._missing]
        contents = self._collect("measured", answered)
        measured = {node: Measured.decode(contents[node]) for node in answered if node in contents}
        problems = judge_nodes(measured, self._config)
        # Nodes that did not answer cannot take part; those with other problems can, and may have this one too.
        nodes = list(measured)
        failed = self._exchange(first_round(nodes))
        again = [pair for pairs in second_round(nodes, failed) for pair in self._exchange(pairs)]
        self._board.put(f"round/{self._round}", [])
        for node, problem in name_faulty(nodes, failed, again).items():
            problems[node].append(problem)
        problems |= {node: [problem] for node, problem in self._missing.items()}
        return Checked(measured, {node: problems[node] for node in self._started}, self._pairs)

    def _answer(self, node: str) -> None:
        """Tells a checker the time, as soon as it asks, and what to do."""
        config = self._config
        folder = str(Path(config.folder).absolute())
        settings = {"time": time.time(), "folder": folder, "seconds": config.seconds, "timeout_s": config.timeout_s}
        self._board.put(f"settings/{node}", settings)

    def _collect(
        self, what: str, nodes: Sequence[str], answer: Callable[[str], None] | None = None, limit: float = 1.0
    ) -> dict[str, Any]:
        """Waits until nodes have said something; those that do not are missing.

        Args:
            what: beginning of the key.
            nodes: from which it is wanted.
            answer: called for each as soon as it has.
            limit: of the wait, in timeout_s.
        """
        found: dict[str, Any] = {}
        deadline = time.monotonic() + limit * self._config.timeout_s
        waiting = list(nodes)
        while waiting and time.monotonic() < deadline:
            for node in list(waiting):
                ended = self._started[node].poll()
                value = self._board.get(f"{what}/{node}")
                if value is not None:
                    found[node] = value
                    waiting.remove(node)
                    if answer is not None:
                        answer(node)
                elif ended is not None:
                    self._missing[node] = f"its checker ended with code {ended} before it answered"
                    waiting.remove(node)
            time.sleep(_POLL_S)
        self._missing |= dict.fromkeys(waiting, f"no answer within {self._config.timeout_s:g} s")
        return found

    def _exchange(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Has pairs exchange data; returns those that failed."""
        if not pairs:
            return []
        number, self._round = self._round, self._round + 1
        self._board.put(f"round/{number}", pairs)
        known = dict(self._missing)
        # A node that waits for a partner in vain says so when its own time is over, a little after ours began.
        said = self._collect(f"paired/{number}", [node for pair in pairs for node in pair], limit=1.5)
        self._missing = known
        failed = []
        for pair in pairs:
            words = [f"{node}: {said.get(node, 'no answer')}" for node in pair if said.get(node, "no answer")]
            self._pairs[pair] = "; ".join(words)
            if words:
                failed.append(pair)
        return failed
