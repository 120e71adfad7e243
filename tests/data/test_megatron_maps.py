from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from megads.data.batches import PLAIN, assemble
from megads.data.blend import BalancedOrder
from megads.data.megatron_maps import MegatronMapKey, MegatronSamples, epochs_for, megatron_share
from megads.data.megatron_order import MegatronOrder

from .conftest import VOCAB_SIZE, MakeDataset
from .one_sample import row_of, tokens_of


def test_the_shuffles_are_megatrons(make_dataset: MakeDataset) -> None:
    """Catches another generator, dtype or order of the shuffles; 1234 is the seed of the known vectors."""
    dataset = make_dataset([4, 4, 4, 4, 4, 4, 4, 3])
    found = MegatronMapKey(dataset.fingerprint(), 0, 8, 5, 1234, 6, 0.8).build(dataset)
    assert (found.document_order.tolist(), found.document_order.dtype) == ([2, 1, 6, 0, 4, 5, 3, 7], np.int32)
    assert (found.shuffle.tolist(), found.shuffle.dtype) == ([0, 4, 3, 2, 5, 1], np.uint32)


@pytest.mark.parametrize(
    "samples,theta,expected",
    [
        # 100 tokens and S = 10 give 9 samples an epoch, two epochs 19, so that the last gives what exceeds 9.
        (9, 0.80, (1, None)), (10, 0.80, (2, 9)), (15, 0.80, (2, 9)), (16, 0.80, (2, None)), (16, 0.95, (2, 9)),
        (17, 0.95, (2, None)), (19, 0.80, (2, None)), (20, 0.80, (3, 19)),
    ],
)  # fmt: skip
def test_when_the_last_epoch_is_apart(samples: int, theta: float, expected: tuple[int, int | None]) -> None:
    """Catches a border of the separate_last_epoch rule that is off by one."""
    assert epochs_for(100, 10, samples, theta) == expected


def test_the_last_epoch_stays_last(make_dataset: MakeDataset) -> None:
    """Catches epochs shuffled together where Megatron keeps the last apart."""
    dataset = make_dataset([10] * 10)
    key = MegatronMapKey(dataset.fingerprint(), 0, 10, 10, 3, 22, 0.8)
    found = key.build(dataset)
    assert sorted(found.document_order[-10:]) == list(range(10))
    assert Counter(found.document_order.tolist()) == dict.fromkeys(range(10), 3)
    assert sorted(found.shuffle[:19]) == list(range(19)) and sorted(found.shuffle[19:]) == list(range(19, 29))


def test_a_blend_of_megatrons_datasets_never_asks_for_more_than_was_built(make_dataset: MakeDataset) -> None:
    """Catches a share that is rounded down: the greedy order takes one more than weight * samples."""
    weights = [0.003, 0.297, 0.7]
    taken = MegatronOrder(weights, 1000).counts(1000)
    shares = [megatron_share(1000, weight) for weight in weights]
    assert all(taken <= shares) and taken.sum() == 1000
    samples = MegatronSamples(make_dataset([7] * 30), range(30), 5, 1, shares[1])
    assert samples.samples_per_map >= shares[1]
    # The loader reads ahead of the end of a run.
    assert row_of(samples, samples.samples_per_map)[1] == row_of(samples, 0)[1]


def test_batches_are_in_megatrons_order(make_dataset: MakeDataset) -> None:
    """Catches a batch read by the default's epochs; the map of three epochs holds more samples than three epochs do."""
    samples = MegatronSamples(make_dataset([7] * 30), range(30), 10, 1, 62)
    assert samples.samples_per_map == 62 and samples.samples_per_epoch == 20
    ids = np.arange(15, 80)
    [batch] = assemble(samples, ids[None], VOCAB_SIZE, True, PLAIN)
    assert batch.tokens_bs is not None
    for row, sample in enumerate(ids.tolist()):
        assert batch.tokens_bs[row].tolist() == tokens_of(samples, sample)[:-1]


def test_the_balanced_order_spares_a_tiny_dataset() -> None:
    """Catches the default going Megatron's way, which draws a dataset of weight 0.0005 at once."""
    first = [order.counts(100)[1] for order in (MegatronOrder([0.9995, 0.0005], 100), BalancedOrder([0.9995, 0.0005]))]
    assert first == [1, 0]
