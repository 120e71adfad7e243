"""Ranks act together: what fails on one fails on all, so that none waits for another forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from megads.errors import CheckpointError
from megads.runtime.control_plane import ControlPlane

T = TypeVar("T")

_NAMED_FAILURES = 3


def agreed(control: ControlPlane, action: Callable[[], T]) -> T:
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
    failures = [
        f"rank {index}: {text}" for index, text in enumerate(control.gather(failure, str | None)) if text is not None
    ]
    if failures:
        more = f" (and {len(failures) - _NAMED_FAILURES} more ranks)" if len(failures) > _NAMED_FAILURES else ""
        raise CheckpointError("; ".join(failures[:_NAMED_FAILURES]) + more) from cause
    return result  # type: ignore[no-any-return]


def on_first(control: ControlPlane, action: Callable[[], T], kind: Any) -> T:
    """Runs `action` on rank 0 and gives its result to all; collective.

    Args:
        control: of all ranks.
        action: must not communicate.
        kind: type of its result, see json_message.encode.

    Raises:
        CheckpointError: on every rank, when the action failed.
    """
    result = agreed(control, lambda: action() if control.rank == 0 else None)
    return control.broadcast(result, kind)  # type: ignore[return-value]


def _reason(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
