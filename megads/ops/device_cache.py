"""Tensors that operators make once for a device and give out ever after: masks, slopes, tables of angles.

A cache drops what was not asked for lately, and its memory is another tensor's then. A CUDA graph goes on reading it:
whoever captures one keeps what the caches gave out meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_KEPT: list[list[Any]] = []
"""The lists that `keep_cached` fills at the moment."""


def device_cache(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """functools.lru_cache, of which `keep_cached` hears; tensors among the arguments go by their identity.

    Args:
        maxsize: results that are remembered.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        cached = functools.lru_cache(maxsize)(make)

        @functools.wraps(cached)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            value = cached(*args, **kwargs)  # type: ignore[arg-type]
            for kept in _KEPT:
                kept.append(value)
            return value

        return call

    return decorate


@contextmanager
def keep_cached() -> Iterator[list[Any]]:
    """Fills the list that it yields with what caches give out inside."""
    kept: list[Any] = []
    _KEPT.append(kept)
    try:
        yield kept
    finally:
        _KEPT.remove(kept)
