"""Compares PyTorch flight recorder dumps across ranks: which rank did not enter a collective, or entered another one.

A dump lists the collectives that a rank enqueued, per process group and with a sequence number, and which of them it
completed (torch/csrc/distributed/c10d/FlightRecorder.hpp). NCCL and gloo dumps have the same format.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megads.api import parse_json, read_regular

_COMPLETED = "completed"
_DEFAULT_GROUP = "default_pg"
_P2P = re.compile(r":(send|recv) (\d+)(->|<-)(\d+)")
_EQUAL_SIZES = ("all_reduce", "allreduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "reduce")
_LIBRARY_FRAMES = ("torch/distributed/", "torch/utils/", "torch/nn/", "torch/autograd/")


@dataclass(frozen=True)
class Operation:
    """One collective or p2p operation that a rank enqueued.

    Attributes:
        group: name of the process group, the same on all ranks.
        description: description of the process group.
        sequence: sequence number in the process group; meaningful for collectives only.
        name: operation name, for example nccl:all_reduce.
        input_sizes: shapes of the input tensors.
        dtypes: dtypes of the input tensors.
        completed: whether the rank recorded its completion.
        p2p: whether it is a point-to-point operation.
        frames: call stack, innermost frame first, as "file:line function".
        record: index among all operations that the rank recorded.
    """

    group: str
    description: str
    sequence: int
    name: str
    input_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    completed: bool
    p2p: bool
    frames: tuple[str, ...]
    record: int

    @property
    def title(self) -> str:
        """Readable name: operation, sequence number and process group."""
        group = self.description if self.description and self.description != "undefined" else self.group
        return f"{self.name} number {self.sequence} of group {group}"


@dataclass(frozen=True)
class FlightTrace:
    """Flight recorder dump of one rank.

    Attributes:
        rank: rank that wrote the dump.
        operations: recorded operations, in order.
        groups: ranks of each process group by group name; groups whose ranks the dump does not list are absent.
        enqueued: sequence number of the last enqueued collective by group name, where the dump has it.
    """

    rank: int
    operations: tuple[Operation, ...]
    groups: Mapping[str, tuple[int, ...]]
    enqueued: Mapping[str, int]

    @property
    def waiting(self) -> list[Operation]:
        """Enqueued collectives and p2p operations that are not completed."""
        return [operation for operation in self.operations if not operation.completed]


@dataclass(frozen=True)
class FlightVerdict:
    """Ranks that caused a hang, by the dumps of all ranks.

    Attributes:
        missing: ranks that did not enter a collective in which others wait, and that wait for no other rank.
        mismatched: ranks that entered a different collective than the others under the same sequence number.
        stalled: ranks that entered a collective and did not complete it although a peer did.
        silent: ranks of the job without a dump.
        operation: first collective that the missing ranks did not enter, or in which ranks mismatch.
        waiting: ranks that wait in `operation`.
        stacks: last known stack of each culprit, innermost frame first.
    """

    missing: tuple[int, ...] = ()
    mismatched: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    operation: Operation | None = None
    waiting: tuple[int, ...] = ()
    stacks: Mapping[int, tuple[str, ...]] = ()  # type: ignore[assignment]

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks to examine first."""
        return self.mismatched or self.missing or self.silent or self.stalled

    def sentences(self) -> list[str]:
        """Returns the findings as readable sentences."""
        said = []
        title = self.operation.title if self.operation is not None else "a collective"
        if self.mismatched:
            said.append(f"{_ranks(self.mismatched)} entered another collective than the others: {title}")
        elif self.missing:
            said.append(f"{_ranks(self.missing)} did not enter {title}; {_ranks(self.waiting)} wait in it")
        if self.silent:
            said.append(f"{_ranks(self.silent)} left no dump")
        if self.stalled:
            said.append(f"{_ranks(self.stalled)} did not complete on the device what peers completed")
        said += [f"rank {rank} was last seen in {'; '.join(stack)}" for rank, stack in self.stacks.items() if stack]
        return said or ["no rank is behind the others"]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def parse_trace(rank: int, dump: Mapping[str, Any]) -> FlightTrace:
    """Parses a flight recorder dump.

    Args:
        rank: rank that wrote the dump.
        dump: content of the dump, from pickle or JSON.

    Raises:
        ValueError: `dump` is not a flight recorder dump.
    """
    entries, config = dump.get("entries"), dump.get("pg_config") or {}
    if not isinstance(entries, Sequence) or not isinstance(config, Mapping):
        raise ValueError("holds no entries of a flight recorder")
    try:
        operations = tuple(_operation(entry) for entry in entries)
        groups = {name: _rank_list(group.get("ranks")) for name, group in config.items() if group.get("name")}
        names = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries}
        status = dump.get("pg_status") or {}
        enqueued = {
            names[number]: int(state["last_enqueued_collective"]) for number, state in status.items() if number in names
        }
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"is not as torch writes it ({type(error).__name__}: {error})") from error
    for operation in operations:
        if not operation.p2p:
            enqueued[operation.group] = max(enqueued.get(operation.group, 0), operation.sequence)
    return FlightTrace(rank, operations, {name: ranks for name, ranks in groups.items() if ranks}, enqueued)


def _operation(entry: Mapping[str, Any]) -> Operation:
    group = entry["process_group"]
    return Operation(
        str(group[0]),
        str(group[1]) if len(group) > 1 else "",
        int(entry["collective_seq_id"]),
        str(entry["profiling_name"]),
        tuple(tuple(int(size) for size in sizes) for sizes in entry.get("input_sizes") or ()),
        tuple(str(kind) for kind in entry.get("input_dtypes") or ()),
        entry.get("state") == _COMPLETED,
        bool(entry.get("is_p2p")),
        tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in entry.get("frames") or ()),
        int(entry.get("record_id", 0)),
    )


def _rank_list(text: Any) -> tuple[int, ...]:
    found = ast.literal_eval(text) if isinstance(text, str) else text
    return tuple(int(rank) for rank in found or ())


def find_culprit_ranks(traces: Sequence[FlightTrace]) -> FlightVerdict:
    """Finds the ranks that caused a hang.

    A rank that did not enter a collective in which others wait may itself wait for a third rank: the culprits are the
    ranks at the end of such a chain.

    Args:
        traces: dumps of all ranks that have one.
    """
    by_rank = {trace.rank: trace for trace in traces}
    members = _members(by_rank)
    silent = tuple(sorted(set().union(*members.values()) - by_rank.keys())) if members else ()
    stalled = tuple(rank for rank, trace in sorted(by_rank.items()) if _is_stalled(trace, by_rank, members))
    if mismatch := _mismatch(by_rank):
        operation, ranks = mismatch
        others = tuple(rank for rank in members.get(operation.group, ()) if rank not in ranks)
        return FlightVerdict((), ranks, stalled, silent, operation, others, _stacks(ranks, by_rank))
    waits = _collective_waits(by_rank, members) or _p2p_waits(by_rank, members)
    blamed = {rank for targets in waits.values() for rank in targets}
    roots = tuple(sorted(blamed - waits.keys())) or tuple(sorted(blamed & waits.keys()))
    first = min(
        (operation for rank, targets in waits.items() for target, operation in targets.items() if target in roots),
        key=lambda operation: operation.record,
        default=None,
    )
    waiting = tuple(
        sorted(rank for rank, targets in waits.items() if first is not None and targets.keys() & set(roots))
    )
    missing = tuple(rank for rank in roots if rank not in silent)
    return FlightVerdict(missing, (), stalled, silent, first, waiting, _stacks(missing or stalled, by_rank))


def _members(by_rank: Mapping[int, FlightTrace]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of every group; if no dump lists them, the ranks that used it, or all for the default group."""
    found: dict[str, tuple[int, ...]] = {}
    for trace in by_rank.values():
        found |= trace.groups
    seen = {operation.group: operation.description for trace in by_rank.values() for operation in trace.operations}
    for group in seen.keys() - found.keys():
        users = {rank for rank, trace in by_rank.items() if group in trace.enqueued}
        # gloo dumps do not list ranks. If only one rank lacks a group, it is a member that has not used the group.
        everybody = seen[group] == _DEFAULT_GROUP or len(users) >= max(2, len(by_rank) - 1)
        found[group] = tuple(sorted(by_rank if everybody else users))
    return found


def _collective_waits(
    by_rank: Mapping[int, FlightTrace], members: Mapping[str, Collection[int]]
) -> dict[int, dict[int, Operation]]:
    """Maps each rank to the peers that it waits for, each with the first collective that the peer did not enter."""
    found: dict[int, dict[int, Operation]] = {}
    for rank, trace in by_rank.items():
        for operation in trace.waiting:
            if operation.p2p:
                continue
            for peer in members.get(operation.group, ()):
                behind = peer not in by_rank or by_rank[peer].enqueued.get(operation.group, 0) < operation.sequence
                if behind:
                    found.setdefault(rank, {}).setdefault(peer, operation)
    return found


def _p2p_waits(
    by_rank: Mapping[int, FlightTrace], members: Mapping[str, Sequence[int]]
) -> dict[int, dict[int, Operation]]:
    """Maps each rank to the peers that did not post the other half of a p2p operation in which it waits."""
    posted: dict[tuple[str, int, int], int] = {}
    waiting: list[tuple[int, int, str, Operation]] = []
    for rank, trace in by_rank.items():
        for operation in trace.waiting:
            said = _P2P.search(operation.name)
            ranks = members.get(operation.group, ())
            if not operation.p2p or said is None or int(said[4]) >= len(ranks):
                continue
            peer = ranks[int(said[4])]
            posted[operation.group, rank, peer] = posted.get((operation.group, rank, peer), 0) + 1
            waiting.append((rank, peer, operation.group, operation))
    found: dict[int, dict[int, Operation]] = {}
    for rank, peer, group, operation in waiting:
        if not posted.get((group, peer, rank)):
            found.setdefault(rank, {}).setdefault(peer, operation)
    return found


def _is_stalled(trace: FlightTrace, by_rank: Mapping[int, FlightTrace], members: Mapping[str, Collection[int]]) -> bool:
    """Whether a peer has completed the first collective that a rank waits in."""
    first = next((operation for operation in trace.waiting if not operation.p2p), None)
    if first is None or first.name.startswith("gloo"):  # gloo's dumps do not say what is completed
        return False
    peers = [by_rank[rank] for rank in members.get(first.group, ()) if rank in by_rank and rank != trace.rank]
    return bool(peers) and any(
        peer.enqueued.get(first.group, 0) >= first.sequence
        and all((operation.group, operation.sequence) != (first.group, first.sequence) for operation in peer.waiting)
        for peer in peers
    )


def _mismatch(by_rank: Mapping[int, FlightTrace]) -> tuple[Operation, tuple[int, ...]] | None:
    """Returns the first collective that differs between ranks, with the ranks in the minority; all ranks in a tie."""
    entered: dict[tuple[str, int], dict[int, Operation]] = {}
    for rank, trace in by_rank.items():
        for operation in trace.operations:
            if not operation.p2p:
                entered.setdefault((operation.group, operation.sequence), {})[rank] = operation
    for _, operations in sorted(entered.items(), key=lambda item: min(one.record for one in item[1].values())):
        kinds = {rank: _kind(operation) for rank, operation in operations.items()}
        counts = Counter(kinds.values())
        if len(counts) > 1:
            (most, number), *others = counts.most_common()
            tied = number == others[0][1]
            ranks = tuple(sorted(rank for rank, kind in kinds.items() if tied or kind != most))
            return operations[ranks[0]], ranks
    return None


def _kind(operation: Operation) -> tuple[object, ...]:
    """Returns the properties of a collective that must be equal on all ranks."""
    name = operation.name.rpartition(":")[2]
    return (name, operation.input_sizes, operation.dtypes) if name in _EQUAL_SIZES else (name,)


def _stacks(ranks: Sequence[int], by_rank: Mapping[int, FlightTrace]) -> dict[int, tuple[str, ...]]:
    """Returns the last recorded stack of each rank, without torch's own frames unless it has no others."""
    found = {}
    for rank in ranks:
        frames = next((one.frames for one in reversed(by_rank[rank].operations) if one.frames), ())
        own = tuple(frame for frame in frames if not any(part in frame for part in _LIBRARY_FRAMES))
        found[rank] = (own or frames)[:5]
    return found


def read_flight_records(folders: Sequence[Path]) -> list[FlightTrace]:
    """Reads the flight recorder dumps in evidence folders; the last folder is used if a rank has several."""
    traces: dict[int, FlightTrace] = {}
    for folder in folders:
        for path in sorted(folder.glob("flight_rank_*.json")):
            with suppress(OSError, ValueError):
                dump = parse_json(read_regular(path))
                rank = int(path.stem.rpartition("_")[2])
                if isinstance(dump, dict):
                    traces[rank] = parse_trace(rank, dump)
    return [traces[rank] for rank in sorted(traces)]


def flight_recorder_verdict(folders: Sequence[Path]) -> FlightVerdict | None:
    """Returns which ranks are behind according to the flight recorder dumps; None if there are no dumps."""
    traces = read_flight_records(folders)
    return find_culprit_ranks(traces) if traces else None
