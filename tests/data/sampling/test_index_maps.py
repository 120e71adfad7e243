from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from megads.data.indexed.dataset import HEADER, MAGIC, IndexedDataset, bin_path, idx_path
from megads.data.indexed.writer import IndexedDatasetWriter
from megads.data.sampling import index_maps
from megads.data.sampling.cached_arrays import MapWriter
from megads.data.sampling.index_maps import (
    EpochMap,
    EpochMapCache,
    EpochMapKey,
    MapKey,
    build_sample_index,
    permutation,
)
from megads.errors import ConfigError
from megads.ops.build import KernelsUnavailable
from megads.ops.data_kernels import compiled_key_sort, data_function
from megads.runtime.files import atomic_writer
from megads.tools import megatron_order
from megads.tools.megatron_order import MegatronMapKey
from tests.data.conftest import MakeDataset


def brute_force(sizes: list[int], seq_len: int) -> list[list[int]]:
    """Lists the position of every token and takes each seq_len-th."""
    places = [[document, offset] for document, size in enumerate(sizes) for offset in range(size)]
    samples = max(len(places) - 1, 0) // seq_len
    return [places[sample * seq_len] for sample in range(samples + 1)]


def test_the_sample_index_equals_megatrons_known_vector() -> None:
    """Catches a sample index that differs from Megatron's on a known input."""
    assert build_sample_index(np.array([5, 3, 7], np.int32), 4).tolist() == [[0, 0], [0, 4], [2, 0], [2, 4]]


def test_the_sample_index_equals_brute_force() -> None:
    """Catches wrong sample boundaries: documents without tokens, samples across many documents, an exact fit."""
    random = np.random.default_rng(1)
    for _ in range(300):
        sizes = random.integers(0, random.integers(2, 12), random.integers(1, 20)).tolist()
        if sum(sizes) == 0:
            continue
        seq_len = int(random.integers(1, 15))
        assert build_sample_index(np.array(sizes, np.int32), seq_len).tolist() == brute_force(sizes, seq_len), sizes


def key_of(dataset: IndexedDataset, epoch: int = 0, seed: int = 7) -> EpochMapKey:
    return EpochMapKey(dataset.fingerprint(), 2, dataset.num_documents, 8, seed, epoch)


def assert_equal(first: EpochMap, second: EpochMap) -> None:
    for field in fields(EpochMap):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))


def test_each_epoch_is_its_own_permutation(make_dataset: MakeDataset) -> None:
    """Catches epochs that share one order, lose documents or leave the range, and a seed that is ignored."""
    dataset = make_dataset(range(3, 60))
    maps = [key_of(dataset, epoch, seed).build(dataset) for epoch, seed in ((0, 7), (1, 7), (0, 8))]
    for found in maps:
        assert sorted(found.document_order) == list(range(2, dataset.num_documents))
        assert sorted(found.shuffle) == list(range(len(found.sample_index) - 1))
    orders = {tuple(found.document_order) for found in maps}
    assert len(orders) == 3
    assert_equal(maps[1], key_of(dataset, 1).build(dataset))


def test_the_shuffled_order_is_pinned(make_dataset: MakeDataset) -> None:
    """Catches an order changed by an edit or another NumPy version: it would break every resumed run."""
    dataset = make_dataset([10] * 10)
    found = key_of(dataset).build(dataset)
    assert found.document_order.tolist() == [8, 5, 6, 2, 4, 9, 7, 3]
    assert found.shuffle.tolist() == [4, 3, 2, 5, 1, 6, 7, 0, 8]


def test_every_input_of_a_map_changes_its_cache_name() -> None:
    """Catches a cache that returns the map of another dataset, document range, sequence length, seed or epoch."""
    key = EpochMapKey("abc", 0, 10, 8, 1, 0)
    others = [
        replace(key, fingerprint="abd"), replace(key, first_document=1), replace(key, end_document=9),
        replace(key, seq_len=16), replace(key, seed=2), replace(key, epoch=1),
    ]  # fmt: skip
    assert len({other.name() for other in [key, *others]}) == 7


@pytest.fixture
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_maps, "SMALL_MAP_ENTRIES", 0)


def test_cached_maps_are_found_again_and_memory_mapped(make_dataset: MakeDataset, always_cached: None) -> None:
    """Catches cached files that are not found again, and maps that are copied into memory instead of memory-mapped."""
    dataset = make_dataset(range(3, 60))
    built = EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))
    folder = Path(f"{dataset.prefix}.cache")
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))
    assert len(times) == 4
    assert times == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert_equal(built, key_of(dataset).build(dataset))
    assert_equal(again, built)
    assert not again.sample_index.flags.owndata


@pytest.mark.parametrize("name", ["document_order.npy", "sample_index.npy", "shuffle.npy", ".json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove"])
def test_a_damaged_cache_is_rebuilt(make_dataset: MakeDataset, always_cached: None, name: str, damage: str) -> None:
    """Catches a flipped bit or a truncated file that silently changes the data order."""
    dataset = make_dataset(range(3, 60))
    cache = EpochMapCache(dataset.prefix)
    expected = key_of(dataset).build(dataset)
    cache.get(dataset, key_of(dataset))
    path = next(path for path in Path(f"{dataset.prefix}.cache").iterdir() if path.name.endswith(name))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes({"flip": bytes(content), "truncate": bytes(content[:-5]), "empty": b""}[damage])
    assert_equal(cache.get(dataset, key_of(dataset)), expected)
    assert_equal(cache.get(dataset, key_of(dataset)), expected)


def test_concurrent_builders_give_one_complete_map(make_dataset: MakeDataset, always_cached: None) -> None:
    """Catches ranks that build at the same time and read each other's incomplete files."""
    dataset = make_dataset(range(3, 60))
    expected = key_of(dataset).build(dataset)
    found: list[EpochMap] = []
    builders = [
        threading.Thread(target=lambda: found.append(EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))))
        for _ in range(8)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(found) == 8
    for one in found:
        assert_equal(one, expected)
    assert not list(Path(f"{dataset.prefix}.cache").glob("*.partial"))


def test_an_unwritable_folder_falls_back_to_the_users_cache(
    make_dataset: MakeDataset, always_cached: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a read-only dataset folder that ends a run."""
    dataset = make_dataset(range(3, 60))
    # A file of that name prevents creation of the folder, even for root.
    Path(f"{dataset.prefix}.cache").write_text("in the way")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    EpochMapCache(dataset.prefix).get(dataset, key_of(dataset))
    assert len(list((tmp_path / "home/.cache/megads").iterdir())) == 4


def test_a_given_cache_folder_must_work(make_dataset: MakeDataset, always_cached: None, tmp_path: Path) -> None:
    """Catches an explicitly configured cache folder that is silently not used."""
    dataset = make_dataset(range(3, 60))
    blocked = tmp_path / "blocked"
    blocked.write_text("in the way")
    with pytest.raises(ConfigError, match=r"data.cache_dir = .*blocked"):
        EpochMapCache(dataset.prefix, str(blocked)).get(dataset, key_of(dataset))


@pytest.fixture(params=["compiled", "NumPy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorts with the compiled kernel or with NumPy."""
    if request.param == "NumPy":
        monkeypatch.setattr(index_maps, "_compiled", lambda: None)
        return
    try:
        compiled_key_sort(print)
    except KernelsUnavailable as error:
        pytest.skip(f"no compiler here: {error}")


@pytest.fixture
def little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces several passes, pieces and blocks of rows even for small maps."""
    monkeypatch.setattr(index_maps, "MEMORY_BYTES", 1 << 14)
    for module in (index_maps, megatron_order):
        monkeypatch.setattr(module, "PIECE", 100)
    monkeypatch.setattr(index_maps, "ROWS", 70)


def written(dataset: IndexedDataset, key: MapKey, folder: Path, threads: int = 1) -> EpochMap:
    """The map, read from the files that the key writes."""
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
def test_the_compiled_permutation_equals_numpys(count: int, threads: int) -> None:
    """Catches a random generator, a thread's part or a range of keys that differs from NumPy's, which would change the
    order of every run, and a generator that is left in the wrong state afterwards."""
    random, expected = (np.random.PCG64(np.random.SeedSequence([3, count])) for _ in range(2))
    pieces = [piece.items for piece in index_maps.random_order(random, count, threads)]
    found = np.concatenate(pieces)
    np.testing.assert_array_equal(found, permutation(expected, count))
    assert random.random_raw() == expected.random_raw()


@pytest.mark.usefixtures("way", "little_at_a_time")
def test_maps_written_in_pieces_equal_maps_built_in_memory(tmp_path: Path) -> None:
    """Catches a boundary, size or random number lost between two pieces: all samples after it would differ."""
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
def test_documents_of_billions_of_tokens_do_not_overflow(tmp_path: Path) -> None:
    """Catches a document length that overflows 32 bits, which would shift all sample boundaries after it."""
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


def test_without_a_compiler_maps_are_slower(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a run that fails without a compiler, and one that is slow without a message that says why."""
    data_function.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    pieces = list(index_maps.random_order(np.random.PCG64(1), 500, 2))
    data_function.cache_clear()
    np.testing.assert_array_equal(
        np.concatenate([piece.items for piece in pieces]), permutation(np.random.PCG64(1), 500)
    )
    assert "sorting index maps with NumPy" in caplog.text and "no compiler CXX = no-such-compiler" in caplog.text


@pytest.fixture
def large(tmp_path: Path) -> IndexedDataset:
    """A dataset whose maps for samples of 4 tokens take 21 MB."""
    with IndexedDatasetWriter(tmp_path / "large", np.uint8) as writer:
        for _ in range(10_000):
            writer.append(np.zeros(420, np.uint8))
    return IndexedDataset(tmp_path / "large")


@pytest.mark.slow
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
    """Catches a build that holds a whole map in memory: 42 GB at 10^9 documents."""
    monkeypatch.setattr(index_maps, "MEMORY_BYTES", 1 << 20)
    for module in (index_maps, megatron_order):
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
