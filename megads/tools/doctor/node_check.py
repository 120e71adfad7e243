"""Health check of nodes: runs a checker on each, tests pairs of nodes in two rounds, and rejects faulty nodes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.api import (
    LONGEST_WAIT_S,
    Allocation,
    ClusterKind,
    ConfigError,
    Secret,
    child_environment,
    for_srun,
    loopback_variables,
    step_options,
)
from megads.runtime.ports import launcher_address

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

CHECKER = ("-m", "megads.tools.doctor.node_checker")
"""Python arguments that start a checker."""
# Each checker is a separate process.
_MOST_CHECKERS = 256
_POLL_S = 0.02
_BOARD_POLL_S = 0.01
_LEAVE_S = 5.0

Pair = tuple[str, str]
"""Names of two nodes that exchange data."""


@dataclass
class CheckNodesConfig:
    """Health check of the nodes of a SLURM job, or of this machine."""

    cluster: ClusterKind | None = None
    """slurm: every node of the current SLURM job; local: this machine; null: slurm inside a job, else local."""
    checkers: int = 1
    """Number of checker processes on this machine with cluster=local, paired with each other like nodes."""
    folder: str = "runs"
    """Folder in which every node writes and reads a file: the folder that runs are written to."""
    timeout_s: float = 60.0
    """Seconds until a node that does not answer is rejected; also for its measurements and for each round of pairs."""
    seconds: float = 0.5
    """Duration of each speed measurement."""
    min_of_median: float = 0.5
    """A node whose matrix multiplication speed is below this fraction of the median of all nodes is rejected."""
    min_disk_of_median: float = 0.02
    """The same for writing to and reading from `folder`, whose speed depends on other users."""
    min_tflops: float = 0.0
    """Minimum matrix multiplication speed of every device in TFLOP/s, whatever the median."""
    min_disk_mb_per_s: float = 1.0
    """Minimum speed of every node in writing to `folder`, in MB/s."""
    min_disk_free_gib: float = 0.2
    """Minimum free space in `folder` as seen by every node, in GiB."""
    min_memory_gib: float = 0.25
    """Minimum available memory of every node, in GiB."""
    max_clock_offset_s: float = 5.0
    """Maximum difference between a node's clock and this node's, beyond the uncertainty of the measurement."""
    json: bool = False
    """Print JSON instead of a table."""

    def check(self) -> None:
        """Raises ConfigError for values that are out of range or have no effect."""
        for name in ("timeout_s", "seconds"):
            if not 0 < getattr(self, name) <= LONGEST_WAIT_S:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be positive, and at most {LONGEST_WAIT_S:.0f}")
        if not 1 <= self.checkers <= _MOST_CHECKERS:
            raise ConfigError(f"checkers = {self.checkers}: must be from 1 to {_MOST_CHECKERS}")
        if self.checkers > 1 and self.cluster is ClusterKind.slurm:
            raise ConfigError(f"checkers = {self.checkers} with cluster=slurm: there is one on every node of the job")
        for name in ("min_of_median", "min_disk_of_median"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0 and below 1")


@dataclass(frozen=True)
class NodeMeasurements:
    """Measurements of a node.

    Attributes:
        devices: compute devices, "cpu" or the names of the GPUs.
        tflops: matrix multiplication speed of each device in TFLOP/s, the best of many multiplications.
        wrong_products: devices whose matrix multiplications were not exact.
        memory_bytes: available memory.
        disk_free_bytes: free space in the folder of runs.
        write_bytes_per_s: speed of writing to that folder, including fsync.
        read_bytes_per_s: speed of reading from that folder.
        loopback_bytes_per_s: speed of a loopback socket.
        clock_offset_s: the node's clock minus the coordinator's clock.
        clock_uncertainty_s: half of the round-trip time of the clock request.
        errors: errors by the name of the measurement that failed.
    """

    devices: list[str]
    tflops: list[float]
    wrong_products: list[str]
    memory_bytes: float
    disk_free_bytes: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    loopback_bytes_per_s: float
    clock_offset_s: float
    clock_uncertainty_s: float
    errors: Mapping[str, str]


def node_problems(measured: Mapping[str, NodeMeasurements], config: CheckNodesConfig) -> dict[str, list[str]]:
    """Returns the problems of each node that answered; an empty list for a healthy node.

    Speeds are compared with the median of all nodes and with an absolute minimum, because the median does not reveal
    that all nodes are slow.
    """
    problems = {}
    for node, result in measured.items():
        found = problems[node] = [f"{name}: {error}" for name, error in result.errors.items()]
        found += [f"{device} computes wrong matrix multiplications" for device in result.wrong_products]
        for device, tflops in zip(result.devices, result.tflops, strict=True):
            if tflops < config.min_tflops:
                found.append(f"{device}: {tflops:.3g} TFLOP/s, min_tflops is {config.min_tflops:g}")
        memory_gib, free_gib = result.memory_bytes / 2**30, result.disk_free_bytes / 2**30
        if memory_gib < config.min_memory_gib:
            found.append(f"{memory_gib:.2f} GiB of memory available, need {config.min_memory_gib:g}")
        if free_gib < config.min_disk_free_gib and "disk" not in result.errors:
            found.append(f"{free_gib:.2f} GiB of disk free, need {config.min_disk_free_gib:g}")
        if result.write_bytes_per_s < config.min_disk_mb_per_s * 1e6 and "disk" not in result.errors:
            found.append(f"writes {result.write_bytes_per_s / 1e6:.1f} MB/s, need {config.min_disk_mb_per_s:g}")
        if abs(result.clock_offset_s) - result.clock_uncertainty_s > config.max_clock_offset_s:
            found.append(f"its clock is off by {result.clock_offset_s:+.1f} s")
    for what, unit, least, speed_of in (
        ("matrix multiplication at", "{:.3g} TFLOP/s", config.min_of_median, lambda one: min(one.tflops, default=0.0)),
        ("writes to the folder at", "{:.0f} MB/s", config.min_disk_of_median, lambda one: one.write_bytes_per_s / 1e6),
        ("reads from it at", "{:.0f} MB/s", config.min_disk_of_median, lambda one: one.read_bytes_per_s / 1e6),
    ):
        speeds = {node: speed_of(result) for node, result in measured.items()}
        median = statistics.median(speeds.values()) if speeds else 0.0
        for node, speed in speeds.items():
            if speed < least * median:
                problems[node].append(f"{what} {unit.format(speed)}, the median of the nodes is {unit.format(median)}")
    return problems


def first_round(nodes: Sequence[str]) -> list[Pair]:
    """Pairs neighbouring nodes; with an odd number of nodes the last one is not tested."""
    return [(nodes[place], nodes[place + 1]) for place in range(0, len(nodes) - 1, 2)]


def second_round(nodes: Sequence[str], failed: Collection[Pair]) -> list[list[Pair]]:
    """Pairs each node that is not known to be good with one that is.

    Good nodes are those of pairs that passed. If no pair passed, the node that was not tested is taken to be good,
    because a single faulty node is the most likely case.

    Args:
        nodes: all tested nodes.
        failed: pairs of the first round that failed.

    Returns:
        Rounds of pairs, each node at most once per round. Empty if no node is known to be good or none is in doubt.
    """
    passed = [pair for pair in first_round(nodes) if pair not in failed]
    good = [node for pair in passed for node in pair] or list(nodes[len(nodes) // 2 * 2 :])
    doubtful = [node for node in nodes if node not in good]
    if not good:
        return []
    return [
        list(zip(doubtful[start : start + len(good)], good, strict=False))
        for start in range(0, len(doubtful), len(good))
    ]


def find_faulty_nodes(nodes: Sequence[str], first: Collection[Pair], second: Collection[Pair]) -> dict[str, str]:
    """Returns the nodes that fail to exchange data, each with the reason.

    A node that failed with its neighbour and with a node that is known to be good is faulty; its neighbour is not. If
    there is only one pair and it failed, the faulty node cannot be determined, and both are returned.

    Args:
        nodes: all tested nodes.
        first: pairs of the first round that failed.
        second: pairs of the second round that failed, the doubtful node first.
    """
    if not second_round(nodes, first):
        return {
            node: f"exchanging data fails with {a if node == b else b}; one of the two is faulty"
            for a, b in first
            for node in (a, b)
        }
    partners = {node: b if node == a else a for a, b in first for node in (a, b)}
    return {
        node: "exchanging data fails with " + " and with ".join(filter(None, [partners.get(node), good]))
        for node, good in second
    }


class CheckStore:
    """Authenticated key-value store that the coordinator and the checkers share.

    Args:
        secret: secret of this check.
        host: address of the coordinator.
        port: port of the coordinator; 0 serves the store in this process, on a free port.
        timeout_s: timeout for connecting.

    Raises:
        ConfigError: the store is to be served at an address that this machine does not have.
        RuntimeError: there is no answer at the address.
    """

    def __init__(self, secret: Secret, host: str, port: int = 0, timeout_s: float = 60.0):
        # Imported here: they import torch, which would delay the refusal of a config.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from megads.runtime.control_store import connect_store, get_if_set, start_store

        limit = timedelta(seconds=timeout_s)
        store = connect_store(host, port, limit) if port else start_store(host, limit)
        self.port = int(store.port)
        self._secret, self._look_up, self._prefixed = secret, get_if_set, PrefixStore
        self._store = PrefixStore(secret.name("board"), store)

    def put(self, key: str, value: Any) -> None:
        """Sets a key to a JSON value."""
        self._store.set(key, self._secret.seal(f"board {key}", json.dumps(value)))

    def get(self, key: str) -> Any | None:
        """Returns the value of a key; None if it is not set, or was set without this check's secret."""
        sealed = self._look_up(self._store, key)
        text = self._secret.unseal(f"board {key}", sealed) if sealed is not None else None
        return json.loads(text) if text is not None else None

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Waits for a key and returns its value; None after the timeout."""
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None and time.monotonic() < deadline:
            time.sleep(_BOARD_POLL_S)
        return value

    def part(self, name: str) -> Store:
        """A separate store, for the rendezvous of a pair."""
        return self._prefixed(name, self._store)


@dataclass(frozen=True)
class CheckResult:
    """Result of a check.

    Attributes:
        measured: measurements of each node that answered.
        problems: problems of each node; empty for a healthy one.
        pairs: error of each pair that exchanged data; empty for success.
    """

    measured: Mapping[str, NodeMeasurements]
    problems: Mapping[str, list[str]]
    pairs: Mapping[Pair, str] = field(default_factory=dict)

    @property
    def rejected(self) -> dict[str, str]:
        """The rejected nodes, each with the reasons."""
        return {node: "; ".join(problems) for node, problems in self.problems.items() if problems}


@dataclass(frozen=True)
class CheckTarget:
    """Where and how checkers are started.

    Attributes:
        nodes: names of the nodes to check.
        host: address at which the checkers reach this process.
        allocation: the SLURM job; None starts the checkers on this machine.
        srun_options: further options of srun.
        wrapper: command line before a checker's command, such as that of a container.
        command: Python arguments that start a checker.
    """

    nodes: tuple[str, ...]
    host: str = "127.0.0.1"
    allocation: Allocation | None = None
    srun_options: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    command: tuple[str, ...] = CHECKER

    def arguments(self, node: str, store: str) -> list[str]:
        """The command that starts the checker of a node, which reports to the store at host:port."""
        srun = []
        if self.allocation is not None:
            # One step per node: in a common step, a node that is gone would delay the others.
            srun = ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={node}", "--export=ALL", "--mpi=none"]
            srun += ["--job-name=megads-check", "--kill-on-bad-exit=1", *step_options(self.allocation)]
            srun += self.srun_options
        return [*srun, *self.wrapper, sys.executable, *self.command, "--store", store, "--node", node]


def check_nodes(config: CheckNodesConfig, place: CheckTarget) -> CheckResult:
    """Checks nodes; takes up to about three times config.timeout_s.

    Raises:
        ConfigError: this process cannot listen at the address of its node, or a node's name cannot be resolved.
        OSError: a checker cannot be started.
    """
    secret, host, variables = Secret.random(), place.host, None
    if place.allocation is not None:
        # A numeric address, the same for all nodes.
        host = launcher_address(host, [node.address for node in place.allocation.nodes])
        variables = for_srun()
    board = CheckStore(secret, host, timeout_s=config.timeout_s)
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with child_environment(loopback_variables() if place.allocation is None else {}):
            for node in place.nodes:
                command = place.arguments(node, f"{host}:{board.port}")
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), env=variables)
                started[node] = process
                assert process.stdin is not None
                # The standard input, which srun and containers forward, passes the secret: a file would need a folder
                # that the nodes share, which the check tests. A checker that has already ended is found missing later.
                with suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(f"{secret.encode()}\n".encode())
        return _Check(config, board, started).run()
    finally:
        # The checkers know that the check is over.
        deadline = time.monotonic() + _LEAVE_S
        for process in started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()


class _Check:
    def __init__(self, config: CheckNodesConfig, board: CheckStore, started: Mapping[str, subprocess.Popen[bytes]]):
        self._config, self._board, self._started = config, board, started
        self._missing: dict[str, str] = {}
        self._pairs: dict[Pair, str] = {}
        self._round = 0

    def run(self) -> CheckResult:
        self._collect("hello", list(self._started), self._answer)
        answered = [node for node in self._started if node not in self._missing]
        contents = self._collect("measured", answered)
        measured = {node: NodeMeasurements(**contents[node]) for node in answered if node in contents}
        problems = node_problems(measured, self._config)
        # Nodes with other problems are tested too; only those that did not answer are left out.
        nodes = list(measured)
        failed = self._exchange(first_round(nodes))
        again = [pair for pairs in second_round(nodes, failed) for pair in self._exchange(pairs)]
        self._board.put(f"round/{self._round}", [])
        for node, problem in find_faulty_nodes(nodes, failed, again).items():
            problems[node].append(problem)
        problems |= {node: [problem] for node, problem in self._missing.items()}
        return CheckResult(measured, {node: problems[node] for node in self._started}, self._pairs)

    def _answer(self, node: str) -> None:
        """Sends a checker the time, as soon as it asks, and its settings."""
        config = self._config
        folder = str(Path(config.folder).absolute())
        settings = {"time": time.time(), "folder": folder, "seconds": config.seconds, "timeout_s": config.timeout_s}
        self._board.put(f"settings/{node}", settings)

    def _collect(
        self, what: str, nodes: Sequence[str], answer: Callable[[str], None] | None = None, limit: float = 1.0
    ) -> dict[str, Any]:
        """Waits until nodes have set a key; notes those that do not as missing.

        Args:
            what: prefix of the key.
            nodes: nodes to wait for.
            answer: called for each node as soon as its key is set.
            limit: time limit as a multiple of timeout_s.
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
        """Lets pairs of nodes exchange data; returns the pairs that failed."""
        if not pairs:
            return []
        number, self._round = self._round, self._round + 1
        self._board.put(f"round/{number}", pairs)
        known = dict(self._missing)
        # A node whose partner is gone reports this after its own timeout, which started a little later than this one.
        said = self._collect(f"paired/{number}", [node for pair in pairs for node in pair], limit=1.5)
        self._missing = known
        failed = []
        for pair in pairs:
            words = [f"{node}: {said.get(node, 'no answer')}" for node in pair if said.get(node, "no answer")]
            self._pairs[pair] = "; ".join(words)
            if words:
                failed.append(pair)
        return failed
