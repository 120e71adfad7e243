"""Checkpoint retention against a direct statement of its rules, on random small sets."""

from __future__ import annotations

import random

import pytest

from megads.checkpoint.config import KEEP_ALL, Reason, Retention

ROUNDS = 2000


def drawn(draw: random.Random) -> tuple[Retention, dict[int, int]]:
    """A random rule, and sequence numbers by step: some unusable, some rewritten after the run went back."""
    steps = draw.sample(range(1, 25), draw.randint(0, 9))
    sequences = {step: draw.choice((0, number, number)) for number, step in enumerate(steps, 1)}
    losses = {step: float(draw.randint(1, 4)) for step in range(1, 25) if draw.random() < 0.6}
    return Retention(draw.randint(1, 4), draw.choice((0, 1, 4, 5)), draw.randint(0, 3), losses), sequences


def test_what_stays() -> None:
    """Catches a checkpoint removed although one of three rules keeps it, one kept without a rule, an unusable one kept
    for its step or as one of the best, and recency by step instead of age."""
    draw = random.Random(5)
    for _ in range(ROUNDS):
        keep, sequences = drawn(draw)
        age = {step: (number, step) for step, number in sequences.items()}
        for step, reasons in keep.reasons(sequences).items():
            newer = sum(age[other] > age[step] for other in age)
            usable, rank = sequences[step] > 0, {other: (loss, other) for other, loss in keep.losses.items()}
            validated = [other for other in sequences if sequences[other] and other in rank]
            better = sum(rank[other] < rank[step] for other in validated) if step in rank else 0
            wanted = {
                Reason.recent: newer < keep.recent,
                Reason.best: usable and step in keep.losses and better < keep.best,
                Reason.every: usable and keep.every_steps > 0 and step % keep.every_steps == 0,
            }
            assert reasons == tuple(reason for reason, holds in wanted.items() if holds), (keep, sequences, step)
        going = [step for step, reasons in keep.reasons(sequences).items() if not reasons]
        assert keep.surplus(sequences) == going == sorted(going, key=age.__getitem__)


def test_what_a_full_disk_takes() -> None:
    """Catches removal of the newest checkpoint, of a best one before a recent one, or of a newer one before an older
    one, and one that is not removed although no other is left."""
    draw = random.Random(6)
    for _ in range(ROUNDS):
        keep, sequences = drawn(draw)
        reasons, age = keep.reasons(sequences), {step: (number, step) for step, number in sequences.items()}
        order = keep.expendable(sequences, all_reasons=True)
        kept_for_good = [Reason.best in reasons[step] or Reason.every in reasons[step] for step in order]
        assert sorted(order) == sorted(step for step in age if step != max(age, key=age.__getitem__))
        assert kept_for_good == sorted(kept_for_good)
        for wanted in (False, True):
            part = [step for step, good in zip(order, kept_for_good, strict=True) if good is wanted]
            assert part == sorted(part, key=age.__getitem__)
        assert keep.expendable(sequences, all_reasons=False) == order[: kept_for_good.count(False)]


def test_the_best_of_all_that_were_stay() -> None:
    """Catches one of the best checkpoints removed before its loss is known: whatever the losses, those with the lowest
    remain at the end, and there are never more than the rules allow."""
    draw = random.Random(7)
    for _ in range(300):
        recent, best, steps = draw.randint(2, 3), draw.randint(1, 3), draw.randint(1, 20)
        losses = {step: draw.random() for step in range(1, steps + 1)}
        there: dict[int, int] = {}
        for step in losses:
            # A checkpoint is committed before its own step is validated.
            there[step] = step
            known = {at: loss for at, loss in losses.items() if at < step}
            for gone in Retention(recent, 0, best, known).surplus(there):
                del there[gone]
            assert len(there) <= recent + best
        assert set(sorted(losses, key=losses.__getitem__)[:best]) <= set(there)


@pytest.mark.parametrize("sequences", [{}, {1: 1}, {1: 1, 2: 2, 3: 0}])
def test_all_stay(sequences: dict[int, int]) -> None:
    """Catches a run configured to keep all checkpoints that loses some, also on a full disk."""
    assert KEEP_ALL.surplus(sequences) == KEEP_ALL.expendable(sequences, all_reasons=True) == []
