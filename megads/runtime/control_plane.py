"""The control plane: how ranks agree on everything that is no tensor of the model.

Checkpoint commits, requests to stop, equal configs: small values between hosts, which wait for disks and for each
other. On NCCL they would be pickled into GPU memory, wait for all work in the stream, and run under the watchdog, which
ends a run whose shared disk is slow. So the control plane is always a gloo group of its own, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megads.errors import ConfigError, MegadsError

T = TypeVar("T")


@dataclass(frozen=True)
class ControlPlane:
    """Collectives between the hosts of all ranks; every method is collective over the world.

    Attributes:
        group: gloo over the world; None for a process alone.
        rank: global rank.
        world_size: all ranks.
        timeout: of its collectives, and of the groups that are made for tensors; None is torch's default.
    """

    group: ProcessGroup | None
    rank: int
    world_size: int
    timeout: timedelta | None = None

    def _is_alone(self) -> bool:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        assert self.world_size == ranks, f"a control plane of {self.world_size} ranks is used in a world of {ranks}"
        return ranks == 1

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on all of them; pickled."""
        if self._is_alone():
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T] | None:
        """Every rank's value, by rank, on rank 0; None on the others; pickled."""
        if self._is_alone():
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of one rank, on all of them; pickled."""
        if self._is_alone():
            return value
        values = [value]
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def broadcast_number(self, number: int) -> int:
        """Rank 0's number, on all of them: one message of eight bytes, for every step."""
        if self._is_alone():
            return number
        shared = torch.tensor(number, dtype=torch.int64)
        dist.broadcast(shared, src=0, group=self.group)
        return int(shared)

    def any(self, flag: bool) -> bool:
        """True on all ranks when the flag is set on at least one."""
        if self._is_alone():
            return flag
        shared = torch.tensor(int(flag))
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.group)
        return bool(shared)

    def barrier(self) -> None:
        """Waits for the hosts of all ranks, not for their devices."""
        if not self._is_alone():
            dist.barrier(group=self.group)

    def require_equal(self, what: str, value: str, remedy: str = "every node must see the same run directory") -> None:
        """Raises ConfigError on every rank unless all ranks hold the same value.

        Args:
            what: is compared.
            value: this rank's.
            remedy: what the user should do.
        """
        values = self.gather(value)
        if len(set(values)) > 1:
            by_value = {v: [r for r, other in enumerate(values) if other == v] for v in set(values)}
            raise ConfigError(f"{what} differs between ranks: {by_value}; {remedy}")

    def first_decides(self, decide: Callable[[], T]) -> T:
        """Rank 0's answer, on every rank.

        Args:
            decide: called on rank 0 only, so it must not communicate; its answer can be pickled.

        Raises:
            MegadsError: on every rank, when rank 0 met one.
        """
        answer: Any = None
        if self.rank == 0:
            try:
                answer = decide()
            except MegadsError as error:
                answer = error
        answer = self.broadcast(answer)
        if isinstance(answer, MegadsError):
            raise answer
        return answer  # type: ignore[no-any-return]


ALONE = ControlPlane(None, 0, 1)
"""Of one process without process groups, or in a world of one."""


def open_control_plane(timeout: timedelta | None = None) -> ControlPlane:
    """The control plane of the default process group; collective, once a process.

    Where the default group is gloo, as on CPUs, it is the control plane itself. Beside NCCL a group is made whose ranks
    connect when they first talk: all to all would be 10,000 sockets on each of 10,000 ranks, most of them never used.

    Args:
        timeout: of its collectives; None is torch's default.
    """
    if not dist.is_initialized():
        return ALONE
    group = dist.group.WORLD
    if dist.get_backend() == "nccl":
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        group = dist.new_group(backend="gloo", timeout=timeout)
    return ControlPlane(group, dist.get_rank(), dist.get_world_size(), timeout)
