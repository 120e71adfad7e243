"""A mix of datasets that changes in the middle of a run: no sample twice, none lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megads.data.blend import BlendedSamples
from megads.data.blend_config import DatasetConfig, MixConfig, PhaseConfig, Weighting
from megads.data.config import DataConfig
from megads.data.datasets import open_datasets, train_weights
from megads.data.mix_history import continued
from megads.data.recorded import record_data, renamed_datasets
from megads.errors import ConfigError

from .conftest import VOCAB_SIZE, MakeDataset

SEQ_LEN = 8
TOTAL = 400
NAMES = ("web", "code", "books", "maths")


def dealt(data: DataConfig, first: int, end: int) -> list[tuple[str, int]]:
    """(dataset, its number there) of each sample from `first` to `end`."""
    samples, _ = open_datasets(data, SEQ_LEN, 1, VOCAB_SIZE, TOTAL)
    if not isinstance(samples, BlendedSamples):
        return [(data.train[0].path, number) for number in range(first, end)]
    datasets, places = samples.place(np.arange(first, end))
    paths = [item.path for item in data.blended]
    return [(paths[dataset], place) for dataset, place in zip(datasets, places.tolist(), strict=True)]


@pytest.fixture
def paths(make_dataset: MakeDataset) -> list[str]:
    return [make_dataset([SEQ_LEN] * (TOTAL + 20), name=name).prefix for name in NAMES]


mixes = st.lists(
    st.tuples(st.integers(0, len(NAMES) - 1), st.integers(1, 50).map(lambda n: n / 10)),
    min_size=1,
    max_size=4,
    unique_by=lambda item: item[0],
)
stops = st.lists(st.tuples(st.integers(0, 120), mixes, st.integers(0, 300)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=mixes, changes=stops)
def test_any_changes_train_every_sample_once(
    paths: list[str], first: list[tuple[int, float]], changes: list[tuple[int, list[tuple[int, float]], int]]
) -> None:
    """Catches weights, datasets and phases that are changed for the past as well: added, left out for a while,
    reordered, one alone, changed twice at the same sample."""

    def config(mix: list[tuple[int, float]], phase: int) -> DataConfig:
        train = [DatasetConfig(paths[number], weight, max_epochs=9) for number, weight in mix]
        phases = [PhaseConfig(phase, [weight for _, weight in reversed(mix)])] if phase else []
        return DataConfig(train=train, phases=phases, split=[1.0, 0.0])

    data, at = config(first, 0), 0
    trained: list[tuple[str, int]] = []
    for length, mix, phase in [*changes, (TOTAL - sum(length for length, _, _ in changes), first, 0)]:
        trained += dealt(data, at, at + max(length, 0))
        at += max(length, 0)
        data = continued(config(mix, phase), data, at, train_weights, {})
        again = continued(config(mix, phase), data, at, train_weights, {})
        assert again.history == data.history
    numbers = defaultdict(list)
    for path, number in trained:
        numbers[path].append(number)
    assert all(found == list(range(len(found))) for found in numbers.values())


def test_the_past_stays_as_it_was_dealt(paths: list[str]) -> None:
    """Catches a change that `why` or an older checkpoint would see as if it had been there from the start, a share that
    does not count from there on, and the same command again that is taken for another change."""
    before = DataConfig(train=[DatasetConfig(paths[0], 3), DatasetConfig(paths[1], 1)], split=[1.0, 0.0])
    now = replace(before, train=[DatasetConfig(paths[2], 1), DatasetConfig(paths[0], 1)])
    data = continued(now, before, 100, train_weights, {})
    assert data.history == [MixConfig(0, {paths[0]: 3, paths[1]: 1}), MixConfig(100, {paths[2]: 1, paths[0]: 1})]
    assert dealt(data, 0, 100) == dealt(before, 0, 100)
    later = [path for path, _ in dealt(data, 100, 200)]
    assert later.count(paths[2]) == later.count(paths[0]) == 50
    assert continued(now, data, 180, train_weights, {}) == data
    same = replace(now, train=[DatasetConfig(paths[0], 0.5), DatasetConfig(paths[2], 0.5)])
    assert continued(same, data, 180, train_weights, {}).history == data.history
    with pytest.raises(ConfigError, match=r"names .*web twice, in a mix that changes at sample 100"):
        continued(replace(now, train=[*before.train, DatasetConfig(paths[0], 2)]), before, 100, train_weights, {})


def test_a_dataset_that_was_moved_goes_on(make_dataset: MakeDataset, paths: list[str]) -> None:
    """Catches a dataset under another path that is read from its beginning again."""
    before = DataConfig(train=[DatasetConfig(paths[0], 1), DatasetConfig(paths[1], 1)], split=[1.0, 0.0])
    moved = make_dataset([SEQ_LEN] * (TOTAL + 20), name="moved").prefix
    now = replace(before, train=[DatasetConfig(paths[0], 1), DatasetConfig(moved, 3)])
    one = DataConfig(train=[DatasetConfig(paths[1])], split=[1.0, 0.0])
    renamed = renamed_datasets(record_data(one), record_data(replace(one, train=[DatasetConfig(moved)])))
    assert renamed == {paths[1]: moved}
    data = continued(now, before, 100, train_weights, renamed)
    assert min(number for path, number in dealt(data, 100, 200) if path == moved) == 50
    assert paths[1] not in data.paths


def test_computed_weights_are_kept_as_they_were(make_dataset: MakeDataset) -> None:
    """Catches a past mix by tokens whose weights are computed for today's datasets."""
    prefixes = [make_dataset([SEQ_LEN] * count, name=name).prefix for count, name in ((300, "a"), (100, "b"))]
    train = [DatasetConfig(prefix, max_epochs=2) for prefix in prefixes]
    before = DataConfig(train=train, weights=Weighting.tokens, split=[1.0, 0.0])
    added = make_dataset([SEQ_LEN] * 500, name="c").prefix
    now = replace(before, train=[*before.train, DatasetConfig(added)])
    data = continued(now, before, 50, train_weights, {})
    assert list(data.history[0].weights.values()) == [2400, 800]
    assert list(data.history[1].weights.values()) == [2400, 800, 4000]
    assert dealt(data, 0, 50) == dealt(before, 0, 50)
