"""Rectangular parts of tensors, and checks that parts cover a tensor exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import xxhash

_MODULUS = 2**128


@dataclass(frozen=True)
class Rectangle:
    """A part of a global tensor.

    Attributes:
        offset: first index in each dim.
        shape: size in each dim.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(start + extent for start, extent in zip(self.offset, self.shape, strict=True))

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """The intersection of both rectangles, None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(high - low for low, high in zip(offset, map(min, self.end, other.end), strict=True))
        return Rectangle(offset, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Slices of this rectangle in a tensor that holds `outer`, a rectangle that contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True))


def whole(global_shape: Sequence[int]) -> Rectangle:
    """The rectangle of a whole tensor."""
    return Rectangle((0,) * len(global_shape), tuple(global_shape))


def cover_sum(key: str, rectangles: Iterable[Rectangle]) -> int:
    """Additive checksum of rectangles: parts cover a tensor exactly once if their sum equals that of the whole tensor.

    The corners of a rectangle, with the sign of their parity, are the mixed difference of its indicator function, and
    a function of bounded support is zero if its mixed difference is zero. So parts cover the whole exactly once if and
    only if their signed corners cancel to those of the whole. Each corner is represented by its 128-bit hash, so ranks
    send one number instead of their rectangles. Parts that do not cover the whole have the same sum with a probability
    of about 2^-128.

    Args:
        key: name of the tensor; sums of several tensors can be added, too.
        rectangles: parts of the tensor.

    Returns:
        A number in [0, 2^128); add them modulo 2^128, see `add_cover_sums`.
    """
    total = 0
    for rectangle in rectangles:
        for ends in product((0, 1), repeat=len(rectangle.shape)):
            corner = [o + e * n for o, n, e in zip(rectangle.offset, rectangle.shape, ends, strict=True)]
            total += (-1) ** sum(ends) * xxhash.xxh3_128_intdigest(f"{key}@{corner}".encode())
    return total % _MODULUS


def add_cover_sums(sums: Iterable[int]) -> int:
    """Cover sum of the union of several sets of rectangles, from the cover sum of each set."""
    return sum(sums) % _MODULUS


def coverage_fault(global_shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Describes why rectangles do not cover a tensor exactly once; None if they do."""
    all_of_it = whole(global_shape)
    # Sweep along the first dim: only rectangles that are still open can overlap the next one.
    open_rectangles: list[Rectangle] = []
    covered = 0
    for rectangle in sorted(rectangles, key=lambda part: part.offset):
        if len(rectangle.shape) != len(all_of_it.shape) or rectangle.overlap(all_of_it) != rectangle:
            return f"the part at {list(rectangle.offset)} of shape {list(rectangle.shape)} is not inside it"
        open_rectangles = [part for part in open_rectangles if not part.shape or part.end[0] > rectangle.offset[0]]
        for part in open_rectangles:
            if part.overlap(rectangle) is not None:
                return f"the parts at {list(part.offset)} and {list(rectangle.offset)} overlap"
        open_rectangles.append(rectangle)
        covered += rectangle.elements
    if covered != all_of_it.elements:
        return f"{all_of_it.elements - covered} of its {all_of_it.elements} elements are in no part"
    return None
