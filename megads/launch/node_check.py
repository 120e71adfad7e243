"""The health check of nodes: starts a checker on each, asks them, pairs them twice, and judges which can train."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megads.errors import ConfigError
from megads.runtime.config import LONGEST_WAIT_S, ClusterKind
from megads.runtime.environment import exported, loopback_variables
from megads.runtime.listener import launcher_address
from megads.runtime.run_secret import Secret
from megads.runtime.slurm import Allocation

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

CHECKER = ("-m", "megads.launch.node_checker")
"""Arguments of Python that start a checker."""
# Each is a process of its own.
_MOST_CHECKERS = 256
_POLL_S = 0.02
_BOARD_POLL_S = 0.01
_LEAVE_S = 5.0
_GIB = 2**30

Pair = tuple[str, str]
"""Names of two nodes that exchange data."""


@dataclass
class CheckNodesConfig:
    """The check of the nodes of a SLURM job, or of this machine."""

    cluster: ClusterKind | None = None
    """slurm: every node of the SLURM job that this is called in; local: this machine; null is slurm inside a job."""
    checkers: int = 1
    """Processes that take part on this machine with cluster=local, paired with each other as nodes are."""
    folder: str = "runs"
    """Where every node writes and reads a file: the folder that runs are written to."""
    timeout_s: float = 60.0
    """A node that has not answered by then is not healthy; the same for its measurements and each round of pairs."""
    seconds: float = 0.5
    """How long each speed is measured."""
    min_of_median: float = 0.5
    """A node whose matrix products run at less than this share of the median of all nodes is not healthy."""
    min_disk_of_median: float = 0.02
    """The same for writing to and reading from `folder`, whose speed depends on who else uses it."""
    min_tflops: float = 0.0
    """TFLOP/s that every device must reach in matrix products, whatever the median."""
    min_disk_mb_per_s: float = 1.0
    """MB/s that every node must reach in writing to `folder`."""
    min_disk_free_gib: float = 0.2
    """Free space that every node must see in `folder`, in GiB."""
    min_memory_gib: float = 0.25
    """Memory that must be available on every node, in GiB."""
    max_clock_offset_s: float = 5.0
    """Most difference between a node's clock and this one's, beyond what the network leaves uncertain."""
    json: bool = False
    """Print JSON instead of a table."""

    def check(self) -> None:
        """Raises ConfigError on what can never be met or means nothing."""
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
class Measured:
    """What a node found about itself.

    Attributes:
        devices: what computes, "cpu" or the names of the GPUs.
        tflops: of each device in matrix products, the best of many.
        wrong_products: devices whose products were not exact.
        memory_bytes: available.
        disk_free_bytes: in the folder of runs.
        write_bytes_per_s: into it, synced.
        read_bytes_per_s: from it.
        loopback_bytes_per_s: through a socket to itself.
        clock_offset_s: its clock less the coordinator's.
        clock_uncertainty_s: half of the time that asking took.
        errors: what failed, by the name of the measurement.
    """

    devices: tuple[str, ...]
    tflops: tuple[float, ...]
    wrong_products: tuple[str, ...]
    memory_bytes: float
    disk_free_bytes: float
    write_bytes_per_s: float
    read_bytes_per_s: float
    loopback_bytes_per_s: float
    clock_offset_s: float
    clock_uncertainty_s: float
    errors: Mapping[str, str]

    def encode(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def decode(cls, content: Mapping[str, Any]) -> Measured:
        """Reads what `encode` made and JSON carried."""
        lists = {key: tuple(content[key]) for key in ("devices", "tflops", "wrong_products")}
        values: dict[str, Any] = {**content, **lists}
        return cls(**values)


def judge_nodes(measured: Mapping[str, Measured], config: CheckNodesConfig) -> dict[str, list[str]]:
    """Returns what is wrong with each node that answered, an empty list for nothing.

    Speeds are held against the median of all nodes, and against an absolute floor: a cluster of equally slow nodes
    has a median too.
    """
    slowest = {node: min(result.tflops, default=0.0) for node, result in measured.items()}
    problems = {node: _own_problems(result, config) for node, result in measured.items()}
    _add_slow(problems, slowest, config.min_of_median, "matrix products at", lambda value: f"{value:.3g} TFLOP/s")
    for name, key in (("writes to the folder at", "write_bytes_per_s"), ("reads from it at", "read_bytes_per_s")):
        speeds = {node: getattr(result, key) for node, result in measured.items()}
        _add_slow(problems, speeds, config.min_disk_of_median, name, lambda value: f"{value / 1e6:.0f} MB/s")
    return problems


def _own_problems(result: Measured, config: CheckNodesConfig) -> list[str]:
    """What is wrong whatever the other nodes are like."""
    problems = [f"{name}: {error}" for name, error in result.errors.items()]
    problems += [f"{device} computes wrong matrix products" for device in result.wrong_products]
    for device, tflops in zip(result.devices, result.tflops, strict=True):
        if tflops < config.min_tflops:
            problems.append(f"{device}: {tflops:.3g} TFLOP/s, min_tflops is {config.min_tflops:g}")
    if result.memory_bytes < config.min_memory_gib * _GIB:
        problems.append(f"{result.memory_bytes / _GIB:.2f} GiB of memory left, want {config.min_memory_gib:g}")
    if "disk" not in result.errors:
        if result.disk_free_bytes < config.min_disk_free_gib * _GIB:
            problems.append(f"{result.disk_free_bytes / _GIB:.2f} GiB of disk left, want {config.min_disk_free_gib:g}")
        if result.write_bytes_per_s < config.min_disk_mb_per_s * 1e6:
            problems.append(f"writes {result.write_bytes_per_s / 1e6:.1f} MB/s, want {config.min_disk_mb_per_s:g}")
    if abs(result.clock_offset_s) - result.clock_uncertainty_s > config.max_clock_offset_s:
        problems.append(f"its clock is off by {result.clock_offset_s:+.1f} s")
    return problems


def _add_slow(
    problems: dict[str, list[str]],
    speeds: Mapping[str, float],
    share: float,
    what: str,
    show: Callable[[float], str],
) -> None:
    if not speeds:
        return
    median = statistics.median(speeds.values())
    for node, speed in speeds.items():
        if speed < share * median:
            problems[node].append(f"{what} {show(speed)}, the median of the nodes is {show(median)}")


def first_round(nodes: Sequence[str]) -> list[Pair]:
    """Neighbours in pairs; of an odd number the last sits out."""
    return [(nodes[place], nodes[place + 1]) for place in range(0, len(nodes) - 1, 2)]


def second_round(nodes: Sequence[str], failed: Collection[Pair]) -> list[list[Pair]]:
    """Pairs each node that is not known to be good with one that is: of a pair that passed, or, where none did, the one
    that sat out, as a single faulty node is what to expect.

    Args:
        nodes: all that take part.
        failed: pairs of the first round that failed.

    Returns:
        Rounds of pairs; within one no node is in two of them. None where no node is known to be good, and where there
        is no doubt.
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


def name_faulty(nodes: Sequence[str], first: Collection[Pair], second: Collection[Pair]) -> dict[str, str]:
    """Returns the nodes that fail in exchanging data, with the reason.

    A node that failed with its neighbour, and again with one that is known to be good, is faulty itself; its neighbour
    is not. Where nothing but a pair that failed is there, nobody can tell, and both are named.

    Args:
        nodes: all that took part.
        first: pairs of the first round that failed.
        second: pairs of the second round that failed, the doubtful node first.
    """
    if not second_round(nodes, first):
        return {
            node: f"exchanging data fails with {a if node == b else b}; one of the two is to blame"
            for a, b in first
            for node in (a, b)
        }
    partners = {node: b if node == a else a for a, b in first for node in (a, b)}
    return {
        node: "exchanging data fails with " + " and with ".join(filter(None, [partners.get(node), good]))
        for node, good in second
    }


class Board:
    """One end of the store.

    Args:
        secret: of this check.
        host: address of the coordinator.
        port: where it listens; 0 serves the store in this process, on a free port.
        timeout_s: for reaching it.

    Raises:
        ConfigError: it is to be served at an address that is not this machine's.
        RuntimeError: nobody answers there.
    """

    def __init__(self, secret: Secret, host: str, port: int = 0, timeout_s: float = 60.0):
        # Imported here: they pull in torch, for which a refused config should not wait.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        from megads.runtime.control_store import look_up, reach_store, serve_store

        limit = timedelta(seconds=timeout_s)
        store = reach_store(host, port, limit) if port else serve_store(host, limit)
        self.port = int(store.port)
        self._secret, self._look_up, self._prefixed = secret, look_up, PrefixStore
        self._store = PrefixStore(secret.name("board"), store)

    def put(self, key: str, value: Any) -> None:
        """Sets a key to what JSON can hold."""
        self._store.set(key, self._secret.seal(f"board {key}", json.dumps(value)))

    def get(self, key: str) -> Any | None:
        """Returns the value of a key, None where it is not set yet, or by somebody who is not part of the check."""
        sealed = self._look_up(self._store, key)
        text = self._secret.unseal(f"board {key}", sealed) if sealed is not None else None
        return json.loads(text) if text is not None else None

    def wait(self, key: str, timeout_s: float) -> Any | None:
        """Waits for a key; returns None when the time is over."""
        deadline = time.monotonic() + timeout_s
        while (value := self.get(key)) is None and time.monotonic() < deadline:
            time.sleep(_BOARD_POLL_S)
        return value

    def part(self, name: str) -> Store:
        """A store of its own, for a pair to meet at."""
        return self._prefixed(name, self._store)


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
    def __init__(self, config: CheckNodesConfig, board: Board, started: Mapping[str, subprocess.Popen[bytes]]):
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
