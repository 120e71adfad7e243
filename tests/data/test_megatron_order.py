"""Megatron's blend: the same choices however it is dealt, dealt once, and mapped."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megads.data import megatron_order
from megads.data.blend_config import DatasetConfig, Order
from megads.data.cached_arrays import ArrayCache
from megads.data.config import DataConfig
from megads.data.datasets import open_datasets
from megads.data.megatron_order import BLOCK, MegatronOrder
from megads.errors import ConfigError
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import Deal, compiled_deal, data_function

from .conftest import VOCAB_SIZE, MakeDataset

WEIGHTS = [5.0, 3.0, 2.0, 0.01]
SAMPLES = 3 * BLOCK + 5


@pytest.fixture(scope="session")
def compiled() -> Deal:
    """The compiled loop."""
    try:
        return compiled_deal(print)
    except KernelsUnavailable as error:
        pytest.skip(f"no compiler here: {error}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArrayCache:
    """An empty cache that takes orders of any size."""
    monkeypatch.setattr(megatron_order, "SMALL_ORDER_SAMPLES", -1)
    return ArrayCache(str(tmp_path / "corpus"))


def forbid_dealing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_order, "_fastest_deal", lambda: pytest.fail("dealt again"))


def test_the_blending_vector() -> None:
    """Catches an order that is not Megatron's: ties to the first dataset, the first sample counted as due."""
    datasets, places = MegatronOrder([5, 3, 2], 10).place(np.arange(10))
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0]
    assert places.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]


@pytest.mark.parametrize(
    "weights", [[1], [1, 1, 1], [0.3, 0.3, 0.4], [1e-9, 1], [3, 1, 4, 1, 5, 9, 2, 6], [0, 1, 0], None]
)
def test_both_ways_of_dealing_give_the_definition(weights: list[float] | None) -> None:
    """Catches a way of dealing that rounds or breaks ties otherwise than Megatron: one other choice moves all that
    follow. The definition, spelt out."""
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


@pytest.mark.parametrize("datasets", [*range(1, 23), 31, 32, 33, 100, 257])
def test_compiled_dealing_is_the_loop(compiled: Deal, datasets: int) -> None:
    """Catches a fused multiply-add, a lane that loses a tie or stands for no dataset, and a part that forgets what was
    dealt before it: equal, rational, random, lopsided and zero weights, from the first sample and from a late one."""
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


def test_numbers_in_any_order_and_part(cache: ArrayCache) -> None:
    """Catches places counted from the wrong block or lost by numbers out of order, beyond the end, or none at all."""
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
def test_cached_is_what_is_dealt_in_memory(cache: ArrayCache, monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    """Catches a file that a later start reads otherwise than the one that wrote it, at the borders of blocks."""
    numbers = np.arange(samples)
    expected = [found.tolist() for found in MegatronOrder(WEIGHTS, samples).place(numbers)]
    assert [found.tolist() for found in MegatronOrder(WEIGHTS, samples, cache).place(numbers)] == expected
    forbid_dealing(monkeypatch)
    again = MegatronOrder(WEIGHTS, samples, cache)
    assert [found.tolist() for found in again.place(numbers)] == expected
    assert not again._datasets.flags.owndata


def test_an_order_of_its_own_for_each_blend(cache: ArrayCache, tmp_path: Path) -> None:
    """Catches a cache that serves the order of other weights, which may differ in their last bits, or of another
    length."""
    nearly = [np.nextafter(WEIGHTS[0], 6), *WEIGHTS[1:]]
    for weights, samples in ((WEIGHTS, 99), (WEIGHTS[::-1], 99), (nearly, 99), (WEIGHTS, 98)):
        MegatronOrder(weights, samples, cache)
    assert len(list((tmp_path / "corpus.cache").glob("*.json"))) == 4


@pytest.mark.parametrize("name", ["datasets.npy", "counts.npy", ".json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_order_is_dealt_anew(cache: ArrayCache, tmp_path: Path, name: str, damage: str) -> None:
    """Catches a flipped bit or a half-written file changing the mix without a word."""
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


def test_opening_a_blend_deals_it_once(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that deal what the launcher dealt before them, and `data.cache_dir` that is not heard."""
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


def test_no_compiler_costs_time_only(
    cache: ArrayCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a run that needs a compiler, and one that is slow and does not say why."""
    expected = MegatronOrder(WEIGHTS, 999).place(np.arange(999))
    data_function.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        found = MegatronOrder(WEIGHTS, 999, cache).place(np.arange(999))
    data_function.cache_clear()
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    assert "dealing in Python" in caplog.text and "no compiler CXX = no-such-compiler" in caplog.text


def test_dealing_takes_the_memory_of_a_block(compiled: Deal, tmp_path: Path) -> None:
    """Catches an order that is whole in memory: 13 GB a rank at 10^12 tokens."""
    program = """
import resource, sys
import numpy as np
from megads.data.cached_arrays import ArrayCache
from megads.data.megatron_order import MegatronOrder
MegatronOrder([5.0, 3.0], 100_000, ArrayCache(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
order = MegatronOrder([5.0, 3.0], 40_000_000, ArrayCache(sys.argv[1]))
order.counts(40_000_000), order.place(np.arange(39_999_000, 40_000_000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "corpus")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # 80 MB are written and 320 MB would be places.
    assert int(done.stdout) < 20_000
