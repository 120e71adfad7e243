"""Records what a rank launches in a step: kernels, communication, waits, in the order of the host's calls.

Ranks run the engine's real code, one after the other in one process, on CPU tensors and torch's fake process group,
which sends nothing: a rank receives zeros. The reads and writes of every operator that torch dispatches are recorded by
address, so the reuse of a buffer under another name is seen too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megads.engine.interface import TrainEngine
from megads.engine.p2p import BufferPool, P2PCommunicator
from megads.parallel.config import ParallelConfig
from megads.parallel.pipeline_actions import Action


class Span(NamedTuple):
    """Bytes [start, stop) of memory."""

    start: int
    stop: int


@dataclass(frozen=True)
class Kernel:
    """Work in the compute stream; consecutive operators are one kernel."""


@dataclass(frozen=True)
class Launch:
    """A communication kernel.

    Attributes:
        number: number of the launch on its rank.
        group: name of the process group, the same on all its ranks.
        ranks: global ranks of the group.
        kind: operation: "send", "recv", "allreduce", ...
        dtype: dtype of its tensor.
        numel: number of elements of its tensor.
        peer: global rank of the other end of a p2p operation.
        action: action of the schedule to which a p2p operation belongs.
        received: elements from each rank of an all-to-all with unequal splits; empty otherwise.
        sent: elements to each rank, likewise.
    """

    number: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str
    numel: int
    peer: int | None = None
    action: Action | None = None
    received: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()

    def __str__(self) -> str:
        what = f" of {self.action}" if self.action else ""
        to = f" with rank {self.peer}" if self.peer is not None else ""
        return f"{self.kind}{to} on group {self.group}{what}"


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for a launch.

    Attributes:
        number: number of the launch.
    """

    number: int


Trace = list[Kernel | Launch | Wait]


@dataclass
class _InFlight:
    """A launch that has not been waited for yet.

    torch keeps the tensors of an operation on another stream until its work is waited for (ProcessGroupNCCL's
    TensorShelf), so that their memory is not reused before; `tensors` does the same here.
    """

    tensors: list[Tensor]
    launch: Launch
    reads: list[Span]
    writes: list[Span]


_P2P = {"send": 1, "recv": 1}
"""Index of the peer among the arguments of a process group's method."""
_ALL_TO_ALL = ("alltoall_base", "all_to_all_single")
_COLLECTIVES = {
    # Argument indices of the tensors that are written and read.
    "allreduce": (0, 0),
    "broadcast": (0, 0),
    "_allgather_base": (0, 1),
    "_reduce_scatter_base": (0, 1),
    "allgather": (0, 1),
    "reduce_scatter": (0, 1),
    "reduce": (0, 0),
    "alltoall_base": (0, 1),
    # Since torch 2.13.
    "all_gather_single": (0, 1),
    "reduce_scatter_single": (0, 1),
    "all_to_all_single": (0, 1),
}


@dataclass
class Recorder:
    """The trace of one rank, and its data races.

    Attributes:
        trace: the recorded events.
        races: accesses to memory that something else may be writing or reading at the same time.
    """

    trace: Trace = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)
    _works: dict[int, int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)
    _released: dict[int, Span] = field(default_factory=dict)
    _action: Action | None = None
    _launches: int = 0
    dispatched: int = 0

    def compute(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Records an operator of the compute stream."""
        if not self.trace or not isinstance(self.trace[-1], Kernel):
            self.trace.append(Kernel())
        if self._in_flight or self._released:
            self._check(name, _spans(reads), _spans(writes), ordered_after=None)

    def launch(self, group: Any, kind: str, args: Sequence[Any], work: Any) -> None:
        """Records a communication kernel; it runs after everything already in the compute stream."""
        peer = None
        if kind in _P2P:
            tensors = list(args[0])
            peer = dist.get_global_rank(group, args[_P2P[kind]])
            reads, writes = (tensors, []) if kind == "send" else ([], tensors)
        else:
            written, read = _COLLECTIVES[kind]
            writes, reads = _tensors(args[written]), _tensors(args[read])
        first = (writes or reads)[0]
        ranks = tuple(dist.get_process_group_ranks(group))
        self._launches += 1
        launch = Launch(
            self._launches, group.group_name, ranks, kind, str(first.dtype), first.numel(), peer,
            self._action if peer is not None else None,
            *(map(tuple, args[2:4]) if kind in _ALL_TO_ALL else ()),
        )  # fmt: skip
        entry = _InFlight(reads + writes, launch, _spans(reads), _spans(writes))
        for span in entry.writes:
            self._released = {at: other for at, other in self._released.items() if not _overlap([span], [other])}
        self._check(str(launch), entry.reads, entry.writes, ordered_after=communicator(launch, dist.get_rank()))
        self.trace.append(launch)
        self._in_flight[launch.number] = entry
        # Keeps the work alive: otherwise another one could get its address, and so its id.
        self._works[id(work)] = launch.number
        self._kept.append(work)
        if kind == "recv":
            with _disable_current_modes():
                tensors[0].zero_()

    def wait(self, work: Any) -> None:
        """Records that the compute stream waits for a communication kernel."""
        number = self._works.get(id(work))
        if number is not None:
            self.trace.append(Wait(number))
            self._in_flight.pop(number, None)

    def release(self, buffer: Tensor) -> None:
        """A buffer is returned to its pool: it must not be accessed until something is received into it."""
        (span,) = _spans([buffer])
        self._released[span.start] = span

    def end(self) -> None:
        """Ends the step: everything it launched must have been recorded and waited for."""
        assert self.dispatched == self._launches, f"{self.dispatched} operations of c10d, {self._launches} recorded"
        self.races += [f"{entry.launch}: never waited for" for entry in self._in_flight.values()]

    def _check(
        self, name: str, reads: list[Span], writes: list[Span], *, ordered_after: tuple[Any, ...] | None
    ) -> None:
        for entry in self._in_flight.values():
            if ordered_after is not None and communicator(entry.launch, dist.get_rank()) == ordered_after:
                continue
            if _overlap(reads + writes, entry.writes):
                self.races.append(f"{name} touches what {entry.launch} may be writing")
            if _overlap(writes, entry.reads):
                self.races.append(f"{name} writes what {entry.launch} may be reading")
        if _overlap(reads + writes, list(self._released.values())):
            self.races.append(f"{name} touches a buffer that was given back")

    @contextmanager
    def labelled(self, action: Action) -> Iterator[None]:
        """Labels the communication inside with an action of the schedule."""
        self._action = action
        yield
        self._action = None


def communicator(launch: Launch, rank: int) -> tuple[Any, ...]:
    """The NCCL communicator, with its own stream, that a launch of a rank uses: one per group, and for p2p one per pair
    of its ranks, as torch creates them if init_process_group got no device_id."""
    if launch.peer is None:
        return (launch.group,)
    return launch.group, *sorted((rank, launch.peer))


class _Operators(TorchDispatchMode):
    """Reports to a recorder what every operator reads and writes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and records it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._recorder.dispatched += func.namespace == "c10d"
        if func.namespace != "c10d" and not func.is_view:
            reads, writes = [], []
            for argument, value in _arguments(func, args, kwargs):
                into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
                into.extend(_tensors(value))
            if reads or writes:
                made = [] if func.__name__.startswith(("empty", "new_empty")) else _tensors(result)
                self._recorder.compute(str(func), reads, writes + made)
        return result


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    by_name = {argument.name: argument for argument in arguments}
    yield from ((by_name[name], value) for name, value in kwargs.items())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _spans(tensors: Sequence[Tensor]) -> list[Span]:
    """The memory of tensors, each from its first to its last element."""
    found = []
    for tensor in tensors:
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = tensor.data_ptr()
        found.append(Span(start, start + (last + 1) * tensor.element_size()))
    return found


def _overlap(some: Sequence[Span], others: Sequence[Span]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in some for b in others)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Records what this process launches inside the context."""

    def started(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = inner(group, *args, **kwargs)
            recorder.launch(group, name, args, work)
            return work

        return method

    def wait(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda work, *args: (recorder.wait(work), inner(work, *args))[1]

    def send(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(messages: P2PCommunicator, action: Action, tensor: Tensor) -> None:
            with recorder.labelled(action):
                inner(messages, action, tensor)

        return method

    def post(inner: Callable[..., Any]) -> Callable[..., Any]:
        def method(messages: P2PCommunicator, action: Action) -> None:
            with recorder.labelled(action):
                inner(messages, action)

        return method

    def give(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda pool, buffer: (recorder.release(buffer), inner(pool, buffer))[1]

    with ExitStack() as stack:
        for name in filter(partial(hasattr, dist.ProcessGroup), (*_P2P, *_COLLECTIVES)):
            stack.enter_context(_replaced(dist.ProcessGroup, name, partial(started, name)))
        for work in (dist.Work, FakeWork):
            stack.enter_context(_replaced(work, "wait", wait))
        stack.enter_context(_replaced(P2PCommunicator, "send", send))
        stack.enter_context(_replaced(P2PCommunicator, "post", post))
        stack.enter_context(_replaced(BufferPool, "give", give))
        stack.enter_context(_Operators(recorder))
        yield
        recorder.end()


@contextmanager
def _replaced(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a method of a class by `wrap(method)` inside the context."""
    original = vars(owner)[name]  # unbound: a bound pybind method would not accept an instance after it is restored
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        setattr(owner, name, original)


def trace_ranks(
    build: Callable[[ParallelConfig], TrainEngine], step: Callable[[TrainEngine], object], parallel: ParallelConfig
) -> tuple[dict[int, Trace], list[str]]:
    """Runs a step of every rank of a layout in this process, with fake process groups in place of its own.

    Args:
        build: builds an engine on the default process group.
        step: the step to record.
        parallel: the layout.

    Returns:
        The traces, by rank, and the races of all ranks.
    """
    import deepspeed.comm.comm as deepspeed_comm
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # ZeRO-3 compares values between ranks, but the fake process group sends nothing.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _ints: None

    traces, races = {}, []
    for rank in range(parallel.world_size):
        if dist.is_initialized():
            dist.destroy_process_group()
        deepspeed_comm.cdb = None
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(parallel.world_size))
        dist.init_process_group("fake", rank=rank, world_size=parallel.world_size, store=FakeStore())
        engine, recorder = build(parallel), Recorder()
        with recorded(recorder):
            step(engine)
        traces[rank] = recorder.trace
        races += [f"rank {rank}: {race}" for race in recorder.races]
    return traces, races
