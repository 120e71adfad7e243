"""Rectangles of tensors, compared with dense masks."""

from __future__ import annotations

import random

import pytest
import torch

from megads.checkpoint.rank_file import Rectangle, add_cover_sums, cover_sum, coverage_fault
from tests.checkpoint.random_layouts import random_cuts


def random_rectangle(draw: random.Random, shape: tuple[int, ...]) -> Rectangle:
    offset = tuple(draw.randrange(extent) for extent in shape)
    return Rectangle(offset, tuple(draw.randint(1, n - start) for n, start in zip(shape, offset, strict=True)))


def mask(rectangle: Rectangle, shape: tuple[int, ...]) -> torch.Tensor:
    filled = torch.zeros(shape, dtype=torch.int64)
    filled[rectangle.within(Rectangle((0,) * len(shape), shape))] = 1
    return filled


@pytest.mark.parametrize("shape", [(9,), (5, 6), (3, 4, 5)])
def test_overlap(shape: tuple[int, ...]) -> None:
    """Catches an overlap that is off by one at an edge, or empty in one dim only."""
    draw = random.Random(3)
    for _ in range(300):
        left, right = random_rectangle(draw, shape), random_rectangle(draw, shape)
        expected = mask(left, shape) * mask(right, shape)
        overlap = left.overlap(right)
        assert overlap == right.overlap(left)
        assert (overlap is None) == (not expected.any())
        if overlap is not None:
            assert torch.equal(mask(overlap, shape), expected)
            values = torch.arange(expected.numel()).view(shape)
            part = values[left.within(Rectangle((0,) * len(shape), shape))]
            assert torch.equal(part[overlap.within(left)].reshape(-1), values[expected.bool()])


@pytest.mark.parametrize("shape", [(9,), (5, 6), (3, 4, 5)])
def test_coverage_of_random_cuts(shape: tuple[int, ...]) -> None:
    """Catches a valid partition that is refused, and a duplicate, missing or shifted part that is accepted."""
    draw = random.Random(4)
    whole = Rectangle((0,) * len(shape), shape)
    for _ in range(200):
        parts = random_cuts(draw, whole, 4)
        draw.shuffle(parts)
        assert coverage_fault(shape, parts) is None
        damaged = list(parts)
        change = draw.choice(["drop", "double", "replace"])
        if change == "drop":
            damaged.pop()
        elif change == "double":
            damaged.append(parts[0])
        else:
            damaged[0] = random_rectangle(draw, shape)
        exact = torch.equal(sum(mask(part, shape) for part in damaged) + torch.zeros(shape), torch.ones(shape))
        assert (coverage_fault(shape, damaged) is None) == exact, (change, damaged)
        sums = (cover_sum("weight/a", damaged[:3]), cover_sum("weight/a", damaged[3:]))
        assert (add_cover_sums(sums) == cover_sum("weight/a", [whole])) == exact, (change, damaged)


def test_coverage_faults_are_named() -> None:
    """Catches an overlap that hides a gap of the same size where only elements are counted."""
    assert coverage_fault((4,), [Rectangle((0,), (2,)), Rectangle((1,), (2,))]) == "the parts at [0] and [1] overlap"
    assert coverage_fault((4,), [Rectangle((0,), (3,))]) == "1 of its 4 elements are in no part"
    assert "not inside" in str(coverage_fault((4,), [Rectangle((3,), (2,))]))
    assert "not inside" in str(coverage_fault((4, 2), [Rectangle((0,), (4,))]))


def test_sums_of_several_tensors() -> None:
    """Catches a part of one tensor that replaces one of another, and a scalar that is stored twice or never."""
    half, other = Rectangle((0,), (2,)), Rectangle((2,), (2,))
    whole = add_cover_sums((cover_sum("a", [Rectangle((0,), (4,))]), cover_sum("b", [Rectangle((0,), (4,))])))
    assert add_cover_sums((cover_sum("a", [half, other]), cover_sum("b", [half, other]))) == whole
    assert add_cover_sums((cover_sum("a", [half, other, other]), cover_sum("b", [half]))) != whole
    scalar = Rectangle((), ())
    assert len({cover_sum("a", [scalar] * times) for times in range(3)}) == 3
