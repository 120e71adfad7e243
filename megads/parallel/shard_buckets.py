"""How many gradients ZeRO-2 and ZeRO-3 reduce together: pure arithmetic, for the engine and for the plan."""

from __future__ import annotations

from collections.abc import Collection

BUCKET_ELEMENTS = 50_000_000
"""Gradients are reduced, and ZeRO-3's weights gathered ahead, by this many elements: 200 MB in fp32."""

BUCKETS = 4
"""A small model is cut into about so many buckets, for otherwise copies of a whole one are all that ZeRO saves."""


def bucket_elements(sizes: Collection[int]) -> int:
    """Elements of a bucket: at least the largest parameter, whatever its size.

    Args:
        sizes: elements of every parameter of a rank.
    """
    return max(*sizes, min(BUCKET_ELEMENTS, sum(sizes) // BUCKETS))
