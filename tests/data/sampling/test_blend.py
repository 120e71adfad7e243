from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megads.data.config import (
    DataConfig,
    DataPhaseConfig,
    DatasetConfig,
    MixConfig,
    Order,
    PackingMode,
    SkipConfig,
    Weighting,
)
from megads.data.indexed.recorded import record_data, renamed_datasets
from megads.data.sampling import blend as module
from megads.data.sampling.batch_size import BatchSizeSchedule
from megads.data.sampling.blend import BalancedOrder, BlendedSamples, MixPhase, MixSchedule, continued
from megads.data.sampling.datasets import open_datasets, train_weights
from megads.data.sampling.loader import PLAIN, LoaderShare, Packing, TrainLoader, assemble
from megads.data.sampling.packed import PackedSamples
from megads.data.sampling.samples import TrainSamples
from megads.errors import ConfigError
from megads.tools.megatron_order import MegatronSamples
from tests.data.conftest import VOCAB_SIZE, MakeDataset

SEQ_LEN = 8


@pytest.mark.parametrize("datasets", [1, 2, 3, 10, 40])
def test_proportions_hold_at_every_prefix(datasets: int) -> None:
    """Catches a blend that exceeds its error bound, and samples of a dataset that are repeated or left out."""
    random = np.random.default_rng(datasets)
    for weights in (random.random(datasets), random.pareto(1, datasets) + 0.01, np.ones(datasets)):
        order = BalancedOrder(weights.tolist())
        chosen, places = order.place(np.arange(5000))
        had = np.cumsum(chosen[:, None] == np.arange(datasets), axis=0)
        assert (places == had[np.arange(5000), chosen] - 1).all()
        off = np.abs(had - np.arange(1, 5001)[:, None] * weights / weights.sum())
        assert (off.max(axis=0) <= order.bound + 1e-6).all() and order.bound.max() < 2
        assert order.counts(3210).tolist() == had[3209].tolist()


def test_like_weights_stay_within_about_one_sample() -> None:
    """Catches an unbalanced tree, whose rounding errors accumulate towards the leaves."""
    for weights in ([1] * 10, [5, 3, 2], [0.7, 0.2, 0.1], [0.9, 0.05, 0.05], [1] * 100):
        assert BalancedOrder(weights).bound.max() < 1.02


def test_the_blend_order_is_pinned() -> None:
    """Catches an edit that changes the sample order of running blends."""
    datasets, _ = BalancedOrder([5, 3, 2]).place(np.arange(20))
    assert datasets.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 1, 0, 2, 0, 1]


ODD_WEIGHTS = [0.97, 0.96, 0.07, 0.09, 0.85, 0.75, 0.68, 0.32, 0.62, 0.62, 0.59]
"""Python 3.11, Python 3.12 and NumPy sum these to three different values."""


@pytest.mark.parametrize(
    ("order", "digest"),
    [
        (Order.default, "e9cad3c348bc641e"),
        # Computed with megatron-core 0.16.1's own build_blending_indices.
        (Order.megatron, "b080703c14ae5e1e"),
    ],
)
def test_the_order_of_unnormalized_weights_is_pinned(make_dataset: MakeDataset, order: Order, digest: str) -> None:
    """Catches weights divided by a sum other than Megatron's, and a sum that depends on the Python version."""
    prefixes = [make_dataset([SEQ_LEN + 1] * 300, name=f"set_{number}").prefix for number in range(len(ODD_WEIGHTS))]
    train = [DatasetConfig(prefix, weight) for prefix, weight in zip(prefixes, ODD_WEIGHTS, strict=True)]
    samples, _ = open_datasets(DataConfig(train=train, split=[1.0, 0.0], order=order), SEQ_LEN, 1, VOCAB_SIZE, 2000)
    assert isinstance(samples, BlendedSamples)
    datasets, _ = samples.place(np.arange(2000))
    assert hashlib.sha256(datasets.astype("<i2").tobytes()).hexdigest()[:16] == digest


def test_any_part_of_the_stream_can_be_asked_for_alone() -> None:
    """N2. Catches an assignment of samples that depends on earlier queries: ranks query parts, a resume later parts."""
    mix = MixSchedule([MixPhase(0, BalancedOrder([1, 2, 4])), MixPhase(100, BalancedOrder([3, 0, 1]))])
    chosen, places = mix.place(np.arange(300))
    picks = np.random.default_rng(0).permutation(300)[:150]
    assert [part.tolist() for part in mix.place(picks)] == [chosen[picks].tolist(), places[picks].tolist()]


def test_a_changed_mix_loses_and_repeats_nothing() -> None:
    """Catches a phase that restarts its datasets, or that skips samples."""
    mix = MixSchedule(
        [
            MixPhase(0, BalancedOrder([1, 2, 4])),
            MixPhase(97, BalancedOrder([3, 0, 1])),
            MixPhase(200, BalancedOrder([1, 1, 1])),
        ]
    )
    chosen, places = mix.place(np.arange(400))
    for dataset in range(3):
        assert places[chosen == dataset].tolist() == list(range(int(mix.counts(400)[dataset])))
    assert 1 not in chosen[97:200]
    assert (chosen[:97] == BalancedOrder([1, 2, 4]).place(np.arange(97))[0]).all()


@pytest.fixture
def blend(make_dataset: MakeDataset) -> DataConfig:
    """Datasets of 1500, 500 and 250 tokens."""
    names = {"web": 60, "code": 20, "books": 10}
    sets = [DatasetConfig(make_dataset([25] * count, name=name).prefix) for name, count in names.items()]
    return DataConfig(train=sets, weights=Weighting.tokens, split=[1.0, 0.0])


def batches(config: DataConfig, dp_rank: int, dp: int, start_sample: int = 0, steps: int = 4) -> tuple[list, list[str]]:
    samples, _ = open_datasets(config, SEQ_LEN, 3, VOCAB_SIZE, 96, BatchSizeSchedule(12))
    found, hashes = [], []
    with TrainLoader(samples, BatchSizeSchedule(12), LoaderShare(2, dp_rank, dp, VOCAB_SIZE), start_sample) as loader:
        for step in itertools.islice(loader, steps):
            hashes.append(step.batch_hash)
            for batch in step.micro_batches:
                assert batch.tokens_bs is not None
                found += list(zip(batch.info.sample_ids.tolist(), batch.tokens_bs.tolist(), strict=True))
    return sorted(found), hashes


def test_every_layout_and_resume_reads_the_same_blend(blend: DataConfig) -> None:
    """N2. Catches a blend or a skip that depends on the layout or on where the run started."""
    blend.skip = [SkipConfig(steps=[2, 2]), SkipConfig(samples=[30, 37])]
    blend.phases = [DataPhaseConfig(from_sample=40, weights=[1, 1, 1])]
    alone, hashes = batches(blend, 0, 1)
    by_rank = [batches(blend, rank, 3) for rank in range(3)]
    assert sorted(itertools.chain.from_iterable(found for found, _ in by_rank)) == alone and by_rank[1][1] == hashes
    assert batches(blend, 0, 1, start_sample=24, steps=2) == (alone[24:], hashes[2:])


def test_skipping_a_step_trains_on_the_samples_of_the_next(blend: DataConfig) -> None:
    """Catches a skip that batch_hash does not reflect, or that drops more samples than requested."""
    _, hashes = batches(blend, 0, 1, steps=5)
    blend.skip = [SkipConfig(steps=[2, 3])]
    assert batches(blend, 0, 1, steps=3)[1] == [hashes[0], *hashes[3:]]


def test_one_dataset_with_a_skip_keeps_its_hashes(blend: DataConfig) -> None:
    """Catches a skip that changes the batch hashes of other steps in a run of one dataset."""
    blend.train = blend.train[:1]
    _, hashes = batches(blend, 0, 1, steps=4)
    blend.skip = [SkipConfig(steps=[2, 2])]
    assert batches(blend, 0, 1, steps=3)[1] == [hashes[0], *hashes[2:]]


def test_batches_hold_the_tokens_and_masks_of_their_datasets(make_dataset: MakeDataset) -> None:
    """Catches rows or masks of one dataset written to rows of another, in batches that mix datasets."""
    sets = [make_dataset([25] * 40, name="web"), make_dataset([7, 30] * 20, name="code")]
    parts = [PackedSamples(sets[0], range(40), 31, 3), TrainSamples(sets[1], range(40), 31, 3)]
    blend, packing = BlendedSamples(parts, BalancedOrder([2, 1])), Packing(True, True, mask_eod=True)
    ids = np.random.default_rng(0).permutation(30)
    [mixed] = assemble(blend, ids[None], VOCAB_SIZE, True, packing)
    for row, (dataset, number) in enumerate(zip(*blend.place(ids), strict=True)):
        [alone] = assemble(parts[dataset], np.array([[number]]), VOCAB_SIZE, True, packing)
        for name in ("tokens_bs", "labels_bs", "loss_mask_bs"):
            assert getattr(mixed, name)[row].tolist() == getattr(alone, name)[0].tolist()
        assert mixed.info.document_starts[row].tolist() == alone.info.document_starts[0].tolist()


def test_packed_datasets_can_be_blended(blend: DataConfig) -> None:
    """Catches documents that are cut, an epoch counted in tokens, and a validation set that is not packed."""
    blend.packing, blend.document_mask, blend.reset_positions = PackingMode.best_fit, True, True
    blend.split = [0.5, 0.5]
    # A document of 25 tokens fills a sample of 26.
    train, valid = open_datasets(blend, 25, 3, VOCAB_SIZE, 45)
    assert isinstance(train, BlendedSamples) and train.counts_by_dataset(45).tolist() == [30, 10, 5]
    assert all((runs.places == 0).all() and (runs.lengths == 25).all() for runs in train.runs(np.arange(45)))
    assert {name: len(found) for name, found in valid.items()} == {"web": 30, "code": 10, "books": 5}
    with pytest.raises(ConfigError, match="max_epochs"):
        open_datasets(blend, 25, 3, VOCAB_SIZE, 60)
    blend.order = Order.megatron
    with pytest.raises(ConfigError, match=r"best_fit and data\.order = megatron"):
        blend.check()


def test_a_lone_dataset_with_a_weight_has_megatrons_surplus(make_dataset: MakeDataset) -> None:
    """Catches `--data-path 1.0 <prefix>` trained in the order of `--data-path <prefix>`: for 200 samples, Megatron
    builds and shuffles 201 where a weight makes it a blend of one dataset."""
    # One epoch holds 200 samples and not 201.
    dataset = make_dataset([SEQ_LEN] * 200 + [1])
    config = DataConfig(train=[DatasetConfig(dataset.prefix)], order=Order.megatron, split=[1.0, 0.0])

    def order(weight: float | None, skip: list[SkipConfig]) -> list[int]:
        config.train[0].weight, config.skip = weight, skip
        samples, _ = open_datasets(config, SEQ_LEN, 3, VOCAB_SIZE, 200)
        return [batch_of(samples, number) for number in range(200)]

    def batch_of(samples: TrainSamples | BlendedSamples, number: int) -> int:
        [batch] = assemble(samples, np.array([[number]]), VOCAB_SIZE, True, PLAIN)
        assert batch.tokens_bs is not None
        return hash(tuple(batch.tokens_bs[0].tolist()))

    expected = {built: MegatronSamples(dataset, range(201), SEQ_LEN, 3, built) for built in (200, 201)}
    wanted = {built: [batch_of(samples, number) for number in range(200)] for built, samples in expected.items()}
    assert wanted[200] != wanted[201]
    assert order(None, []) == wanted[200]
    assert order(1.0, []) == order(0.3, []) == wanted[201]
    # The length of the stream includes skipped samples: 190 samples and 10 skipped.
    config.train[0].weight = 1.0
    config.skip = [SkipConfig(samples=[0, 10])]
    skipped, _ = open_datasets(config, SEQ_LEN, 3, VOCAB_SIZE, 190)
    assert [batch_of(skipped, number) for number in range(190)] == wanted[201][10:]


@pytest.mark.parametrize(
    "weighting,temperature,expected",
    [(Weighting.tokens, 1.0, [6, 2, 1]), (Weighting.documents, 1.0, [6, 2, 1]),
     (Weighting.temperature, 2.0, [6**0.5, 2**0.5, 1.0])],
)  # fmt: skip
def test_weights_follow_temperature(
    blend: DataConfig, weighting: Weighting, temperature: float, expected: list[float]
) -> None:
    """Catches weights computed from the wrong size, and a temperature that is applied as its inverse."""
    blend.weights, blend.temperature = weighting, temperature
    samples, _ = open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE)
    assert isinstance(samples, BlendedSamples)
    shares = samples.counts_by_dataset(100_000) / 100_000
    assert shares == pytest.approx(np.array(expected) / sum(expected), abs=2e-5)


def test_no_dataset_is_repeated_without_max_epochs(blend: DataConfig) -> None:
    """Catches a small dataset repeated without max_epochs, and an error that omits how many samples are allowed."""
    blend.weights = Weighting.explicit
    for item, weight in zip(blend.train, (0.5, 0.25, 0.25), strict=True):
        item.weight = weight
    with pytest.raises(
        ConfigError, match=r"train\[2\].*31 samples an epoch.*200 samples takes 50 .*at most 12\d samples"
    ) as error:
        open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE, 200)
    enough = int(str(error.value).split("at most ")[1].split()[0])
    open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE, enough)
    with pytest.raises(ConfigError, match=r"train\[2\]"):
        open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE, enough + 1)
    blend.train[2].max_epochs = 1.7
    samples, _ = open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE, 200)
    taken = Counter(map(tuple, samples.sample_keys(np.arange(200)).tolist()))
    assert max(taken.values()) == 1


def test_a_single_dataset_is_repeated_without_a_limit(blend: DataConfig) -> None:
    """Catches an epoch limit without max_epochs, and a single dataset that is sampled as a blend."""
    blend.train = blend.train[:1]
    samples, _ = open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE, 10_000)
    assert isinstance(samples, TrainSamples)
    blend.train[0].max_epochs = 2
    with pytest.raises(ConfigError, match="max_epochs = 2 allows 374"):
        open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE, 375)


def test_validation_sets_have_names_of_their_own(blend: DataConfig, make_dataset: MakeDataset) -> None:
    """Catches validation sets that share a name, and a split that omits a dataset of the blend."""
    blend.split = [0.5, 0.5]
    train, valid = open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE)
    assert isinstance(train, BlendedSamples)
    assert [part.documents for part in train.parts] == [range(30), range(10), range(5)]
    assert {name: found.documents for name, found in valid.items()} == {
        "web": range(30, 60), "code": range(10, 20), "books": range(5, 10)
    }  # fmt: skip
    blend.valid = {"a": make_dataset([9], name="first").prefix, "b": make_dataset([5], name="second").prefix}
    _, valid = open_datasets(blend, SEQ_LEN, 3, VOCAB_SIZE)
    assert {name: found.num_predicted_tokens for name, found in valid.items()} == {"a": 8, "b": 4}


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"weights": Weighting.explicit}, r"train\[0\] .* weight = None"),
        ({"temperature": 0.0}, r"data\.temperature"),
        ({"phases": [DataPhaseConfig(10, [1, 2])]}, r"phases\[0\]\.weights = \[1, 2\]: want 3"),
        (
            {"phases": [DataPhaseConfig(10, [1, 2, 3]), DataPhaseConfig(10, [1, 2, 3])]},
            r"phases\[1\]\.from_sample = 10",
        ),
        ({"valid": {"a/b": "x"}}, r"the name 'a/b'"),
        ({"valid": ["x"]}, r"data\.valid = \['x'\]"),
    ],
)
def test_bad_blends_are_refused(blend: DataConfig, changes: dict[str, object], message: str) -> None:
    """Catches a wrong setting that is accepted and shows only as different blend proportions."""
    for name, value in changes.items():
        setattr(blend, name, value)
    with pytest.raises(ConfigError, match=message):
        blend.check()


@pytest.mark.parametrize(
    "weights", [[1.0], [3.0, 1.0], [0.0, 2.0, 5.0, 1e-9], np.random.default_rng(2).random(40).tolist()]
)
def test_small_queries_are_answered_like_large_ones(weights: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tree descent for small batches that rounds differently from the one for large batches: ranks of
    different layouts would train on different samples."""
    order, random = BalancedOrder(weights), np.random.default_rng(3)
    asked = [np.arange(7), np.empty(0, np.int64), random.integers(0, 10**6, 500), random.integers(2**40, 2**45, 500)]
    monkeypatch.setattr(module, "FEW", 10**9)
    few = [order.place(numbers) for numbers in asked]
    monkeypatch.setattr(module, "FEW", 0)
    for numbers, found in zip(asked, few, strict=True):
        for one, other in zip(found, order.place(numbers), strict=True):
            assert one.dtype == np.int64
            np.testing.assert_array_equal(one, other)


TOTAL = 400
NAMES = ("web", "code", "books", "maths")


def dealt(data: DataConfig, first: int, end: int) -> list[tuple[str, int]]:
    """Returns (dataset, sample index within it) of each sample from `first` to `end`."""
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
    """Catches changed weights, datasets or phases that also apply to past samples: datasets added, left out for a
    while, reordered, one alone, changed twice at the same sample."""

    def config(mix: list[tuple[int, float]], phase: int) -> DataConfig:
        train = [DatasetConfig(paths[number], weight, max_epochs=9) for number, weight in mix]
        phases = [DataPhaseConfig(phase, [weight for _, weight in reversed(mix)])] if phase else []
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


def test_a_changed_blend_leaves_past_samples_unchanged(paths: list[str]) -> None:
    """Catches a change of the blend that `why` or an older checkpoint applies from the first sample, a share that is
    not counted from the change on, and a repeat of the same command that is recorded as another change."""
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


def test_a_dataset_moved_to_another_path_continues(make_dataset: MakeDataset, paths: list[str]) -> None:
    """Catches a dataset moved to another path that is read from its beginning again."""
    before = DataConfig(train=[DatasetConfig(paths[0], 1), DatasetConfig(paths[1], 1)], split=[1.0, 0.0])
    moved = make_dataset([SEQ_LEN] * (TOTAL + 20), name="moved").prefix
    now = replace(before, train=[DatasetConfig(paths[0], 1), DatasetConfig(moved, 3)])
    one = DataConfig(train=[DatasetConfig(paths[1])], split=[1.0, 0.0])
    renamed = renamed_datasets(record_data(one), record_data(replace(one, train=[DatasetConfig(moved)])))
    assert renamed == {paths[1]: moved}
    data = continued(now, before, 100, train_weights, renamed)
    assert min(number for path, number in dealt(data, 100, 200) if path == moved) == 50
    assert paths[1] not in data.paths


def test_computed_weights_of_a_past_blend_are_kept(make_dataset: MakeDataset) -> None:
    """Catches token weights of a past blend that are recomputed from the current datasets."""
    prefixes = [make_dataset([SEQ_LEN] * count, name=name).prefix for count, name in ((300, "a"), (100, "b"))]
    train = [DatasetConfig(prefix, max_epochs=2) for prefix in prefixes]
    before = DataConfig(train=train, weights=Weighting.tokens, split=[1.0, 0.0])
    added = make_dataset([SEQ_LEN] * 500, name="c").prefix
    now = replace(before, train=[*before.train, DatasetConfig(added)])
    data = continued(now, before, 50, train_weights, {})
    assert list(data.history[0].weights.values()) == [2400, 800]
    assert list(data.history[1].weights.values()) == [2400, 800, 4000]
    assert dealt(data, 0, 50) == dealt(before, 0, 50)
