"""Parts of tensors, and the proof that parts are the whole: every element once."""

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
        shape: extent in each dim.
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
        """The elements that both hold, None where there are none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(high - low for low, high in zip(offset, map(min, self.end, other.end), strict=True))
        return Rectangle(offset, shape) if all(extent > 0 for extent in shape) else None

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Where this rectangle lies in a tensor that holds `outer`, which contains it."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + extent) for start, extent in zip(starts, self.shape, strict=True))


def whole(global_shape: Sequence[int]) -> Rectangle:
    """All of a tensor."""
    return Rectangle((0,) * len(global_shape), tuple(global_shape))


def cover_sum(key: str, rectangles: Iterable[Rectangle]) -> int:
    """A number that adds up: rectangles hold every element of a tensor once where their sum is that of the whole.

    The corners of a rectangle, with the sign of their parity, are the mixed difference of its indicator function, and
    a function of bounded support is zero where its difference is. So parts cover the whole exactly once if and only if
    their signed corners cancel to those of the whole. Each corner counts as its 128-bit hash: ranks send one number
    instead of their rectangles, and parts that do not cover the whole agree with it by a chance of 2^-128 or so.

    Args:
        key: name of the tensor; sums of several tensors can be added, too.
        rectangles: parts of it.

    Returns:
        Of [0, 2^128); sums are to be taken modulo 2^128, see `add_cover_sums`.
    """
    total = 0
    for rectangle in rectangles:
        for ends in product((0, 1), repeat=len(rectangle.shape)):
            corner = [o + e * n for o, n, e in zip(rectangle.offset, rectangle.shape, ends, strict=True)]
            total += (-1) ** sum(ends) * xxhash.xxh3_128_intdigest(f"{key}@{corner}".encode())
    return total % _MODULUS


def add_cover_sums(sums: Iterable[int]) -> int:
    """The sum of rectangles of which each is in one of these sums."""
    return sum(sums) % _MODULUS


def coverage_fault(global_shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Says why rectangles do not cover every element of a tensor exactly once, None when they do."""
    all_of_it = whole(global_shape)
    # A sweep along the first dim: only rectangles that are still open there can overlap the next one.
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
