"""Rectangles of a global tensor: the algebra that lets any layout read what any other wrote. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


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


def coverage_fault(global_shape: Sequence[int], rectangles: Iterable[Rectangle]) -> str | None:
    """Says why rectangles do not cover every element of a tensor exactly once, None when they do."""
    whole = Rectangle((0,) * len(global_shape), tuple(global_shape))
    # A sweep along the first dim: only rectangles that are still open there can overlap the next one.
    open_rectangles: list[Rectangle] = []
    covered = 0
    for rectangle in sorted(rectangles, key=lambda part: part.offset):
        if len(rectangle.shape) != len(whole.shape) or rectangle.overlap(whole) != rectangle:
            return f"the part at {list(rectangle.offset)} of shape {list(rectangle.shape)} is not inside it"
        open_rectangles = [part for part in open_rectangles if not part.shape or part.end[0] > rectangle.offset[0]]
        for part in open_rectangles:
            if part.overlap(rectangle) is not None:
                return f"the parts at {list(part.offset)} and {list(rectangle.offset)} overlap"
        open_rectangles.append(rectangle)
        covered += rectangle.elements
    if covered != whole.elements:
        return f"{whole.elements - covered} of its {whole.elements} elements are in no part"
    return None
