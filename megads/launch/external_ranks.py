"""Ranks that a platform starts, one process each (cluster=external): torchrun, a PyTorchJob, one srun task per rank.

The process of rank 0 is the launcher. The others are agents of one rank each, like those of the nodes of a SLURM job:
they follow the launcher until it ends, and exit with its exit code. All of them meet in the store at MASTER_ADDR. It
has no authentication and carries only what is needed to meet: who is there, and the number and port of each start of
the ranks. All else goes through the control store of that start, whose secret is in the run directory, which every
process finds from its own command line.

There are no restarts in place: the platform restarts the processes, and the run continues from its last checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megads.config.frozen import config_dict
from megads.config.root import RootConfig
from megads.errors import EXIT_BUG, ConfigError, MegadsError, UnhealthyNode
from megads.launch.agent_ranks import AgentRanks
from megads.launch.node_agent import AgentOrders, place_of, run_agent
from megads.launch.node_ranks import NodePart, NodeRanks
from megads.launch.rank_outcome import NodeReport, lost_nodes
from megads.launch.scheduler import Scheduler
from megads.runtime import environment, progress
from megads.runtime.lease import machine_id
from megads.runtime.platform import PlatformRank
from megads.runtime.ports import LOOPBACK, address_towards, launcher_address, read_secret, secret_path

if TYPE_CHECKING:
    from torch.distributed import Store

    from megads.runtime.control_store import ControlStore

_POLL_S, _LONGEST_POLL_S = 0.05, 1.0
_LEAVE_WITHIN_S = 10.0
_GIVE_UP_AFTER_S = 10.0
_CONNECTIONS_PER_RANK = 3
"""Control store connections of each agent and its rank."""
_SHOWN = 3


class ExternalScheduler(Scheduler):
    """Scheduler under a platform, which ends processes that do not stop in time itself."""

    second_signal = "the platform kills it after its grace time"

    def kills(self, number: int) -> bool:
        return False


class JobRendezvous:
    """The processes of a platform's job, in the store where they meet.

    Args:
        me: which of them this process is.
        timeout_s: longest wait for the others to appear.

    Attributes:
        places: of rank 0 only: what each process is told about its place, by rank.
        address: of rank 0 only: where it serves its control store.
        num_machines: of rank 0 only: number of machines.
        sharing: of rank 0 only: number of processes that share the cores of this one.

    Raises:
        UnhealthyNode: the store cannot be reached.
        ConfigError: the store cannot be served at this port.
    """

    def __init__(self, me: PlatformRank, timeout_s: float):
        self.me, self._timeout_s = me, timeout_s
        self.places: list[dict[str, Any]] = []
        self.address, self.num_machines, self.sharing = LOOPBACK, 1, 1
        self._starts = 0
        self._kept: list[ControlStore] = []
        # Imports torch, which would delay the refusal of a config.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store, meetings = _store_of(me, timeout_s)
        self._store: Store = PrefixStore(f"megads/{me.attempt}/{next(meetings)}", store)

    def join(self, config: RootConfig) -> None:
        """Makes this process known; on rank 0 waits for the others and checks that they fit.

        Args:
            config: config of this process, as composed.

        Raises:
            ConfigError: the layout has another number of ranks, or the processes have different configs.
            UnhealthyNode: a process is there twice, or does not appear within the time limit.
        """
        me, ranks = self.me, config.parallel.world_size
        if ranks != me.world_size:
            raise ConfigError(
                f"{config.parallel.product} = {ranks} ranks, but {me.source} started {me.world_size} processes: change "
                "parallel.dp or the number of processes; cluster=local starts all ranks of the layout on this machine"
            )
        if me.world_size > 1 and self._store.add(f"taken/{me.rank}", 1) > 1:
            raise UnhealthyNode(
                f"rank {me.rank} has joined this start already: two processes have RANK = {me.rank}, or the platform "
                "restarted one process alone. The others end too, and the run continues when all are restarted"
            )
        self._store.set(f"rank/{me.rank}", json.dumps(self._introduction(config)))
        if me.rank == 0:
            self._welcome([self._wait_for(rank) for rank in range(me.world_size)])

    def _introduction(self, config: RootConfig) -> dict[str, Any]:
        try:
            address = address_towards(self.me.host)
        except OSError:
            address = LOOPBACK
        return {
            "machine": machine_id(),
            "node": environment.node_name(),
            "address": address,
            "local_rank": self.me.local_rank,
            "cores": environment.available_core_numbers(),
            "config": dict(_flat(config_dict(config))),
        }

    def _wait_for(self, rank: int) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        for wait_s in _growing_waits():
            if self._store.check([f"rank/{rank}"]):
                return _parsed(self._store.get(f"rank/{rank}"))
            if (failure := self.failure()) is not None:
                raise failure
            if time.monotonic() > deadline:
                raise UnhealthyNode(
                    f"rank {rank} of {self.me.world_size} did not join within {self._timeout_s:.0f} s "
                    "(cluster.timeout_s): did the platform start it?"
                )
            progress.enter(f"waiting for rank {rank} of {self.me.world_size}")
            time.sleep(wait_s)
        raise AssertionError

    def _welcome(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Checks that the processes have one config and their own places on their machines; sets the places."""
        for rank, other in enumerate(found):
            differing = [key for key, value in found[0]["config"].items() if other["config"].get(key) != value]
            if differing:
                shown = ", ".join(
                    f"{key} = {found[0]['config'][key]} and {other['config'].get(key)}" for key in differing[:_SHOWN]
                )
                raise ConfigError(
                    f"ranks 0 and {rank} were started with different command lines: {shown}. All ranks of a run need "
                    "the same; cluster=local makes every process a launcher of its own run"
                )
        machines: dict[str, list[int]] = {}
        for rank, other in enumerate(found):
            machines.setdefault(_machine(other), []).append(rank)
        for rank, other in enumerate(found):
            here = machines[_machine(other)]
            local = here.index(rank) if other["local_rank"] is None else other["local_rank"]
            self.places.append({"name": other["node"], "local_rank": local, "local_ranks": len(here)})
        for ranks in machines.values():
            locals_ = sorted(self.places[rank]["local_rank"] for rank in ranks)
            if locals_ != list(range(len(ranks))):
                raise ConfigError(
                    f"ranks {', '.join(map(str, ranks))} are on one machine ({self.places[ranks[0]]['name']}) with "
                    f"LOCAL_RANK = {', '.join(map(str, locals_))}: want 0 to {len(ranks) - 1}, each once"
                )
        self.address = (
            LOOPBACK if len(machines) == 1 else launcher_address(self.me.host, [other["address"] for other in found])
        )
        self.num_machines = len(machines)
        cores = [core for rank in machines[_machine(found[0])] for core in found[rank]["cores"]]
        # srun binds every task to its own cores; others leave all to every process.
        self.sharing = 1 if len(cores) == len(set(cores)) else self.places[0]["local_ranks"]

    def keep(self, control: ControlStore) -> None:
        """Keeps a control store until this process ends, as others may still read it."""
        self._kept.append(control)

    def announce(self, start: Mapping[str, Any]) -> None:
        """Tells the other processes of the next start of the ranks, or of the end."""
        self._store.set(f"start/{self._starts}", json.dumps(start))
        self._starts += 1

    def next_start(self) -> dict[str, Any]:
        """Waits for the next announcement of rank 0.

        Raises:
            UnhealthyNode: rank 0 is gone.
        """
        key = f"start/{self._starts}"
        self._starts += 1
        try:
            for wait_s in _growing_waits():
                if self._store.check([key]):
                    return _parsed(self._store.get(key))
                time.sleep(wait_s)
        except RuntimeError as error:
            raise UnhealthyNode(f"rank 0 is gone ({_first_line(error)}): its output says why") from None
        raise AssertionError

    def fail(self, error: BaseException) -> None:
        """Tells rank 0 that this process cannot take part."""
        code = error.exit_code if isinstance(error, MegadsError) else EXIT_BUG
        message = str(error) if isinstance(error, MegadsError) else f"{type(error).__name__}: {error}"
        text = json.dumps({"rank": self.me.rank, "code": code, "message": message})
        with suppress(RuntimeError):
            self._store.set("failure", text)

    def failure(self) -> MegadsError | None:
        """Returns the failure of a process that cannot take part; None if there is none."""
        if not self._store.check(["failure"]):
            return None
        found = _parsed(self._store.get("failure"))
        kind = ConfigError if found["code"] == ConfigError.exit_code else UnhealthyNode
        return kind(f"rank {found['rank']}: {found['message']}")

    def leave(self) -> None:
        """Tells rank 0 that this process has heard of the end."""
        with suppress(RuntimeError):
            self._store.add("left", 1)

    def end(self, exit_code: int) -> None:
        """Tells the other processes that the run is over; the stores they hear it from stay until they have."""
        self.announce({"exit_code": exit_code})
        deadline = time.monotonic() + _LEAVE_WITHIN_S
        while time.monotonic() < deadline:
            if self._store.add("left", 0) >= self.me.world_size - 1:
                return
            time.sleep(_POLL_S)


@functools.cache
def _store_of(me: PlatformRank, timeout_s: float) -> tuple[Store, Iterator[int]]:
    """Opens the store where the processes meet, once in a process, and numbers its meetings: a sweep has several."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    serves = me.serves and me.rank == 0
    try:
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(me.host, me.port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        at = f"MASTER_ADDR = {me.host}, MASTER_PORT = {me.port}"
        if serves:
            raise ConfigError(f"{at}: this port cannot be served here ({_first_line(error)}): set another") from None
        raise UnhealthyNode(f"{at}: rank 0 does not answer there ({_first_line(error)})") from None
    return store, itertools.count()


def _machine(introduction: Mapping[str, Any]) -> str:
    """The machine of a process; several nodes of a rehearsal are on one."""
    return f"{introduction['machine']} {introduction['node']}"


def _growing_waits() -> Iterator[float]:
    """Yields waits between two looks: thousands of processes that look often would keep the store busy."""
    wait_s = _POLL_S
    while True:
        yield wait_s
        wait_s = min(_LONGEST_POLL_S, 1.2 * wait_s)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UnhealthyNode(f"{text[:40]!r} was sent where a message of megads was expected: is this port used twice?")
    return found


def _flat(content: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(content, Mapping) and content:
        for key, value in content.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.loads(json.dumps(content, default=str))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def follow(meeting: JobRendezvous, part_of: Callable[[int], NodePart], signals: list[int]) -> int:
    """Runs the rank of this process in every start that rank 0 announces; returns the exit code that rank 0 gives.

    Args:
        meeting: the processes.
        part_of: returns what a process starts, from the number of the start; called when a start is announced.
        signals: received signals, appended as they arrive; forwarded to rank 0.

    Raises:
        UnhealthyNode: rank 0 is gone, and the rank of this process with it.
    """
    while "exit_code" not in (told := meeting.next_start()):
        orders = AgentOrders(part_of(int(told["lease"])), str(told["address"]), int(told["port"]))
        try:
            run_agent(orders, _name(meeting.me.rank), signals)
        except RuntimeError as error:
            raise UnhealthyNode(f"rank 0 is gone ({_first_line(error)}): its output says why") from None
    meeting.leave()
    return int(told["exit_code"])


class ExternalRanks(AgentRanks):
    """Ranks of which the first is on this process and the others on those that follow it.

    Args:
        part: what each process starts; its place is added.
        meeting: the processes.
    """

    def __init__(self, part: NodePart, meeting: JobRendezvous):
        super().__init__(dataclasses.replace(part, num_ranks=1), [place["name"] for place in meeting.places])
        self._meeting = meeting
        self._own: NodeRanks | None = None
        self._own_ends = False

    def start(self) -> None:
        # Imported here: it imports torch, which would delay the refusal of a config.
        from megads.runtime.control_store import ControlStore

        part, meeting = self._part, self._meeting
        count = len(meeting.places)
        environment.allow_open_files(_CONNECTIONS_PER_RANK * count)
        self._control = ControlStore(read_secret(secret_path(part.run_dir, part.lease)), meeting.address)
        places = [
            place_of(rank, count, meeting.address)
            | {
                "local_rank": place["local_rank"],
                "local_ranks": place["local_ranks"],
                "one_machine": meeting.num_machines == 1,
                "threads_per_rank": part.threads_per_rank,
            }
            for rank, place in enumerate(meeting.places)
        ]
        meeting.keep(self._control)
        self._control.assign({_name(rank): place for rank, place in enumerate(places)})
        meeting.announce({"lease": part.lease, "port": self._control.port, "address": meeting.address})
        self._own = NodeRanks(dataclasses.replace(part, **places[0]), self._control)
        self._own.start()

    def poll(self) -> bool:
        """Waits briefly and handles what happened; returns False once all ranks have ended, or are gone."""
        assert self._own is not None and self._control is not None
        if 0 not in self._reports:
            self._poll_own(self._own)
        else:
            time.sleep(_POLL_S)
        self.hear()
        if (failure := self._meeting.failure()) is not None and self._failed_at is None:
            self._failed_at = time.monotonic()
        if len(self._reports) == len(self._names):
            # Ends the wait of every agent: PyTorch would log that the store is gone, with its stack.
            self._control.order_end()
            return False
        self.act()
        if self._ended_at is None:
            return True
        late = time.monotonic() - self._ended_at > _GIVE_UP_AFTER_S
        return not (0 in self._reports and (late or failure is not None or self._only_silent_left()))

    def _poll_own(self, own: NodeRanks) -> None:
        """Takes in what happened to the rank of this process, as its agent would report it."""
        going = own.poll()
        self._heard_s[0] = self._listened_s
        self._silences += own.silences()
        if found := own.hang():
            if 0 not in self._hangs:
                self._hangs[0], self._waited_for = found, None
        elif self._hangs.pop(0, None):
            self._waited_for = None
        if (own.failing or not going) and own.reports()[0].failed and self._failed_at is None:
            self._failed_at = time.monotonic()
        if not going:
            self._reports[0] = own.reports()[0]

    def kill(self) -> None:
        """Kills the rank of this process, and orders the others to kill theirs."""
        super().kill()
        if self._own is not None and 0 not in self._reports:
            self._own.kill()

    def phase(self) -> str:
        """The phase that rank 0 is in."""
        return self._own.phase() if self._own is not None else ""

    def reports(self) -> list[NodeReport]:
        reports = [report for _, report in sorted(self._reports.items())]
        failure = self._meeting.failure()
        if failure is not None:
            return [*reports, NodeReport(error=str(failure), exit_code=failure.exit_code)]
        missing = [rank for rank in range(len(self._names)) if rank not in self._reports]
        return reports + lost_nodes([f"{self._names[rank]} (rank {rank})" for rank in missing], "")

    def description(self) -> dict[str, object]:
        return {"nodes": list(dict.fromkeys(self._names)), "platform": self._meeting.me.source}


def _name(rank: int) -> str:
    return f"rank {rank}"
