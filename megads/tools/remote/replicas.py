"""Replicas of local checkpoints in the memory of another node (checkpoint.replicate), in case a node is lost.

Each rank has a process (`replica_process`) that sends its local checkpoints to the process of a rank on the next node.
That one keeps them as the rank itself does, alternating between two images. Training never waits for these transfers.
Before the first step the ranks exchange which node holds which local checkpoints.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megads.api import CheckpointError, ConfigError, ControlPlane, EventWriter, Secret
from megads.checkpoint.local_files import LocalCommit, Saved, committed, held_folders, own_folder, replica_folder
from megads.checkpoint.replication import ReplicaProgress, Replication
from megads.checkpoint.store import failure_of
from megads.runtime.environment import RankEnvironment, secret_file, store_address
from megads.runtime.heartbeat import process_stat
from megads.runtime.ports import address_towards, read_secret
from megads.tools.remote.replica_process import AllocateOrder, ReplicaOutcome, ReplicaProcess, SendOrder, ServeOrder
from megads.tools.remote.replica_transfer import Address, fetch_image

_ANSWERS_WITHIN_S = 30.0
_NAMED = 3
_MOST_UNANSWERED = 2
"""Maximum number of unanswered orders: if a stopped process let its pipe fill up, the rank would block."""
_MOST_RESTARTS = 3
"""Restarts of a rank's process in one start of the run."""


def partners_of(first_ranks: Sequence[int]) -> list[int]:
    """Which rank keeps the replicas of each rank: the one with the same local rank on the next node, in a ring.

    Args:
        first_ranks: first rank on each rank's node, by rank.

    Returns:
        The partners, by rank. If all nodes have the same number of ranks, each rank is the partner of one rank. If
        there is only one node, each rank is its own partner.
    """
    nodes: dict[int, list[int]] = {}
    for rank, first in enumerate(first_ranks):
        nodes.setdefault(first, []).append(rank)
    order = list(nodes.values())
    partners = [0] * len(first_ranks)
    for number, ranks in enumerate(order):
        following = order[(number + 1) % len(order)]
        for local_rank, rank in enumerate(ranks):
            partners[rank] = following[local_rank % len(following)]
    return partners


@dataclass(frozen=True)
class _RankProgress:
    """Replication by one rank's process, see `ReplicaProgress`.

    Attributes:
        port: port on which the process listens; 0: none.
        is_lost: whether the process died and will not be restarted.
    """

    busy: bool
    complete: bool
    failed: str
    restarted: str
    port: int
    is_lost: bool


class Replicas(Replication):
    """Replication of a rank's local checkpoints, see `Replication`; it forks the process.

    Args:
        environment: environment of this rank.
        timeout_s: a process that takes longer is considered hung.
    """

    is_on = True

    def __init__(self, environment: RankEnvironment, timeout_s: float) -> None:
        self._environment, self._timeout_s = environment, timeout_s
        self._process: ReplicaProcess | None = ReplicaProcess(fork=True)
        # Orders that initialize a process, and how many of their answers are outstanding after a restart.
        self._first_orders: list[ServeOrder | AllocateOrder] = []
        self._first_answers, self._restarts, self._restarted, self._port = 0, 0, "", 0
        self._unanswered, self._ordered_s = 0, 0.0
        self._sent: Saved | None = None
        self._complete, self._failure = False, ""
        # The failure reported last, and whether replicas are missing since.
        self._last_failed, self._lacking = "", False
        self._addresses: list[Address] = []
        self._partners: list[int] = []
        self._partner = self._keeps = environment.rank
        self._kept: Path | None = None

    @property
    def pid(self) -> int:
        """Pid of the process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    def open(self, node: Path, control: ControlPlane) -> str:
        """Starts listening and exchanges the addresses of all ranks' processes."""
        rank, self._control, self._node = control.rank, control, node
        partners = self._partners = partners_of(control.gather(rank - self._environment.local_rank, int))
        if any(partner == owner for owner, partner in enumerate(partners)):
            return "all ranks are on one node: there is no other to hold a copy"
        if sorted(partners) != list(range(control.world_size)):
            return "the nodes have different numbers of ranks"
        self._partner, self._keeps = partners[rank], partners.index(rank)
        path = secret_file()
        drawn = Secret.random().encode() if path is None else read_secret(path).encode()
        # Without a launcher there is no secret file, so the ranks share a random secret over the control plane.
        secret = control.broadcast(drawn, str) if path is None else drawn
        self._secret = Secret.decode(secret)
        address, reason = ("", 0), ""
        try:
            host = address_towards(store_address()[0])
            found = self._ask(ServeOrder(node, self._keeps, host, secret))
            address, reason, self._port = (host, found.port), found.reason, found.port
            self._kept = replica_folder(node, self._keeps)
        except (OSError, EOFError, ConfigError) as error:
            reason = failure_of(error)[0] or "its process has ended"
        answers = control.gather((*address, reason), tuple[str, int, str])
        self._addresses = [(host, port) for host, port, _ in answers]
        return _named(enumerate(reason for *_, reason in answers))

    def find(self, held: list[set[Saved]], usable: Callable[[LocalCommit], bool]) -> dict[Saved, list[int]]:
        own, local = own_folder(self._node, self._control.rank), self._environment
        # The ranks of a node split the scan of its memory.
        others = [
            (owner, *saved)
            for folder, owner in held_folders(self._node).items()
            if folder != own and owner % local.local_world_size == local.local_rank
            for saved, (_, commit) in committed(folder).items()
            if usable(commit)
        ]
        holders: dict[Saved, list[int]] = {}
        for holder, found in enumerate(self._control.gather(others, list[tuple[int, int, int]])):
            for owner, start, step in found:
                if owner < len(held):
                    held[owner].add((start, step))
                    if owner == self._control.rank:
                        holders.setdefault((start, step), []).append(holder)
        return holders

    def allocate(self, size: int, free_bytes: int) -> str:
        kept, reason = self._control.gather(size, int)[self._keeps], ""
        there = sum(path.stat().st_size for path in self._kept.glob("*/*.safetensors")) if self._kept else 0
        missing = max(0, 2 * kept - there)
        if missing > free_bytes:
            reason = f"replicas of another rank need {missing / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB are free"
        else:
            try:
                reason = self._ask(AllocateOrder(kept), self._timeout_s).reason
            except (OSError, EOFError) as error:
                reason = failure_of(error)[0]
        return _named(enumerate(self._control.gather(reason, str)))

    def send(self, image: Path, saved: Saved, start: int, base: Saved | None) -> None:
        """Orders the process to send a committed image to the partner."""
        self._sent, self._complete = saved, False
        there = self._addresses[self._partner][1]
        if self._process is None or not there or self._first_answers or self._unanswered == _MOST_UNANSWERED:
            return
        order = SendOrder(image, self._environment.rank, saved, start, base, self._addresses[self._partner])
        try:
            self._process.connection.send(order)
        except OSError:
            return
        self._unanswered += 1
        self._ordered_s = time.perf_counter()

    def progress(self) -> ReplicaProgress:
        """Progress of the processes of all ranks; collective. A process that has died is restarted."""
        self._poll()
        # After a failure, the next attempt does not count as busy: a partner may be stopped for hours.
        busy = self._unanswered > 0 and not self._failure
        is_lost = self._process is None
        own = _RankProgress(busy, self._complete, self._failure, self._restarted, self._port, is_lost)
        self._restarted = ""
        found = self._control.gather(own, _RankProgress)
        # Do not report that a process was unreachable before its restart: its death is reported already.
        before = [port for _, port in self._addresses]
        self._addresses = [(host, rank.port) for (host, _), rank in zip(self._addresses, found, strict=True)]
        reached = [rank.port == port != 0 for rank, port in zip(found, before, strict=True)]
        if not reached[self._partner] and self._process is not None:
            self._failure = ""
        failed = _named(
            (at, rank.failed) for at, rank in enumerate(found) if rank.is_lost or reached[self._partners[at]]
        )
        restarted = _named((at, rank.restarted) for at, rank in enumerate(found))
        complete = all(rank.complete for rank in found)
        return ReplicaProgress(any(rank.busy for rank in found), complete, failed, restarted)

    def report(self, progress: ReplicaProgress, events: EventWriter, step: int) -> None:
        if progress.restarted:
            self._lacking = True
            events.write("replica_restarted", level="warning", step=step, reason=progress.restarted)
        if progress.failed and progress.failed != self._last_failed:
            self._lacking = True
            events.write("replica_failed", level="warning", step=step, reason=progress.failed)
        self._last_failed = progress.failed
        if progress.complete and self._lacking:
            self._lacking = False
            events.write("replicas_complete_again", step=step)

    def _poll(self) -> None:
        """Receives the answers of the process, and records why there are none."""
        if self._process is None:
            return
        try:
            while self._process.connection.poll():
                outcome: ReplicaOutcome = self._process.connection.recv()
                if self._first_answers and outcome.reason:
                    self._restart(outcome.reason)
                    return
                self._take(outcome)
        except (EOFError, OSError):
            self._restart()
            return
        if not self._unanswered and not self._first_answers:
            return
        if process_stat(self.pid)[:1] == ["T"]:
            self._failure = f"{self._name} is stopped (SIGSTOP)"
        elif time.perf_counter() - self._ordered_s > self._timeout_s:
            self._failure = f"{self._name} has not answered for {self._timeout_s:.0f} s"

    def _take(self, outcome: ReplicaOutcome) -> None:
        """Records the outcome of an order."""
        if self._first_answers:
            self._first_answers -= 1
            self._port = outcome.port or self._port
            return
        self._unanswered -= 1
        self._failure = f"copy to rank {self._partner}: {outcome.reason}" if outcome.reason else ""
        self._complete = not outcome.reason and not outcome.overtaken and outcome.saved == self._sent

    @property
    def _name(self) -> str:
        return f"its replica process, {self.pid},"

    def _restart(self, reason: str = "") -> None:
        """Replaces a process that has died, up to _MOST_RESTARTS times; the rank does not wait for the new one.

        Args:
            reason: why a live process is not usable; empty if it has died.
        """
        assert self._process is not None
        ended = self._process.kill()
        process = f"{self._name} {reason or ended or 'has ended'}"
        self._process, self._port = None, 0
        self._unanswered, self._first_answers, self._complete, self._failure = 0, 0, False, ""
        if self._restarts == _MOST_RESTARTS:
            self._failure = f"{process}, after {_MOST_RESTARTS} restarts: not started again"
            return
        self._restarts += 1
        try:
            self._process = ReplicaProcess(fork=False)
            for order in self._first_orders:
                self._process.connection.send(order)
        except OSError as error:
            self._failure = f"{process}, and cannot be started again: {failure_of(error)[0]}"
            return
        self._first_answers, self._ordered_s = len(self._first_orders), time.perf_counter()
        self._restarted = f"{process}: started again ({self._restarts} of {_MOST_RESTARTS})"

    def fetch(self, saved: Saved, holders: Sequence[int], image: Path) -> LocalCommit:
        reasons = []
        for holder in holders:
            try:
                return fetch_image(self._addresses[holder], self._secret, self._environment.rank, saved, image)
            except (CheckpointError, OSError) as error:
                reasons.append(f"from rank {holder}'s node: {failure_of(error)[0]}")
        raise CheckpointError("; ".join(reasons) or "no node holds it")

    def _ask(self, order: ServeOrder | AllocateOrder, within_s: float = _ANSWERS_WITHIN_S) -> ReplicaOutcome:
        assert self._process is not None
        self._first_orders.append(order)
        self._process.connection.send(order)
        if not self._process.connection.poll(within_s):
            raise TimeoutError(0, f"its process has not answered for {within_s:.0f} s")
        outcome: ReplicaOutcome = self._process.connection.recv()
        return outcome

    def remove(self) -> None:
        """Ends the process and frees the memory of the replicas that this rank keeps."""
        self.close()
        if self._kept is not None:
            shutil.rmtree(self._kept, ignore_errors=True)

    def close(self) -> None:
        """Ends the process; complete replicas are kept for the next start."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def _named(reasons: Iterable[tuple[int, str]]) -> str:
    """The first few reasons, with their ranks."""
    return "; ".join([f"rank {rank}: {reason}" for rank, reason in reasons if reason][:_NAMED])
