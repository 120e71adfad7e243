from __future__ import annotations

import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megads.data.config import DataConfig, DatasetConfig, Order
from megads.data.sampling.blend import BalancedOrder
from megads.data.sampling.cached_arrays import ArrayCache
from megads.data.sampling.datasets import open_datasets
from megads.data.sampling.loader import PLAIN, assemble
from megads.errors import ConfigError
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import Deal, compiled_deal, data_function
from megads.tools import megatron_order
from megads.tools.megatron_order import (
    BLOCK,
    MegatronMapKey,
    MegatronOrder,
    MegatronSamples,
    epochs_for,
    megatron_num_samples,
)
from tests.data.conftest import VOCAB_SIZE, MakeDataset
from tests.data.one_sample import row_of, tokens_of


@pytest.mark.always
def test_shuffles_equal_megatrons(make_dataset: MakeDataset) -> None:
    """Catches another generator, dtype or order of the shuffles; 1234 is the seed of the known vectors."""
    dataset = make_dataset([4, 4, 4, 4, 4, 4, 4, 3])
    found = MegatronMapKey(dataset.fingerprint(), 0, 8, 5, 1234, 6, 0.8).build(dataset)
    assert (found.document_order.tolist(), found.document_order.dtype) == ([2, 1, 6, 0, 4, 5, 3, 7], np.int32)
    assert (found.shuffle.tolist(), found.shuffle.dtype) == ([0, 4, 3, 2, 5, 1], np.uint32)


@pytest.mark.parametrize(
    "samples,theta,expected",
    [
        # With 100 tokens and S = 10, one epoch gives 9 samples and two give 19; the last gives those beyond 9.
        (9, 0.80, (1, None)), (10, 0.80, (2, 9)), (15, 0.80, (2, 9)), (16, 0.80, (2, None)), (16, 0.95, (2, 9)),
        (17, 0.95, (2, None)), (19, 0.80, (2, None)), (20, 0.80, (3, 19)),
    ],
)  # fmt: skip
def test_a_last_epoch_is_shuffled_as_in_megatron(samples: int, theta: float, expected: tuple[int, int | None]) -> None:
    """Catches an off-by-one threshold of the separate_last_epoch rule."""
    assert epochs_for(100, 10, samples, theta) == expected


def test_the_last_epoch_stays_last(make_dataset: MakeDataset) -> None:
    """Catches epochs shuffled together where Megatron separates the last one."""
    dataset = make_dataset([10] * 10)
    key = MegatronMapKey(dataset.fingerprint(), 0, 10, 10, 3, 22, 0.8)
    found = key.build(dataset)
    assert sorted(found.document_order[-10:]) == list(range(10))
    assert Counter(found.document_order.tolist()) == dict.fromkeys(range(10), 3)
    assert sorted(found.shuffle[:19]) == list(range(19)) and sorted(found.shuffle[19:]) == list(range(19, 29))


def test_a_blend_never_exceeds_the_samples_that_were_built(make_dataset: MakeDataset) -> None:
    """Catches a share that is rounded down: the greedy order takes one sample more than weight * samples."""
    weights = [0.003, 0.297, 0.7]
    taken = MegatronOrder(weights, 1000).counts(1000)
    shares = [megatron_num_samples(1000, weight) for weight in weights]
    assert all(taken <= shares) and taken.sum() == 1000
    samples = MegatronSamples(make_dataset([7] * 30), range(30), 5, 1, shares[1])
    assert samples.samples_per_map >= shares[1]
    # The loader prefetches beyond the end of a run.
    assert row_of(samples, samples.samples_per_map)[1] == row_of(samples, 0)[1]


def test_batches_are_in_megatrons_order(make_dataset: MakeDataset) -> None:
    """Catches a batch indexed by the default's epochs; a map of three epochs holds more samples than three epochs."""
    samples = MegatronSamples(make_dataset([7] * 30), range(30), 10, 1, 62)
    assert samples.samples_per_map == 62 and samples.samples_per_epoch == 20
    ids = np.arange(15, 80)
    [batch] = assemble(samples, ids[None], VOCAB_SIZE, True, PLAIN)
    assert batch.tokens_bs is not None
    for row, sample in enumerate(ids.tolist()):
        assert batch.tokens_bs[row].tolist() == tokens_of(samples, sample)[:-1]


def test_the_balanced_order_spares_a_tiny_dataset() -> None:
    """Catches a default order that is Megatron's, which samples a dataset of weight 0.0005 at once."""
    first = [order.counts(100)[1] for order in (MegatronOrder([0.9995, 0.0005], 100), BalancedOrder([0.9995, 0.0005]))]
    assert first == [1, 0]


WEIGHTS = [5.0, 3.0, 2.0, 0.01]
SAMPLES = 3 * BLOCK + 5


@pytest.fixture(scope="session")
def compiled() -> Deal:
    """The compiled blend."""
    try:
        return compiled_deal(print)
    except KernelsUnavailable as error:
        pytest.skip(f"no compiler here: {error}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArrayCache:
    """An empty cache that stores orders of any size."""
    monkeypatch.setattr(megatron_order, "SMALL_ORDER_SAMPLES", -1)
    return ArrayCache(str(tmp_path / "corpus"))


def forbid_dealing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_order, "_fastest_deal", lambda: pytest.fail("dealt again"))


def test_the_blend_order_equals_megatrons_known_vector() -> None:
    """Catches an order that is not Megatron's: ties go to the first dataset, and sample 0 counts as sample 1."""
    datasets, places = MegatronOrder([5, 3, 2], 10).place(np.arange(10))
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert places.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]


@pytest.mark.parametrize(
    "weights", [[1], [1, 1, 1], [0.3, 0.3, 0.4], [1e-9, 1], [3, 1, 4, 1, 5, 9, 2, 6], [0, 1, 0], None]
)
def test_both_implementations_equal_the_definition_of_the_blend(weights: list[float] | None) -> None:
    """Catches a blend that rounds or breaks ties differently from Megatron: one different choice shifts all later ones.
    Spells out the definition."""
    shares = np.random.default_rng(0).random(12) if weights is None else np.array(weights, np.float64)
    shares = shares / shares.sum()
    had, expected = [0] * shares.size, []
    for sample in range(3000):
        lags = [share * max(sample, 1) - count for share, count in zip(shares, had, strict=True)]
        chosen = lags.index(max(lags))
        expected.append((chosen, had[chosen]))
        had[chosen] += 1
    datasets, places = MegatronOrder(shares.tolist(), 3000).place(np.arange(3000))
    assert list(zip(datasets.tolist(), places.tolist(), strict=True)) == expected
    for deal in (megatron_order._deal_few, megatron_order._deal_many):
        dealt, count = np.empty(3000, np.int16), np.zeros(shares.size)
        deal(shares, count, 0, dealt)
        assert dealt.tolist() == datasets.tolist() and count.tolist() == had


@pytest.mark.quick("1", "2", "3", "7", "16", "257")
@pytest.mark.parametrize("datasets", [*range(1, 23), 31, 32, 33, 100, 257])
def test_the_compiled_blend_equals_the_loop(compiled: Deal, datasets: int) -> None:
    """Catches a fused multiply-add, a SIMD lane that loses a tie or stands for no dataset, and a part that ignores the
    counts of earlier parts: equal, rational, random, skewed and zero weights, from the first sample and a late one."""
    random = np.random.default_rng(datasets)
    zeros = np.where(np.arange(datasets) % 3 == 1, 0.0, 1.0)
    wholes = random.integers(1, 9, datasets).astype(float)
    for weights in (np.ones(datasets), wholes, random.random(datasets), random.pareto(1, datasets) + 1e-9, zeros):
        shares = weights / weights.sum()
        for first in (0, 10**9 + 7):
            had = np.floor(shares * first)
            expected, found = np.empty(1500, np.int16), np.empty(1500, np.int16)
            had_loop, had_compiled = had.copy(), had.copy()
            megatron_order._deal_in_python(shares, had_loop, first, expected)
            for begin, end in ((0, 1), (1, 700), (700, 1500)):
                compiled(shares, had_compiled, first + begin, found[begin:end])
            assert found.tolist() == expected.tolist()
            assert had_compiled.tolist() == had_loop.tolist()


def test_indices_may_be_asked_for_in_any_order(cache: ArrayCache) -> None:
    """Catches indices counted from the wrong block, or wrong for samples out of order, beyond the end, or none."""
    order = MegatronOrder(WEIGHTS, SAMPLES, cache)
    datasets, places = order.place(np.arange(SAMPLES))
    for dataset in range(len(WEIGHTS)):
        assert places[datasets == dataset].tolist() == list(range(int(order.counts(SAMPLES)[dataset])))
    picks = np.random.default_rng(0).integers(0, 2 * SAMPLES, 200)
    assert [found.tolist() for found in order.place(picks)] == [
        datasets[picks % SAMPLES].tolist(), places[picks % SAMPLES].tolist()
    ]  # fmt: skip
    assert [found.size for found in order.place(picks[:0])] == [0, 0]
    for total in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, SAMPLES):
        assert order.counts(total).tolist() == np.bincount(datasets[:total], minlength=len(WEIGHTS)).tolist()
    with pytest.raises(ConfigError, match=f"made for {SAMPLES} samples"):
        order.counts(SAMPLES + 1)


@pytest.mark.parametrize("samples", [BLOCK - 1, BLOCK, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_cached_blend_equals_one_in_memory(cache: ArrayCache, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    """Catches a cached order that a later start reads differently from the one that wrote it, at block boundaries."""
    numbers = np.arange(samples)
    expected = [found.tolist() for found in MegatronOrder(WEIGHTS, samples).place(numbers)]
    assert [found.tolist() for found in MegatronOrder(WEIGHTS, samples, cache).place(numbers)] == expected
    forbid_dealing(monkeypatch)
    again = MegatronOrder(WEIGHTS, samples, cache)
    assert [found.tolist() for found in again.place(numbers)] == expected
    assert not again._datasets.flags.owndata


def test_each_blend_has_its_own_cached_order(cache: ArrayCache, tmp_path: Path) -> None:
    """Catches a cached order of other weights, which may differ only in their last bits, or of another length."""
    nearly = [np.nextafter(WEIGHTS[0], 6), *WEIGHTS[1:]]
    for weights, samples in ((WEIGHTS, 99), (WEIGHTS[::-1], 99), (nearly, 99), (WEIGHTS, 98)):
        MegatronOrder(weights, samples, cache)
    assert len(list((tmp_path / "corpus.cache").glob("*.json"))) == 4


@pytest.mark.parametrize("name", ["datasets.npy", "counts.npy", ".json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_cached_blend_is_rebuilt(cache: ArrayCache, tmp_path: Path, name: str, damage: str) -> None:
    """Catches a flipped bit or a partially written file that silently changes the blend."""
    expected = MegatronOrder(WEIGHTS, SAMPLES, cache).place(np.arange(SAMPLES))
    path = next(path for path in (tmp_path / "corpus.cache").iterdir() if path.name.endswith(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(content), "truncate": bytes(content[:-5]), "empty": b""}[damage])
    for _ in range(2):
        found = MegatronOrder(WEIGHTS, SAMPLES, cache).place(np.arange(SAMPLES))
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]


def test_a_blends_order_is_computed_once(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that recompute the order that the launcher computed, and `data.cache_dir` ignored."""
    monkeypatch.setattr(megatron_order, "SMALL_ORDER_SAMPLES", -1)
    sets = [DatasetConfig(make_dataset([9] * 300, name=name).prefix, 1.0) for name in ("web", "code")]
    config = DataConfig(train=sets, split=[1.0, 0.0], order=Order.megatron)
    config.cache_dir = str(Path(sets[0].path).parent / "maps")
    open_datasets(config, 8, 1, VOCAB_SIZE, 500)
    assert len(list(Path(config.cache_dir).glob("*-megatron-blend*"))) == 3
    forbid_dealing(monkeypatch)
    open_datasets(config, 8, 1, VOCAB_SIZE, 500)
    config.cache_dir = sets[0].path + ".bin"
    with pytest.raises(ConfigError, match=r"data\.cache_dir = .*cannot write the order of the blend there"):
        open_datasets(config, 8, 1, VOCAB_SIZE, 500)


def test_without_a_compiler_blends_are_only_slower(
    cache: ArrayCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a run that needs a compiler, and one that is slow without a warning."""
    expected = MegatronOrder(WEIGHTS, 999).place(np.arange(999))
    data_function.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        found = MegatronOrder(WEIGHTS, 999, cache).place(np.arange(999))
    data_function.cache_clear()
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    assert "blending in Python" in caplog.text and "no compiler CXX = no-such-compiler" in caplog.text


def test_a_blend_is_built_in_the_memory_of_one_block(compiled: Deal, tmp_path: Path) -> None:
    """Catches an order held in memory as a whole: 13 GB a rank at 10^12 tokens."""
    program = """
import resource, sys
import numpy as np
from megads.data.sampling.cached_arrays import ArrayCache
from megads.tools.megatron_order import MegatronOrder
MegatronOrder([5.0, 3.0], 100_000, ArrayCache(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
order = MegatronOrder([5.0, 3.0], 40_000_000, ArrayCache(sys.argv[1]))
order.counts(40_000_000), order.place(np.arange(39_999_000, 40_000_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "corpus")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The order on disk takes 80 MB; sample indices in memory would take 320 MB.
    assert int(done.stdout) < 20_000
