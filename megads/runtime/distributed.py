"""Default process group, and the control plane: collectives on the CPU for values that are not tensors.

The control plane is used for checkpoint commits, stop requests and checks that configs are equal: small values between
hosts, which wait for disks and for each other. On NCCL they would go through GPU memory, wait for all work in the
stream, and run under the watchdog, which aborts a run whose shared disk is slow. So the control plane is always a gloo
group.

Values are sent as JSON of a type that the caller declares, never as pickles, which can execute code of the sender.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, TCPStore  # type: ignore[attr-defined]

from megads import errors
from megads.errors import ConfigError, MegadsError, UnhealthyNode
from megads.runtime.environment import rank_environment, secret_file, store_address
from megads.runtime.ports import Secret, read_secret

_NONCE_BYTES = 32
_PURPOSE = "admission"
_SHOWN = 8
_REMEDY = (
    "no data of the run was sent to it; keep other users and networks off the run's ports (docs/slurm.md, Ports and "
    "strangers), look for ranks of an earlier start that still live, and start again"
)

_MOST_BYTES = 2**30
"""Most bytes of one value; a larger one is an error of the peer."""
T = TypeVar("T")


@functools.lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def encode(value: Any, kind: Any) -> bytes:
    """Encodes a value as JSON. Floats round-trip exactly, including NaN and infinities.

    Args:
        value: value of type `kind`.
        kind: None, bool, int, float, str, Path, enums, dataclasses or containers of them.

    Raises:
        pydantic_core.PydanticSerializationError: the value has another type.
    """
    plain = _adapter(kind).dump_python(value, mode="json", warnings="error")
    # File names may contain bytes that are not UTF-8; replacing them is fine, as such names are only used in messages.
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def decode(message: bytes, kind: Any, sender: int) -> Any:
    """Decodes a value encoded by `encode`.

    Args:
        message: received bytes.
        kind: type of the value.
        sender: rank that sent it.

    Raises:
        UnhealthyNode: the bytes do not encode a value of this type.
    """
    try:
        return _adapter(kind).validate_json(message, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        wrong = f"{where}: {first['msg']}" if where else first["msg"]
        raise UnhealthyNode(
            f"rank {sender} sent {message[:40]!r} where {_name(kind)} was expected ({wrong}): do all nodes run the "
            "same version of megads?"
        ) from None


def encode_error(error: MegadsError) -> tuple[str, str]:
    """Returns the name of an error's nearest class in megads.errors, and its message."""
    known = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    return known.__name__, str(error)


def decode_error(name: str, message: str) -> MegadsError:
    """Returns the error encoded by `encode_error`; an unknown class name gives a MegadsError."""
    kind = vars(errors).get(name)
    return kind(message) if isinstance(kind, type) and issubclass(kind, MegadsError) else MegadsError(message)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


@dataclass(frozen=True)
class ControlPlane:
    """CPU collectives over all ranks; every method must be called by all ranks.

    Attributes:
        group: gloo group of all ranks; None for a single process.
        rank: global rank.
        world_size: number of ranks.
        timeout: timeout of its collectives, and of the process groups created for tensors; None: PyTorch's default.
    """

    group: ProcessGroup | None
    rank: int
    world_size: int
    timeout: timedelta | None = None

    def _is_alone(self) -> bool:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        assert self.world_size == ranks, f"a control plane of {self.world_size} ranks is used in a world of {ranks}"
        return ranks == 1

    def gather(self, value: T, kind: Any) -> list[T]:
        """All-gathers values; returns those of all ranks, by rank.

        Args:
            value: value of this rank.
            kind: type of the values, see `encode`.

        Raises:
            UnhealthyNode: a rank sent a value of another type.
        """
        if self._is_alone():
            return [value]
        own, lengths = self._padded(encode(value, kind))
        return self._decoded(self.gather_bytes(own), lengths, kind)

    def gather_to_first(self, value: T, kind: Any) -> list[T] | None:
        """Gathers values on rank 0, as `gather`; returns None on the other ranks."""
        if self._is_alone():
            return [value]
        own, lengths = self._padded(encode(value, kind))
        if self.rank:
            dist.gather(own, dst=0, group=self.group)
            return None
        rows = torch.empty(self.world_size, own.numel(), dtype=torch.uint8)
        dist.gather(own, list(rows), dst=0, group=self.group)
        return self._decoded(rows, lengths, kind)

    def broadcast(self, value: T, kind: Any, source: int = 0) -> T:
        """Broadcasts a value.

        Args:
            value: value to send; ignored on ranks other than `source`.
            kind: type of the value, see `encode`.
            source: rank that sends.

        Raises:
            UnhealthyNode: the source sent a value of another type.
        """
        if self._is_alone():
            return value
        sends = self.rank == source
        message = encode(value, kind) if sends else b""
        length = torch.tensor(len(message))
        dist.broadcast(length, src=source, group=self.group)
        _require_length(source, int(length))
        shared = _as_tensor(message) if sends else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(shared, src=source, group=self.group)
        return value if sends else decode(shared.numpy().tobytes(), kind, source)  # type: ignore[no-any-return]

    def gather_numbers(self, own: Tensor) -> Tensor | None:
        """Gathers a tensor of numbers on rank 0.

        Args:
            own: [n], with the same n and dtype on all ranks.

        Returns:
            [world_size, n] on rank 0, None on the other ranks.
        """
        if self._is_alone():
            return own[None]
        rows = torch.empty(self.world_size, own.numel(), dtype=own.dtype) if self.rank == 0 else None
        dist.gather(own, list(rows) if rows is not None else None, dst=0, group=self.group)
        return rows

    def gather_bytes(self, own: Tensor) -> Tensor:
        """All-gathers bytes.

        Args:
            own: [n] uint8, with the same n on all ranks.

        Returns:
            [world_size, n] uint8.
        """
        if self._is_alone():
            return own[None]
        rows = torch.empty(self.world_size, own.numel(), dtype=torch.uint8)
        dist.all_gather(list(rows), own, group=self.group)
        return rows

    def _padded(self, message: bytes) -> tuple[Tensor, list[int]]:
        """Returns a message padded to the longest one of all ranks, and the lengths of all messages."""
        lengths = self.gather_bytes(torch.tensor([len(message)]).view(torch.uint8)).view(torch.int64)[:, 0].tolist()
        for rank, length in enumerate(lengths):
            _require_length(rank, length)
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(message)] = _as_tensor(message)
        return padded, lengths

    def _decoded(self, rows: Tensor, lengths: Sequence[int], kind: Any) -> list[Any]:
        pairs = zip(rows, lengths, strict=True)
        return [decode(row[:length].numpy().tobytes(), kind, rank) for rank, (row, length) in enumerate(pairs)]

    def broadcast_number(self, number: int) -> int:
        """Broadcasts rank 0's integer: eight bytes without a type check, cheap enough for every step."""
        if self._is_alone():
            return number
        shared = torch.tensor(number, dtype=torch.int64)
        dist.broadcast(shared, src=0, group=self.group)
        return int(shared)

    def any(self, flag: bool) -> bool:
        """Logical OR over all ranks."""
        if self._is_alone():
            return flag
        shared = torch.tensor(int(flag))
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return bool(shared)

    def barrier(self) -> None:
        """Synchronizes the processes of all ranks, but not their devices."""
        if not self._is_alone():
            dist.barrier(group=self.group)

    def require_equal(self, what: str, value: str, remedy: str = "every node must see the same run directory") -> None:
        """Raises ConfigError on every rank unless all ranks have the same value.

        Args:
            what: name of the value, for the message.
            value: value of this rank.
            remedy: what the user should do, for the message.
        """
        values = self.gather(value, str)
        if len(set(values)) > 1:
            by_value = {v: [r for r, other in enumerate(values) if other == v] for v in set(values)}
            raise ConfigError(f"{what} differs between ranks: {by_value}; {remedy}")

    def first_decides(self, decide: Callable[[], T], kind: Any) -> T:
        """Calls a function on rank 0 and broadcasts its result.

        Args:
            decide: function called on rank 0 only, so it must not use collectives.
            kind: type of its result, see `encode`.

        Raises:
            MegadsError: on every rank, if `decide` raised one; on the other ranks as its nearest class in
                megads.errors.
        """
        answer, failure = None, None
        if self.rank == 0:
            try:
                answer = decide()
            except MegadsError as error:
                failure = error
        met = self.broadcast(encode_error(failure) if failure is not None else None, tuple[str, str] | None)
        if met is not None:
            raise failure or decode_error(*met)
        return self.broadcast(answer, kind)  # type: ignore[return-value]


def _as_tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _require_length(rank: int, length: int) -> None:
    """Raises UnhealthyNode if the length of a message is out of range."""
    if not 0 < length <= _MOST_BYTES:
        raise UnhealthyNode(
            f"rank {rank} announces a message of {length} bytes, but 1 to {_MOST_BYTES} are allowed: do all nodes "
            "run the same version of megads?"
        )


ALONE = ControlPlane(None, 0, 1)
"""Control plane of a single process, with or without process groups."""


def open_control_plane(timeout: timedelta | None = None) -> ControlPlane:
    """Creates the control plane of the default process group; collective, once per process.

    A gloo default group, as on CPUs, is used as it is. With NCCL a gloo group is created whose ranks connect lazily:
    connecting all pairs would take 10,000 sockets on each of 10,000 ranks, most of them never used.

    Args:
        timeout: timeout of its collectives; None: PyTorch's default.
    """
    if not dist.is_initialized():
        return ALONE
    group = dist.group.WORLD
    if dist.get_backend() == "nccl":
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        group = dist.new_group(backend="gloo", timeout=timeout)
    return ControlPlane(group, dist.get_rank(), dist.get_world_size(), timeout)


def authenticate(control: ControlPlane, secret: Secret | None) -> None:
    """Authenticates every rank of this start; collective, before anything else is exchanged.

    Each rank sends a nonce, then the HMAC of all nonces, its rank and the world size, so that a proof of an earlier
    start or of another rank cannot be replayed.

    Args:
        control: control plane of all ranks.
        secret: secret of the start; None for a process started by hand. If no rank has one, there is no check.

    Raises:
        UnhealthyNode: a rank has no secret, or another one.
    """
    if control.world_size == 1:
        return
    own = bytes([secret is not None]) + secrets.token_bytes(_NONCE_BYTES)
    nonces = control.gather_bytes(torch.tensor(list(own), dtype=torch.uint8))
    without = [rank for rank, has in enumerate(nonces[:, 0].tolist()) if not has]
    if len(without) == control.world_size:
        return
    if secret is None or without:
        raise UnhealthyNode(
            f"{_ranks(without)} of {control.world_size} joined without the secret that the others have: " + _REMEDY
        )
    transcript = hashlib.sha256(nonces.numpy().tobytes()).digest()

    def proof(rank: int) -> bytes:
        return secret.proof(_PURPOSE, transcript, str(rank).encode(), str(control.world_size).encode())

    shown = control.gather_bytes(torch.tensor(list(proof(control.rank)), dtype=torch.uint8))
    wrong = [r for r, row in enumerate(shown) if not hmac.compare_digest(proof(r), row.numpy().tobytes())]
    if 2 * len(wrong) > control.world_size:
        # Most ranks agree with each other but not with this one, so this one is wrong.
        wrong = [control.rank]
    if wrong:
        raise UnhealthyNode(
            f"{_ranks(wrong)} of {control.world_size} joined with another secret than this start's: {_REMEDY}"
        )


def _ranks(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:_SHOWN]))}{more}"


@contextmanager
def world(device: torch.device, timeout_s: float) -> Iterator[ControlPlane]:
    """Creates the default process group from the environment, gloo on CPU and NCCL on CUDA; yields the control plane.

    Ranks started by a launcher use a store prefix that others cannot guess, and are authenticated (`authenticate`).

    The block ends with a barrier only if it succeeds: after a failure no further collective is started. Without the
    barrier small gloo jobs sometimes abort at exit.

    Args:
        device: device of this rank.
        timeout_s: timeout of every collective.

    Raises:
        UnhealthyNode: a process that does not belong to this start has joined.
    """
    path = secret_file()
    secret = read_secret(path) if path is not None else None
    backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=timeout_s)
    # Without device_id. With it, PyTorch creates every further group eagerly by a collective over all ranks; without it
    # a group costs nothing until it is used. With it, all p2p of a group also shares one communicator and its stream;
    # without it each pair of ranks has its own. On a shared stream a waiting receive would block the sends that it
    # depends on, and schedules would deadlock (tests/engine/test_stream_order.py).
    dist.init_process_group(backend, timeout=timeout, **_rendezvous(secret, timeout))
    control = open_control_plane(timeout)
    authenticate(control, secret)
    yield control
    control.barrier()
    dist.destroy_process_group()


def _rendezvous(secret: Secret | None, timeout: timedelta) -> dict[str, Any]:
    """Returns the rendezvous arguments of init_process_group; empty for ranks started by hand, which use env://."""
    if secret is None:
        return {}
    rank, (host, port) = rank_environment(), store_address()
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return {"store": PrefixStore(secret.name("ranks"), store), "rank": rank.rank, "world_size": rank.world_size}
