"""Index maps that are written piece by piece: the same as in memory, in less of it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from megads.data import index_maps, megatron_maps, random_order
from megads.data.index_maps import EpochMap, EpochMapCache, EpochMapKey, MapKey, permutation
from megads.data.indexed import IndexedDataset, IndexedDatasetWriter, bin_path, idx_path
from megads.data.indexed_header import HEADER, MAGIC
from megads.data.map_writer import MapWriter
from megads.data.megatron_maps import MegatronMapKey
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import compiled_key_sort, data_function
from megads.runtime.files import atomic_writer


@pytest.fixture(params=["compiled", "NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of sorting."""
    if request.param == "NumPy":
        monkeypatch.setattr(random_order, "_compiled", lambda: None)
        return
    try:
        compiled_key_sort(print)
    except KernelsUnavailable as error:
        pytest.skip(f"no compiler here: {error}")


@pytest.fixture
def little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several passes, pieces and blocks of rows even for small maps."""
    monkeypatch.setattr(random_order, "MEMORY_BYTES", 1 << 14)
    for module in (random_order, index_maps, megatron_maps):
        monkeypatch.setattr(module, "PIECE", 100)
    monkeypatch.setattr(index_maps, "ROWS", 70)


def written(dataset: IndexedDataset, key: MapKey, folder: Path, threads: int = 1) -> EpochMap:
    """The map as it is read from the files that the key writes."""
    key.write(dataset, MapWriter(lambda name: atomic_writer(folder / f"{name}.npy"), threads, lambda _: None))
    return EpochMap(**{field.name: np.load(folder / f"{field.name}.npy") for field in fields(EpochMap)})


def assert_same(found: EpochMap, expected: EpochMap) -> None:
    for field in fields(EpochMap):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype, field.name
        np.testing.assert_array_equal(one, other, field.name)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 255, 5000, 70_001])
@pytest.mark.usefixtures("way", "little_at_a_time")
def test_a_random_order_is_the_permutation(count: int, threads: int) -> None:
    """Catches a generator, a part of a thread or a range of keys that is not NumPy's, which would change the order of
    every run; and a generator that does not stand after what was drawn."""
    random, expected = (np.random.PCG64(np.random.SeedSequence([3, count])) for _ in range(2))
    pieces = [piece.items for piece in random_order.random_order(random, count, threads)]
    found = np.concatenate(pieces)
    np.testing.assert_array_equal(found, permutation(expected, count))
    assert random.random_raw() == expected.random_raw()


@pytest.mark.usefixtures("way", "little_at_a_time")
def test_maps_written_in_pieces_are_those_in_memory(tmp_path: Path) -> None:
    """Catches a cut, a size or a number that is lost between two pieces: all samples that follow would be others."""
    random = np.random.default_rng(5)
    for number, (documents, longest) in enumerate([(40, 30), (900, 4), (3000, 60), (30, 3000), (2500, 2)]):
        prefix = tmp_path / f"set_{number}"
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for size in random.integers(0, longest, documents).tolist():
                writer.append(np.zeros(size, np.uint16))
            writer.append([1] * 50)
        dataset = IndexedDataset(prefix)
        for first, seq_len in ((0, 1), (3, 7), (2, 40)):
            of_dataset = dataset.fingerprint(), first, dataset.num_documents, seq_len, number
            for key in (EpochMapKey(*of_dataset, number), MegatronMapKey(*of_dataset, 2 * documents, 0.8)):
                found, expected = written(dataset, key, tmp_path, 1 + number % 3), key.build(dataset)
                assert_same(found, expected)
                assert key.size_bytes(dataset) == sum(array.nbytes for array in vars(expected).values())


@pytest.mark.usefixtures("way")
def test_documents_of_several_sequences_and_billions_of_tokens(tmp_path: Path) -> None:
    """Catches a length that does not fit 32 bits, which would cut all samples after it elsewhere."""
    sizes = np.array([5, 2**31 - 1, 2**31 - 1, 2**31 - 1, 9, 1, 0, 4], "<i4")
    document_index = np.array([0, 1, 4, 4, 6, 8], "<i8")
    offsets = np.concatenate(([0], np.cumsum(sizes.astype(np.int64))[:-1])).astype("<i8")
    prefix = tmp_path / "long"
    header = HEADER.pack(MAGIC, 1, 1, sizes.size, document_index.size)
    idx_path(prefix).write_bytes(header + sizes.tobytes() + offsets.tobytes() + document_index.tobytes())
    with bin_path(prefix).open("wb") as file:
        file.truncate(int(sizes.sum(dtype=np.int64)))
    dataset = IndexedDataset(prefix)
    for seed in range(4):
        key = EpochMapKey(dataset.fingerprint(), 0, dataset.num_documents, 1 << 25, seed, 0)
        assert_same(written(dataset, key, tmp_path), key.build(dataset))


def test_no_compiler_costs_time_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a run that needs a compiler, and one that is slow and does not say why."""
    data_function.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    pieces = list(random_order.random_order(np.random.PCG64(1), 500, 2))
    data_function.cache_clear()
    np.testing.assert_array_equal(
        np.concatenate([piece.items for piece in pieces]), permutation(np.random.PCG64(1), 500)
    )
    assert "sorting index maps by NumPy" in caplog.text and "no compiler CXX = no-such-compiler" in caplog.text


@pytest.fixture
def large(tmp_path: Path) -> IndexedDataset:
    """A dataset whose maps for samples of 4 tokens have 21 MB."""
    with IndexedDatasetWriter(tmp_path / "large", np.uint8) as writer:
        for _ in range(10_000):
            writer.append(np.zeros(420, np.uint8))
    return IndexedDataset(tmp_path / "large")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "make_key",
    [
        lambda *of_dataset: EpochMapKey(*of_dataset, 0),
        lambda *of_dataset: MegatronMapKey(*of_dataset, 1_000_000, 0.8),
    ],
    ids=["epoch", "megatron"],
)
def test_a_build_takes_no_memory_of_the_size_of_the_map(
    large: IndexedDataset, monkeypatch: pytest.MonkeyPatch, make_key: Callable[..., MapKey]
) -> None:
    """Catches a build that holds a map: 42 GB at 10^9 documents."""
    monkeypatch.setattr(random_order, "MEMORY_BYTES", 1 << 20)
    for module in (random_order, index_maps, megatron_maps):
        monkeypatch.setattr(module, "PIECE", 1 << 12)
    monkeypatch.setattr(index_maps, "ROWS", 1 << 12)
    key = make_key(large.fingerprint(), 0, large.num_documents, 4, 1)
    cache = EpochMapCache(large.prefix)
    key.write(large, MapWriter(lambda name: atomic_writer(Path(f"{large.prefix}-{name}")), 1, lambda _: None))
    tracemalloc.start()
    try:
        found = cache.get(large, key)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(array.nbytes for array in vars(found).values()) > 20_000_000
    assert peak < 6_000_000
    assert_same(found, key.build(large))
