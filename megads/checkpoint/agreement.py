"""Ranks act together: what fails on one fails on all, so that none waits for another forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megads.errors import CheckpointError
from megads.runtime.control_plane import ControlPlane

T = TypeVar("T")

_NAMED_FAILURES = 3


class RanksFailed(CheckpointError):
    """What some ranks could not do, raised on all.

    Attributes:
        errnos: the system's numbers of their errors, of those that it reported.
    """

    def __init__(self, message: str, errnos: frozenset[int]) -> None:
        super().__init__(message)
        self.errnos = errnos


def agreed(control: ControlPlane, action: Callable[[], T]) -> T:
    """Runs `action`, which must not communicate, on every rank and waits for all; collective.

    Raises:
        RanksFailed: on every rank, when the action failed on any; names the ranks and their reasons.
    """
    cause: Exception | None = None
    failure: tuple[str, int | None] | None = None
    result: Any = None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks are waiting to hear of it
        cause, failure = error, (_reason(error), _errno(error))
    failed = [
        (rank, *found)
        for rank, found in enumerate(control.gather(failure, tuple[str, int | None] | None))
        if found is not None
    ]
    if failed:
        named = "; ".join(f"rank {rank}: {reason}" for rank, reason, _ in failed[:_NAMED_FAILURES])
        more = f" (and {len(failed) - _NAMED_FAILURES} more ranks)" if len(failed) > _NAMED_FAILURES else ""
        raise RanksFailed(named + more, frozenset(code for *_, code in failed if code is not None)) from cause
    return result  # type: ignore[no-any-return]


def on_first(control: ControlPlane, action: Callable[[], T], kind: Any) -> T:
    """Runs `action` on rank 0 and gives its result to all; collective.

    Args:
        control: of all ranks.
        action: must not communicate.
        kind: type of its result, see json_message.encode.

    Raises:
        RanksFailed: on every rank, when the action failed.
    """
    result = agreed(control, lambda: action() if control.rank == 0 else None)
    return control.broadcast(result, kind)  # type: ignore[return-value]


def _errno(error: BaseException | None) -> int | None:
    """Of the error of the system that is the cause."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return None if error is None else error.errno


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
