"""How parameters are laid into buckets."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megads.optim.buckets import ALIGNMENT, Member, bucket_layouts
from megads.optim.groups import Role

FORWARD = [
    Member("embedding", 1000, Role.tied),
    Member("a.norm", 30, Role.no_decay, partial=True),
    Member("a.matrix", 500, Role.decay),
    Member("a.bias", 20, Role.no_decay),
    Member("b.matrix", 70, Role.decay),
    Member("b.bias", 20, Role.no_decay),
    Member("c.matrix", 60, Role.decay),
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket_elements", [1, 100, 10**9])
def test_every_element_has_one_place_and_one_owner(ranks: int, bucket_elements: int) -> None:
    """Catches parameters that are lost, doubled or overlap, misaligned ones, and slices that leave an element out."""
    buckets = bucket_layouts(FORWARD, ranks, bucket_elements)
    placed = [slot.member.name for bucket in buckets for slot in bucket.slots]
    assert sorted(placed) == sorted(member.name for member in FORWARD)
    for bucket in buckets:
        assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
        assert all(left.stop <= right.start for left, right in pairwise(bucket.slots))
        assert bucket.slots[-1].stop <= bucket.numel
        slices = [bucket.slice_of(rank, ranks) for rank in range(ranks)]
        assert [element for part in slices for element in part] == list(range(bucket.numel))
        assert len({len(part) for part in slices}) == 1 and slices[0].stop % ALIGNMENT == 0


def test_order_and_company() -> None:
    """Catches buckets that wait for others which complete later, mixed decays, a tied embedding that is not alone and
    gradients of a sequence shard among whole ones."""
    found = [[slot.member.name for slot in bucket.slots] for bucket in bucket_layouts(FORWARD, 1, 100)]
    assert found == [["c.matrix", "b.matrix"], ["b.bias", "a.bias"], ["a.matrix"], ["a.norm"], ["embedding"]]
    kinds = [(bucket.role, bucket.partial, bucket.begins) for bucket in bucket_layouts(FORWARD, 1, 100)]
    assert kinds == [
        (Role.decay, False, 0),
        (Role.no_decay, False, 1),
        (Role.decay, False, 4),
        (Role.no_decay, True, 5),
        (Role.tied, False, 6),
    ]


def test_a_tied_embedding_lies_alike_on_both_stages() -> None:
    """Catches copies whose elements belong to different ranks on the two stages, which could not be summed in place."""
    first = bucket_layouts(FORWARD, 3, 10**9)
    last = bucket_layouts([Member("z.matrix", 999, Role.decay), Member("embedding", 1000, Role.tied)], 3, 10**9)
    places = [
        next((bucket.slots[0].start, bucket.numel) for bucket in stage if bucket.role is Role.tied)
        for stage in (first, last)
    ]
    assert places[0] == places[1]
