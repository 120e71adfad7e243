"""Values that all layers of a stage share for one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from megads.batch import BatchInfo

T = TypeVar("T")


class PerBatch(Generic[T]):
    """Makes a value when the first layer asks for it and forgets it with the micro-batch.

    Held weakly by the BatchInfo object itself: a recomputed forward pass, which is given the same object, finds the
    value again.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[BatchInfo, dict[Hashable, T]] = WeakKeyDictionary()

    def get(self, info: BatchInfo, key: Hashable, make: Callable[[], T]) -> T:
        """The value of this micro-batch under `key`, which says all that `make` depends on beside the micro-batch."""
        values = self._values.setdefault(info, {})
        if key not in values:
            values[key] = make()
        return values[key]
