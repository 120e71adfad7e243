"""Ranks act together: what fails on one fails on all, so that none waits for another forever.

The world group is used throughout; a process without process groups is a world of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megads.errors import CheckpointError

T = TypeVar("T")

_NAMED_FAILURES = 3


def rank() -> int:
    """This rank, 0 where nothing is distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks, 1 where nothing is distributed."""
    return dist.get_world_size() if dist.is_initialized() else 1


def gather_to_all(value: T) -> list[T]:
    """Every rank's value, by rank; collective."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def gather_to_first(value: T) -> list[T] | None:
    """Every rank's value, by rank, on rank 0; None on the others; collective."""
    if world_size() == 1:
        return [value]
    values: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def from_first(value: T) -> T:
    """Rank 0's value; collective."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def agreed(action: Callable[[], T]) -> T:
    """Runs `action`, which must not communicate, on every rank and waits for all; collective.

    Raises:
        CheckpointError: on every rank, when the action failed on any; names the ranks and their reasons.
    """
    cause: Exception | None = None
    failure: str | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        cause, failure = error, _reason(error)
    failures = [f"rank {index}: {text}" for index, text in enumerate(gather_to_all(failure)) if text is not None]
    if failures:
        more = f" (and {len(failures) - _NAMED_FAILURES} more ranks)" if len(failures) > _NAMED_FAILURES else ""
        raise CheckpointError("; ".join(failures[:_NAMED_FAILURES]) + more) from cause
    return result  # type: ignore[no-any-return]


def on_first(action: Callable[[], T]) -> T:
    """Runs `action` on rank 0 and gives its result to all; collective.

    Raises:
        CheckpointError: on every rank, when the action failed.
    """
    return from_first(agreed(lambda: action() if rank() == 0 else None))  # type: ignore[return-value]


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
