"""Caches of tensors that operators compute once per device: masks, ALiBi slopes, rotary tables.

A cache evicts the least recently used tensors, whose memory is then reused. A CUDA graph would continue to read that
memory, so code that captures a graph must keep the tensors that the caches returned during the capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_KEPT: list[list[Any]] = []
"""Lists that active `record_cached_results` contexts fill."""


def device_cache(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """functools.lru_cache whose results `record_cached_results` records; tensor arguments are compared by identity.

    Args:
        maxsize: maximum number of cached results.
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
def record_cached_results() -> Iterator[list[Any]]:
    """Yields a list that is filled with the results that caches return inside the context."""
    kept: list[Any] = []
    _KEPT.append(kept)
    try:
        yield kept
    finally:
        _KEPT.remove(kept)
