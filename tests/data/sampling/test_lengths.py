"""Samples whose sequence length changes during a run: every token once, in the order of one stream."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megads.data.sampling.blend import BalancedOrder, BlendedSamples, ContinuedOrder, MixPhase, MixSchedule
from megads.data.sampling.runs import copy_tokens
from megads.data.sampling.samples import PartSamples, SampleLengths, TrainSamples
from tests.data.conftest import MakeDataset

UNIT = 16


def tokens_bt(samples: PartSamples | BlendedSamples, numbers: list[int]) -> list[list[int]]:
    """The tokens of samples; -1 where there are none."""
    out_bt = np.full((len(numbers), samples.seq_len + 1), -1, np.int64)
    copy_tokens(samples.runs(np.array(numbers)), out_bt)
    return out_bt.tolist()


@pytest.mark.parametrize("seq_len", [16, 8, 4])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_parts_of_a_sample_join_to_its_tokens(make_dataset: MakeDataset, seq_len: int, batch: int) -> None:
    """Catches a part that starts one token off, lacks the first token of the next one, or is of another sample when
    several are requested at once."""
    units = TrainSamples(make_dataset([5, 0, 13, 1, 40, 8, 2, 30, 17]), range(9), UNIT, seed=3)
    parts, each = PartSamples(units, seq_len), UNIT // seq_len
    whole = np.full((14, UNIT + 1), -1, np.int64)
    copy_tokens(units.runs(np.arange(14)), whole)
    wanted = [whole[n // each, n % each * seq_len :][: seq_len + 1].tolist() for n in range(14 * each)]
    numbers = list(np.random.default_rng(0).permutation(14 * each))
    for begin in range(0, len(numbers), batch):
        asked = numbers[begin : begin + batch]
        assert tokens_bt(parts, asked) == [wanted[number] for number in asked]
    rows = parts.sample_keys(np.arange(14 * each))
    assert len({tuple(row) for row in rows.tolist()}) == 14 * each
    assert (rows[:, 1] // each == units.sample_keys(np.arange(14))[:, 1].repeat(each)).all()


def phase(datasets: list[TrainSamples], starts: list[tuple[int, int]], place: int) -> BlendedSamples:
    """The samples of one phase of a blend of two datasets."""
    mix = MixSchedule([MixPhase(0, BalancedOrder([3.0, 1.0])), MixPhase(20, BalancedOrder([1.0, 1.0]))])
    order = ContinuedOrder(mix, SampleLengths(tuple(starts), place))
    return BlendedSamples([PartSamples(units, starts[place][1]) for units in datasets], order)


def test_every_token_is_trained_once_over_changes_of_length(make_dataset: MakeDataset) -> None:
    """Catches a phase that repeats text, skips more than a sample of each dataset, or counts samples of another length
    as its own; also across the end of an epoch."""
    datasets = [
        TrainSamples(make_dataset([37] * 12, name="a"), range(12), UNIT, seed=3),
        TrainSamples(make_dataset([23] * 20, name="b"), range(20), UNIT, seed=3),
    ]
    starts, end = [(0, 4), (30, 8), (50, 16), (61, 4)], 120
    seen: dict[tuple[int, int], Counter[int]] = {}
    left_out = 0
    for place, (first, seq_len) in enumerate(starts):
        samples = phase(datasets, starts, place)
        left_out += int(samples.order.left_out_tokens.sum())
        assert (samples.order.left_out_tokens < seq_len).all()
        numbers = np.arange(first, [*starts[1:], (end, 0)][place][0])
        found, places = samples.place(numbers)
        for dataset, number in zip(found.tolist(), places.tolist(), strict=True):
            tokens = range(number * seq_len, (number + 1) * seq_len)
            epoch_tokens = datasets[dataset].samples_per_epoch * UNIT
            for token in tokens:
                seen.setdefault((dataset, token // epoch_tokens), Counter())[token % epoch_tokens] += 1
    assert {count for counter in seen.values() for count in counter.values()} == {1}
    lacking = 0
    for dataset in range(2):
        tokens = sorted(
            epoch * datasets[dataset].samples_per_epoch * UNIT + token
            for (of, epoch), counter in seen.items()
            if of == dataset
            for token in counter
        )
        lacking += tokens[-1] + 1 - len(tokens)
    assert lacking == left_out > 0


def test_a_blend_keeps_its_shares_over_changes_of_length(make_dataset: MakeDataset) -> None:
    """Catches a phase in which the blend restarts, so that a dataset contributes more or less than its share."""
    datasets = [TrainSamples(make_dataset([37] * 12, name=name), range(12), UNIT, seed=3) for name in "ab"]
    plain = MixSchedule([MixPhase(0, BalancedOrder([3.0, 1.0])), MixPhase(20, BalancedOrder([1.0, 1.0]))])
    samples = phase(datasets, [(0, 4), (30, 16)], 1)
    numbers = np.arange(30, 70)
    assert (samples.place(numbers)[0] == plain.place(numbers)[0]).all()
    assert samples.counts_by_dataset(70).sum() - samples.counts_by_dataset(30).sum() == 40
