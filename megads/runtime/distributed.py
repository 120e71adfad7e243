"""Joins and leaves the world of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megads.errors import ConfigError, MegadsError

T = TypeVar("T")


@contextmanager
def world(device: torch.device, timeout_s: float) -> Iterator[None]:
    """Default process group from the environment: gloo on CPU, NCCL on CUDA.

    Left through a barrier only when all went well: on failure no further collective is started. Without the barrier
    small gloo jobs sometimes abort at exit.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    # Without device_id: with it torch would make each further group, used or not, by a collective over the whole world;
    # so a group costs nothing before its members use it.
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    yield
    dist.barrier()
    dist.destroy_process_group()


def require_equal(what: str, value: str, remedy: str = "every node must see the same run directory") -> None:
    """Raises ConfigError on every rank unless all ranks hold the same value.

    Args:
        what: is compared.
        value: this rank's.
        remedy: what the user should do.
    """
    values: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        by_value = {v: [r for r, other in enumerate(values) if other == v] for v in set(values)}
        raise ConfigError(f"{what} differs between ranks: {by_value}; {remedy}")


def first_decides(decide: Callable[[], T]) -> T:
    """Rank 0's answer, on every rank; collective.

    Args:
        decide: called on rank 0 only, so it must not communicate; its answer can be pickled.

    Raises:
        MegadsError: on every rank, when rank 0 met one.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [decide()]
        except MegadsError as error:
            answer = [error]
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], MegadsError):
        raise answer[0]
    return answer[0]


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on all ranks when the flag is set on at least one."""
    value = torch.tensor([int(flag)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())
