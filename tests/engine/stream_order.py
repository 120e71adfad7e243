"""Checks whether the traces of all ranks of a step can run on NCCL: launches match in order, and nothing deadlocks.

The model: each communicator has its own stream, which runs kernels in the order in which the host launched them, after
everything that was on the compute stream at the launch. A kernel runs, and holds its stream, until the matching kernels
of all its peers run too, unless sends are buffered. Kernels match by their order on the communicator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import product

from megads.parallel.pipeline_actions import (
    Action,
    ActionKind,
    Schedule,
    message_from,
    message_to,
    sent_and_received,
)
from tests.engine.stream_trace import Kernel, Launch, Trace, Wait, communicator

_COMPUTE = "compute"
_RECEIVED = {
    ActionKind.receive_activation: (ActionKind.send_activation, -1),
    ActionKind.receive_gradient: (ActionKind.send_gradient, +1),
}
"""What a receive of stage s must match: the kind of the send, and its stage minus s."""


def mismatches(traces: Mapping[int, Trace]) -> list[str]:
    """Returns launches that match a different launch on their communicator.

    Args:
        traces: by rank.
    """
    found: list[str] = []
    for name, ends in _by_communicator(traces).items():
        members = {rank for launches in ends.values() for launch in launches for rank in _members(launch, ends)}
        counts = {rank: len(ends.get(rank, [])) for rank in members}
        if len(set(counts.values())) > 1:
            found.append(f"communicator {name}: launches by rank {counts}")
        for meeting in zip(*(ends[rank] for rank in sorted(ends)), strict=False):
            if any(launch.sent for launch in meeting):
                found += [f"communicator {name}: {fault}" for fault in _other_splits(meeting)]
            elif len({(launch.dtype, launch.numel) for launch in meeting}) > 1:
                found.append(f"communicator {name}: other sizes: {'; '.join(map(str, meeting))}")
            kinds = [launch.kind for launch in meeting]
            if meeting[0].peer is None:
                if len(set(kinds)) > 1:
                    found.append(f"communicator {name}: {'; '.join(map(str, meeting))}")
            elif sorted(kinds) != ["recv", "send"] or not _same_message(*meeting):
                found.append(f"communicator {name}: {'; '.join(map(str, meeting))}")
    return found


def _other_splits(meeting: Sequence[Launch]) -> list[str]:
    """Parts of an all-to-all that their receiver expects in another size or dtype; launches are in order of ranks."""
    ranks, found = meeting[0].ranks, []
    for (i, one), (j, other) in product(enumerate(meeting), repeat=2):
        sent, expected = (one.dtype, *one.sent[j : j + 1]), (other.dtype, *other.received[i : i + 1])
        if sent != expected:
            found.append(f"rank {ranks[i]} sends {sent} to rank {ranks[j]}, which expects {expected}")
    return found


def _members(launch: Launch, ends: Mapping[int, list[Launch]]) -> tuple[int, ...]:
    return launch.ranks if launch.peer is None else (*ends, launch.peer)


def _same_message(one: Launch, other: Launch) -> bool:
    sent, received = (one.action, other.action) if one.kind == "send" else (other.action, one.action)
    if sent is None or received is None:
        return sent is received
    kind, stages = _RECEIVED[received.kind]
    return sent == Action(kind, received.micro_batch, received.stage + stages)


def _by_communicator(traces: Mapping[int, Trace]) -> dict[tuple[Hashable, ...], dict[int, list[Launch]]]:
    found: dict[tuple[Hashable, ...], dict[int, list[Launch]]] = defaultdict(lambda: defaultdict(list))
    for rank, trace in traces.items():
        for item in trace:
            if isinstance(item, Launch):
                found[communicator(item, rank)][rank].append(item)
    return found


def collectives_out_of_order(traces: Mapping[int, Trace]) -> str:
    """Returns collectives that ranks launch in contradicting orders; empty where one order fits all ranks.

    Two communicators whose kernels do not fit on a device together, or whose launches are serialised, run in the order
    of the launches: where that differs between ranks they deadlock.
    """
    order: TopologicalSorter[tuple[Hashable, ...]] = TopologicalSorter()
    for rank, trace in traces.items():
        counts: dict[Hashable, int] = defaultdict(int)
        before: tuple[Hashable, ...] | None = None
        for item in trace:
            if isinstance(item, Launch) and item.peer is None:
                node = (*communicator(item, rank), item.ranks, counts[item.group])
                counts[item.group] += 1
                order.add(node, *([] if before is None else [before]))
                before = node
    try:
        order.prepare()
    except CycleError as error:
        return f"ranks launch collectives in contradicting orders: {error.args[1]}"
    return ""


@dataclass
class _Queued:
    """An entry of a stream.

    Attributes:
        item: the entry of the trace.
        after: number of compute stream entries that run first.
        meets: its communicator.
        place: index of the launch on that communicator.
        launched: launches of the rank so far.
    """

    item: Kernel | Launch | Wait
    after: int
    meets: tuple[Hashable, ...] = ()
    place: int = 0
    launched: int = 0


class _Rank:
    """The streams of one rank."""

    def __init__(self, rank: int, trace: Trace, p2p_by_group: bool, synchronises: bool) -> None:
        self.number, self.synchronises = rank, synchronises
        self.streams: dict[Hashable, list[_Queued]] = defaultdict(list)
        self.issued: list[tuple[Hashable, int]] = []
        self.at: dict[Hashable, int] = defaultdict(int)
        self.done: set[int] = set()
        self.dispatched: dict[int, int] = defaultdict(int)
        counts: dict[Hashable, int] = defaultdict(int)
        launched = 0
        for item in trace:
            stream: Hashable = _COMPUTE
            launched += isinstance(item, Launch)
            queued = _Queued(item, len(self.streams[_COMPUTE]), launched=launched)
            if isinstance(item, Launch):
                queued.meets = communicator(item, rank)
                queued.place = counts[queued.meets]
                counts[queued.meets] += 1
                stream = (item.group,) if p2p_by_group else queued.meets
            self.issued.append((stream, len(self.streams[stream])))
            self.streams[stream].append(queued)

    def queues(self, connections: int) -> list[list[tuple[Hashable, int]]]:
        """The launches of each hardware queue, in order; streams are dealt out as they are created."""
        found: list[list[tuple[Hashable, int]]] = [[] for _ in range(connections)]
        numbers = {stream: number for number, stream in enumerate(self.streams)}
        for stream, place in self.issued:
            found[numbers[stream] % connections].append((stream, place))
        return found

    def can_start(self, stream: Hashable) -> bool:
        """Whether everything that the next entry of a stream waits for on this rank is done."""
        queued = self.streams[stream][self.at[stream]]
        if isinstance(queued.item, Wait):
            return queued.item.number in self.done
        if isinstance(queued.item, Kernel):
            return not self.synchronises or len(self.done) >= queued.launched
        return self.at[_COMPUTE] >= queued.after


def stuck(
    traces: Mapping[int, Trace],
    *,
    connections: int | None = None,
    p2p_by_group: bool = False,
    synchronises: bool = False,
    buffered: bool = False,
) -> list[str]:
    """Runs the step; returns what its streams still wait for at the end, by rank; empty if all of it ran.

    Args:
        traces: by rank.
        connections: hardware queues of a device, CUDA_DEVICE_MAX_CONNECTIONS. Streams share them, and nothing starts
            before everything that was launched before it in its queue has started. None: a queue for each stream.
        p2p_by_group: all p2p of a group shares its communicator and stream, as in torch if init_process_group got a
            device_id.
        synchronises: every kernel waits for all that was launched before it, as CUDA may require where it loads a
            kernel at its first use or the allocator frees memory.
        buffered: sends end without their receives, as NCCL's do if the message fits in its buffers.
    """
    ranks = {rank: _Rank(rank, trace, p2p_by_group, synchronises) for rank, trace in traces.items()}
    queues = {number: [] if connections is None else rank.queues(connections) for number, rank in ranks.items()}
    running: dict[tuple[Hashable, ...], set[int]] = defaultdict(set)
    moved = True
    while moved:
        moved = False
        for number, rank in ranks.items():
            if connections is None:
                moved |= _start(number, rank, running)
            for place, queue in enumerate(queues[number]):
                moved |= _dispatch(number, rank, running, queue, place)
        for rank in ranks.values():
            moved |= _complete(rank, running, buffered)
    left = []
    for number, rank in ranks.items():
        heads = [queue[rank.at[name]].item for name, queue in rank.streams.items() if rank.at[name] < len(queue)]
        left += [f"rank {number}: {item}" for item in heads]
    return left


def _dispatch(
    number: int,
    rank: _Rank,
    running: dict[tuple[Hashable, ...], set[int]],
    queue: list[tuple[Hashable, int]],
    place: int,
) -> bool:
    """Starts what can start of a hardware queue, in order."""
    moved = False
    while rank.dispatched[place] < len(queue):
        stream, at = queue[rank.dispatched[place]]
        if rank.at[stream] != at or not rank.can_start(stream):
            break
        _begin(number, rank, stream, running)
        rank.dispatched[place] += 1
        moved = True
    return moved


def _start(number: int, rank: _Rank, running: dict[tuple[Hashable, ...], set[int]]) -> bool:
    """Starts everything that can start; kernels and waits of the compute stream end at once."""
    moved = False
    for stream, queue in rank.streams.items():
        while rank.at[stream] < len(queue) and rank.can_start(stream):
            if stream != _COMPUTE and number in running[_meeting(queue[rank.at[stream]])]:
                break
            _begin(number, rank, stream, running)
            moved = True
    return moved


def _begin(number: int, rank: _Rank, stream: Hashable, running: dict[tuple[Hashable, ...], set[int]]) -> None:
    if stream == _COMPUTE:
        rank.at[stream] += 1
    else:
        running[_meeting(rank.streams[stream][rank.at[stream]])].add(number)


def _meeting(queued: _Queued) -> tuple[Hashable, ...]:
    return *queued.meets, "number", queued.place


def _complete(rank: _Rank, running: dict[tuple[Hashable, ...], set[int]], buffered: bool) -> bool:
    """Ends communication kernels that run on all ranks they need."""
    moved = False
    for stream, queue in rank.streams.items():
        if stream == _COMPUTE or rank.at[stream] >= len(queue):
            continue
        queued = queue[rank.at[stream]]
        launch = queued.item
        assert isinstance(launch, Launch)
        needed = len(launch.ranks) if launch.peer is None else 2
        started = running[_meeting(queued)]
        if len(started) == needed or (buffered and launch.kind == "send" and rank.number in started):
            rank.done.add(launch.number)
            rank.at[stream] += 1
            moved = True
    return moved


def deadlocks(traces: dict[int, Trace]) -> list[str]:
    """Every combination of hardware queues, NCCL's buffers, communicators and synchronization under which a step
    deadlocks."""
    return [
        f"{connections or 'enough'} queues, {buffered=}, {by_group=}, {synchronises=}: {left}"
        for connections, buffered, by_group, synchronises in product(
            (1, 2, 3, 8, None), (False, True), (False, True), (False, True)
        )
        if (
            left := stuck(
                traces,
                connections=connections,
                buffered=buffered,
                p2p_by_group=by_group,
                synchronises=synchronises,
            )
        )
    ]


def when_needed(schedule: Schedule) -> Schedule:
    """The schedule with every send right after its tensor is produced and every receive right before its use, in order
    of sending: as megads ran it on GPUs before its messages had one order."""
    placement, due = schedule.placement, dict[tuple[int, int], deque[Action]]()
    for row in schedule.actions:
        for message in filter(None, (message_from(placement, action) for action in row)):
            due.setdefault((message.sender, message.receiver), deque()).append(message.receive)
    rows = []
    for row in schedule.actions:
        listed: list[Action] = []
        for action in row:
            if action.kind.sends or action.kind.receives:
                continue
            needed, made = message_to(placement, action), message_from(placement, action)
            while needed is not None and needed.receive not in listed:
                listed.append(due[needed.sender, needed.receiver].popleft())
            listed += [action] if made is None else [action, made.send]
        rows.append(tuple(listed))
    return replace(schedule, actions=tuple(rows))


def replayed(schedule: Schedule) -> dict[int, Trace]:
    """The traces of a step whose passes are one kernel each, by pipeline rank."""
    traces: dict[int, Trace] = {}
    pair = tuple(range(schedule.placement.num_ranks))
    for rank, row in enumerate(schedule.actions):
        sent, received = sent_and_received(schedule, rank)
        peers = {m.send: m.receiver for m in sent} | {m.receive: m.sender for m in received}
        trace: Trace = []
        numbers: dict[Action, int] = {}
        for action in row:
            if action in peers:
                numbers[action] = len(numbers) + 1
                source, target = (rank, peers[action]) if action.kind.sends else (peers[action], rank)
                kind, group = "send" if action.kind.sends else "recv", "up" if target > source else "down"
                trace.append(Launch(numbers[action], group, pair, kind, "float32", 1, peers[action], action))
            elif action.kind.computes:
                needed = message_to(schedule.placement, action)
                trace += [Kernel()] if needed is None else [Wait(numbers[needed.receive]), Kernel()]
        traces[rank] = [*trace, *(Wait(numbers[message.send]) for message in sent)]
    return traces
